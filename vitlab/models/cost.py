"""The cost of a model: parameters and multiply-accumulates.

Matrix products and convolutions of a pass of one image are counted by torch's own formulas.  Additions, norms,
activations and softmax are not counted, as is usual.  :func:`cost_of` builds and runs the model on torch's meta device,
where tensors have shapes but no values.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from vitlab.errors import UserError
from vitlab.geometry import DataInfo
from vitlab.models.contract import Model, evaluation_mode, model
from vitlab.spec import ChoiceLike


@dataclass(frozen=True)
class Cost:
    """The cost of one model."""

    params: int  #: parameters
    body_params: int  #: parameters without the classifier's, comparable between numbers of classes
    macs: int  #: multiply-accumulates of one image, forward


def count_parameters(of: nn.Module) -> int:
    """Return the number of parameters; shared ones count once."""
    return sum(parameter.numel() for parameter in of.parameters())


def count_macs(model: Model, data: DataInfo) -> int:
    """Return the multiply-accumulates of one forward pass of one image, in matrix products and convolutions.

    The pass runs in evaluation mode, on the device of the model.
    """
    first = next(model.parameters())
    x_1CHW = torch.zeros((1, data.channels, *data.image), device=first.device, dtype=first.dtype)
    counter = _Counter()  # type: ignore[no-untyped-call]
    # Fused kernels have no formula on CPUs.
    with evaluation_mode(model), torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        model(x_1CHW)
    return counter.flops // 2


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of floating point operations by torch's formulas.

    Torch's own, ``FlopCounterMode``, imports torch._dynamo, which takes nearly as long as importing torch.
    """

    flops = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        result = func(*args, **kwargs)
        # Fused attention has the tag, but draws only with dropout.  A model in training is counted in any case.
        draws = torch.Tag.nondeterministic_seeded in func.tags and not name.startswith("_scaled_dot_product")
        if draws and getattr(result, "is_meta", False):
            raise RuntimeError(f"{name} draws in evaluation; draw by vitlab.plugin.noise alone")
        if formula := flop_registry.get(func._overloadpacket):
            self.flops += formula(*args, **kwargs, out_val=result)
        return result


def cost_of(choice: ChoiceLike, data: DataInfo) -> Cost:
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
    count = count_parameters(built)
    # The classifier's size depends on the number of classes, the body's does not.
    head = getattr(built, "head", None)
    return Cost(count, count - (count_parameters(head) if isinstance(head, nn.Module) else 0), count_macs(built, data))
