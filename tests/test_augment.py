"""Tests of augmentations against torchvision: equal pixels for equal draws, and distributions of draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from vitlab import noise
from vitlab.data.augment import pixels
from vitlab.data.augment.color import ColorJitter, ThreeAugment
from vitlab.data.augment.geometric import Crop, Erasing, Flip, RandomResizedCrop
from vitlab.data.augment.randaugment import GEOMETRIC, RandAugment, RandAugmentTimm, TrivialAugment
from vitlab.data.torchvision_import import torchvision
from vitlab.errors import OptionError
from vitlab.registry import BUILT_IN, list_entries, slot

F = torchvision("torchvision.transforms.functional")
Mode = torchvision("torchvision.transforms").InterpolationMode
KEY = noise.key(0, "augment", 0, 0)
MANY = torch.arange(4000)
EVERY = [
    "color_jitter",
    "crop",
    "erasing",
    "flip",
    "rand_augment",
    "rand_augment_timm",
    "random_resized_crop",
    "three_augment",
    "trivial_augment",
]


def images(n: int = 40, channels: int = 3, height: int = 12, width: int = 16) -> Tensor:
    """Return smooth and noisy, dark and light images, so that no operation is trivial on all of them."""
    random = np.random.default_rng(0)
    smooth = torch.from_numpy(random.random((n, channels, 4, 4)))
    smooth = torch.nn.functional.interpolate(smooth, (height, width), mode="bicubic").clamp(0, 1)
    rough = torch.from_numpy(random.random((n, channels, height, width)))
    mixed = 0.7 * smooth + 0.3 * rough
    gain = torch.from_numpy(random.uniform(0.3, 1, (n, 1, 1, 1)))
    return (mixed * gain * 255).round().to(torch.uint8)


@pytest.fixture(params=["picked images", "all images"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute operations for the images that drew them only, as on the CPU, or for all images, as on other devices."""
    if request.param == "all images":
        monkeypatch.setattr(pixels, "PICKING_DEVICES", ())


def test_listing_reads_every_builtin_from_source_text() -> None:
    assert [entry.name for entry in list_entries("augment") if entry.origin.source == BUILT_IN] == EVERY
    assert set(EVERY) <= set(slot("augment").names())


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("name", EVERY)
def test_augmented_sample_does_not_depend_on_batch(name: str) -> None:
    """Alone, in a batch, and in another order among others; the input is not written to."""
    change = slot("augment").build(name)
    x_BCHW = images().float() / 127 - 1 if change.normalized else images()
    before, id_B = x_BCHW.clone(), torch.arange(40) * 1_000_003
    out_BCHW = change(x_BCHW, KEY, id_B)
    assert torch.equal(x_BCHW, before)
    assert out_BCHW.shape == x_BCHW.shape and out_BCHW.dtype == x_BCHW.dtype
    order = noise.permutation(7, 40)[:25]
    assert torch.equal(change(x_BCHW[order], KEY, id_B[order]), out_BCHW[order])
    for i in (0, 13, 39):
        assert torch.equal(change(x_BCHW[i : i + 1], KEY, id_B[i : i + 1]), out_BCHW[i : i + 1])
    other = change(x_BCHW, noise.key(1, "augment", 0, 0), id_B)
    assert not torch.equal(other, out_BCHW)
    assert torch.equal(change(x_BCHW, torch.tensor(KEY), id_B), out_BCHW), "a key on the device is the same key"


@pytest.mark.parametrize("name", EVERY)
def test_grey_images_keep_their_shape(name: str) -> None:
    change = slot("augment").build(name)
    x_BCHW = images(channels=1)
    assert change(x_BCHW if not change.normalized else x_BCHW.float(), KEY, torch.arange(40)).shape == x_BCHW.shape


# -- geometry ---------------------------------------------------------------------------------------------------------


def test_flip() -> None:
    x_BCHW = images(len(MANY), 1, 3, 5)
    out_BCHW = Flip(p=0.3)(x_BCHW, KEY, MANY)
    mirrored = (out_BCHW != x_BCHW).flatten(1).any(1)
    assert torch.equal(out_BCHW[mirrored], F.hflip(x_BCHW[mirrored]))
    assert stats.binomtest(int(mirrored.sum()), len(MANY), 0.3).pvalue > 1e-3
    assert torch.equal(Flip(p=0.0)(x_BCHW, KEY, MANY), x_BCHW)
    assert torch.equal(Flip(p=1.0)(x_BCHW, KEY, MANY), F.hflip(x_BCHW))


