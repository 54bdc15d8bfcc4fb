"""Tests of ``vitlab plan --power``: spread from earlier trainings, and what a study will detect."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import synthetic_studies
from click.testing import CliRunner
from scipy import stats
from test_escalation import study as tiny_study

from vitlab import lab
from vitlab.cli import cli
from vitlab.comparison.arrays import Comparisons, judge_studies
from vitlab.errors import UserError
from vitlab.planning.study_folder import write_registered_plan
from vitlab.planning.values import Plan
from vitlab.report.power import detectable_difference, forecast
from vitlab.spec import Analysis
from vitlab.store.folders import Store

pytestmark = pytest.mark.usefixtures("no_figures")


def stored(root: Path, sd: float, arms: int = 4, seeds: int = 5, seed: int = 0) -> tuple[Plan, Store]:
    """Return a study whose values scatter by ``sd`` around 0.8."""
    draws = np.random.default_rng(seed)
    names = ["baseline", *(f"arm{number}" for number in range(1, arms))]
    values = {name: draws.normal(0.8, sd, seeds).tolist() for name in names}
    plan, store = synthetic_studies.study(root, values, analysis=Analysis(variance="own"))
    write_registered_plan(plan, store)
    return plan, store


def test_spread_is_pooled_over_comparisons(tmp_path: Path) -> None:
    plan, store = stored(tmp_path, 0.01)
    predicted = forecast(plan, store)
    from vitlab.report.frame import StudyResults

    values = StudyResults.read(plan, store).values
    # The variance of a difference is the mean over all pairs of arms.
    variances = [
        np.var([values[first][seed] - values[second][seed] for seed in range(5)], ddof=1)
        for first, second in itertools.combinations(values, 2)
    ]
    assert (predicted.kind, predicted.comparisons) == ("of this study", 3)
    assert predicted.sd == pytest.approx(math.sqrt(np.mean(variances)))
    assert predicted.sd_low < predicted.sd < predicted.sd_high
    at = dict(predicted.detectable)
    # By the noncentral t distribution, at a third of alpha.
    bound = stats.t.isf(0.05 / 3 / 2, 4)
    shift = at[5] / predicted.sd * math.sqrt(5)
    assert stats.nct.sf(bound, 4, shift) == pytest.approx(0.8, abs=0.03)
    assert list(at) == sorted(at) and list(at.values()) == sorted(at.values(), reverse=True)


@pytest.mark.slow
def test_predicted_power_is_realised_in_most_studies(tmp_path: Path) -> None:
    """The ratio of realised and predicted power is from 0.75 to 1.33 in at least 80 % of studies."""
    sd, seeds, within = 0.01, 5, 0
    draws = np.random.default_rng(9).normal(size=(1_500, 5, seeds))
    for number in range(30):
        effect = dict(forecast(*stored(tmp_path / str(number), sd, arms=5, seed=number)).detectable)[seeds]
        shift = effect / sd
        values = draws + np.where(np.arange(5) == 1, shift, 0.0)[:, None]
        judged = judge_studies(values, Comparisons.all_with_first(4))
        realised = (judged.contrasts.p_corrected[:, 0] <= 0.05).mean()
        within += 0.75 <= realised / 0.8 <= 1.33
    assert within >= 24


def test_comparisons_that_share_detect_what_simulation_says() -> None:
    """Standard deviations of a seed, from simulations by another program."""
    for (seeds, family), simulated in {(3, 3): 5.6, (3, 10): 6.1, (5, 10): 3.2, (10, 10): 1.9, (5, 5): 3.0}.items():
        predicted = math.sqrt(2) * detectable_difference(seeds, family, 0.05, "bonferroni", "shared")
        assert predicted == pytest.approx(simulated, rel=0.05), (seeds, family)


@pytest.mark.parametrize(("n", "family"), [(5, 1), (10, 4), (40, 50)])
def test_own_variances_have_the_power_of_student_t(n: int, family: int) -> None:
    bound = stats.t.isf(0.05 / family / 2, n - 1)
    shift = detectable_difference(n, family, 0.05, "bonferroni", "own") * math.sqrt(n)
    assert stats.nct.sf(bound, n - 1, shift) == pytest.approx(0.8, abs=0.03)


def test_like_trainings_are_preferred_to_others(tmp_path: Path) -> None:
    _, store = stored(tmp_path, 0.01)
    plan, _ = stored(tmp_path / "other", 0.5)
    planned = replace(
        plan,
        study="planned",
        trials=tuple(replace(item, trial=replace(item.trial, key=f"new{n}")) for n, item in enumerate(plan.trials)),
    )
    assert forecast(planned, store).kind == "of like trainings"
    longer = item_with_steps(planned, 10_000)
    assert forecast(longer, store).kind == "on the same data"
    elsewhere = replace(
        planned,
        trials=tuple(replace(item, trial=replace(item.trial, data="sha256:other")) for item in planned.trials),
    )
    with pytest.raises(UserError, match="too few earlier trainings on this data"):
        forecast(elsewhere, store)


def test_forecast_names_no_difference_beyond_the_range_of_the_metric(tmp_path: Path) -> None:
    plan, store = stored(tmp_path, 0.4, arms=2, seeds=5)
    predicted = forecast(plan, store)
    few, at = dict(predicted.detectable)[3], dict(predicted.detectable)[5]
    assert few > 1 > at and at * predicted.sd_high / predicted.sd > 1, "of accuracies, from 0 to 1"
    sentence = predicted.sentences(plan)[1]
    assert "to more than 100.0) is found" in sentence and "; more than 100.0 with 3," in sentence


def item_with_steps(plan: Plan, steps: int) -> Plan:
    from vitlab.spec import TrialSpec

    def longer(trial):
        spec = trial.spec.plain()
        return replace(trial, spec=TrialSpec.model_validate({**spec, "train": {**spec["train"], "steps": steps}}))

    return replace(plan, trials=tuple(replace(item, trial=longer(item.trial)) for item in plan.trials))


def test_trainings_that_studies_share_count_once(tmp_path: Path) -> None:
    plan, store = stored(tmp_path, 0.01)
    once = forecast(plan, store)
    part = replace(plan, study="part", arms=plan.arms[:2], trials=tuple(item for item in plan.trials if item.seed < 4))
    write_registered_plan(
        replace(part, trials=tuple(item for item in part.trials if item.arm in ("baseline", "arm1"))), store
    )
    again = forecast(plan, store)
    assert (again.comparisons, again.sd, again.sd_low) == (once.comparisons, once.sd, once.sd_low)
    single = replace(plan, trials=tuple(item for item in plan.trials if item.seed == 0))
    assert "With 3 seeds" in forecast(single, store).sentences(single)[1]


@pytest.mark.slow
def test_command_prints_forecast_or_what_is_missing(tmp_path: Path) -> None:
    file, out = tiny_study(tmp_path, 3, analysis={}), tmp_path / "out"
    words = ["plan", str(file), "--out", str(out), "--power"]
    before = CliRunner().invoke(cli, words)
    assert isinstance(before.exception, UserError)
    lab.run(file, out=out)
    printed = CliRunner().invoke(cli, words)
    assert printed.exit_code == 0 and "2 earlier comparisons of this study (tiny)" in printed.output
    assert "With 3 seeds, a difference of" in printed.output and "four times in five" in printed.output
    data = json.loads(CliRunner().invoke(cli, [*words, "--json"]).stdout)
    assert data["power"]["family"] == 2 and data["power"]["sd"] > 0
