"""Tests that TensorBoard's own reader finds every point of every journal exactly once.

Journals are read line by line as JSON, so that nothing of vitlab's is asked what should be there.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensorboard", reason="pip install -e plugins/vitlab-tensorboard")
pytest.importorskip("vitlab_tensorboard", reason="pip install -e plugins/vitlab-tensorboard")

import numpy as np
import vitlab_tensorboard
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.api_pb2 import Status
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from vitlab import cli, lab
from vitlab.errors import SpecError
from vitlab.plugin import Job, Plan, RunSpec, Store, check_component, slot
from vitlab.runner import execution as runner
from vitlab.runner.job import JobTrial
from vitlab.store.folders import TrialFolder
from vitlab.trackers.delivery import sync

pytestmark = pytest.mark.usefixtures("no_figures")

PLUGIN = Path(__file__).parents[1]
NAMES = [f"{arm}/s{seed}" for arm in ("baseline", "position=none") for seed in (0, 1)]
Points = Counter[tuple[str, float, int, int]]  #: name, value, time, step


def study_file(folder: Path, **run: Any) -> Path:
    model = {"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2, "position": "learned"}
    train = {"steps": 4, "batch_size": 16, "evaluations": 2}
    base = {"data": {"type": "digits"}, "model": model, "train": train}
    content = {"study": "tiny", "base": base, "design": {"one_at_a_time": {"model.position": ["none"]}}, "seeds": 2}
    file = folder / "tiny.yaml"
    file.write_text(yaml.safe_dump({**content, "run": {"executor": "inline", "tracker": "tensorboard", **run}}))
    return file


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the study with TensorBoard as its tracker."""
    folder = tmp_path_factory.mktemp("trained")
    answer = lab.run(study_file(folder), out=folder / "out")
    assert (answer.trained, answer.tracker) == (4, "TensorBoard")
    assert answer.link == f"tensorboard --logdir {folder / 'out' / 'tensorboard' / 'tiny'}"
    return folder / "out"


@pytest.fixture
def untold(trained: Path, tmp_path: Path) -> Path:
    """Return trained trials without any delivery."""
    out = tmp_path / "out"
    shutil.copytree(trained, out, ignore=shutil.ignore_patterns("tensorboard*", ".tensorboard*"))
    return out


def tracker(out: Path, **options: Any) -> Any:
    plan = Plan.from_json(json.loads((out / "studies/tiny/plan.json").read_text()))
    return slot("tracker").build({"type": "tensorboard", **options}, plan, Store(out), RunSpec())


def folder_of(out: Path, name: str) -> TrialFolder:
    arm, _, seed = name.rpartition("/s")
    plan = Plan.from_json(json.loads((out / "studies/tiny/plan.json").read_text()))
    trial = plan.find(arm, int(seed)).trial
    return Store(out).trial(trial.key, trial.code)


def load_events(out: Path, run: str, folder: str = "tensorboard") -> EventAccumulator:
    everything = {"scalars": 0, "tensors": 0, "images": 0, "histograms": 0}
    return EventAccumulator(str(out / folder / "tiny" / run), size_guidance=everything).Reload()


def stored(out: Path, run: str, folder: str = "tensorboard") -> Points:
    points: Points = Counter()
    events = load_events(out, run, folder)
    for name in events.Tags()["tensors"]:
        if not name.endswith("text_summary"):
            points.update(
                (name, float(e.tensor_proto.float_val[0]), round(e.wall_time * 1000), e.step)
                for e in events.Tensors(name)
            )
    return points


def journalled(folder: TrialFolder) -> Points:
    """Return the points of a journal in float32, as TensorBoard stores them."""
    points: Points = Counter()
    for event in map(json.loads, (folder.path / "events.jsonl").read_text().splitlines()):
        if event["kind"] == "metrics":
            values = event["metrics"] | {"progress/epoch": event["epoch"], "progress/images": event["images"]}
            points.update((name, float(np.float32(value)), event["t"], event["step"]) for name, value in values.items())
    return points


