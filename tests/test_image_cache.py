"""Tests of stored images: batches are bitwise equal wherever pictures are decoded and whenever they are read."""

from __future__ import annotations

import gc
import io
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from job_helpers import run_trial
from PIL import Image
from trainings import train

from vitlab import noise
from vitlab.data import image_cache
from vitlab.data.batches import Batch
from vitlab.data.datasets import files
from vitlab.data.datasets.folder import ImageFolder
from vitlab.data.datasets.pictures import EncodedPictures, PictureFiles
from vitlab.data.image_cache import Prefetcher, ReadRequest
from vitlab.data.prepare import DataSource, Feed, data_info, prepare
from vitlab.errors import DataError
from vitlab.lab import plan_study
from vitlab.registry import slot
from vitlab.runner.job import Settings
from vitlab.spec import TrainSpec
from vitlab.store.folders import TrialFolder

SEEDS = dict.fromkeys(("split", "subset", "order", "augment", "dropout", "drop_path", "mixup", "init"), 3)
AUGMENT = ["random_resized_crop", "flip", {"type": "erasing", "p": 0.7}]
PLACES = ("memory", "disk", "never")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    yield folder / "vitlab" / "data"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write real JPEGs of many sizes and shapes in three classes; one is grey."""
    random, folder = np.random.default_rng(0), tmp_path_factory.mktemp("pictures")
    for split, count in (("train", 25), ("val", 5)):
        for kind in ("cat", "cow", "dog"):
            (folder / split / kind).mkdir(parents=True)
            for number in range(count):
                height, width = random.integers(20, 60, 2)
                coarse = random.integers(0, 256, (5, 6, 3), np.uint8)
                picture = Image.fromarray(coarse).resize((int(width), int(height)), Image.Resampling.BICUBIC)
                picture = picture.convert("L") if number == 0 else picture
                picture.save(folder / split / kind / f"{number}.jpg", quality=90)
    return folder


def choice(root: Path, decoded: str, **options: Any) -> Any:
    settings = {"type": "image_folder", "root": str(root), "image_size": [24, 20], "decoded": decoded, **options}
    return slot("dataset").resolve_choice(settings)


def feed(root: Path, decoded: str, augment: list[Any] = AUGMENT, **options: Any) -> Feed:
    dataset = choice(root, decoded, augment=augment, **options)
    return Feed(prepare(dataset, SEEDS), dataset.options["augment"], SEEDS)


def same(one: Batch, other: Batch) -> bool:
    return one.epoch == other.epoch and all(torch.equal(a, b) for a, b in zip(one[:3], other[:3], strict=True))


@pytest.mark.parametrize("options", [{}, {"size": 16, "channels": 1, "classes": [2, 0], "fit": "squash"}])
@pytest.mark.parametrize("decoded", ["disk", "never"])
def test_batches_equal_in_memory_batches(root: Path, decoded: str, options: dict[str, Any]) -> None:
    resident, streamed = feed(root, "memory", **options), feed(root, decoded, **options)
    assert streamed.stored and not resident.stored
    per_epoch = resident.steps_per_epoch(16)
    for step in (*range(2 * per_epoch + 2), 1, 0):  # over two borders of epochs, and back
        assert same(streamed.batch(step, 16), resident.batch(step, 16)), step
    again = feed(root, decoded, **options)
    for step in range(per_epoch + 1, per_epoch + 4):  # a resume in mid-epoch
        assert same(again.batch(step, 16), resident.batch(step, 16))
    for step, part in enumerate(([range(0, 8)], [range(8, 16)], [range(0, 4), range(12, 16)])):
        assert same(streamed.batch(step, 16, 2, part), resident.batch(step, 16, 2, part))
    for split in ("train", "val", "test"):
        batches = [list(one.evaluation(split, 7)) for one in (streamed, resident)]
        assert len(batches[0]) == len(batches[1]) and all(map(same, *batches))


def test_resumed_training_equals_in_memory_training(root: Path) -> None:
    spec = TrainSpec.model_validate({"steps": 9, "batch_size": 16, "evaluations": 2, "optimizer": {"type": "adamw"}})

    def trained(decoded: str, stop_at: int | None) -> dict[str, torch.Tensor]:
        states: list[Any] = []
        network = slot("model").build({"type": "linear"}, data_info(choice(root, decoded)))
        network.initialise(0)
        steps_taken = iter(range(100))
        stop = (lambda: next(steps_taken) == stop_at) if stop_at is not None else (lambda: False)
        result = train(network, feed(root, decoded), spec, SEEDS, save=states.append, stop=stop)
        assert (result is None) == (stop_at is not None)
        if result is None:
            assert train(network, feed(root, decoded), spec, SEEDS, resume=states[-1]) is not None
        return network.state_dict()

    expected = trained("memory", None)
    for decoded in ("disk", "never"):
        result = trained(decoded, 6)
        assert all(torch.equal(result[name], expected[name]) for name in expected)


@pytest.mark.parametrize("decoded", PLACES)
@pytest.mark.parametrize("how", ["bilinear", "bicubic"])
def test_picture_crop_equals_torchvision(root: Path, decoded: str, how: str) -> None:
    """The reference is Pillow's crop and resize; the rectangle is that of an image of the picture's size."""
    change = {"type": "random_resized_crop", "of": "picture", "interpolation": how, "scale": [0.1, 1.0]}
    one = feed(root, decoded, [change, "flip"], normalize="unit")
    cut, flip = slot("augment").build(change), slot("augment").build("flip")
    paths = ImageFolder(root=str(root)).pictures("train").names
    images = []
    for step in (0, one.steps_per_epoch(20)):  # of two epochs
        batch = one.batch(step, 20)
        for x_CHW, identity in zip(batch.x_BCHW, batch.id_B, strict=True):
            picture = Image.open(paths[int(identity)]).convert("RGB")
            keys = [noise.key(SEEDS["augment"], "augment", batch.epoch, place) for place in (0, 1)]
            top, left, height, width = (
                int(side) for side in cut.boxes(keys[0], identity[None], picture.height, picture.width)[:4]
            )
            small = picture.crop((left, top, left + width, top + height)).resize(
                (20, 24), Image.Resampling[how.upper()]
            )
            expected = torch.from_numpy(np.array(small)).permute(2, 0, 1)[None]
            expected = flip(expected, keys[1], identity[None])[0] / 255
            torch.testing.assert_close(x_CHW, expected, rtol=0, atol=1e-6)
            images.append(x_CHW)
    other = feed(root, "memory", ["random_resized_crop", "flip"], normalize="unit")
    assert not torch.equal(other.batch(0, 20).x_BCHW, torch.stack(images[:20]))
    assert all(map(same, one.evaluation("val", 9), other.evaluation("val", 9)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"type": "digits"}, "augment: random_resized_crop crops full-size picture files, and digits has none"),
        (
            {"type": "image_folder", "root": "x", "num_classes": 2, "augment": ["flip"]},
            "must be the first augmentation; it is number 2",
        ),
    ],
)
def test_empty_crops_are_refused(data: dict[str, Any], message: str) -> None:
    data["augment"] = [*data.get("augment", []), {"type": "random_resized_crop", "of": "picture"}]
    with pytest.raises(DataError, match=message):
        data_info(data)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:300]), "cannot be read as a picture"),
        (lambda path: path.unlink(), "cannot be read as a picture: .*No such file"),
    ],
)
def test_picture_error_during_training_is_reported(tmp_path: Path, root: Path, harm: Any, message: str) -> None:
    for path in root.rglob("*.jpg"):
        copy = tmp_path / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(path.read_bytes())
    one = feed(tmp_path, "never", [])
    missing_id = prepare(choice(tmp_path, "never"), SEEDS).train.id_N[-1]
    path = Path(ImageFolder(root=str(tmp_path)).pictures("train").names[int(missing_id)])
    harm(path)
    with pytest.raises(DataError, match=f"^{path} {message}") as caught:
        for step in range(one.steps_per_epoch(16) + 1):
            one.batch(step, 16)
    assert "\n" not in str(caught.value)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # torch says that the check is a prototype
def test_batches_arrive_on_gpu_without_waiting(root: Path) -> None:
    dataset = choice(root, "never", augment=["flip"], normalize="unit")
    prepared = prepare(dataset, SEEDS)
    here, there = (Feed(prepared, dataset.options["augment"], SEEDS, device) for device in ("cpu", "cuda"))
    for step in range(9):
        batch, expected = there.batch(step, 16), here.batch(step, 16)
        assert batch.x_BCHW.is_cuda and torch.equal(batch.id_B.cpu(), expected.id_B)
        torch.testing.assert_close(batch.x_BCHW.cpu(), expected.x_BCHW, rtol=0, atol=1e-6)
    ahead, row_B = Prefetcher(prepared.train.stored, torch.device("cuda")), torch.arange(16)  # type: ignore[arg-type]
    ahead.take_batch(0, None, lambda at: ReadRequest(row_B, row_B))  # the first of a process may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(1, 9):
            assert ahead.take_batch(step, None, lambda at: ReadRequest(row_B, row_B)).is_cuda
    finally:
        torch.cuda.set_sync_debug_mode("default")


def reading() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("vitlab-pictures")]


def test_prefetch_is_bounded(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # torch keeps the frame in which it built its first optimizer, and with it a feed, until then
    earlier = reading()
    decoded: list[int] = []
    fill = image_cache.StoredImages.fill

    def slow(self: image_cache.StoredImages, out_BCHW: np.ndarray, request: image_cache.ReadRequest) -> None:
        time.sleep(0.02)
        decoded.append(len(out_BCHW))
        fill(self, out_BCHW, request)

    monkeypatch.setattr(image_cache.StoredImages, "fill", slow)
    one = feed(root, "never", normalize="unit")
    one.batch(0, 8)
    deadline = time.monotonic() + 10
    while sum(decoded) < 8 * (1 + image_cache.PREFETCH_BATCHES) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert sum(decoded) == 8 * (1 + image_cache.PREFETCH_BATCHES), "what is asked for and what waits, and no more"
    for step in (6, 3, 5, 0):
        one.batch(step, 8)
        assert one._prefetcher is not None and len(one._prefetcher._pending) == image_cache.PREFETCH_BATCHES, (
            "the others are given up"
        )
    members = [feed(root, "never", normalize="unit") for _ in range(3)]
    for member in members:
        member.batch(0, 8)
    threads = [thread for thread in reading() if thread not in earlier]
    assert len(threads) <= torch.get_num_threads(), "members share them"


def test_decoded_cache_is_written_once(root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitlab.data.prepare._cache", {})
    first = feed(root, "disk")
    times = {file.name: file.stat().st_mtime_ns for file in (cache / "decoded").iterdir()}
    assert sum(name.endswith(".npy") for name in times) == 2 and not any(name.endswith(".part") for name in times)
    monkeypatch.setattr("vitlab.data.prepare._cache", {})
    monkeypatch.setattr(image_cache, "_write_images", lambda *_: pytest.fail("written again"))
    again = feed(root, "disk", normalize="half", fraction=0.5)
    assert {file.name: file.stat().st_mtime_ns for file in (cache / "decoded").iterdir()} == times
    assert len(again.batch(0, 8).id_B) == len(first.batch(0, 8).id_B)
    cached = np.load(next((cache / "decoded").glob("*.train.npy")), mmap_mode="r")
    assert cached.shape == (75, 3, 24, 20)


@pytest.mark.parametrize("decoded", PLACES)
@pytest.mark.parametrize("augment", [[], [{"type": "random_resized_crop", "of": "picture"}]])
def test_cache_of_pictures_changed_while_reading_is_discarded(
    root: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoded: str, augment: list[Any]
) -> None:
    """The picture is restored, so the content of the first identity is requested again."""
    shutil.copytree(root, tmp_path / "copy")
    path = tmp_path / "copy" / "train" / "dog" / "7.jpg"
    content, image = path.read_bytes(), EncodedPictures.image

    def replaced(self: PictureFiles, index: int) -> torch.Tensor:
        if path.samefile(self.names[index]):
            Image.new("RGB", (30, 30), (9, 8, 7)).save(path)
        return image(self, index)

    with monkeypatch.context() as patched:
        patched.setattr(EncodedPictures, "image", replaced)
        with pytest.raises(DataError, match="image_folder was changed while it was read: image_folder:"):
            feed(tmp_path / "copy", decoded, augment)
    assert not [file for file in cache.glob("decoded/*") if file.suffix != ".lock"]
    path.write_bytes(content)
    actual, expected = feed(tmp_path / "copy", decoded, augment), feed(root, "never", augment)
    assert all(map(same, actual.evaluation("train", 9), expected.evaluation("train", 9)))


@pytest.mark.parametrize("harm", ["empty", "short", "dtype", "shape"])
def test_incomplete_cache_file_is_rewritten(
    root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    monkeypatch.setattr("vitlab.data.prepare._cache", {})
    expected = feed(root, "disk").batch(0, 40)
    file = next((cache / "decoded").glob("*.train.npy"))
    x_MCHW = np.load(file)
    if harm == "empty":
        file.write_bytes(b"")
    elif harm == "short":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        np.save(file, x_MCHW.view(np.int8) if harm == "dtype" else x_MCHW[:-1])
    monkeypatch.setattr("vitlab.data.prepare._cache", {})
    assert same(feed(root, "disk").batch(0, 40), expected)
    assert np.array_equal(np.load(file), x_MCHW)


def test_cache_file_is_synced_before_rename(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int, int]] = []
    fsync, replace = os.fsync, os.replace

    def synced(number: int) -> None:
        calls.append(("synced", os.fstat(number).st_ino, os.fstat(number).st_size))
        fsync(number)

    def record_rename(source: Path, target: Path) -> None:
        calls.append(("named", os.stat(source).st_ino, os.stat(source).st_size))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", record_rename)
    monkeypatch.setattr("vitlab.data.prepare._cache", {})
    feed(root, "disk", normalize="unit")
    big_entries = [entry for entry in calls if entry[2] > 15 * 3 * 24 * 20]
    assert [entry[0] for entry in big_entries] == ["synced", "named"] * 2
    assert big_entries[0][1:] == big_entries[1][1:] and big_entries[2][1:] == big_entries[3][1:]


def test_too_many_pictures_for_memory_gives_one_sentence(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitlab.data.prepare._cache", {})
    monkeypatch.setattr("vitlab.data.datasets.files.os.sysconf", lambda name: 300)
    cut = [{"type": "random_resized_crop", "of": "picture"}]
    with pytest.raises(DataError, match=r"image_folder: its train split needs 0\.0 GiB decoded"):
        feed(root, "memory", cut)


def test_full_disk_gives_one_sentence(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_cache, "FREE_SPACE_FACTOR", 1 << 50)
    with pytest.raises(
        DataError,
        match=r"its train split could not be cached in .*: it requires .* GiB of free disk space.*decoded: never",
    ):
        prepare(choice(root, "disk", fit="squash"), SEEDS)


def test_storage_rule_equals_documentation(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("1000000\n")
    assert files.total_memory(tmp_path) == 1_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert files.total_memory(tmp_path) == files.total_memory(tmp_path / "nowhere") > 1 << 28
    size = 90 * 3 * 24 * 20
    monkeypatch.setattr(files, "total_memory", lambda: 4 * size)
    assert (
        image_cache.choose_decoded_place("auto", size) == "memory"
        and image_cache.choose_decoded_place("auto", size + 1) == "never"
    )
    assert {image_cache.choose_decoded_place(place_name, 1 << 50) for place_name in PLACES} == set(PLACES)
    assert (
        len(DataSource(choice(root, "auto")).check_pictures_and_note()) == 1
        and DataSource("digits").check_pictures_and_note() == []
    )
    assert "cached decoded in" in DataSource(choice(root, "disk")).check_pictures_and_note()[-1]
    assert DataSource({"type": "image_folder", "root": "nowhere", "num_classes": 2}).check_pictures_and_note() == []
    monkeypatch.setattr(files, "total_memory", lambda: size)
    message = DataSource(choice(root, "auto")).check_pictures_and_note()[-1]
    assert message.startswith("The 90 pictures of image_folder are decoded again for every batch: 0.0 GiB")
    assert "'decoded: disk' keeps them" in message
    cut = DataSource(
        choice(root, "auto", augment=[{"type": "random_resized_crop", "of": "picture"}])
    ).check_pictures_and_note()[-1]
    assert message.startswith(cut) and "decoded: disk" not in cut
    monkeypatch.setattr(files, "total_memory", lambda: 2 * size)
    assert not feed(root, "memory").stored and feed(root, "auto").stored


def test_study_reports_where_pictures_are_read_from(root: Path, tmp_path: Path) -> None:
    """The plan and the journal report it; the result equals that with all pictures in memory."""
    base = {
        "data": {"type": "image_folder", "root": str(root), "image_size": 16, "augment": AUGMENT},
        "model": {"type": "vit", "patch_size": 8, "dim": 8, "depth": 1, "heads": 2},
        "train": {"steps": 5, "batch_size": 16, "evaluations": 2},
    }
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump({"study": "s", "base": base, "seeds": 1}))
    lines = {}
    for decoded in ("memory", "never"):
        _, plan = plan_study(file, changes={"base.data.decoded": decoded})
        assert any("are decoded again for every batch" in note for note in plan.notes) == (decoded == "never")
        folder = TrialFolder(tmp_path / decoded / "key" / "code")
        result = run_trial(plan.trials[0].trial, folder, Settings(device="cpu"))
        start = next(event for event in folder.events()[0] if event.kind == "start")
        assert ("images are read as batches ask for them" in start.body.get("note", "")) == (decoded == "never")
        assert result is not None
        lines[decoded] = (plan.trials[0].trial.key, result.outcome)
    assert lines["memory"] == lines["never"] and lines["never"][1].weights


def test_identity_is_cached_until_picture_changes(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("a", "b"):
        for split in ("train", "test"):
            (tmp_path / split / kind).mkdir(parents=True)
            Image.new("RGB", (4, 4), (7, 8, 9)).save(tmp_path / split / kind / "0.png")
    monkeypatch.setattr(files, "SETTLED_S", -1.0)
    first = ImageFolder(root=str(tmp_path)).info().identity
    assert len(list((cache / "identities").iterdir())) == 1
    with monkeypatch.context() as patched:
        patched.setattr(EncodedPictures, "size_and_md5", lambda self, index: pytest.fail("read again"))
        assert ImageFolder(root=str(tmp_path)).info().identity == first
    path = tmp_path / "train" / "a" / "0.png"
    content = io.BytesIO()
    Image.new("RGB", (4, 4), (9, 8, 7)).save(content, "PNG")
    assert len(content.getvalue()) == path.stat().st_size, "only the time of change tells"
    time.sleep(0.02)
    path.write_bytes(content.getvalue())
    assert ImageFolder(root=str(tmp_path)).info().identity != first


def test_identity_of_recent_pictures_is_not_cached(root: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late, checksum = time.time(), EncodedPictures.size_and_md5
    for path in root.rglob("*.jpg"):
        path.chmod(0o644)  # changes the time of change
        late = max(late, path.stat().st_ctime)

    def slow(self: EncodedPictures, index: int) -> tuple[int, str]:
        nonlocal late
        late += 1.0
        return checksum(self, index)

    monkeypatch.setattr("vitlab.data.datasets.files.time", SimpleNamespace(time=lambda: late))
    monkeypatch.setattr(EncodedPictures, "size_and_md5", slow)
    ImageFolder(root=str(root)).info()
    assert not (cache / "identities").exists()
    ImageFolder(root=str(root)).info()
    assert len(list((cache / "identities").iterdir())) == 1, "they have settled"


def test_identity_that_an_earlier_version_remembered_in_another_form_is_not_read(root: Path, cache: Path) -> None:
    identity, remember = ImageFolder(root=str(root)).info().identity, files.compute_once_per_file_state

    def earlier(entries: list[tuple[str, Path]], compute: object) -> str:
        same_files = [(name.replace(" notes ", " "), path) for name, path in entries]
        return remember(same_files, lambda: json.dumps({"identity": identity, "copies": {}}))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(files, "time", SimpleNamespace(time=lambda: time.time() + 60))  # when the files have settled
        patched.setattr(files, "compute_once_per_file_state", earlier)
        ImageFolder(root=str(root)).info()
    assert list((cache / "identities").iterdir())
    assert ImageFolder(root=str(root)).info().identity == identity


def test_file_that_nobody_has_read_is_deleted_when_another_is_written(root: Path, cache: Path) -> None:
    folder = cache / "decoded"
    folder.mkdir(parents=True)
    for name, days in (("old.npy", 31), ("recent.npy", 29)):
        (folder / name).touch()
        os.utime(folder / name, times=(time.time() - days * 86400,) * 2)
    feed(root, "disk", size=18)
    assert not (folder / "old.npy").exists() and (folder / "recent.npy").exists()
