"""Planning: from a study to arms and trials with keys.  Builds no model and reads no pixels."""

from vitlab.planning.expand import make_plan
from vitlab.planning.values import Arm, Plan, Planned, Trial

__all__ = [
    "Arm",
    "Plan",
    "Planned",
    "Trial",
    "make_plan",
]
