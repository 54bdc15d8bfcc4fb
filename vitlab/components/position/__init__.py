"""Position encodings.

contract.py     the five hooks of an encoding; resampling to other grids, with the settings of each library
additive.py     none, learned, learned2d, sinusoidal, sincos2d, fourier, conditional
rotary.py       rope2d, rope2d_mixed
relative.py     relative_bias, alibi2d
"""

from vitlab.components.position import additive, relative, rotary
from vitlab.components.position.contract import PRESETS as PRESETS
from vitlab.components.position.contract import Position as Position
from vitlab.components.position.contract import Resampling as Resampling
from vitlab.components.position.contract import Rotation as Rotation
from vitlab.components.position.contract import position as position
from vitlab.components.position.contract import resample_grid as resample_grid

__all__ = ["PRESETS", "Position", "Resampling", "Rotation", "additive", "position", "relative", "rotary"]
