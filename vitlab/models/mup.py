"""Maximal update parametrization of a ViT: one learning rate for all widths.

In the standard parametrization the best learning rate falls as a model gets wider.  In this one it is meant not to
change under Adam, so that one rate serves models of different widths.  That the sizes of activations stay is tested
here; that the best rate stays was measured by the packaged study ``width``:

=====================  ===========================  ====================  ====================
weights                deviation of initial values  rate of Adam          decay of AdamW
=====================  ===========================  ====================  ====================
inputs and vectors     as usual                     as usual              as usual
hidden matrices        times 1 / sqrt(m)            times 1 / m           times m
output                 times 1 / m                  times 1 / m           times m
=====================  ===========================  ====================  ====================

m is the number of a map's inputs, relative to the same model of width ``base_width``, at which nothing differs.  What
the deviation of a scheme falls by itself is not applied twice.  Logits of attention are
divided by the width of a head instead of its root.  Decay is scaled because AdamW multiplies it by the rate;
the decay of ``adam`` is a part of the gradient, and stays.

Reference: arXiv:2203.03466, tables 3 and 8 and appendix B.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from vitlab.components.attention.softmax import SOFTMAX, SoftmaxAttention
from vitlab.components.base import NewState
from vitlab.components.block import Place
from vitlab.geometry import Geometry
from vitlab.models.vit_parts import Anatomy
from vitlab.registry import BUILT_IN, slot

if TYPE_CHECKING:
    from vitlab.models.vit import ViT


Group = Mapping[str, Any]
"""A parameter group of an optimizer."""


class Growth(NamedTuple):
    """The growth of a weight with the width of the model."""

    inputs: float  #: inputs of the map, relative to the base model
    shape: tuple[int, int]  #: outputs and inputs
    base_shape: tuple[int, int]  #: of the base model
    is_output: bool  #: True if its number of outputs does not depend on the width


def incompatibility(anatomy: Anatomy) -> str | None:
    """Return why a model cannot have this parametrization, or None."""
    heads, base_width = anatomy.geometry.heads, anatomy.mup_base_width
    assert base_width is not None
    if base_width % heads:
        return f"parametrization mup: base_width {base_width} is not a multiple of heads {heads}; set a multiple"
    for i, block in enumerate(anatomy.blocks):
        if block.attention.component not in SOFTMAX:
            return f"parametrization mup needs scaled dot-product attention; block {i} has '{block.attention.type}'"
    pool = anatomy.head.options.get("pool")
    if pool in ("map", "prr"):
        return (
            f"parametrization mup divides logits of attention by the width of a head, and pool '{pool}' of head "
            f"'{anatomy.head.type}' by its root; use another pool"
        )
    base = replace(anatomy, geometry=replace(anatomy.geometry, dim=base_width), mup_base_width=None)
    reason = base.incompatibility()
    return reason and f"parametrization mup needs a model of base_width {base_width} too: {reason}"


def optimizer_incompatibility(component: type) -> str | None:
    """Return why this parametrization cannot be trained by an optimizer, by its class in the slot, or None."""
    if issubclass(component, (_built_in_optimizer("adamw"), _built_in_optimizer("adam"))):
        return None
    return f"model.parametrization mup is for Adam, and the optimizer is {component.__name__}; use adamw or adam"


def scale_attention_logits(model: ViT) -> None:
    """Let the logits of attention be divided by the width of a head, relative to the base model."""
    for module in model.modules():
        if isinstance(module, SoftmaxAttention):
            module.scale *= math.sqrt(model.base_width / model.geometry.dim)


def growth_of_weights(model: ViT) -> dict[str, Growth]:
    """Return the growth of every weight whose number of inputs depends on the width, by name."""
    result = {}
    for path, (choice, context) in model._parts.items():
        # The part at the base width is built for its shapes alone.
        with torch.random.fork_rng(devices=[]):
            base = slot(choice.slot).build(choice, *(_change_width(size, model.base_width) for size in context))
        part = model.get_submodule(path)
        maps = {f"{name}.weight" for name, module in part.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)}
        for name, parameter in base.named_parameters():
            shape, base_shape = part.get_parameter(name).shape, parameter.shape
            changed = [axis for axis, (one, other) in enumerate(zip(shape, base_shape, strict=True)) if one != other]
            # A vector grows along one axis; a map counts if its inputs grow.
            if len(changed) > 1 or (name in maps and changed and changed != [0]):
                sizes, base_sizes = ((each[0], math.prod(each[1:])) for each in (shape, base_shape))
                result[f"{path}.{name}"] = Growth(sizes[1] / base_sizes[1], sizes, base_sizes, 0 not in changed)
    return result


def init_factors(model: ViT) -> NewState:
    """Return a factor for every initial value of the model, by canonical name."""
    state = {name: torch.ones(value.shape) for name, value in model.state_dict().items()}
    for name, growth in growth_of_weights(model).items():
        # Every scheme draws convolutions with a deviation that falls as the root of their inputs.
        is_conv = isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Conv2d)
        ratio = growth.inputs if is_conv else model.scheme.base_variance_ratio(name, growth.shape, growth.base_shape)
        state[name] *= math.sqrt(ratio / growth.inputs) * (growth.inputs**-0.5 if growth.is_output else 1.0)
    return model.to_canonical(state)


def rate_factors(model: ViT) -> dict[str, float]:
    """Return the factor of the learning rate of every weight that has one, by name."""
    return {name: 1 / growth.inputs for name, growth in growth_of_weights(model).items()}


def make_group_scaling(factors: Mapping[str, float], optimizer: object) -> Callable[[str, Group], Group]:
    """Return a function from a parameter's name and group to the rate and the decay of the parameter.

    Args:
        factors: Name to factor, as returned by :func:`rate_factors`.
        optimizer: The choice of the slot ``optimizer``, for which :func:`optimizer_incompatibility` returns None.
    """
    is_decoupled = isinstance(optimizer, _built_in_optimizer("adamw"))

    def changes(name: str, group: Group) -> Group:
        factor = factors.get(name, 1.0)
        decay = group["weight_decay"] / (factor if is_decoupled else 1.0)
        return {"lr_scale": group.get("lr_scale", 1.0) * factor, "weight_decay": decay}

    return changes


def _built_in_optimizer(optimizer: str) -> type:
    """Return a built-in optimizer; its module is above this one."""
    return slot("optimizer").get(f"{BUILT_IN}:{optimizer}")


def _change_width(size: Geometry | Place | int, width: int) -> Geometry | Place | int:
    if isinstance(size, Place):
        return replace(size, geometry=replace(size.geometry, dim=width))
    return replace(size, dim=width) if isinstance(size, Geometry) else width