def holds_all_once(out: Path, folder: str = "tensorboard") -> None:
    """Check that every line of every journal is stored once, final values once at step 0, and nothing else."""
    runs = {str(path.parent.relative_to(out / folder / "tiny")) for path in (out / folder).rglob("*tfevents*")}
    assert runs == {*NAMES, "study"}
    for run in NAMES:
        points, expected = stored(out, run, folder), journalled(folder_of(out, run))
        assert len(expected) >= 2 * 4
        finals = Counter({point: count for point, count in points.items() if point[3] == 0})
        assert points == expected + finals
        outcome = json.loads((folder_of(out, run).path / "result.json").read_text())["outcome"]
        values = {name.partition("/")[2]: value for name, value, *_ in finals.elements() if name.startswith("final/")}
        assert set(finals.values()) == {1}
        assert values == {name: float(np.float32(value)) for name, value in outcome["metrics"].items()}


def bytes_of(out: Path) -> dict[str, bytes]:
    """Return the bytes of the trials' event files, without the study's run, whose report has durations."""
    return {str(path): path.read_bytes() for path in sorted((out / "tensorboard/tiny").glob("*/s*/*"))}


def test_tensorboard_passes_contract_test() -> None:
    check_component("tracker", "tensorboard")


# -- every point once -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_run_writes_every_point_once_and_rerun_changes_nothing(trained: Path) -> None:
    holds_all_once(trained)
    before = bytes_of(trained)
    answer = lab.run(study_file(trained.parent), out=trained)
    assert (answer.trained, answer.cached) == (0, 4) and bytes_of(trained) == before


class Killed(BaseException):
    """Exception that ends a process like SIGKILL: nothing catches it."""


@pytest.mark.parametrize("after", [0, 1, 7, 40, 61])
def test_kill_between_two_deliveries_repeats_nothing(untold: Path, after: int, monkeypatch: Any) -> None:
    """Kill after some records of the first or a later trial, before the account is written."""
    genuine, count = vitlab_tensorboard._record, itertools.count()

    def breaks(file: Any, event: Any) -> None:
        if next(count) >= after:
            file.write(b"torn")
            raise Killed
        genuine(file, event)

    with monkeypatch.context() as patched:
        patched.setattr(vitlab_tensorboard, "_record", breaks)
        patched.setattr("vitlab.trackers.replay.write_json", lambda *_: None)
        with pytest.raises(Killed):
            tracker(untold).update()
    assert any((untold / "tensorboard").rglob("*tfevents*"))
    assert tracker(untold).close()
    holds_all_once(untold)


