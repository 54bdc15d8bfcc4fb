"""A dry run of training steps for GPUs, on a machine without one: ``make gpu-dry-run``.

For every built-in component and every engine that runs on GPUs, two things are checked that would otherwise show on a
GPU only:

1. the forward pass and the loss are one graph without a break (``torch.compile`` with ``fullgraph``), which
   the engine ``compiled`` needs;
2. a training step reads nothing back from the device and mixes no devices.  The step is taken with fake tensors
   (``FakeTensorMode``) on a device that exists in Python alone, where ``.item()``, a branch on a value, an operation
   over two devices and a copy to the host raise.

At depth 12 the step is counted with drop path and without; all layers draw together, so that drop path may launch
:data:`MOST_OF_DROP_PATH` times the kernels at most.  Sixteen trials with augmentations are augmented together, and may
launch :data:`MOST_OF_TOGETHER` times the kernels of one.

Optimizers are checked in the second way only: torch itself breaks the graph in every ``Optimizer.step``.  Objectives
with modules of their own are not tried, since fake parameters cannot be moved twice.

The table has the operations of a step that compute something, which is the number of kernels that eager mode launches,
the copies to the device, and the values read back.  Only the arms of :data:`READ_BACKS` may read values back, and must;
the table repeats why.  The CPU build of torch has no guard for CUDA devices, and aborts in the backward pass of fake
CUDA tensors; hence the device in Python.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from vitlab.components.base import inside_vmap
from vitlab.data.prepare import Feed, prepare
from vitlab.engines import compiled as compiling
from vitlab.engines.base import Engine
from vitlab.engines.vmap import Vmap
from vitlab.errors import VitlabError
from vitlab.registry import list_entries, slot
from vitlab.spec import STREAMS, TrainSpec
from vitlab.training.loop import Training
from vitlab.training.optim import torch_optimizers

DEVICE = "gpu"
ENGINE_NAMES = ("loop", "vmap")
MODEL = {"type": "vit", "patch_size": 4, "dim": 16, "depth": 1, "heads": 2, "drop": 0.1, "drop_path": 0.1}
IMAGES = {"type": "synthetic", "image_size": 8, "train_images": 64, "test_images": 16, "num_classes": 3}
SCENES = {"type": "digit_scenes", "image_size": 16, "train_images": 64, "test_images": 16}
TRAIN = {"steps": 4, "batch_size": 8, "evaluations": 1}
DEPTH = 12
MOST_OF_DROP_PATH = 1.15  #: kernels of a step with drop path, relative to one without
TOGETHER = 16  #: trials whose augmentation is counted
MOST_OF_TOGETHER = 3.0  #: kernels of a step of these trials, relative to a step of one of them
AUGMENTED = {**IMAGES, "channels": 3, "augment": ["flip", "crop", "rand_augment"]}
PARTS = ("patch", "position", "block", "attention", "mlp", "norm", "head")
FURTHER = {"patch: resnet": {"patch_size": 1}, "head: distilled": {"prefix": ["class", "distillation"]}}
"""Arm to further options of its model."""

READ_BACKS = {
    "optimizer: adafactor": "torch.optim.Adafactor reads two norms of every weight, with foreach as well",
}
"""Arm to the reason why its steps read values back from the device."""

VIEWS = re.compile(
    r"^(_record_function_enter_new|_record_function_exit|promote_types|view|_unsafe_view|reshape|permute|transpose|t"
    r"|expand|unsqueeze|squeeze|select|slice|unbind|split|detach|alias|as_strided|_reshape_alias|split_with_sizes|chunk"
    r"|movedim|diagonal|unfold|lift_fresh)$"
)
"""Operations that compute nothing."""


class ReadBack(Exception):
    """A step copies values from the device to the host, which waits for the device."""


@dataclass(frozen=True)
class Arm:
    """A training to try: changes to the base."""

    name: str
    model: Mapping[str, Any]
    train: Mapping[str, Any]
    data: Mapping[str, Any] | None = None

    def training(self, seed: int = 0, device: AbstractContextManager[str] | None = None) -> Training:
        """Return the training before its first step, on the device of a context that is entered for it, or on the CPU."""
        seeds = {**dict.fromkeys(STREAMS, seed), "split": 0}
        spec = TrainSpec.model_validate({**TRAIN, **self.train})
        choice = slot("dataset").resolve_choice(dict(self.data or IMAGES))
        prepared = prepare(choice, seeds)
        model = slot("model").build({**MODEL, **self.model}, prepared.info)
        model.initialise(seed)
        with device or nullcontext("cpu") as name:
            model.to(name)
            feed = Feed(prepared, choice.options["augment"], seeds, name)
            return Training(model, feed, spec, seeds)


@dataclass(frozen=True)
class Row:
    """The findings of an arm under an engine; a finding is a number, or a sentence that says what is wrong."""

    arm: str
    engine: str
    graphs: int | str
    kernels: int | str
    copies: int = 0
    reads: int = 0

    @property
    def failed(self) -> bool:
        """True if something is wrong."""
        return isinstance(self.graphs, str) or isinstance(self.kernels, str)

    def __str__(self) -> str:
        """Return the line of the table."""
        reason = READ_BACKS[self.arm] if self.reads else ""
        return (
            f"{self.arm:32} {self.engine:6} {self.graphs:>6} {self.kernels:>7} {self.copies:>6} {self.reads:>5}  "
            f"{reason}"
        ).rstrip()


def built_in(name: str) -> list[str]:
    """Return the names of the built-in components of a slot."""
    return [entry.name for entry in list_entries(name) if entry.origin.source == "vitlab"]


def arms() -> Iterator[Arm]:
    """Yield an arm for every built-in component of a ViT, loss and optimizer, and for further options of a training."""
    yield Arm("base", {}, {})
    for part in PARTS:
        for name in built_in(part):
            pixels = part == "head" and slot("head").get(name).task == "segmentation"
            data = SCENES if pixels else {**IMAGES, "image_size": 16} if name == "resnet" else None
            arm = f"{part}: {name}"
            yield Arm(arm, {part: name, **FURTHER.get(arm, {})}, {}, data)
    for name in built_in("loss"):
        yield Arm(f"loss: {name}", {}, {"loss": name})
    for name in built_in("optimizer"):
        yield Arm(f"optimizer: {name}", {}, {"optimizer": name})
    yield Arm("mix", {}, {"mix": {"mixup": 0.8, "cutmix": 1.0}})
    yield Arm("ema", {}, {"ema": {}})
    yield Arm("clip_grad", {}, {"clip_grad": 1.0})
    for precision in ("bf16", "fp16"):
        yield Arm(f"precision: {precision}", {}, {"precision": precision})
    for name in built_in("augment"):
        yield Arm(f"augment: {name}", {}, {}, {**IMAGES, "channels": 3, "augment": [name]})
    yield Arm("augment: of masks", {"head": "segmentation"}, {}, {**SCENES, "augment": built_in("augment")})


# -- one graph --------------------------------------------------------------------------------------------------------


def graphs_of(arm: Arm, engine: str) -> int | str:
    """Return the number of graphs of an arm's loss in two steps, or why it cannot be compiled."""
    torch.compiler.reset()
    torch.compiler.assume_constant_result(inside_vmap)
    counter = _GraphCounter()
    try:
        if engine == "loop":
            training = arm.training()
            compiling.BACKEND = counter
            training.compiled_loss = compiling.compile_loss(training)
            training.train_step()
            training.train_step()
        else:
            trainings = [arm.training(seed) for seed in range(2)]
            stack = Vmap(trainings)
            stack._compute_losses = torch.compile(stack._compute_losses, backend=counter, fullgraph=True)  # type: ignore[method-assign]
            stack.train_step()
            stack.train_step()
    except Exception as error:
        return _sentence(error)
    return counter.graphs


