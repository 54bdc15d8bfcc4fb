"""Progress display of a run: a live table in a terminal, an updating display in a notebook, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vitlab.driver.remaining import RemainingTime, TrialProgress, trial_name
from vitlab.driver.session import Watch
from vitlab.errors import count
from vitlab.plan.values import Plan, Planned
from vitlab.store.folders import Store
from vitlab.store.result import Ending

REFRESH_S = 0.5
SILENCE_S = 60.0  #: time without a line after which a plain line tells the remaining time
NOTEBOOK_REFRESH_S = 1.0  #: every update is a message to the browser
MAX_ROWS = 20  #: maximum number of running trials that a notebook lists
MAX_ARMS = 4  #: maximum number of arms that a line names
MAX_CACHED = 200  #: maximum number of earlier results that are read for the display


def watch_on() -> Watch:
    """Return the progress display for this process: for a notebook, a terminal, or plain stderr."""
    if in_notebook():
        return NotebookView()
    return LiveView() if sys.stderr.isatty() else PlainLines()


def in_notebook() -> bool:
    """Return True if this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


class _Display(Watch):
    """Base of the displays, which counts trials and estimates the remaining time."""

    def __init__(self) -> None:
        self._done = self._total = 0
        self._time = RemainingTime((), Store(Path()))

    def on_plan(self, plan: Plan, todo: Sequence[Planned], store: Store) -> None:
        self._done, self._total = 0, len(todo)
        self._time = RemainingTime(todo, store, len(plan.pending))

    def on_schedule(self, batches: Sequence[Sequence[Planned]], slots: int) -> None:
        self._time.schedule(batches, slots)

    def on_start(self, planned: Planned) -> None:
        self._time.start(planned)

    def on_end(self, planned: Planned, ending: Ending, detail: str) -> None:
        if ending in (Ending.DONE, Ending.FAILED):
            self._done += 1
            self._time.end(planned, time.time())

    def _rest(self) -> str:
        """Return the remaining time in words; empty once all trials have ended."""
        if self._done >= self._total:
            return ""
        self._time.update()
        seconds = self._time.seconds(time.time())
        return "estimating the remaining time" if seconds is None else f"{_duration(seconds)} left"


class PlainLines(_Display):
    """Progress display with one line for all trials that end together."""

    def __init__(self) -> None:
        super().__init__()
        self._ended: list[Planned] = []
        self._printed = 0.0

    def on_plan(self, plan: Plan, todo: Sequence[Planned], store: Store) -> None:
        """Print the size of the plan and start counting."""
        super().on_plan(plan, todo, store)
        self._printed = time.monotonic()
        skipped = sum(1 for arm in plan.arms if arm.skip)
        click.echo(
            f"{plan.study}: {size_of(plan, todo, store)}" + (f", {count(skipped, 'arm')} skipped" if skipped else ""),
            err=True,
        )

    def on_end(self, planned: Planned, ending: Ending, detail: str) -> None:
        """Print a line for a trial that did not end well; the others are printed together."""
        if ending == Ending.DONE and not detail:
            super().on_end(planned, ending, detail)
            self._ended.append(planned)
            return
        self._flush()
        super().on_end(planned, ending, detail)
        self._print(f"{trial_name(planned)} {ending}" + (f": {detail.splitlines()[0]}" if detail else ""))

    def tick(self) -> None:
        """Print the line of the trials that have ended since the last call, or one after a silence."""
        self._flush()
        if time.monotonic() - self._printed > SILENCE_S and self._done < self._total:
            self._print("running")

    def say(self, sentence: str) -> None:
        """Print the sentence to stderr."""
        self._flush()
        click.echo(sentence, err=True)

    def close(self) -> None:
        """Print what has not been printed yet."""
        self._flush()

    def _flush(self) -> None:
        ended, self._ended = self._ended, []
        if ended:
            self._print(f"{_names(ended)} {Ending.DONE}")

    def _print(self, text: str) -> None:
        rest, self._printed = self._rest(), time.monotonic()
        click.echo(f"[{self._done}/{self._total}] {text}" + (f"  ({rest})" if rest else ""), err=True)


class _Board(_Display):
    """Base of redrawn displays, which list running trials."""

    def __init__(self) -> None:
        super().__init__()
        self._running: dict[str, TrialProgress] = {}
        self._refreshed = 0.0

    def on_plan(self, plan: Plan, todo: Sequence[Planned], store: Store) -> None:
        super().on_plan(plan, todo, store)
        self._plan, self._store = plan, store
        self._running.clear()
        self._so_far = SoFar(plan, store, todo)

    def on_start(self, planned: Planned) -> None:
        self._running[trial_name(planned)] = self._time.start(planned)

    def on_end(self, planned: Planned, ending: Ending, detail: str) -> None:
        super().on_end(planned, ending, detail)
        self._running.pop(trial_name(planned), None)
        if ending == Ending.DONE:
            self._so_far.add(planned)
        else:
            self.say(f"{trial_name(planned)} {ending}" + (f": {detail.splitlines()[0]}" if detail else ""))

    def _progress(self) -> float:
        """Return the number of trials that have ended, plus the share of each running one."""
        return self._done + sum(progress.share for progress in self._running.values())

    def _metric(self, progress: TrialProgress) -> str:
        """Return the latest value of the study's metric; empty before there is one."""
        metric = self._plan.analysis.metric
        value = progress.latest.get("metrics", {}).get(metric)
        return "" if value is None else f"{metric} {value:.4g}"


