"""Corruptions of test images, compared with the authors' formulas in numpy, SciPy and Pillow."""

import colorsys
import io
import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from PIL import Image
from scipy import ndimage

from vitlab import lab, noise
from vitlab.data import splits as sets_of_data
from vitlab.data.batches import Normalize
from vitlab.data.corruption import KINDS as FUNCTIONS
from vitlab.data.corruption import Draws, corrupt, corruption_parameters
from vitlab.data.datasets.base import COMPUTED_CORRUPTIONS as NAMES
from vitlab.data.datasets.base import Corrupted
from vitlab.data.prepare import Feed, data_info, prepare
from vitlab.engines import base
from vitlab.errors import SpecError, UserError
from vitlab.geometry import DataInfo
from vitlab.models.trained import InputSpec
from vitlab.registry import slot
from vitlab.spec import STREAMS, TrainSpec
from vitlab.spec.trial import Distill
from vitlab.training.distillation import Distillation
from vitlab.training.evaluation import forward_logits
from vitlab.training.loop import Training

pytestmark = pytest.mark.usefixtures("no_figures")


def pictures(n=3, side=32, channels=3):
    """Smooth random pictures, uint8 (n, channels, side, side)."""
    small = torch.rand(n, channels, 7, 7, generator=torch.Generator().manual_seed(side))
    large = torch.nn.functional.interpolate(small, (side, side), mode="bicubic").clamp(0, 1)
    return (large * 255).round().to(torch.uint8)


@pytest.mark.parametrize(("side", "channels"), [(8, 1), (28, 1), (86, 3), (112, 1)])
def test_corruption_depends_on_image_and_identity_alone(side, channels):
    x_BCHW, id_B = pictures(5, side, channels), torch.tensor([3, 1, 4, 1000, 5])
    for name in NAMES:
        changed = corrupt(x_BCHW, name, 5, id_B)
        assert changed.dtype == torch.uint8 and changed.shape == x_BCHW.shape
        assert (changed != x_BCHW).float().mean() > 0.01, name
        order = torch.tensor([4, 0, 2])
        assert torch.equal(corrupt(x_BCHW[order], name, 5, id_B[order]), changed[order]), name
        assert torch.equal(corrupt(x_BCHW[3:4], name, 5, id_B[3:4]), changed[3:4]), name


def test_noise_has_published_moments():
    grey = torch.full((40, 3, 32, 32), 128 / 255)

    def changed(name, severity, x_BCHW=grey):
        draws = Draws(noise.key(0, name), torch.arange(len(x_BCHW)))
        return FUNCTIONS[name](x_BCHW, corruption_parameters(name, severity, (32, 32)), draws).clamp(0, 1)

    values = changed("gaussian_noise", 3) - 128 / 255
    assert abs(values.std() - 0.08) < 5e-4 and abs(values.mean()) < 1e-3
    values = changed("shot_noise", 5)  # Poisson counts of 50 photons at white
    assert abs(values.mean() - 128 / 255) < 1e-3 and abs(values.var() - 128 / 255 / 50) < 2e-4
    assert ((values * 50).round() - values * 50).abs().max() < 1e-5
    assert torch.corrcoef(values.flatten(2).permute(1, 0, 2).flatten(1)).triu(1).abs().max() < 0.02
    values = changed("impulse_noise", 4)
    for level in (0, 1):
        assert abs((values == level).double().mean() - 0.05 / 2) < 2e-3
    assert not changed("shot_noise", 5, torch.zeros(1, 1, 8, 8)).any()


def test_parameters_follow_size():
    assert corruption_parameters("motion_blur", 5, (32, 32)) == (9, 2.5)
    assert corruption_parameters("motion_blur", 5, (8, 8)) == (9, 2.5)
    assert corruption_parameters("motion_blur", 5, (64, 80)) == (18, 5)
    assert corruption_parameters("motion_blur", 5, (224, 224)) == (20, 15)
    assert corruption_parameters("motion_blur", 5, (112, 200)) == (10, 7.5)
    assert corruption_parameters("contrast", 1, (64, 64)) == (0.75,) and corruption_parameters(
        "contrast", 1, (96, 96)
    ) == (0.4,)
    assert corruption_parameters("elastic_transform", 1, (8, 8)) == (0, 0, 0.64)


# -- the authors' formulas, of one picture (H, W, C) in [0, 1] ---------------------------------------------------------