@pytest.mark.parametrize(("mode", "theirs"), [("zero", "constant"), ("reflect", "reflect")])
def test_crop_equals_torchvision_crops_with_equal_frequency(mode, theirs: str) -> None:
    x_1CHW = images(1, 3, 5, 6)
    out_BCHW = Crop(padding=2, mode=mode)(x_1CHW.expand(len(MANY), -1, -1, -1), KEY, MANY)
    padded = F.pad(x_1CHW, [2, 2, 2, 2], padding_mode=theirs)
    expected = {F.crop(padded, y, x, 5, 6).numpy().tobytes(): (y, x) for y in range(5) for x in range(5)}
    assert len(expected) == 25
    indices = [expected[out.numpy().tobytes()] for out in out_BCHW]
    counts = np.zeros((5, 5))
    for y, x in indices:
        counts[y, x] += 1
    assert stats.chisquare(counts.flatten()).pvalue > 1e-3


def test_crop_reflection_wider_than_image_keeps_mirroring() -> None:
    x_1CHW = images(1, 1, 3, 4)
    out_BCHW = Crop(padding=7, mode="reflect")(x_1CHW.expand(500, -1, -1, -1), KEY, MANY[:500])
    padded = np.pad(x_1CHW[0, 0].numpy(), 7, mode="reflect")
    expected = {padded[y : y + 3, x : x + 4].tobytes() for y in range(15) for x in range(15)}
    assert {out.numpy().tobytes() for out in out_BCHW} <= expected


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_random_resized_crop_equals_torchvision_for_same_box(interpolation) -> None:
    x_BCHW = images(60)
    change = RandomResizedCrop(interpolation=interpolation)
    id_B = torch.arange(60)
    out_BCHW, box = change(x_BCHW, KEY, id_B), change.boxes(KEY, id_B, 12, 16)
    for i in range(60):
        place = [int(side_B[i]) for side_B in box[:4]]
        # Enlarging needs no antialiasing; bicubic's coefficient is Pillow's only with it.
        theirs = F.resized_crop(
            x_BCHW[i : i + 1], *place, [12, 16], Mode(interpolation), antialias=interpolation == "bicubic"
        )
        assert (out_BCHW[i : i + 1].int() - theirs.int()).abs().max() <= 1


