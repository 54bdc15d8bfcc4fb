"""Parts inside a ViT: the batch-last engine against a loop.

K models, B images.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import stack_module_state, vmap

from vitlab import noise
from vitlab.engines.batch_last import BatchLastForward, HeadOnly
from vitlab.engines.batch_last_support import incompatibility
from vitlab.errors import GeometryError, OptionError
from vitlab.geometry import DataInfo
from vitlab.registry import ResolvedChoice, slot
from vitlab.testing.assertions import during, expect
from vitlab.training.evaluation import forward_logits

K, B = 2, 3


def check_engines(who: str, choice: ResolvedChoice) -> None:
    """Check that two ViTs with the part give equal logits and gradients in a loop and in the batch-last engine.

    Does nothing if such a ViT cannot be built, or is not supported by that engine.
    """
    reduction = choice.component.reduction_of(choice.options) if choice.slot == "patch" else 1
    side = 4 if reduction == 1 else 1
    info = DataInfo(image=(2 * side * reduction, 2 * side * reduction), channels=3, classes=5)
    sizes = {"type": "vit", "patch_size": side, "dim": 16, "depth": 2, "heads": 2}
    models: list[Any] = []
    for seed in range(K):
        try:
            models.append(slot("model").build({**sizes, choice.slot: choice}, info).double().eval())
        except (OptionError, GeometryError):
            return
        models[-1].initialise(seed)
    if not models[0].vmap_safe or incompatibility(models[0], "fp64", torch.device("cpu")) is not None:
        return
    generator = torch.Generator().manual_seed(0)
    x_KBCHW = torch.randn(K, B, info.channels, *info.image, dtype=torch.float64, generator=generator)
    with during(f"{who}: in a ViT, by engine batch_last", Exception):
        parameters, buffers = stack_module_state(models)
        stacked = _batch_last_logits(models[0], parameters, buffers, x_KBCHW)
        gradients = _gradients(stacked, parameters)
    for k, model in enumerate(models):
        expected = forward_logits(model, x_KBCHW[k], "fp64")
        for name, view in expected.items():
            close = torch.allclose(stacked[name][k], view, rtol=1e-9, atol=1e-10)
            expect(close, f"{who}: in a ViT, by engine batch_last, its view '{name}' differs from that of a loop")
        for name, gradient in _gradients(expected, dict(model.named_parameters())).items():
            close = torch.allclose(gradients[name][k], gradient, rtol=1e-9, atol=1e-10)
            expect(close, f"{who}: in a ViT, by engine batch_last, the gradient of {name} differs from a loop's")


def _batch_last_logits(
    model: Any, parameters: dict[str, Tensor], buffers: dict[str, Tensor], x_KBCHW: Tensor
) -> dict[str, Tensor]:
    head, tensors = HeadOnly(model), {**parameters, **buffers}
    keys_K = torch.arange(K)
    draws = noise.Draws(keys_K, keys_K, torch.arange(B).expand(K, B), step=keys_K)

    def views(parameters: dict[str, Tensor], features_B: Tensor, draws: noise.Draws) -> dict[str, Tensor]:
        with noise.drawing(draws):
            return forward_logits(head, features_B, "fp64", parameters)

    features_KBTD = BatchLastForward(model, tensors, draws).features(x_KBCHW)
    logits: dict[str, Tensor] = vmap(views)(head.own(tensors), features_KBTD, draws)
    return logits


def _gradients(views: dict[str, Tensor], parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    total = torch.stack([view.sin().sum() for view in views.values()]).sum()
    gradients = torch.autograd.grad(total, list(parameters.values()), materialize_grads=True)
    return dict(zip(parameters, gradients, strict=True))