def defocus_blur(x, c, draws):
    line = np.arange(-8, 9)
    disk = ((line[:, None] ** 2 + line**2) <= c[0] ** 2).astype(float)
    edge = np.exp(-(np.arange(-1, 2) ** 2) / (2 * c[1] ** 2))
    kernel = ndimage.correlate(disk / disk.sum(), np.outer(edge, edge) / edge.sum() ** 2, mode="mirror")
    return np.stack([ndimage.correlate(x[..., i], kernel, mode="mirror") for i in range(x.shape[2])], 2)


def blurred(x, sigma):
    return ndimage.gaussian_filter(x, (sigma, sigma, 0), mode="nearest", truncate=4)


def glass_blur(x, c, draws):
    x, side = np.floor(blurred(x, c[0]) * 255 + 4e-4), len(x)
    sigma, reach, rounds = c
    for index in range(int(rounds)):
        numbers = noise.integers(noise.fold(draws.key, index), draws.id_B, 2 * side * side, 2 * reach)
        offset = numbers.view(2, side, side) - reach
        for h in range(side - reach, reach, -1):
            for w in range(side - reach, reach, -1):
                near = h + offset[0, h, w], w + offset[1, h, w]
                x[h, w], x[near] = x[near], x[h, w]  # of views, as the authors wrote it
    return blurred(x / 255, sigma)


def moved(x, radius, sigma, angle):
    steps = np.arange(2 * radius + 1)
    kernel = np.exp(-(steps**2) / (2 * sigma**2))
    result = np.zeros_like(x)
    height, width = x.shape[:2]
    for step, weight in zip(steps, kernel / kernel.sum(), strict=True):
        down, right = (int(np.ceil(step * way(np.deg2rad(angle)) - 0.5)) for way in (np.sin, np.cos))
        rows, columns = (np.clip(np.arange(n) + way, 0, n - 1) for n, way in ((height, down), (width, right)))
        result += weight * x[rows][:, columns]
    return result


def motion_blur(x, c, draws):
    return moved(x, *c, float(draws.uniform(0, 1, -45, 45)))


def clipped_zoom(x, factor):
    side = len(x)
    inner = int(np.ceil(side / factor))
    top = (side - inner) // 2
    x = ndimage.zoom(x[top : top + inner, top : top + inner], (factor, factor, 1), order=1)
    trim = (len(x) - side) // 2
    return x[trim : trim + side, trim : trim + side]


def zoom_blur(x, c, draws):
    factors = np.arange(1, *c)
    return (x + sum(clipped_zoom(x, factor) for factor in factors)) / (len(factors) + 1)


def snow(x, c, draws):
    side = len(x)
    layer = c[0] + c[1] * draws.normal(0, side * side).view(side, side, 1).numpy().astype(float)
    layer = clipped_zoom(layer, c[2])
    layer[layer < c[3]] = 0
    layer = np.floor(np.clip(layer, 0, 1) * 255) / 255
    layer = np.round(moved(layer, c[4], c[5], float(draws.uniform(1, 1, -135, -45))) * 255) / 255
    grey = x @ np.array([0.299, 0.587, 0.114])
    x = c[6] * x + (1 - c[6]) * np.maximum(x, grey[..., None] * 1.5 + 0.5)
    return x + layer + np.rot90(layer, 2)


def fog(x, c, draws):
    side = len(x)
    uniform = iter(draws.uniform(0, side * side, -1, 1)[0].tolist())
    cells, step, wobble = np.zeros((side, side)), side, 100.0
    while step >= 2:
        half = step // 2
        for rows, columns in ((half, half), (0, half), (half, 0)):
            values = {}
            for h in range(rows, side, step):
                for w in range(columns, side, step):
                    ways = (
                        [(1, 1), (1, -1), (-1, 1), (-1, -1)] if rows == columns else [(1, 0), (-1, 0), (0, 1), (0, -1)]
                    )
                    near = sum(cells[(h + i * half) % side, (w + j * half) % side] for i, j in ways)
                    values[h, w] = near / 4 + wobble * (wobble * next(uniform))
            for place, value in values.items():
                cells[place] = value
        step, wobble = half, wobble / c[1]
    cells = (cells - cells.min()) / (cells.max() - cells.min())
    return (x + c[0] * cells[..., None]) * x.max() / (x.max() + c[0])


def brightness(x, c, draws):
    def raised(pixel):
        hue, saturation, value = colorsys.rgb_to_hsv(*pixel)
        return colorsys.hsv_to_rgb(hue, saturation, min(value + c[0], 1))

    return np.apply_along_axis(raised, 2, x)


