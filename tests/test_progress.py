"""Tests of what a watcher sees of a run: the remaining time, plain lines and the live table."""

from __future__ import annotations

import heapq
import io
import itertools
import json
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import synthetic_studies
from rich.console import Console

from vitlab.driver import progress
from vitlab.planning.values import Plan, Planned
from vitlab.spec.run import REPORTING_SEEDS
from vitlab.store.folders import Store
from vitlab.training.artifacts import make_checkpoint_writer

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


@pytest.mark.parametrize(("sizes", "slots"), [([1] * 40, 2), ([20] * 2, 1), ([5] * 8, 2)])
def test_remaining_time_is_right_within_a_third_from_the_second_minute_on(
    tmp_path: Path, sizes: Sequence[int], slots: int
) -> None:
    """The reference is the schedule by which the journals are written, not a rule of the estimate."""
    plan, store = synthetic_studies.study(tmp_path, {"baseline": [None] * 20, "none": [None] * 20})
    starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    run = Run([plan.trials[a:b] for a, b in itertools.pairwise(starts)], {"baseline": 25.0, "none": 25.0}, slots, 10)
    events, end = run.events(), max(end for _, end in run.schedule())
    now = 0.0
    view = progress._Display(Console(file=io.StringIO(), get_time=lambda: now))
    view.on_plan(plan, plan.trials, store)
    view._read_journals()
    assert view._describe_remaining_time() == "starting processes and reading data"
    checked = 0
    for now in range(1, int(end), 5):
        while events and events[0][0] <= now:
            time_s, kind, planned, step = events.pop(0)
            if kind == "submitted":
                view.on_start(planned)
            elif kind == "start":
                append(store, planned, time_s, "start", step=0, steps=STEPS)
            elif kind == "metrics":
                measure(store, planned, time_s, step)
            else:
                view.on_end(planned, progress.Ending.DONE, "")
        view._read_journals()
        if now >= 120:
            truth, (*minutes, seconds) = end - now, map(int, re.findall(r"\d+", view._describe_remaining_time()))
            remaining = 60 * sum(minutes) + seconds
            assert abs(remaining - truth) <= max(truth / 3, 10), (now, remaining, truth)
            checked += 1
    assert checked > 20


def test_share_of_a_resumed_trial(tmp_path: Path) -> None:
    """What an earlier attempt has measured is not read; the share follows from the step, from the start on."""
    plan, store = synthetic_studies.study(tmp_path, {"baseline": [None]})
    planned = plan.trials[0]
    measure(store, planned, -1000, 50)
    folder = store.folder(planned.trial)
    reader = progress.TrialProgress(folder, folder.journal_size())
    reader.read_new_events()
    assert not reader.latest and reader.share == 0
    append(store, planned, 0, "start", steps=STEPS, step=100)
    reader.read_new_events()
    assert reader.share == reader.share_at_start == pytest.approx(100 / STEPS)
    measure(store, planned, 40, 140)
    reader.read_new_events()
    assert reader.share == pytest.approx(140 / STEPS) and reader.share_at_start == pytest.approx(100 / STEPS)


