"""Tests of picture folders: every picture is read as Pillow, torchvision and timm read it, left out by name, or refused."""

from __future__ import annotations

import io
import json
import os
import tarfile
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import slot_fixtures
import torch
import yaml
from PIL import Image, ImageOps

from vitlab.data import draws, image_cache
from vitlab.data.datasets.base import Dataset, Images, Split
from vitlab.data.datasets.folder import ImageFolder, read_real_labels
from vitlab.data.datasets.pictures import Decoding, EncodedPictures, PictureFiles, picture_suffixes
from vitlab.data.prepare import DataSource, Feed, data_info, prepare
from vitlab.data.torchvision_import import torchvision
from vitlab.errors import DataError, SpecError
from vitlab.geometry import DataInfo
from vitlab.lab import plan_study
from vitlab.planning.sources import why_held_out_images_differ
from vitlab.registry import slot
from vitlab.spec import STREAMS

SEEDS = dict.fromkeys(STREAMS, 0)


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    yield folder / "vitlab" / "data"


def noise_picture(seed: int, height: int = 12, width: int = 20) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def write(root: Path, *splits: str, classes: tuple[str, ...] = ("cat", "dog"), count: int = 6) -> Path:
    """Write folders of distinct PNG files, ``root/SPLIT/CLASS/N.png``; the split ``.`` is the root itself."""
    for place, split in enumerate(splits):
        for kind, label in enumerate(classes):
            folder = root / split / label
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                noise_picture(place * 1000 + kind * 100 + number).save(folder / f"{number}.png")
    return root


def folder(root: Path, **options: Any) -> Any:
    return slot("dataset").resolve_choice({"type": "image_folder", "root": str(root), "image_size": 8, **options})


def first_note(root: Path, **options: Any) -> str:
    note = DataSource(folder(root, **options)).check_pictures_and_note()[0]
    assert note.startswith(f"{root}: ")
    return note.removeprefix(f"{root}: ")


def study(root: Path, **options: Any) -> Path:
    base = {
        "data": {"type": "image_folder", "root": str(root), "image_size": 8, **options},
        "model": {"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2},
        "train": {"steps": 1, "batch_size": 4},
    }
    file = root.parent / "study.yaml"
    file.write_text(yaml.safe_dump({"study": "s", "base": base, "seeds": 1}))
    return file


# -- formats ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "suffix", ["png", "jpg", "JPEG", "tif", "tiff", "gif", "ppm", "pgm", "bmp", "webp", "tga", "jp2"]
)
def test_every_format_of_pillow_is_read(tmp_path: Path, suffix: str) -> None:
    write(tmp_path, "train", "test")
    for path in tmp_path.rglob("*.png"):
        with Image.open(path) as picture:
            (picture.convert("L") if suffix == "pgm" else picture).save(path.with_suffix(f".{suffix}"))
        if suffix != "png":
            path.unlink()
    ours = ImageFolder(root=str(tmp_path), image_size=(12, 20), fit="squash")
    x_NCHW, y_N = ours.read("train")
    paths = sorted((tmp_path / "train").rglob(f"*.{suffix}"))
    assert len(paths) == len(y_N) == 12 and y_N.tolist() == [0] * 6 + [1] * 6
    for x_CHW, path in zip(x_NCHW, paths, strict=True):
        with Image.open(path) as picture:
            assert np.array_equal(x_CHW.permute(1, 2, 0), np.asarray(picture.convert("RGB")))


def test_suffixes_include_those_of_torchvision_and_no_format_without_decoder() -> None:
    extensions = torchvision("torchvision.datasets.folder").IMG_EXTENSIONS
    assert set(extensions) <= picture_suffixes()
    assert not picture_suffixes() & {
        ".h5",
        ".hdf",
        ".grib",
        ".bufr",
        ".wmf",
        ".eps",
        ".mpg",
        ".pdf",
        ".txt",
    }


@pytest.mark.parametrize("suffix", ["gif", "tiff", "webp", "png"])
def test_first_frame_of_several_is_read(tmp_path: Path, suffix: str) -> None:
    frames = [Image.new("RGB", (6, 6), colour) for colour in ((250, 0, 0), (0, 250, 0))]
    frames[0].save(tmp_path / f"a.{suffix}", save_all=True, append_images=frames[1:], lossless=True)
    with Image.open(tmp_path / f"a.{suffix}") as picture:
        assert picture.n_frames == 2
    x_CHW = pictures(tmp_path / f"a.{suffix}", size=(6, 6)).image(0)
    assert x_CHW[0].min() > 245 and x_CHW[1].max() < 5


