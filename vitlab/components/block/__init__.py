"""Blocks: how attention and the MLP are normalised, and joined to the path around them.

contract.py     the parts of a block, its place in the model, layer scale
prenorm.py      prenorm, the default
postnorm.py     postnorm, respostnorm, sandwich: norms after the branches
parallel.py     parallel: attention and MLP side by side; parallel_things: several attentions, then several MLPs
gated.py        gated: a learned gate in the place of each sum
token_merging.py    token_merging: similar tokens merged between attention and MLP
value_residual.py   value_residual: values of the first block in later ones
"""

from vitlab.components.block import gated, parallel, postnorm, prenorm, token_merging, value_residual
from vitlab.components.block.contract import Block as Block
from vitlab.components.block.contract import LayerScale as LayerScale
from vitlab.components.block.contract import Place as Place
from vitlab.components.block.contract import Role as Role
from vitlab.components.block.contract import block as block

__all__ = [
    "Block",
    "LayerScale",
    "Place",
    "Role",
    "block",
    "gated",
    "parallel",
    "postnorm",
    "prenorm",
    "token_merging",
    "value_residual",
]