def test_random_resized_crop_boxes_are_distributed_like_torchvision() -> None:
    size = 1000  # large, so that whole pixels do not matter
    box = RandomResizedCrop().boxes(KEY, MANY, size, size)
    source = torchvision("torchvision.transforms").RandomResizedCrop
    torch.manual_seed(0)
    blank = torch.empty(1, size, size)
    theirs = np.array([source.get_params(blank, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(2000)])
    top, left, height, width = (side_B.double().numpy() for side_B in box[:4])
    samples = {
        "area": (height * width, theirs[:, 2] * theirs[:, 3]),
        "ratio": (np.log(width / height), np.log(theirs[:, 3] / theirs[:, 2])),
        "top": (top, theirs[:, 0]),
        "left": (left, theirs[:, 1]),
    }
    for name, (ours, other) in samples.items():
        assert stats.ks_2samp(ours, other).pvalue > 1e-3, name
    room = size - height > 50
    assert stats.kstest(top[room] / (size - height[room]), "uniform").pvalue > 1e-3
    assert (
        stats.kstest(
            np.log(width / height)[height * width < 0.5 * size**2],
            stats.uniform(math.log(0.75), 2 * math.log(4 / 3)).cdf,
        ).pvalue
        > 1e-3
    )


@pytest.mark.parametrize(("height", "width"), [(10, 40), (40, 10), (20, 20)])
def test_random_resized_crop_fallback_is_torchvision_centre_crop(height: int, width: int) -> None:
    change = RandomResizedCrop(scale=(0.9999, 1.0), ratio=(0.9, 0.9001) if height == width else (0.9, 1.1))
    box = change.boxes(KEY, torch.arange(50), height, width)
    assert not box.fits_B.any()
    source = torchvision("torchvision.transforms").RandomResizedCrop
    theirs = source.get_params(torch.empty(1, height, width), list(change.scale), list(change.ratio))
    assert [int(side_B[0]) for side_B in box[:4]] == list(theirs)


@pytest.mark.slow
def test_erasing_boxes_are_distributed_like_torchvision() -> None:
    size, n = 100, len(MANY)
    change = Erasing(p=0.6, scale=(0.02, 0.33), ratio=(0.3, 3.3), fill="mean")
    covered = change(torch.ones(n, 1, size, size), KEY, MANY)[:, 0] == 0
    rows, columns = covered.any(2), covered.any(1)
    height, width = rows.sum(1), columns.sum(1)
    assert torch.equal(covered.sum((1, 2)), height * width), "rectangles"
    erased = (height > 0).numpy()
    assert stats.binomtest(int(erased.sum()), n, 0.6).pvalue > 1e-3
    source = torchvision("torchvision.transforms").RandomErasing
    torch.manual_seed(0)
    theirs = [source.get_params(torch.ones(1, size, size), (0.02, 0.33), (0.3, 3.3), [0.0])[:4] for _ in range(2000)]
    top, left, tall, wide = np.array(theirs).T
    ours = {
        "area": ((height * width).numpy()[erased], tall * wide),
        "ratio": ((width / height).numpy()[erased], wide / tall),
        "top": (rows.int().argmax(1).numpy()[erased], top),
        "left": (columns.int().argmax(1).numpy()[erased], left),
    }
    for name, (mine, other) in ours.items():
        assert stats.ks_2samp(mine, other).pvalue > 1e-3, name


def test_erasing_noise_is_standard_normal_and_leaves_rest() -> None:
    x_BCHW = torch.full((300, 2, 20, 20), 9.0)
    out_BCHW = Erasing(p=1.0)(x_BCHW, KEY, torch.arange(300))
    grain = out_BCHW[out_BCHW != 9].numpy()
    assert len(grain) > 20000 and stats.kstest(grain[:20000], "norm").pvalue > 1e-3
    assert torch.equal(Erasing(p=0.0)(x_BCHW, KEY, torch.arange(300)), x_BCHW)


# -- colours ----------------------------------------------------------------------------------------------------------

FACTORS = [
    ("brightness", F.adjust_brightness),
    ("contrast", F.adjust_contrast),
    ("saturation", F.adjust_saturation),
    ("sharpness", F.adjust_sharpness),
]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("name", "theirs"), FACTORS, ids=[name for name, _ in FACTORS])
def test_color_factors_equal_torchvision(name: str, theirs, channels: int) -> None:
    x_BCHW = images(channels=channels)
    factor_B = torch.linspace(0, 2, 40)
    out_BCHW = getattr(pixels, name)(x_BCHW, factor_B)
    expected = torch.stack([theirs(x, float(factor)) for x, factor in zip(x_BCHW, factor_B, strict=True)])
    # Levels are cut off, so a difference in the last bit of a float may be a level.
    off = (out_BCHW.int() - expected.int()).abs()
    assert off.max() <= 1 and (off > 0).float().mean() < 0.001


def test_hue_equals_torchvision() -> None:
    x_BCHW = images()
    x_BCHW[0] = x_BCHW[0, :1]  # grey has no hue
    turn_B = torch.linspace(-0.5, 0.5, 40)
    out_BCHW = pixels.hue(x_BCHW, turn_B)
    expected = torch.stack([F.adjust_hue(x, float(turn)) for x, turn in zip(x_BCHW, turn_B, strict=True)])
    off = (out_BCHW.int() - expected.int()).abs()
    assert off.max() <= 1 and (off > 0).float().mean() < 0.02


def test_levels_equal_torchvision_exactly() -> None:
    x_BCHW = images(60, height=24, width=24)
    x_BCHW[0], x_BCHW[1, 0], x_BCHW[2, :, :23] = 7, 200, 255
    for bits in range(9):
        assert torch.equal(pixels.posterize(x_BCHW, torch.full((60,), bits)), F.posterize(x_BCHW, bits))
    for threshold in (0.0, 178.5, 128.0, 255.0):
        assert torch.equal(pixels.solarize(x_BCHW, torch.full((60,), threshold)), F.solarize(x_BCHW, threshold))
    assert torch.equal(pixels.equalize(x_BCHW), F.equalize(x_BCHW))
    off = (pixels.autocontrast(x_BCHW).int() - F.autocontrast(x_BCHW).int()).abs()
    assert off.max() <= 1 and (off > 0).float().mean() < 1e-3
    gray = pixels.grey(x_BCHW)
    assert torch.equal(gray, F.rgb_to_grayscale(x_BCHW, 3))


