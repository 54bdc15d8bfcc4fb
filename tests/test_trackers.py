"""Tests of trackers: guarantees of the contract, and detection of violations by its test."""

from __future__ import annotations

import json
import shutil
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import slot_fixtures

from vitlab import lab, testing, trackers
from vitlab.driver.scheduler import Schedule
from vitlab.driver.session import Session
from vitlab.errors import SpecError, UserError
from vitlab.executors.inline import Inline
from vitlab.registry import slot
from vitlab.spec import RunSpec
from vitlab.store.folders import Event, Store, TrialFolder
from vitlab.store.result import Measurement
from vitlab.testing import results
from vitlab.trackers import Tracker, replay, tracker
from vitlab.trackers.delivery import BackgroundDelivery, sync
from vitlab.trackers.replay import Cursor, Replay, TrialUpdate

PIPELINE = Path(__file__).parents[1] / "pipelines" / "quickstart.yaml"


@pytest.fixture(autouse=True)
def _room_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    slot_fixtures.keep(monkeypatch, tracker)


class Lines(Replay):
    """A file per trial, a line per event."""

    title = "Lines"

    def write(self, news: TrialUpdate, mark: Cursor | None) -> Cursor:
        file = self._file(news)
        content = file.read_text()[: mark[1] if mark else 0] if file.exists() else ""
        text = content + "".join(f"{event.t} {event.kind} {json.dumps(event.body)}\n" for event in news.events)
        text += "" if news.end is None else f"{news.end.how}\n"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return [file.name, len(text)]

    def write_study(self, report: Sequence[Path]) -> str:
        return "somewhere"

    def stored_points(self, mark: Cursor) -> Iterator[tuple[str, float, int]]:
        for line in (self.store.root / "lines" / mark[0]).read_text().splitlines():
            if " metrics " in line:
                body = json.loads(line.split(maxsplit=2)[2])
                yield from ((name, value, body["step"]) for name, value in body["metrics"].items())

    def _file(self, news: TrialUpdate) -> Path:
        return self.store.root / "lines" / f"{news.item.planned.trial.key}.txt"


class Appends(Lines):
    """A tracker that keeps the rows of a broken delivery."""

    def write(self, news: TrialUpdate, mark: Cursor | None) -> Cursor:
        return super().write(news, ["", len(self._file(news).read_text())] if self._file(news).exists() else None)


class KeepsOldRows(Lines):
    """A tracker that appends to old files without a cursor."""

    def write(self, news: TrialUpdate, mark: Cursor | None) -> Cursor:
        there = len(self._file(news).read_text()) if self._file(news).exists() else 0
        return super().write(news, ["", there] if mark is None else mark)


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

    def write_study(self, report: Sequence[Path]) -> str:
        raise OSError("no such board")


class Sessions(Replay):
    """Sessions as of Weights & Biases off line: one file each, with times in it, which cannot be continued."""

    title = "Sessions"
    whole_trials = True

    def write(self, news: TrialUpdate, mark: Cursor | None) -> Cursor:
        folder = self.store.root / "sessions" / f"{news.item.planned.trial.key}-{news.began}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        session = folder / f"run-{uuid.uuid4()}.jsonl"
        rows = [event.body for event in news.events if event.kind == "metrics"]
        session.write_text(
            "".join(json.dumps({"_time": time.time(), "step": row["step"], **row["metrics"]}) + "\n" for row in rows)
        )
        return str(session)

    def stored_points(self, mark: Cursor) -> Iterator[tuple[str, float, int]]:
        for row in map(json.loads, Path(mark).read_text().splitlines()):
            yield from ((name, value, row["step"]) for name, value in row.items() if name not in ("_time", "step"))

    def write_study(self, report: Sequence[Path]) -> str:
        return "board sync sessions"


class ForgetsPoints(Sessions):
    """A tracker that stores less than it was given."""

    def stored_points(self, mark: Cursor) -> Iterator[tuple[str, float, int]]:
        return iter(list(super().stored_points(mark))[2:])


