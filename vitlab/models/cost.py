"""The cost of a model: parameters and multiply-accumulates, counted without computing values.

A model is built and run on torch's meta device, where tensors have shapes but no values; torch's own counter adds up
its matrix products and convolutions.  Additions, norms, activations and softmax are not counted, as is usual.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from vitlab.errors import UserError
from vitlab.geometry import DataInfo
from vitlab.models.contract import Model, model
from vitlab.spec import Choice


@dataclass(frozen=True)
class Cost:
    """The cost of one model."""

    params: int  #: parameters
    body_params: int  #: parameters without the classifier's, comparable between numbers of classes
    macs: int  #: multiply-accumulates of one image, forward


def parameters(of: nn.Module) -> int:
    """Return the number of parameters; shared ones count once."""
    return sum(parameter.numel() for parameter in of.parameters())


def macs(of: Model, data: DataInfo) -> int:
    """Return the multiply-accumulates of one forward pass of one image, in matrix products and convolutions.

    The pass runs on the meta device, in evaluation mode; the model itself is neither moved nor run.
    """
    tensors = {name: value.detach().to("meta") for name, value in [*of.named_parameters(), *of.named_buffers()]}
    x_1CHW = torch.empty((1, data.channels, *data.image), device="meta", dtype=next(of.parameters()).dtype)
    counter = FlopCounterMode(display=False)
    training = of.training
    of.eval()
    try:
        with torch.no_grad(), counter:
            torch.func.functional_call(of, tensors, (x_1CHW,))
    finally:
        of.train(training)
    flops: int = counter.get_total_flops()
    return flops // 2


def cost_of(choice: Choice | str | Mapping[str, object], data: DataInfo) -> Cost:
    """Build a model on the meta device and return its cost.

    Raises:
        UserError: if the model has more numbers than torch can count.
    """
    try:
        with torch.device("meta"):
            built = model.build(choice, data)
    except (RuntimeError, TypeError) as error:  # torch has no type of its own for sizes beyond 64 bits
        if "overflow" not in str(error).lower():
            raise
        raise UserError("the model is too large for torch, whose sizes have 64 bits; make it smaller") from error
    count = parameters(built)
    head = getattr(built, "head", None)
    return Cost(count, count - (parameters(head) if isinstance(head, nn.Module) else 0), macs(built, data))
