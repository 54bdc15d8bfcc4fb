"""Blocks: how attention and the MLP are normalised, and joined to the path around them.

contract.py     the parts of a block, its place in the model, layer scale
residual.py     prenorm, the default; postnorm, respostnorm, sandwich; parallel, parallel_things
gated.py        gated: a learned gate in the place of each sum
token_merging.py    token_merging: similar tokens merged between attention and MLP
value_residual.py   value_residual: values of the first block in later ones
"""

from vitlab.components.block.contract import Block, LayerScale, Place, Role, block

__all__ = ["Block", "LayerScale", "Place", "Role", "block"]
