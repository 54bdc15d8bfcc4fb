"""The linear probe in closed form: a head solved for on frozen features instead of trained.

This is the few-shot protocol of the ViT paper: regularised least squares from the input of the head to targets of 1
for the class and -1 for the others.  Features are standardised by their mean and deviation over the training images,
and the intercept is not regularised.  Both are folded into weight and bias of the head, so that the model can be
evaluated and trained further like any other.

Reference: arXiv:2010.11929, section 4.1.

N images, D features, K classes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from vitlab.data.prepare import Feed
from vitlab.errors import WeightsError
from vitlab.models.contract import Model, evaluating, head_names
from vitlab.training.features import classifiers, inputs_of

MIN_STD = 1e-5
"""Added to the deviation of every feature, to avoid division by zero for constant features."""


@torch.no_grad()
def fit_head(model: Model, feed: Feed, l2: float, precision: str) -> None:
    """Fit the linear classifiers of a model in place, by ridge regression on the training images without augmentation.

    The model keeps its mode.

    Args:
        model: Model on the device of ``feed``; only its head changes.
        feed: The images.
        l2: See :func:`solve`.
        precision: Precision of the features; the solution is computed in float64.

    Raises:
        WeightsError: If the head does not consist of linear classifiers of images.
    """
    with evaluating(model):
        layers = classifiers(model, next(feed.evaluation("train", 1)).x_BCHW, precision)
        if reason := _fitting_incompatibility(model, layers, feed):
            raise WeightsError(
                f"init_from.head: fitted needs a head of linear layers on the features of an image, and {reason}; "
                "write init_from.head: new to train it"
            )
        features, y_N = inputs_of(list(layers.values()), model, feed, "train", precision)
    for layer, x_ND in zip(layers.values(), features, strict=True):
        weight_KD, bias_K = solve(x_ND, y_N, layer.out_features, l2)
        layer.weight.copy_(weight_KD)
        layer.bias.copy_(bias_K)


def solve(x_ND: Tensor, y_N: Tensor, classes: int, l2: float) -> tuple[Tensor, Tensor]:
    """Return weight (K, D) and bias (K) of regularised least squares, for unstandardised features.

    Args:
        x_ND: Features, float64.
        y_N: Class indices.
        classes: K; some classes may not occur.
        l2: Penalty on squared weights of standardised features, relative to the squared error of one image.
    """
    mean_D, std_D = x_ND.mean(0), x_ND.std(0, correction=0) + MIN_STD
    z_ND = (x_ND - mean_D) / std_D
    target_NK = 2.0 * nn.functional.one_hot(y_N, classes).to(x_ND) - 1
    bias_K = target_NK.mean(0)  # standardised features have the mean 0
    ridge_DD = l2 * torch.eye(x_ND.shape[1], dtype=x_ND.dtype, device=x_ND.device)
    weight_DK = torch.linalg.solve(z_ND.T @ z_ND + ridge_DD, z_ND.T @ (target_NK - bias_K)) / std_D[:, None]
    return weight_DK.T, bias_K - mean_D @ weight_DK


def _fitting_incompatibility(model: Model, layers: Mapping[str, nn.Linear], feed: Feed) -> str | None:
    """Return why these layers cannot be fitted as the model's head, as the end of a sentence; None if they can."""
    fitted = {f"{name}.{parameter}" for name, layer in layers.items() for parameter in ("weight", "bias")}
    if others := sorted(head_names(model) - fitted):
        return f"this one has {', '.join(others)}"
    if not layers or feed.info.task != "classification" or any(layer.bias is None for layer in layers.values()):
        return "this one is another head"
    return None