def pictures(*paths: Path, **decoding: Any) -> PictureFiles:
    return PictureFiles(list(map(str, paths)), torch.zeros(len(paths)).long(), Decoding(**decoding))


def test_16_bits_are_scaled_as_by_torchvision(tmp_path: Path) -> None:
    levels = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    Image.fromarray(levels).save(tmp_path / "a.png")
    Image.fromarray(levels).save(tmp_path / "a.tiff")
    Image.fromarray(levels.astype(">u2")).save(tmp_path / "big.tiff")
    (tmp_path / "a.pgm").write_bytes(b"P5 16 16 65535\n" + levels.astype(">u2").tobytes())
    scale = torchvision("torchvision.transforms.v2.functional").to_dtype
    expected = scale(torch.from_numpy(levels), torch.uint8, scale=True)
    assert len(expected.unique()) == 256
    for path in tmp_path.iterdir():
        x_CHW = pictures(path, size=(16, 16)).image(0)
        assert all(torch.equal(x_HW, expected) for x_HW in x_CHW), path.name


def test_values_of_unknown_range_are_refused_before_the_first_trial(tmp_path: Path) -> None:
    root = write(tmp_path / "pics", "train", "test")
    Image.fromarray(np.random.default_rng(0).random((8, 8)).astype(np.float32)).save(root / "train/cat/float.tiff")
    Image.fromarray(np.full((8, 8), 70_000, np.int32)).save(root / "test/dog/wide.tiff")
    with pytest.raises(SpecError) as caught:
        plan_study(study(root), out=tmp_path / "out")
    message = str(caught.value)
    assert "2 of 26 pictures cannot be read" in message and "float.tiff (its values are floats" in message
    assert "wide.tiff (its values are integers of 32 bits, whose range is unknown; save it with 8 or 16" in message