class HidesPoints(Sessions):
    """A tracker that does not say what it stores."""

    stored_points = Replay.stored_points


BAD = [
    (
        ForgetsPoints,
        r"\('val/accuracy', 0.125, 1\) of a trial was delivered once, and stored_points\(mark\) has it 0 times",
    ),
    (HidesPoints, r"it has no stored_points\(mark\), which returns the stored metrics of a trial"),
    (Appends, "between a delivery and its record"),
    (KeepsOldRows, "without marks to a destination"),
    (Meddles, "writes to the folders of trials, such as .*seen"),
    (Hastes, "writes when it is constructed"),
    (Raises, "is handed journals: OSError"),
]


@pytest.mark.parametrize("cls", [Lines, Sessions])
def test_tracker_that_truncates_or_replaces_passes(cls: type[Replay]) -> None:
    tracker.register("mine")(cls)
    testing.check_component("tracker", "mine")


def test_whole_trials_are_written_when_they_have_ended(tmp_path: Path) -> None:
    """A stopped trial is not; one that failed and is trained again replaces what was written."""
    store, plan = Store(tmp_path), results.small_plan()
    results.write_trials(store, plan, events=3)
    board = Sessions(plan, store, RunSpec())
    assert board.close() == "board sync sessions" and not board.marks()
    trial = plan.find("baseline", 0).trial
    store.trial(trial.key, trial.code).write_failure("out of memory")
    for _ in range(2):
        board.update()
    [failed] = board.marks().values()
    assert len(list(board.stored_points(failed))) == 2 * 2 and board.delivered["trials"] == 1
    results.write_trials(store, plan)
    board.update()
    assert len(board.marks()) == 4 and len(list(tmp_path.glob("sessions/*/*"))) == 4
    assert all(len(list(board.stored_points(mark))) == 2 * 4 for mark in board.marks().values())


@pytest.mark.parametrize(("cls", "sentence"), BAD)
def test_tracker_that_breaks_the_contract_fails(cls: type[Replay], sentence: str) -> None:
    tracker.register("mine")(cls)
    with pytest.raises(AssertionError, match=f"tracker 'mine'.*{sentence}") as error:
        testing.check_component("tracker", "mine")
    assert len(str(error.value)) < 500


# -- guarantees for any tracker ---------------------------------------------------------------------------------------


def rehearsed(folder: Path, cls: type[Tracker] = Lines) -> tuple[Store, Any]:
    store, plan = Store(folder), results.small_plan()
    results.write_trials(store, plan)
    return store, cls(plan, store, RunSpec())


def lines(store: Store) -> Counter[str]:
    return Counter(line for file in (store.root / "lines").glob("*.txt") for line in file.read_text().splitlines())


def journalled(store: Store) -> Counter[str]:
    journals = store.root.glob("trials/*/*/events.jsonl")
    events = [json.loads(line) for file in journals for line in file.read_text().splitlines()]
    return Counter(f"{event.pop('t')} {event.pop('kind')} {json.dumps(event)}" for event in events)


