"""Tests of metrics of features against scikit-learn and the papers' formulas, and of attentive probes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from vitlab.data.prepare import Feed, data_info, prepare
from vitlab.engines.base import train
from vitlab.errors import WeightsError
from vitlab.models.contract import Model
from vitlab.planning.resolve import Resolver
from vitlab.registry import slot
from vitlab.spec import STREAMS, TrainSpec
from vitlab.training.features import evaluate_features
from vitlab.training.loop import Training
from vitlab.training.metrics.features import Features, nearest_classes

SEEDS = dict.fromkeys(STREAMS, 0)
DATA: dict[str, Any] = {"type": "digits", "fraction": 0.2}
VIT: dict[str, Any] = {"type": "vit", "patch_size": 4, "dim": 16, "depth": 1, "heads": 2}


def features(images: int, width: int, classes: int, seed: int) -> Features:
    generator = torch.Generator().manual_seed(seed)
    x_ND = torch.randn(images, width, generator=generator, dtype=torch.float64) + 0.3
    return Features(x_ND, torch.randint(classes, (images,), generator=generator))


@pytest.mark.parametrize("k", [1, 5, 20, 400])
def test_uniform_votes_equal_scikit_learn(k: int) -> None:
    images, neighbours = features(300, 12, 4, 0), features(350, 12, 4, 1)
    reference = KNeighborsClassifier(min(k, 350), metric="cosine", algorithm="brute")
    reference.fit(neighbours.x_ND.numpy(), neighbours.y_N.numpy())
    expected = reference.predict(images.x_ND.numpy())
    assert nearest_classes(images.x_ND, neighbours, k, None).tolist() == expected.tolist()
    knn = slot("metric").build({"type": "knn", "k": k, "temperature": None})
    assert knn.of_features(images, lambda: neighbours) == np.mean(expected == images.y_N.numpy())
    assert knn.name == f"knn{k}_uniform" and slot("metric").build("knn").name == "knn20"


@pytest.mark.parametrize("temperature", [0.07, 1.0])
def test_weighted_votes_equal_scikit_learn_with_weights(temperature: float) -> None:
    images, neighbours = features(300, 12, 4, 2), features(350, 12, 4, 3)
    reference = KNeighborsClassifier(
        20, metric="cosine", algorithm="brute", weights=lambda distance: np.exp((1 - distance) / temperature)
    )
    reference.fit(neighbours.x_ND.numpy(), neighbours.y_N.numpy())
    expected = reference.predict(images.x_ND.numpy())
    assert nearest_classes(images.x_ND, neighbours, 20, temperature).tolist() == expected.tolist()


def test_temperatures_have_different_names() -> None:
    warm = [{"type": "knn", "temperature": temperature} for temperature in (0.05, 0.1, 1e-5)]
    assert [slot("metric").build(one).name for one in warm] == ["knn20_t0_05", "knn20_t0_1", "knn20_t0_00001"]
    tree = {"data": DATA, "model": VIT, "train": {"steps": 1, "metrics": ["knn", *warm]}}
    assert len(Resolver(data_info).resolve_trial(tree).spec.train.metrics) == 4


def test_effective_rank_is_rankme() -> None:
    rank = slot("metric").build("effective_rank")
    images = features(60, 12, 3, 4)
    sigma = np.linalg.svd(images.x_ND.numpy(), compute_uv=False)
    share = sigma / sigma.sum() + 1e-7
    assert rank.of_features(images, pytest.fail) == pytest.approx(np.exp(-(share * np.log(share)).sum()), rel=1e-12)
    rotation, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(12, 12)))
    five = torch.from_numpy(np.repeat(rotation[:5], 4, axis=0))
    assert rank.of_features(Features(five, torch.zeros(20).long()), pytest.fail) == pytest.approx(5, rel=1e-4)
    line = Features(torch.ones(20, 1).double() * torch.arange(12.0).double(), torch.zeros(20).long())
    assert rank.of_features(line, pytest.fail) == pytest.approx(1, abs=1e-4)


def built(seed: int = 0, **options: Any) -> Model:
    model: Model = slot("model").build({**VIT, **options}, data_info(DATA))
    model.initialise(seed)
    return model.double()


@pytest.mark.parametrize("engine", ["loop", "vmap", "batch_last"])
def test_features_are_those_of_the_current_weights(engine: str) -> None:
    spec = TrainSpec.model_validate(
        {
            "steps": 4,
            "batch_size": 32,
            "evaluations": 2,
            "precision": "fp64",
            "ema": {"decay": 0.5},
            "metrics": [{"type": "knn", "k": 3, "temperature": None}, "effective_rank"],
        }
    )
    prepared = prepare(DATA, SEEDS)
    trainings = [
        Training(built(seed), Feed(prepared, [], SEEDS, dtype=torch.float64), spec, SEEDS) for seed in range(2)
    ]
    for training, result in zip(trainings, train(trainings, slot("engine").get(engine)), strict=True):
        assert result is not None
        model = training.model.eval()
        feed = Feed(prepared, [], SEEDS, dtype=torch.float64)
        with torch.no_grad():
            x, y = zip(
                *[(model.forward_features(b.x_BCHW)[:, 0], b.y_B) for b in feed.evaluation("train", 512)], strict=True
            )
            (test,) = feed.evaluation("test", 512)
            images = model.forward_features(test.x_BCHW)[:, 0]
        reference = KNeighborsClassifier(3, metric="cosine", algorithm="brute").fit(torch.cat(x).numpy(), torch.cat(y))
        assert result.metrics["test/knn3_uniform"] == reference.score(images.numpy(), test.y_B.numpy())
        sigma = np.linalg.svd(images.numpy(), compute_uv=False)
        share = sigma / sigma.sum() + 1e-7
        assert result.metrics["test/effective_rank"] == pytest.approx(np.exp(-(share * np.log(share)).sum()), rel=1e-9)
        assert {"val/knn3_uniform", "val/effective_rank", "test/accuracy"} <= set(result.metrics)


def test_model_without_linear_classifier_is_refused() -> None:
    prepared = prepare(DATA, SEEDS)
    model: Model = slot("model").build("prior", prepared.info)
    with pytest.raises(WeightsError, match="metrics of features need a head whose last layer is linear"):
        evaluate_features(model, Feed(prepared, [], SEEDS), "val", "fp32", {})


def test_feature_metrics_apply_to_objectives_without_labels() -> None:
    tree = {"data": DATA, "model": VIT, "train": {"steps": 1, "metrics": ["knn"]}}
    masked = Resolver(data_info).resolve_trial(
        {**tree, "train": {**tree["train"], "objective": {"type": "mae", "mask_ratio": 0.5}}}
    )
    assert [choice.type for choice in masked.spec.train.metrics] == ["knn"] and not masked.incompatibility


def test_attentive_probe_trains_the_query_alone() -> None:
    """``pool: map`` under ``freeze: body`` is an attentive probe: the body's weights and its patch tokens are fixed."""
    from vitlab.spec.trial import InitFrom
    from vitlab.weights.transfer import load_and_freeze_weights

    model = built(head={"type": "linear", "pool": "map"}, prefix=[])
    source = built(1, head={"type": "linear", "pool": "gap"}, prefix=[])
    how = InitFrom.model_validate({"trial": {"data": "digits"}, "freeze": "body"})
    load_and_freeze_weights(model, source, how)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    spec = TrainSpec.model_validate({"steps": 3, "batch_size": 32, "evaluations": 1, "precision": "fp64"})
    feed = Feed(prepare(DATA, SEEDS), [], SEEDS, dtype=torch.float64)
    train([Training(model, feed, spec, SEEDS)])
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) is not name.startswith("head."), name
        assert name.startswith("head.") or torch.equal(value, source.state_dict()[name]), name


def test_first_blocks_are_frozen_with_all_before_them() -> None:
    from vitlab.errors import WeightsError
    from vitlab.spec.trial import InitFrom
    from vitlab.weights.transfer import load_and_freeze_weights

    def trained(freeze: int) -> set[str]:
        model = built(depth=2)
        how = InitFrom.model_validate({"trial": {"data": "digits"}, "freeze": freeze})
        load_and_freeze_weights(model, built(1, depth=2), how)
        return {name for name, parameter in model.named_parameters() if parameter.requires_grad}

    names = {name for name, _ in built(depth=2).named_parameters()}
    assert trained(1) == {name for name in names if name.startswith(("blocks.1.", "norm.", "head."))}
    assert trained(2) == {"head.fc.weight", "head.fc.bias"}
    with pytest.raises(WeightsError, match=r"init_from\.freeze is 3, and this model has fewer blocks"):
        trained(3)