def contrast(x, c, draws):
    means = x.mean((0, 1), keepdims=True)
    return (x - means) * c[0] + means


def elastic_transform(x, c, draws):
    side = len(x)
    rows, columns = np.mgrid[:side, :side].astype(float)
    middle, reach = side // 2, side // 3
    fixed = middle + reach * np.array([[1.0, 1], [1, -1], [-1, -1]])
    moved_points = fixed + draws.uniform(0, 6, -c[2], c[2]).view(3, 2).numpy()
    inverse = np.linalg.solve(np.c_[moved_points, np.ones(3)], fixed)  # of columns and rows
    at = np.stack([columns, rows, np.ones_like(rows)], 2) @ inverse

    def sampled(x, row, column, mode):
        each = [ndimage.map_coordinates(x[..., i], [row, column], order=1, mode=mode) for i in range(x.shape[2])]
        return np.stack(each, 2)

    x = sampled(x, at[..., 1], at[..., 0], "mirror")
    if not c[0]:
        return x
    fields = draws.uniform(1, 2 * side * side, -1, 1).view(2, side, side).numpy().astype(float)
    fields = [c[0] * ndimage.gaussian_filter(field, c[1], mode="reflect", truncate=3) for field in fields]
    return sampled(x, rows + fields[1], columns + fields[0], "reflect")


def pixelate(x, c, draws):
    picture, side = Image.fromarray(np.uint8(np.round(x * 255))), len(x)
    small = picture.resize((int(side * c[0]), int(side * c[0])), Image.Resampling.BOX)
    return np.asarray(small.resize((side, side), Image.Resampling.BOX)) / 255


def jpeg_compression(x, c, draws):
    file = io.BytesIO()
    Image.fromarray(np.uint8(np.round(x * 255))).save(file, "JPEG", quality=int(c[0]))
    return np.asarray(Image.open(file)) / 255


REFERENCES = (
    *(defocus_blur, glass_blur, motion_blur, zoom_blur, snow, fog),
    *(brightness, contrast, elastic_transform, pixelate, jpeg_compression),
)


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda reference: reference.__name__)
def test_corruption_equals_authors_formula(reference):
    name, x_BCHW, id_B = reference.__name__, pictures(2), torch.tensor([7, 11])
    for severity in range(1, 2 if name == "fog" else 6):
        key, of_size = noise.key(0, "corruption", name, severity), corruption_parameters(name, severity, (32, 32))
        changed = FUNCTIONS[name](x_BCHW.float() / 255, of_size, Draws(key, id_B)).clamp(0, 1)
        levels = (corrupt(x_BCHW, name, severity, id_B) - changed * 255).abs()
        assert levels.max() <= 1.001, name
        for index in range(2):
            draws = Draws(key, id_B[index : index + 1])
            x_HWC = x_BCHW[index].permute(1, 2, 0).double().numpy() / 255
            c = tuple(int(value) if value == int(value) else value for value in of_size)
            expected = np.clip(reference(x_HWC, c, draws), 0, 1)
            np.testing.assert_allclose(changed[index].permute(1, 2, 0).numpy(), expected, atol=2e-5, err_msg=name)


# -- evaluation of a training ------------------------------------------------------------------------------------------

DATA = {"type": "synthetic", "image_size": 8, "train_images": 90, "test_images": 30, "num_classes": 6}
KINDS = ["fog", "gaussian_noise", "jpeg_compression"]


def training(seed=0, data=DATA, model={}, distillation=None, **train):
    seeds = {**dict.fromkeys(STREAMS, seed), "split": 0}
    spec = TrainSpec.model_validate({"steps": 2, "batch_size": 16, "evaluations": 1, **train})
    choice = slot("dataset").resolve_choice(data)
    prepared = prepare(choice, seeds)
    sizes = {"type": "vit", "patch_size": 4, "dim": 16, "depth": 1, "heads": 2}
    model = slot("model").build({**sizes, **model}, prepared.info)
    model.initialise(seed)
    if distillation is not None:
        inputs = InputSpec(prepared.info, prepared.mean, prepared.std)
        distillation = Distillation(Distill(kind=distillation), None, inputs, inputs, spec.precision)
    return Training(model, Feed(prepared, [], seeds), spec, seeds, distillation), prepared