def test_journal_that_begins_during_a_delivery_is_one_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A delivery that reads when a training began, and then its first events, would take it for another training."""
    began = defaultdict[str, set[int]](set)

    class Began(Lines):
        def write(self, news: TrialUpdate, mark: Cursor | None) -> Cursor:
            began[news.item.identity].add(news.began)
            return super().write(news, mark)

    store, plan = Store(tmp_path), results.small_plan()
    results.write_trials(store, plan, events=3)
    genuine, late = (
        replay.training_start,
        {file: file.read_bytes() for file in store.root.glob("trials/*/*/events.jsonl")},
    )
    for file in late:
        file.unlink()

    def began_at(folder: TrialFolder) -> int:
        moment, journal = genuine(folder), folder.path / "events.jsonl"
        if journal in late:
            journal.write_bytes(late.pop(journal))
        return moment

    monkeypatch.setattr(replay, "training_start", began_at)
    board = Began(plan, store, RunSpec())
    board.update()
    board.close()
    assert not late and [len(moments) for moments in began.values()] == [1] * 4 and {0} not in began.values()
    assert lines(store) == journalled(store) + Counter({"stopped": 4})


def test_step_that_is_logged_again_does_not_repeat_later_ones(tmp_path: Path) -> None:
    """The line of an early step is damaged, and a resumed training logs that step again, after the last one."""
    store, plan = Store(tmp_path), results.small_plan(seeds=1)
    results.write_trials(store, plan)
    journals = {file: file.read_text().splitlines(keepends=True) for file in tmp_path.glob("trials/*/*/events.jsonl")}
    assert journals
    for file, lines in journals.items():
        measured = [place for place, line in enumerate(lines) if '"metrics"' in line]
        file.write_text("".join(lines[: measured[-1] + 1]))
        file.with_name("result.json").rename(file.with_name("later"))
    Lines(plan, store, RunSpec()).update()
    for file, lines in journals.items():
        first, *_, last = measured = [place for place, line in enumerate(lines) if '"metrics"' in line]
        again = {**json.loads(lines[first]), "t": json.loads(lines[last])["t"] + 60_000}
        damaged = "x" * (len(lines[first]) - 1) + "\n"
        kept = [*lines[:first], damaged, *lines[first + 1 : last + 1], json.dumps(again) + "\n"]
        file.write_text("".join(kept))
    Lines(plan, store, RunSpec()).update()
    for file, lines in journals.items():
        with file.open("a") as journal:
            journal.write(lines[-1])
        file.with_name("later").rename(file.with_name("result.json"))
    tracker = Lines(plan, store, RunSpec())
    tracker.close()
    for identity, mark in tracker.marks().items():
        key, code, _ = identity.split("/")
        result = store.trial(key, code).result()
        assert result is not None
        stored = Counter((name, step) for name, _, step in tracker.stored_points(mark))
        expected = {(name, moment.step) for moment in result.outcome.history for name in moment.metrics}
        again_at = min(step for _, step in expected)
        assert stored.keys() == expected
        assert {step for (_, step), count in stored.items() if count > 1} <= {again_at}


def test_state_of_another_form_is_delivered_again_without_a_mark(tmp_path: Path) -> None:
    store, plan = Store(tmp_path), results.small_plan(seeds=1)
    results.write_trials(store, plan)
    Lines(plan, store, RunSpec()).close()
    (file,) = tmp_path.rglob("lines-offsets.json")
    assert Lines(plan, store, RunSpec()).marks()
    places = json.loads(file.read_text())
    for state in (state for states in places.values() for state in states.values()):
        del state["steps"]
        state["step"] = 7
    file.write_text(json.dumps(places))
    assert not Lines(plan, store, RunSpec()).marks()


def test_second_measurement_of_a_step_that_the_journal_lost_is_recovered() -> None:
    """Test metrics of the best weights are measured last, at an earlier step; what the journal has is not repeated."""
    history = tuple(Measurement(step, 0.0, step, {"val/loss": 1.0}) for step in (1, 2, 3, 4))
    best = replace(history[1], metrics={"val/loss": 1.0, "test/loss": 2.0})
    outcome = SimpleNamespace(history=(history[0], best, *history[2:]))
    end: Any = SimpleNamespace(t=9, result=SimpleNamespace(outcome=outcome))
    journal = [Event(0, "metrics", asdict(moment)) for moment in history[:3]]
    lost = [(2, {"test/loss": 2.0}), (4, {"val/loss": 1.0})]
    for delivered in (0, 1, 3):  # measurements that the journal had as it was delivered
        steps = {"val/loss": delivered} if delivered else {}
        events = replay._recover_lost_metrics(end, journal[delivered:], steps)
        assert [(event.body["step"], event.body["metrics"]) for event in events] == lost
    second = Event(0, "metrics", {**asdict(best), "metrics": {"test/loss": 2.0}})
    events = replay._recover_lost_metrics(end, [second], {"val/loss": 3})
    assert [(event.body["step"], event.body["metrics"]) for event in events] == lost[1:]
    # What was delivered before the journal lost it is not delivered again.
    assert not replay._recover_lost_metrics(end, [], {"val/loss": 4, "test/loss": 2})


def test_delivered_line_that_a_journal_loses_later_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are lines that were delivered while a trial ran read again as it ends."""
    store, plan = Store(tmp_path), results.small_plan(seeds=1)
    results.write_trials(store, plan)
    journals = {}
    for file in tmp_path.glob("trials/*/*/events.jsonl"):
        start, first, second, *rest = file.read_text().splitlines(keepends=True)
        event = json.loads(second)
        halves = [json.dumps({**event, "metrics": {name: value}}) + "\n" for name, value in event["metrics"].items()]
        journals[file] = [start, first, *halves, *rest]
        file.write_text("".join(journals[file][:4]))
        file.with_name("result.json").rename(file.with_name("later"))
    Lines(plan, store, RunSpec()).update()
    for file, each in journals.items():
        file.write_text("".join([*each[:3], "x" * (len(each[3]) - 1) + "\n", *each[4:]]))
        file.with_name("later").rename(file.with_name("result.json"))
    offsets, read = [], TrialFolder.events
    monkeypatch.setattr(TrialFolder, "events", lambda self, offset=0: offsets.append(offset) or read(self, offset))
    board = Lines(plan, store, RunSpec())
    board.close()
    assert len(offsets) == 2 and min(offsets) > 0
    for planned in plan.trials:
        result = store.folder(planned.trial).result()
        assert result is not None
        measured = [
            (name, value, moment.step) for moment in result.outcome.history for name, value in moment.metrics.items()
        ]
        [mark] = [mark for identity, mark in board.marks().items() if identity.startswith(planned.trial.key)]
        assert Counter(board.stored_points(mark)) == Counter(measured)


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


