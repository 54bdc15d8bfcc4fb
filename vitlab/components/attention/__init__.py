"""Attentions over tokens.

contract.py       the contract and its canonical weights; rotation of queries and keys
softmax.py        explicit, sdpa, auto, split, per_head: one function; gated and sigmoid, which change it
differential.py   differential: the difference of two maps
"""

from vitlab.components.attention.contract import Attention, MixValues, attention, rotate
from vitlab.components.attention.softmax import SDPA, SOFTMAX, Auto, OneHead, SoftmaxAttention
from vitlab.components.base import Rotation

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
    "rotate",
]
