"""Tests of segmentation, from files to metrics, against torchvision, Pillow and scikit-learn."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor
from trainings import train

from vitlab import noise
from vitlab.data.augment.geometric import Crop, Flip, RandomResizedCrop
from vitlab.data.augment.randaugment import RandAugment
from vitlab.data.datasets import digits
from vitlab.data.datasets.digits import INK, SHEETS, DigitScenes
from vitlab.data.datasets.segmentation import Pets, VOCSegmentation
from vitlab.data.draws import hold_out_groups
from vitlab.data.pixels import IGNORED, VOID, resize_masks
from vitlab.data.prepare import DataSource, Feed, data_info, prepare
from vitlab.data.torchvision_import import torchvision
from vitlab.engines.base import train as train_together
from vitlab.errors import DataError, OptionError
from vitlab.geometry import DataInfo
from vitlab.models import model
from vitlab.registry import slot
from vitlab.spec import TrainSpec
from vitlab.training import evaluation
from vitlab.training.evaluation import MetricAccumulator
from vitlab.training.loop import Training
from vitlab.training.metrics import build_metrics
from vitlab.training.metrics.predictions import MeanIoU, MeanIoUForeground, confusion_matrix

pytestmark = pytest.mark.usefixtures("elsewhere")

SEEDS = dict.fromkeys(("init", "order", "augment", "mixup", "dropout", "drop_path", "subset", "split"), 0)
SMALL = {"type": "digit_scenes", "image_size": 16, "digit_size": [8, 12], "train_images": 60, "test_images": 20}
KEY = noise.key(0, "augment", 0, 0)
MASKS = np.random.default_rng(0).integers(0, 5, (40, 12, 16)).astype(np.uint8)


# -- digit_scenes -----------------------------------------------------------------------------------------------------


def draw_places(scenes: DigitScenes, split: Literal["train", "test"], count: int) -> tuple[Tensor, ...]:
    """Return the digits, tops, lefts and sides, (N, D) each, of the first scenes of a split."""
    places = scenes._draw_places(split, torch.arange(count))
    return tuple(torch.stack(column, 1) for column in zip(*places, strict=True))


def test_scene_composes_digits_resized_by_torch_darkest_on_top() -> None:
    scenes = DigitScenes(train_images=40, image_size=(32, 40), digit_size=(7, 19))
    images, placement = scenes.read("train"), draw_places(scenes, "train", 40)
    source = digits.Digits().read("train")
    close = []
    for i in range(40):
        canvas_HW = torch.zeros(32, 40, dtype=torch.float64)
        label_HW = torch.zeros(32, 40, dtype=torch.uint8)
        for digit, top, left, side in zip(*(column[i].tolist() for column in placement), strict=True):
            if digit < 0:
                continue
            ink_SS = F.interpolate(source.x_NCHW[digit][None].double(), (side, side), mode="bilinear")[0, 0]
            ink_SS = (ink_SS + 0.5 - 1e-9).floor()  # half a level goes up here; keep off the edge
            here = (slice(top, top + side), slice(left, left + side))
            wins_SS = (ink_SS >= INK) & (ink_SS > canvas_HW[here])
            label_HW[here] = torch.where(wins_SS, source.y_N[digit].to(torch.uint8) + 1, label_HW[here])
            canvas_HW[here] = torch.maximum(canvas_HW[here], ink_SS)
        assert (images.x_NCHW[i, 0].double() - canvas_HW).abs().max() <= 1
        close.append((images.y_N[i] == label_HW).double().mean())
    assert min(close) > 0.99 and images.y_N.max() == 10


def test_test_digits_are_never_trained_on() -> None:
    options = {"train_images": 400, "test_images": 100}
    scenes = DigitScenes(**options)
    prepared = prepare({"type": "digit_scenes", **options}, SEEDS)
    contents = draw_places(scenes, "train", 400)[0]
    trained_on, validated_on = (
        {digit for digit in contents[subset.id_N].flatten().tolist() if digit >= 0}
        for subset in (prepared.train, prepared.val)
    )
    assert len(trained_on) > 300 and len(validated_on) > 80
    assert not trained_on & validated_on
    assert len(prepared.val) == 80 and len(prepared.train) == 320, "four sheets of twenty"
    # By pixels too, digits of the test split are in no training scene.
    assert max(trained_on | validated_on) < digits.TRAIN
    assert draw_places(scenes, "test", 100)[0].max() < digits.TEST
    assert torch.equal(prepared.test.y_N, scenes.read("test").y_N)
    other = prepare({"type": "digit_scenes", **options}, {**SEEDS, "split": 1})
    assert set(other.val.id_N.tolist()) != set(prepared.val.id_N.tolist())
    part = prepare({"type": "digit_scenes", "fraction": 0.25, **options}, SEEDS)
    assert len(part.train) == 80 and set(part.train.id_N.tolist()) < set(prepared.train.id_N.tolist())
    assert torch.equal(part.val.id_N, prepared.val.id_N)


def test_every_sheet_has_every_digit() -> None:
    y_N = digits.Digits().read("train").y_N
    sheet_N = torch.cat([torch.full((len(part),), i) for i, part in enumerate(np.array_split(y_N, SHEETS))])
    assert all((y_N[sheet_N == sheet].bincount(minlength=10) >= 3).all() for sheet in range(SHEETS))


def test_scenes_depend_on_seed_and_index() -> None:
    few, many = (DigitScenes(train_images=n).read("train") for n in (20, 2060))  # more than are drawn at a time
    assert torch.equal(few.x_NCHW, many.x_NCHW[:20]) and torch.equal(few.y_N, many.y_N[:20])
    other = DigitScenes(train_images=20, seed=1).read("train")
    assert not torch.equal(other.x_NCHW, few.x_NCHW)
    assert not torch.equal(DigitScenes(test_images=20).read("test").x_NCHW, few.x_NCHW)
    counts = (draw_places(DigitScenes(digits_per_image=(2, 5)), "train", 2000)[0] >= 0).sum(1).bincount()
    assert counts[:2].tolist() == [0, 0] and (counts[2:] > 400).all(), "every number of digits equally often"
    sides = draw_places(DigitScenes(), "train", 2000)[3].flatten().bincount()
    assert (sides[8:17] > 700).all() and sides.sum() == sides[8:17].sum()


def test_scene_facts_need_no_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digits, "_load_digits", lambda: pytest.fail("read"))
    info = data_info({"type": "digit_scenes", "image_size": [24, 40]})
    assert (info.image, info.channels, info.classes, info.task) == ((24, 40), 1, 11, "segmentation")
    assert info.labels[:2] == ("background", "0") and digits.DIGEST in str(info.identity)
    with pytest.raises(DataError, match=r"a digit of 16 pixels \(digit_size\) does not fit on a canvas of 12 by 40"):
        data_info({"type": "digit_scenes", "image_size": [12, 40]})
    with pytest.raises(OptionError, match="write the smaller number first"):
        data_info({"type": "digit_scenes", "digit_size": [16, 8]})
    with pytest.raises(DataError, match="digit_scenes has a class at every pixel"):
        data_info({"type": "digit_scenes", "classes": [0, 1]})


@settings(max_examples=40)
@given(st.lists(st.integers(-3, 6), min_size=2, max_size=40).filter(lambda found: len(set(found)) > 1))
def test_groups_are_not_split(group: list[int]) -> None:
    group_N = torch.tensor(group)
    kept_N, held_N = hold_out_groups(group_N, 0.3, noise.key(0, "split"))
    assert sorted([*kept_N.tolist(), *held_N.tolist()]) == list(range(len(group)))
    inside, outside = set(group_N[kept_N].tolist()), set(group_N[held_N].tolist())
    assert inside and outside and not inside & outside
    assert abs(len(outside) - 0.3 * len(set(group))) <= 1


def test_single_group_cannot_be_split() -> None:
    with pytest.raises(DataError, match="all images are of one group"):
        hold_out_groups(torch.zeros(3), 0.5, noise.key(0, "split"))


# -- Pascal VOC and pets ----------------------------------------------------------------------------------------------


def write_pair(picture: Path, mask: Path, levels: np.ndarray, seed: int, palette: bool) -> None:
    for path in (picture, mask):
        path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (*levels.shape, 3), np.uint8)
    Image.fromarray(pixels).save(picture, quality=95)
    image = Image.fromarray(levels.astype(np.uint8))
    if palette:  # as in VOC: indices are the classes, colours are irrelevant
        image.putpalette(np.random.default_rng(9).permutation(768).astype(np.uint8).tobytes())
        assert image.mode == "P"
    image.save(mask)


def small_voc(base: Path) -> None:
    random = np.random.default_rng(0)
    for split, names in (("train", ["2007_000032", "2007_000039", "2008_000001"]), ("val", ["2007_000033"])):
        for seed, name in enumerate(names):
            levels = random.choice([0, 1, 15, 20, 255], (9 + seed, 14))
            write_pair(base / f"JPEGImages/{name}.jpg", base / f"SegmentationClass/{name}.png", levels, seed, True)
        listed = base / f"ImageSets/Segmentation/{split}.txt"
        listed.parent.mkdir(parents=True, exist_ok=True)
        listed.write_text("".join(f"{name}\n" for name in names))


def small_pets(base: Path) -> None:
    random = np.random.default_rng(1)
    for split, lines in (
        ("trainval", ["Abyssinian_100 1 1 1", "beagle_3 5 2 2", "Bombay_7 2 1 2"]),
        ("test", ["pug_1 9 2 4"]),
    ):
        for seed, line in enumerate(lines):
            name = line.split()[0]
            levels = random.integers(1, 4, (12, 10 + seed))
            write_pair(base / f"images/{name}.jpg", base / f"annotations/trimaps/{name}.png", levels, seed, False)
        (base / f"annotations/{split}.txt").write_text("\n".join(lines) + "\n")


def pillows(image: Image.Image, size: tuple[int, int], nearest: bool) -> np.ndarray:
    """Resize the whole picture with Pillow."""
    how = Image.Resampling.NEAREST if nearest else Image.Resampling.BILINEAR
    return np.asarray(image.resize((size[1], size[0]), how))


@pytest.mark.parametrize("layout", [".", "VOCdevkit/VOC2012", "VOC2012"])
def test_voc_equals_torchvision(tmp_path: Path, layout: str) -> None:
    small_voc(tmp_path / "d" / layout)
    voc = VOCSegmentation(root=str(tmp_path / "d"), image_size=(8, 8), fit="squash")
    shutil.copytree(tmp_path / "d" / layout, tmp_path / "theirs" / "VOCdevkit" / "VOC2012", dirs_exist_ok=True)
    assert voc.info().classes == 21 and voc.info().labels[15] == "person" and voc.info().task == "segmentation"
    for split, image_set, n in (("train", "train", 3), ("test", "val", 1)):
        images = voc.read(split)
        theirs = torchvision("torchvision.datasets").VOCSegmentation(str(tmp_path / "theirs"), "2012", image_set)
        assert len(theirs) == n == len(images.y_N)
        for x_CHW, y_HW, (picture, mask) in zip(*images, theirs, strict=True):
            assert np.array_equal(x_CHW.permute(1, 2, 0), pillows(picture, (8, 8), nearest=False))
            assert np.array_equal(y_HW, pillows(mask, (8, 8), nearest=True))
            assert VOID in y_HW
    prepared = prepare({"type": "voc_segmentation", "root": str(tmp_path / "d"), "image_size": 8}, SEEDS)
    assert (len(prepared.train), len(prepared.val), len(prepared.test)) == (2, 1, 1)


def test_picture_and_mask_are_centre_cropped_equally(tmp_path: Path) -> None:
    """The mask marks the same object before and after."""
    small_voc(tmp_path)
    levels = np.zeros((40, 90), np.uint8)
    levels[:, 30:60] = 7
    Image.fromarray(levels).save(tmp_path / "SegmentationClass/2007_000033.png")
    Image.fromarray(np.repeat((levels * 30)[..., None], 3, -1)).save(
        tmp_path / "JPEGImages/2007_000033.jpg", quality=100
    )
    x_NCHW, y_N = VOCSegmentation(root=str(tmp_path), image_size=(20, 20)).read("test")
    assert y_N[0, 0].tolist() == [0] * 2 + [7] * 15 + [0] * 3 or y_N[0, 0].tolist() == [0] * 3 + [7] * 15 + [0] * 2
    assert ((x_NCHW[0, 0] > 105) == (y_N[0] == 7)).float().mean() > 0.9


@pytest.mark.parametrize(
    ("options", "labels", "meant"),
    [
        ({}, ("background", "pet"), lambda species: [None, 1, 0, VOID]),
        ({"border": "pet"}, ("background", "pet"), lambda species: [None, 1, 0, 1]),
        ({"border": "class"}, ("background", "pet", "border"), lambda species: [None, 1, 0, 2]),
        ({"target": "species"}, ("background", "cat", "dog"), lambda species: [None, species, 0, VOID]),
        (
            {"target": "species", "border": "class"},
            ("background", "cat", "dog", "border"),
            lambda species: [None, species, 0, 3],
        ),
        ({"target": "species", "border": "pet"}, ("background", "cat", "dog"), lambda s: [None, s, 0, s]),
    ],
)
def test_pets_equal_torchvision(tmp_path: Path, options: dict, labels: tuple, meant) -> None:
    small_pets(tmp_path / "oxford-iiit-pet")
    pets = Pets(root=str(tmp_path), image_size=(8, 8), fit="squash", **options)
    assert pets.info().labels == labels and pets.info().classes == len(labels)
    for split, theirs_split in (("train", "trainval"), ("test", "test")):
        theirs = torchvision("torchvision.datasets").OxfordIIITPet(
            str(tmp_path), theirs_split, target_types=["binary-category", "segmentation"]
        )
        for x_CHW, y_HW, (picture, (species, trimap)) in zip(*pets.read(split), theirs, strict=True):
            assert np.array_equal(x_CHW.permute(1, 2, 0), pillows(picture, (8, 8), nearest=False))
            table = np.array(meant(species + 1)[1:])
            assert np.array_equal(y_HW, table[pillows(trimap, (8, 8), nearest=True) - 1])


def test_identity_depends_on_listed_files(tmp_path: Path) -> None:
    assert data_info({"type": "voc_segmentation", "root": str(tmp_path)}).identity is None, "nothing is here"
    small_voc(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two" / "VOCdevkit" / "VOC2012")
    one, two = (VOCSegmentation(root=str(tmp_path / name)) for name in ("one", "two"))
    before = one.info().identity
    assert before is not None and before == two.info().identity
    Image.new("P", (3, 3)).save(tmp_path / "one" / "SegmentationClass" / "unlisted.png")
    assert one.info().identity == before
    mask = tmp_path / "one" / "SegmentationClass" / "2007_000033.png"
    mask.write_bytes(mask.read_bytes() + b"\0")
    assert one.info().identity != before
    with pytest.raises(DataError, match="is not the data this was planned with"):
        prepare({"type": "voc_segmentation", "root": str(tmp_path / "one"), "image_size": 8}, SEEDS, before)


def damaged(base: Path, how: str) -> None:
    mask, picture = base / "SegmentationClass/2007_000039.png", base / "JPEGImages/2007_000039.jpg"
    match how:
        case "level":
            Image.fromarray(np.full((10, 14), 21, np.uint8)).save(mask)
        case "size":
            Image.fromarray(np.zeros((10, 13), np.uint8)).save(mask)
        case "colours":
            Image.fromarray(np.zeros((10, 14, 3), np.uint8)).save(mask)
        case "text":
            mask.write_text("<html>")
        case "picture":
            picture.write_bytes(picture.read_bytes()[:60])
        case "absent":
            mask.unlink()
        case "list":
            (base / "ImageSets/Segmentation/train.txt").write_text("2007_000032\n2007_000039  1\n")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("level", r"2007_000039\.png has a level 21; allowed: 0, 1, .*, 255"),
        ("size", r"2007_000039\.jpg and its mask .* differ in size: 10 by 14 and 10 by 13 pixels"),
        ("colours", "Pillow reads it as mode RGB; save it as mode P or L"),
        ("text", r"2007_000039\.png cannot be read as a picture"),
        ("picture", r"2007_000039\.jpg cannot be read as a picture"),
        ("absent", r"train\.txt:2 lists .*2007_000039\.png, which does not exist"),
        ("list", r"train\.txt:2 is damaged: '2007_000039  1'"),
    ],
)
def test_damage_is_reported_with_file_name(tmp_path: Path, how: str, message: str) -> None:
    small_voc(tmp_path)
    damaged(tmp_path, how)
    with pytest.raises(DataError, match=message):
        VOCSegmentation(root=str(tmp_path), image_size=(8, 8)).read("train")


@pytest.mark.parametrize(("name", "small"), [("voc_segmentation", small_voc), ("pets", small_pets)])
def test_download_uses_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, small) -> None:
    choice = {"type": name, "root": str(tmp_path / "new"), "image_size": 8}
    with pytest.raises(DataError, match=f"{name} is not here: looked in .*download: missing"):
        prepare(choice, SEEDS)
    assert DataSource(choice).missing() is not None and DataSource({**choice, "download": "missing"}).missing() is None
    theirs = torchvision("torchvision.datasets")
    kind = theirs.VOCSegmentation if name == "voc_segmentation" else theirs.OxfordIIITPet
    downloads = []

    def fake_init(self, root: str, download: bool, **options: str) -> None:
        downloads.append((download, options))
        small(Path(root) / ("VOCdevkit/VOC2012" if name == "voc_segmentation" else "oxford-iiit-pet"))

    monkeypatch.setattr(kind, "__init__", fake_init)
    assert len(prepare({**choice, "download": "missing"}, SEEDS).test) == 1
    assert len(downloads) == 1 and downloads[0][0]


# -- masks and augmentations ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(5, 7), (12, 16), (24, 16), (31, 9), (1, 1)])
def test_mask_resize_equals_pillow_and_torch(size: tuple[int, int]) -> None:
    ours = resize_masks(torch.from_numpy(MASKS), size)
    # If a centre is on the border of two pixels, Pillow's rounding errors decide.
    clear = [(2 * np.arange(new) + 1) * old % (2 * new) != 0 for old, new in zip((12, 16), size, strict=True)]
    for ours_HW, mask_HW in zip(ours, MASKS, strict=True):
        pillow_HW = pillows(Image.fromarray(mask_HW), size, nearest=True)
        assert np.array_equal(ours_HW.numpy()[np.ix_(*clear)], pillow_HW[np.ix_(*clear)])
    theirs = F.interpolate(torch.from_numpy(MASKS)[:, None], size, mode="nearest-exact")[:, 0]
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "change", [Flip(), Crop(padding=3, mode="reflect"), Crop(padding=3)], ids=["flip", "reflect", "zero"]
)
def test_labels_move_with_pixels(change: Flip | Crop) -> None:
    """An image made of its own labels equals them afterwards."""
    y_BHW, id_B = torch.from_numpy(MASKS), torch.arange(40)
    moved_BHW, image_BHW = change.masks(y_BHW, KEY, id_B), change(y_BHW[:, None] + 1, KEY, id_B)[:, 0]
    assert torch.equal(moved_BHW == VOID, image_BHW == 0), "no label where there was no pixel"
    assert torch.equal(moved_BHW[image_BHW > 0], (image_BHW - 1)[image_BHW > 0])
    assert not torch.equal(moved_BHW, y_BHW) and moved_BHW.dtype == torch.uint8
    assert ((moved_BHW == VOID).any()) == (isinstance(change, Crop) and change.mode == "zero")


def test_resized_crop_of_mask_is_nearest_neighbour_like_torchvision() -> None:
    functional = torchvision("torchvision.transforms.functional")
    mode = torchvision("torchvision.transforms").InterpolationMode.NEAREST_EXACT
    change, y_BHW, id_B = RandomResizedCrop(), torch.from_numpy(MASKS), torch.arange(40)
    cut_BHW, box = change.masks(y_BHW, KEY, id_B), change.boxes(KEY, id_B, 12, 16)
    for i in range(40):
        place = [int(side_B[i]) for side_B in box[:4]]
        theirs = functional.resized_crop(y_BHW[i : i + 1], *place, [12, 16], mode)
        assert torch.equal(cut_BHW[i], theirs[0])


@pytest.mark.parametrize("name", ["color_jitter", "three_augment", "erasing"])
def test_colour_augmentations_leave_labels(name: str) -> None:
    y_BHW = torch.from_numpy(MASKS)
    assert torch.equal(slot("augment").build(name).masks(y_BHW, KEY, torch.arange(40)), y_BHW)


def test_rand_augment_moves_labels_with_pixels() -> None:
    change = slot("augment").build({"type": "rand_augment", "magnitude": 20})
    id_B = torch.arange(400)
    y_BHW = torch.from_numpy(MASKS).repeat(10, 1, 1)
    which_BT, *_ = change.draws(KEY, id_B)
    moving = ("identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate")
    only_moved = torch.isin(which_BT, torch.tensor([RandAugment.operations.index(name) for name in moving])).all(1)
    never_moved = ~torch.isin(which_BT, torch.tensor([RandAugment.operations.index(name) for name in moving[1:]])).any(
        1
    )
    assert only_moved.sum() > 40 and never_moved.sum() > 40
    moved_BHW, image_BHW = change.masks(y_BHW, KEY, id_B), change(y_BHW[:, None] + 1, KEY, id_B)[:, 0]
    shown_BHW = torch.where(image_BHW == 0, VOID, image_BHW - 1)
    assert torch.equal(moved_BHW[only_moved], shown_BHW[only_moved])
    assert torch.equal(moved_BHW[never_moved], y_BHW[never_moved])
    assert (moved_BHW == VOID).any()


EVERYTHING = ["flip", {"type": "crop", "padding": 3}, {"type": "rand_augment", "num_ops": 1}, "erasing"]


def test_batch_images_match_labels() -> None:
    """Labelled digits have ink and other pixels have none, after every move; cropped borders are void."""
    moves = ["flip", {"type": "crop", "padding": 3}]
    prepared = prepare({**SMALL, "normalize": "unit"}, SEEDS)
    feed = Feed(prepared, moves, SEEDS)
    changed = 0
    for step in range(6):
        batch = feed.batch(step, 16)
        assert batch.y_B.dtype == torch.int64 and batch.y_B.shape == (16, 16, 16)
        labelled = batch.y_B != IGNORED
        ink = (batch.x_BCHW[:, 0] * 255).round() >= INK
        assert torch.equal((batch.y_B > 0)[labelled], ink[labelled])
        assert not ink[~labelled].any() and (~labelled).any()
        place = {identity: i for i, identity in enumerate(prepared.train.id_N.tolist())}
        plain = prepared.train.y_N[[place[i] for i in batch.id_B.tolist()]]
        changed += int((plain != batch.y_B).flatten(1).any(1).sum())
    assert changed > 80
    sizes = [Feed(prepared, EVERYTHING, SEEDS).batch(0, size) for size in (5, 20)]
    assert torch.equal(sizes[0].y_B, sizes[1].y_B[:5])
    labels = torch.cat([batch.y_B for batch in feed.evaluation("val", 7)])
    assert torch.equal(labels, prepared.val.y_N.long())


def test_image_and_label_sizes_change_together() -> None:
    prepared = prepare({**SMALL, "size": [8, 24]}, SEEDS)
    assert prepared.info.image == (8, 24)
    assert prepared.train.x_NCHW.shape[-2:] == prepared.train.y_N.shape[-2:] == prepared.test.y_N.shape[-2:] == (8, 24)
    assert prepared.train.y_N.max() <= 10 and prepared.train.y_N.dtype == torch.uint8


def test_augmentation_without_masks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Flip, "masks")
    with pytest.raises(
        DataError, match="augment: flip has no method 'masks' to transform the label masks of digit_scenes"
    ):
        data_info({**SMALL, "augment": ["flip"]})
    assert data_info({"type": "digits", "augment": ["flip"]}).classes == 10


# -- losses and metrics -----------------------------------------------------------------------------------------------


def pixels(b: int = 6, k: int = 4, unlabelled: float = 0.2) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    target = torch.randint(0, k, (b, 5, 6), generator=g)
    target[torch.rand(target.shape, generator=g) < unlabelled] = IGNORED
    return torch.randn(b, k, 5, 6, generator=g, dtype=torch.float64), target


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("name", ["cross_entropy", "bce"])
def test_unlabelled_pixels_are_not_learned(name: str, smoothing: float) -> None:
    logits, target = pixels()
    built = slot("loss").build({"type": name, "label_smoothing": smoothing})
    logits.requires_grad_()
    total = built({"": logits}, target).total
    (gradient,) = torch.autograd.grad(total, logits)
    logits, total = logits.detach(), total.detach()
    labelled = target != IGNORED
    assert (gradient.movedim(1, -1)[~labelled] == 0).all() and (gradient.movedim(1, -1)[labelled] != 0).any()
    alone = built({"": logits.movedim(1, -1)[labelled]}, target[labelled]).total
    assert float(total) == pytest.approx(float(alone), rel=1e-12)
    if name == "cross_entropy":
        theirs = F.cross_entropy(logits, target, label_smoothing=smoothing)
        assert float(total) == pytest.approx(float(theirs), rel=1e-12)
    logits.requires_grad_()
    nothing = built({"": logits}, torch.full_like(target, IGNORED)).total
    (gradient,) = torch.autograd.grad(nothing, logits)
    assert nothing.detach() == 0 and not gradient.any()


def tallied(logits: Tensor, target: Tensor, *sizes: int) -> MetricAccumulator:
    data = DataInfo(image=(1, 1), channels=1, classes=logits.shape[1], task="segmentation")
    tally, start = MetricAccumulator(build_metrics(data)), 0
    for size in sizes:
        part = slice(start, start + size)
        tally.add_batch({"": logits[part]}, target[part], torch.arange(len(target))[part])
        start += size
    return tally


def test_metrics_equal_scikit_learn_over_whole_split() -> None:
    from sklearn.metrics import accuracy_score, jaccard_score, log_loss
    from sklearn.metrics import confusion_matrix as sklearn_confusion_matrix

    logits, target = pixels(b=7, k=5)
    logits[:, 1] -= 9  # never predicted
    target[target == 3] = 2  # never a label, but predicted
    target[1] = IGNORED  # an image without any label
    target[2, 1:] = IGNORED  # one with few
    logits[:, 4] -= 99
    target[target == 4] = 0  # neither label nor prediction
    tally = tallied(logits, target, 4, 1, 2)
    scores = tally.compute_result("val").metrics
    labelled = target != IGNORED
    y, prediction = target[labelled].numpy(), logits.argmax(1)[labelled].numpy()
    assert np.array_equal(confusion_matrix(logits, target), sklearn_confusion_matrix(y, prediction, labels=range(5)))
    assert set(scores) == {"loss", "pixel_accuracy", "miou", "miou_foreground"}
    assert scores["pixel_accuracy"] == pytest.approx(accuracy_score(y, prediction), rel=1e-14)
    assert scores["miou"] == pytest.approx(jaccard_score(y, prediction, average="macro", labels=range(4)), rel=1e-14)
    assert scores["miou_foreground"] == pytest.approx(
        jaccard_score(y, prediction, average="macro", labels=[1, 2, 3]), rel=1e-14
    )
    p = logits.movedim(1, -1)[labelled].softmax(1).numpy()
    assert scores["loss"] == pytest.approx(log_loss(y, p, labels=range(5)), rel=1e-12)
    columns = tally.compute_result("val").columns
    assert columns["id"].tolist() == list(range(7))
    assert columns["pixel_accuracy"].isnan().tolist() == [False, True] + [False] * 5
    few = labelled[2]
    assert columns["pixel_accuracy"][2] == (logits[2].argmax(0) == target[2])[few].double().mean()
    apart = [
        tallied(logits[part], target[part], len(target[part])).compute_result("val").metrics
        for part in (slice(4), slice(4, 7))
    ]
    assert scores["miou"] != pytest.approx(np.mean([one["miou"] for one in apart]), rel=1e-3), "not a mean over batches"
    assert tallied(logits, target, 7).compute_result("val").metrics == pytest.approx(scores, rel=1e-14)


def test_iou_equals_hand_calculation() -> None:
    #                        predicted  bg  1  2  3
    table = torch.tensor([[6, 1, 0, 0], [2, 4, 0, 0], [0, 3, 0, 0], [0, 0, 0, 0]])
    assert MeanIoU().value(table[None]) == pytest.approx((6 / 9 + 4 / 10 + 0 / 3) / 3, rel=1e-15)
    assert MeanIoUForeground().value(table[None]) == pytest.approx((4 / 10 + 0 / 3) / 2, rel=1e-15)
    assert MeanIoUForeground().value(torch.tensor([[[9, 0], [0, 0]]])) == 0, "nothing was there, and nothing was found"


def test_constant_background_baseline_is_reported() -> None:
    """The trained arm ``prior`` equals the values calculated by hand."""
    prepared = prepare(SMALL, SEEDS)
    feed = Feed(prepared, [], SEEDS)
    built = model.build("prior", prepared.info)
    built.initialise(0)
    spec = TrainSpec.model_validate({"steps": 3, "batch_size": 16, "optimizer": {"type": "adamw", "lr": 0.1}})
    trained = train(built, feed, spec, SEEDS)
    assert trained is not None
    for split, subset in (("val", prepared.val), ("test", prepared.test)):
        share = float((subset.y_N == 0).double().mean())
        occur = len(subset.y_N.unique())
        assert trained.metrics[f"{split}/pixel_accuracy"] == pytest.approx(share, rel=1e-14)
        assert trained.metrics[f"{split}/miou"] == pytest.approx(share / occur, rel=1e-14)
        assert trained.metrics[f"{split}/miou_foreground"] == 0
    data = DataInfo(image=(4, 4), channels=3, classes=7)
    assert model.build("prior", data)(torch.randn(2, 3, 4, 4)).logits.shape == (2, 7)


# -- end to end -------------------------------------------------------------------------------------------------------


def test_vit_learns_to_segment_with_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare({**SMALL, "digits_per_image": [1, 1]}, SEEDS)
    feed = Feed(prepared, EVERYTHING[:2], SEEDS)
    options = {"patch_size": 4, "dim": 16, "depth": 1, "heads": 2, "prefix": [], "head": "segmentation"}
    built = model.build({"type": "vit", **options}, prepared.info)
    built.initialise(0)
    spec = TrainSpec.model_validate(
        {"steps": 30, "batch_size": 16, "optimizer": {"type": "adamw", "lr": 0.01}, "evaluations": 2}
    )
    training = Training(built, feed, spec, SEEDS)
    (trained,) = train_together([training])
    assert trained is not None and not training.failure
    first, last = (moment.metrics["val/loss"] for moment in trained.history)
    assert last < first < np.log(11)
    assert set(training.predictions["test"]) == {"id", "pixel_accuracy", "loss"}
    monkeypatch.setattr(evaluation, "EVALUATION_PIXELS", 3 * 16 * 16 + 5)
    sizes = []
    cut = feed.evaluation
    monkeypatch.setattr(
        feed, "evaluation", lambda split, size, batches: sizes.append(size) or cut(split, size, batches)
    )
    again = Training(built, feed, spec, SEEDS).evaluate("test").metrics
    assert sizes == [3]
    assert again == pytest.approx({name: trained.metrics[f"test/{name}"] for name in again}, rel=1e-5)
