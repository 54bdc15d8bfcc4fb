"""Progress display of a run: bars in a terminal or a notebook, plain lines elsewhere."""

import itertools
import json
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from threading import Timer
from typing import Any, NamedTuple

import click
from rich.console import Console
from rich.live import Live
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from vitlab.driver.session import Watch
from vitlab.errors import format_count, list_some
from vitlab.planning.values import Plan, Planned
from vitlab.report.phrasing import Scale, format_duration, format_seeds
from vitlab.spec.run import REPORTING_SEEDS
from vitlab.store.folders import CHECKPOINT, Store, TrialFolder
from vitlab.store.result import Ending

REFRESH_S = 0.5
SILENCE_S = 60.0  #: time without a line after which a plain line tells the remaining time
FIRST_SILENCE_S = 5.0  #: the same before the first line, while processes start, and for a status
NOTEBOOK_REFRESH_S = 1.0  #: every update is a message to the browser
GAP = 2  #: columns between those of the display
MIN_BAR, MAX_BAR = 10, 30  #: smallest and largest width of a bar
MIN_NAME = 10  #: letters of names that are kept rather than details
SAMPLE = 32  #: running trials whose journals are read for the display; the others count as the mean of these
RUNNING, ENDED, PLANNED = range(3)  #: ranks of rows
MAX_ARMS = 4  #: maximum number of arms that a line names


def make_watch() -> Watch:
    """Return the progress display for this process: for a notebook, a terminal, or plain stderr."""
    ipython = sys.modules.get("IPython")
    if ipython is not None and hasattr(ipython.get_ipython(), "kernel"):
        return NotebookView()
    return LiveView() if sys.stderr.isatty() and not Console(stderr=True).is_dumb_terminal else PlainLines()


class TrialProgress:
    """A reader of a trial's journal, from a byte on."""

    def __init__(self, folder: TrialFolder, offset: int = 0) -> None:
        self.folder = folder
        self._offset = offset
        self.latest: Mapping[str, Any] = {}
        """The last start or measurement: ``step, steps, metrics``, and ``failure`` once it has diverged."""
        self._saved_ns = self._saved_step = 0  #: time and step of the checkpoint; 0 if there is none
        self.share_at_start = 0.0  #: more than 0 after a resume
        self.has_begun = False  #: whether a worker has written since
        self.is_divergence_told = False

    @property
    def has_diverged(self) -> bool:
        """Whether the trial has diverged; its result may come later, with those of its stack."""
        return self.latest.get("status") == Ending.DIVERGED and bool(self.latest.get("failure"))

    def read_new_events(self) -> None:
        """Read the lines that have been appended to the journal, and the step of a new checkpoint."""
        events, self._offset = self.folder.events(self._offset)
        for event in events:
            # The best weights are measured last, at an earlier step.
            if event.kind == "start" or event.body.get("step", -1) >= self.latest.get("step", -1):
                self.latest, self.has_begun = {**self.latest, **event.body}, True
            if event.kind == "start":
                self._saved_ns = self._saved_step = 0  # the checkpoint that it started from may be gone
                self.share_at_start = self.share
        file = self.folder.checkpoint / CHECKPOINT
        with suppress(OSError):
            if (time_ns := file.stat().st_mtime_ns) != self._saved_ns:
                self._saved_ns, self._saved_step = time_ns, _read_checkpoint_step(file)

    def rewind_to_checkpoint(self) -> None:
        """Read the journal up to its end, and go to the step of the checkpoint."""
        self.read_new_events()
        self.latest, self.has_begun = {**self.latest, "step": self._saved_step, "failure": ""}, False
        self.share_at_start = self.share

    @property
    def step(self) -> int:
        """The last step that has been measured or saved."""
        return max(int(self.latest.get("step", 0)), self._saved_step)

    @property
    def share(self) -> float:
        """Share of the training that has been measured or saved, from 0 to 1."""
        return min(1.0, self.step / (self.latest.get("steps") or math.inf))


