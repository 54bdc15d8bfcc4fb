"""Loss scaling of training in fp16, so that small gradients do not vanish.

The loss is multiplied by a scale before the backward pass, and the gradients are divided by it before they are clipped.
A step with a gradient that is not finite is skipped, and the scale is halved; after 2,000 steps without one it is
doubled.  Reference: arXiv:1710.03740, section 3.2.

For torch's fused optimizers nothing is read back from the device; others read in every step whether it is skipped.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vitlab.training.checkpoint import State


class LossScaling:
    """The scale of a training, and optimizer steps under it.

    Args:
        device: The device of the weights.
    """

    def __init__(self, device: torch.device) -> None:
        self._scaler = torch.amp.GradScaler(device.type)
        self._skipped = torch.zeros((), device=device)  # steps since the last measurement

    def scale(self, loss: Tensor) -> Tensor:
        """Return the scaled loss."""
        scaled: Tensor = self._scaler.scale(loss)
        return scaled

    def step(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], clip_grad: float | None
    ) -> None:
        """Unscale and clip the gradients, and take an optimizer step unless one of them is not finite.

        Args:
            optimizer: The optimizer.
            parameters: Its parameters.
            clip_grad: The largest global norm of the gradient; None for any.
        """
        self._scaler.unscale_(optimizer)
        # Needed without clipping as well: a norm that is not finite tells a skipped step.
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if clip_grad is not None:
            torch.nn.utils.clip_grads_with_norm_(parameters, clip_grad, norm)
        self._scaler.step(optimizer)
        self._scaler.update()
        self._skipped += ~norm.isfinite()

    def take_skipped(self) -> float:
        """Return the number of steps skipped since the last call."""
        skipped = float(self._skipped)
        self._skipped.zero_()
        return skipped

    def state_dict(self) -> State:
        """Return the scale, the number of steps since it changed, and the number of skipped steps."""
        return {"scaler": self._scaler.state_dict(), "skipped": self._skipped}

    def load_state_dict(self, state: State) -> None:
        """Restore a state."""
        self._scaler.load_state_dict(state["scaler"])
        self._skipped.copy_(state["skipped"])
