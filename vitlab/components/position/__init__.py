"""Position encodings.

contract.py     the five hooks of an encoding
resampling.py   resampling to grids of another size, with the settings of each library
additive.py     none, learned, learned2d, sinusoidal, sincos2d, fourier
rotary.py       rope2d, rope2d_mixed
relative.py     relative_bias, alibi2d
conditional.py  conditional
"""

from vitlab.components.position import additive, conditional, relative, rotary
from vitlab.components.position.contract import Position as Position
from vitlab.components.position.contract import Rotation as Rotation
from vitlab.components.position.contract import position as position
from vitlab.components.position.resampling import PRESETS as PRESETS
from vitlab.components.position.resampling import Resampling as Resampling

__all__ = ["PRESETS", "Position", "Resampling", "Rotation", "additive", "conditional", "position", "relative", "rotary"]