def test_blur_equals_torchvision() -> None:
    x_BCHW, sigma_B = images(height=20, width=18), torch.linspace(0.1, 2, 40)
    expected = torch.stack([F.gaussian_blur(x, [13, 13], [float(s)] * 2) for x, s in zip(x_BCHW, sigma_B, strict=True)])
    off = (pixels.blur(x_BCHW, sigma_B).int() - expected.int()).abs()
    assert off.max() <= 1 and (off > 0).float().mean() < 1e-3
    assert pixels.blur(images(height=3, width=2), sigma_B).shape == (40, 3, 3, 2)


@pytest.mark.usefixtures("place")
def test_color_jitter_applies_torchvision_operations_in_drawn_order() -> None:
    x_BCHW, id_B = images(), torch.arange(40)
    change = ColorJitter(brightness=0.5, contrast=0.4, saturation=1.5, hue=0.1)
    amount_B4, order_B4 = change.draws(KEY, id_B)
    theirs = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)
    expected = []
    for x, amount_4, order_4 in zip(x_BCHW, amount_B4, order_B4, strict=True):
        for i in order_4.tolist():
            x = theirs[i](x, float(amount_4[i]))
        expected.append(x)
    off = (change(x_BCHW, KEY, id_B).int() - torch.stack(expected).int()).abs()
    assert (off > 2).float().mean() < 0.005


def test_color_jitter_factors_and_orders_are_uniform() -> None:
    amount_B4, order_B4 = ColorJitter(brightness=0.5, contrast=0.4, saturation=1.5, hue=0.1).draws(KEY, MANY)
    bounds = ((0.5, 1.5), (0.6, 1.4), (0.0, 2.5), (-0.1, 0.1))
    for amount_B, (low, high) in zip(amount_B4.T.numpy(), bounds, strict=True):
        assert stats.kstest(amount_B, stats.uniform(low, high - low).cdf).pvalue > 1e-3
    _, counts = np.unique(order_B4.numpy() @ [64, 16, 4, 1], return_counts=True)
    assert len(counts) == 24 and stats.chisquare(counts).pvalue > 1e-3
    x_BCHW = images()
    untouched = ColorJitter(brightness=0.0, contrast=0.0, saturation=0.0)
    assert torch.equal(untouched(x_BCHW, KEY, torch.arange(40)), x_BCHW)


@pytest.mark.usefixtures("place")
def test_three_augment_applies_one_of_three() -> None:
    x_BCHW, id_B = images(), torch.arange(40)
    which_B, sigma_B = ThreeAugment().draws(KEY, id_B)
    out_BCHW = ThreeAugment()(x_BCHW, KEY, id_B)
    assert set(which_B.tolist()) == {0, 1, 2}
    for x, out, which, sigma in zip(x_BCHW, out_BCHW, which_B.tolist(), sigma_B.tolist(), strict=True):
        theirs = (
            lambda x: F.rgb_to_grayscale(x, 3),
            lambda x: F.solarize(x, 128),
            lambda x, s=sigma: F.gaussian_blur(x, [11, 11] if min(x.shape[1:]) < 13 else [13, 13], [s, s]),
        )[which](x)
        assert (out.int() - theirs.int()).abs().max() <= (1 if which == 2 else 0)
    which_B, sigma_B = ThreeAugment().draws(KEY, MANY)
    assert stats.chisquare(which_B.bincount()).pvalue > 1e-3
    assert stats.kstest(sigma_B.numpy(), stats.uniform(0.1, 1.9).cdf).pvalue > 1e-3


# -- RandAugment ------------------------------------------------------------------------------------------------------

MOVES = "ShearX ShearY TranslateX TranslateY Rotate"
NAMES = f"Identity {MOVES} Brightness Color Contrast Sharpness Posterize Solarize AutoContrast Equalize"


