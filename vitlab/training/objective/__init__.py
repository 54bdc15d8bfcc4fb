"""The slot ``objective``: what a training minimises, and what its evaluations measure.

contract.py     the contract
supervised.py   supervised: a loss on labels, with mixing and distillation
dino.py         dino: self-distillation of views of an image
mae.py          mae: hidden patches reconstructed from visible ones
"""

from vitlab.training.objective.contract import Objective, Setup, objective

__all__ = ["Objective", "Setup", "objective"]
