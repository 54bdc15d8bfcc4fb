"""Tests of what a watcher sees of a run: the remaining time, plain lines and the live table."""

from __future__ import annotations

import heapq
import io
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import synthetic_studies
from rich.console import Console

from vitlab.driver import progress
from vitlab.driver.remaining import RemainingTime, TrialProgress
from vitlab.plan.values import Plan, Planned
from vitlab.store.folders import Store

STEPS = synthetic_studies.STEPS[-1]
EPOCH = 1_790_000_000.0  #: seconds since 1970 at which the run of a test starts
STARTUP_S = 3.0  #: between the start of a batch and the first line of its journals


def append(store: Store, planned: Planned, time_s: float, kind: str, **body: Any) -> None:
    """Append a line to a trial's journal as if it had been written at another time."""
    folder = store.trial(planned.trial.key, planned.trial.code).path
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "events.jsonl", "a") as file:
        file.write(json.dumps({"t": int(1000 * (EPOCH + time_s)), "kind": kind, **body}) + "\n")


def measure(store: Store, planned: Planned, time_s: float, step: int, value: float = 0.5) -> None:
    metrics = {"val/accuracy": value}
    append(store, planned, time_s, "metrics", step=step, epoch=step / 20, images=step, metrics=metrics)


@dataclass
class Run:
    """A run with known rates: batches start in order on ``slots`` places, and measure at equal intervals."""

    batches: Sequence[Sequence[Planned]]
    seconds: Mapping[str, float]  #: arm to the duration of a trial alone; a batch takes the sum
    slots: int
    evaluations: int

    def schedule(self) -> list[tuple[float, float]]:
        """Return start and end of each batch, by list scheduling."""
        free, times = [0.0] * self.slots, []
        for batch in self.batches:
            start = heapq.heappop(free)
            end = start + STARTUP_S + sum(self.seconds[item.arm] for item in batch)
            heapq.heappush(free, end)
            times.append((start, end))
        return times

    def events(self) -> list[tuple[float, str, Planned, int]]:
        """Return time, kind, trial and step of everything that happens, in order."""
        events = []
        for batch, (start, end) in zip(self.batches, self.schedule(), strict=True):
            for planned in batch:
                events += [(start, "submitted", planned, 0), (start + STARTUP_S, "start", planned, 0)]
                for i in range(1, self.evaluations + 1):
                    at = start + STARTUP_S + (end - start - STARTUP_S) * i / self.evaluations
                    events.append((at, "metrics", planned, STEPS * i // self.evaluations))
                events.append((end, "ended", planned, STEPS))
        return sorted(events, key=lambda event: event[0])


@pytest.mark.parametrize(
    ("sizes", "seconds", "slots", "evaluations"),
    [
        ([1] * 40, {"baseline": 25.0, "none": 25.0}, 2, 10),  # many short trials
        ([5, 5, 5, 5], {"baseline": 20.0, "none": 40.0}, 2, 10),  # batches; the last run when places are free
        ([10, 10, 10], {"baseline": 30.0, "none": 30.0}, 2, 10),  # one batch alone at the end
        ([20], {"baseline": 30.0, "none": 30.0}, 1, 20),  # a single batch
        ([1] * 6, {"baseline": 400.0, "none": 200.0}, 4, 5),  # fewer waiting than places
    ],
)
def test_remaining_time_is_right_within_a_third_from_the_second_minute_on(
    tmp_path: Path, sizes: Sequence[int], seconds: Mapping[str, float], slots: int, evaluations: int
) -> None:
    """The reference is the schedule by which the journals are written, not a rule of the estimate."""
    n = sum(sizes) // 2
    plan, store = synthetic_studies.study(tmp_path, {arm: [None] * n for arm in seconds})
    by_arm = [[item for item in plan.trials if item.arm == arm] for arm in seconds]
    trials = [item for pair in zip(*by_arm, strict=True) for item in pair] if max(sizes) == 1 else [*plan.trials]
    starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    batches = [trials[a:b] for a, b in itertools.pairwise(starts)]
    if len(sizes) == 4:  # both arms are among the first
        batches = [batches[0], batches[2], batches[1], batches[3]]
    run = Run(batches, seconds, slots, evaluations)
    events, end = run.events(), max(end for _, end in run.schedule())
    estimate = RemainingTime(trials, store)
    estimate.schedule(batches, slots)
    assert estimate.seconds(EPOCH) is None, "nothing is measured yet"
    checked = 0
    for second in range(1, int(end), 5):
        while events and events[0][0] <= second:
            time_s, kind, planned, step = events.pop(0)
            if kind == "submitted":
                estimate.start(planned)
            elif kind == "start":
                append(store, planned, time_s, "start", attempt=1, step=0)
            elif kind == "metrics":
                measure(store, planned, time_s, step)
            else:
                estimate.end(planned, EPOCH + time_s)
        estimate.update()
        remaining = estimate.seconds(EPOCH + second)
        if second >= 120:
            truth = end - second
            assert remaining is not None
            assert abs(remaining - truth) <= max(truth / 3, 10), (second, remaining, truth)
            checked += 1
    assert checked > 20


def one(tmp_path: Path) -> tuple[Store, Planned, TrialProgress]:
    plan, store = synthetic_studies.study(tmp_path, {"baseline": [None]})
    planned = plan.trials[0]
    folder = store.trial(planned.trial.key, planned.trial.code)
    measure(store, planned, -1000, 50)  # of an earlier run
    return store, planned, TrialProgress(folder, planned.trial)


def test_progress_of_a_resumed_trial(tmp_path: Path) -> None:
    """It starts at step 100 of 200 and does one step a second: 200 s in all, 60 s left at step 140."""
    store, planned, reader = one(tmp_path)
    reader.update()
    assert reader.seconds is None and reader.started is None and reader.share == 0
    append(store, planned, 0, "start", attempt=2, step=100)
    reader.update()
    assert reader.started == EPOCH and reader.remaining(EPOCH + 5) is None
    measure(store, planned, 20, 120)
    reader.update()
    assert reader.seconds == pytest.approx(200) and reader.remaining(EPOCH + 20) == pytest.approx(80)
    measure(store, planned, 40, 140)
    reader.update()
    assert reader.share == pytest.approx(0.7) and reader.remaining(EPOCH + 50) == pytest.approx(50)
    assert reader.remaining(EPOCH + 500) == 0
    append(store, planned, 60, "start", attempt=3, step=100)  # its worker died; the speed is measured anew
    reader.update()
    assert reader.seconds is None


def ended(plan: Plan, *indices: int, store: Store | None = None, value: float = 0.9) -> list[Planned]:
    trials = [plan.trials[index] for index in indices]
    for planned in trials if store is not None else ():
        assert store is not None
        finals = {"val/accuracy": value + planned.seed / 100}
        folder = store.trial(planned.trial.key, planned.trial.code)
        folder.finish(synthetic_studies.result_of(planned.trial, finals))
    return trials


def test_plain_lines_have_one_line_for_trials_that_end_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, store = synthetic_studies.study(tmp_path, {"baseline": [None] * 4, "none": [None] * 4})
    lines = progress.PlainLines()
    lines.on_plan(plan, plan.trials, store)
    lines.on_schedule([plan.trials[:4], plan.trials[4:]], 1)
    for planned in plan.trials[:4]:
        lines.on_start(planned)
    lines.tick()
    for planned in ended(plan, 0, 1, 2):
        lines.on_end(planned, progress.Ending.DONE, "")
    lines.on_end(plan.trials[3], progress.Ending.LOST, "its worker died; it is tried again")
    lines.tick()
    lines.on_end(plan.trials[3], progress.Ending.DONE, "")
    lines.on_end(plan.trials[5], progress.Ending.DONE, "")
    lines.say("a sentence")
    monkeypatch.setattr(progress, "SILENCE_S", -1.0)
    lines.tick()
    lines.close()
    printed = capsys.readouterr().err.splitlines()
    assert [line.partition("  (")[0] for line in printed] == [
        "positions: 2 arms, 8 trials; 8 to train",
        "[3/8] baseline s0 to s2 done",
        "[3/8] baseline s3 lost: its worker died; it is tried again",
        "[5/8] baseline s3, none s1 done",
        "a sentence",
        "[5/8] running",
    ]
    assert printed[1].endswith("(estimating the remaining time)")


def test_size_of_a_plan_counts_trained_and_resumed_trials(tmp_path: Path) -> None:
    plan, store = synthetic_studies.study(tmp_path, {"baseline": [0.9, 0.9], "none": [None] * 3})
    todo = plan.trials[2:]
    assert progress.size_of(plan, todo, store) == "2 arms, 5 trials; 3 to train, 2 trained already"
    for planned in todo[:2]:
        folder = store.trial(planned.trial.key, planned.trial.code)
        folder.path.mkdir(parents=True)
        folder.checkpoint.touch()
    assert progress.size_of(plan, todo, store).endswith("; 3 to train, 2 of them from a checkpoint, 2 trained already")
    assert progress.size_of(plan, todo[:1], store).endswith("; 1 to train, from a checkpoint, 2 trained already")
    assert progress.size_of(plan, (), store) == "2 arms, 5 trials; nothing to train, 2 trained already"


def test_live_table_has_bars_metrics_and_differences_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Differences of 10 and 12 points: their mean with the 95 % interval of one degree of freedom, 12.7 x 1 points."""
    plan, store = synthetic_studies.study(tmp_path, {"baseline": [0.9, 0.9], "none": [None] * 40})
    screen = io.StringIO()
    view = progress.LiveView(Console(file=screen, force_terminal=True, width=100, height=24, color_system=None))
    todo = plan.trials[2:]
    view.on_plan(plan, todo, store)
    view.on_schedule([todo], 1)
    for planned in todo:
        view.on_start(planned)
    folder = store.trial(todo[3].trial.key, todo[3].trial.code).path
    assert not folder.exists()
    append(store, todo[3], 0, "start", attempt=1, step=0)
    measure(store, todo[3], 10, STEPS // 4, value=0.25)
    for planned, value in zip(todo[:2], (0.8, 0.78), strict=True):
        result = synthetic_studies.result_of(planned.trial, {"val/accuracy": value})
        store.trial(planned.trial.key, planned.trial.code).finish(result)
        view.on_end(planned, progress.Ending.DONE, "")
    monkeypatch.setattr(progress, "REFRESH_S", -1.0)
    view.tick()
    drawn = screen.getvalue()
    view.close()
    (row,) = {line.strip() for line in drawn.splitlines() if "none s3" in line and "0.25" in line}
    assert "25 %" in row and "val/accuracy 0.25" in row and "━" in row
    assert "2 of 40 trials" in drawn and "starting" in drawn and " more" in drawn and " left" in drawn
    assert "none: -11 points so far (2 pairs)" in drawn
    assert max(drawn.count(f"none s{seed} ") for seed in range(30, 40)) == 0, "it fits the terminal"
