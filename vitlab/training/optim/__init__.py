"""Optimizers, their parameter groups, and learning rate schedules.

contract.py       the slot ``optimizer``, and an optimizer made of several
groups.py         weight decay, layers, and the hidden matrices of a model
elementwise.py    adamw, adam, sgd
adafactor.py      adafactor
lamb.py, lion.py  lamb and lion, of timm
muon.py           muon, normuon
soap.py           soap, of pytorch-optimizer
schedule_free.py  schedule_free, of schedulefree
joint.py          a step of several trainings at once
schedules.py      the slot ``schedule``
"""

from vitlab.training.optim import adafactor, elementwise, lamb, lion, muon, schedule_free, soap
from vitlab.training.optim.contract import Composite as Composite
from vitlab.training.optim.contract import Group as Group
from vitlab.training.optim.contract import Optimizer as Optimizer
from vitlab.training.optim.contract import WeightAverage as WeightAverage
from vitlab.training.optim.contract import eager as eager
from vitlab.training.optim.contract import fused as fused
from vitlab.training.optim.contract import optimizer as optimizer
from vitlab.training.optim.elementwise import SGD as SGD
from vitlab.training.optim.elementwise import Adam as Adam
from vitlab.training.optim.elementwise import AdamW as AdamW
from vitlab.training.optim.groups import decay_groups as decay_groups
from vitlab.training.optim.groups import hidden_matrices as hidden_matrices
from vitlab.training.optim.groups import layer_groups as layer_groups
from vitlab.training.optim.groups import set_rate as set_rate
from vitlab.training.optim.groups import split_groups as split_groups
from vitlab.training.optim.joint import Joint as Joint
from vitlab.training.optim.schedules import Cosine as Cosine
from vitlab.training.optim.schedules import Schedule as Schedule
from vitlab.training.optim.schedules import schedule as schedule

__all__ = ["adafactor", "elementwise", "lamb", "lion", "muon", "schedule_free", "soap"]
