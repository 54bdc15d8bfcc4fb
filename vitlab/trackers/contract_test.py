"""A rehearsal of what happens to a tracker: deliveries that break off, trials trained anew, without a training.

Two output folders hold the same journals.  One is delivered in one go, the other in pieces, with a driver that dies
before it has committed what it delivered; afterwards both hold the same files.  That sees trackers that keep files
under the output folder; of another it sees that it can be called.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vitlab.plan.values import Arm, Plan, Planned, Trial
from vitlab.spec import Analysis, RunSpec
from vitlab.store.folders import Store, write_bytes
from vitlab.store.result import Circumstances, Measurement, Outcome, Result
from vitlab.trackers.replay import Replay

STUDY = "rehearsal"
T_MS = 1_750_000_000_000  #: when it takes place: in June 2025
Built = Callable[[Plan, Store, RunSpec], Replay]


def rehearse(build: Built, folder: Path) -> None:
    """Play it.

    Args:
        build: makes the tracker of a plan.
        folder: an empty one, to write to.

    Raises:
        AssertionError: in one sentence, where the tracker does not do what it should.
        Exception: whatever the tracker raises.
    """
    plan = _plan()
    at_once, in_pieces = Store(folder / "at-once"), Store(folder / "in-pieces")
    _train(at_once, plan)
    before = _files(at_once.root)
    tracker = build(plan, at_once, RunSpec())
    _expect(_files(at_once.root) == before, "it writes when it is built; it should wait for the first delivery")
    _deliver(tracker)
    trials = {name for name in before if name.startswith("trials")}
    after = _files(at_once.root)
    changed = {name for name, content in after.items() if name.startswith("trials") and before.get(name) != content}
    changed |= trials - set(after)
    _expect(not changed, f"it writes to the folders of trials: {', '.join(sorted(changed))}")

    _train(in_pieces, plan, events=3)
    _deliver(build(plan, in_pieces, RunSpec()), final=False)
    account = in_pieces.study(STUDY) / f"{tracker.title.lower()}-offsets.json"
    committed = account.read_bytes()
    _train(in_pieces, plan)
    _deliver(build(plan, in_pieces, RunSpec()), final=False)
    write_bytes(account, committed)  # as if that driver had died before it wrote this
    _deliver(build(plan, in_pieces, RunSpec()))
    _same(at_once, in_pieces, "a driver that died after it had delivered and before it had committed that")
    _deliver(build(plan, in_pieces, RunSpec()))
    _same(at_once, in_pieces, "a second delivery of what had been delivered")
    account.unlink()
    _deliver(build(plan, in_pieces, RunSpec()))
    _same(at_once, in_pieces, "a delivery of everything without a mark, over what was there")

    anew = Store(folder / "anew")
    for store in (in_pieces, anew):
        shutil.rmtree(store.root / "trials", ignore_errors=True)
        _train(store, plan, began=T_MS + 60_000, value=2.0)
        _deliver(build(plan, store, RunSpec()))
    _same(anew, in_pieces, "a training of the same trials anew")


def _deliver(tracker: Replay, *, final: bool = True) -> None:
    link = tracker.deliver(final=final, until=math.inf, report=())
    _expect(link is None or (isinstance(link, str) and bool(link)), f"finish returned {link!r}; expected where to look")


def _same(one: Store, other: Store, after: str) -> None:
    expected, found = _shown(one), _shown(other)
    different = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    _expect(
        not different,
        f"after {after} there is not what one delivery of the same journals leaves: {', '.join(different)}; what "
        "stands behind a mark is to be cut off or recognised, and without a mark all is to be replaced",
    )


def _shown(store: Store) -> dict[str, bytes]:
    """What a tracker has written, but for the account of it."""
    return {name: content for name, content in _files(store.root).items() if not name.startswith(("trials", "studies"))}


def _files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


# -- what is rehearsed with -------------------------------------------------------------------------------------------


def _plan() -> Plan:
    """Two arms of two seeds."""
    arms = (Arm("baseline", {}), Arm("position=none", {"model.position": "none"}, baseline="baseline"))
    trials = []
    for number, arm in enumerate(arms):
        for seed in (0, 1):
            spec = {
                "data": {"type": "digits"},
                "model": {"type": "vit", "dim": 8, "position": {"type": arm.values.get("model.position", "learned")}},
                "train": {"steps": 4, "optimizer": {"type": "adamw", "lr": 1e-3}},
            }
            key = f"{number}{seed}".ljust(64, "0")
            trials.append(Planned(arm.name, seed, Trial(spec, {"init": seed}, (), "digits:0", key=key, code="c" * 64)))
    return Plan(STUDY, "Does it hold?", arms, tuple(trials), Analysis())


def _train(store: Store, plan: Plan, *, events: int | None = None, began: int = T_MS, value: float = 1.0) -> None:
    """Write the journals, their first ``events`` lines, or all of them and a result."""
    for number, planned in enumerate(plan.trials):
        folder = store.trial(planned.trial.key, planned.trial.code)
        history = [
            Measurement(step, step / 4, 16 * step, {"train/loss": value / step, "val/accuracy": value * step / 8})
            for step in range(1, 5)
        ]
        lines: list[Mapping[str, Any]] = [{"kind": "start", "attempt": 1, "host": "here", "numerics": {}}]
        lines += [{"kind": "metrics", **vars(moment)} for moment in history]
        lines += [{"kind": "end", "status": "done"}]
        journal = [json.dumps({"t": began + 1000 * number + place, **line}) for place, line in enumerate(lines)]
        write_bytes(folder.path / "events.jsonl", "".join(f"{line}\n" for line in journal[:events]).encode())
        if events is None:
            outcome = Outcome(history[-1].metrics, tuple(history), "0" * 64, 4, 64)
            around = Circumstances(began / 1000, 1.0, "here", 1, 100, 1000, 10**6, {}, {}, began / 1000 + 1)
            folder.finish(Result(planned.trial.key, planned.trial.code, "done", outcome, around))


def _expect(holds: bool, sentence: str) -> None:
    if not holds:
        raise AssertionError(sentence)