def _read_checkpoint_step(file: Path) -> int:
    from safetensors import SafetensorError, safe_open

    with (
        suppress(OSError, SafetensorError, ValueError, LookupError, TypeError, RecursionError),
        safe_open(file, framework="np") as reader,  # its header alone is read
    ):
        state = dict(json.loads(reader.metadata()["vitlab"])["pairs"])["training"]
        return int(dict(state["pairs"])["step"])
    return 0


class Row(NamedTuple):
    """A row of the display."""

    name: str
    share: float  #: from 0 to 1, for the bar
    state: str
    detail: str


def make_table(rows: Sequence[Row], width: int, widest: Row) -> Table:
    """Return rows in at most ``width`` columns, with the bars that they have beside ``widest``.

    What does not fit is left out whole: first the bars, then letters in the middle of names, and at last the details.
    """
    name, state, detail = (max(len(str(row[column])) for row in (*rows, widest)) for column in (0, 2, 3))

    def room(*others: int) -> int:
        """Return the columns that are left for names beside others."""
        return width - sum(other + GAP for other in others if other)

    if room(state, detail) < min(name, MIN_NAME):
        detail = 0
    bar = min(MAX_BAR, room(name, state, detail) - GAP)
    table = Table.grid(padding=(0, GAP, 0, 0))
    table.add_column(min_width=max(0, min(name, room(state, detail))))
    for row, text in zip(rows, shorten_names([row.name for row in rows], room(state, detail)), strict=True):
        bars = [ProgressBar(1.0, row.share, width=bar)] if bar >= MIN_BAR else []
        table.add_row(Text(text), *bars, row.state.rjust(state), *([row.detail.ljust(detail)] if detail else []))
    return table


def shorten_names(names: Sequence[str], max_length: int) -> list[str]:
    """Return names of at most ``max_length`` letters, shortened in the middle; no two of them are equal."""
    shortened: list[str] = []
    # Ends, with seeds, say more than beginnings.
    heads = sorted(range(max_length), key=lambda head: abs(3 * head - max_length))
    for name in names:
        cuts = [f"{name[:head]}…{name[len(name) - max_length + 1 + head :]}" for head in heads]
        cuts += [f"…{name[start : start + max_length - 2]}…" for start in range(len(name))]
        options = [name] if len(name) <= max_length else cuts
        shortened.append(next((cut for cut in options if cut not in shortened), cuts[-1]))
    return shortened


