"""Tests of losses and metrics against formulas in float64, timm and scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor

from vitlab.data.prepare import Feed, prepare
from vitlab.data.torchvision_import import torchvision
from vitlab.engines import engine_or_fallback
from vitlab.engines.base import train
from vitlab.errors import DataError
from vitlab.geometry import DataInfo
from vitlab.registry import slot
from vitlab.spec import STREAMS, TrainSpec
from vitlab.testing.training import check_loss
from vitlab.training.evaluation import MetricAccumulator
from vitlab.training.loop import Training
from vitlab.training.metrics import build_metrics
from vitlab.training.metrics.predictions import ExpectedCalibrationError, MeanIoU

SEEDS = dict.fromkeys(STREAMS, 0)

torchvision()  # timm imports torchvision, whose import may need a workaround
from timm.loss import BinaryCrossEntropy, LabelSmoothingCrossEntropy  # noqa: E402
from torchvision.ops import sigmoid_focal_loss  # noqa: E402


def batch(b: int = 32, k: int = 7, *more: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    return torch.randn(b, k, *more, generator=g) * 3, torch.randint(0, k, (b, *more), generator=g)


def loss(choice: str | dict[str, Any], logits: Tensor, target: Tensor) -> float:
    value = slot("loss").build(choice)({"": logits}, target)
    assert value.parts == {}
    return float(value.total)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_cross_entropy_equals_formula_and_timm(smoothing: float) -> None:
    logits, target = batch()
    z, k = logits.double().numpy(), logits.shape[1]
    log_p = z - np.log(np.exp(z).sum(1, keepdims=True))
    expected = np.full(z.shape, smoothing / k)
    expected[np.arange(len(z)), target] += 1 - smoothing
    choice = {"type": "cross_entropy", "label_smoothing": smoothing}
    assert loss(choice, logits, target) == pytest.approx(-(expected * log_p).sum(1).mean(), rel=1e-6)
    assert loss(choice, logits.double(), target) == pytest.approx(-(expected * log_p).sum(1).mean(), rel=1e-13)
    assert loss(choice, logits, target) == pytest.approx(
        float(LabelSmoothingCrossEntropy(smoothing)(logits, target)), rel=1e-6
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_of_probabilities_applies_softmax_twice(smoothing: float) -> None:
    logits, target = batch()
    network_that_ends_in_a_softmax = torch.nn.Softmax(dim=-1)
    expected = torch.nn.CrossEntropyLoss(label_smoothing=smoothing)(
        network_that_ends_in_a_softmax(logits.double()), target
    )
    choice = {"type": "cross_entropy", "label_smoothing": smoothing, "reads": "probabilities"}
    assert loss(choice, logits.double(), target) == pytest.approx(float(expected), rel=1e-13)
    certain = 1e3 * torch.nn.functional.one_hot(target, 7).double()
    assert loss({"type": "cross_entropy", "reads": "probabilities"}, certain, target) == pytest.approx(
        np.log(np.e + 6) - 1, rel=1e-12
    )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_weights_multiply_terms_and_divide_by_the_number_of_labels(smoothing: float) -> None:
    logits, target = batch()
    weights = [0.25, 3.0, 1.0, 0.0, 1.7, 2.0, 0.1]
    share = torch.eye(7)[target].double()
    mixed = 0.7 * share + 0.3 * share.roll(1, 0)
    choice = {"type": "cross_entropy", "class_weights": weights, "label_smoothing": smoothing}
    log_p = logits.double().log_softmax(1)
    for given, q in ((target, share), (mixed, mixed)):
        q = (1 - smoothing) * q + smoothing / 7
        expected = -(q * torch.tensor(weights).double() * log_p).sum() / 32
        assert loss(choice, logits.double(), given) == pytest.approx(float(expected), rel=1e-6)
    if not smoothing:
        plain = torch.nn.functional.cross_entropy(logits.double(), target, reduction="none")
        by_label = float((torch.tensor(weights)[target] * plain).mean())
        assert loss(choice, logits.double(), target) == pytest.approx(by_label, rel=1e-6)
    check_loss(slot("loss").resolve_choice(choice))  # also in parts, with pixels and shares
    assert "class_weights" not in slot("loss").resolve_choice("cross_entropy").hashed()


def test_balanced_weights_equal_scikit_learn() -> None:
    y = np.repeat([0, 1, 2], [416, 42, 43])
    built = slot("loss").build({"type": "cross_entropy", "class_weights": "balanced"})
    built.set_class_counts(torch.bincount(torch.from_numpy(y)))
    assert built.class_weights == pytest.approx(compute_class_weight("balanced", classes=np.arange(3), y=y), rel=1e-15)
    absent = slot("loss").build({"type": "cross_entropy", "class_weights": "balanced"})
    with pytest.raises(DataError, match="class 1, 3 has none; write a number for each class"):
        absent.set_class_counts(torch.tensor([5, 0, 2, 0]))


@pytest.mark.parametrize("engine", ["loop", "batch_last"])
def test_balanced_training_is_one_with_the_numbers(engine: str) -> None:
    """The counts are of the images that the trial trains on, without validation and under fraction."""
    prepared = prepare({"type": "digits", "classes": [3, 8, 1], "fraction": 0.5}, SEEDS)
    counts = [prepared.train.y_N.tolist().count(label) for label in range(3)]
    weights = [sum(counts) / (3 * count) for count in counts]
    assert len(set(weights)) > 1
    ends = []
    for class_weights in ("balanced", weights, None):
        spec = TrainSpec.model_validate(
            {"steps": 3, "loss": {"type": "cross_entropy", "class_weights": class_weights}, "evaluations": 1}
        )
        feed = Feed(prepared, [], SEEDS)
        torch.manual_seed(0)
        model = slot("model").build({"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2}, prepared.info)
        training = Training(model, feed, spec, SEEDS)
        (outcome,) = train([training], slot("engine").get(engine))
        assert outcome is not None
        ends.append(outcome.metrics["train/loss"])
    assert ends[0] == ends[1] != ends[2]


@pytest.mark.parametrize("engine", ["vmap", "batch_last"])
def test_balanced_trainings_of_other_counts_are_not_stacked(engine: str) -> None:
    def training(fraction: float, class_weights: str | None) -> Training:
        prepared = prepare({"type": "digits", "classes": [3, 8, 1], "fraction": fraction}, SEEDS)
        spec = TrainSpec.model_validate(
            {
                "steps": 3,
                "batch_size": 8,
                "loss": {"type": "cross_entropy", "class_weights": class_weights},
                "evaluations": 1,
            }
        )
        torch.manual_seed(0)
        model = slot("model").build({"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2}, prepared.info)
        return Training(model, Feed(prepared, [], SEEDS), spec, SEEDS)

    outcomes = []
    for name in (engine, "loop"):
        trainings = [training(fraction, "balanced") for fraction in (0.5, 0.2)]
        assert len({each.objective.criterion.class_weights for each in trainings}) == 2  # type: ignore[attr-defined]
        results = train(trainings, engine_or_fallback(name, trainings[0])[1])
        outcomes.append([each.metrics["train/loss"] for each in results if each is not None])
    assert outcomes[0] == pytest.approx(outcomes[1], rel=1e-5)
    assert slot("engine").get(engine).incompatibility(training(0.5, None)) is None  # type: ignore[attr-defined]


def test_vmap_and_compiled_graph_take_class_weights() -> None:
    logits, target = batch(6, 3)
    built = slot("loss").build({"type": "cross_entropy", "class_weights": [1, 2, 0.5]})

    def total(logits: Tensor, target: Tensor) -> Tensor:
        return built({"": logits}, target).total

    together = torch.func.vmap(torch.func.grad(total))(logits.view(2, 3, 3), target.view(2, 3))
    for half, actual in enumerate(together):
        expected = torch.func.grad(total)(logits.view(2, 3, 3)[half], target.view(2, 3)[half])
        torch.testing.assert_close(actual, expected)
    compiled = torch.compile(total, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(logits, target), total(logits, target))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_bce_equals_formula_and_timm(smoothing: float) -> None:
    logits, target = batch()
    z, k = logits.double().numpy(), logits.shape[1]
    expected = np.full(z.shape, smoothing / k)
    expected[np.arange(len(z)), target] += 1 - smoothing
    formula = (expected * np.logaddexp(0, -z) + (1 - expected) * np.logaddexp(0, z)).mean()
    choice = {"type": "bce", "label_smoothing": smoothing}
    assert loss(choice, logits.double(), target) == pytest.approx(formula, rel=1e-13)
    assert loss(choice, logits, target) == pytest.approx(
        float(BinaryCrossEntropy(smoothing=smoothing)(logits, target)), rel=1e-6
    )


def test_class_weights_of_bce_equal_pos_weight_of_torch() -> None:
    logits, _ = batch()
    has_NK = (torch.rand(logits.shape, generator=torch.Generator().manual_seed(0)) < 0.3).float()
    weights = [1.0, 0.5, 2.0, 4.0, 1.5, 3.0, 0.0]
    expected = torch.nn.BCEWithLogitsLoss(pos_weight=torch.tensor(weights))(logits, has_NK)
    assert loss({"type": "bce", "class_weights": weights}, logits, has_NK) == pytest.approx(float(expected), rel=1e-6)


def test_bce_with_threshold_takes_mixed_classes_for_present_as_timm_does() -> None:
    logits, _ = batch()
    first, second = torch.arange(32) % 7, torch.arange(32) % 5
    share = 0.7 * torch.nn.functional.one_hot(first, 7) + 0.3 * torch.nn.functional.one_hot(second, 7)
    for threshold in (0.0, 0.5):
        expected = float(BinaryCrossEntropy(smoothing=0, target_threshold=threshold)(logits, share))
        assert loss({"type": "bce", "threshold": threshold}, logits, share) == pytest.approx(expected, rel=1e-6)
    assert "threshold" not in slot("loss").resolve_choice("bce").hashed()


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0, 3.5])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_focal_equals_formula_with_gradient(gamma: float, smoothing: float) -> None:
    logits, target = batch()
    other = (target + 1) % 7
    choice = {"type": "focal", "gamma": gamma, "label_smoothing": smoothing}
    for shares in (np.eye(7)[target], 0.7 * np.eye(7)[target] + 0.3 * np.eye(7)[other]):
        q = (1 - smoothing) * shares + smoothing / 7
        z = logits.double().numpy()
        p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
        given = target if (shares == 1).any() else torch.from_numpy(shares)
        leaf = logits.double().requires_grad_()
        value = slot("loss").build(choice)({"": leaf}, given).total
        value.backward()
        assert float(value.detach()) == pytest.approx(-(q * (1 - p) ** gamma * np.log(p)).sum() / 32, rel=1e-12)
        # df/dp of each class, through dp_i/dz_j = p_i (1 if i = j else 0) - p_i p_j
        slope = -q * ((1 - p) ** gamma / p - gamma * (1 - p) ** (gamma - 1) * np.log(p))
        expected = p * slope - p * (p * slope).sum(1, keepdims=True)
        np.testing.assert_allclose(leaf.grad, expected / 32, rtol=1e-9, atol=1e-15)
        if not gamma:
            cross_entropy = {"type": "cross_entropy", "label_smoothing": smoothing}
            assert float(value.detach()) == pytest.approx(loss(cross_entropy, leaf.detach(), given), rel=1e-14)


def test_focal_of_two_classes_equals_torchvision() -> None:
    logits, target = batch(64, 2)
    binary = (
        logits[:, 1].double() - logits[:, 0].double()
    )  # the softmax of two classes is the sigmoid of their difference
    for gamma in (0.0, 2.0, 5.0):
        expected = sigmoid_focal_loss(binary, target.double(), alpha=-1, gamma=gamma, reduction="mean")
        actual = loss({"type": "focal", "gamma": gamma}, logits.double(), target)
        assert actual == pytest.approx(float(expected), rel=1e-12)


def test_focal_of_certain_images_has_a_finite_gradient() -> None:
    leaf = torch.tensor([[200.0, 0.0, 0.0], [0.0, 200.0, 0.0]], requires_grad=True)
    slot("loss").build({"type": "focal", "gamma": 0.5})({"": leaf}, torch.tensor([0, 2])).total.backward()
    assert leaf.grad is not None and leaf.grad.isfinite().all() and leaf.grad[1].tolist() == [0, 0.5, -0.5]


@pytest.mark.parametrize("name", ["cross_entropy", "bce", "focal"])
def test_every_pixel_is_one_decision(name: str) -> None:
    logits, target = batch(4, 3, 5, 6)
    per_image = [
        loss(name, logits[i].permute(1, 2, 0).reshape(-1, 3).double(), target[i].reshape(-1)) for i in range(4)
    ]
    assert loss(name, logits.double(), target) == pytest.approx(np.mean(per_image), rel=1e-12)


def test_gradient_equals_formula() -> None:
    logits, target = batch()
    logits = logits.double().requires_grad_()
    slot("loss").build({"type": "cross_entropy", "label_smoothing": 0.2})({"": logits}, target).total.backward()
    expected = torch.full_like(logits, 0.2 / 7)
    expected[torch.arange(32), target] += 0.8
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, (logits.softmax(1) - expected).detach() / 32, rtol=1e-12, atol=1e-15)


# -- metrics ----------------------------------------------------------------------------------------------------------


def tallied(views: dict[str, Tensor], target: Tensor, size: int) -> MetricAccumulator:
    tally = MetricAccumulator(build_metrics(DataInfo(image=(1, 1), channels=1, classes=views[""].shape[1])))
    for start in range(0, len(target), size):
        part = slice(start, start + size)
        tally.add_batch(
            {name: view[part] for name, view in views.items()}, target[part], torch.arange(len(target))[part]
        )
    return tally


def test_classification_metrics_equal_scikit_learn_and_definition() -> None:
    from sklearn.metrics import accuracy_score, log_loss, top_k_accuracy_score

    logits, target = batch(90, 9)
    other, _ = batch(90, 9)
    scores = tallied({"": logits, "dist": other.flip(0)}, target, 40)
    p = logits.double().softmax(1).numpy()
    y = target.numpy()
    metrics = scores.compute_result("val").metrics
    assert set(metrics) == {"loss", "accuracy", "top5", "ece", "accuracy_dist"}
    assert metrics["loss"] == pytest.approx(log_loss(y, p, labels=range(9)), rel=1e-6)
    assert metrics["accuracy"] == accuracy_score(y, p.argmax(1))
    assert metrics["top5"] == pytest.approx(top_k_accuracy_score(y, p, k=5, labels=range(9)), rel=1e-15)
    assert metrics["accuracy_dist"] == accuracy_score(y, other.flip(0).argmax(1))
    columns = scores.compute_result("val").columns
    assert columns["id"].tolist() == list(range(90))
    np.testing.assert_array_equal(columns["prediction"], p.argmax(1))
    np.testing.assert_allclose(columns["probability"], p.max(1), rtol=1e-5)
    np.testing.assert_allclose(columns["loss"], -np.log(p[np.arange(90), y]), rtol=1e-4)


def test_top5_of_five_classes_is_refused() -> None:
    logits, target = batch(20, 5)
    assert set(tallied({"": logits}, target, 20).compute_result("val").metrics) == {"loss", "accuracy", "ece"}


def calibration_error(p: torch.Tensor, right: torch.Tensor) -> float:
    return ExpectedCalibrationError().value(torch.stack([p.double(), right.double()], 1))


def test_calibration_error_equals_hand_calculation() -> None:
    # Bin (0.4, 0.4667]: two images at 0.45, one right. Bin (0.8667, 0.9333]: two at 0.9, both right.
    p = torch.tensor([0.45, 0.45, 0.9, 0.9])
    right = torch.tensor([True, False, True, True])
    assert calibration_error(p, right) == pytest.approx((2 * abs(0.5 - 0.45) + 2 * abs(1 - 0.9)) / 4, abs=1e-7)
    assert calibration_error(torch.ones(3), torch.ones(3, dtype=torch.bool)) == 0


def test_calibration_error_equals_definition() -> None:
    g = np.random.default_rng(0)
    p, right = g.uniform(0.1, 1, 500), g.integers(0, 2, 500).astype(bool)
    expected = 0.0
    for low, high in zip(np.linspace(0, 1, 16)[:-1], np.linspace(0, 1, 16)[1:], strict=True):
        inside = (p > low) & (p <= high)
        if inside.any():
            expected += inside.mean() * abs(right[inside].mean() - p[inside].mean())
    assert calibration_error(torch.tensor(p), torch.tensor(right)) == pytest.approx(expected, abs=1e-12)


def test_segmentation_metrics_equal_scikit_learn() -> None:
    from sklearn.metrics import accuracy_score, jaccard_score

    logits, target = batch(6, 4, 8, 8)
    target = target.clamp(max=2)  # one class never occurs in the labels
    tally = MetricAccumulator(build_metrics(DataInfo(image=(8, 8), channels=1, classes=4, task="segmentation")))
    for part in (slice(0, 4), slice(4, 6)):
        tally.add_batch({"": logits[part]}, target[part], torch.arange(6)[part])
    metrics = tally.compute_result("val").metrics
    y, prediction = target.flatten().numpy(), logits.argmax(1).flatten().numpy()
    assert metrics["pixel_accuracy"] == pytest.approx(accuracy_score(y, prediction), rel=1e-12)
    assert metrics["miou"] == pytest.approx(jaccard_score(y, prediction, average="macro"), rel=1e-12)
    assert tally.compute_result("val").columns["pixel_accuracy"].shape == (6,)


def test_absent_class_does_not_count() -> None:
    confusion = torch.tensor([[3, 1, 0], [0, 4, 0], [0, 0, 0]])
    assert MeanIoU().value(confusion[None]) == pytest.approx((3 / 4 + 4 / 5) / 2)
