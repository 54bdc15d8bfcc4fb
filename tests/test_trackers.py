"""Tests of trackers: guarantees of the contract, and detection of violations by its test."""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import slot_fixtures

from vitlab import lab, testing
from vitlab.errors import SpecError, UserError
from vitlab.registry import slot
from vitlab.spec import RunSpec
from vitlab.store.folders import Store, TrialFolder
from vitlab.trackers import BackgroundTracker, Cursor, Replay, Tracker, TrialUpdate, base, contract_test, tracker
from vitlab.trackers.delivery import sync

PIPELINE = Path(__file__).parents[1] / "pipelines" / "quickstart.yaml"


@pytest.fixture(autouse=True)
def _room_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    slot_fixtures.keep(monkeypatch, tracker)


class Lines(Replay):
    """A file per trial, a line per event."""

    title = "Lines"

    def write(self, news: TrialUpdate, mark: Cursor | None) -> Cursor:
        file = self._file(news)
        content = file.read_text()[: mark or 0] if file.exists() else ""
        text = content + "".join(f"{event.t} {event.kind}\n" for event in news.events)
        text += "" if news.end is None else f"{news.end.how}\n"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return len(text)

    def finish(self, report: Sequence[Path]) -> str:
        return "somewhere"

    def _file(self, news: TrialUpdate) -> Path:
        return self.store.root / "lines" / f"{news.item.planned.trial.key}.txt"


class Appends(Lines):
    """A tracker that keeps the rows of a broken delivery."""

    def write(self, news: TrialUpdate, mark: Cursor | None) -> Cursor:
        return super().write(news, len(self._file(news).read_text()) if self._file(news).exists() else None)


class KeepsOldRows(Lines):
    """A tracker that appends to old files without a cursor."""

    def write(self, news: TrialUpdate, mark: Cursor | None) -> Cursor:
        there = len(self._file(news).read_text()) if self._file(news).exists() else 0
        return super().write(news, there if mark is None else mark)


class Meddles(Lines):
    """A tracker that writes to the trials."""

    def write(self, news: TrialUpdate, mark: Cursor | None) -> Cursor:
        (news.folder.path / "seen").write_text("")
        return super().write(news, mark)


class Hastes(Lines):
    """A tracker that writes in its constructor."""

    def __init__(self, *context: Any) -> None:
        super().__init__(*context)
        (self.store.root / "lines").mkdir(parents=True)
        (self.store.root / "lines" / "hello").write_text("")


class Raises(Lines):
    """A tracker that raises."""

    def finish(self, report: Sequence[Path]) -> str:
        raise OSError("no such board")


BAD = [
    (Appends, "between a delivery and its record"),
    (KeepsOldRows, "without marks to a destination"),
    (Meddles, "writes to the folders of trials: trials/.*seen"),
    (Hastes, "writes when it is constructed"),
    (Raises, "is handed journals: OSError"),
]


@pytest.mark.parametrize("name", testing.components("tracker"))
def test_tracker_passes_contract_test(name: str) -> None:
    testing.check_component("tracker", name)


def test_tracker_that_truncates_at_cursor_passes() -> None:
    tracker.register("lines")(Lines)
    testing.check_component("tracker", "lines")


@pytest.mark.parametrize(("cls", "sentence"), BAD)
def test_tracker_that_does_not_truncate_fails(cls: type[Lines], sentence: str) -> None:
    tracker.register("lines")(cls)
    with pytest.raises(AssertionError, match=f"tracker 'lines'.*{sentence}"):
        testing.check_component("tracker", "lines")


# -- guarantees for any tracker ---------------------------------------------------------------------------------------


def rehearsed(folder: Path, cls: type[Tracker] = Lines) -> tuple[Store, Any]:
    store, plan = Store(folder), contract_test._plan()
    contract_test._train(store, plan)
    return store, cls(plan, store, RunSpec())


def lines(store: Store) -> Counter[str]:
    return Counter(line for file in (store.root / "lines").glob("*.txt") for line in file.read_text().splitlines())


def journalled(store: Store) -> Counter[str]:
    journals = store.root.glob("trials/*/*/events.jsonl")
    events = [json.loads(line) for file in journals for line in file.read_text().splitlines()]
    return Counter(f"{event['t']} {event['kind']}" for event in events)


def test_failing_trial_does_not_block_others_and_nothing_is_lost(tmp_path: Path, caplog: Any) -> None:
    class Trips(Lines):
        def write(self, news: TrialUpdate, mark: Cursor | None) -> Cursor:
            if news.item.name == "baseline/s1":
                raise ConnectionError("a board that is away")
            return super().write(news, mark)

    store, board = rehearsed(tmp_path, Trips)
    board.update()
    assert board.close() is None and board.close() is None
    assert caplog.text.count("Lines is not up to date: a board that is away") == 1
    assert sum(lines(store).values()) == 3 * (6 + 1)
    assert rehearsed(tmp_path)[1].close() == "somewhere"
    assert lines(store) == journalled(store) + Counter({"done": 4})


def test_unreachable_tracker_is_retried_with_backoff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = 0.0, []

    class Away(Lines):
        def deliver(self, **_: Any) -> None:
            calls.append(now)
            raise ConnectionError("away")

    monkeypatch.setattr(base.time, "monotonic", lambda: now)
    _, board = rehearsed(tmp_path, Away)
    for second in range(0, 400):
        now = float(second)
        board.update()
    assert calls == [0, 5, 15, 35, 75, 155, 315]


