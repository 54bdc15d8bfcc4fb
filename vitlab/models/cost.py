"""What a model costs: parameters and multiply-accumulates, counted without computing anything.

A model is built and run on torch's meta device, where tensors have shapes and no values; torch's own counter adds up
the matrix products and convolutions it meets.  Additions, norms, activations and softmax are not counted, as is usual.

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
    """What one model costs."""

    params: int  #: parameters
    body_params: int  #: parameters without the classifier's: what arms with other numbers of classes share
    macs: int  #: multiply-accumulates of one image, forward


def parameters(of: nn.Module) -> int:
    """Number of parameters; one that is shared counts once."""
    return sum(parameter.numel() for parameter in of.parameters())


def macs(of: Model, data: DataInfo) -> int:
    """Multiply-accumulates of one image, forward, in matrix products and convolutions.

    The model itself is neither moved nor run: its shapes are, on the meta device, in evaluation mode.
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
    """Build a model on the meta device and count; raises what building it raises."""
    with torch.device("meta"):
        built = model.build(choice, data)
    count = parameters(built)
    head = getattr(built, "head", None)
    return Cost(count, count - (parameters(head) if isinstance(head, nn.Module) else 0), macs(built, data))


def formula(g: Geometry, *, hidden: int, classifiers: int = 1) -> Cost:
    """The closed form above: the plain ViT of these sizes, by arithmetic alone.

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