def test_remaining_time_counts_only_what_was_trained_since_a_resume(tmp_path: Path) -> None:
    """Two trials go on from the middle, one after another, in 100 s each; the clock runs beyond the estimate."""
    plan, store = synthetic_studies.study(tmp_path, {"baseline": [None] * 2})
    now = 0.0
    view = progress._Display(Console(file=io.StringIO(), get_time=lambda: now))
    view.on_plan(plan, plan.trials, store)
    for planned, begin in zip(plan.trials, (0.0, 100.0), strict=True):
        now = begin
        view.on_start(planned)
        append(store, planned, now, "start", steps=STEPS, step=STEPS // 2)
        for part in (1, 2, 3):
            now = begin + 25 * part
            measure(store, planned, now, STEPS // 2 + part * STEPS // 8)
            view._read_journals()
        if not begin:
            view.on_end(planned, progress.Ending.DONE, "")
            assert view._describe_remaining_time() == "3 min 45 s left", (
                "nothing says yet that the other goes on from the middle, too"
            )
    assert view._describe_remaining_time() == "25 s left"
    now += 20
    assert view._describe_remaining_time() == "5 s left"
    for pause in (4.8, 0.9):  # an overrun of less than a second is none
        now += pause
        assert view._describe_remaining_time() == "1 s left"
    now += 14.3
    assert view._describe_remaining_time() == "longer than estimated"
    measure(store, plan.trials[1], now, STEPS)
    view._read_journals()
    now += 20
    assert view._describe_remaining_time() == "writing results"


def test_first_estimate_waits_until_every_running_trial_has_moved(tmp_path: Path) -> None:
    """Three trials at a time take 120 s; they are measured, or saved, one after another."""
    plan, store = synthetic_studies.study(tmp_path, {"baseline": [None] * 9})
    now = 0.0
    view = progress._Display(Console(file=io.StringIO(), get_time=lambda: now))
    view.on_plan(plan, plan.trials, store)
    for planned in plan.trials[:3]:
        view.on_start(planned)
        append(store, planned, now, "start", step=0, steps=STEPS)
    view._read_journals()
    told = []
    for now, planned in zip((28.0, 29.0, 30.0), plan.trials, strict=False):
        if planned is plan.trials[1]:
            folder = store.folder(planned.trial).checkpoint
            make_checkpoint_writer(folder, {"training": {"step": STEPS // 4}})()
        else:
            measure(store, planned, now, STEPS // 4)
        view._read_journals()
        told.append(view._describe_remaining_time())
    assert told == ["estimating the remaining time"] * 2 + ["5 min 30 s left"]


def rows_of(width: int, rows: Sequence[progress.Row]) -> list[str]:
    screen = io.StringIO()
    Console(file=screen, width=width, color_system=None).print(progress.make_table(rows, width, rows[0]))
    return screen.getvalue().splitlines()


def test_rows_leave_out_whole_what_does_not_fit() -> None:
    rows = [
        progress.Row(f"parametrization={kind}, dim={dim} s{seed}", 0.3, " 30 %", "0.9123")
        for kind in ("standard", "mup")
        for dim in (16, 128)
        for seed in (0, 11)
    ]
    rows_of(5, rows)  # too narrow for anything, which is no error
    for width in range(18, 121):
        lines = rows_of(width, rows)
        assert len(set(lines)) == len(lines) == len(rows) and max(map(len, lines)) <= width
        for row, line in zip(rows, lines, strict=True):
            assert "30 %" in line and row.name.rpartition(" ")[2] in line.split()
            assert ("0.9" in line) == line.rstrip().endswith("0.9123"), "a number is not cut"
    described = {
        width: [part in rows_of(width, rows)[0] for part in (rows[0].name, "0.9123", "━━")]
        for width in (120, 80, 70, 60, 40, 20)
    }
    assert described == {
        120: [True, True, True],
        80: [True, True, True],
        70: [True, True, True],
        60: [True, True, False],
        40: [False, True, False],
        20: [False, False, False],
    }


def test_shortened_names_differ() -> None:
    middle = ["x" * 30 + letter + "y" * 30 for letter in "abcdef"]
    for names in (middle, [*middle, "short"], [f"{'name' * 9} s{seed}" for seed in range(40)]):
        shortened = progress.shorten_names(names, 12)
        assert len(set(shortened)) == len(names) and max(map(len, shortened)) <= 12
    assert progress.shorten_names(["as it is", "learning_rate=0.001 s0"], 14) == ["as it is", "learn…0.001 s0"]


def ended(plan: Plan, *indices: int, store: Store | None = None, value: float = 0.9) -> list[Planned]:
    trials = [plan.trials[index] for index in indices]
    for planned in trials if store is not None else ():
        assert store is not None
        finals = {"val/accuracy": value + planned.seed / 100}
        folder = store.trial(planned.trial.key, planned.trial.code)
        folder.write_result(synthetic_studies.result_of(planned.trial, finals))
    return trials


def test_plain_lines_have_one_line_for_trials_that_end_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, store = synthetic_studies.study(tmp_path, {"baseline": [None] * 4, "none": [None] * 4})
    lines = progress.PlainLines()
    lines.on_plan(plan, plan.trials, store)
    for planned in plan.trials[:4]:
        lines.on_start(planned)
    lines.tick()
    for planned in ended(plan, 0, 1, 2, store=store, value=0.5):
        lines.on_end(planned, progress.Ending.DONE, "")
    lines.on_end(plan.trials[3], progress.Ending.LOST, "its worker died; it is tried again")
    lines.tick()
    for planned in ended(plan, 3, 5, 6, store=store, value=0.5):
        lines.on_end(planned, progress.Ending.DONE, "")
    lines.say("a sentence")
    now = progress.time.monotonic()
    monkeypatch.setattr(progress.time, "monotonic", lambda: now + progress.SILENCE_S)
    lines.tick()
    lines.close()
    printed = capsys.readouterr().err.splitlines()
    assert [line.partition("  (")[0] for line in printed] == [
        "positions: 2 arms, 8 trials; 8 to train",
        "[3/8] baseline s3: its worker died; it is tried again",
        "[3/8] baseline s0 to s2 done",
        "[6/8] baseline s3 done: val accuracy (%) 51.5 (mean of 4)",
        "[6/8] none s1, s2 done",
        "a sentence",
        "[6/8] running",
    ]
    assert printed[2].endswith("(estimating the remaining time)")


def test_diverged_trial_of_a_stack_is_named_at_once_and_its_arm_has_a_mean_of_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, store = synthetic_studies.study(tmp_path, {"baseline": [None] * 3, "none": [0.9]})
    todo, now = plan.trials[:3], 10.0
    lines = progress.PlainLines(Console(get_time=lambda: now))
    lines.on_plan(plan, todo, store)
    monkeypatch.setattr(lines, "refresh_s", -1.0)
    for planned in todo:
        lines.on_start(planned)
        append(store, planned, 10, "start", step=0, steps=STEPS)
    lines.tick()
    append(store, todo[1], 20, "end", step=20, status="diverged", failure="the loss is not finite")
    now = 60.0
    for planned in (todo[0], todo[2]):
        measure(store, planned, 60, STEPS // 2)
    lines.tick()
    lines.tick()
    assert lines._describe_remaining_time() == "50 s left", "the stack takes as long as the others"
    assert [row.state for _, row in lines._rows_with_priority()] == [" 50 %", "diverged", " 50 %", "done"]
    ended(plan, 0, store=store, value=0.5)
    for planned, ending, detail in zip(
        todo, ("DONE", "DONE", "FAILED"), ("", "the loss is not finite", "no disk"), strict=True
    ):
        lines.on_end(planned, progress.Ending[ending], detail)
    lines.tick()
    lines.close()
    assert [line.partition("  (")[0] for line in capsys.readouterr().err.splitlines()] == [
        "positions: 2 arms, 4 trials; 3 to train, 1 trained already",
        "[1/4] baseline s1 diverged: the loss is not finite",
        "[4/4] baseline s2 failed: no disk",
        "[4/4] baseline s0 done: val accuracy (%) 50.0 (mean of 1), 2 lost",
    ]


def test_size_of_a_plan_counts_trained_and_resumed_trials(tmp_path: Path) -> None:
    plan, store = synthetic_studies.study(tmp_path, {"baseline": [0.9, 0.9], "none": [None] * 3})
    todo = plan.trials[2:]
    assert progress.describe_workload(plan, todo, store) == "2 arms, 5 trials; 3 to train, 2 trained already"
    for planned in todo[1:]:
        store.folder(planned.trial).checkpoint.mkdir(parents=True)
    assert progress.describe_workload(plan, todo, store).endswith(
        "; 3 to train, 2 of them from a checkpoint, 2 trained already"
    )
    assert progress.describe_workload(plan, (), store) == "2 arms, 5 trials; nothing to train, 2 trained already"
    teacher = replace(todo[0], arm="prerequisite 1a2b3c4d", seed=0)
    needed = progress.describe_workload(plan, [teacher, *todo], store)
    assert needed.startswith("2 arms, 5 trials; 4 to train, 1 of them needed by others, 2 of them from")
    tuning = replace(plan, trials=tuple(replace(item, seed=REPORTING_SEEDS + item.seed) for item in plan.trials))
    assert progress.describe_workload(tuning, tuning.trials, store).startswith("2 arms, 5 tuning trials; 5 to train")


def test_live_table_has_bars_and_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, store = synthetic_studies.study(tmp_path, {"baseline": [0.9, 0.9], "none": [None] * 40})
    screen = io.StringIO()
    view = progress.LiveView(Console(file=screen, force_terminal=True, width=100, height=24, color_system=None))
    todo = plan.trials[2:]
    view.on_plan(plan, todo, store)
    for planned in todo:
        view.on_start(planned)
    folder = store.trial(todo[3].trial.key, todo[3].trial.code).path
    assert not folder.exists()
    append(store, todo[3], 0, "start", step=0, steps=STEPS)
    measure(store, todo[3], 10, STEPS // 4, value=0.25)
    for planned, value in zip(todo[:2], (0.8, 0.78), strict=True):
        result = synthetic_studies.result_of(planned.trial, {"val/accuracy": value})
        store.trial(planned.trial.key, planned.trial.code).write_result(result)
        view.on_end(planned, progress.Ending.DONE, "")
    monkeypatch.setattr(view, "refresh_s", -1.0)
    view.tick()
    append(store, todo[4], 11, "start", step=0, steps=STEPS)
    measure(store, todo[4], 12, STEPS // 4, value=0.5)
    view.tick()
    drawn = screen.getvalue()
    view.close()
    (row,) = {line.strip() for line in drawn.splitlines() if "none s3" in line and "25.0" in line}
    assert "25 %" in row and "━" in row and row.endswith("25.0"), "a share is in percent, as in the report"
    assert "4 of 42 trials, " in drawn and " left; val accuracy (%)" in drawn and "starting" in drawn
    assert "... and 21 more rows" in drawn
    assert max(drawn.count(f"none s{seed} ") for seed in range(30, 40)) == 0, "it fits the terminal"


def screens(view: progress.LiveView, screen: io.StringIO) -> list[str]:
    """Return the lines of what the view shows now."""
    screen.truncate(0)
    screen.seek(0)
    view._console.print(view._render_table())
    return [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in screen.getvalue().splitlines()]


def test_row_of_arm_whose_trials_all_failed_says_that_it_has_no_value(tmp_path: Path) -> None:
    plan, store = synthetic_studies.study(tmp_path, {"baseline": [0.9, 0.8], "none": [None, None]})
    screen = io.StringIO()
    view = progress.LiveView(Console(file=screen, force_terminal=True, width=80, height=12))
    view.on_plan(plan, plan.trials[2:], store)
    view.close()
    for planned, line in zip(plan.trials[2:], ("1 lost", "2 lost  no value"), strict=True):
        view.on_start(planned)
        view.on_end(planned, progress.Ending.FAILED, "no disk")
        assert [row for row in screens(view, screen) if row.startswith("none ") and row.endswith(line)]
    assert screens(view, screen)[0].startswith("4 of 4 trials (2 failed), finished")


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_no_row_is_wider_than_the_terminal_or_more_than_fit_and_the_time_left_is_seen(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, store = synthetic_studies.study(tmp_path, {f"model.position=sinusoidal, lr={n}": [None] * 4 for n in "1234"})
    screen = io.StringIO()
    view = progress.LiveView(Console(file=screen, force_terminal=True, width=width, height=12))
    view.on_plan(plan, plan.trials, store)
    view.close()
    monkeypatch.setattr(view, "_describe_remaining_time", lambda: "12 min 34 s left")
    for planned in plan.trials[:12]:
        view.on_start(planned)
        view.on_end(planned, progress.Ending.FAILED, "no disk")
    for planned in plan.trials[12:]:
        view.on_start(planned)
    view._done, view._total = 1234, 1600
    lines = screens(view, screen)
    padded = re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue()).splitlines()
    assert max(map(len, padded)) <= width - progress.GAP and len(lines) < 12, "^C fits behind the last row"
    assert "12 min 34 s left" in "".join(lines[:2]) and "1234 of 1600 trials (12 failed)" in lines[0]


def test_every_arm_has_a_row_from_the_first_moment_to_its_mean(tmp_path: Path) -> None:
    arms = {"baseline": [0.9, 0.8], "none": [None, None], "sinusoidal": [None, None], "rotary": [None, None]}
    plan, store = synthetic_studies.study(tmp_path, arms)
    screen = io.StringIO()
    view = progress.LiveView(Console(file=screen, force_terminal=True, width=80, height=12, color_system="standard"))
    view.on_plan(plan, plan.trials[2:], store)
    view.close()
    drawn = [screens(view, screen)]
    for planned in plan.trials[2:6]:
        view.on_start(planned)
    drawn.append(screens(view, screen))
    for planned, value in zip(plan.trials[2:4], (0.25, 0.5), strict=True):
        result = synthetic_studies.result_of(planned.trial, {"val/accuracy": value})
        store.folder(planned.trial).write_result(result)
        view.on_end(planned, progress.Ending.DONE, "")
    view.on_end(plan.trials[4], progress.Ending.FAILED, "no disk")
    view._read_journals()
    drawn.append(screens(view, screen))
    seen = [[re.sub(" *━+[╸╺━]* *", "|", line) for line in lines] for lines in drawn]
    assert seen == [
        [
            "2 of 8 trials, starting processes and reading data; val accuracy (%)",
            "positions|25 %",
            "baseline|done  85.0 (mean of 2)",
            *(f"{arm}|planned" for arm in ("none", "sinusoidal", "rotary")),
        ],
        [
            "2 of 8 trials, starting processes and reading data; val accuracy (%)",
            "positions|25 %",
            "baseline|done  85.0 (mean of 2)",
            *(f"{arm} s{seed}|starting" for arm in ("none", "sinusoidal") for seed in (0, 1)),
            "rotary|planned",
        ],
        [
            "5 of 8 trials (1 failed), estimating the remaining time; val accuracy (%)",
            "positions|62 %",
            "baseline|done  85.0 (mean of 2)",
            "none|done  37.5 (mean of 2)",
            "sinusoidal|1 lost",
            "sinusoidal s1|starting",
            "rotary|planned",
        ],
    ]
    columns = {(line.index("━"), line.rindex("━")) for lines in drawn for line in lines[1:]}
    assert len(columns) == 1, "bars stay where they are, and as wide as they are"
    view._console.height = 8
    assert [line.split("  ")[0] for line in screens(view, screen)[2:]] == [
        "none",
        "sinusoidal",
        "sinusoidal s1",
        "... and 2 more rows",
    ], "running trials first, then the arms that ended last"


def test_a_mean_is_shown_when_all_seeds_of_an_arm_have_ended_and_bars_keep_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arms = {"baseline": [None] * 12, "none": [None] * 12}
    loss = synthetic_studies.Analysis(metric="val/loss", goal="min")
    plan, store = synthetic_studies.study(tmp_path, arms, analysis=loss, metric="val/loss")
    screen = io.StringIO()
    view = progress.LiveView(Console(file=screen, force_terminal=True, width=80, color_system="standard"))
    view.on_plan(plan, plan.trials, store)
    view.close()
    drawn = [screens(view, screen)]
    for planned in plan.trials[:12]:
        result = synthetic_studies.result_of(planned.trial, {"val/loss": 2.25})
        store.folder(planned.trial).write_result(result)
        view.on_end(planned, progress.Ending.DONE, "")
        drawn.append(screens(view, screen))
    assert [sum("mean" in line for line in lines) for lines in drawn] == [0] * 12 + [1]
    assert drawn[-2][2].rstrip().endswith("11 of 12") and drawn[-1][2].endswith("2.2500 (mean of 12)")
    assert len({re.search("[━╸╺]+", line).span() for lines in drawn for line in lines[1:]}) == 1  # type: ignore[union-attr]


def test_arms_that_have_ended_are_not_looked_up_at_every_update(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, store = synthetic_studies.study(tmp_path, {"baseline": [0.9, 0.8], "none": [0.7, 0.6]})
    screen = io.StringIO()
    view = progress.LiveView(Console(file=screen, force_terminal=True, width=80, color_system=None))
    view.on_plan(plan, (), store)
    drawn = screens(view, screen)
    monkeypatch.delattr(view, "_store")
    assert screens(view, screen) == drawn and "85.0 (mean of 2)" in drawn[2]


def test_first_frame_has_the_state_of_checkpoints(tmp_path: Path) -> None:
    """The checkpoint may be behind the journal; a trial whose checkpoint is damaged begins again."""
    plan, store = synthetic_studies.study(tmp_path, {"baseline": [None] * 3})
    for planned, step in zip(plan.trials, (60, 100, 0), strict=True):
        append(store, planned, -2000, "start", step=0, steps=STEPS)
        if step != 100:  # interrupted before the first evaluation
            measure(store, planned, -1000, 80)
        make_checkpoint_writer(store.folder(planned.trial).checkpoint, {"training": {"step": step}} if step else {})()
    screen = io.StringIO()
    view = progress.LiveView(Console(file=screen, force_terminal=True, width=80, color_system=None))
    view.on_plan(plan, plan.trials, store)
    view.close()
    shares = [f"{100 * step / STEPS:.0f} %" for step in (60, 100)]
    title, total, *rows = [re.sub(" *━+[╸╺━]* *", "|", line) for line in screens(view, screen)]
    assert rows == [f"baseline s{seed}|paused  at {share}" for seed, share in enumerate(shares)]
    assert total == f"positions|{100 * 160 / STEPS / 3:.0f} %" and "starting processes" in title
    view.on_start(plan.trials[0])
    assert screens(view, screen)[2].split()[-2:] == ["%", "50.0"], "no longer paused"
    append(store, plan.trials[0], 0, "start", steps=STEPS, step=60)
    view._read_journals()
    assert view._describe_remaining_time() == "estimating the remaining time"
    assert view._completed == pytest.approx(160 / STEPS)


def test_paused_trial_without_a_journal_has_a_row(tmp_path: Path) -> None:
    plan, store = synthetic_studies.study(tmp_path, {"baseline": [None]})
    make_checkpoint_writer(store.folder(plan.trials[0].trial).checkpoint, {"training": {"step": 4}})()
    screen = io.StringIO()
    view = progress.LiveView(Console(file=screen, force_terminal=True, width=80, color_system=None))
    view.on_plan(plan, plan.trials, store)
    view.close()
    assert screens(view, screen)[-1].split() == ["baseline", "s0", "paused", "at", "0", "%"]


def test_plain_lines_know_the_remaining_time_once_the_first_trials_have_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three trials that are trained together in 30 s, and are measured at their end alone; three are to come."""
    plan, store = synthetic_studies.study(tmp_path, {"baseline": [None] * 6})
    now = 10.0
    lines = progress.PlainLines(Console(get_time=lambda: now))
    lines.refresh_s = -1.0  # a second is too long for a test
    lines.on_plan(plan, plan.trials, store)
    for planned in plan.trials[:3]:
        lines.on_start(planned)
        append(store, planned, 10, "start", step=0, steps=STEPS)
    lines.tick()
    now = 40.0
    for planned in plan.trials[:3]:
        lines.on_end(planned, progress.Ending.DONE, "")
    lines.close()
    assert capsys.readouterr().err.splitlines()[-1] == "[3/6] baseline s0 to s2 done  (30 s left)"


@pytest.mark.parametrize("width", [80, 30, 0])
def test_a_narrower_terminal_loses_no_line_above_the_bars(tmp_path: Path, width: int) -> None:
    """Most terminals cut lines when they become narrower, so no more lines are erased than were drawn."""
    plan, store = synthetic_studies.study(tmp_path, {"a" * 60: [None]})
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80, height=24, color_system=None)
    view = progress.LiveView(console)
    view.on_plan(plan, plan.trials, store)
    screen.truncate(0)
    console.width = width
    view._draw()
    assert screen.getvalue().count("\x1b[2K") == (3 if width else 0)
    view.close()


def test_one_line_for_a_failure_that_many_trials_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, store = synthetic_studies.study(tmp_path, {"baseline": [None] * 4, "none": [None] * 4})
    view = progress.PlainLines()
    view.on_plan(plan, plan.trials, store)
    for number, planned in enumerate(plan.trials):
        view.on_end(planned, progress.Ending.FAILED, "no disk" if number == 2 else "the data is gone\nTraceback")
        view.tick()
    view.close()
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if "the data is gone" in line] == [line for line in lines if "baseline s0" in line][
        :1
    ]
    assert len([line for line in lines if "no disk" in line]) == 1
    assert lines[-1] == "baseline s1, s3, none s0 to s3 failed for the same reason as baseline s0."
    assert [line.partition("  (")[0] for line in lines if " lost" in line] == [
        "[4/8] baseline: val accuracy (%) no value, 4 lost",
        "[8/8] none: val accuracy (%) no value, 4 lost",
    ]
    assert len(lines) == 6 and not any("Traceback" in line for line in lines)


@pytest.mark.parametrize("display", [progress.PlainLines, progress.LiveView])
def test_every_diverged_trial_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], display: type) -> None:
    plan, store = synthetic_studies.study(tmp_path, {"baseline": [None] * 3})
    view = display(Console(stderr=True, width=100))
    view.on_plan(plan, plan.trials, store)
    for planned, detail in zip(plan.trials, ("", "loss is nan", "loss is nan"), strict=True):
        view.on_end(planned, progress.Ending.DONE, detail)
    view.tick()
    for planned in plan.trials:
        view.on_end(planned, progress.Ending.DONE, "loss is nan")
    view.close()
    printed = capsys.readouterr().err
    assert "baseline s1, s2 diverged: loss is nan" in printed, "what ends together has one line"
    assert "baseline s0 to s2 diverged for the same reason as baseline s1, s2." in printed
    assert printed.count("diverged: ") == 1


def test_a_cold_start_is_told_within_seconds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    plan, store = synthetic_studies.study(tmp_path, {"baseline": [None] * 2})
    view = progress.PlainLines()
    view.on_plan(plan, plan.trials, store)
    view.on_start(plan.trials[0])
    told = []
    for now in (101.0, 106.0, 120.0, 140.0, 170.0):
        if now == 106.0:
            view._timer.function()  # its time is over
        if now == 140.0:
            append(store, plan.trials[0], 0, "start", step=0, steps=STEPS)
        view.tick()
        told.append(capsys.readouterr().err.splitlines()[-1:])
    assert "baseline" in told[0][0] or "to train" in told[0][0]
    assert "starting processes and reading data" in told[1][0]
    assert told[2] == told[3] == [] and "running" in told[4][0]
    view.close()


def test_status_is_a_line_in_a_terminal_and_a_late_sentence_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    view = progress.LiveView(Console(file=screen, force_terminal=True, width=100, color_system=None))
    with pytest.raises(KeyError), view.status("loading"):
        raise KeyError
    assert "loading 0:00:00" in screen.getvalue() and screen.getvalue().endswith("\x1b[2K"), "the line is erased"
    monkeypatch.setattr(progress, "FIRST_SILENCE_S", 0.05)
    lines, printed = progress.PlainLines(), threading.Event()
    monkeypatch.setattr(lines, "say", lambda sentence: (progress.click.echo(sentence), printed.set()))
    with lines.status("over at once"):
        pass
    with lines.status("writing"):
        assert printed.wait(10)
    plan, store = synthetic_studies.study(tmp_path, {"baseline": [None] * 2})
    told = threading.Event()
    monkeypatch.setattr(lines, "_print_with_progress", lambda text: (progress.click.echo(text), told.set()))
    lines.on_plan(plan, plan.trials, store)
    assert told.wait(10), "nothing calls tick while the first worker starts"
    lines.close()
    assert capsys.readouterr().out.splitlines() == [
        "writing",
        "positions: 1 arm, 2 trials; 2 to train",
        "running",
    ]