def test_slow_tracker_takes_a_fifth_of_time_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, until = 0.0, []

    class Slow(Lines):
        def deliver(self, *, final: bool, until: float, report: Sequence[Path]) -> None:
            nonlocal now
            limits.append(until - now)
            now += 10.0

    limits = until
    monkeypatch.setattr(base.time, "monotonic", lambda: now)
    _, board = rehearsed(tmp_path, Slow)
    board.update()
    assert (now, limits) == (10.0, [base.BUDGET_S])
    for now in (11.0, 49.0):  # noqa: B007  # read by the clock
        board.update()
    assert len(limits) == 1
    now = 50.0
    board.update()
    assert len(limits) == 2
    board.close()
    assert limits[-1] == math.inf


def test_trials_do_not_wait_for_delivery(tmp_path: Path) -> None:
    """An update returns during a slow delivery; there is one delivery at a time, and the last has everything."""
    go_on, under_way, most = threading.Event(), [0], [0]

    class Slow(Lines):
        def deliver(self, **options: Any) -> Any:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
            go_on.wait(20)
            try:
                return super().deliver(**options)
            finally:
                under_way[0] -= 1

    store, board = rehearsed(tmp_path, Slow)
    aside = BackgroundTracker(board)
    for _ in range(3):
        aside.update()
    assert aside.title == "Lines" and not (store.root / "lines").exists()
    threading.Timer(0.1, go_on.set).start()
    assert aside.close() == "somewhere" and most == [1]
    assert lines(store) == journalled(store) + Counter({"done": 4})


def test_undroppable_trial_does_not_block_others(tmp_path: Path, caplog: Any) -> None:
    class Sticks(Lines):
        def drop(self, mark: Cursor) -> None:
            raise OSError("it is not mine")

    store, board = rehearsed(tmp_path, Sticks)
    assert board.close() == "somewhere"
    fewer = replace(board.plan, trials=board.plan.trials[:1])
    trial = fewer.trials[0].trial
    store.trial(trial.key, trial.code).emit("metrics", step=9, epoch=1.0, images=9, metrics={})
    assert Sticks(fewer, store, RunSpec()).close() is None and "it is not mine" in caplog.text
    assert not journalled(store) - lines(store)


def test_stopped_trial_ends_and_resumes(tmp_path: Path) -> None:
    store, plan = Store(tmp_path), contract_test._plan()
    contract_test._train(store, plan, events=3)
    Lines(plan, store, RunSpec()).close()
    assert lines(store) == journalled(store) + Counter({"stopped": 4})
    contract_test._train(store, plan)
    Lines(plan, store, RunSpec()).close()
    assert lines(store) == journalled(store) + Counter({"stopped": 4, "done": 4})


def test_failure_is_delivered_once(tmp_path: Path) -> None:
    store, plan = Store(tmp_path), contract_test._plan()
    contract_test._train(store, plan, events=3)
    trial = plan.find("baseline", 0)
    store.trial(trial.key, trial.code).fail("out of memory")
    for _ in range(2):
        Lines(plan, store, RunSpec()).update()
    assert lines(store) == journalled(store) + Counter({"failed": 1})


def test_update_reads_no_journal_of_a_trial_that_has_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update comes every two seconds, and most trials of a study are still waiting."""
    store, plan = Store(tmp_path), contract_test._plan()
    read: list[Path] = []
    monkeypatch.setattr(TrialFolder, "events", lambda folder, offset=0: (read.append(folder.path) or [], offset))
    waiting = Lines(plan, store, RunSpec())
    waiting.update()
    assert len(waiting.trials) > 1 and not read
    first = plan.trials[0].trial
    begun = store.trial(first.key, first.code).path
    begun.mkdir(parents=True)
    waiting.update()
    assert read == [begun]


# -- in a study file and on the command line --------------------------------------------------------------------------


def test_default_tracker_is_mlflow_and_none_disables(tmp_path: Path) -> None:
    assert RunSpec().tracker.type == "mlflow"
    nothing = slot("tracker").build("none", contract_test._plan(), Store(tmp_path), RunSpec())
    nothing.update()
    assert nothing.close() is None and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        ({"run.tracker": "mlfow"}, "no tracker called 'mlfow'. Did you mean 'mlflow'?"),
        ({"run.tracker": {"type": "mlflow", "url": "x"}}, "tracker 'mlflow' has no option 'url'"),
        ({"run.tracker": {"type": "none", "uri": "http://127.0.0.1:9"}}, "tracker 'none' has no option 'uri'"),
    ],
)
def test_mistakes_give_one_sentence(run: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="(?s)" + sentence.replace("?", r"\?")):
        lab.plan_study(PIPELINE, out=tmp_path, changes=run)


def test_conflicting_sync_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="tracker 'none' has no option 'uri'"):
        sync(tmp_path, tracker={"type": "none", "uri": "http://127.0.0.1:9"})


@pytest.mark.parametrize("run", ["{tracker: {type: mlflow, uri: URI}}", "{tracker: {uri: URI}}"])
def test_address_of_server_is_option_of_tracker(run: str, tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    text = PIPELINE.read_text().replace("run: {executor: local}", f"run: {run}")
    file.write_text(text.replace("URI", "http://127.0.0.1:9"))
    study, plan = lab.plan_study(file, out=tmp_path)
    assert study.run.tracker.options == {"uri": "http://127.0.0.1:9"}
    assert study.run.tracker.type.rpartition(":")[2] == "mlflow"
    changed, other = lab.plan_study(file, out=tmp_path, changes={"run.tracker.uri": "http://127.0.0.1:8"})
    assert changed.run.tracker.options == {"uri": "http://127.0.0.1:8"}
    assert other.trials == plan.trials, "no part of any key"
