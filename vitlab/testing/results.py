"""Contract tests of what shows results: sections of a report, and trackers.

Both get a small study of two arms, whose journals and results are written without training.
"""

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from vitlab.identity.trial import Trial
from vitlab.planning.values import Arm, Plan, Planned
from vitlab.registry import ResolvedChoice, slot
from vitlab.spec import STREAMS, Analysis, RunSpec, TrialSpec
from vitlab.store.files import write_bytes
from vitlab.store.folders import Store
from vitlab.store.result import Circumstances, Ending, Measurement, Outcome, TrialResult
from vitlab.testing.assertions import prefix_failures
from vitlab.trackers.replay import Replay

STUDY = "rehearsal"
T_MS = 1_750_000_000_000  #: time of the first event: in June 2025
STEPS = 4


# -- sections ---------------------------------------------------------------------------------------------------------


def check_section(choice: ResolvedChoice) -> None:
    """Check that the rows of a section survive JSON, that its columns are equally long, and that figures are drawn."""
    from vitlab.report.sections import Section

    plan = small_plan(seeds=3)
    parts = ("rows", "notes", "table", "figure", "images")
    assert any(getattr(choice.component, part) is not getattr(Section, part) for part in parts), (
        f"shows nothing but its heading; define {', '.join(parts[:-1])} or {parts[-1]}"
    )
    with TemporaryDirectory() as folder:
        store = Store(Path(folder))
        _check_section_renders(choice, plan, store, "without a result")
        write_trials(store, plan)
        _check_section_renders(choice, plan, store, "with results")


def _check_section_renders(choice: ResolvedChoice, plan: Plan, store: Store, state: str) -> None:
    from vitlab.report import collect_report
    from vitlab.report.report import Report

    name, part = choice.bare_name, slot("section").build(choice)
    with prefix_failures(f"is part of a report {state}"):
        report = collect_report(plan, store)
        again = Report.from_json(json.loads(json.dumps(report.to_json())))
    assert again.to_json() == report.to_json(), f"rows {state} change when JSON is read again"
    rows = report.sections.get(name, ())
    with prefix_failures(f"is rendered {state}"):
        table = again.table(name)
        figure = part.figure(rows, report.findings) if rows else None
    lengths = {len(column.cells) for column in table.columns} if table else set()
    assert len(lengths) < 2, f"columns {state} have {sorted(lengths)} cells; give each one per row"
    assert table is None or bool(table.caption), "a table needs a caption"
    assert figure is None or bool(figure.caption), "a figure needs a caption"


# -- trackers ---------------------------------------------------------------------------------------------------------


def check_tracker(choice: ResolvedChoice) -> None:
    """Check that a tracker of journals delivers every point once, also if a delivery is interrupted.

    Two output folders hold the same journals.  One is delivered at once, the other in parts, with a driver that dies
    before it commits a delivery; afterwards both must hold the same points, which :meth:`Replay.stored_points` returns.
    """
    if not issubclass(choice.component, Replay):
        return  # where another tracker stores its points is not known here
    with TemporaryDirectory() as folder, prefix_failures("is handed journals"):
        _check_deliveries(choice, Path(folder))


def _check_deliveries(choice: ResolvedChoice, folder: Path) -> None:
    def build(store: Store) -> Replay:
        tracker: Replay = slot("tracker").build(choice, plan, store, RunSpec())
        return tracker

    plan = small_plan()
    at_once, in_pieces, anew = (Store(folder / name) for name in ("at-once", "in-pieces", "anew"))
    write_trials(at_once, plan)
    before = _read_files(at_once.root)
    tracker = build(at_once)
    assert _read_files(at_once.root) == before, "the tracker writes when it is constructed; use begin or write"
    _deliver(tracker)
    after = _read_files(at_once.root / "trials")
    changed = [name for name, content in after.items() if before.get(f"trials/{name}") != content]
    assert not changed, f"the tracker writes to the folders of trials, such as {changed[:1]}; write elsewhere"
    expected = _read_stored_points(tracker)
    for planned in plan.trials:
        for point in [("val/accuracy", each.metrics["val/accuracy"], each.step) for each in _make_history(planned)]:
            times = expected[planned.trial.key].count(point)
            assert times == 1, f"{point} of a trial was delivered once, and stored_points(mark) has it {times} times"

    def deliver_and_compare(what: str, *, final: bool = True) -> None:
        """Deliver by a new tracker, and compare its points once everything is delivered."""
        tracker = build(in_pieces)
        _deliver(tracker, final=final)
        for key, points in _read_stored_points(tracker).items() if final else ():
            more, fewer = Counter(points) - Counter(expected[key]), Counter(expected[key]) - Counter(points)
            assert not (more or fewer), (
                f"after {what}, a trial has {more.total()} points too many and lacks {fewer.total()}, such as "
                f"{next(iter(more or fewer), '')}; given a mark, remove or skip what was written after it, and without "
                "one, replace everything"
            )

    write_trials(in_pieces, plan, events=3)
    deliver_and_compare("a part", final=False)
    account = in_pieces.study(STUDY) / f"{tracker.title.lower()}-offsets.json"
    committed = account.read_bytes() if account.exists() else b"{}"  # a tracker of whole trials has none yet
    write_trials(in_pieces, plan)
    deliver_and_compare("the rest", final=False)
    write_bytes(account, committed)  # simulates a driver that died before this commit
    deliver_and_compare("the death of a driver between a delivery and its record")
    deliver_and_compare("a repeated delivery")
    account.unlink()  # a user may delete it, or restore the folder from a backup
    deliver_and_compare("a delivery without marks to a destination that has the data")
    # Another training of the same trials, whose journals begin later and have other values.
    shutil.rmtree(in_pieces.root / "trials")
    for store in (anew, in_pieces):
        write_trials(store, plan, began=T_MS + 60_000, scale=2.0)
    tracker = build(anew)
    _deliver(tracker)
    expected = _read_stored_points(tracker)
    deliver_and_compare("a retraining of the same trials")


