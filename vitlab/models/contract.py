"""Model: what training, weights and reports may ask of any model.

B batch, C channels, H and W pixels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, Self

from torch import Tensor, nn

from vitlab.components.base import Part
from vitlab.geometry import DataInfo, Work
from vitlab.noise import Draws
from vitlab.registry import Resolved, Slot

State = Mapping[str, Tensor]
"""Parameters and buffers by name."""


class Model(nn.Module):
    """Contract: ``Model(data, *, options)``, a module from images to a NamedTuple of logits."""

    _frozen: tuple[str, ...] = ()  #: paths of the modules that stay in evaluation mode

    @classmethod
    def incompatibility(cls, data: DataInfo, options: Mapping[str, Any]) -> str | None:
        """Why this combination of data and options cannot be built, in one sentence; None where it can.

        Raises:
            GeometryError: for sizes that do not divide.
        """
        return None

    @classmethod
    def work(cls, data: DataInfo, options: Mapping[str, Any]) -> Work | None:
        """How much is computed of one image; None where that is not known.

        Where it is little, trials are trained together; see :mod:`vitlab.plan.cohorts`.
        """
        return None

    @property
    def vmap_safe(self) -> bool:
        """Whether every part may be vectorised over replicates."""
        return all(part.vmap_safe for part in self.modules() if isinstance(part, Part))

    @property
    def component_choices(self) -> Mapping[str, Resolved]:
        """Path to the component that stands there; empty for a model that is made of none."""
        return {}

    def forward(self, x_BCHW: Tensor) -> NamedTuple:
        raise NotImplementedError

    def views(self, output: Any) -> dict[str, Tensor]:
        """The logits an output holds: ``""`` those of the prediction, further names further views of it."""
        return {"": output.logits}

    def initialise(self, seed: int) -> None:
        """Set every parameter to its initial value, as a function of the seed alone."""
        raise NotImplementedError

    def layer_of(self, name: str) -> int:
        """Depth of a parameter, for layer-wise decay: 0 the stem, the blocks from 1, the head last."""
        raise NotImplementedError

    def no_weight_decay(self) -> set[str]:
        """Full names of the parameters that weight decay leaves alone: biases, vectors, and what parts declare."""
        exempt = {name for name, p in self.named_parameters() if p.ndim <= 1 or name.endswith(".bias")}
        for path, part in self.named_modules():
            if isinstance(part, Part):
                exempt |= {f"{path}.{name}" for name in part.no_weight_decay()}
        return exempt

    def freeze(self, trained: Collection[str]) -> None:
        """Freeze everything except some entries of the state.

        Frozen parameters get no gradient.  Frozen modules stay in evaluation mode whatever :meth:`train` is called
        with: no dropout, no drop path, and batch norm uses its running statistics and leaves them as they are.

        Args:
            trained: names of the parameters and buffers that are still trained.
        """
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name in trained)
        self._frozen = tuple(_frozen_below(self, "", trained))
        self.train(self.training)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all modules that are not frozen."""
        super().train(mode)
        for path in self._frozen:
            self.get_submodule(path).eval()
        return self

    def batch_last_incompatibility(self) -> str | None:
        """Why its passes cannot be computed with the batch innermost, in one sentence; None where they can."""
        return f"a {type(self).__name__} is not known with the batch innermost"

    def innermost(self) -> Innermost:
        """The passes of several models like this one, where nothing is said against it."""
        raise NotImplementedError

    def to_canonical(self, state: State) -> dict[str, Tensor]:
        """A state of this model under the names of its canonical checkpoint (timm's, for a ViT)."""
        return dict(state)

    def from_canonical(self, state: State) -> dict[str, Tensor]:
        """The inverse of :meth:`to_canonical`."""
        return dict(state)


class Innermost(Protocol):
    """The passes of several models at once, with the batch innermost; see :mod:`vitlab.models.innermost`."""

    rest: Model  #: what is left to do for one of them, from the features of a batch to its output

    def rest_of(self, rows: State) -> dict[str, Tensor]:
        """Which tensors ``rest`` needs, by the names they have there."""

    def features(self, rows: State, draws: Draws, x_KBCHW: Tensor) -> Tensor:
        """(K, B, ...) of the images of K models; gradients flow to ``rows``.

        Args:
            rows: their parameters and buffers by name, each with the models in front.
            draws: what their layers draw from, each with the models in front.
            x_KBCHW: their images.
        """


def _frozen_below(module: nn.Module, path: str, trained: Collection[str]) -> Iterator[str]:
    """Yield the paths of the outermost submodules that hold no trained entry.

    A module without any entries, such as dropout, counts as part of the frozen body where its parent also holds frozen
    entries, and as part of the head where all entries of its parent are trained.
    """
    for name, child in module.named_children():
        below = f"{path}{name}."
        held = [f"{below}{entry}" in trained for entry in child.state_dict()]
        if not any(held):
            yield below.removesuffix(".")
        elif not all(held):
            yield from _frozen_below(child, below, trained)


model = Slot("model", Model)
