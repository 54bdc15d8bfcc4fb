"""Optimizers, their parameter groups, and learning rate schedules.

contract.py             the slot ``optimizer``, and an optimizer made of several
groups.py               weight decay, layers, and the hidden matrices of a model
torch_optimizers.py     adamw, adam, sgd, adafactor
library_optimizers.py   lamb and lion of timm, soap of pytorch-optimizer, schedule_free of schedulefree
muon.py                 muon, normuon
joint.py                a step of several trainings at once
schedules.py            the slot ``schedule``
"""

from vitlab.training.optim.contract import Composite, Group, Optimizer, WeightAverage, eager, fused, optimizer
from vitlab.training.optim.groups import decay_groups, hidden_matrices, layer_groups, set_rate
from vitlab.training.optim.joint import Joint
from vitlab.training.optim.schedules import Cosine, Schedule, schedule
from vitlab.training.optim.torch_optimizers import SGD, Adam, AdamW

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "Composite",
    "Cosine",
    "Group",
    "Joint",
    "Optimizer",
    "Schedule",
    "WeightAverage",
    "decay_groups",
    "eager",
    "fused",
    "hidden_matrices",
    "layer_groups",
    "optimizer",
    "schedule",
    "set_rate",
]