def test_all_unreadable_pictures_are_named_once_and_decoded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write(tmp_path / "pics", "train", "test")
    noise_picture(7, 300, 300).save(root / "train/dog/cut.jpg")
    cut = (root / "train/dog/cut.jpg").read_bytes()
    (root / "train/dog/cut.jpg").write_bytes(cut[: len(cut) // 2])
    (root / "train/cat/empty.png").write_bytes(b"")
    (root / "test/cat/pointer.png").write_text("version https://git-lfs.github.com/spec/v1\n")
    decoded: list[int] = []
    fault = EncodedPictures.find_fault
    monkeypatch.setattr(EncodedPictures, "find_fault", lambda self, index: decoded.append(index) or fault(self, index))
    messages = []
    for _ in range(2):
        with pytest.raises(SpecError) as caught:
            plan_study(study(root), out=tmp_path / "out")
        messages.append(str(caught.value))
    assert messages[0] == messages[1] and len(decoded) == 27
    assert len(caught.value.problems) == 1 and caught.value.problems[0].line
    assert "3 of 27 pictures cannot be read; replace or delete them: " in messages[0]
    for name, reason in (
        ("cut.jpg", "truncated"),
        ("empty.png", "cannot identify"),
        ("pointer.png", "cannot identify"),
    ):
        assert f"{name} (" in messages[0] and reason in messages[0].partition(f"{name} (")[2].partition(")")[0].lower()
    for name in ("train/dog/cut.jpg", "train/cat/empty.png", "test/cat/pointer.png"):
        (root / name).unlink()
    _, plan = plan_study(study(root), out=tmp_path / "out")
    assert f"{root}: train 12 pictures of 2 classes, test 12, no files left out." in plan.notes and len(decoded) == 51
    plan_study(study(root), out=tmp_path / "out")
    assert len(decoded) == 51, "remembered for this content"
    (root / "train/dog/0.png").rename(root / "train/dog/renamed.png")
    plan_study(study(root), out=tmp_path / "out")
    assert len(decoded) == 75, "and for no other"


# -- orientation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tiff"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied_as_by_pillow(tmp_path: Path, suffix: str, orientation: int) -> None:
    file, exif = tmp_path / f"a.{suffix}", Image.Exif()
    exif[0x0112] = orientation
    noise_picture(1, 16, 24).save(file, exif=exif)
    with Image.open(file) as picture:
        upright = ImageOps.exif_transpose(picture).convert("RGB")
    size = (upright.height, upright.width)
    assert (size == (24, 16)) == (orientation >= 5)
    one = pictures(file, size=size)
    assert np.array_equal(one.image(0).permute(1, 2, 0), np.asarray(upright))
    assert one.decoding.upright_sides(one.open_header(0)) == size
    cropped = one.decode_crop(0, one.open_header(0), (2, 3, 9, 7), (9, 7), "bilinear")
    assert np.array_equal(cropped.permute(1, 2, 0), np.asarray(upright)[2:11, 3:10])
    if suffix != "tiff":  # which Pillow itself turns
        stored = pictures(file, size=(16, 24), orient="ignore")
        with Image.open(file) as picture:
            assert np.array_equal(stored.image(0).permute(1, 2, 0), np.asarray(picture.convert("RGB")))
        assert stored.decoding.upright_sides(stored.open_header(0)) == (16, 24)


def test_crops_of_turned_pictures_are_inside_them(tmp_path: Path) -> None:
    """The left half of the upright pictures is black."""
    write(tmp_path, "train", "test", count=1)
    exif = Image.Exif()
    exif[0x0112] = 6
    stored = np.full((16, 64, 3), 255, np.uint8)
    stored[8:] = 0  # turned clockwise, the lower rows are on the left
    for number in range(8):
        for label in ("cat", "dog"):
            Image.fromarray(stored).save(tmp_path / "train" / label / f"turned{number}.jpg", quality=95, exif=exif)
    crop = {"type": "random_resized_crop", "of": "picture", "scale": [0.9, 1.0], "ratio": [0.2, 0.3]}
    data = folder(tmp_path, augment=[crop], image_size=[64, 16], normalize="unit")
    batch = Feed(prepare(data, SEEDS), data.options["augment"], SEEDS).batch(0, 14)
    turned_B = batch.id_B != 0
    turned_B &= batch.id_B != 9
    assert batch.x_BCHW[turned_B][..., :4].max() < 0.2 and batch.x_BCHW[turned_B][..., -4:].min() > 0.8


# -- the resize -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sides", [(50, 37), (37, 50), (61, 61), (24, 90), (33, 32)])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    ("size", "crop_pct", "fit"),
    [
        ((28, 28), 0.875, "crop"),
        ((28, 28), 0.9, "crop"),
        ((28, 28), 1.0, "crop"),
        ((32, 24), 0.875, "crop"),
        ((28, 28), 0.95, "squash"),
        ((24, 32), 1.0, "squash"),
    ],
)
def test_resize_equals_evaluation_transform_of_timm(
    tmp_path: Path, sides: tuple[int, int], interpolation: Any, size: tuple[int, int], crop_pct: float, fit: Any
) -> None:
    torchvision()
    from timm.data import create_transform

    picture = noise_picture(3, *sides)
    picture.save(tmp_path / "a.png")
    transform = create_transform(
        (3, *size),
        is_training=False,
        crop_pct=crop_pct,
        crop_mode="squash" if fit == "squash" else "center",
        interpolation=interpolation,
        normalize=False,
    )
    ours = pictures(tmp_path / "a.png", size=size, crop_pct=crop_pct, fit=fit, interpolation=interpolation)
    assert torch.equal(ours.image(0), transform(picture))


def test_crop_equals_resize_and_centre_crop_of_torchvision(tmp_path: Path) -> None:
    transforms = torchvision("torchvision.transforms")
    for sides in ((50, 37), (37, 51), (28, 29), (29, 28)):
        picture = noise_picture(4, *sides)
        picture.save(tmp_path / "a.png")
        expected = transforms.Compose([transforms.Resize(28), transforms.CenterCrop(28)])(picture)
        assert np.array_equal(pictures(tmp_path / "a.png", size=(28, 28)).image(0).permute(1, 2, 0), expected)


# -- what is left out -------------------------------------------------------------------------------------------------


def test_left_out_files_are_counted_by_reason(tmp_path: Path) -> None:
    root = write(tmp_path, "train", "test")
    for name in ("train/cat/notes.txt", "train/dog/more.TXT", "test/cat/labels.h5", "train/cat/README", "train/x.png"):
        (root / name).write_bytes(b"x")
    for name in (".DS_Store", "._0.png", "Thumbs.db", "desktop.ini"):
        (root / "train" / "cat" / name).write_bytes(b"x")
    for name in (".ipynb_checkpoints", "__MACOSX", "@eaDir"):
        for place in (root / "train" / name, root / "train" / "cat" / name):
            place.mkdir()
            noise_picture(1).save(place / "0.png")
    info = data_info(folder(root))
    assert info.labels == ("cat", "dog")
    assert first_note(root) == (
        "train 12 pictures of 2 classes, test 12, 15 files left out (hidden 10, .txt 2, .h5 1, no suffix 1, "
        "outside of a class folder 1)."
    )
    assert sum(len(DataSource(folder(root)).dataset.pictures(split)) for split in ("train", "test")) == 24


def test_links_are_followed_once_and_loops_named(tmp_path: Path) -> None:
    root, other = write(tmp_path / "pics", "train", "test"), tmp_path / "other"
    write(tmp_path, "pics/train", "pics/test", "other", classes=("deep", "owl"))
    for label in ("deep", "owl"):
        for split in ("train", "test"):
            for path in [*(root / split / label).iterdir(), root / split / label]:
                path.unlink() if path.is_file() else path.rmdir()
    (root / "train/cat/linked").symlink_to(other / "deep")
    (root / "train/cat/again").symlink_to(other / "deep")
    (root / "train/owl").symlink_to(other / "owl")
    (root / "train/dog/file.png").symlink_to(other / "owl" / "0.png")
    (root / "train/dog/up").symlink_to(root / "train")
    (root / "train/dog/self").symlink_to("self")
    (root / "train/dog/gone.png").symlink_to(other / "gone.png")
    notes = DataSource(folder(root)).check_pictures_and_note()
    note = notes[0].removeprefix(f"{root}: ")
    assert note.startswith("train 25 pictures of 3 classes, test 12, 4 files left out (")
    for part in ("cat/linked 1", "dog/up 1", "no suffix 1", "broken link or special file 1"):
        assert part in note
    assert note.count("link to a folder that is read already") == 2
    assert notes[1:] == [
        "1 train picture is identical to another, some of which may be held out for validation.",
        "1 picture is in more than one class, byte for byte: train/dog/file.png and train/owl/0.png.",
    ]
    theirs = torchvision("torchvision.datasets.folder").make_dataset(
        str(root / "train" / "cat"), {"linked": 0}, extensions=(".png",)
    )
    assert len(theirs) == 6, "torchvision follows links, too"
    (root / "train/loop").symlink_to(root / "train")
    with pytest.raises(DataError, match=r"no pictures of class 'loop' \(.*link to a folder that is read already"):
        data_info(folder(root))


def test_names_are_compared_in_one_form_of_unicode(tmp_path: Path) -> None:
    composed, decomposed = (unicodedata.normalize(form, "caffè") for form in ("NFC", "NFD"))
    root = write(tmp_path / "a", "train", classes=(decomposed, "tè"))
    write(tmp_path / "a", "test", classes=(composed, "tè"))
    assert data_info(folder(root)).labels == (composed, "tè")
    assert DataSource(folder(root)).dataset.read("test").y_N.tolist() == [0] * 6 + [1] * 6
    same = write(tmp_path / "b", "train", classes=(composed, "tè"))
    write(tmp_path / "b", "test", classes=(decomposed, "tè"))
    for path in sorted((tmp_path / "a").rglob("*.png")):
        name = unicodedata.normalize("NFC", str(path.relative_to(tmp_path / "a")))
        other = next(p for p in same.rglob("*.png") if unicodedata.normalize("NFC", str(p.relative_to(same))) == name)
        other.write_bytes(path.read_bytes())
    assert data_info(folder(root)).identity == data_info(folder(same)).identity, "as copied by another system"
    write(tmp_path / "a", "train", classes=(composed,))
    assert data_info(folder(root)).labels == (composed, "tè"), "two folders of one name are one class"


def test_faults_of_class_folders_are_reported_together(tmp_path: Path) -> None:
    root = write(tmp_path, "train", "test")
    (root / "train/eel").mkdir()
    (root / "train/eel/scan.heic").write_bytes(b"x")
    (root / "test/emu").mkdir()
    with pytest.raises(DataError) as caught:
        data_info(folder(root, num_classes=4))
    for part in (
        "train has no pictures of class 'eel' (1 file left out (.heic 1)); add some, or remove the folder",
        "test has a class 'emu' that the training pictures do not have",
        "test has no pictures of class 'emu'",
        "train has 3 classes, num_classes says 4",
    ):
        assert part in str(caught.value)
    with pytest.raises(FileNotFoundError, match=r"no valid file for the classes eel"):
        torchvision("torchvision.datasets").ImageFolder(str(root / "train"))


# -- splits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["val", "validation", "valid"])
def test_own_validation_folder_is_the_validation_split(tmp_path: Path, name: str) -> None:
    root = write(tmp_path, "train", name, "test")
    for path in (root / name).rglob("[45].png"):
        path.unlink()
    prepared = prepare(folder(root), SEEDS)
    assert [len(split) for split in (prepared.train, prepared.val, prepared.test)] == [12, 8, 12]
    expected = [np.asarray(Image.open(path)) for path in sorted((root / name).rglob("*.png"))]
    theirs = prepare(folder(root, image_size=[12, 20], fit="squash"), SEEDS).val.x_NCHW.permute(0, 2, 3, 1)
    assert all(np.array_equal(one, other) for one, other in zip(theirs, expected, strict=True))
    for seed in (1, 2):
        again = prepare(folder(root), {**SEEDS, "split": seed})
        assert torch.equal(again.val.id_N, prepared.val.id_N) and torch.equal(again.train.id_N, prepared.train.id_N)
    assert first_note(root) == "train 12 pictures of 2 classes, val 8, test 12, no files left out."
    pooled = prepare(folder(root, validation=0.25), SEEDS)
    assert len(pooled.train) + len(pooled.val) == 20 and pooled.val.y_N.bincount().tolist() == [3, 3]
    (note,) = DataSource(folder(root, validation=0.25)).check_pictures_and_note()[1:]
    assert note.startswith("'validation: 0.25' is set, so the 8 validation pictures of the data set join the training")


@pytest.mark.parametrize(("number", "noted"), [(3, False), (4, True)])
def test_note_names_classes_of_which_one_has_over_three_times_the_pictures(
    tmp_path: Path, number: int, noted: bool
) -> None:
    for split, label, count in (("train", "cat", number), ("train", "dog", 1), ("test", "cat", 1), ("test", "dog", 9)):
        (tmp_path / split / label).mkdir(parents=True)
        for index in range(count):
            grey = 10 * index + len(split + label) + 100 * (label == "dog")
            Image.new("RGB", (4, 4), (grey, index, 0)).save(tmp_path / split / label / f"{index}.png")
    notes = " ".join(DataSource(folder(tmp_path)).check_pictures_and_note())
    assert ("4 of the pictures to train and validate on are of 'cat', and 1 of 'dog'." in notes) == noted
    assert ("balanced_accuracy" in notes) == noted


def test_one_of_several_validation_folders_is_used_and_the_others_named(tmp_path: Path) -> None:
    root = write(tmp_path, "train", "val", "valid", "test")
    assert DataSource(folder(root)).check_pictures_and_note()[1:] == [
        f"'{root}/valid' is not used: 'val' has validation pictures."
    ]


@pytest.mark.parametrize("layout", ["flat", "class of no training picture"])
def test_unlabelled_test_folder_is_named_and_val_is_the_test_split(tmp_path: Path, layout: str) -> None:
    root = write(tmp_path, "train", "val")
    place = root / "test" / ("" if layout == "flat" else "unknown")
    place.mkdir(parents=True)
    noise_picture(1).save(place / "0.png")
    notes = DataSource(folder(root)).check_pictures_and_note()
    assert notes[0].endswith("train 12 pictures of 2 classes, test 12 (folder 'val'), no files left out.")
    assert notes[1:] == [
        f"'{root}/test' has no folder of a class of 'train', so its pictures have no labels; they are not used."
    ]
    assert len(prepare(folder(root), SEEDS).test) == 12
    for path in (root / "val").rglob("*.png"):
        path.unlink()
    for path in [*(root / "val").iterdir(), root / "val"]:
        path.rmdir()
    reason = DataSource(folder(root)).missing() or ""
    assert "has no folder of a class of 'train', so its pictures have no labels; create 'test'" in reason
    assert "set 'test: 0.2'" in reason


def test_flat_folder_is_split_by_class_and_equally_for_all_seeds(tmp_path: Path) -> None:
    root = write(tmp_path, ".", classes=("ape", "bat", "cow"), count=10)
    for path in (root / "cow").glob("[4-9].png"):
        path.unlink()
    reason = DataSource(folder(root)).missing() or ""
    assert "if its 3 folders ('ape', 'bat', 'cow') are the classes, set 'test: 0.2'" in reason
    prepared = prepare(folder(root, test=0.3), SEEDS)
    assert prepared.test.y_N.bincount().tolist() == [3, 3, 1]
    assert len(prepared.train) + len(prepared.val) == 17
    dataset = DataSource(folder(root, test=0.3)).dataset
    names = {split: set(dataset.pictures(split).names) for split in ("train", "test")}  # type: ignore[union-attr]
    assert not names["train"] & names["test"] and len(names["train"] | names["test"]) == 24
    for seed in range(3):
        again = prepare(folder(root, test=0.3), dict.fromkeys(STREAMS, seed))
        assert torch.equal(again.test.x_NCHW, prepared.test.x_NCHW)
    more = set(DataSource(folder(root, test=0.6)).dataset.pictures("test").names)  # type: ignore[union-attr]
    assert names["test"] < more, "a larger share contains a smaller one"
    assert any(
        "0.3 of the pictures of each class" in note
        for note in DataSource(folder(root, test=0.3)).check_pictures_and_note()
    )
    assert data_info(folder(root, test=0.3)).identity != data_info(folder(root, test=0.6)).identity


def test_share_to_test_on_beside_folders(tmp_path: Path) -> None:
    root = write(tmp_path, "train", "val")
    prepared = prepare(folder(root, test=0.5), SEEDS)
    assert [len(split) for split in (prepared.train, prepared.val, prepared.test)] == [6, 12, 6]
    write(root, "test")
    with pytest.raises(DataError, match="has a folder 'test'; remove it, or the option 'test'"):
        data_info(folder(root, test=0.5))
    with pytest.raises(DataError, match=r"no folder 'train'; create it.* Did you mean .*outer/inner\?"):
        write(tmp_path / "outer" / "inner", "train", "test")
        data_info(folder(tmp_path / "outer"))
    (tmp_path / "flat").mkdir()
    with pytest.raises(
        DataError, match=r"per class; for pictures with a table of labels, write type: image_table\. To plan"
    ):
        data_info(folder(tmp_path / "flat"))


def test_split_of_a_folder_differs_from_another_only_by_its_own_validation(tmp_path: Path) -> None:
    cut, own = write(tmp_path / "cut", "train", "test"), write(tmp_path / "own", "train", "val", "test")
    assert why_held_out_images_differ(folder(cut), folder(cut, validation=0.1)) is None
    assert "unset (the authors' own images)" in (
        why_held_out_images_differ(folder(own), folder(own, validation=0.1)) or ""
    )


def test_training_images_are_counted_without_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write(tmp_path, "train", "test")
    options: list[Mapping[str, Any]] = [
        {},
        {"fraction": 0.5},
        {"per_class": 2},
        {"validation": 0.4},
        {"classes": [1, 0]},
    ]
    expected = [len(prepare(folder(root, **each), SEEDS).train) for each in options]
    monkeypatch.setattr(EncodedPictures, "open_header", lambda self, index: pytest.fail("decoded"))
    assert [DataSource(folder(root, **each)).count_training_images(SEEDS) for each in options] == expected


# -- duplicates -------------------------------------------------------------------------------------------------------


def test_identical_pictures_are_counted_by_place(tmp_path: Path) -> None:
    root = write(tmp_path, "train", "val", "test")
    for source, target in (
        ("train/cat/0", "test/cat/0"),
        ("train/cat/1", "test/cat/1"),
        ("train/dog/2", "val/dog/2"),
        ("val/cat/3", "test/cat/3"),
        ("train/cat/4", "train/cat/copy"),
        ("train/dog/5", "train/cat/other"),
    ):
        (root / f"{target}.png").write_bytes((root / f"{source}.png").read_bytes())
    expected = [
        "2 of 12 test pictures are also in train, byte for byte: test/cat/0.png, test/cat/1.png.",
        "1 of 12 val pictures is also in train, byte for byte: val/dog/2.png.",
        "1 of 12 test pictures is also in val, byte for byte: test/cat/3.png.",
        "2 train pictures are identical to another.",
        "1 picture is in more than one class, byte for byte: train/cat/other.png and train/dog/5.png.",
    ]
    assert DataSource(folder(root)).check_pictures_and_note()[1:] == expected
    assert DataSource(folder(root)).check_pictures_and_note()[1:] == expected, "remembered with the identity"


# -- labels of ImageNet-ReaL ------------------------------------------------------------------------------------------


def real_folder(tmp_path: Path) -> tuple[Path, list[list[int]]]:
    """Write test pictures named as ImageNet's, in three classes, and sets of right classes by number."""
    root = write(tmp_path / "pics", "train", classes=("a", "b", "c"))
    random = np.random.default_rng(0)
    sets: list[list[int]] = [sorted(random.choice(3, random.integers(0, 3), replace=False).tolist()) for _ in range(12)]
    for number in range(12):
        place = root / "val" / "abc"[number % 3]
        place.mkdir(parents=True, exist_ok=True)
        noise_picture(500 + number).save(place / f"ILSVRC2012_val_{number + 1:08d}.png")
    return root, sets


@pytest.mark.parametrize("form", ["list", "mapping"])
def test_real_accuracy_equals_that_of_timm(tmp_path: Path, form: str) -> None:
    torchvision()
    from timm.data import RealLabelsImagenet

    from vitlab.training.metrics.test_sets import metrics_of_test_set

    root, sets = real_folder(tmp_path)
    file = tmp_path / "real.json"
    names = {f"ILSVRC2012_val_{number:08d}.png": one for number, one in enumerate(sets, 1)}
    file.write_text(json.dumps(sets if form == "list" else names))
    data = folder(root, real_labels=str(file))
    assert (
        data_info(data).content != data_info(folder(root)).content
        and data_info(data).identity == data_info(folder(root)).identity
    )
    prepared = prepare(data, SEEDS)
    (one,) = prepared.test_sets.values()
    order = [Path(path).name.replace(".png", ".JPEG") for path in DataSource(data).dataset.pictures("test").names]  # type: ignore[union-attr]
    logits_NK = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
    judge = RealLabelsImagenet(
        order, str(tmp_path / "list.json") if (tmp_path / "list.json").write_text(json.dumps(sets)) else None, topk=(1,)
    )
    judge.add_result(logits_NK)
    (metric,) = metrics_of_test_set(one).values()
    assert len(one.y_N) == sum(bool(labels) for labels in sets) < 12
    value = metric.value(metric.rows(logits_NK[one.id_N], one.y_N))
    assert 100 * value == pytest.approx(judge.get_accuracy(1), abs=1e-4)
    assert torch.equal(one.at(slice(0, 4)), prepared.test.x_NCHW[one.id_N[:4]])
    few = prepare(folder(root, real_labels=str(file), classes=[2, 0]), SEEDS).test_sets["real_labels"]
    kept = [one & {0, 2} for one in map(set, sets)]
    ids = [int(name[15:23]) - 1 for name in order]
    assert few.id_N.tolist() == [place for place, number in enumerate(ids) if kept[number] and number % 3 != 1]


def test_real_labels_of_timm_are_read() -> None:
    torchvision()
    import timm

    file = Path(timm.__file__).parent / "data" / "_info" / "imagenet_real_labels.json"
    sets = read_real_labels(file, ["x/ILSVRC2012_val_00000001.JPEG", "ILSVRC2012_val_00000002.JPEG"])
    assert sets == [frozenset(), frozenset({970, 795})]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1, 2", "neither a list of lists of class indices"),
        ("[[0], 1]", r"neither a list of lists .* nor a mapping from names to such lists: see 1; correct"),
        ('{"a.png": [true]}', "see a.png.0; correct"),
        ("7", "see the file"),
        ('{"a.png": [0]}', "has no labels of"),
        ("[[0]]", "has no labels of .*ILSVRC2012_val_0000000[^1]"),
    ],
)
def test_other_files_of_labels_are_refused(tmp_path: Path, content: str, message: str) -> None:
    root, _ = real_folder(tmp_path)
    (tmp_path / "real.json").write_text(content)
    with pytest.raises(DataError, match=message):
        prepare(folder(root, real_labels=str(tmp_path / "real.json")), SEEDS)
    with pytest.raises(DataError, match=r"there is no file nowhere\.json; correct 'real_labels'"):
        data_info(folder(root, real_labels="nowhere.json"))


