"""Contract test of trackers: interrupted deliveries and retrained trials, simulated without training.

Two output folders hold the same journals.  One is delivered at once, the other in parts, with a driver that dies
before it commits a delivery; afterwards both must hold the same points, which :meth:`Replay.points` returns.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path

from vitlab.geometry import DataIdentity
from vitlab.plan.values import Arm, Plan, Planned, Trial
from vitlab.spec import Analysis, RunSpec, TrialSpec
from vitlab.store.files import write_bytes
from vitlab.store.folders import Store
from vitlab.store.result import Circumstances, Ending, Measurement, Outcome, TrialResult
from vitlab.trackers.replay import Replay

STUDY = "rehearsal"
T_MS = 1_750_000_000_000  #: time of the first event: in June 2025
Built = Callable[[Plan, Store, RunSpec], Replay]


def rehearse(build: Built, folder: Path) -> None:
    """Run the contract test on a tracker.

    Args:
        build: builds the tracker of a plan.
        folder: an empty folder to write to.

    Raises:
        AssertionError: if the tracker violates the contract; the message is one sentence.
        Exception: any exception of the tracker.
    """
    plan = _plan()
    at_once, in_pieces, anew = (Store(folder / name) for name in ("at-once", "in-pieces", "anew"))
    _train(at_once, plan)
    before = _files(at_once.root)
    tracker = build(plan, at_once, RunSpec())
    _expect(_files(at_once.root) == before, "the tracker writes when it is constructed; use begin or write")
    _deliver(tracker)
    after = _files(at_once.root / "trials")
    changed = [name for name, content in after.items() if before.get(f"trials/{name}") != content]
    _expect(not changed, f"the tracker writes to the folders of trials, such as {changed[:1]}; write elsewhere")
    expected = _points(tracker)
    for planned, step in product(plan.trials, range(1, 5)):
        point = ("val/accuracy", step / 8, step)
        times = expected[planned.trial.key].count(point)
        _expect(times == 1, f"{point} of a trial was delivered once, and points(mark) has it {times} times")

    def deliver(what: str, store: Store = in_pieces, *, final: bool = True) -> None:
        """Deliver by a new tracker, and compare its points once everything is delivered."""
        tracker = build(plan, store, RunSpec())
        _deliver(tracker, final=final)
        for key, points in _points(tracker).items() if final else ():
            more, fewer = Counter(points) - Counter(expected[key]), Counter(expected[key]) - Counter(points)
            _expect(
                not (more or fewer),
                f"after {what}, a trial has {more.total()} points too many and lacks {fewer.total()}, such as "
                f"{next(iter(more or fewer), '')}; given a mark, remove or skip what was written after it, and without "
                "one, replace everything",
            )

    _train(in_pieces, plan, events=3)
    deliver("a part", final=False)
    account = in_pieces.study(STUDY) / f"{tracker.title.lower()}-offsets.json"
    committed = account.read_bytes() if account.exists() else b"{}"  # a tracker of whole trials has none yet
    _train(in_pieces, plan)
    deliver("the rest", final=False)
    write_bytes(account, committed)  # simulates a driver that died before this commit
    deliver("the death of a driver between a delivery and its record")
    deliver("a repeated delivery")
    account.unlink()
    deliver("a delivery without marks to a destination that has the data")
    shutil.rmtree(in_pieces.root / "trials")
    for store in (anew, in_pieces):
        _train(store, plan, began=T_MS + 60_000, value=2.0)
    tracker = build(plan, anew, RunSpec())
    _deliver(tracker)
    expected = _points(tracker)
    deliver("a retraining of the same trials")


def _deliver(tracker: Replay, *, final: bool = True) -> None:
    link = tracker.deliver(final=final, report=())
    is_link = link is None or (isinstance(link, str) and bool(link))
    _expect(is_link, f"finish returned {link!r}; return an address as text, or None")


def _points(tracker: Replay) -> dict[str, list[tuple[str, float, int]]]:
    """Return a tracker's points by the key of their trial."""
    marks = tracker.marks()
    tracker.begin(marks)
    try:
        return {identity.partition("/")[0]: list(tracker.points(mark)) for identity, mark in marks.items()}
    except NotImplementedError:
        raise AssertionError("it has no points(mark), which returns the stored metrics of a trial") from None


def _files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


# -- synthetic study --------------------------------------------------------------------------------------------------


def _plan() -> Plan:
    """Return a plan of two arms with two seeds each."""
    arms = (Arm("baseline", {}), Arm("position=none", {"model.position": "none"}, baseline="baseline"))
    trials = []
    for number, (arm, seed) in enumerate(product(arms, (0, 1))):
        spec = {
            "data": {"type": "digits"},
            "model": {"type": "vit", "dim": 8, "position": arm.values.get("model.position", "learned")},
            "train": {"steps": 4, "optimizer": {"type": "adamw", "lr": 1e-3}},
        }
        data, key = DataIdentity("digits:0"), str(number).ljust(64, "0")
        trial = Trial(TrialSpec.model_validate(spec), {"init": seed}, (), data, key=key, code="c" * 64)
        trials.append(Planned(arm.name, seed, trial))
    return Plan(STUDY, "Does it hold?", arms, tuple(trials), Analysis())


def _train(store: Store, plan: Plan, *, events: int | None = None, began: int = T_MS, value: float = 1.0) -> None:
    """Write the first ``events`` lines of the journals; by default all lines and a result."""
    for number, planned in enumerate(plan.trials):
        folder = store.trial(planned.trial.key, planned.trial.code)
        history = [
            Measurement(step, step / 4, 16 * step, {"train/loss": value / step, "val/accuracy": value * step / 8})
            for step in range(1, 5)
        ]
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
            outcome = Outcome(history[-1].metrics, tuple(history), "0" * 64, 4, 64)
            around = Circumstances(began / 1000, 1.0, "here", 1, 100, 1000, 10**6, {}, {}, began / 1000 + 400)
            folder.finish(TrialResult(planned.trial.key, planned.trial.code, Ending.DONE, outcome, around))


def _expect(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)
