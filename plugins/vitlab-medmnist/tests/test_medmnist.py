"""Tests of the sets with small files of the published layout, written with numpy."""

from __future__ import annotations

import hashlib
import io
import runpy
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vitlab_medmnist", reason="pip install -e plugins/vitlab-medmnist")

import numpy as np
import torch
import vitlab_medmnist
from PIL import Image
from vitlab_medmnist import SETS

from vitlab import lab
from vitlab.data.prepare import data_info, prepare
from vitlab.driver.smoke import run_smoke_test
from vitlab.errors import SpecError
from vitlab.plugin import DataError, check_component, slot

STUDY = Path(__file__).parents[1] / "study.yaml"
COUNTS = {"train": 40, "val": 8, "test": 12}
SEEDS = {"split": 0, "subset": 0}


def arrays(channels: int, classes: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Return the six arrays of a set, as its authors write them."""
    rng = np.random.default_rng(seed)
    content = {}
    for part, n in COUNTS.items():
        shape = (n, 28, 28) if channels == 1 else (n, 28, 28, channels)
        content[f"{part}_images"] = rng.integers(0, 256, shape, dtype=np.uint8)
        content[f"{part}_labels"] = (np.arange(n) % classes)[:, None].astype(np.uint8)
    return content


def write(folder: Path, name: str = "bloodmnist", **replaced: Any) -> Path:
    facts = SETS[name]
    content = {**arrays(facts.channels, len(facts.labels)), **replaced}
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / f"{name}.npz", **{key: value for key, value in content.items() if value is not None})
    return folder


def built(folder: Path | None, name: str = "bloodmnist") -> Any:
    return slot("dataset").build({"type": "medmnist", "name": name, "root": None if folder is None else str(folder)})


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hide the data sets of this machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("VITLAB_DATA", raising=False)
    yield


# -- what is read -----------------------------------------------------------------------------------------------------


def test_medmnist_passes_contract_test() -> None:
    check_component("dataset", "medmnist")
    assert set(typing.get_args(vitlab_medmnist.Name)) == set(SETS)


@pytest.mark.parametrize("name", SETS)
def test_every_set_round_trips(name: str, tmp_path: Path) -> None:
    facts = SETS[name]
    data, stored = built(write(tmp_path / "here", name), name), arrays(facts.channels, len(facts.labels))
    info = data.info()
    assert (info.image, info.channels, info.classes) == ((28, 28), facts.channels, len(facts.labels))
    assert data.missing() is None and len(set(info.labels)) == info.classes
    for split, parts in (("train", ("train", "val")), ("test", ("test",))):
        x_NCHW, y_N = data.read(split)
        expected = np.concatenate([stored[f"{part}_images"] for part in parts])
        assert x_NCHW.dtype == torch.uint8 and y_N.dtype == torch.int64
        for channel in range(facts.channels):
            theirs = expected if facts.channels == 1 else expected[..., channel]
            assert np.array_equal(x_NCHW[:, channel].numpy(), theirs)
        assert np.array_equal(y_N.numpy(), np.concatenate([stored[f"{part}_labels"][:, 0] for part in parts]))


def test_file_is_found_in_usual_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "data" / "medmnist")
    assert built(None).missing() is None
    monkeypatch.setenv("VITLAB_DATA", str(write(tmp_path / "named", "breastmnist")))
    assert built(None, "breastmnist").missing() is None and built(None, "octmnist").missing()


def test_tiles_of_different_splits_do_not_overlap(tmp_path: Path) -> None:
    """The two colours of a pixel are its row and column, which say where a tile was."""
    row_H, column_W = np.arange(200, dtype=np.uint8), np.arange(240, dtype=np.uint8)
    picture = np.stack([*np.meshgrid(row_H, column_W, indexing="ij"), np.zeros((200, 240), np.uint8)], axis=-1)
    for name in ("left", "right"):
        Image.fromarray(picture).save(tmp_path / f"{name}.png")
    made = runpy.run_path(str(STUDY.parent / "tiles.py"))["arrays"](("left", "right"), tmp_path)
    for label in (0, 1):
        covered = {}
        for part in COUNTS:
            own = made[f"{part}_images"][made[f"{part}_labels"][:, 0] == label]
            assert own.shape[1:] == (28, 28, 3)
            covered[part] = {(row, column) for tile in own for row, column in tile[..., :2].reshape(-1, 2).tolist()}
        assert len(covered["train"]) == 8 * 56**2 and len(covered["val"]) == len(covered["test"]) == 2 * 56**2
        assert len(set.union(*covered.values())) == 12 * 56**2


# -- splits -----------------------------------------------------------------------------------------------------------


def choice(folder: Path, **options: Any) -> dict[str, Any]:
    return {"type": "medmnist", "name": "bloodmnist", "root": str(folder), **options}


@pytest.mark.parametrize("seed", [0, 1])
def test_validation_is_that_of_authors(tmp_path: Path, seed: int) -> None:
    stored = arrays(3, 8)
    prepared = prepare(choice(write(tmp_path / "here")), {"split": seed, "subset": 0})
    for subset, part in ((prepared.train, "train"), (prepared.val, "val"), (prepared.test, "test")):
        assert np.array_equal(subset.x_NCHW.permute(0, 2, 3, 1).numpy(), stored[f"{part}_images"])
        assert np.array_equal(subset.y_N.numpy(), stored[f"{part}_labels"][:, 0])


def test_configured_share_is_drawn_from_both_splits(tmp_path: Path) -> None:
    folder = write(tmp_path / "here")
    first, other = (prepare(choice(folder, validation=0.5), {"split": seed, "subset": 0}) for seed in (0, 1))
    assert len(first.train) == len(first.val) == 24 and set(first.val.id_N.tolist()) != set(other.val.id_N.tolist())
    assert min(first.val.id_N) < COUNTS["train"] <= max(first.train.id_N)


def test_subset_of_classes_and_fraction_keep_authors_validation(tmp_path: Path) -> None:
    """Of eight classes in turn, two are a quarter of every part."""
    prepared = prepare(choice(write(tmp_path / "here"), classes=[1, 0], fraction=0.5), SEEDS)
    assert [len(prepared.train), len(prepared.val), len(prepared.test)] == [
        5 + 1,
        2,
        4,
    ]  # half of 5 of each class is 3, rounded
    assert prepared.val.id_N.tolist() == [40, 41] and prepared.val.y_N.tolist() == [1, 0]
    nothing = {"val_labels": np.full((8, 1), 2, np.uint8)}
    with pytest.raises(DataError, match="none to validate on"):
        prepare(choice(write(tmp_path / "other", **nothing), classes=[1, 0]), SEEDS)


# -- what stands for it -----------------------------------------------------------------------------------------------


def test_identity_is_checksum_of_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "one")
    md5 = hashlib.md5((folder / "bloodmnist.npz").read_bytes()).hexdigest()
    assert data_info(choice(folder)).identity != data_info(choice(tmp_path / "away")).identity
    monkeypatch.setitem(SETS, "bloodmnist", SETS["bloodmnist"]._replace(md5=md5))
    assert data_info(choice(folder)).identity == data_info(choice(tmp_path / "away")).identity
    other = write(tmp_path / "two", **arrays(3, 8, seed=1))
    assert data_info(choice(folder)).identity != data_info(choice(other)).identity


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_missing_file_gives_one_sentence(tmp_path: Path) -> None:
    reason = built(tmp_path / "away").missing()
    assert "bloodmnist.npz" in reason and "https://zenodo.org/records/6496656" in reason and str(tmp_path) in reason
    with pytest.raises(DataError, match="bloodmnist is not here: looked in"):
        built(tmp_path / "away").read("train")
    with pytest.raises(SpecError, match=r"is not here: looked in .* published at https://zenodo"):
        lab.run(STUDY, out=tmp_path / "out", changes={"data.root": str(tmp_path / "away")})
    assert not (tmp_path / "out").exists()


class Touches:
    def __reduce__(self) -> Any:
        return Path.touch, (Path("unpickled"),)


@pytest.mark.parametrize(
    ("replaced", "sentence"),
    [
        ({"val_images": None}, "has no array 'val_images'"),
        ({"train_images": np.zeros((40, 28, 28), np.uint8)}, r"expected uint8 of \(N, 28, 28, 3\)"),
        ({"train_images": np.zeros((40, 28, 28, 3))}, "train_images in .* is float64"),
        ({"train_labels": np.zeros((40, 14), np.uint8)}, r"expected whole numbers of \(40, 1\)"),
        ({"train_labels": np.zeros((39, 1), np.uint8)}, r"expected whole numbers of \(40, 1\)"),
        ({"train_labels": np.full((40, 1), 8, np.uint8)}, "go from 8 to 8; bloodmnist has 8 classes from 0"),
        ({"train_labels": np.full((40, 1), -1, np.int8)}, "go from -1 to -1"),
        ({"train_labels": np.array([[Touches()]] * 40, dtype=object)}, "cannot be read"),
    ],
)
def test_files_with_other_content_are_refused(replaced: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "here", **replaced)
    with pytest.raises(DataError, match=sentence):
        built(folder).read("train")
    assert not Path("unpickled").exists()


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut off", b"no archive at all", npy(np.zeros(3))])
def test_non_archive_files_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "bloodmnist.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"bloodmnist\.npz"):
        built(tmp_path).read("train")


def test_damaged_archive_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "here") / "bloodmnist.npz"
    whole = file.read_bytes()
    for content in (whole[: len(whole) // 2], whole[:2000] + bytes(200) + whole[2200:]):
        file.write_bytes(content)
        with pytest.raises(DataError, match="cannot be read"):
            built(file.parent).read("train")


def test_unknown_set_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"found 'chestmnist'; allowed: .*bloodmnist"):
        lab.plan_study(STUDY, out=tmp_path, changes={"data.name": "chestmnist"})


# -- in a study -------------------------------------------------------------------------------------------------------


def test_study_plans_without_data(tmp_path: Path) -> None:
    plan = lab.plan_study(STUDY, out=tmp_path)[1]
    assert len(plan.arms) == 4 and not any(arm.skip for arm in plan.arms)
    assert all(item.trial.data is not None and item.trial.data.startswith("bloodmnist:") for item in plan.trials)


def test_file_trains_two_steps(tmp_path: Path) -> None:
    changes = {"run.executor": "inline", "data.root": str(write(tmp_path / "here")), "train.batch_size": 8}
    assert run_smoke_test(STUDY, out=tmp_path / "out", changes={**changes, "model.dim": 16, "model.depth": 1}) == 4