class _Display(Watch):
    """Base of the displays, which counts trials and estimates the remaining time."""

    refresh_s = REFRESH_S
    _refreshed = 0.0

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._done = self._total = self._failed = 0
        self._running: dict[str, TrialProgress] = {}  #: by ``key/code``
        self._paused: dict[str, TrialProgress] = {}  #: trials with a checkpoint that are not submitted yet
        self._unsaid: dict[tuple[Ending, str], list[Planned]] = {}  #: endings and reasons since the last line
        self._first_with: dict[tuple[Ending, str], str] = {}  #: the first trials that ended for a reason
        self._alike: dict[tuple[Ending, str], list[Planned]] = {}  #: the later ones, told by :meth:`close`
        self._unended: list[str] = []  #: arms with open trials, whose mean has not been told

    def on_plan(self, plan: Plan, todo: Sequence[Planned], store: Store) -> None:
        self._plan, self._store, self._scale = plan, store, Scale.of_plan(plan)
        self._running.clear()
        self._paused.clear()
        for planned in todo:
            if (folder := store.folder(planned.trial)).checkpoint.exists():
                progress = TrialProgress(folder)
                progress.rewind_to_checkpoint()
                self._paused |= {planned.trial.name: progress} if progress.step else {}
        self._open = {planned.trial.name: planned for planned in todo}
        self._arms: dict[str, list[Planned]] = {}  #: their trials that are to be trained or have been
        for planned in plan.trials:
            if planned.trial.name in self._open or (store.folder(planned.trial).path / "result.json").exists():
                self._arms.setdefault(planned.arm, []).append(planned)
        self._unended = [arm for arm in self._arms if not self._is_over(arm)]
        self._ended_rows: dict[str, Row] = {}  #: of arms without an open trial
        self._final_value = cache(self._read_final_value)  # asked for twice a second
        shown = [item for trials in self._arms.values() for item in trials]
        self._longest = max(map(trial_name, shown), key=len, default="")
        trained = {item.trial.name for item in shown} - self._open.keys()
        self._done, self._total, self._failed = len(trained), len(trained) + len(todo), 0
        self._size = max(1, self._total + len(plan.pending))
        self._completed = 0.0  #: trainings, with the shares of running ones
        self._before = float(self._done)  #: trainings before this run: whole ones, and shares of those that ended here
        self._moves: list[tuple[float, float]] = []  #: times of the first and the last progress, and trainings by then
        self._read_journals()
        skipped = sum(1 for arm in plan.arms if arm.skip)
        self.say(
            f"{plan.study}: {describe_workload(plan, todo, store)}"
            + (f", {format_count(skipped, 'arm')} skipped" if skipped else "")
        )

    @contextmanager
    def status(self, what: str) -> Iterator[object]:
        """Say in a sentence what is done, once that has taken a while."""
        timer = _start_timer(self.say, what)
        try:
            yield None
        finally:
            timer.cancel()

    def on_start(self, planned: Planned) -> None:
        folder, paused = self._store.folder(planned.trial), self._paused.pop(planned.trial.name, None)
        self._running[planned.trial.name] = paused or TrialProgress(folder, folder.journal_size())
        self.tick()  # an executor that trains in this process would not return before

    def on_end(self, planned: Planned, ending: Ending, detail: str) -> None:
        name = planned.trial.name
        progress = self._running.pop(name, None) or self._paused.pop(name, None)
        if ending in (Ending.DONE, Ending.FAILED):
            self._done += 1
            self._failed += ending == Ending.FAILED
            self._open.pop(name, None)
            self._before += progress.share_at_start if progress is not None else 0.0
        reason = detail.partition("\n")[0]
        is_diverged = ending == Ending.DONE and bool(reason)
        if not (is_diverged and progress is not None and progress.is_divergence_told):
            self._note_ending(planned, Ending.DIVERGED if is_diverged else ending, reason)

    def _note_ending(self, planned: Planned, ending: Ending, reason: str) -> None:
        """Note an ending for the next line, or for :meth:`close` if an earlier line has its reason."""
        key = ending, reason
        (self._alike if key in self._first_with else self._unsaid).setdefault(key, []).append(planned)

    def _read_journals(self) -> None:
        """Read what has been appended to the journals of running trials."""
        running = list(self._running.items())  # a timer calls this, too; a cluster may run thousands
        sample = []
        for name, progress in running[:SAMPLE]:
            progress.read_new_events()
            if not progress.has_diverged:
                sample.append(progress)
            elif not progress.is_divergence_told:  # its result comes with those of the trials it is trained with
                progress.is_divergence_told = True
                self._note_ending(self._open[name], Ending.DIVERGED, progress.latest["failure"])
        all_to_sample = len(running) / max(1, len(sample))
        paused = sum(progress.share for progress in self._paused.values())
        self._completed = self._done + paused + all_to_sample * sum(progress.share for progress in sample)
        at_start = paused + all_to_sample * sum(progress.share_at_start for progress in sample)
        trained = self._completed - self._before - at_start
        begun = [progress for progress in sample if progress.has_begun]
        # What has not been measured yet would count as no progress, so the first estimate waits for all that run.
        is_known = (
            len(self._moves) != 1
            or self._done - self._before >= len(running)
            or all(progress.share > progress.share_at_start for progress in begun)
        )
        if is_known and trained > self._moves[-1][1] if self._moves else trained > 0 or begun:
            self._moves = [*self._moves[:1], (self._console.get_time(), trained)]

    def _describe_remaining_time(self) -> str:
        """Return the remaining time in words, or what precedes it; empty once all trials have ended."""
        if self._done >= self._total:
            return ""
        if not self._moves:
            return "starting processes and reading data"
        if len(self._moves) < 2 or self._moves[0][0] == self._moves[1][0]:
            return "estimating the remaining time"
        (first_s, first), (last_s, last) = self._moves
        estimate = (self._size - self._completed) * (last_s - first_s) / (last - first)
        seconds = estimate - (self._console.get_time() - last_s)
        if estimate <= 0:
            return "writing results"
        return f"{format_duration(max(1, round(seconds)))} left" if seconds > -1 else "longer than estimated"

    def _is_over(self, arm: str) -> bool:
        return not self._open.keys() & {item.trial.name for item in self._arms[arm]}

    def _read_final_value(self, folder: TrialFolder) -> float | None:
        result, analysis = folder.result(), self._plan.analysis
        return None if result is None else result.outcome.value(analysis.metric, analysis.at, analysis.goal)

    def _render_table(self) -> Table:
        """Return a row for all trials together, and the rows of :meth:`_rows_with_priority` that fit on the screen."""
        scale, rows = self._scale, self._rows_with_priority()
        seeds = max(map(len, self._arms.values()), default=0)
        # If space is short, running trials come first, then the arms that ended last, and the arms that are next.
        order = sorted(range(len(rows)), key=lambda at: (rows[at][0], -at if rows[at][0] == ENDED else at))
        share = self._completed / self._size
        total = Row(self._plan.study, share, f"{100 * share:3.0f} %", "")
        state, value = f"{seeds} of {seeds}", _format_value(1.0 if scale.is_share else 10.5, scale)
        widest = Row(self._longest, 0.0, max(Ending.DIVERGED, state, key=len), f"{value} (mean of {seeds})")
        trials = f"{self._done} of {self._total} trials{f' ({self._failed} failed)' * bool(self._failed)}"
        remaining = f"{self._describe_remaining_time() or 'finished'}; {scale.title}"
        width = self._console.width - GAP  # a terminal prints ^C behind the last row
        separator = ", " if len(f"{trials}, {remaining}") <= width else "\n"
        room = max(1, self._console.height - 5)
        table = Table.grid()
        table.add_column(max_width=width, no_wrap=True)
        table.add_row(Text(f"{trials}{separator}{remaining}"))
        table.add_row(make_table([total, *(rows[at][1] for at in sorted(order[:room]))], width, widest))
        if len(rows) > room:
            table.add_row(f"... and {format_count(len(rows) - room, 'more row')}")
        return table

    def _rows_with_priority(self) -> list[tuple[int, Row]]:
        """Return the rows of running trials, and of arms with other trials, in the plan's order, each with its rank."""
        running, scale = {}, self._scale
        for key, progress in [*self._paused.items(), *self._running.items()]:
            name, value = trial_name(self._open[key]), progress.latest.get("metrics", {}).get(scale.metric)
            state = f"{100 * progress.share:3.0f} %" if progress.latest else "starting"
            detail = "" if value is None else _format_value(value, scale)
            if progress.has_diverged:
                state, detail = Ending.DIVERGED, ""
            running[key] = RUNNING, Row(name, progress.share, state, detail)
            if key in self._paused:
                running[key] = PLANNED, Row(name, progress.share, "paused", f"at {state.strip()}")
        rows = []
        for arm, trials in self._arms.items():
            if arm in self._ended_rows:
                rows.append((ENDED, self._ended_rows[arm]))
                continue
            own = [running.pop(item.trial.name) for item in trials if item.trial.name in running]
            folders = [self._store.folder(item.trial) for item in trials if item.trial.name not in self._open]
            values = [value for folder in folders if (value := self._final_value(folder)) is not None]
            if folders:
                state = f"{len(values)} of {len(trials)}" if len(values) < len(trials) else Ending.DONE
                if len(values) < len(folders):
                    state = f"{len(folders) - len(values)} lost"
                is_over = len(folders) == len(trials)
                detail = "no value" * is_over
                if values and is_over:
                    detail = f"{_format_value(fmean(values), scale)} (mean of {len(values)})"
                row = Row(arm, len(folders) / len(trials), state, detail)
                rows.append((ENDED, row))
                if is_over:
                    self._ended_rows[arm] = row
            elif not own:
                rows.append((PLANNED, Row(arm, 0.0, "planned", "")))
            rows += own
        return [*running.values(), *rows]  # trials of no arm come first, such as prerequisites

    def tick(self) -> None:
        """Print lines for trials that have ended since the last call; draw what is due."""
        self._flush()
        if time.monotonic() - self._refreshed > self.refresh_s:
            self._read_journals()
            self._draw()
            self._refreshed = time.monotonic()

    def _draw(self) -> None:
        """Show the state of the run."""

    def _flush(self) -> None:
        """Print a line for the trials that have ended alike since the last one."""
        endings, self._unsaid = self._unsaid, {}
        for (ending, reason), trials in endings.items():
            names = format_arms_with_seeds(trials)
            if ending in (Ending.DIVERGED, Ending.FAILED):
                self._first_with[ending, reason] = names
            # A trial that is tried again is not lost.
            self._print_with_progress(f"{names}{f' {ending}' * (ending != Ending.LOST)}{f': {reason}' * bool(reason)}")

    def _print_with_progress(self, text: str) -> None:
        self.say(text)

    def close(self) -> None:
        """Print what has not been printed yet, with the trials that ended for the same reason as earlier ones."""
        self._flush()
        for key, trials in self._alike.items():
            self.say(f"{format_arms_with_seeds(trials)} {key[0]} for the same reason as {self._first_with[key]}.")
        self._alike.clear()


