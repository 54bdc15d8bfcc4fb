"""Tests of heads in closed form against scikit-learn's ridge regression, and of few-shot subsets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from job_helpers import run_spec
from pydantic import ValidationError
from sklearn.linear_model import Ridge
from torch import Tensor, nn

from vitlab import noise
from vitlab.data.draws import limit_per_class, select_stratified_share
from vitlab.data.prepare import Feed, data_info, prepare
from vitlab.driver.smoke import run_smoke_test
from vitlab.errors import DataError, WeightsError
from vitlab.models.contract import Model
from vitlab.models.vit import ViT
from vitlab.registry import slot
from vitlab.runner.job import Settings
from vitlab.runner.models import load_model
from vitlab.spec import STREAMS
from vitlab.spec.design import apply_changes
from vitlab.spec.trial import InitFrom
from vitlab.store.folders import TrialFolder
from vitlab.store.result import TrialResult
from vitlab.training.features import MIN_STD, fit_head, solve_ridge

SEEDS = dict.fromkeys(STREAMS, 0)
TARGET: dict[str, Any] = {"type": "digits", "classes": [7, 8, 9], "per_class": 5}
VIT: dict[str, Any] = {"type": "vit", "patch_size": 4, "dim": 16, "depth": 1, "heads": 2}
RESNET: dict[str, Any] = {"type": "resnet8", "width_factor": 0.5}
TRAIN: dict[str, Any] = {
    "batch_size": 32,
    "evaluations": 1,
    "optimizer": {"type": "adamw", "lr": 1e-3},
    "schedule": "constant",
    "loss": "cross_entropy",
}


def ridge(x_ND: Tensor, y_N: Tensor, classes: int, l2: float) -> tuple[Ridge, np.ndarray, np.ndarray]:
    """Fit scikit-learn's ridge regression on standardised features; return it with mean and deviation."""
    x = x_ND.double().numpy()
    mean, std = x.mean(0), x.std(0) + MIN_STD
    targets = np.where(np.arange(classes) == y_N.numpy()[:, None], 1.0, -1.0)
    return Ridge(alpha=l2, solver="svd").fit((x - mean) / std, targets), mean, std