@pytest.mark.parametrize(
    ("engine", "train"),
    [
        ("loop", {"ema": {"decay": 0.5}}),
        ("loop", {"distillation": "labels", "model": {"prefix": ["class", "distillation"], "head": "distilled"}}),
        ("vmap", {"precision": "bf16"}),
        ("batch_last", {}),
    ],
    ids=["loop", "distillation", "vmap", "batch_last"],
)
def test_mean_corruption_error_is_of_final_weights_in_every_engine(engine, train):
    data = {**DATA, "corrupted": {"corruptions": KINDS, "severities": [2, 5]}}
    both = [training(seed, data=data, **train) for seed in range(2)]
    results = base.train([one for one, _ in both], slot("engine").get(engine))
    plain = base.train([training(seed, **train)[0] for seed in range(2)], slot("engine").get(engine))
    for (one, prepared), result, without in zip(both, results, plain, strict=True):
        normalize = Normalize(prepared.mean, prepared.std)
        errors = {}
        for kind in KINDS:
            of_kind = []
            for severity in (2, 5):
                x_BCHW = normalize(corrupt(prepared.test.x_NCHW, kind, severity, prepared.test.id_N))
                logits_BK = forward_logits(one.model.eval(), x_BCHW, one.spec.precision)[""]
                of_kind.append(float((logits_BK.argmax(1) != prepared.test.y_N).double().mean()))
            errors[f"test/mce_{kind}"] = sum(of_kind) / 2
        errors["test/mce"] = sum(errors.values()) / 3
        own = {name: value for name, value in result.metrics.items() if "mce" in name}
        assert own == pytest.approx(errors, abs=1e-12)
        assert {name: value for name, value in result.metrics.items() if name not in own} == without.metrics
        assert set(one.predictions) == {"val", "test"}


def test_corrupted_images_are_the_same_for_all_trials():
    def splits(seed, images):
        data = {**DATA, "corrupted": {"corruptions": ["fog"], "severities": [3], "images": images}}
        (split,) = prepare(slot("dataset").resolve_choice(data), dict.fromkeys(STREAMS, seed)).test_sets.values()
        return split

    ten, twenty, again = splits(0, 10), splits(0, 20), splits(1, 20)
    assert set(ten.id_N.tolist()) < set(twenty.id_N.tolist()) and torch.equal(twenty.id_N, again.id_N)
    assert len(splits(0, None).id_N) == len(splits(0, 100).id_N) == 30
    assert torch.equal(twenty.at(slice(0, 20)), again.at(slice(0, 20)))


def test_corrupted_sets_without_effect_leave_key_of_trial():
    def resolved(**options):
        return slot("dataset").resolve_choice({**DATA, **options})

    assert "corrupted" not in resolved().hashed()
    every, reverse = ({"corruptions": list(names), "severities": [5, 4, 3, 2, 1]} for names in (NAMES, NAMES[::-1]))
    assert resolved(corrupted=every).hashed() == resolved(corrupted=reverse).hashed() != resolved().hashed()
    assert resolved(corrupted=["snow", "fog"]).hashed() == resolved(corrupted=["fog", "snow"]).hashed()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"type": "digit_scenes", "corrupted": "all"}, "has a class at every pixel"),
        ({**DATA, "num_channels": 2, "corrupted": "all"}, "1 or 3 channels and at least 8 by 8"),
        ({**DATA, "corrupted": ["mist"]}, "corrupted"),
        (
            {**DATA, "corrupted": ["fog", "frost"]},
            "frost is a set of photographs, which vitlab does not have; set 'corr",
        ),
        ({"type": "cifar10", "corrupted_root": "nowhere"}, "there is no folder nowhere; correct 'corrupted_root'"),
        ({**DATA, "corrupted": 3}, "allowed: all, a list of corruptions, or"),
        ({**DATA, "corrupted": ["fog", "fog"]}, "fog is listed twice"),
        ({**DATA, "corrupted": {"severities": [6]}}, "less than or equal to 5|at most 5"),
    ],
)
def test_impossible_corrupted_sets_are_refused(data, message):
    with pytest.raises(UserError, match=message):
        data_info(data)


