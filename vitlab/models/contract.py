"""The contract of models.

B batch, C channels, H and W pixels or positions of a map, T tokens, D width.
"""

import hashlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from vitlab.components.base import NewState as NewState
from vitlab.components.base import Options, Part
from vitlab.components.base import State as State
from vitlab.geometry import DataInfo, Geometry, Work
from vitlab.registry import ResolvedChoice, Slot


class Model(nn.Module):
    """Contract: ``Model(data, *, options)``, a module from images to a NamedTuple of logits.

    A model may split ``forward`` into ``forward_features``, which returns tokens (B, T, D) or a feature map
    (B, D, H, W), and ``forward_head``, which returns the output from these.  Distillation by tokens needs both.
    """

    geometry: Geometry | None = None  #: of a model of tokens
    _frozen: tuple[str, ...] = ()  #: paths of the modules that stay in evaluation mode

    @classmethod
    def incompatibility(cls, data: DataInfo, options: Options) -> str | None:
        """Return the reason why ``data`` and ``options`` cannot be combined, in one sentence; None if they can.

        Raises:
            GeometryError: for sizes that do not divide.
        """
        return None

    @classmethod
    def work(cls, data: DataInfo, options: Options) -> Work | None:
        """Return the amount of work per image; None if it is unknown.

        Trials with little work are trained together; see :mod:`vitlab.planning.engine_choice`.
        """
        return None

    @property
    def vmap_safe(self) -> bool:
        """True if every part may be vectorised over replicates."""
        return all(part.vmap_safe for part in self.modules() if isinstance(part, Part))

    @property
    def component_choices(self) -> Mapping[str, ResolvedChoice]:
        """Chosen component of each part of the model, by the part's path; empty for a model without components."""
        return {}

    def forward(self, x_BCHW: Tensor) -> NamedTuple:
        """Return the output for a batch of images, BCHW."""
        raise NotImplementedError

    def logits_by_head(self, output: Any) -> dict[str, Tensor]:
        """Return the logits of an output by name: ``""`` for the prediction, other names for further ones."""
        return {"": output.logits}

    def initialise(self, seed: int) -> None:
        """Set every parameter to its initial value, as a function of the seed alone."""
        raise NotImplementedError

    def layer_of(self, name: str) -> int:
        """Return the layer of a parameter, for layer-wise decay: 0 for the stem, blocks from 1, the head last.

        By default, for a model that holds another one, its layer there; parts beside that one are in its last layer.
        """
        inside = {path: module for path, module in self.named_modules() if path and isinstance(module, Model)}
        if not inside:
            raise NotImplementedError
        for path, module in inside.items():
            if name.startswith(f"{path}."):
                return module.layer_of(name.removeprefix(f"{path}."))
        return max(module.layer_of(other) for module in inside.values() for other, _ in module.named_parameters())

    def no_weight_decay(self) -> set[str]:
        """Return the full names of parameters without weight decay: biases, vectors, and those that parts declare."""
        exempt = {name for name, p in self.named_parameters() if p.ndim <= 1 or name.endswith(".bias")}
        for path, module in self.named_modules():
            if path and isinstance(module, Part | Model):
                exempt |= {f"{path}.{name}" for name in module.no_weight_decay()}
        return exempt

    def rate_factors(self) -> dict[str, float]:
        """Return the factor of the learning rate of each parameter that has one, by name, from models inside."""
        return {
            f"{path}.{name}": factor
            for path, module in self.named_modules()
            if path and isinstance(module, Model)
            for name, factor in module.rate_factors().items()
        }

    def stacked_maps(self) -> dict[str, int]:
        """Return the full names of matrices with several linear maps stacked along their rows, and their number."""
        return {
            f"{path}.{name}": count
            for path, part in self.named_modules()
            if isinstance(part, Part)
            for name, count in part.stacked_maps().items()
        }

    def freeze_except(self, trained: Collection[str]) -> None:
        """Freeze the model except for some entries of its state.

        Frozen parameters get no gradient.  Frozen modules stay in evaluation mode, whatever the argument of
        :meth:`train`: no dropout, no drop path, and batch norm uses its running statistics without updating them.

        Args:
            trained: names of the parameters and buffers that are still trained.
        """
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name in trained)
        # Paths, not modules: deep copies then freeze their own.
        self._frozen = tuple(_find_untrained_modules(self, "", trained))
        self.train(self.training)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the modules that are not frozen."""
        super().train(mode)
        for path in self._frozen:
            self.get_submodule(path).eval()
        return self

    def to_canonical(self, state: State) -> NewState:
        """Return a state of this model under the names of its canonical checkpoint (timm's, for a ViT)."""
        return dict(state)

    def from_canonical(self, state: State) -> NewState:
        """Return a canonical state under this model's names; the inverse of :meth:`to_canonical`."""
        return dict(state)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Set a model to evaluation mode inside the block, and to its own mode again afterwards."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def names_in_last_layer(model: Model) -> set[str]:
    """Return the names of the entries of a model's state in its last layer."""
    layers = {name: model.layer_of(name) for name in model.state_dict()}
    # The head is alone in the last layer.
    last = max(layers.values())
    return {name for name, layer in layers.items() if layer == last}


def weights_digest(state: State) -> str:
    """Return the SHA-256 over names, dtypes, shapes and bytes, sorted by name."""
    sha256 = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        sha256.update(f"{name}\n{tensor.dtype}\n{tuple(tensor.shape)}\n".encode())
        sha256.update(tensor.flatten().view(torch.uint8).numpy().data)
    return sha256.hexdigest()


def _find_untrained_modules(module: nn.Module, path: str, trained: Collection[str]) -> Iterator[str]:
    """Yield the paths of the outermost submodules that hold no trained entry.

    A module without any entries, such as dropout, counts as part of the frozen body where its parent also holds frozen
    entries, and as part of the head where all entries of its parent are trained.
    """
    for name, child in module.named_children():
        below = f"{path}{name}."
        is_trained = [f"{below}{entry}" in trained for entry in child.state_dict()]
        if not any(is_trained):
            yield below.removesuffix(".")
        elif not all(is_trained):
            yield from _find_untrained_modules(child, below, trained)


model = Slot("model", Model)
