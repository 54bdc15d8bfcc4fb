"""P6, P7, P9 and P16 to P18: cost of a trial, a command, a metric and a study besides the training."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import NamedTuple

from measuring import Row, in_turns, row, user_environment

from vitlab.driver.scheduler import Schedule
from vitlab.driver.session import Session
from vitlab.lab import plan_study
from vitlab.spec import RunSpec
from vitlab.store.folders import Store, TrialFolder

PIPELINES = Path(__file__).parents[2] / "pipelines"
QUICKSTART = PIPELINES / "quickstart.yaml"
GATE_TRIAL_MS, GATE_WARM_MS, GATE_HELP_S, GATE_COMMAND_S, GATE_METRIC_US = 60.0, 10.0, 0.3, 0.6, 10.0
GATE_STUDY_S, GATE_LARGE_STUDY_S, GATE_AGAIN_S, GATE_QUICKSTART_S, GATE_JUDGE_S = 5.0, 8.0, 0.6, 60.0, 1.5


# -- a further trial --------------------------------------------------------------------------------------------------

FEW = 2
"""Trials of a run beside a larger one: their difference is what a further trial costs, without what a run costs once."""


def _workers_cpu_s() -> float:
    """Return the CPU seconds of ended workers: children of the fork server, which waits for them."""
    try:
        stat = Path(f"/proc/{forkserver._forkserver._forkserver_pid}/stat").read_text()
    except FileNotFoundError:
        return 0.0  # there is none yet
    children = stat.rpartition(")")[2].split()[13:15]
    return sum(map(int, children)) / os.sysconf("SC_CLK_TCK")


def _run_s(seeds: int, engine: str) -> tuple[float, float]:
    """Return elapsed seconds of a run, and CPU seconds of its driver and workers."""
    study = "\n".join(
        [
            "study: steps",
            "base:",
            "  data: {type: synthetic, image_size: 8, train_images: 64, test_images: 16, validation: 0.25}",
            "  model: {type: vit, patch_size: 4, dim: 8, depth: 1, heads: 2}",
            "  train: {steps: 1, batch_size: 16, optimizer: {type: adamw, lr: 1.0e-3}}",
            f"seeds: {seeds}",
        ]
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "steps.yaml"
        file.write_text(study)
        _, plan = plan_study(file)
        store = Store(Path(folder) / "runs")
        run = RunSpec.model_validate({"executor": "local", "workers": 1, "engine": engine})
        began, worked = time.perf_counter(), time.process_time() + _workers_cpu_s()
        schedule = Schedule.for_trials(plan.trials, Session(store, run), plan)
        schedule.run_jobs()
        passed = time.perf_counter() - began, time.process_time() + _workers_cpu_s() - worked
        folders = [store.trial(item.trial.key, item.trial.code) for item in plan.trials]
        reasons = {folder.failure() for folder in folders if not folder.done()}
        if schedule.failed or reasons:
            raise RuntimeError(f"{schedule.failed} of {seeds} trials failed: {reasons}")
    return passed


def trials() -> list[Row]:
    """P6: trials of one step, one at a time by the local executor; the fork server is warm."""
    _run_s(1, "loop")
    rows = []
    for engine, what, many, gate in (
        ("loop", "a further trial of one step, in a process of its own", 10, GATE_TRIAL_MS),
        ("vmap", "a further trial of one step, 16 together", 50, GATE_WARM_MS),
    ):
        runs = [(_run_s(many, engine), _run_s(FEW, engine)) for _ in range(3)]
        for clock, place in (("wall", 0), ("CPU", 1)):
            each = [1e3 * (long[place] - short[place]) / (many - FEW) for long, short in runs]
            rows.append(row("P6", what, each, "ms", clock, gate if clock == "wall" else None))
    return rows


# -- a command --------------------------------------------------------------------------------------------------------


def _cpu_s(*command: str) -> float:
    """Return the CPU seconds of a process and its children."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = {**user_environment(), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def commands() -> list[Row]:
    """P7: in CPU seconds, which on a machine that does nothing else are those of the clock."""
    with tempfile.TemporaryDirectory() as folder:
        return _commands(Path(folder))


