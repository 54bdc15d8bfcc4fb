"""Progress display of a run: a live table in a terminal, an updating display in a notebook, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from html import escape
from typing import Any

import click
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vitlab.driver.scheduler import Watch
from vitlab.errors import count
from vitlab.plan.values import Plan, Planned
from vitlab.store.folders import Store, TrialFolder
from vitlab.store.result import Ending

REFRESH_S = 0.5
NOTEBOOK_REFRESH_S = 1.0  #: every update is a message to the browser
MAX_ROWS = 20  #: maximum number of running trials that a notebook lists


def watch_on() -> Watch:
    """Return the progress display for this process: for a notebook, a terminal, or plain stderr."""
    if in_notebook():
        return NotebookView()
    return LiveView() if sys.stderr.isatty() else PlainLines()


def in_notebook() -> bool:
    """Return True if this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


class PlainLines(Watch):
    """Progress display with one line per event."""

    def __init__(self) -> None:
        self._total = self._done = 0
        self._since = time.monotonic()

    def planned(self, plan: Plan, todo: Sequence[Planned], store: Store) -> None:
        """Print the size of the plan and start counting."""
        self._total, self._done, self._since = len(todo), 0, time.monotonic()
        skipped = sum(1 for arm in plan.arms if arm.skip)
        click.echo(
            f"{plan.study}: {_size(plan, todo)}" + (f", {count(skipped, 'arm')} skipped" if skipped else ""), err=True
        )

    def ended(self, planned: Planned, ending: Ending, detail: str) -> None:
        """Print one line for the trial that ended."""
        self._done += ending in (Ending.DONE, Ending.FAILED)
        time_left = _time_left(self._since, self._done, self._total)
        text = f"[{self._done}/{self._total}] {planned.arm} s{planned.seed} {ending}"
        click.echo(
            text + (f": {detail.splitlines()[0]}" if detail else "") + (f"  ({time_left} left)" if time_left else ""),
            err=True,
        )

    def say(self, sentence: str) -> None:
        """Print the sentence to stderr."""
        click.echo(sentence, err=True)


class _Board(Watch):
    """Base of redrawn displays, which show ended and running trials and the remaining time."""

    def __init__(self) -> None:
        self._running: dict[str, _Running] = {}
        self._since = time.monotonic()
        self._drawn = 0.0
        self._done = self._total = 0

    def planned(self, plan: Plan, todo: Sequence[Planned], store: Store) -> None:
        self._plan, self._total, self._store = plan, len(todo), store
        self._done, self._since = 0, time.monotonic()

    def started(self, planned: Planned) -> None:
        folder = self._store.trial(planned.trial.key, planned.trial.code)
        self._running[_name(planned)] = _Running(folder, self._plan.analysis.metric)

    def ended(self, planned: Planned, ending: Ending, detail: str) -> None:
        self._running.pop(_name(planned), None)
        self._done += ending in (Ending.DONE, Ending.FAILED)
        if ending != Ending.DONE:
            self.say(f"{_name(planned)} {ending}" + (f": {detail.splitlines()[0]}" if detail else ""))

    def _rest(self) -> str:
        time_left = _time_left(self._since, self._done, self._total)
        return f"{time_left} left" if time_left else ""


class LiveView(_Board):
    """Table of running trials, redrawn in place, with epoch, metric, trials done and remaining time."""

    def __init__(self, console: Console | None = None) -> None:
        super().__init__()
        self._console = console or Console(stderr=True)
        self._live: Live | None = None

    def planned(self, plan: Plan, todo: Sequence[Planned], store: Store) -> None:
        """Print the size of the plan and start the live table."""
        super().planned(plan, todo, store)
        self._console.print(f"[bold]{plan.study}[/]  {_size(plan, todo)}")
        if todo:
            self._live = Live(self._draw(), console=self._console, auto_refresh=False, transient=True)
            self._live.start()

    def tick(self) -> None:
        """Redraw the table when it is due."""
        if self._live and time.monotonic() - self._drawn > REFRESH_S:
            self._live.update(self._draw(), refresh=True)
            self._drawn = time.monotonic()

    def say(self, sentence: str) -> None:
        """Print the sentence above the table."""
        self._console.print(Text(sentence))

    def close(self) -> None:
        """Stop the live table."""
        if self._live:
            self._live.stop()
            self._live = None

    def _draw(self) -> Group:
        head = Table.grid(padding=(0, 2))
        head.add_row(
            ProgressBar(total=max(self._total, 1), completed=self._done, width=40),
            f"{self._done} of {self._total} trials",
            self._rest(),
        )
        rows = Table.grid(padding=(0, 2))
        for name, running in self._running.items():
            rows.add_row(Text(name), *running.columns())
        return Group(head, rows)


