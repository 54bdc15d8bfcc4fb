"""Position encodings.

contract.py     the five hooks of an encoding; resampling to other grids, with the settings of each library
additive.py     none, learned, learned2d, sinusoidal, sincos2d, fourier, conditional
rotary.py       rope2d, rope2d_mixed
relative.py     relative_bias, alibi2d
combined.py     together, written as a list of the others
"""

from vitlab.components.position.combined import choices_of, encodings
from vitlab.components.position.contract import PRESETS, Position, Resampling, position, resample_grid

__all__ = [
    "PRESETS",
    "Position",
    "Resampling",
    "choices_of",
    "encodings",
    "position",
    "resample_grid",
]