def _commands(folder: Path) -> list[Row]:
    table = folder / "table.csv"
    results = [f"{arm},{seed},{0.1 * arm + 0.01 * (seed * (arm + 3) % 7)}" for arm in range(3) for seed in range(8)]
    table.write_text("\n".join(["model,seed,acc", *results]))
    vitlab = (sys.executable, "-m", "vitlab") if (PIPELINES.parent / "vitlab/__main__.py").exists() else _script()
    lines = {
        "import torch": (sys.executable, "-c", "import torch"),
        "help": (*vitlab, "--help"),
        "validate": (*vitlab, "validate", str(QUICKSTART)),
        "plan": (*vitlab, "plan", str(QUICKSTART), "--set", "seeds=334"),
        "judge": (*vitlab, "judge", str(table), "--metric", "acc", "--arm", "model", "--seed", "seed"),
    }
    times: dict[str, list[float]] = {name: [] for name in lines}
    for line in lines.values():
        _cpu_s(*line)  # files come into memory
    for _ in range(4):
        for name, line in lines.items():
            times[name].append(_cpu_s(*line))

    def above(name: str) -> list[float]:
        return [mine - bare for mine, bare in zip(times[name], times["import torch"], strict=True)]

    return [
        row("P7", "vitlab --help", times["help"], "s", "CPU", GATE_HELP_S),
        row("P7", "vitlab validate quickstart.yaml, above import torch", above("validate"), "s", "CPU", GATE_COMMAND_S),
        row("P7", "vitlab plan of 1,002 trials, above import torch", above("plan"), "s", "CPU", GATE_COMMAND_S),
        row("P7", "vitlab judge of 24 rows", times["judge"], "s", "CPU", GATE_JUDGE_S),
        row("P7", "import torch, for comparison", times["import torch"], "s", "CPU"),
    ]


def _script() -> tuple[str, ...]:
    return (sys.executable, "-c", "from vitlab.cli import main; main()")


# -- a study ----------------------------------------------------------------------------------------------------------

STUDIES = {
    "6 trials of one step": (2, 3, 1, GATE_STUDY_S),
    "32 trials of one step": (2, 16, 1, GATE_STUDY_S),
    "100 trials of 20 steps, each evaluated": (4, 25, 20, GATE_LARGE_STUDY_S),
}
"""Name to arms, seeds, steps and gate."""


CORES = len(os.sched_getaffinity(0))
QUICKSTART_TRIALS = 24


def _write_study(folder: Path, arms: int, seeds: int, steps: int) -> Path:
    """Write a study whose training takes next to nothing."""
    file = folder / "fixed.yaml"
    widths = ", ".join(str(8 * (index + 2)) for index in range(arms - 1))
    file.write_text(
        "\n".join(
            [
                "study: fixed",
                "base:",
                "  data: {type: synthetic, image_size: 8, train_images: 64, test_images: 16, validation: 0.25}",
                "  model: {type: vit, patch_size: 4, dim: 8, depth: 1, heads: 2}",
                f"  train: {{steps: {steps}, batch_size: 16, evaluations: {steps}}}",
                f"design: {{one_at_a_time: {{model.dim: [{widths}]}}}}",
                f"seeds: {seeds}",
            ]
        )
    )
    return file


class _Times(NamedTuple):
    """Seconds of one ``vitlab run``."""

    answer: float  #: from the command to the last line of the report's text
    end: float  #: from the command to its end, with all files written and all delivered
    cpu: float  #: of the driver's process, without workers and the process that delivers


def _time_command(folder: Path, file: Path | str) -> _Times:
    """Return the times of ``vitlab run``, whose output is read as it is printed."""
    line = [sys.executable, "-m", "vitlab", "run", str(file), "--out", str(folder / "runs")]
    with tempfile.TemporaryFile("w+") as errors:
        began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        with subprocess.Popen(
            line, stdout=subprocess.PIPE, stderr=errors, env=user_environment(), cwd=folder, text=True
        ) as driver:
            assert driver.stdout is not None
            printed = [(text, time.perf_counter() - began) for text in driver.stdout]
        end, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        if driver.returncode:
            errors.seek(0)
            raise RuntimeError(errors.read())
    after_report = next(place for place, (text, _) in enumerate(printed) if re.match(r"\d+ trained", text))
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return _Times(printed[after_report - 1][1], end, cpu)


