"""Position encodings.

contract.py     the five hooks of an encoding; resampling to other grids, with the settings of each library
additive.py     none, learned, learned2d, sinusoidal, sincos2d, fourier, conditional
rotary.py       rope2d, rope2d_mixed
relative.py     relative_bias, alibi2d
together.py     together, written as a list of the others
"""

from vitlab.components.position import additive, relative, rotary, together
from vitlab.components.position.contract import PRESETS as PRESETS
from vitlab.components.position.contract import Position as Position
from vitlab.components.position.contract import Resampling as Resampling
from vitlab.components.position.contract import Rotation as Rotation
from vitlab.components.position.contract import position as position
from vitlab.components.position.contract import resample_grid as resample_grid
from vitlab.components.position.together import choices_of as choices_of
from vitlab.components.position.together import encodings as encodings

__all__ = ["PRESETS", "Position", "Resampling", "Rotation", "additive", "position", "relative", "rotary", "together"]
