"""Ten thousand trials on a thousand workers: what planning, driving, reporting and delivering cost.

    python tools/benchmarks/scale.py                             prints the table, in about fifteen minutes
    python tools/benchmarks/scale.py --trials 1000 --workers 100
    python tools/benchmarks/scale.py --part mlflow --tracked 10000

One trial is trained; the others get its files from an executor in simulated time (``simulated.py``).  The seconds are
CPU seconds of the measured process and its children, without the time in which the executor writes those files, so
that other work on the machine changes them little.  MLflow is filled with fewer trials by default.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import yaml

from vitlab.trackers.server import running_server

sys.path.append(str(Path(__file__).parents[1]))
from compose_runner import free_port

HERE = Path(__file__).parent
STUDY = {
    "study": "scale",
    "base": {
        "data": {"type": "digits"},
        "model": {"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2},
        "train": {"steps": 20, "batch_size": 16, "evaluations": 10, "optimizer": {"type": "adamw", "lr": 0.001}},
    },
    "run": {"engine": "loop", "tracker": "none", "keep": "none"},
}


class Cost(NamedTuple):
    """Cost of one command."""

    cpu_s: float  #: of the process and the children that it has waited for
    peak_mb: float
    code: int


class Row(NamedTuple):
    """A line of the table."""

    what: str
    measured: float
    unit: str
    bound: float  #: NaN if there is none


def run_command(*words: str, environment: dict[str, str] = {}) -> Cost:
    """Run a command of vitlab and return its cost; what it prints goes to stderr if it fails."""
    command = [sys.executable, "-m", "vitlab", *words]
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **environment})
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = code = os.waitstatus_to_exitcode(status)
        if code not in (0, -9):
            output.seek(0)
            sys.exit(f"{' '.join(words)}: exit code {code}\n{output.read().decode(errors='replace')[-3000:]}")
    return Cost(usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, code)


def study_of(trials: int, folder: Path) -> Path:
    """Write a study of this many trials: arms of other learning rates, a hundred seeds each where there are many."""
    seeds = max(2, min(100, trials // 4))
    rates = [round(0.001 + 0.0001 * index, 5) for index in range(1, trials // seeds)]
    content = {**STUDY, "design": {"one_at_a_time": {"train.optimizer.lr": rates}}, "seeds": seeds}
    file = folder / f"scale-{trials}.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def simulated(study: Path, out: Path, template: Path, workers: int, **options: float) -> Sequence[str]:
    """Return the words of a run by the simulated executor."""
    choice = {"type": "simulated", "template": str(template), "ledger": str(out.with_suffix(".json")), **options}
    return (
        *("run", str(study), "--out", str(out), "--plugin", str(HERE / "simulated.py")),
        *("--workers", str(workers), "--set", f"run.executor={json.dumps(choice)}"),
    )


def ideal_s(needed: float, workers: int, loss_at: float) -> float:
    """Return the simulated time in which workers without a pause do their work, of whom a third leaves."""
    before = workers * (loss_at + 30.0) if loss_at else 0.0  # on average they leave in the middle of the minute
    left = workers - workers // 3 if loss_at else workers
    return (loss_at + 30.0 if loss_at else 0.0) + (needed - before) / left


def inodes(folder: Path) -> int:
    """Return the number of files and folders below a folder."""
    return sum(len(folders) + len(files) for _, folders, files in os.walk(folder))


def ledger(out: Path) -> dict[str, float]:
    """Return the figures that the simulated executor has written."""
    figures: dict[str, float] = json.loads(out.with_suffix(".json").read_text())
    return figures


def trained(folder: Path) -> Path:
    """Train a trial and return its folder."""
    study = study_of(8, folder)
    run_command("run", str(study), "--out", str(folder / "one"), "--only", "baseline", "--set", "seeds=2")
    return next((folder / "one/trials").glob("*/*/result.json")).parent


def driven(folder: Path, template: Path, trials: int, workers: int) -> list[Row]:
    """Plan, drive and report."""
    rows = list[Row]()
    study, out = study_of(trials, folder), folder / "out"
    rows.append(Row("inodes of a finished trial", inodes(template.parent) + 1, "", 5))

    cost = run_command("plan", str(study), "--out", str(out))
    rows += [Row("plan", cost.cpu_s, "s", 5), Row("plan, memory", cost.peak_mb, "MB", 1000)]
    run_command(*simulated(study, out, template, workers, die_after=trials // 2))  # the driver is killed half-way
    figures = ledger(out)
    rows.append(Row("first workers busy after", figures["cpu_at_start"], "s", 60))
    run_command(*simulated(study, out, template, workers))
    figures = ledger(out)
    rows.append(Row("restart to running", figures["cpu_at_start"], "s", 10))
    each_ms = 1000 * (figures["cpu"] - figures["cpu_at_start"]) / figures["ended"]
    rows.append(Row("driver, of each trial that ends", each_ms, "ms", 5))
    rows.append(Row("files and folders of a trial", inodes(out / "trials") / trials, "", 5))
    cost = run_command("status", str(study), "--out", str(out))
    rows.append(Row("status", cost.cpu_s, "s", 1))
    for file in (out / "studies/scale/report").iterdir():
        file.unlink()
    cost = run_command(*simulated(study, out, template, workers))
    rows.append(Row("run of a finished study, which writes the report", cost.cpu_s, "s", 30))
    rows.append(Row("its memory", cost.peak_mb, "MB", 1000))
    size = sum(file.stat().st_size for file in (out / "studies/scale/report").iterdir())
    rows.append(Row("report, size of all its files", size / 1e6, "MB", 50))

    lossy = folder / "lossy"
    run_command(*simulated(study, lossy, template, workers, loss_at=3000.0))
    figures = ledger(lossy)
    rows.append(Row("trials without a result after a third of the workers is lost", trials - figures["ended"], "", 0))
    ratio = figures["makespan"] / ideal_s(figures["needed"], workers, 3000.0)
    rows.append(Row("makespan with that loss, of the ideal one", ratio, "", 1.15))
    return rows


def cpu_s(group: int) -> float:
    """Return the CPU seconds of the processes of a group."""
    ticks = 0
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields = file.read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12]) if int(fields[2]) == group else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def tracked(folder: Path, template: Path, trials: int, workers: int) -> list[Row]:
    """Deliver to a server on this machine, twice, and to a database file."""
    study, out, place = study_of(trials, folder), folder / "tracked", folder / "server"
    run_command(*simulated(study, out, template, workers))
    port = free_port()
    rows, words = list[Row](), ("sync", str(out), "--tracking-uri", f"http://127.0.0.1:{port}")
    place.mkdir()
    with running_server(place, port=port) as server:
        of_many = 20.0 if trials >= 10_000 else math.nan  # of fewer, those with files have too large a part
        for which, bound in (("", of_many), ("again, ", math.nan)):
            began, before = time.monotonic(), cpu_s(server.pid)
            cost = run_command(*words)
            rows += [
                Row(f"MLflow {which}of each trial", 1000 * cost.cpu_s / trials, "ms", bound),
                Row(f"MLflow {which}the server's part", 1000 * (cpu_s(server.pid) - before) / trials, "ms", math.nan),
                Row(f"MLflow {which}time", time.monotonic() - began, "s", math.nan),
                Row(f"MLflow {which}memory", cost.peak_mb, "MB", 1000),
            ]
    files = sum(len(names) for _, _, names in os.walk(place / "mlartifacts"))
    rows.append(Row("MLflow, files of each trial", files / trials, "", 3))
    cost = run_command("sync", str(out), "--tracker", "mlflow")
    rows.append(
        Row("MLflow in a file, of each trial, which includes the database", 1000 * cost.cpu_s / trials, "ms", math.nan)
    )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=1_000)
    parser.add_argument("--tracked", type=int, default=1_000, help="trials that are delivered to MLflow")
    parser.add_argument("--part", choices=["all", "driver", "mlflow"], default="all")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    options = parser.parse_args()
    rows = list[Row]()
    with tempfile.TemporaryDirectory(prefix="vitlab-scale-") as place:
        folder = Path(place)
        template = trained(folder)
        if options.part != "mlflow":
            rows += driven(folder, template, options.trials, options.workers)
        if options.part != "driver":
            rows += tracked(folder, template, options.tracked, options.workers)
    print(f"{options.trials:,} trials, {options.workers:,} workers; MLflow: {options.tracked:,} trials\n")
    print("| | measured | bound |\n| --- | ---: | ---: |")
    for row in rows:
        bound = "" if math.isnan(row.bound) else f"{row.bound:g} {row.unit}"
        print(f"| {row.what} | {row.measured:.3g} {row.unit} | {bound} |")
    if options.json:
        options.json.write_text(json.dumps([row._asdict() for row in rows], indent=1))


if __name__ == "__main__":
    main()
