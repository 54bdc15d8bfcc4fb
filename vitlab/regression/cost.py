"""Time and memory of two revisions, measured in turns on one machine.

A measurement is a process that trains one arm for about a second, after some steps of warm-up, and prints the seconds
of an image and the peak memory.  In a round, every arm is measured under both revisions, one right after the other and
the other way round in the next round, so that other load on the machine affects both alike.

The median of the ratios over rounds has the exact interval of the sign test, which asks nothing of the distribution of
the noise.  It holds for all arms and quantities of a study at once (Bonferroni).  The number of rounds allows one
outlier on each side.

Reference: Conover (1999), Practical Nonparametric Statistics, section 3.2.
"""

import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from vitlab.driver.session import Watch, iterate_with_time_left
from vitlab.errors import format_count
from vitlab.regression.checkout import Revision
from vitlab.regression.decide import Finding, Verdict
from vitlab.report.phrasing import percent
from vitlab.spec import Study

QUANTITIES = ("time", "memory")
SPARE_ROUNDS = 4  #: beyond the fewest that give an interval


def measure_and_judge_costs(
    study: Study, old: Revision, new: Revision, arms: Sequence[str], request: Mapping[str, object], watch: Watch
) -> Iterator[Finding]:
    """Measure arms of a study under two revisions, and judge the limits of their costs; costs without a limit pass.

    ``request`` has ``file``, ``changes`` and ``out``, as for :func:`vitlab.run`.
    """
    from scipy.stats import quantile_test

    alpha = study.check.alpha
    level = 1 - alpha / (len(arms) * len(QUANTITIES))
    rounds = math.ceil(-math.log2((1 - level) / 2)) + SPARE_ROUNDS
    watch.say(f"cost: {rounds} rounds of {format_count(len(arms), 'arm')} by {old.name} and {new.name} in turns")
    ratios = defaultdict[tuple[str, str], list[float]](list)
    for number in iterate_with_time_left("cost: round", range(rounds), watch):
        for arm in arms:
            costs = {}
            for revision in (old, new) if number % 2 else (new, old):
                words = json.dumps({**request, "plugins": revision.plugins}, default=str)
                output = revision.run_python("-m", "vitlab.regression.cost", arm, words)
                costs[revision is new] = json.loads(output.splitlines()[-1])
            for quantity in QUANTITIES:
                ratios[arm, quantity].append(costs[True][quantity] / costs[False][quantity])
    for (arm, quantity), values in ratios.items():
        ends, limit = quantile_test(values, p=0.5).confidence_interval(level), getattr(study.check.cost, quantity, None)
        interval = f"simultaneous {percent(1 - alpha)} interval {ends.low:.3f} to {ends.high:.3f}"
        sentence = f"{statistics.median(values):.3f} times as before ({interval}, {rounds} rounds in turns)"
        verdict: Verdict = "pass"
        if limit is not None:
            verdict = "regressed" if ends.low > limit else "pass" if ends.high <= limit else "inconclusive"
            sentence += f"{', which cannot tell' * (verdict == 'inconclusive')}; at most {limit:g} times is allowed"
        yield Finding(arm, quantity, verdict, sentence)


def measure_and_print(arm: str, request_json: str) -> None:
    """Measure an arm of a study, given as JSON, in this process, and print its cost as JSON."""
    from vitlab import lab
    from vitlab.driver import benchmark

    request = json.loads(request_json)
    study, plan = lab.plan_study(**request)
    planned = next(planned for planned in plan.trials if planned.arm == arm)
    cost = benchmark.measure_speed_and_memory(
        plan, planned, benchmark.measurement_settings(study.run, request["plugins"])
    )
    # Where peaks are unknown, there is no ratio of them.
    print(json.dumps({"time": 1 / cost["train_images_per_s"], "memory": cost["peak_bytes"] or math.nan}))


if __name__ == "__main__":
    measure_and_print(*sys.argv[1:])
