"""Attentions over tokens.

contract.py       the contract and its canonical weights; rotation of queries and keys
softmax.py        explicit, sdpa, auto, split, per_head: one function
gated.py          gated: a sigmoid gate on what the attention returns
sigmoid.py        sigmoid: a sigmoid in the place of the softmax
differential.py   differential: the difference of two maps
"""

from vitlab.components.attention import differential, gated, sigmoid, softmax
from vitlab.components.attention.contract import Attention as Attention
from vitlab.components.attention.contract import MixValues as MixValues
from vitlab.components.attention.contract import Rotation as Rotation
from vitlab.components.attention.contract import attention as attention
from vitlab.components.attention.contract import rotate as rotate
from vitlab.components.attention.softmax import SDPA as SDPA
from vitlab.components.attention.softmax import SOFTMAX as SOFTMAX
from vitlab.components.attention.softmax import Auto as Auto
from vitlab.components.attention.softmax import OneHead as OneHead
from vitlab.components.attention.softmax import SoftmaxAttention as SoftmaxAttention

__all__ = [
    "SDPA",
    "SOFTMAX",
    "Attention",
    "Auto",
    "MixValues",
    "OneHead",
    "Rotation",
    "SoftmaxAttention",
    "attention",
    "differential",
    "gated",
    "rotate",
    "sigmoid",
    "softmax",
]
