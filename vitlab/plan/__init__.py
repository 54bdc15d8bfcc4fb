"""Planning: from a study to arms and trials with keys.  Builds no model and reads no pixels."""

from vitlab.plan.expand import make_plan as make_plan
from vitlab.plan.values import Arm as Arm
from vitlab.plan.values import Plan as Plan
from vitlab.plan.values import Planned as Planned
from vitlab.plan.values import Trial as Trial
