"""The benchmarks: vitlab against its peers, in turns, and what it costs beside the training.

    python tools/benchmarks/run.py [--only P3,P4] [--out vitlab-runs/bench]

Prints a table and writes it, with a figure and the numbers, to the output folder.  Contenders are run in turns
(:mod:`measuring`); a figure is the median over rounds, with its quartiles, of ratios within a round.  Everything runs at
one thread unless its line says otherwise.  About ten minutes on two cores that do nothing else.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import augment
import costs
import limit
import memory
import seeds
import single
import studies
import threads
import torch
from measuring import Row

GOALS: Mapping[str, Callable[[], list[Row]]] = {
    "P1": seeds.to_the_tutorial,
    "P2": studies.tutorials,
    "P3": seeds.to_timm,
    "P4": single.measure,
    "P6": costs.trials,
    "P7": costs.commands,
    "P8": augment.measure,
    "P9": costs.journal,
    "P10": threads.measure,
    "P13": limit.measure,
    "P15": studies.positions,
    "P16": costs.fixed,
    "P18": costs.quickstart,
    "memory": memory.measure,
    "P2-full": studies.full_tutorials,
    "P15-full": studies.full_positions,
}
DEFAULT = tuple(goal for goal in GOALS if not goal.endswith("-full"))  #: those in full take an hour
OUT = Path(__file__).parents[2] / "vitlab-runs" / "bench"


def environment() -> dict[str, str]:
    """Return the versions and hardware of the measurement."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    facts = {
        "CPU": f"{cpu}, {torch.backends.cpu.get_cpu_capability()}",
        "cores": str(len(os.sched_getaffinity(0))),
        "load": f"{os.getloadavg()[0]:.1f}",
        "Python": platform.python_version(),
    }
    for name in ("torch", "torchvision", "timm", "transformers", "vit-pytorch"):
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            facts[name] = "not installed, not measured"
    return facts


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    lines = ["| | what | median | quartiles | gate | | clock |", "| --- | --- | ---: | --- | ---: | --- | --- |"]
    for one in rows:
        gate = "" if one.gate is None else f"{one.gate:g} {one.unit}"
        verdict = {None: "", True: "met", False: "missed"}[one.met]
        median, low, high = (f"{value:.3g}" for value in (one.median, one.low, one.high))
        lines.append(
            f"| {one.goal} | {one.what} | {median} {one.unit} | {low} to {high} | {gate} | {verdict} | {one.clock} |"
        )
    return "\n".join(lines)


def draw(rows: Sequence[Row], file: Path) -> None:
    """Draw bars of the gates and of the ratios without one."""
    from matplotlib.figure import Figure

    groups = {
        "times as fast (the mark is the gate)": [one for one in rows if one.unit == "x"],
        "cost as a share of its gate": [one for one in rows if one.unit != "x" and one.gate is not None],
    }
    groups = {title: group for title, group in groups.items() if group}
    heights = [len(group) for group in groups.values()]
    figure = Figure(figsize=(9, 0.8 * len(groups) + 0.27 * sum(heights)), layout="constrained")
    panels = figure.subplots(len(groups), 1, squeeze=False, height_ratios=heights)[:, 0]
    for panel, (title, group) in zip(panels, groups.items(), strict=True):
        for place, one in enumerate(group):
            scale = 1.0 if one.unit == "x" else one.gate or 1.0
            colour = {None: "#9aa1a9", True: "#009e73", False: "#d55e00"}[one.met]
            spread = [[max(0.0, (one.median - one.low) / scale)], [max(0.0, (one.high - one.median) / scale)]]
            panel.barh(place, one.median / scale, color=colour, height=0.7)
            panel.errorbar(one.median / scale, place, xerr=spread, color="#1b1e23", linewidth=1)
            if one.gate is not None:
                panel.plot([one.gate / scale] * 2, [place - 0.45, place + 0.45], color="#1b1e23", linewidth=2)
        panel.set_yticks(range(len(group)), [f"{one.goal}  {one.what}" for one in group], fontsize=7)
        panel.invert_yaxis()
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_title(title, loc="left", fontsize=9)
        if title.startswith("times"):
            panel.axvline(1.0, color="#9aa1a9", linewidth=0.6)
            panel.set_xscale("log")
            panel.set_xticks([0.5, 1, 2, 5, 10, 20], ["0.5", "1", "2", "5", "10", "20"])
            panel.minorticks_off()
    figure.savefig(file, dpi=150)


def write(rows: Sequence[Row], actual: Mapping[str, str], out: Path) -> None:
    """Write the table, the numbers and the figure."""
    setting = ", ".join(f"{name} {value}" for name, value in actual.items())
    (out / "table.md").write_text(f"{table(rows)}\n\n{datetime.date.today()}: {setting}.\n")
    records = [{**asdict(one), "met": one.met} for one in rows]
    (out / "measured.json").write_text(json.dumps({"environment": actual, "rows": records}, indent=1) + "\n")
    draw(rows, out / "ratios.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default=",".join(DEFAULT), help=f"some of {','.join(GOALS)}")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    goals = arguments.only.split(",")
    unknown = [goal for goal in goals if goal not in GOALS]
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(GOALS)}")
    torch.set_num_threads(1)
    began, facts = time.perf_counter(), environment()
    load = facts["load"]
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    for goal in goals:
        rows += GOALS[goal]()
        facts["load"] = f"{load} to {os.getloadavg()[0]:.1f}"
        write(rows, facts, arguments.out)  # so that an interrupted run leaves its results
        print(f"{goal} measured, {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    print((arguments.out / "table.md").read_text())
    print(f"table, numbers and figure: {arguments.out}")


if __name__ == "__main__":
    main()