def test_kill_between_points_and_cursor_repeats_nothing(untold: Path, monkeypatch: Any) -> None:
    """Half of each journal is delivered and recorded; all of it is delivered but not recorded."""
    monkeypatch.setattr("vitlab.trackers.replay.LIVE_S", 0.0)
    whole = {name: (folder_of(untold, name).path / "events.jsonl").read_text() for name in NAMES}
    for name, text in whole.items():
        lines = text.splitlines(keepends=True)
        (folder_of(untold, name).path / "events.jsonl").write_text("".join(lines[: len(lines) // 2]))
    for path in untold.glob("trials/*/*/result.json"):
        path.rename(path.with_name("kept.json"))
    tracker(untold).update()
    half = {name: sum(stored(untold, name).values()) for name in NAMES}
    for name, text in whole.items():
        (folder_of(untold, name).path / "events.jsonl").write_text(text)
    for path in untold.glob("trials/*/*/kept.json"):
        path.rename(path.with_name("result.json"))
    with monkeypatch.context() as patched:
        patched.setattr("vitlab.trackers.replay.write_json", lambda *_: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            tracker(untold).update()
    assert all(half[name] < sum(stored(untold, name).values()) for name in NAMES)
    assert tracker(untold).close()
    holds_all_once(untold)


def test_running_reader_reads_every_point_once(untold: Path, monkeypatch: Any) -> None:
    """A reader stays open during a kill and the next delivery."""
    with monkeypatch.context() as patched:
        patched.setattr("vitlab.trackers.replay.write_json", lambda *_: (_ for _ in ()).throw(Killed()))
        with pytest.raises(Killed):
            tracker(untold).update()
    reader = load_events(untold, NAMES[0])
    counts = {name: len(reader.Tensors(name)) for name in reader.Tags()["tensors"]}
    assert tracker(untold).close()
    reader.Reload()
    assert {name: len(reader.Tensors(name)) for name in reader.Tags()["tensors"]} == counts
    holds_all_once(untold)


def test_lost_files_are_delivered_again(untold: Path) -> None:
    """Lost are the account, a file, the end of a file, or the folder."""
    assert tracker(untold).close()
    before = bytes_of(untold)
    (untold / "studies/tiny/tensorboard-offsets.json").unlink()
    assert tracker(untold).close() and bytes_of(untold) == before
    first, second, *_ = sorted((untold / "tensorboard/tiny/baseline").rglob("*tfevents*"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-5])
    assert tracker(untold).close() and bytes_of(untold) == before
    assert tracker(untold, folder="boards/own").close()
    holds_all_once(untold, "boards/own")


def test_stopped_resumed_and_retrained_trials(untold: Path) -> None:
    assert tracker(untold).close()
    folder = folder_of(untold, NAMES[-1])
    events = next((untold / "tensorboard/tiny" / NAMES[-1]).iterdir()).read_bytes()
    plan = Plan.from_json(json.loads((untold / "studies/tiny/plan.json").read_text()))
    shutil.rmtree(folder.path)
    counter = itertools.count()
    trial = JobTrial("position=none/s1", folder.path, plan.find("position=none", 1).trial)
    assert runner.execute(Job((trial,)), lambda: next(counter) >= 3)[0].ending == "stopped"
    with (folder.path / "events.jsonl").open("a") as journal:
        journal.write('{"t": 1, "kind": "metr')
    tracker(untold).close()
    # One that begins within the same second has a file of the same name.
    assert next((untold / "tensorboard/tiny" / NAMES[-1]).iterdir()).read_bytes() != events
    partial = stored(untold, NAMES[-1])
    answer = lab.run(study_file(untold.parent), out=untold)
    assert (answer.trained, answer.cached) == (1, 3)
    holds_all_once(untold)
    assert partial and partial < stored(untold, NAMES[-1])


def test_removed_trials_leave_the_board(untold: Path) -> None:
    assert tracker(untold).close()
    file = study_file(untold.parent)
    lab.run(file, out=untold, changes={"seeds": 1})
    runs = {str(path.parent.relative_to(untold / "tensorboard/tiny")) for path in untold.rglob("*tfevents*")}
    assert runs == {"baseline/s0", "position=none/s0", "study"}


def test_unwritable_folder_ends_no_training(untold: Path, caplog: Any) -> None:
    (untold / "tensorboard").write_text("in the way")
    answer = lab.run(study_file(untold.parent), out=untold)
    assert answer.link is None and answer.failed == 0
    assert "TensorBoard is not up to date" in caplog.text
    (untold / "tensorboard").unlink()
    assert sync(untold)[0].link is not None
    holds_all_once(untold)


def test_cursor_outside_folder_is_refused(untold: Path) -> None:
    """Foreign results may contain such cursors."""
    assert tracker(untold).close()
    precious = untold / "precious.txt"
    precious.write_text("mine")
    account = untold / "studies/tiny/tensorboard-offsets.json"
    document = json.loads(account.read_text())
    for trial in document["tensorboard"].values():
        trial["mark"]["file"] = "../../precious.txt"
        trial["offset"] = 0
    account.write_text(json.dumps(document))
    tracker(untold).close()
    shutil.rmtree(untold / "trials")
    tracker(untold).close()
    assert precious.read_text() == "mine"


# -- what stands beside the points ------------------------------------------------------------------------------------


def hparams(events: EventAccumulator) -> Iterator[HParamsPluginData]:
    for tag in events.summary_metadata:
        if tag.startswith("_hparams_/"):
            yield metadata_of(events, tag)


def metadata_of(events: EventAccumulator, tag: str) -> HParamsPluginData:
    return HParamsPluginData.FromString(events.SummaryMetadata(tag).plugin_data.content)


def test_hyperparameters_and_texts_equal_trial(trained: Path) -> None:
    for run, position in ((NAMES[0], "learned"), (NAMES[2], "none")):
        events = load_events(trained, run)
        start = metadata_of(events, metadata.SESSION_START_INFO_TAG).session_start_info
        assert start.hparams["model.position"].string_value == position
        assert start.hparams["model.dim"].number_value == 8 and start.hparams["arm"].string_value in run
        experiment = metadata_of(events, metadata.EXPERIMENT_TAG).experiment
        assert [info.name.tag for info in experiment.metric_infos] == ["final/val/accuracy"]
        end = metadata_of(events, metadata.SESSION_END_INFO_TAG).session_end_info
        assert end.status == Status.Value("STATUS_SUCCESS")
        text = events.Tensors("spec/text_summary")[0].tensor_proto.string_val[0].decode()
        spec = json.loads((folder_of(trained, run).path / "spec.json").read_text())
        assert yaml.safe_load(text)["spec"] == spec["spec"]
    [text] = load_events(trained, "study").Tensors("study file/text_summary")
    assert yaml.safe_load(text.tensor_proto.string_val[0])["study"] == "tiny"


def test_non_finite_values_and_failures(untold: Path) -> None:
    folder = folder_of(untold, NAMES[0])
    folder.emit("metrics", step=5, epoch=1.0, images=80, metrics={"train/loss": math.inf})
    other = folder_of(untold, NAMES[1])
    (other.path / "result.json").unlink()
    other.write_failure("the disk is full")
    assert tracker(untold).close()
    assert [math.isnan(value) for name, value, _, step in stored(untold, NAMES[0]) if (name, step) == ("train/loss", 5)]
    [text] = load_events(untold, NAMES[1]).Tensors("failure/text_summary")
    assert text.tensor_proto.string_val[0] == b"the disk is full"


@pytest.mark.parametrize("name", ["a/b", "../up", "study", "x" * 300, "rope2d(theta=50)", "a\\b", ".", "ä ö"])
def test_any_arm_name_has_its_own_folder(name: str, tmp_path: Path) -> None:
    folder = vitlab_tensorboard._folder(name)
    (tmp_path / folder).mkdir()
    assert (tmp_path / folder).parent == tmp_path and folder not in (".", "..", "study", "")
    assert folder != vitlab_tensorboard._folder(name + "/")


# -- in a study -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["/tmp/elsewhere", "../up", "a/../../b", "", "trials/x", "studies"])
def test_event_files_stay_inside_folder(folder: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="a folder inside the output folder"):
        lab.plan_study(study_file(tmp_path, tracker={"type": "tensorboard", "folder": folder}))


def test_command_line_prints_tensorboard_command(trained: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    file = study_file(trained.parent)
    cli.cli.main(["run", str(file), "--out", str(trained)], standalone_mode=False)
    output = capsys.readouterr().out
    assert f"TensorBoard   tensorboard --logdir {trained / 'tensorboard' / 'tiny'}" in output and "MLflow" not in output
    assert not (trained / "mlflow.db").exists()


def test_study_can_be_planned(tmp_path: Path) -> None:
    study, plan = lab.plan_study(PLUGIN / "study.yaml", out=tmp_path)
    assert study.run.tracker.type == "tensorboard" and not any(arm.skip for arm in plan.arms)
