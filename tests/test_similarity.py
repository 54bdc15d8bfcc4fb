"""Tests of linear CKA against its formula, image by image in float64, and of the command that compares arms."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from numpy.typing import NDArray
from test_cli import call

import vitlab
from vitlab.data.prepare import data_info, prepare
from vitlab.explain.capture import capture
from vitlab.explain.measures import centred_gram, linear_cka
from vitlab.plan.sources import images_of
from vitlab.registry import slot

Array = NDArray[np.float64]


def hsic(k: Array, l: Array) -> float:  # noqa: E741  # the names of the papers
    """Return the unbiased estimate, arXiv:2010.15327, equation 3."""
    n, one = len(k), np.ones(len(k))
    k, l = (each - np.diag(np.diag(each)) for each in (k, l))  # noqa: E741
    last = (one @ k @ one) * (one @ l @ one) / ((n - 1) * (n - 2)) - 2 / (n - 2) * (one @ k @ l @ one)
    return float(np.trace(k @ l) + last) / (n * (n - 3))


def cka(x: list[Array], y: list[Array]) -> float:
    """Return the CKA of two sets of features over batches, arXiv:2010.15327, equation 2."""
    pairs = [(a @ a.T, b @ b.T) for a, b in zip(x, y, strict=True)]
    cross, own, other = (np.mean([hsic(p[i], p[j]) for p in pairs]) for i, j in ((0, 1), (0, 0), (1, 1)))
    return float(cross / np.sqrt(own * other))


def features(seed: int, width: int, batches: int = 3, count: int = 9) -> list[Array]:
    return list(np.random.default_rng(seed).standard_normal((batches, count, width)) ** 3 + 0.7)


def grams(x: list[Array]) -> torch.Tensor:
    return torch.stack([centred_gram(torch.from_numpy(each)) for each in x])


def test_cka_equals_formula_over_batches() -> None:
    x, y = features(0, 6), features(1, 11)
    mixed = [a @ np.random.default_rng(2).standard_normal((6, 11)) + b for a, b in zip(x, y, strict=True)]
    values = linear_cka([grams(x), grams(y)], [grams(y), grams(mixed)]).numpy()
    expected = np.array([[cka(x, y), cka(x, mixed)], [cka(y, y), cka(y, mixed)]])
    np.testing.assert_allclose(values, expected, rtol=1e-10, atol=1e-12)
    assert expected[1, 0] == pytest.approx(1) and 0.1 < expected[0, 1] < 1


def test_cka_does_not_depend_on_basis_scale_and_offset() -> None:
    x, y = features(0, 6), features(1, 4)
    basis = np.linalg.qr(np.random.default_rng(3).standard_normal((6, 6)))[0]
    turned = [1e3 * (each @ basis + 5) for each in x]
    values = linear_cka([grams(x), grams(turned)], [grams(x), grams(y)]).numpy()
    np.testing.assert_allclose(values[1], values[0], rtol=1e-9)
    assert values[1, 0] == pytest.approx(1, rel=1e-9)


def test_cka_of_independent_features_is_zero_on_average_in_small_batches() -> None:
    values = [
        float(linear_cka([grams(features(2 * i, 40, 8, 6))], [grams(features(2 * i + 1, 40, 8, 6))])) for i in range(60)
    ]
    assert abs(np.mean(values)) < 4 * np.std(values) / np.sqrt(60) and np.std(values) < 0.2


STUDY: dict[str, Any] = {
    "study": "alike",
    "base": {
        "data": {"type": "digits"},
        "model": {"type": "vit", "patch_size": 4, "dim": 8, "depth": 2, "heads": 2},
        "train": {"steps": 3, "batch_size": 16, "evaluations": 1},
    },
    "design": {"arms": {"baseline": {}, "wide": {"model.dim": 16, "model.depth": 3}, "convnet": {"model": "resnet8"}}},
    "seeds": 2,
    "run": {"executor": "inline", "tracker": "none"},
}


def block_features(file: Path, out: Path, arm: str, seed: int) -> list[list[Array]]:
    """Return the tokens after each block in batches of 128 validation images, read by what users call."""
    model, transform = vitlab.load(file, out=out, arm=arm, seed=seed)
    seeds = {"split": 0, "subset": seed}
    images = prepare(slot("dataset").resolve("digits"), seeds).val.at(slice(0, 128))
    tokens = capture(model, transform(images)).tokens_LBTD[1:]
    return [[x_BTD.flatten(1).double().numpy()] for x_BTD in tokens]


@pytest.mark.usefixtures("no_report")
def test_command_compares_arms_and_seeds(tmp_path: Path) -> None:
    file, out, to = tmp_path / "study.yaml", tmp_path / "out", tmp_path / "to"
    file.write_text(yaml.safe_dump(STUDY))
    vitlab.run(file, out=out)
    code, printed, err = call("similarity", file, "--out", out, "--to", to, "--images", 200)
    assert code == 0
    assert "convnet, seed 0 is left out: only a ViT has blocks with attention" in err
    table = pd.read_csv(to / "alike" / "cka.csv")
    pairs = table.groupby(["first", "second"]).size().to_dict()
    assert pairs == {("baseline", "baseline"): 4, ("wide", "wide"): 9, ("baseline", "wide"): 2 * 6}
    assert set(zip(table.first_seed, table.second_seed, strict=True)) == {(0, 1), (1, 0)}
    one, other = block_features(file, out, "baseline", 1), block_features(file, out, "wide", 0)
    rows = table[(table["second"] == "wide") & (table["first_seed"] == 1) & (table["first"] == "baseline")]
    for (i, x), (j, y) in itertools.product(enumerate(one, 1), enumerate(other, 1)):
        value = rows[(rows.first_block == i) & (rows.second_block == j)].cka.item()
        assert value == pytest.approx(cka(x, y), rel=1e-4)
    last = table[(table["first"] == "baseline") & (table["second"] == "wide")]
    last = last[(last.first_block == 2) & (last.second_block == 3)].cka
    assert f"baseline and wide: {last.mean():.2f} ({last.min():.2f} to {last.max():.2f}, 2 pairs of seeds)" in printed
    assert [path.name for path in sorted((to / "alike").iterdir())] == ["cka baseline, wide.png", "cka.csv"]
    code, _, err = call("similarity", file, "--out", out, "--to", to, "--arm", "convnet", "--arm", "wide")
    assert code == 2 and "convnet, seed 0: only a ViT has blocks with attention; this is a ResNet" in err
    code, _, err = call("similarity", file, "--out", out, "--arm", "wider")
    assert code == 2 and "no trial of arm 'wider'" in err


@pytest.mark.usefixtures("no_report")
def test_models_without_weights_or_of_other_images_are_refused(tmp_path: Path) -> None:
    file, out = tmp_path / "study.yaml", tmp_path / "out"
    arms = {"arms": {"baseline": {}, "fewer": {"data.validation": 0.3}, "redrawn": {"data.seed": 1}}}
    data = {"type": "synthetic", "image_size": [8, 8], "train_images": 64}
    study = {**STUDY, "base": {**STUDY["base"], "data": data}, "design": arms, "seeds": 1}
    file.write_text(yaml.safe_dump(study))
    vitlab.run(file, out=out)
    for arm in ("fewer", "redrawn"):
        code, _, err = call("similarity", file, "--out", out, "--arm", "baseline", "--arm", arm)
        assert code == 2 and f"{arm}, seed 0 has other validation images than baseline, seed 0" in err
    run = {**STUDY["run"], "keep": "none"}
    file.write_text(yaml.safe_dump({**study, "study": "kept", "run": run}))
    vitlab.run(file, out=tmp_path / "none")
    code, _, err = call("similarity", file, "--out", tmp_path / "none")
    assert code == 2 and "baseline, seed 0 is left out: there is no " in err
    assert "study 'kept' has no two trained ViTs to compare; run it with run.keep: last" in err


def test_identity_of_images_has_the_options_that_draw_them() -> None:
    def identity(**data: Any) -> tuple[str | None, str]:
        resolved = slot("dataset").resolve({"type": "synthetic", **data})
        return images_of(resolved, data_info(resolved).content)

    assert identity() == identity(size=[32, 32], channels=3, fraction=0.5, augment=["flip"])
    assert len({identity(), identity(seed=1), identity(contrast=0.3), identity(train_images=400)}) == 4
    assert identity(type="digits") == identity(type="digits", validation=0.3) != identity()
