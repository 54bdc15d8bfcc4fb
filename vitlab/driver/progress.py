"""Progress display of a run: bars in a terminal or a notebook, plain lines elsewhere."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import Timer
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.text import Text

from vitlab.driver.session import Watch
from vitlab.errors import format_count
from vitlab.identity.trial import Trial
from vitlab.planning.values import Plan, Planned
from vitlab.report.phrasing import format_duration, format_seeds
from vitlab.spec.trial import LENGTHS
from vitlab.store.folders import CHECKPOINT, Store, TrialFolder
from vitlab.store.result import Ending

REFRESH_S = 0.5
SILENCE_S = 60.0  #: time without a line after which a plain line tells the remaining time
FIRST_SILENCE_S = 5.0  #: the same before the first line, while processes start, and for a status
NOTEBOOK_REFRESH_S = 1.0  #: every update is a message to the browser
SPEED_S = 24 * 3600.0  #: the remaining time follows from the speed over this time
SAMPLE = 32  #: running trials whose journals are read for the display; the others count as the mean of these
MAX_ARMS = 4  #: maximum number of arms that a line names
COUNTED = {"epochs": "epoch", "steps": "step", "images": "images"}
"""Unit of a training's length to the field of a measurement that counts it."""


def watch_on() -> Watch:
    """Return the progress display for this process: for a notebook, a terminal, or plain stderr."""
    ipython = sys.modules.get("IPython")
    if ipython is not None and hasattr(ipython.get_ipython(), "kernel"):
        return NotebookView()
    return LiveView() if sys.stderr.isatty() else PlainLines()


class TrialProgress:
    """A reader of a running trial's journal, from where it ended when the reader was made."""

    def __init__(self, folder: TrialFolder, trial: Trial) -> None:
        self._folder = folder
        _, self._offset = folder.events()
        self._unit = next(unit for unit in LENGTHS if getattr(trial.spec.train, unit) is not None)
        self._length = float(getattr(trial.spec.train, self._unit))
        self.has_started = False
        self.latest: Mapping[str, Any] = {}  #: the last measurement: ``step, epoch, images, metrics``

    def update(self) -> None:
        """Read the lines that have been appended to the journal."""
        events, self._offset = self._folder.events(self._offset)
        for event in events:
            self.has_started |= event.kind == "start"
            if event.kind == "metrics":
                self.latest = event.body

    @property
    def share(self) -> float:
        """Share of the training that has been measured, from 0 to 1."""
        reached = self.latest.get(COUNTED[self._unit], 0)
        return min(1.0, reached / self._length) if self._length and isinstance(reached, int | float) else 0.0


def _bars(console: Console) -> Progress:
    """Return the bars of all trials together and of each running one; rich shows those that fit on the screen."""
    texts = (TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[text]}"))
    columns = next(texts), BarColumn(), next(texts)
    return Progress(*columns, console=console, auto_refresh=False, transient=True, speed_estimate_period=SPEED_S)