# -- other containers -------------------------------------------------------------------------------------------------


class Archive(EncodedPictures):
    """Members of a tar archive, ``CLASS/NAME``, as of WebDataset."""

    def __init__(self, file: Path, decoding: Decoding) -> None:
        with tarfile.open(file) as archive:
            members = [(member.name, member.offset_data, member.size) for member in archive if member.isfile()]
        self.places = [(offset, size) for _, offset, size in members]
        self.file = file
        labels = sorted({Path(name).parts[0] for name, _, _ in members})
        y_N = torch.tensor([labels.index(Path(name).parts[0]) for name, _, _ in members])
        super().__init__([f"{file}:{name}" for name, _, _ in members], y_N, decoding, "never")

    def open(self, index: int) -> bytes:
        offset, size = self.places[index]
        with open(self.file, "rb") as file:
            file.seek(offset)
            return file.read(size)


def test_base_class_reads_another_container_as_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tar archive of the same pictures gives the same batches, crops and faults, with what the base class offers."""
    root = write(tmp_path / "pics", "train", "test", count=8)
    for split in ("train", "test"):
        with tarfile.open(tmp_path / f"{split}.tar", "w") as archive:
            for path in sorted((root / split).rglob("*.png")):
                archive.add(path, path.relative_to(root / split).as_posix())

    class Tar(Dataset):
        """Two archives."""

        def info(self) -> DataInfo:
            return DataInfo(
                image=(10, 8), channels=3, classes=2, identity=f"tar:{(tmp_path / 'train.tar').stat().st_size}"
            )

        def pictures(self, split: Split) -> Archive:
            return Archive(tmp_path / f"{split}.tar", Decoding(size=(10, 8)))

        def read(self, split: Split) -> Images:
            raise NotImplementedError

    slot_fixtures.keep(monkeypatch, slot("dataset"))
    slot("dataset").register("tar_of_test")(Tar)
    crop = {"type": "random_resized_crop", "of": "picture"}
    for augment in ([], [crop, "flip"]):
        theirs, ours = (
            slot("dataset").resolve_choice({**data, "augment": augment, "normalize": "unit"})
            for data in (
                {"type": "image_folder", "root": str(root), "image_size": [10, 8], "decoded": "never"},
                {"type": "tar_of_test"},
            )
        )
        feeds = [Feed(prepare(data, SEEDS), data.options["augment"], SEEDS) for data in (theirs, ours)]
        for step in range(3):
            one, other = (feed.batch(step, 4) for feed in feeds)
            assert torch.equal(one.x_BCHW, other.x_BCHW) and torch.equal(one.y_B, other.y_B)
    data = bytearray((tmp_path / "train.tar").read_bytes())
    offset, size = Archive(tmp_path / "train.tar", Decoding(size=(10, 8))).places[3]
    data[offset : offset + size] = bytes(size)
    (tmp_path / "train.tar").write_bytes(data)
    Tar.info = lambda self: DataInfo(image=(10, 8), channels=3, classes=2, identity="tar:damaged")  # type: ignore[method-assign]
    with pytest.raises(
        DataError, match=r"tar_of_test: 1 of 32 pictures cannot be read; replace or delete it: .*train.tar:cat/3.png"
    ):
        DataSource("tar_of_test").check_pictures_and_note()


def test_unreadable_member_is_named_when_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"a.png cannot be read as a picture: cannot identify image file; replace or"):
        pictures(tmp_path / "a.png", size=(4, 4)).image(0)
    (found,) = image_cache.find_undecodable(pictures(tmp_path / "a.png", size=(4, 4)))
    assert found == (0, "cannot identify image file")


def test_draw_of_the_test_share_is_that_of_the_validation(tmp_path: Path) -> None:
    y_N = torch.tensor([0, 1] * 20)
    train_N, test_N = draws.hold_out_stratified(y_N, torch.arange(40), 0.2, 7)
    assert sorted([*train_N.tolist(), *test_N.tolist()]) == list(range(40)) and y_N[test_N].bincount().tolist() == [
        4,
        4,
    ]


def test_folder_and_file_names_do_not_change_what_is_read(tmp_path: Path) -> None:
    odd = "a\tb, 'c' ü"
    root = write(tmp_path, "train", "test", classes=(odd, "x"))
    os.rename(root / "train" / odd / "0.png", root / "train" / odd / "- .PNG")
    assert data_info(folder(root)).labels == (odd, "x") and "train 12 pictures of 2 classes" in first_note(root)
    assert io.BytesIO(DataSource(folder(root)).dataset.pictures("train").open(0)).read(4) == b"\x89PNG"  # type: ignore[union-attr]
