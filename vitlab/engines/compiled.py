"""The engines ``compiled`` and ``compiled_vmap``, whose losses are compiled by ``torch.compile``.

The forward pass, the loss and their gradients become one graph without a break, so that a component that cannot be
traced is a failure of the engine, and the trials are trained by its fallback.  Batches, augmentation, optimizer steps
and evaluations are not compiled.  Keys of random draws are tensors here, so that a new epoch needs no new graph.  On
CUDA, ``compiled`` replays its kernels as a CUDA graph.

Compilation takes up to a minute per trial or batch of trials; its result is cached on disk by torch.  Results equal the
engine ``loop``'s up to rounding, except that third-party components that draw from torch's own generator draw other
numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from vitlab import noise
from vitlab.components.base import inside_vmap
from vitlab.engines.base import Loop, engine
from vitlab.engines.vmap import Vmap
from vitlab.training.loop import LossFunction, Training
from vitlab.training.losses import Value

BACKEND: Any = "inductor"  #: of ``torch.compile``; only tests replace it

Function = TypeVar("Function", bound=Callable[..., Any])


@engine.register("compiled")
class Compiled(Loop):
    """Trainings, one after another, whose forward and backward passes are compiled."""

    fallback = "loop"

    @classmethod
    def incompatibility(cls, training: Training) -> str | None:
        if training.spec.precision == "fp64":
            return "torch.compile does not support precision fp64, at which code that it compiles for CPUs crashes"
        return None

    def __init__(self, trainings: Sequence[Training]) -> None:
        super().__init__(trainings)
        with self._convert_to_engine_failed():
            torch.compiler.reset()  # otherwise graphs of earlier trainings of this process count towards a limit
            for training in self.trainings:
                training.compiled_loss = compile_loss(training)


@engine.register("compiled_vmap")
class CompiledVmap(Vmap):
    """Trainings with stacked weights as in ``vmap``, whose forward and backward passes are one compiled graph.

    Meant for GPUs, where ``vmap`` alone moves each intermediate result through memory.
    """

    fallback = "vmap"
    benchmarked = False

    @classmethod
    def incompatibility(cls, training: Training) -> str | None:
        return super().incompatibility(training) or Compiled.incompatibility(training)

    def __init__(self, trainings: Sequence[Training]) -> None:
        super().__init__(trainings)
        with self._convert_to_engine_failed():
            torch.compiler.reset()
            self._compute_losses = _compile_function(self._compute_losses)  # type: ignore[method-assign]


def compile_loss(training: Training) -> LossFunction:
    """Return the loss function of a training, compiled to one graph at its first call."""
    device = training.feed.device
    # A small model's kernels take longer to launch than to run, and a CUDA graph is one launch.  It writes gradients to
    # the same memory in every step, so those of the parts of a batch cannot be accumulated.
    cuda_graph = device.type == "cuda" and training.micro_batches.whole
    compiled = _compile_function(training.compute_loss, {"triton.cudagraphs": cuda_graph})

    def compute_loss(x_BCHW: Tensor, target: Tensor, draws: noise.Draws) -> Value:
        dropout, drop_path, step = noise.tensor_of([draws.dropout, draws.drop_path, draws.step], device).unbind()
        loss = compiled(x_BCHW, target, noise.Draws(dropout, drop_path, draws.sample_B, step, draws.scale_LB))
        # The next step overwrites what a CUDA graph returns, and losses are read at an evaluation.
        return Value(loss.total.clone(), {name: part.clone() for name, part in loss.parts.items()})

    return compute_loss


def _compile_function(function: Function, options: Mapping[str, bool] = {}) -> Function:
    # The function reads torch's stack of interpreters, which cannot be traced and is constant in a graph.
    torch.compiler.assume_constant_result(inside_vmap)  # type: ignore[no-untyped-call]
    # As torch.use_deterministic_algorithms sets it, which :func:`vitlab.runner.execution.torch_settings` avoids.
    deterministic = torch.are_deterministic_algorithms_enabled()
    backend_options: Any = {"deterministic": deterministic, **options} if BACKEND == "inductor" else None
    compiled: Any = torch.compile(function, backend=BACKEND, fullgraph=True, dynamic=False, options=backend_options)
    return compiled  # torch types it as any callable