class _GraphCounter:
    """A backend of ``torch.compile`` that counts graphs and runs them unchanged."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        return graph.forward


# -- the device -------------------------------------------------------------------------------------------------------


class _Device:
    """The module of the device, as ``torch.cuda`` is of CUDA devices."""

    is_available = staticmethod(lambda: True)
    is_initialized = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    manual_seed = staticmethod(lambda seed: None)
    manual_seed_all = staticmethod(lambda seed: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])


@cache
def register_device() -> torch.library.Library:
    """Register the device in this process; autocast changes no dtype on it."""
    _setup_privateuseone_for_python_backend(DEVICE, backend_module=_Device())
    autocast = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    autocast.fallback(torch.library.fallthrough_kernel)
    return autocast


class _Fake(TorchDispatchMode):
    """Makes the inputs of copies fake and drops their values, or FakeTensorMode would copy these to the device.

    A value that is read from a tensor on the host, or on the device where that is expected, is replaced by another.
    """

    def __init__(self, mode: FakeTensorMode, reads_back: bool) -> None:
        super().__init__()
        self.mode = mode
        self.readable = {"cpu", DEVICE} if reads_back else {"cpu"}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            args = _pytree.tree_map_only(Tensor, self._fake, args)
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type in self.readable:
            return 0.5 if args[0].is_floating_point() else 0  # such as the weight of mixup, drawn on the host
        if func is torch.ops.aten._fused_sgd_.default:
            return None  # in place; torch has no rule for fake tensors
        return func(*args, **(kwargs or {}))

    def _fake(self, tensor: Tensor) -> Tensor:
        fake = tensor if isinstance(tensor, FakeTensor) else self.mode.from_tensor(tensor)
        return fake if fake.constant is None else torch.empty(fake.shape, dtype=fake.dtype, device=fake.device)


class Watch(TorchDispatchMode):
    """Counts operations, copies to the device, and values read back one by one.

    Raises:
        ReadBack: At a copy from the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.copies = self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs, outputs = _device_types((args, kwargs)), _device_types(result)
        if DEVICE in inputs and "cpu" in outputs and func.overloadpacket.__name__ in ("_to_copy", "copy_", "clone"):
            raise ReadBack(f"{func} copies from the device to the host")
        if func is torch.ops.aten._local_scalar_dense.default:
            self.reads += DEVICE in inputs
            return result
        computes = func.namespace == "aten" and not VIEWS.match(func.overloadpacket.__name__)
        if computes and DEVICE in inputs | outputs:
            is_copy = func.overloadpacket.__name__ in ("_to_copy", "copy_") and "cpu" in inputs
            self.copies += is_copy
            self.kernels += not is_copy
        return result


