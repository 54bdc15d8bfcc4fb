"""The initial values of a Vision Transformer, as a function of the seed.

The scheme (:mod:`vitlab.components.init`) draws parameters by their canonical names.  The other values come from a
component that was built with its own generator, so that no component changes the values of another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vitlab.components.block import LayerScale
from vitlab.components.init import Kind, layer_parameters, seeded
from vitlab.models.contract import State
from vitlab.registry import slot

if TYPE_CHECKING:
    from vitlab.models.vit import ViT


@torch.no_grad()
def initialise(model: ViT, seed: int, factors: Mapping[str, Tensor]) -> None:
    """Set every value of a model.

    Args:
        model: the model.
        seed: of the stream ``init``.
        factors: of the drawn values, by canonical name; empty for none.
    """
    for path, (choice, context) in model._parts.items():
        with seeded(seed, path), torch.device("cpu"):
            fresh = slot(choice.slot).build(choice, *context)
        part = model.get_submodule(path)
        for name, value in [*fresh.named_parameters(), *fresh.named_buffers()]:
            parent, _, last = name.rpartition(".")
            getattr(part.get_submodule(parent), last).copy_(value)
    for module in model.modules():
        if isinstance(module, LayerScale):
            module.gamma.fill_(module.start)
    own = model.state_dict()
    state = model.to_canonical(own)
    for name, (kind, fan_in) in _scheme_parameters(model, state).items():
        x = torch.empty(state[name].shape)
        model.scheme.draw(x, name, kind, fan_in, seed)
        state[name] = x * factors[name] if factors else x
    values = model.from_canonical(state)
    shapes, own_shapes = ({(name, value.shape) for name, value in one.items()} for one in (values, own))
    if shapes != own_shapes:
        names = ", ".join(sorted({name for name, _ in shapes ^ own_shapes}))
        raise RuntimeError(f"from_canonical does not invert to_canonical: {names}")
    for name, value in values.items():  # load_state_dict takes several times as long
        if value is not own[name]:
            own[name].copy_(value)


def _scheme_parameters(model: ViT, state: State) -> dict[str, tuple[Kind, int]]:
    """Return the parameters that the scheme draws: canonical name to kind and the layer's number of inputs."""
    parameters: dict[str, tuple[Kind, int]] = dict.fromkeys(("cls_token", "dist_token", "reg_token"), ("token", 0))
    parameters |= {model.canonical_name(name): (kind, fan_in) for name, kind, fan_in in layer_parameters(model)}
    excluded = {
        model.canonical_name(f"{path}.{name}")
        for path, module in model.named_modules()
        for name in getattr(module, "keeps_init", ())
    }
    for path in model.attentions():  # whose own matrices may be parts of the canonical ones
        for layer in (f"{path}.qkv", f"{path}.proj"):
            matrix = state.get(f"{layer}.weight")
            if matrix is not None and matrix.ndim == 2:
                parameters |= {
                    f"{layer}.weight": ("linear", matrix.shape[1]),
                    f"{layer}.bias": ("linear_bias", matrix.shape[1]),
                }
    if "pos_embed" in (model.canonical_name(name) for name, _ in model.named_parameters()):
        parameters["pos_embed"] = ("position", 0)
    return {name: how for name, how in parameters.items() if name in state and name not in excluded}
