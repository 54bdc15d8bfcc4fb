"""Bugs, as a change of the code may introduce them, patched into the running code.

The files of the code stay as they are, and with them the places of results in a store.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import Tensor

from vitlab.components.attention.softmax import SoftmaxAttention
from vitlab.components.position.additive import Learned
from vitlab.data.augment.geometric import Crop
from vitlab.engines.batch_last_kernels import Attend
from vitlab.training.loop import Training


def no_position(patch: pytest.MonkeyPatch) -> None:
    """Do not add the position embedding, although it is learned."""
    patch.setattr(Learned, "add", lambda self, x_BTD, layer: x_BTD)


def wrong_scale(patch: pytest.MonkeyPatch) -> None:
    """Scale by 1 / K instead of 1 / root K, in the kernels of the loop and of stacked trials."""
    mix, attend = SoftmaxAttention._mix_values, Attend.apply

    def wrong(self: SoftmaxAttention, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
        return mix(self, q * self.scale, k, v, bias)

    patch.setattr(Attend, "apply", lambda q, kv, bias, scale: attend(q, kv, bias, scale**2))
    patch.setattr(SoftmaxAttention, "_mix_values", wrong)


def half_the_rate(patch: pytest.MonkeyPatch) -> None:
    """Train every step at half the learning rate."""
    sound = Training.learning_rate
    patch.setattr(Training, "learning_rate", lambda self, step: 0.5 * sound(self, step))


def no_augmentation(patch: pytest.MonkeyPatch) -> None:
    """Return images unchanged from crops."""
    patch.setattr(Crop, "__call__", lambda self, x_BCHW, *drawn: x_BCHW)


BUGS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    bug.__name__: bug for bug in (no_position, wrong_scale, half_the_rate, no_augmentation)
}