def test_long_delivery_tells_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(replay, "COMMIT_S", -1.0)
    _, board = rehearsed(tmp_path)
    board.update()
    assert caplog.text == ""
    assert board.close() == "somewhere"
    assert [record.getMessage() for record in caplog.records][1:3] == [
        "Lines: 2 of 4 trials looked at",
        "Lines: 3 of 4 trials looked at",
    ]


def test_unreachable_tracker_is_retried_after_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = 0.0, []

    class Away(Lines):
        def deliver(self, **_: Any) -> None:
            calls.append(now)
            raise ConnectionError("away")

    monkeypatch.setattr(trackers.time, "monotonic", lambda: now)
    _, board = rehearsed(tmp_path, Away)
    for second in range(0, 100):
        now = float(second)
        board.update()
    assert calls == [0, 30, 60, 90]


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
    aside = BackgroundDelivery(board)
    for _ in range(3):
        aside.update()
    assert not (store.root / "lines").exists()
    threading.Timer(0.1, go_on.set).start()
    assert aside.close([]) == "somewhere" and most == [1]
    assert lines(store) == journalled(store) + Counter({"done": 4})


def test_delivery_of_a_report_does_not_wait_for_the_pace_of_a_run(tmp_path: Path) -> None:
    class Counts(Lines):
        updates = 0

        def update(self) -> None:
            self.updates += 1

    _, board = rehearsed(tmp_path, Counts)
    aside = BackgroundDelivery(board)
    schedule = Schedule(Inline(RunSpec()), {}, SimpleNamespace(delivery=aside), [])  # type: ignore[arg-type]
    schedule._update_tracker()
    assert aside._thread is not None
    aside._thread.join()
    time.sleep(0.01)
    schedule._update_tracker()
    aside._thread.join()
    assert board.updates == 1
    aside.update()  # while the report is written
    aside._thread.join()
    assert board.updates == 2


