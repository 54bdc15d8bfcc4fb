"""The initial values of a Vision Transformer, as a function of the seed.

The scheme (:mod:`vitlab.components.init`) draws parameters by their canonical names.  The other values are those of a
component that was built with its own generator, so that no component changes the values of another.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import Tensor, nn

from vitlab.components.block import LayerScale
from vitlab.components.init import Kind, seeded
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
    own = model.state_dict()
    state = model.to_canonical(own)
    drawn = _scheme_parameters(model, state)
    for path in _parts_to_build(model, state, drawn):
        choice, context = model._parts[path]
        with seeded(seed, path), torch.device("cpu"):
            fresh = slot(choice.slot).build(choice, *context)
        mine = model.get_submodule(path)
        for name, value in [*fresh.named_parameters(), *fresh.named_buffers()]:
            _get(mine, name).copy_(value)
    for module in model.modules():
        if isinstance(module, LayerScale):
            module.gamma.fill_(module.start)
    state = model.to_canonical(own)
    for name, (kind, fan_in) in drawn.items():
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
    parameters: dict[str, tuple[Kind, int]] = {}
    excluded = set()
    for path, module in model.named_modules():
        excluded |= {f"{path}.{name}" for name in getattr(module, "keeps_init", ())}
        kind: Literal["linear", "conv"] | None = (
            "linear" if isinstance(module, nn.Linear) else "conv" if isinstance(module, nn.Conv2d) else None
        )
        if kind is not None:
            fan_in = module.weight[0].numel()
            parameters[f"{path}.weight"] = (kind, fan_in)
            parameters[f"{path}.bias"] = ("linear_bias" if kind == "linear" else "conv_bias", fan_in)
    parameters = {model.canonical_name(name): how for name, how in parameters.items()}
    for path in model.attentions():
        for layer in ("qkv", "proj"):
            weight = state.get(f"{path}.{layer}.weight")
            if weight is not None and weight.ndim == 2:
                parameters[f"{path}.{layer}.weight"] = ("linear", weight.shape[1])
                parameters[f"{path}.{layer}.bias"] = ("linear_bias", weight.shape[1])
    existing = {model.canonical_name(name) for name, _ in model.named_parameters()}
    parameters |= dict.fromkeys(("cls_token", "dist_token", "reg_token"), ("token", 0))
    if "pos_embed" in existing:
        parameters["pos_embed"] = ("position", 0)
    excluded = {model.canonical_name(name) for name in excluded}
    return {name: how for name, how in parameters.items() if name in state and name not in excluded}


def _parts_to_build(model: ViT, state: State, drawn: Collection[str]) -> list[str]:
    """Return the paths of the components that have values which the scheme does not draw.

    Args:
        model: the model.
        state: its canonical state.
        drawn: the canonical names of the parameters that the scheme draws.
    """
    kept = [name for name in state if name not in drawn]
    attentions = {path: not any(name.startswith(f"{path}.") for name in kept) for path in model.attentions()}
    paths = set()
    for name, value in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]:
        path = name.rpartition(".")[0]
        while path and path not in model._parts:
            path = path.rpartition(".")[0]
        is_drawn = attentions[path] if path in attentions else model.canonical_name(name) in drawn
        if not is_drawn or not isinstance(value, nn.Parameter):
            paths.add(path)
    return [path for path in model._parts if path in paths]


def _get(module: nn.Module, name: str) -> Tensor:
    path, _, last = name.rpartition(".")
    return cast(Tensor, getattr(module.get_submodule(path), last))