def test_study_is_judged_by_mean_corruption_error(tmp_path):
    def study(**changes):
        content = {
            "study": "corrupted",
            "base": {
                "data": {**DATA, "corrupted": {"corruptions": KINDS, "severities": [5], "images": 20}},
                "model": {"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2},
                "train": {"steps": 4, "batch_size": 16, "evaluations": 1},
            },
            "design": {"one_at_a_time": {"model.position": ["none"]}},
            "seeds": 2,
            "analysis": {"metric": "test/mce"},
            "run": {"executor": "inline", "tracker": "none"},
            **changes,
        }
        file = tmp_path / "corrupted.yaml"
        file.write_text(yaml.safe_dump(content, sort_keys=False))
        return file

    def problems(**changes):
        with pytest.raises(SpecError) as caught:
            lab.plan_study(study(**changes), out=tmp_path / "out")
        return [problem.message for problem in caught.value.problems]

    assert problems(analysis={"metric": "val/mce"})[0].startswith("no trial reports val/mce.")
    tuned = problems(tune={"knobs": {"train.optimizer.lr": [0.1, 0.01]}})
    assert tuned == [
        "a tuning selects by the analysis' metric on validation, and no trial reports val/mce; set tune.select, such "
        "as val/accuracy"
    ]
    base = {"data": DATA, "model": {"type": "vit", "patch_size": 4}, "train": {"steps": 1}}
    assert problems(base=base)[0].endswith("Write base.data.corrupted: all.")
    base = {"data": DATA, "model": {"type": "vit", "patch_size": 4}, "train": {"steps": 1, "metrics": ["mce"]}}
    assert "write base.data.corrupted: all" in problems(base=base, analysis={"metric": "val/loss"})[0]
    facts = lab.plan_study(study(), out=tmp_path / "out")[1].metrics["mce"]
    assert (facts.goal, facts.unit, facts.chance) == ("min", "share", dict.fromkeys(facts.chance, 5 / 6))
    lab.run(study(), out=tmp_path / "out")
    report = pd.DataFrame(json.loads(next(tmp_path.rglob("report.json")).read_text())["corrupted"])
    report = report.pivot(index="arm", columns="metric", values=["mean", "sd"])
    rows = pd.read_csv(next(tmp_path.rglob("results.csv")))
    errors = rows[[f"test/mce_{kind}" for kind in KINDS]].to_numpy().reshape(2, -1, len(KINDS))  # arm, seed, corruption
    assert [*report.index] == ["baseline", "position=none"]
    for (_, row), of_arm in zip(report.iterrows(), errors, strict=True):
        assert row["mean", "test/mce"] == pytest.approx(of_arm.mean())
        assert [row["sd", f"test/mce_{kind}"] for kind in KINDS] == pytest.approx(of_arm.std(axis=0, ddof=1))
    ratios = (errors[1] / errors[0]).mean(axis=1)  # at the same seed
    relative = report.xs("relative to the baseline", axis=1, level="metric")
    assert np.isnan(relative.loc["baseline", "mean"])
    assert relative.loc["position=none"].tolist() == pytest.approx([ratios.mean(), ratios.std(ddof=1)])
    assert rows["test/mce"].to_numpy() == pytest.approx(rows[[f"test/mce_{kind}" for kind in KINDS]].mean(axis=1))


# -- published folders -------------------------------------------------------------------------------------------------


def write_pictures(folder, labels, each=2):
    """Write pictures of one colour per class and folder, as large as the model's."""
    for label in labels:
        (folder / label).mkdir(parents=True)
        for index in range(each):
            colour = (10 * int(label[1:]), index * 50, len(folder.parts[-1]) * 9 % 255)
            Image.new("RGB", (8, 8), colour).save(folder / label / f"{index}.png")


@pytest.fixture
def published(tmp_path):
    """A training set of five classes, with folders as those of ImageNet-C and ImageNet-R."""
    labels = ["n01", "n02", "n05", "n07", "n20"]
    write_pictures(tmp_path / "imagenet" / "train", labels, each=4)
    write_pictures(tmp_path / "imagenet" / "val", labels)
    for place in ("fog/1", "fog/3", "blur/glass_blur/1", "blur/glass_blur/3"):
        write_pictures(tmp_path / "c" / place, labels, each=3)
    write_pictures(tmp_path / "r", ["n20", "n02"], each=3)
    return {
        "type": "image_folder",
        "root": str(tmp_path / "imagenet"),
        "image_size": 8,
        "corrupted_root": str(tmp_path / "c"),
        "corrupted": {"corruptions": ["fog", "glass_blur"], "severities": [1, 3]},
        "shifted": {"imagenet_r": str(tmp_path / "r")},
    }


def test_published_folders_are_evaluated_among_their_classes(published):
    one, prepared = training(data=published)
    (result,) = base.train([one])
    assert set(prepared.test_sets) == {
        *(f"corrupted/{kind}/{severity}" for kind in ("fog", "glass_blur") for severity in (1, 3)),
        "shifted/imagenet_r",
    }
    normalize = Normalize(prepared.mean, prepared.std)

    def logits_of(split):
        return forward_logits(one.model.eval(), normalize(split.at(slice(0, 99))), "fp32")[""]

    drawings = prepared.test_sets["shifted/imagenet_r"]
    assert drawings.y_N.tolist() == [1, 1, 1, 4, 4, 4], "classes n02 and n20 of the five of the training split"
    colours = drawings.at(slice(2, 4))[:, :, 0, 0].tolist()
    assert colours == [[20, 100, 9], [200, 0, 9]], "the pictures of these classes"
    predicted = torch.tensor([1, 4])[logits_of(drawings)[:, [1, 4]].argmax(1)]
    accuracy = float((predicted == drawings.y_N).double().mean())
    assert result.metrics["test/shifted_accuracy_imagenet_r"] == accuracy == result.metrics["test/shifted_accuracy"]
    fogs = [prepared.test_sets[f"corrupted/fog/{severity}"] for severity in (1, 3)]
    errors = [float((logits_of(fog).argmax(1) != fog.y_N).double().mean()) for fog in fogs]
    assert result.metrics["test/mce_fog"] == pytest.approx(sum(errors) / 2)


def test_published_folders_are_part_of_identity_and_missing_ones_are_refused(published, tmp_path):
    before = data_info(published).content
    plain = {name: published[name] for name in ("type", "root", "image_size")}
    assert before is not None and before.startswith(f"{data_info(plain).identity}+")
    write_pictures(tmp_path / "r", ["n07"])
    assert data_info(published).content != before
    with pytest.raises(UserError, match="no folder snow/1; add it, or leave it out"):
        prepare({**published, "corrupted": {"corruptions": ["snow"]}}, dict.fromkeys(STREAMS, 0))
    write_pictures(tmp_path / "r", ["n99"])
    with pytest.raises(UserError, match="has a class 'n99' that"):
        prepare(published, dict.fromkeys(STREAMS, 0))
    with pytest.raises(UserError, match="there is no folder"):
        data_info({**published, "shifted": {"a": str(tmp_path / "nowhere")}})


def test_folders_of_published_pictures_are_listed_once_per_change(published, tmp_path, monkeypatch):
    before, listed, scandir = data_info(published), [], os.scandir
    monkeypatch.setattr(os, "scandir", lambda folder: listed.append(str(folder)) or scandir(folder))
    assert data_info(published) == before
    assert listed and not any(folder.startswith((str(tmp_path / "r"), str(tmp_path / "c"))) for folder in listed)
    shutil.copy(tmp_path / "r" / "n20" / "0.png", tmp_path / "r" / "n20" / "9.png")
    assert data_info(published).test_sets != before.test_sets


def test_arrays_of_cifar_c_are_read_by_severity(tmp_path):
    g = np.random.default_rng(0)
    x_NHWC, y_N = g.integers(0, 256, (50, 32, 32, 3), np.uint8), np.tile(np.arange(10, dtype=np.uint8), 5)
    np.save(tmp_path / "fog.npy", x_NHWC)
    np.save(tmp_path / "labels.npy", y_N)
    cifar10 = slot("dataset").build({"type": "cifar10", "corrupted_root": str(tmp_path)})
    options = {"corrupted": Corrupted(corruptions=["fog"], severities=[4], images=6), "classes": None}
    info = DataInfo(image=(32, 32), channels=3, classes=10)
    (split,) = sets_of_data.make_test_sets(cifar10, options, None, info).values()
    assert (split.metric, split.kind, split.y_N.tolist()) == ("mce", "fog", split.id_N.tolist())
    assert np.array_equal(split.at(slice(2, 9)).permute(0, 2, 3, 1), x_NHWC[30 + split.id_N[2:]])
    grey = sets_of_data.make_test_sets(cifar10, options, None, replace(info, channels=1, image=(16, 16)))
    assert grey["corrupted/fog/4"].at(slice(0, 2)).shape == (2, 1, 16, 16)
    before = cifar10.info().test_sets
    np.save(tmp_path / "fog.npy", 255 - x_NHWC)
    assert len({before, cifar10.info().test_sets, ""}) == 3, "of equal size"
    np.save(tmp_path / "snow.npy", x_NHWC[:40])
    for kind, message in (("frost", "No such file.*frost.npy"), ("snow", "are not of cifar10: uint8 of shape")):
        with pytest.raises(UserError, match=message):
            cifar10.corrupted(kind, 1)