def test_undroppable_trial_does_not_block_others(tmp_path: Path, caplog: Any) -> None:
    class Sticks(Lines):
        def remove_trial(self, mark: Cursor) -> None:
            raise OSError("it is not mine")

    store, board = rehearsed(tmp_path, Sticks)
    assert board.close() == "somewhere"
    fewer = replace(board.plan, trials=board.plan.trials[:1])
    trial = fewer.trials[0].trial
    store.trial(trial.key, trial.code).emit("metrics", step=9, epoch=1.0, images=9, metrics={})
    assert Sticks(fewer, store, RunSpec()).close() is None and "it is not mine" in caplog.text
    assert not journalled(store) - lines(store)


def test_stopped_trial_ends_and_resumes(tmp_path: Path) -> None:
    store, plan = Store(tmp_path), results.small_plan()
    results.write_trials(store, plan, events=3)
    Lines(plan, store, RunSpec()).close()
    assert lines(store) == journalled(store) + Counter({"stopped": 4})
    results.write_trials(store, plan)
    Lines(plan, store, RunSpec()).close()
    assert lines(store) == journalled(store) + Counter({"stopped": 4, "done": 4})


def test_failure_is_delivered_once(tmp_path: Path) -> None:
    store, plan = Store(tmp_path), results.small_plan()
    results.write_trials(store, plan, events=3)
    trial = plan.find("baseline", 0).trial
    store.trial(trial.key, trial.code).write_failure("out of memory")
    for _ in range(2):
        Lines(plan, store, RunSpec()).update()
    assert lines(store) == journalled(store) + Counter({"failed": 1})


def test_update_reads_no_journal_of_a_trial_that_has_not_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update comes every two seconds, and most trials of a study are still waiting."""
    store, plan = Store(tmp_path), results.small_plan()
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


def test_report_of_a_run_without_the_tracker_is_delivered_by_the_next(no_figures: None, tmp_path: Path) -> None:
    reports = list[str]()

    class Titles(Lines):
        def write_study(self, report: Sequence[Path]) -> str:
            [file] = [file for file in report if file.name == "report.json"]
            reports.append(json.loads(file.read_text())["question"])
            return "somewhere"

    store, plan = Store(tmp_path), results.small_plan()
    results.write_trials(store, plan)
    other = replace(plan, question="Another one?")
    for asked, cls in [(plan, Titles), (plan, Titles), (other, trackers.Untracked), (other, Titles), (other, Titles)]:
        lab._report_and_deliver(asked, Session(store, RunSpec(), tracker=cls(asked, store, RunSpec())), None)
    assert reports == [plan.question, other.question]


# -- in a study file and on the command line --------------------------------------------------------------------------


def test_default_tracker_is_mlflow_and_none_disables(tmp_path: Path) -> None:
    assert RunSpec().tracker.type == "mlflow"
    nothing = slot("tracker").build("none", results.small_plan(), Store(tmp_path), RunSpec())
    assert not nothing.title and nothing.deliver(final=True, report=()) is None and not list(tmp_path.iterdir())


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
def test_address_of_server_is_option_of_tracker(run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    file = tmp_path / "study.yaml"
    text = PIPELINE.read_text().replace("run: {executor: local}", f"run: {run}")
    file.write_text(text.replace("URI", "http://127.0.0.1:9"))
    study, plan = lab.plan_study(file, out=tmp_path)
    assert study.run.tracker.options == {"uri": "http://127.0.0.1:9"}
    assert study.run.tracker.type.rpartition(":")[2] == "mlflow"
    changed, other = lab.plan_study(file, out=tmp_path, changes={"run.tracker.uri": "http://127.0.0.1:8"})
    assert changed.run.tracker.options == {"uri": "http://127.0.0.1:8"}
    assert other.trials == plan.trials, "no part of any key"