class LiveView(_Board):
    """Table redrawn in place: a bar for each running trial, its metric, and the differences of arms so far."""

    def __init__(self, console: Console | None = None) -> None:
        super().__init__()
        self._console = console or Console(stderr=True)
        self._live: Live | None = None

    def on_plan(self, plan: Plan, todo: Sequence[Planned], store: Store) -> None:
        """Print the size of the plan and start the live table."""
        super().on_plan(plan, todo, store)
        self._console.print(f"[bold]{plan.study}[/]  {size_of(plan, todo, store)}")
        if todo:
            self._live = Live(self._draw(), console=self._console, auto_refresh=False, transient=True)
            self._live.start()

    def tick(self) -> None:
        """Redraw the table when it is due."""
        if self._live and time.monotonic() - self._refreshed > REFRESH_S:
            self._live.update(self._draw(), refresh=True)
            self._refreshed = time.monotonic()

    def say(self, sentence: str) -> None:
        """Print the sentence above the table."""
        self._console.print(Text(sentence))

    def close(self) -> None:
        """Stop the live table."""
        if self._live:
            self._live.stop()
            self._live = None

    def _draw(self) -> Group:
        rest = self._rest()  # reads the journals
        head = Table.grid(padding=(0, 2))
        head.add_row(
            ProgressBar(total=max(self._total, 1), completed=self._progress(), width=40),
            f"{self._done} of {self._total} trials",
            rest,
        )
        differences = self._so_far.lines(max(0, self._console.height // 2 - 2))
        room = max(1, self._console.height - len(differences) - 4)
        rows = Table.grid(padding=(0, 2))
        listed = list(self._running.items())
        for name, progress in listed if len(listed) <= room else listed[: room - 1]:
            bar = ProgressBar(total=1.0, completed=progress.share, width=20)
            share = f"{100 * progress.share:.0f} %" if progress.started is not None else "starting"
            rows.add_row(Text(name), bar, Text(share, justify="right"), self._metric(progress))
        if len(listed) > room:
            rows.add_row(f"... and {len(listed) - room + 1} more")
        return Group(head, rows, *(Text(line, style="dim") for line in differences))


class NotebookView(_Board):
    """Output of a notebook cell, updated in place; messages are printed below it."""

    def __init__(self) -> None:
        super().__init__()
        self._handle: Any = None

    def on_plan(self, plan: Plan, todo: Sequence[Planned], store: Store) -> None:
        """Show the table in the notebook's output cell."""
        super().on_plan(plan, todo, store)
        self._head = f"{plan.study}: {size_of(plan, todo, store)}"
        self._handle = sys.modules["IPython"].display.display(self._draw(), display_id=True)

    def tick(self) -> None:
        """Redraw the table when it is due."""
        if self._handle is not None and time.monotonic() - self._refreshed > NOTEBOOK_REFRESH_S:
            self._handle.update(self._draw())
            self._refreshed = time.monotonic()

    def say(self, sentence: str) -> None:
        """Print the sentence."""
        print(sentence)

    def close(self) -> None:
        """Draw the table a last time."""
        if self._handle is not None:
            self._running.clear()
            self._handle.update(self._draw())
            self._handle = None

    def _draw(self) -> _Page:
        progress, rest = f"{self._done} of {self._total} trials", self._rest()
        rows = [(name, *self._cells(item)) for name, item in list(self._running.items())[:MAX_ROWS]]
        if len(self._running) > MAX_ROWS:
            rows.append((f"... and {len(self._running) - MAX_ROWS} more", "", ""))
        text = ", ".join(filter(None, (f"{self._head}: {progress}", rest)))
        cells = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        bar = f'<progress max="{max(self._total, 1)}" value="{self._progress():g}"></progress>'
        html = f"<div>{escape(self._head)}<br>{bar} {escape(', '.join(filter(None, (progress, rest))))}"
        return _Page(text, f"{html}<table>{cells}</table></div>")

    def _cells(self, progress: TrialProgress) -> tuple[str, str]:
        if not progress.latest:
            return "starting", ""
        return f"epoch {progress.latest['epoch']:.3g}", self._metric(progress)


class _Page:
    """Display with a text and an HTML form."""

    def __init__(self, text: str, html: str) -> None:
        self._text, self._html = text, html

    def __repr__(self) -> str:
        return self._text

    def _repr_html_(self) -> str:
        return self._html


class SoFar:
    """The differences of arms from their baselines while a study is running, from the trials that have ended.

    Args:
        plan: The plan.
        store: The store of its trials.
        todo: The trials that are still to be trained; the results of the others are read when they are needed.
    """

    def __init__(self, plan: Plan, store: Store, todo: Sequence[Planned]) -> None:
        self._plan, self._store = plan, store
        self._values: dict[str, dict[int, float]] = {}
        self._lines: dict[str, tuple[tuple[int, int], str]] = {}  #: arm to numbers of values, and line
        missing = {trial_name(planned) for planned in todo}
        cached = [planned for planned in plan.trials if trial_name(planned) not in missing]
        if len(cached) <= MAX_CACHED:
            for planned in cached:
                self.add(planned)

    def add(self, planned: Planned) -> None:
        """Read the result of a trial that has ended."""
        analysis = self._plan.analysis
        result = self._store.trial(planned.trial.key, planned.trial.code).result()
        if result is None:
            return
        measured = [*result.outcome.history] if analysis.at == "best" else [result.outcome]
        values = [item.metrics[analysis.metric] for item in measured if analysis.metric in item.metrics]
        best = max if analysis.goal == "max" else min
        if finite := [value for value in values if math.isfinite(value)]:
            self._values.setdefault(planned.arm, {})[planned.seed] = best(finite)

    def lines(self, limit: int) -> list[str]:
        """Return a line for each arm that shares at least two seeds with its baseline, at most ``limit`` of them."""
        from vitlab.comparison.arrays import contrast
        from vitlab.report.phrasing import Scale

        scale = Scale.of(self._plan.analysis.metric, self._plan.units)
        factor, unit = scale.factor, f" {scale.points}".rstrip()
        lines: list[str] = []
        for arm in self._plan.arms:
            first, second = self._values.get(arm.name, {}), self._values.get(arm.baseline or "", {})
            if len(lines) == limit:
                break
            if len(first.keys() & second.keys()) < 2:
                continue
            counts = len(first), len(second)
            if arm.name not in self._lines or self._lines[arm.name][0] != counts:  # a comparison may take 0.2 s
                so_far = contrast(first, second)
                low, high, mean = (factor * value for value in (so_far.low, so_far.high, so_far.difference))
                interval = f"{low:+.3g} to {high:+.3g}; " if low <= high else ""
                of_level = ", 95 % interval, not corrected" if interval else ""
                line = f"{arm.name}: {mean:+.3g}{unit} so far ({interval}{count(so_far.pairs, 'pair')}{of_level})"
                self._lines[arm.name] = counts, line
            lines.append(self._lines[arm.name][1])
        return lines


def _names(trials: Sequence[Planned]) -> str:
    """Return the names of trials: each arm once, with its seeds."""
    seeds: dict[str, list[int]] = {}
    for planned in trials:
        seeds.setdefault(planned.arm, []).append(planned.seed)
    arms = [f"{arm} {_seeds(numbers)}" for arm, numbers in list(seeds.items())[:MAX_ARMS]]
    return ", ".join([*arms, *([f"... and {len(seeds) - MAX_ARMS} more arms"] if len(seeds) > MAX_ARMS else [])])


def _seeds(numbers: Sequence[int]) -> str:
    """Return seeds as ``s3``, ``s0 to s14`` or ``s0, s2, s7``."""
    ordered = sorted(numbers)
    if len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1)):
        return f"s{ordered[0]} to s{ordered[-1]}"
    return ", ".join(f"s{number}" for number in ordered)


def _duration(seconds: float) -> str:
    hours, minutes = divmod(round(seconds) // 60, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {round(seconds) % 60:02} s"


def size_of(plan: Plan, todo: Sequence[Planned], store: Store) -> str:
    """Return the size of a plan in words; ``todo`` may contain prerequisites, which belong to no arm."""
    identities = {_identity(planned) for planned in todo}
    others = [store.trial(item.trial.key, item.trial.code) for item in plan.trials if _identity(item) not in identities]
    trained = sum((folder.path / "result.json").exists() for folder in others)
    resumed = sum(store.trial(item.trial.key, item.trial.code).checkpoint.exists() for item in todo)
    parts = [f"{len(todo)} to train" if todo else "nothing to train"]
    if resumed:
        parts.append("from a checkpoint" if resumed == len(todo) == 1 else f"{resumed} of them from a checkpoint")
    if trained:
        parts.append(f"{trained} trained already")
    return f"{count(len(plan.arms), 'arm')}, {count(len(plan.trials), 'trial')}; {', '.join(parts)}"


def _identity(planned: Planned) -> tuple[str, int]:
    return planned.arm, planned.seed