class NotebookView(_Board):
    """Output of a notebook cell, updated in place; messages are printed below it."""

    def __init__(self) -> None:
        super().__init__()
        self._handle: Any = None

    def planned(self, plan: Plan, todo: Sequence[Planned], store: Store) -> None:
        """Show the table in the notebook's output cell."""
        super().planned(plan, todo, store)
        self._head = f"{plan.study}: {_size(plan, todo)}"
        self._handle = sys.modules["IPython"].display.display(self._draw(), display_id=True)

    def tick(self) -> None:
        """Redraw the table when it is due."""
        if self._handle is not None and time.monotonic() - self._drawn > NOTEBOOK_REFRESH_S:
            self._handle.update(self._draw())
            self._drawn = time.monotonic()

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
        progress = f"{self._done} of {self._total} trials"
        rows = [(name, *running.columns()) for name, running in list(self._running.items())[:MAX_ROWS]]
        if len(self._running) > MAX_ROWS:
            rows.append((f"... and {len(self._running) - MAX_ROWS} more", "", ""))
        text = ", ".join(filter(None, (f"{self._head}: {progress}", self._rest())))
        cells = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        bar = f'<progress max="{max(self._total, 1)}" value="{self._done}"></progress>'
        html = f"<div>{escape(self._head)}<br>{bar} {escape(', '.join(filter(None, (progress, self._rest()))))}"
        return _Page(text, f"{html}<table>{cells}</table></div>")


class _Page:
    """Display with a text and an HTML form."""

    def __init__(self, text: str, html: str) -> None:
        self._text, self._html = text, html

    def __repr__(self) -> str:
        return self._text

    def _repr_html_(self) -> str:
        return self._html


class _Running:
    """Reader of a running trial's journal."""

    def __init__(self, folder: TrialFolder, metric: str) -> None:
        self._folder, self._metric = folder, metric
        _, self._offset = folder.events()
        self._last: dict[str, Any] = {}

    def columns(self) -> tuple[str, str]:
        events, self._offset = self._folder.events(self._offset)
        for event in events:
            if event.kind == "metrics" and self._metric in event.body["metrics"]:
                self._last = dict(event.body)
        if not self._last:
            return "starting", ""
        return f"epoch {self._last['epoch']:.3g}", f"{self._metric} {self._last['metrics'][self._metric]:.4g}"


def _name(planned: Planned) -> str:
    return f"{planned.arm} s{planned.seed}"


def _time_left(since: float, completed: int, total: int) -> str:
    """Return the remaining time, estimated from the rate so far; empty if unknown."""
    if not completed or completed >= total:
        return ""
    seconds = int((time.monotonic() - since) / completed * (total - completed))
    hours, minutes = divmod(seconds // 60, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds % 60:02} s"


def _size(plan: Plan, todo: Sequence[Planned]) -> str:
    """Return the size of a plan in words; ``todo`` may contain prerequisites, which belong to no arm."""
    identities = {(planned.arm, planned.seed) for planned in todo}
    skipped = sum((planned.arm, planned.seed) not in identities for planned in plan.trials)
    return f"{count(len(plan.arms), 'arm')}, {count(len(plan.trials), 'trial')}; {len(todo)} to train, {skipped} not"