def _training_s(folder: Path, trials: int) -> float:
    """Return the seconds of training of a study by as many workers as there are cores."""
    results = [TrialFolder(path.parent).result() for path in folder.glob("runs/trials/*/*/result.json")]
    if len(results) != trials:
        raise RuntimeError(f"{len(results)} of {trials} trials have a result")
    return sum(result.circumstances.wall_s for result in results if result is not None) / min(CORES, trials)


def fixed() -> list[Row]:
    """P16 and P17: a study's time besides its training, to the answer and to the command's end, and a finished study's.

    The answer is there once the report's text is printed; then the command draws the figures, writes the report's files
    and delivers the rest to MLflow.
    """
    rows, finished = [], list[_Times]()
    for name, (arms, seeds, steps, gate) in STUDIES.items():
        times, training = list[_Times](), list[float]()
        for _ in range(3):
            with tempfile.TemporaryDirectory() as place:
                folder = Path(place)
                file = _write_study(folder, arms, seeds, steps)
                times.append(_time_command(folder, file))
                training.append(_training_s(folder, arms * seeds))
                finished.append(_time_command(folder, file))
        rows += _rows_of_study("P16", name, times, training, gate)
    again = [time.answer for time in finished]
    rows.append(row("P17", "a finished study again, from command to answer", again, "s", "wall", GATE_AGAIN_S))
    rows.append(row("P17", "the same", [time.cpu for time in finished], "s", "CPU"))
    return rows


def _rows_of_study(
    goal: str, name: str, times: Sequence[_Times], training: Sequence[float], gate: float | None
) -> list[Row]:
    """Return the rows of a study's times besides its training."""
    answer = [time.answer - trained for time, trained in zip(times, training, strict=True)]
    end = [time.end - trained for time, trained in zip(times, training, strict=True)]
    return [
        row(goal, f"{name}, from command to answer, without training", answer, "s", "wall", gate),
        row(goal, "the same, to the command's end, with figures and all of MLflow", end, "s", "wall"),
        row(goal, "the same, of the driver alone", [time.cpu for time in times], "s", "CPU"),
    ]


def quickstart() -> list[Row]:
    """P18: the study ``quickstart`` that comes with vitlab, from an empty folder to the answer and to the end."""
    times, training = list[_Times](), list[float]()
    for _ in range(3):
        with tempfile.TemporaryDirectory() as place:
            times.append(_time_command(Path(place), "quickstart"))
            training.append(_training_s(Path(place), QUICKSTART_TRIALS))
    whole = [time.answer for time in times]
    return [
        row("P18", "the quickstart, from command to answer", whole, "s", "wall", GATE_QUICKSTART_S),
        *_rows_of_study("P18", "the quickstart", times, training, None),
    ]


# -- a metric ---------------------------------------------------------------------------------------------------------

METRICS = {f"val/metric_{index}": 0.123456789 * index for index in range(10)}


def journal() -> list[Row]:
    """P9: events of one metric and of ten."""
    with tempfile.TemporaryDirectory() as folder:
        trial = TrialFolder(Path(folder) / "trial")
        trial.path.mkdir(exist_ok=True)

        def seconds_per_metric(count: int) -> float:
            metrics = dict(list(METRICS.items())[:count])
            for step in range(200):
                trial.emit("metrics", step=step, epoch=0.1, images=step, metrics=metrics)
            return 200

        speeds = in_turns({"1": lambda: seconds_per_metric(1), "10": lambda: seconds_per_metric(10)})
    return [
        row(
            "P9",
            "an event of ten metrics, each metric",
            [1e5 / speed for speed in speeds["10"]],
            "us",
            "CPU",
            GATE_METRIC_US,
        ),
        row("P9", "an event of ten metrics", [1e6 / speed for speed in speeds["10"]], "us", "CPU"),
        row("P9", "an event of one metric", [1e6 / speed for speed in speeds["1"]], "us", "CPU"),
    ]