@given(images=st.integers(2, 40), features=st.integers(1, 30), classes=st.integers(2, 6), exponent=st.integers(-6, 6))
@settings(max_examples=40)
def test_linear_probe_is_ridge_regression(images: int, features: int, classes: int, exponent: int) -> None:
    generator = torch.Generator().manual_seed(images * 31 + features)
    x_ND = torch.randn(images, features, generator=generator, dtype=torch.float64) * 3 + 5
    x_ND[:, 0] = 7.0  # a constant feature must not be divided by zero
    y_N = torch.randint(0, classes, (images,), generator=generator)
    weight_KD, bias_K = solve_ridge(x_ND, y_N, classes, 2.0**exponent)
    classifier, mean, std = ridge(x_ND, y_N, classes, 2.0**exponent)
    wanted_KD = classifier.coef_ / std
    # The reference divides the rounding error of the constant feature by almost zero.
    assert weight_KD[:, 0].abs().max() < 1e-9 and np.abs(wanted_KD[:, 0]).max() < 1e-6
    wanted_KD[:, 0] = 0
    np.testing.assert_allclose(weight_KD.numpy(), wanted_KD, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(bias_K.numpy(), classifier.intercept_ - wanted_KD @ mean, rtol=1e-7, atol=1e-8)


def features(model: Model, x_BCHW: Tensor) -> Tensor:
    """Return the input of the classifier, without the hooks of the probe."""
    if not isinstance(model, ViT):
        return nn.Sequential(*list(model.children())[:-1], nn.Flatten())(x_BCHW)
    x_BTD = model.forward_features(x_BCHW)
    return x_BTD[:, 0] if model.head.kind == "cls" else x_BTD[:, 1:].mean(1)


@pytest.mark.parametrize("choice", [VIT, {**VIT, "head": {"type": "linear", "pool": "gap"}}, RESNET])
@torch.no_grad()
def test_model_head_equals_head_fitted_on_features(choice: dict[str, Any]) -> None:
    prepared = prepare(TARGET, SEEDS)
    assert len(prepared.train) == 15
    feed = Feed(prepared, [], SEEDS, dtype=torch.float64)
    model: Model = slot("model").build(choice, prepared.info)
    model.initialise(0)
    model.double().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fit_head(model, feed, 0.5, "fp64")
    assert model.training
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert len(changed) == 2 and all("fc." in name for name in changed), "running statistics of norms included"
    model.eval()
    (train,) = feed.evaluation("train", 512)
    val = next(feed.evaluation("val", 64))
    classifier, mean, std = ridge(features(model, train.x_BCHW), train.y_B, 3, 0.5)
    wanted_BK = classifier.predict((features(model, val.x_BCHW).numpy() - mean) / std)
    np.testing.assert_allclose(model.logits_by_head(model(val.x_BCHW))[""].numpy(), wanted_BK, rtol=1e-6, atol=1e-8)


@torch.no_grad()
def test_both_classifiers_of_distilled_head_are_fitted() -> None:
    prepared = prepare(TARGET, SEEDS)
    feed = Feed(prepared, [], SEEDS, dtype=torch.float64)
    choice = {**VIT, "prefix": ["class", "distillation"], "head": "distilled"}
    model: Model = slot("model").build(choice, prepared.info)
    model.initialise(0)
    model.double()
    fit_head(model, feed, 1.0, "fp64")
    model.eval()
    (train,) = feed.evaluation("train", 512)
    x_BTD = model.forward_features(train.x_BCHW)  # type: ignore[operator]
    views = model.logits_by_head(model(train.x_BCHW))
    for token, view in enumerate(("cls", "dist")):
        classifier, mean, std = ridge(x_BTD[:, token], train.y_B, 3, 1.0)
        expected = classifier.predict((x_BTD[:, token].numpy() - mean) / std)
        np.testing.assert_allclose(views[view].numpy(), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("data", "model", "message"),
    [
        (TARGET, {**VIT, "head": "mlp"}, "head.pre_logits.bias"),
        (TARGET, {**VIT, "head": {"type": "linear", "pool": "map"}}, "head.attn_pool"),
        (TARGET, {"type": "prior"}, "bias"),
        (
            {"type": "digit_scenes", "image_size": 16, "digit_size": 8, "train_images": 40, "test_images": 4},
            {**VIT, "head": "segmentation"},
            "head.fc.bias",
        ),
    ],
)
def test_non_linear_head_is_refused(data: dict[str, Any], model: dict[str, Any], message: str) -> None:
    data = {**data, "digit_size": [8, 8]} if "digit_size" in data else data
    prepared = prepare(data, SEEDS)
    built: Model = slot("model").build(model, prepared.info)
    with pytest.raises(WeightsError, match=f"fitted needs a head of linear layers.*{message}.*head: new"):
        fit_head(built, Feed(prepared, [], SEEDS), 1.0, "fp32")


# -- trials -----------------------------------------------------------------------------------------------------------


def ran(folder: TrialFolder, key: str, spec: dict[str, Any], needs: dict[str, str] = {}) -> TrialResult:
    return run_spec(folder, key, spec, SEEDS, Settings(deterministic=False), needs)


@pytest.mark.parametrize("model", [VIT, RESNET], ids=["vit", "resnet8"])
def test_body_is_trained_probed_and_tuned_on_different_classes(model: dict[str, Any], tmp_path: Path) -> None:
    source_spec = {"data": {"type": "digits", "classes": [0, 1, 2, 3]}, "model": model, "train": {**TRAIN, "steps": 20}}
    source = TrialFolder(tmp_path / "before" / "code")
    ran(source, "before", source_spec)
    body, _ = load_model(source)
    spec = {"data": TARGET, "model": model, "train": {**TRAIN, "steps": 0}}
    how = {"trial": source_spec, "head": "fitted", "l2": 2.0}
    probed = ran(
        TrialFolder(tmp_path / "probe" / "code"), "probe", {**spec, "init_from": how}, {"init_from": "before/code"}
    )

    feed = Feed(prepare(TARGET, SEEDS), [], SEEDS)
    with torch.no_grad():
        (train,) = feed.evaluation("train", 512)
        classifier, mean, std = ridge(features(body, train.x_BCHW), train.y_B, 3, 2.0)
        right = []
        for batch in feed.evaluation("test", 512):
            scores = classifier.predict((features(body, batch.x_BCHW).double().numpy() - mean) / std)
            right += list(scores.argmax(1) == batch.y_B.numpy())
    assert probed.outcome.metrics["test/accuracy"] == pytest.approx(np.mean(right), abs=1.5 / len(right))
    assert np.mean(right) > 0.5, "a third would be right by chance"

    tuned_spec = {**spec, "train": {**TRAIN, "steps": 3}, "init_from": {"trial": source_spec, "head": "new"}}
    tuned = TrialFolder(tmp_path / "tuned" / "code")
    result = ran(tuned, "tuned", tuned_spec, {"init_from": "before/code"})
    model_after, _ = load_model(tuned)
    old, new = body.state_dict(), model_after.state_dict()
    heads = {name for name in new if "fc." in name and "mlp" not in name}
    assert all(new[name].shape == old[name].shape for name in set(new) - heads)
    assert all(len(new[name]) == 3 and len(old[name]) == 4 for name in heads)
    assert result.outcome.steps == 3


def test_fitted_head_is_recorded() -> None:
    base = {"trial": {"data": "digits"}}
    assert InitFrom.model_validate({**base, "head": "fitted"}).l2 == 1.0
    assert InitFrom.model_validate({**base, "head": "fitted", "l2": 0.25}).l2 == 0.25
    plain = InitFrom.model_validate(base).model_dump(mode="json", exclude_none=True)
    assert "l2" not in plain, "so that the keys of other trials do not know of it"
    with pytest.raises(ValidationError, match="l2 needs head: fitted"):
        InitFrom.model_validate({**base, "l2": 1.0})
    with pytest.raises(ValidationError, match="greater than 0"):
        InitFrom.model_validate({**base, "head": "fitted", "l2": 0})


# -- a few images of each class ---------------------------------------------------------------------------------------


@given(
    counts=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    few=st.integers(1, 8),
    more=st.integers(0, 8),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=40)
def test_few_shot_subsets_are_balanced_and_nested(counts: list[int], few: int, more: int, seed: int) -> None:
    y_N = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    id_N, key = torch.arange(len(y_N)) * 7, noise.key(seed, "subset")
    small, large = limit_per_class(y_N, id_N, few, key), limit_per_class(y_N, id_N, few + more, key)
    assert torch.equal(small, small.sort().values)
    assert torch.bincount(y_N[small], minlength=len(counts)).tolist() == [min(few, n) for n in counts]
    assert set(small.tolist()) <= set(large.tolist())
    halved = select_stratified_share(y_N, id_N, 0.5, key)
    inside = [min(few, max(int(0.5 * n + 0.5), 1)) for n in counts]
    again = halved[limit_per_class(y_N[halved], id_N[halved], few, key)]
    assert torch.bincount(y_N[again], minlength=len(counts)).tolist() == inside
    assert set(again.tolist()) <= set(small.tolist()), "the front of one order"


def test_few_shot_images_are_drawn_by_fraction_stream() -> None:
    def draw(**seeds: int) -> tuple[set[int], set[int]]:
        prepared = prepare({"type": "digits", "per_class": 5}, {"split": 0, "subset": 0, **seeds})
        assert torch.bincount(prepared.train.y_N).tolist() == [5] * 10
        return set(prepared.train.id_N.tolist()), set(prepared.val.id_N.tolist())

    (train, val), (again, _), (other, same) = draw(), draw(), draw(subset=1)
    assert train == again != other and val == same and not train & val


def test_few_shot_segmentation_is_refused() -> None:
    with pytest.raises(DataError, match="'per_class' selects images by class"):
        data_info({"type": "digit_scenes", "per_class": 5})


# -- a study ----------------------------------------------------------------------------------------------------------


def test_smoke_run_shortens_prerequisites_too(tmp_path: Path) -> None:
    before = {"data": {"type": "digits", "classes": [0, 1, 2]}, "model": VIT, "train": {**TRAIN, "epochs": 900}}
    content = {
        "study": "probe",
        "question": "Does a short run of this reach everything?",
        "base": {
            "data": TARGET,
            "model": VIT,
            "init_from": {"trial": before},
            "train": {**TRAIN, "steps": 900},
        },
        "design": {
            "arms": {
                "tuned": {},
                "probed": {"init_from.head": "fitted", "train.steps": 0},
                "masked": {"init_from.trial.train.objective": {"type": "mae", "dim": 8}},
                "masked more": {"init_from.trial.train.objective": {"type": "mae", "dim": 16}},
            }
        },
        "run": {"executor": "inline"},
    }
    (tmp_path / "probe.yaml").write_text(yaml.safe_dump(content))
    assert run_smoke_test(tmp_path / "probe.yaml", out=tmp_path / "runs") == 3, "the last two have the same components"
    folders = [TrialFolder(path.parent) for path in (tmp_path / "runs").glob("trials/*/*/result.json")]
    results = [folder.result() for folder in folders]
    steps = [result.outcome.steps for result in results if result is not None]
    assert sorted(steps) == [0, 2, 2, 2, 2]


def test_length_overrides_length_in_prerequisite() -> None:
    base = {"train": {"epochs": 3}, "init_from": {"trial": {"train": {"images": 900}}}}
    tree = apply_changes(base, {"init_from.trial.train.steps": 0, "train.steps": 2}, base)
    assert tree == {"train": {"steps": 2}, "init_from": {"trial": {"train": {"steps": 0}}}}
    assert apply_changes(base, {}, base) == base