def step_of(arm: Arm, engine: str, count: int = 2) -> Watch | str:
    """Return the counts of the second step of an arm, of ``count`` trials if together, or what is wrong."""
    reads_back = arm.name in READ_BACKS
    try:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        count = 1 if engine == "loop" else count
        trainings = [arm.training(seed, fake_device(mode, reads_back)) for seed in range(count)]
        with fake_device(mode, reads_back):
            running: Engine = slot("engine").get(engine)(trainings)
            running.train_step()
            with Watch() as watch:
                running.train_step()
    except Exception as error:
        return _sentence(error)
    if reads_back and not watch.reads:
        return "nothing is read back; remove the arm from READ_BACKS"
    return watch


def at_depth(arm: Arm, engine: str) -> tuple[str, bool]:
    """Return a line on a deep step of an arm, and whether it is within the limit."""
    options = {"depth": DEPTH, "drop": 0.0}
    without, with_drop_path = (
        step_of(replace(arm, model={**arm.model, **options, "drop_path": share}), engine) for share in (0.0, 0.1)
    )
    if isinstance(without, str) or isinstance(with_drop_path, str):
        return f"depth {DEPTH}: {without if isinstance(without, str) else with_drop_path}", False
    ratio, syncs = with_drop_path.kernels / without.kernels, with_drop_path.reads
    line = f"depth {DEPTH}: {with_drop_path.kernels} kernels, drop path x {ratio:.2f}, {syncs} host syncs"
    return line, ratio <= MOST_OF_DROP_PATH