class _Display(Watch):
    """Base of the displays, which counts trials and estimates the remaining time."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._bars = _bars(self._console)
        self._done = self._total = 0
        self._moved = 0.0  #: when the bar of all trials moved last
        self._running: dict[str, tuple[TaskID, TrialProgress]] = {}
        self._first_with: dict[str, str] = {}  #: sentence of a failure to the first trial that it ended
        self._alike: Counter[str] = Counter()  #: first trial to the number of later ones that failed for its reason

    def on_plan(self, plan: Plan, todo: Sequence[Planned], store: Store) -> None:
        self._plan, self._store = plan, store
        self._done, self._total = 0, len(todo)
        self._running.clear()
        self._bars = _bars(self._console)
        self._all = self._bars.add_task(
            plan.study, total=max(1, len(todo) + len(plan.pending)), text="starting workers"
        )
        skipped = sum(1 for arm in plan.arms if arm.skip)
        self.say(
            f"{plan.study}: {size_of(plan, todo, store)}"
            + (f", {format_count(skipped, 'arm')} skipped" if skipped else "")
        )

    @contextmanager
    def status(self, what: str) -> Iterator[object]:
        """Say in a sentence what is done, once that has taken a while."""
        timer = Timer(FIRST_SILENCE_S, self.say, [what])
        timer.daemon = True  # Ctrl-C may come before it is cancelled
        timer.start()
        try:
            yield None
        finally:
            timer.cancel()

    def on_start(self, planned: Planned) -> None:
        folder = self._store.folder(planned.trial)
        task = self._bars.add_task(trial_name(planned), total=1.0, text="starting")
        self._running[trial_name(planned)] = task, TrialProgress(folder, planned.trial)
        self.tick()  # an executor that trains in this process would not return before

    def on_end(self, planned: Planned, ending: Ending, detail: str) -> None:
        if (running := self._running.pop(trial_name(planned), None)) is not None:
            self._bars.remove_task(running[0])
        if ending in (Ending.DONE, Ending.FAILED):
            self._done += 1

    def _update(self) -> None:
        """Read what has been appended to the journals of running trials, and move the bars."""
        sample = list(self._running.values())[:SAMPLE]  # a cluster may run thousands
        for task, progress in sample:
            progress.update()
            if progress.has_started or progress.latest:
                value = progress.latest.get("metrics", {}).get(self._plan.analysis.metric)
                metric = "" if value is None else f"   {self._plan.analysis.metric} {value:.4g}"
                self._bars.update(task, completed=progress.share, text=f"{100 * progress.share:3.0f} %{metric}")
        shares = sum(progress.share for _, progress in sample) * len(self._running) / max(1, len(sample))
        if self._done + shares > self._bars.tasks[0].completed:
            self._moved = self._bars.get_time()
        self._bars.update(self._all, completed=self._done + shares)
        self._bars.update(self._all, text=f"{self._done} of {self._total} trials   {self._rest()}")

    def _rest(self) -> str:
        """Return the remaining time in words; empty once all trials have ended."""
        if self._done >= self._total:
            return ""
        seconds = self._bars.tasks[0].time_remaining
        if seconds is None:
            return "estimating the remaining time"
        return f"{format_duration(round(max(0.0, seconds - (self._bars.get_time() - self._moved))))} left"

    def _ending_of(self, planned: Planned, ending: Ending, detail: str) -> str:
        """Return a line for an ending; it is empty for a failure that an earlier trial had, see :meth:`close`."""
        name, sentence = trial_name(planned), detail.partition("\n")[0]
        first = self._first_with.setdefault(sentence, name)
        if not sentence:
            return f"{name} {ending}"
        if first != name and ending == Ending.FAILED:  # one line for a failure that many trials share
            self._alike[first] += 1
            return ""
        return f"{name} {ending}: {sentence}" if first == name else f"{name} {ending}, for the same reason as {first}"

    def close(self) -> None:
        """Say how many trials failed for the same reason as an earlier one."""
        for first, number in self._alike.items():
            self.say(f"{format_count(number, 'more trial')} failed for the same reason as {first}.")
        self._alike.clear()


class PlainLines(_Display):
    """Progress display with one line for all trials that end together."""

    def __init__(self) -> None:
        super().__init__()
        self._ended: list[Planned] = []
        self._printed = 0.0
        self._timer = Timer(FIRST_SILENCE_S, self._say_state)

    def on_plan(self, plan: Plan, todo: Sequence[Planned], store: Store) -> None:
        """Print the size of the plan and start counting."""
        super().on_plan(plan, todo, store)
        self._printed = time.monotonic()
        self._timer = Timer(FIRST_SILENCE_S, self._say_state)  # tick is not called while the first worker starts
        self._timer.daemon = True  # Ctrl-C may come before it is cancelled
        self._timer.start()

    def on_end(self, planned: Planned, ending: Ending, detail: str) -> None:
        """Print a line for a trial that did not end well; the others are printed together."""
        if ending == Ending.DONE and not detail:
            super().on_end(planned, ending, detail)
            self._ended.append(planned)
            return
        self._flush()
        super().on_end(planned, ending, detail)
        if line := self._ending_of(planned, ending, detail):
            self._print(line)

    def tick(self) -> None:
        """Print the line of the trials that have ended since the last call, or one after a silence."""
        self._flush()
        if time.monotonic() - self._printed > SILENCE_S:
            self._say_state()

    def _say_state(self) -> None:
        if self._done < self._total:
            self._update()  # a trial may have started during the silence
            has_started = self._done or any(progress.has_started for _, progress in self._running.values())
            self._print("running" if has_started else "starting processes and reading data")

    def say(self, sentence: str) -> None:
        """Print the sentence to stderr."""
        self._flush()
        click.echo(sentence, err=True)

    def close(self) -> None:
        """Print what has not been printed yet."""
        self._timer.cancel()
        self._flush()
        super().close()

    def _flush(self) -> None:
        trials, self._ended = self._ended, []
        if trials:
            self._print(f"{_names(trials)} {Ending.DONE}")

    def _print(self, text: str) -> None:
        self._timer.cancel()
        self._update()
        self._printed = time.monotonic()
        rest = self._rest()
        click.echo(f"[{self._done}/{self._total}] {text}" + (f"  ({rest})" if rest else ""), err=True)


class LiveView(_Display):
    """Bars that are redrawn in place in a terminal.

    They show no differences of arms: a look at every seed would be one that the verdict does not count.
    """

    refresh_s = REFRESH_S
    _refreshed = 0.0

    def on_plan(self, plan: Plan, todo: Sequence[Planned], store: Store) -> None:
        """Print the size of the plan and show the bars."""
        super().on_plan(plan, todo, store)
        if todo:
            self._show()

    def on_end(self, planned: Planned, ending: Ending, detail: str) -> None:
        """Print a line for a trial that did not end well."""
        super().on_end(planned, ending, detail)
        if ending != Ending.DONE and (line := self._ending_of(planned, ending, detail)):
            self.say(line)

    def tick(self) -> None:
        """Redraw the bars when they are due."""
        if time.monotonic() - self._refreshed > self.refresh_s:
            self._update()
            self._draw()
            self._refreshed = time.monotonic()

    @contextmanager
    def status(self, what: str) -> Iterator[object]:
        """Show in a line what is done."""
        with self._console.status(Text(what), spinner="line"):
            yield None

    def say(self, sentence: str) -> None:
        """Print the sentence above the bars."""
        self._console.print(Text(sentence))

    def close(self) -> None:
        """Remove the bars."""
        self._bars.stop()
        super().close()

    def _show(self) -> None:
        self._bars.start()

    def _draw(self) -> None:
        self._bars.refresh()


class NotebookView(LiveView):
    """Output of a notebook cell, updated in place; messages are printed below it."""

    refresh_s = NOTEBOOK_REFRESH_S
    status = _Display.status
    _handle: Any = None

    def say(self, sentence: str) -> None:
        """Print the sentence."""
        print(sentence)

    def close(self) -> None:
        """Draw the bars a last time."""
        for task, _ in self._running.values():
            self._bars.remove_task(task)
        self._running.clear()
        self._update()
        self._draw()
        self._handle = None
        _Display.close(self)  # these bars are not live

    def _show(self) -> None:
        # MLflow imports tqdm, which warns that its bars need ipywidgets; nothing here draws them.
        warnings.filterwarnings("ignore", message="IProgress not found")
        self._update()
        self._handle = sys.modules["IPython"].display.display(self._bars, display_id=True)

    def _draw(self) -> None:
        if self._handle is not None:
            self._handle.update(self._bars)


def _names(trials: Sequence[Planned]) -> str:
    """Return the names of trials: each arm once, with its seeds."""
    seeds: dict[str, list[int]] = {}
    for planned in trials:
        seeds.setdefault(planned.arm, []).append(planned.seed)
    arms = [f"{arm} {format_seeds(numbers, 's')}" for arm, numbers in list(seeds.items())[:MAX_ARMS]]
    return ", ".join([*arms, *([f"... and {len(seeds) - MAX_ARMS} more arms"] if len(seeds) > MAX_ARMS else [])])


def size_of(plan: Plan, todo: Sequence[Planned], store: Store) -> str:
    """Return the size of a plan in words; ``todo`` may contain prerequisites, which belong to no arm."""
    identities = {trial_name(planned) for planned in todo}
    others = [store.folder(item.trial) for item in plan.trials if trial_name(item) not in identities]
    trained = sum((folder.path / "result.json").exists() for folder in others)
    resumed = [item for item in todo if store.folder(item.trial).checkpoint.exists()]
    parts = [f"{len(todo)} to train" if todo else "nothing to train"]
    if resumed:
        first = [f"{trial_name(item)}{checkpoint_step(store.folder(item.trial))}" for item in resumed[:MAX_ARMS]]
        more = "; ..." if len(resumed) > MAX_ARMS else ""
        parts.append(f"{len(resumed)} of them from a checkpoint ({'; '.join(first)}{more})")
    if trained:
        parts.append(f"{trained} trained already")
    return f"{format_count(len(plan.arms), 'arm')}, {format_count(len(plan.trials), 'trial')}; {', '.join(parts)}"


def checkpoint_step(folder: TrialFolder) -> str:
    """Return `` at step N`` of a trial's checkpoint, whose header alone is read; empty if it is damaged."""
    from safetensors import SafetensorError, safe_open

    with (
        suppress(OSError, SafetensorError, ValueError, LookupError, TypeError, RecursionError),
        safe_open(folder.checkpoint / CHECKPOINT, framework="np") as reader,
    ):
        state = dict(json.loads(reader.metadata()["vitlab"])["pairs"])["training"]
        return f" at step {dict(state['pairs'])['step']:,}"
    return ""


def trial_name(planned: Planned) -> str:
    """Return the name of a trial in displays: its arm and seed."""
    return f"{planned.arm} s{planned.seed}"