class PlainLines(_Display):
    """Progress display with one line for all trials that end together."""

    def on_plan(self, plan: Plan, todo: Sequence[Planned], store: Store) -> None:
        """Print the size of the plan and start counting."""
        super().on_plan(plan, todo, store)
        self._printed = time.monotonic()
        self._timer = _start_timer(self._say_state)  # tick is not called while the first worker starts

    def _draw(self) -> None:
        if time.monotonic() - self._printed > SILENCE_S:
            self._say_state()

    def _say_state(self) -> None:
        if self._done < self._total:
            self._print_with_progress("running")

    def say(self, sentence: str) -> None:
        """Print the sentence to stderr."""
        self._flush()
        click.echo(sentence, err=True)

    def close(self) -> None:
        """Print what has not been printed yet."""
        self._timer.cancel()
        super().close()

    def _flush(self) -> None:
        """Print a line for other endings, one for the trials of each arm that are done, and the means of ended arms.

        There is no mean before, see :class:`LiveView`.
        """
        by_arm = attrgetter("arm")
        means = {}
        for arm in filter(self._is_over, self._unended):
            self._rows_with_priority()
            row = self._ended_rows[arm]
            means[arm] = f": {self._scale.title} {row.detail}" + f", {row.state}" * (row.state != Ending.DONE)
        self._unended = [arm for arm in self._unended if arm not in means]
        done = sorted(self._unsaid.pop((Ending.DONE, ""), ()), key=by_arm)
        super()._flush()
        for arm, trials in itertools.groupby(done, by_arm):
            self._print_with_progress(f"{format_arms_with_seeds([*trials])} {Ending.DONE}{means.pop(arm, '')}")
        for arm, mean in means.items():
            self._print_with_progress(f"{arm}{mean}")

    def _print_with_progress(self, text: str) -> None:
        self._timer.cancel()
        self._read_journals()
        self._printed = time.monotonic()
        rest = self._describe_remaining_time()
        click.echo(f"[{self._done}/{self._total}] {text}" + (f"  ({rest})" if rest else ""), err=True)


