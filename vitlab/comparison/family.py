"""The family of comparisons that are corrected together: what was registered, and what was added later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from vitlab.plan.registration import added_comparisons, altered_arms, changes, results_before_registration
from vitlab.plan.values import Plan


@dataclass(frozen=True)
class Family:
    """The comparisons of a plan: registered ones are corrected for these alone, later ones for all.

    Registered comparisons that were dropped still count.
    """

    sizes: Mapping[str, int]  #: arm to the number of comparisons that its own is corrected for
    later: frozenset[str]  #: arms whose comparison was added after the first run
    exploratory: Mapping[str, str]  #: arm to what of its comparison was decided after the first run

    @classmethod
    def of(cls, plan: Plan, compared: Mapping[str, str]) -> Family:
        """Return the family of a plan's comparisons, given arm to baseline."""
        later = added_comparisons(plan) & compared.keys()
        registered = len(compared) - len(later)
        dropped = 0 if plan.registered is None else max(0, len(plan.registered["family"]) - registered)
        sizes = {arm: dropped + (len(compared) if arm in later else registered) for arm in compared}
        causes: dict[str, list[str]] = {arm: changes(plan) for arm in compared}
        for cause, arms in (
            ("this comparison was added after the first run", later),
            ("results of it were there before it was registered", set(results_before_registration(plan)[2])),
        ):
            for arm in arms & compared.keys():
                causes[arm] = [*causes[arm], cause]
        for altered in altered_arms(plan):
            for arm in (arm for arm, baseline in compared.items() if altered in (arm, baseline)):
                causes[arm] = [*causes[arm], f"arm '{altered}' was changed after results were seen"]
        return cls(sizes, frozenset(later), {arm: "; ".join(texts) for arm, texts in causes.items()})
