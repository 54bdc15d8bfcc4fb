"""The cost of a model: parameters and multiply-accumulates, counted without computing values.

A model is built and run on torch's meta device, where tensors have shapes but no values; torch's own counter adds up
its matrix products and convolutions.  Additions, norms, activations and softmax are not counted, as is usual.

    params = (C p^2 + 1) D + P D + (P + N) D + L (4 D + 4 D^2 + 4 D + 2 D M + M + D) + 2 D + (D + 1) K
    MACs   = N C p^2 D + L (4 T D^2 + 2 T^2 D + 2 T D M) + D K

with C channels, p^2 pixels of a patch, D width, P prefix tokens, N patches, T = P + N, L blocks, M hidden width of the
MLP and K classes; a second classifier adds (D + 1) K and D K.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from vitlab.geometry import DataInfo, Geometry
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
    """Build a model on the meta device and return its cost."""
    with torch.device("meta"):
        built = model.build(choice, data)
    count = parameters(built)
    head = getattr(built, "head", None)
    return Cost(count, count - (parameters(head) if isinstance(head, nn.Module) else 0), macs(built, data))


def formula(g: Geometry, *, hidden: int, classifiers: int = 1) -> Cost:
    """Return the cost of a plain ViT by the closed form above.

    Args:
        g: sizes; one learned position per token, biases everywhere, a final norm, linear classifiers.
        hidden: hidden width of the MLP.
        classifiers: 2 with a distillation token's own.
    """
    d, n, t, m = g.dim, g.patches, g.tokens, hidden
    pixels = g.channels * g.patch[0] * g.patch[1]
    prefix = len(g.prefix)
    block = 4 * d + 4 * d * d + 4 * d + 2 * d * m + m + d
    body = (pixels + 1) * d + prefix * d + (prefix + n) * d + g.depth * block + 2 * d
    work = n * pixels * d + g.depth * (4 * t * d * d + 2 * t * t * d + 2 * t * d * m) + classifiers * d * g.classes
    return Cost(body + classifiers * (d + 1) * g.classes, body, work)