class LiveView(_Display):
    """Bars that are redrawn in place in a terminal.

    They show the mean of an arm once all its trials have ended, and no differences of arms: a look at every seed would
    be one that the verdict does not count.
    """

    def on_plan(self, plan: Plan, todo: Sequence[Planned], store: Store) -> None:
        """Print the size of the plan and show the bars."""
        super().on_plan(plan, todo, store)
        self._live = Live(get_renderable=self._render_table, console=self._console, auto_refresh=False, transient=True)
        if todo:
            self._show()

    def _flush(self) -> None:
        self._unsaid.pop((Ending.DONE, ""), None)  # the bars show it
        super()._flush()

    @contextmanager
    def status(self, what: str) -> Iterator[object]:
        """Show in a line what is done, and for how long."""
        columns = SpinnerColumn("line"), TextColumn("{task.description}", markup=False), TimeElapsedColumn()
        with Progress(*columns, console=self._console, transient=True) as line:
            yield line.add_task(what)

    def say(self, sentence: str) -> None:
        """Print the sentence above the bars."""
        self._console.print(Text(sentence))

    def close(self) -> None:
        """Remove the bars."""
        self._live.stop()
        super().close()

    def _show(self) -> None:
        self._live.start(refresh=True)

    def _draw(self) -> None:
        self._live.refresh()


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
        self._running.clear()
        self._read_journals()
        self._draw()
        self._handle = None
        _Display.close(self)  # these bars are not live

    def _show(self) -> None:
        # MLflow imports tqdm, which warns that its bars need ipywidgets; nothing here draws them.
        warnings.filterwarnings("ignore", message="IProgress not found")
        self._read_journals()
        self._handle = sys.modules["IPython"].display.display(self._render_table(), display_id=True)

    def _draw(self) -> None:
        if self._handle is not None:
            self._handle.update(self._render_table())


