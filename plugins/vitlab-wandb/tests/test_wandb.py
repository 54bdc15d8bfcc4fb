"""Tests with the real wandb package, offline: every point of every journal is in W&B's own files once."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("wandb", reason="pip install -e plugins/vitlab-wandb")
pytest.importorskip("vitlab_wandb", reason="pip install -e plugins/vitlab-wandb")

import yaml
from vitlab_wandb import WandB
from wandb.proto.wandb_internal_pb2 import Record

from vitlab import lab
from vitlab.errors import SpecError
from vitlab.plugin import Cursor, check_component

pytestmark = pytest.mark.usefixtures("no_figures")

PLUGIN = Path(__file__).parents[1]
BLOCK, HEADER = 32768, 7  #: bytes of a block of W&B's files, which are LevelDB logs, and of a record's header


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path))


def study_file(folder: Path, **options: Any) -> Path:
    model = {"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2}
    train = {"steps": 4, "batch_size": 16, "evaluations": 2}
    content = {"study": "tiny", "base": {"data": {"type": "digits"}, "model": model, "train": train}, "seeds": 2}
    tracker = {"type": "wandb", **options}
    file = folder / "tiny.yaml"
    file.write_text(yaml.safe_dump({**content, "run": {"executor": "inline", "tracker": tracker}}))
    return file


class Readable(WandB):
    """The tracker with a reader of W&B's offline files, which the contract test needs."""

    def points(self, mark: Cursor) -> Iterator[tuple[str, float, int]]:
        """Yield the measurements of an offline run."""
        for folder in self._folders(mark):
            for data in records_of((folder / f"run-{mark}.wandb").read_bytes()):
                history = Record.FromString(data).history
                for value in history.item:
                    key = value.key or "/".join(value.nested_key)
                    if not key.startswith("_"):
                        yield key, float(json.loads(value.value_json)), history.step.num


def records_of(data: bytes) -> Iterator[bytes]:
    """Yield the records of a LevelDB log, which may lie in several blocks."""
    place, record = HEADER, b""  # W&B's own header is as long as a record's
    while place + HEADER <= len(data):
        if BLOCK - place % BLOCK < HEADER:
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        record += data[place + HEADER : place + HEADER + length]
        place += HEADER + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def test_wandb_passes_contract_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WandB, "points", Readable.points)
    check_component("tracker", "wandb")


def test_offline_files_have_every_point_of_journals_once(tmp_path: Path) -> None:
    """The files are read by W&B's own messages, and the journals as JSON."""
    answer = lab.run(study_file(tmp_path), out=tmp_path / "out")
    assert answer.tracker == "wandb" and answer.link == f"wandb sync {tmp_path}/out/wandb/offline-run-*"
    found: Counter[tuple[str, str, float, int]] = Counter()
    finals, arms = {}, set()
    for file in (tmp_path / "out/wandb").glob("offline-run-*/run-*.wandb"):
        name = ""
        for message in map(Record.FromString, records_of(file.read_bytes())):
            if message.HasField("run") and message.run.display_name:
                name = message.run.display_name
                arms.add(message.run.run_group)
            for item in message.history.item:
                key = item.key or "/".join(item.nested_key)
                if not key.startswith("_"):
                    found[name, key, json.loads(item.value_json), message.history.step.num] += 1
            for item in message.summary.update:
                key = item.key or "/".join(item.nested_key)
                finals[name, key] = json.loads(item.value_json)
    expected: Counter[tuple[str, str, float, int]] = Counter()
    for seed in (0, 1):
        trial = answer.plan.find("baseline", seed).trial
        folder = answer.store.trial(trial.key, trial.code).path
        for line in map(json.loads, (folder / "events.jsonl").read_text().splitlines()):
            if line["kind"] == "metrics":
                extra = {"progress/epoch": line["epoch"], "progress/images": line["images"]}
                for key, value in {**line["metrics"], **extra}.items():
                    expected[f"baseline/s{seed}", key, value, line["step"]] += 1
        result = json.loads((folder / "result.json").read_text())["outcome"]["metrics"]
        final = finals[f"baseline/s{seed}", "final/val/accuracy"]
        assert math.isclose(final, result["val/accuracy"], abs_tol=1e-12)
    assert found == expected and set(expected.values()) == {1} and arms == {"baseline"}


def test_study_file_may_not_send_results(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="sends results to a server"):
        lab.plan_study(study_file(tmp_path, mode="online"))


def test_mark_of_foreign_results_deletes_nothing(tmp_path: Path) -> None:
    precious = tmp_path / "wandb" / "offline-run-x" / "mine"
    precious.mkdir(parents=True)
    answer = lab.plan_study(study_file(tmp_path))[1]
    from vitlab.plugin import RunSpec, Store

    for mark in ("x", "../precious", "*", 5):
        WandB(answer, Store(tmp_path), RunSpec()).drop(mark)
    assert precious.exists()


def test_study_can_be_planned(tmp_path: Path) -> None:
    study, plan = lab.plan_study(PLUGIN / "study.yaml", out=tmp_path)
    assert study.run.tracker.type == "wandb" and not any(arm.skip for arm in plan.arms)
