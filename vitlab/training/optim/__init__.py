"""The slot ``optimizer``: the contract of optimizers, an optimizer made of several, and parameter groups.

Optimizers are in the files beside this one, and the slot ``schedule`` in ``schedules.py``.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from pydantic import NonNegativeFloat
from torch import Tensor, nn

from vitlab.components.base import Positive, Probability
from vitlab.models.contract import Model
from vitlab.registry import Slot

Group = dict[str, Any]
"""A parameter group of a torch optimizer: named ``params``, ``weight_decay``, and ``lr_scale`` if its learning rate
differs from the optimizer's."""

Rate = Positive
Decay = NonNegativeFloat
Beta = Probability
Small = Positive


class WeightAverage(ABC):
    """Averaged weights of a model, which are evaluated and stored in place of its own."""

    @abstractmethod
    def replaced_tensors(self) -> Sequence[Tensor]:
        """Return the tensors of the model that :meth:`replace` changes."""

    @abstractmethod
    def replace(self) -> None:
        """Give the model the averaged weights."""

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Give the model the averaged weights inside the block, and its own again afterwards, bit for bit."""
        # Copies, because an average and back again would round, and so make results depend on evaluations.
        before = [value.detach().clone() for value in self.replaced_tensors()]
        self.replace()
        try:
            yield
        finally:
            self.prepare_next_step()
            with torch.no_grad():
                for value, own in zip(self.replaced_tensors(), before, strict=True):
                    value.copy_(own)

    def prepare_next_step(self) -> None:  # noqa: B027  # most have nothing to do
        """Prepare for the next step, before the model gets its own weights again."""

    def update(self, step: int) -> None:  # noqa: B027  # an optimizer may update its state itself
        """Update the average after a step, counted from 1."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors of the average that are in no other state of the training."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:  # noqa: B027  # as above
        """Restore what :meth:`state_dict` returned."""


class Optimizer(ABC):
    """Contract: options in the constructor; ``build`` turns parameter groups into a torch optimizer.

    ``lr`` is the learning rate at schedule factor 1, and ``weight_decay`` the decay of the decaying parameters.  The
    training sets ``lr`` in every group before every step, multiplied by the group's ``lr_scale`` if it has one.  Where
    trials are stacked, a torch optimizer with the attribute ``joint_safe`` steps for all of them in one call: its
    update of a parameter depends on no other parameter, and it counts no steps per group.
    """

    lr: float
    weight_decay: float

    library: ClassVar[str] = ""
    """Name by which the library of the optimizer is imported, for a library of vitlab's extra ``optimizers``; import
    it in ``build``."""

    plan_note: ClassVar[str] = ""
    """Sentence for the notes of every plan that uses the optimizer."""

    @classmethod
    def incompatibility(cls, train: Mapping[str, Any]) -> str | None:
        """Return why the optimizer cannot be used, in one sentence; None if it can.

        Args:
            train: The section ``train`` in plain values, with the defaults of all fields but the options of components.
        """
        if cls.library and find_spec(cls.library) is None:
            return f"it needs the package {cls.library}, which is not installed; run: pip install 'vitlab[optimizers]'"
        return None

    def route(self, groups: Sequence[Group], model: Model) -> Sequence[Group]:
        """Return the groups, split by what this optimizer does with the parameters of a group.

        By default all parameters have one rule.  An optimizer with several splits the groups by name
        (:func:`split_by_settings`), and finds its rule for each group in ``build``;
        :func:`hidden_matrices` names the parameters for rules of matrices.
        """
        return groups

    @abstractmethod
    def build(self, groups: Sequence[Group]) -> torch.optim.Optimizer:
        """Return a torch optimizer over ``groups``, each with its own ``weight_decay``."""

    def average(self, built: torch.optim.Optimizer) -> WeightAverage | None:
        """Return the average of the weights that the optimizer computes; None for an optimizer without one."""
        return None


optimizer = Slot("optimizer", Optimizer)  # type: ignore[type-abstract]  # a contract is not built


class Composite(torch.optim.Optimizer):
    """Several optimizers of disjoint parameters behind the interface of one.

    It has no state of its own: it has the groups of its parts, and the list of their states.

    Args:
        parts: The optimizers.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = list(parts)  # the base class would build a second set of groups

    @property
    def param_groups(self) -> list[Group]:  # type: ignore[override]
        """Return the groups of all parts."""
        return [group for part in self.parts for group in part.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parts."""
        for part in self.parts:
            part.zero_grad(set_to_none)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)


def supports_fused(groups: Sequence[Group]) -> bool:
    """Return True if torch has a fused optimizer kernel for these parameters, which is several times faster.

    Fused and unfused updates differ in the last bits, so the choice depends on device and dtype alone.
    """
    parameters = [item[1] if isinstance(item, tuple) else item for group in groups for item in group["params"]]
    return all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters)


@cache
def subclass_without_compile_hooks(kind: type[Any]) -> Callable[..., torch.optim.Optimizer]:
    """Return an optimizer class without the hooks of ``torch.compile``, which no training applies to an optimizer.

    The first call of a hook imports torch._dynamo, which takes nearly as long as importing torch.
    """
    base = torch.optim.Optimizer
    hooked = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
    methods = {name: inspect.unwrap(vars(base)[name]) for name in hooked if getattr(kind, name) is vars(base)[name]}
    if kind.__module__.startswith("torch.optim."):  # the steps of other libraries have no hook
        methods["step"] = torch.no_grad()(inspect.unwrap(kind.step))
    return type(kind.__name__, (kind,), methods)