@pytest.mark.parametrize("level", [0, 9, 14, 19, 30])
@pytest.mark.parametrize("policy", ["RandAugment", "TrivialAugmentWide"])
@pytest.mark.parametrize(("number", "theirs"), list(enumerate(NAMES.split())), ids=RandAugment.operations)
def test_operations_equal_torchvision(number: int, theirs: str, policy: str, level: int) -> None:
    module = torchvision("torchvision.transforms.autoaugment")
    x_BCHW = images(20, height=64, width=80)
    size = [(64, 80)] if policy == "RandAugment" else []
    space = getattr(module, policy)()._augmentation_space(31, *size)
    assert list(space) == NAMES.split(), "torchvision's operations, in its order"
    levels, signed = space[theirs]
    strength = float(levels[level]) if levels.ndim else 0.0
    for sign in (1, -1):
        drawn = (torch.full((20,), value) for value in (number, level, sign))
        ours = (RandAugment() if size else TrivialAugment()).apply_operation(x_BCHW, *drawn)
        amount = strength * sign if signed else strength
        expected = torch.stack([module._apply_op(x, theirs, amount, Mode.NEAREST, None) for x in x_BCHW])
        off = (ours.int() - expected.int()).abs()
        if number in range(1, 6):
            # Half-way between two pixels, the last bit of the coordinate decides which is nearest.
            assert (off > 0).float().mean() < 0.02
        else:
            assert off.max() <= 1 and (off > 0).float().mean() < 1e-3


def test_trivial_augment_draws_one_operation_at_a_uniform_level() -> None:
    which_BT, level_BT, sign_BT = TrivialAugment().draws(KEY, MANY)
    assert which_BT.shape == (len(MANY), 1)
    for drawn_B, count in ((which_BT[:, 0], 14), (level_BT[:, 0], 31), (sign_BT[:, 0] + 1, 3)):
        expected = torch.tensor([1, 0, 1]) if count == 3 else torch.ones(count)
        seen = drawn_B.bincount(minlength=count)[expected > 0]
        assert stats.chisquare(seen).pvalue > 1e-3 and seen.sum() == len(MANY)
    assert stats.chi2_contingency(np.histogram2d(which_BT[:, 0], level_BT[:, 0], [14, 31])[0]).pvalue > 1e-3


def test_rand_augment_operations_and_signs_are_uniform() -> None:
    which_BT, level_BT, sign_BT = RandAugment(num_ops=3, magnitude=7).draws(KEY, MANY)
    assert level_BT.shape == which_BT.shape and (level_BT == 7).all()
    for turn in range(3):
        assert stats.chisquare(which_BT[:, turn].bincount(minlength=14)).pvalue > 1e-3
        assert stats.binomtest(int((sign_BT[:, turn] > 0).sum()), len(MANY), 0.5).pvalue > 1e-3
    assert stats.chi2_contingency(np.histogram2d(which_BT[:, 0], which_BT[:, 1], 14)[0]).pvalue > 1e-3
    x_BCHW, id_B = images(), torch.arange(40)
    one = RandAugment(num_ops=2)
    first, second = zip(*(drawn_BT.unbind(1) for drawn_BT in one.draws(KEY, id_B)), strict=True)
    expected = one.apply_operation(one.apply_operation(x_BCHW, *first), *second)
    assert torch.equal(one(x_BCHW, KEY, id_B), expected)


@pytest.mark.usefixtures("place")
def test_rand_augment_applies_torchvision_operations_that_each_image_drew() -> None:
    module = torchvision("torchvision.transforms.autoaugment")
    x_BCHW, change = images(height=16, width=20), RandAugment(num_ops=2, magnitude=12)
    space = module.RandAugment()._augmentation_space(31, (16, 20))
    out_BCHW, (which_BT, _, sign_BT) = change(x_BCHW, KEY, MANY[:40]), change.draws(KEY, MANY[:40])
    assert len(which_BT.unique()) == len(NAMES.split()) == 14
    for x_CHW, out_CHW, which_T, sign_T in zip(x_BCHW, out_BCHW, which_BT.tolist(), sign_BT.tolist(), strict=True):
        for which, sign in zip(which_T, sign_T, strict=True):
            levels, signed = space[name := NAMES.split()[which]]
            amount = float(levels[12]) * (sign if signed else 1) if levels.ndim else 0.0
            x_CHW = module._apply_op(x_CHW, name, amount, Mode.NEAREST, None)
        off = (out_CHW.int() - x_CHW.int()).abs()
        assert (off > 2).float().mean() < 0.02


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("name", RandAugmentTimm.operations)
def test_randaugment_timm_operations_equal_timm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image
    from timm.data import auto_augment as theirs

    number = RandAugmentTimm.operations.index(name)
    assert len(theirs._RAND_INCREASING_TRANSFORMS) == len(RandAugmentTimm.operations)
    operation = theirs.AugmentOp(
        theirs._RAND_INCREASING_TRANSFORMS[number],
        prob=1.0,
        hparams={"img_mean": (128,) * 3, "interpolation": Image.Resampling.BILINEAR},
    )
    x_BCHW = images(12, height=16, width=20)
    pictures = [Image.fromarray(x_CHW.permute(1, 2, 0).numpy()) for x_CHW in x_BCHW]
    changed = 0
    # At level 10 posterize keeps no bit, which newer versions of Pillow refuse.
    for level in (0.0, 2.3, 5.0, 9.0) + ((10.0,) if name != "posterize" else ()):
        for sign in (1, -1):
            operation.magnitude = level
            monkeypatch.setattr(theirs.random, "random", lambda sign=sign: 0.4 if sign > 0 else 0.6)
            expected = np.stack([np.asarray(operation(picture)) for picture in pictures]).astype(int)
            ours_BCHW = RandAugmentTimm().apply_operation(
                x_BCHW, torch.full((12,), number), torch.full((12,), level), torch.full((12,), sign)
            )
            off = np.abs(ours_BCHW.permute(0, 2, 3, 1).numpy().astype(int) - expected)
            assert np.mean(off > 2) < (0.01 if name in GEOMETRIC else 1e-9), (level, sign, off.max())
            changed += int((ours_BCHW != x_BCHW).any())
    assert changed >= 6


