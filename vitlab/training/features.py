"""Features of a model: the input of its linear classifier, and the last patch tokens or feature map before it.

The linear probe is a head solved for on frozen features instead of trained, by the few-shot protocol of the ViT paper:
regularised least squares from the input of the head to targets of 1 for the class and -1 for the others.  Features are
standardised by their mean and deviation over the training images, and the intercept is not regularised.  Both are
folded into weight and bias of the head, so that the model can be evaluated and trained further like any other.
Reference: arXiv:2010.11929, section 4.1.

B batch, N images of a split, C channels, H and W pixels, D width, K classes, T tokens, h and w rows and columns of
tokens.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from vitlab.components.base import to_float32_or_wider
from vitlab.data.batches import Feed
from vitlab.errors import WeightsError
from vitlab.geometry import DataInfo
from vitlab.models.contract import Model, evaluation_mode, names_in_last_layer
from vitlab.training.distributed import ALONE, SingleProcess
from vitlab.training.evaluation import EVALUATION_BATCH, Split, autocast, forward_logits
from vitlab.training.metrics.features import FeatureMetric, Features


@torch.no_grad()
def evaluate_features(
    model: Model,
    feed: Feed,
    split: Split,
    precision: str,
    metrics: Mapping[str, FeatureMetric],
    peers: SingleProcess = ALONE,
) -> dict[str, float]:
    """Return the metrics of features of a split: of the inputs of the first linear classifier of the model.

    The model keeps its mode; ``peers`` divide the batches.

    Raises:
        WeightsError: If the model has no linear classifier.
    """
    with evaluation_mode(model):
        # One image shows which layers make the logits.
        layers = list(find_logit_layers(model, next(feed.evaluation("train", 1)).x_BCHW, precision).values())[:1]
        if not layers:
            raise WeightsError(
                f"metrics of features need a head whose last layer is linear, and a {type(model).__name__} has none; "
                "remove them from train.metrics"
            )

        @cache
        def features_of(split: Split) -> Features:
            (x_ND,), y_N = collect_layer_inputs(layers, model, feed, split, precision, peers)
            return Features(x_ND.cpu(), y_N.cpu())

        # The training images are read if a metric asks for them.
        return {
            name: one.of_features(features_of(split), lambda: features_of("train")) for name, one in metrics.items()
        }


def collect_layer_inputs(
    layers: Sequence[nn.Linear], model: Model, feed: Feed, split: Split, precision: str, peers: SingleProcess = ALONE
) -> tuple[list[Tensor], Tensor]:
    """Return the inputs of layers on a split, without augmentation, in float64, and its labels."""
    inputs: dict[nn.Module, list[Tensor]] = {layer: [] for layer in layers}
    labels = []

    def store(layer: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        inputs[layer].append(arguments[0].double())

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(store))
        for batch in feed.evaluation(split, EVALUATION_BATCH, peers.batches):
            forward_logits(model, batch.x_BCHW, precision)
            labels.append(batch.y_B)
    everything = peers.all_gather_by_batch(
        {str(index): parts for index, parts in enumerate([*inputs.values(), labels])}
    )
    *features, y_N = (torch.cat(parts) for parts in everything.values())
    return features, y_N


def find_logit_layers(model: Model, x_BCHW: Tensor, precision: str) -> dict[str, nn.Linear]:
    """Return the linear layers whose outputs are the model's logits, by name.

    Args:
        model: Model in evaluation mode.
        x_BCHW: Images to try it on.
        precision: Precision of the pass.
    """
    outputs: dict[nn.Module, Tensor] = {}
    linear = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}

    def store(layer: nn.Module, _inputs: object, output: Tensor) -> None:
        outputs[layer] = output

    with ExitStack() as hooks, autocast(x_BCHW.device, precision):
        for layer in linear.values():
            hooks.enter_context(layer.register_forward_hook(store))
        logits = list(model.logits_by_head(model(x_BCHW)).values())
    return {name: layer for name, layer in linear.items() if any(outputs.get(layer) is view for view in logits)}


class FeatureReader:
    """The forward pass of a model, which also returns its features.

    ``features`` are the input of its linear classifier, (B, D); of several classifiers, the first is meant.  ``tokens``
    are its last patch tokens or feature map, (B, D, h, w): the output of its ``forward_features``, without the tokens
    before the patches.

    Args:
        model: The model, which keeps its mode.
        info: Its images.
        names: The features to return; other passes of the model are not changed by any.
        precision: Precision of the passes.
        role: The model in messages, such as ``the teacher``.

    Raises:
        WeightsError: If the model has no such features.
    """

    def __init__(self, model: Model, info: DataInfo, names: Collection[str], precision: str, role: str) -> None:
        self.model = model
        self.names = names
        self.precision = precision
        self._inputs: list[Tensor] | None = None  #: of the classifier, while a pass is read
        self.widths: dict[str, int] = {}  #: D by name
        if not names:
            return
        x_BCHW = torch.zeros(1, info.channels, *info.image).to(next(model.parameters()))
        with evaluation_mode(model), torch.no_grad():
            if "features" in names:
                layers = list(find_logit_layers(model, x_BCHW, precision).values())
                if not layers:
                    raise _missing_feature_error(role, model, "features", "a head whose last layer is linear")
                # A bound method, so that a deep copy of this reader has its own.
                layers[0].register_forward_pre_hook(self._store)
            if "tokens" in names and not hasattr(model, "forward_features"):
                raise _missing_feature_error(role, model, "tokens", "patch tokens or a feature map")
            _, features = self(x_BCHW)
        self.widths = {name: feature.shape[1] for name, feature in features.items()}

    def __call__(self, x_BCHW: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the logits by head and the features by name, in float32 or wider."""
        model: Any = self.model
        features: dict[str, Tensor] = {}
        self._inputs = []
        with autocast(x_BCHW.device, self.precision):
            if "tokens" in self.names:
                x = model.forward_features(x_BCHW)
                features["tokens"] = (
                    x if x.ndim == 4 else x.mT[..., len(model.geometry.prefix) :].unflatten(2, model.geometry.grid)
                )
                output = model.forward_head(x)
            else:
                output = model(x_BCHW)
            logits_by_head = model.logits_by_head(output)
        if "features" in self.names:
            features["features"] = self._inputs[0]
        self._inputs = None
        return {name: to_float32_or_wider(x) for name, x in logits_by_head.items()}, {
            name: to_float32_or_wider(x) for name, x in features.items()
        }

    def _store(self, _layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._inputs is not None:
            self._inputs.append(inputs[0])


def _missing_feature_error(role: str, model: Model, name: str, needs: str) -> WeightsError:
    return WeightsError(
        f"distill.{name} needs {needs}, and {role}, a {type(model).__name__}, has none; use a ViT or a convolutional "
        f"network, or remove {name}"
    )


# -- linear probe -----------------------------------------------------------------------------------------------------

MIN_STD = 1e-5
"""Added to the deviation of every feature, to avoid division by zero for constant features."""


@torch.no_grad()
def fit_head(model: Model, feed: Feed, l2: float, precision: str) -> None:
    """Fit the linear classifiers of a model in place, by ridge regression on the training images without augmentation.

    The model keeps its mode.

    Args:
        model: Model on the device of ``feed``; only its head changes.
        feed: The images.
        l2: See :func:`solve_ridge`.
        precision: Precision of the features; the solution is computed in float64.

    Raises:
        WeightsError: If the head does not consist of linear classifiers of images.
    """
    with evaluation_mode(model):
        layers = find_logit_layers(model, next(feed.evaluation("train", 1)).x_BCHW, precision)
        if reason := _fitting_incompatibility(model, layers, feed):
            raise WeightsError(
                f"init_from.head: fitted needs a head of linear layers on the features of an image, and {reason}; "
                "write init_from.head: new to train it"
            )
        features, y_N = collect_layer_inputs(list(layers.values()), model, feed, "train", precision)
    for layer, x_ND in zip(layers.values(), features, strict=True):
        weight_KD, bias_K = solve_ridge(x_ND, y_N, layer.out_features, l2)
        layer.weight.copy_(weight_KD)
        layer.bias.copy_(bias_K)


def solve_ridge(x_ND: Tensor, y_N: Tensor, classes: int, l2: float) -> tuple[Tensor, Tensor]:
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
    if others := sorted(names_in_last_layer(model) - fitted):
        return f"this one has {', '.join(others)}"
    if not layers or feed.info.task != "classification" or any(layer.bias is None for layer in layers.values()):
        return "this one is another head"
    return None