def _start_timer(function: Callable[..., None], *arguments: str) -> Timer:
    """Call a function after the first silence, unless the timer is cancelled before."""
    timer = Timer(FIRST_SILENCE_S, function, arguments)
    timer.daemon = True  # Ctrl-C may come before it is cancelled
    timer.start()
    return timer


def _format_value(value: float, scale: Scale) -> str:
    return scale.number(value, scale.decimals_for_values([value], 1, 4))


def format_arms_with_seeds(trials: Sequence[Planned]) -> str:
    """Return the names of trials: each arm once, with its seeds."""
    seeds: dict[str, list[int]] = {}
    for planned in trials:
        seeds.setdefault(planned.arm, []).append(planned.seed)
    return list_some((f"{arm} {format_seeds(numbers, 's')}" for arm, numbers in seeds.items()), MAX_ARMS)


def describe_workload(plan: Plan, todo: Sequence[Planned], store: Store) -> str:
    """Return the size of a plan in words; ``todo`` may contain prerequisites, which belong to no arm."""
    identities = {trial_name(planned) for planned in todo}
    others = [store.folder(item.trial) for item in plan.trials if trial_name(item) not in identities]
    trained = sum((folder.path / "result.json").exists() for folder in others)
    resumed = sum(store.folder(item.trial).checkpoint.exists() for item in todo)
    more = len(todo) + len(others) - len(plan.trials)
    parts = [f"{len(todo)} to train{f', {more} of them needed by others' * (more > 0)}" if todo else "nothing to train"]
    if resumed:
        parts.append(f"{resumed} of them from a checkpoint")
    if trained:
        parts.append(f"{trained} trained already")
    kind = f"{'tuning ' * any(item.seed >= REPORTING_SEEDS for item in plan.trials)}trial"
    return f"{format_count(len(plan.arms), 'arm')}, {format_count(len(plan.trials), kind)}; {', '.join(parts)}"


def trial_name(planned: Planned) -> str:
    """Return the name of a trial in displays: its arm and seed."""
    return f"{planned.arm} s{planned.seed}"