def _deliver(tracker: Replay, *, final: bool = True) -> None:
    link = tracker.deliver(final=final, report=())
    is_link = link is None or (isinstance(link, str) and bool(link))
    assert is_link, f"write_study returned {link!r}; return an address as text, or None"


def _read_stored_points(tracker: Replay) -> dict[str, list[tuple[str, float, int]]]:
    """Return a tracker's points by the key of their trial."""
    marks = tracker.marks()
    tracker.begin_delivery(marks)
    try:
        return {identity.partition("/")[0]: list(tracker.stored_points(mark)) for identity, mark in marks.items()}
    except NotImplementedError:
        raise AssertionError("it has no stored_points(mark), which returns the stored metrics of a trial") from None


def _read_files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


# -- a small study ----------------------------------------------------------------------------------------------------


def small_plan(seeds: int = 2) -> Plan:
    """Return a plan of two arms."""
    arms = (Arm("baseline", {}), Arm("position=none", {"model.position": "none"}, baseline="baseline"))
    trials = []
    for number, (arm, seed) in enumerate(product(arms, range(seeds))):
        model = {"type": "vit", "dim": 8, "position": arm.values.get("model.position", "learned")}
        train = {"steps": STEPS, "optimizer": {"type": "adamw", "lr": 1e-3}}
        spec = TrialSpec.model_validate({"data": "digits", "model": model, "train": train})
        data, key = "digits:0", str(number).ljust(64, "0")
        trial = Trial(spec, dict.fromkeys(STREAMS, seed), (), data, key=key, code="c" * 64)
        trials.append(Planned(arm.name, seed, trial))
    return Plan(STUDY, "Does it hold?", arms, tuple(trials), Analysis())


def write_trials(store: Store, plan: Plan, *, events: int | None = None, began: int = T_MS, scale: float = 1.0) -> None:
    """Write the first ``events`` lines of the journals; by default all lines and a result.

    ``began`` is the time of the first event in milliseconds since 1970; all metrics are multiplied by ``scale``.
    """
    for number, planned in enumerate(plan.trials):
        folder = store.folder(planned.trial)
        history = _make_history(planned, scale)
        lines: list[Mapping[str, object]] = [
            {"kind": "start", "attempt": 1, "host": "here", "numerics": {}},
            *({"kind": "metrics", **vars(moment)} for moment in history),
            {"kind": "end", "status": Ending.DONE},
        ]
        journal = [
            json.dumps({"t": began + 1000 * number + 60_000 * place, **line}) for place, line in enumerate(lines)
        ]
        write_bytes(folder.path / "events.jsonl", "".join(f"{line}\n" for line in journal[:events]).encode())
        if events is None:
            outcome = Outcome(history[-1].metrics, tuple(history), "0" * 64, STEPS, 16 * STEPS)
            around = Circumstances(began / 1000, 1.0, "here", 1, 100, 1000, 10**6, {}, {}, began / 1000 + 400)
            folder.write_result(TrialResult(planned.trial.key, planned.trial.code, Ending.DONE, outcome, around))


def _make_history(planned: Planned, scale: float = 1.0) -> list[Measurement]:
    """Return the measurements of a trial; seeds differ, so that a report has an interval, by what float32 can hold."""
    return [
        Measurement(
            step,
            step / STEPS,
            16 * step,
            {"train/loss": scale / step, "val/accuracy": scale * (step / 8 + planned.seed / 64)},
        )
        for step in range(1, STEPS + 1)
    ]
