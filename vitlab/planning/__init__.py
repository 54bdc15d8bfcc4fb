"""Planning: from a study to arms and trials with keys.  Builds no model and reads no pixels."""

from vitlab.planning.expand import Machine, make_plan
from vitlab.planning.values import Arm, Plan, Planned, Trial

__all__ = [
    "Arm",
    "Machine",
    "Plan",
    "Planned",
    "Trial",
    "make_plan",
]