def test_randaugment_timm_draws_equal_timm() -> None:
    which_BT, level_BT, sign_BT = RandAugmentTimm(magnitude=6, magnitude_std=0.5).draws(KEY, MANY)
    for turn in range(2):
        counts = (which_BT[:, turn] + 1).bincount(minlength=16)
        assert stats.binomtest(int(counts[0]), len(MANY), 0.5).pvalue > 1e-3
        assert stats.chisquare(counts[1:]).pvalue > 1e-3
        assert stats.kstest(level_BT[:, turn].numpy(), stats.norm(6, 0.5).cdf).pvalue > 1e-3
        assert stats.binomtest(int((sign_BT[:, turn] > 0).sum()), len(MANY), 0.5).pvalue > 1e-3
    cut_BT = RandAugmentTimm(magnitude=9.8).draws(KEY, MANY)[1]
    assert cut_BT.max() == 10 and 0.25 < (cut_BT == 10).float().mean() < 0.45
    never = RandAugmentTimm(p=0.0)
    assert torch.equal(never(images(), KEY, MANY[:40]), images())


def test_randaugment_timm_moves_masks_with_pixels() -> None:
    change = RandAugmentTimm(p=1.0)
    y_BHW = images(40, 1, 24, 24)[:, 0] // 128 * 100
    which_BT, level_BT, sign_BT = change.draws(KEY, MANY[:40])
    moved_BHW = change.masks(y_BHW, KEY, MANY[:40])
    still = ~torch.isin(which_BT, torch.tensor([RandAugmentTimm.operations.index(name) for name in GEOMETRIC])).any(1)
    assert torch.equal(moved_BHW[still], y_BHW[still]) and 3 < int(still.sum()) < 37
    shifts = (which_BT == RandAugmentTimm.operations.index("translate_x")) & still.logical_not()[:, None]
    others = torch.isin(
        which_BT,
        torch.tensor([RandAugmentTimm.operations.index(n) for n in GEOMETRIC if n != "translate_x"]),
    )
    alone = shifts.sum(1).eq(1) & ~others.any(1)
    assert alone.any()
    for i in alone.nonzero()[:, 0].tolist():
        turn = int(shifts[i].int().argmax())
        pixels_moved = float(0.45 * level_BT[i, turn] / 10 * sign_BT[i, turn] * 24)
        column_W = np.floor(np.arange(24) + 0.5 + pixels_moved).astype(int)
        for w, source in enumerate(column_W):
            expected = y_BHW[i, :, source] if 0 <= source < 24 else torch.full((24,), 255)
            assert torch.equal(moved_BHW[i, :, w], expected.to(torch.uint8))


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"type": "random_resized_crop", "scale": [1.0, 0.5]}, "write the smaller number first"),
        ({"type": "random_resized_crop", "scale": [0, 1]}, "greater than 0"),
        ({"type": "crop", "mode": "mirror"}, "allowed: zero, reflect"),
        ({"type": "rand_augment", "magnitude": 31}, "less than 31"),
        ({"type": "rand_augment_timm", "magnitude": 11}, "less than or equal to 10"),
        ({"type": "color_jitter", "hue": 0.6}, "less than or equal to 0.5"),
    ],
)
def test_wrong_option_raises_one_sentence(choice: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        slot("augment").resolve_choice(choice)
