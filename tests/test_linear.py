"""Tests of logistic regression on the pixels against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from slot_fixtures import refusal
from trainings import train

from vitlab.data.prepare import Feed, prepare
from vitlab.geometry import DataInfo
from vitlab.models import model
from vitlab.models.cost import cost_of
from vitlab.registry import slot
from vitlab.spec import STREAMS, TrainSpec

SEEDS = dict.fromkeys(STREAMS, 0)
DIGITS = DataInfo(image=(8, 8), channels=1, classes=10)


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    x_NP, y_N = load_digits(return_X_y=True)
    return torch.from_numpy(x_NP / 16).view(-1, 1, 8, 8), torch.from_numpy(y_N)


@pytest.mark.slow
def test_optimum_equals_scikit_learn() -> None:
    """Both minimise the same strictly convex loss in float64."""
    x_NCHW, y_N = digits()
    index = train_test_split(np.arange(len(y_N)), test_size=0.25, random_state=0)
    (x, y), (x_test, y_test) = ((x_NCHW[part], y_N[part]) for part in index)
    theirs = LogisticRegression(C=1.0, tol=1e-8, max_iter=2000).fit(x.flatten(1).numpy(), y.numpy())

    ours = model.build("linear", DIGITS).double()
    ours.initialise(0)
    weight, bias = ours.get_parameter("head.weight"), ours.get_parameter("head.bias")
    lbfgs = torch.optim.LBFGS(
        ours.parameters(), max_iter=2000, tolerance_grad=1e-9, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def loss() -> torch.Tensor:
        lbfgs.zero_grad()
        logits: torch.Tensor = ours(x).logits
        value = torch.nn.functional.cross_entropy(logits, y, reduction="sum") + weight.square().sum() / 2
        value.backward()
        return value

    lbfgs.step(loss)
    with torch.no_grad():
        predicted = ours(x_test).logits
        torch.testing.assert_close(weight, torch.from_numpy(theirs.coef_), rtol=0, atol=1e-4)
        shift = bias - torch.from_numpy(theirs.intercept_)  # a constant added to all classes has no effect
        torch.testing.assert_close(shift, shift.mean().expand(10), rtol=0, atol=1e-4)
    np.testing.assert_array_equal(predicted.argmax(1).numpy(), theirs.predict(x_test.flatten(1).numpy()))
    assert float((predicted.argmax(1) == y_test).double().mean()) > 0.93


def test_gradient_equals_formula() -> None:
    """The formula is (p - y) x, averaged over the batch."""
    x, y = digits()
    x, y = x[:50], y[:50]
    ours = model.build("linear", DIGITS).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_(generator=generator)
    torch.nn.functional.cross_entropy(ours(x).logits, y).backward()
    weight, bias = (ours.get_parameter(f"head.{name}") for name in ("weight", "bias"))
    scores = x.flatten(1).numpy() @ weight.detach().numpy().T + bias.detach().numpy()
    p = np.exp(scores - scores.max(1, keepdims=True))
    off = p / p.sum(1, keepdims=True) - np.eye(10)[y.numpy()]
    assert weight.grad is not None and bias.grad is not None
    np.testing.assert_allclose(weight.grad.numpy(), off.T @ x.flatten(1).numpy() / 50, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(bias.grad.numpy(), off.mean(0), rtol=1e-12, atol=1e-15)


@pytest.mark.slow
def test_trained_as_arm_is_within_a_point_of_scikit_learn() -> None:
    prepared = prepare(slot("dataset").resolve_choice({"type": "digits", "normalize": "unit"}), SEEDS)
    ours = model.build("linear", prepared.info)
    ours.initialise(0)
    # Adam adds the decay to the gradient of the mean, scikit-learn half of the squares to the sum: C = 1 is 1 / n.
    adam = {"type": "adam", "lr": 0.02, "weight_decay": 1 / len(prepared.train.y_N)}
    spec = TrainSpec.model_validate({"epochs": 50, "batch_size": 64, "optimizer": adam})
    trained = train(ours, Feed(prepared, [], SEEDS), spec, SEEDS)
    assert trained is not None
    theirs = LogisticRegression(C=1.0, max_iter=2000)
    seen, test = (
        (part.x_NCHW.flatten(1).double().numpy() / 255, part.y_N.numpy()) for part in (prepared.train, prepared.test)
    )
    theirs = LogisticRegression(C=1.0, max_iter=2000).fit(*seen)
    assert trained.metrics["test/accuracy"] == pytest.approx(theirs.score(*test), abs=0.01)


def test_initial_prediction_is_uniform() -> None:
    built = model.build("linear", DIGITS)
    for seed in (0, 1):
        built.initialise(seed)
        assert not built(torch.randn(3, 1, 8, 8)).logits.any()


def test_cost_equals_hand_calculation() -> None:
    cost = cost_of("linear", DataInfo(image=(28, 28), channels=1, classes=10))
    assert (cost.params, cost.body_params, cost.macs) == (7850, 0, 7840)
    colour = cost_of("linear", DataInfo(image=(3, 5), channels=3, classes=2))
    assert (colour.params, colour.macs) == (92, 90)


def test_segmentation_is_refused() -> None:
    data = DataInfo(image=(8, 8), channels=1, classes=10, task="segmentation")
    assert "one prediction per image" in refusal(model, "linear", data)