def together() -> tuple[str, bool]:
    """Return a line on augmented trials of one shape, and whether they are within the limit."""
    arm = Arm("together", {"depth": DEPTH, "drop": 0.0, "drop_path": 0.0}, {}, AUGMENTED)
    one, all_of_them = step_of(arm, "loop"), step_of(arm, "vmap", TOGETHER)
    if isinstance(one, str) or isinstance(all_of_them, str):
        return f"{TOGETHER} trials: {one if isinstance(one, str) else all_of_them}", False
    ratio = all_of_them.kernels / one.kernels
    line = f"{TOGETHER} trials with {', '.join(AUGMENTED['augment'])}: {all_of_them.kernels} kernels"
    return f"{line}, x {ratio:.2f} of one trial's {one.kernels}", ratio <= MOST_OF_TOGETHER


@contextmanager
def fake_device(mode: FakeTensorMode, reads_back: bool) -> Iterator[str]:
    """Make the device usable inside the block, with tensors that have no values and with fused optimizers, as on CUDA.

    Args:
        mode: The mode of all fake tensors of a training.
        reads_back: Whether reading a value back is expected, and returns another value instead of raising.
    """
    register_device()
    overwrite, pin_memory = torch.__future__.get_overwrite_module_params_on_conversion(), Tensor.pin_memory
    fused = torch_optimizers.supports_fused
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    Tensor.pin_memory = lambda self: self  # type: ignore[method-assign,assignment]
    torch_optimizers.supports_fused = lambda groups: True
    try:
        with mode, _Fake(mode, reads_back):
            yield DEVICE
    finally:
        torch_optimizers.supports_fused = fused
        Tensor.pin_memory = pin_memory  # type: ignore[method-assign]
        torch.__future__.set_overwrite_module_params_on_conversion(overwrite)


def _device_types(tree: Any) -> set[str]:
    return {leaf.device.type for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, Tensor | nn.Parameter)}


def _sentence(error: BaseException) -> str:
    error = error.__cause__ if isinstance(error.__cause__, Exception) else error
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"


# -- the table --------------------------------------------------------------------------------------------------------


def row_of(arm: Arm, engine: str, compiled: bool = True) -> Row | None:
    """Return the findings of an arm under an engine; None if the engine does not support it.

    Args:
        arm: The arm.
        engine: The name of the engine.
        compiled: Whether graphs are made, which takes some seconds per arm and engine.
    """
    try:
        training = arm.training()
    except VitlabError as error:
        return Row(arm.name, engine, _sentence(error), "")
    if slot("engine").get(engine).incompatibility(training) is not None:
        return None
    step, graphs = step_of(arm, engine), graphs_of(arm, engine) if compiled else 0
    if isinstance(step, str):
        return Row(arm.name, engine, graphs, step)
    return Row(arm.name, engine, graphs, step.kernels, step.copies, step.reads)


def main(arguments: Sequence[str]) -> int:
    """Print the table of the arms; return 1 if something is wrong.

    Args:
        arguments: Parts of the names of the arms to try, by default all; ``--steps`` makes no graphs.
    """
    patterns = [argument for argument in arguments if argument != "--steps"]
    print(f"{'arm':32} {'engine':6} {'graphs':>6} {'kernels':>7} {'copies':>6} {'reads':>5}")
    failures = 0
    for arm in arms():
        if patterns and not any(pattern in arm.name for pattern in patterns):
            continue
        for engine in ENGINE_NAMES:
            row = row_of(arm, engine, "--steps" not in arguments)
            if row is None:
                print(f"{arm.name:32} {engine:6} not supported by this engine")
                continue
            line, is_within = at_depth(arm, engine)
            failures += row.failed or not is_within
            print(row, f"{'':32} {engine:6} {line}{'' if is_within else '  TOO MANY'}", sep="\n", flush=True)
    if not patterns:
        line, is_within = together()
        failures += not is_within
        print(f"{line}{'' if is_within else '  TOO MANY'}")
    print(f"{failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