# -- parameter groups: weight decay, layer-wise learning rates, and the hidden matrices of a model --------------------


def group_by_decay(model: nn.Module, weight_decay: float, declared: Collection[str] = ()) -> list[Group]:
    """Return the trainable parameters in at most two groups: those exempt from weight decay, then the others.

    Vectors, scalars, parameters named ``bias`` and the names in ``declared`` (the model's ``no_weight_decay``) are
    exempt.
    """
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    exempt = {name for name, p in trained if p.ndim <= 1 or name.endswith(".bias") or name in declared}
    # The order is part of every checkpoint: torch counts parameters through the groups.
    groups: list[Group] = [
        {"params": [item for item in trained if item[0] in exempt], "weight_decay": 0.0},
        {"params": [item for item in trained if item[0] not in exempt], "weight_decay": weight_decay},
    ]
    return [group for group in groups if group["params"]]


def split_for_layer_decay(groups: Sequence[Group], layers: Mapping[str, int], factor: float) -> list[Group]:
    """Split groups by layer, with a learning rate ``factor`` times the rate of the next deeper layer.

    Args:
        groups: The groups of :func:`group_by_decay`.
        layers: Depth of every parameter by name; the deepest layer has the optimizer's learning rate.
        factor: At most 1.

    Reference: arXiv:2106.08254 (BEiT), arXiv:2003.10555.
    """
    deepest = max(layers.values())

    def scale(name: str, group: Group) -> Mapping[str, object]:
        return {"lr_scale": group.get("lr_scale", 1.0) * factor ** (deepest - layers[name])}

    return split_by_settings(groups, scale)


def split_by_settings(groups: Sequence[Group], changes: Callable[[str, Group], Mapping[str, object]]) -> list[Group]:
    """Split groups so that the parameters of a group have equal further settings.

    Args:
        groups: Parameter groups.
        changes: Returns what differs for a parameter, such as ``lr_scale``, from its name and its group.
    """
    split: list[Group] = []
    for group in groups:
        parts: list[Group] = []
        for name, parameter in group["params"]:
            find_or_add_group(parts, {**group, **changes(name, group)})["params"].append((name, parameter))
        split += parts
    return split


def find_or_add_group(groups: list[Group], settings: Group) -> Group:
    """Return the group with these settings, whatever its parameters; a new one without any is added if none has."""
    own = {**settings, "params": []}
    # A handful of groups: a search is simpler than keys of settings that may be unhashable.
    group = next((group for group in groups if {**group, "params": []} == own), own)
    if group is own:
        groups.append(own)
    return group


def hidden_matrices(model: Model) -> dict[str, int]:
    """Return the names of the matrices between a model's stem and its head, each with its number of linear maps.

    These are the parameters with two axes in a layer that is neither the first nor the last
    (:meth:`~vitlab.models.contract.Model.layer_of`), without those that the model exempts from weight decay, such as
    tables of positions.  The number is 3 for the rows [q; k; v] of one matrix, see
    :meth:`~vitlab.models.contract.Model.stacked_maps`.
    """
    layers = {name: model.layer_of(name) for name, _ in model.named_parameters()}
    last = max(layers.values())
    exempt, maps = model.no_weight_decay(), model.stacked_maps()
    return {
        name: maps.get(name, 1)
        for name, parameter in model.named_parameters()
        if parameter.ndim == 2 and 0 < layers[name] < last and name not in exempt
    }


def set_learning_rates(target: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every group of an optimizer, scaled by its ``lr_scale``."""
    for group in target.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)


class LossScaling:
    """Loss scaling of training in fp16, so that small gradients do not vanish.

    The loss is multiplied by a scale before the backward pass, and the gradients are divided by it before they are
    clipped.  A step with a gradient that is not finite is skipped, and the scale is halved; after 2,000 steps without
    one it is doubled.  Reference: arXiv:1710.03740, section 3.2.

    For torch's fused optimizers nothing is read back from the device; others read in every step whether it is skipped.

    Args:
        device: The device of the weights.
    """

    def __init__(self, device: torch.device) -> None:
        self.scaler = torch.amp.GradScaler(device.type)
        self._skipped = torch.zeros((), device=device)  # steps since the last measurement

    def step(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], clip_grad: float | None
    ) -> None:
        """Unscale and clip the gradients, and take an optimizer step unless one of them is not finite.

        Args:
            optimizer: The optimizer.
            parameters: Its parameters.
            clip_grad: The largest global norm of the gradient; None for any.
        """
        self.scaler.unscale_(optimizer)
        # Needed without clipping as well: a norm that is not finite tells a skipped step.
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if clip_grad is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, clip_grad, norm)
        self.scaler.step(optimizer)
        self.scaler.update()
        self._skipped += ~norm.isfinite()

    def pop_skipped_steps(self) -> float:
        """Return the number of steps skipped since the last call."""
        skipped = float(self._skipped)
        self._skipped.zero_()
        return skipped

    def state_dict(self) -> Mapping[str, Any]:
        """Return the scale, the number of steps since it changed, and the number of skipped steps."""
        return {"scaler": self.scaler.state_dict(), "skipped": self._skipped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self.scaler.load_state_dict(state["scaler"])
        self._skipped.copy_(state["skipped"])
