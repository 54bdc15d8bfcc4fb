"""Tests that the contract tests detect every bad optimizer, schedule, loss, objective, data set and augmentation."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import slot_fixtures
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.errors import BrokenComponent
from vitlab.plugin import (
    MLP,
    Augment,
    DataInfo,
    Dataset,
    Geometry,
    Group,
    Head,
    Images,
    Logits,
    Loss,
    Optimizer,
    Pictures,
    Position,
    Schedule,
    Setup,
    Split,
    Supervised,
    Value,
    check_component,
    noise,
    slot,
)
from vitlab.training.metrics.predictions import Accuracy

SLOTS = ("optimizer", "schedule", "loss", "objective", "dataset", "augment", "mlp", "position", "head", "metric")


@pytest.fixture(autouse=True)
def _slots_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    slot_fixtures.keep(monkeypatch, *map(slot, SLOTS))


def check(name: str, component: type[Any]) -> None:
    slot(name).register("mine")(component)
    check_component(name, "mine")


# -- optimizers -------------------------------------------------------------------------------------------------------


class Momentum(torch.optim.Optimizer):
    """SGD with momentum and decoupled weight decay, right in every respect."""

    def __init__(self, groups: Sequence[Group]) -> None:
        super().__init__(groups, {"lr": 0.1, "weight_decay": 0.0})

    def rate(self, group: Group) -> float:
        return group["lr"]

    def decay(self, group: Group) -> float:
        return group["weight_decay"]

    def memory(self, p: Tensor) -> dict[str, Any]:
        return self.state[p]

    def noise(self, p: Tensor) -> Any:
        return 0.0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                memory = self.memory(p)
                memory["m"] = 0.9 * memory.get("m", 0.0) + p.grad
                p.mul_(1 - self.rate(group) * self.decay(group))
                p.sub_(self.rate(group) * (memory["m"] + self.noise(p)))


class Good(Optimizer):
    """SGD with momentum."""

    kind: type[torch.optim.Optimizer] = Momentum

    def __init__(self, *, lr: float = 0.05, weight_decay: float = 0.1) -> None:
        self.lr = lr
        self.weight_decay = weight_decay

    def build(self, groups: Sequence[Group]) -> torch.optim.Optimizer:
        return self.kind(groups)  # type: ignore[call-arg]


class InADict(Momentum):
    """Momentum that no checkpoint holds."""

    def __init__(self, groups: Sequence[Group]) -> None:
        super().__init__(groups)
        self.memories: dict[Tensor, dict[str, Any]] = {}

    def memory(self, p: Tensor) -> dict[str, Any]:
        return self.memories.setdefault(p, {})


class OwnRate(Momentum):
    def rate(self, group: Group) -> float:
        return 0.05


class OwnDecay(Momentum):
    def decay(self, group: Group) -> float:
        return 0.1


class NoDecay(Momentum):
    def decay(self, group: Group) -> float:
        return 0.0


class NumpyNoise(Momentum):
    def noise(self, p: Tensor) -> Any:
        return torch.from_numpy(np.random.randn(*p.shape)).to(p)


class PythonNoise(Momentum):
    def noise(self, p: Tensor) -> Any:
        return random.random()


class Ascent(Momentum):
    def rate(self, group: Group) -> float:
        return -group["lr"]


class Idle(Momentum):
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        pass


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (
            InADict,
            "interrupted after 3 steps ends with other weights than an equal one; keep what steps change in the state",
        ),
        (OwnRate, r"steps at rate 0 move .*; read the rate from group\['lr'\]"),
        (OwnDecay, r"without a gradient treat .* as if group\['weight_decay'\] were another"),
        (NoDecay, r"without a gradient treat .* as if group\['weight_decay'\] were another"),
        (NumpyNoise, "draws from a generator of torch, numpy or Python: draw from vitlab.plugin.noise"),
        (PythonNoise, "draws from a generator of torch, numpy or Python: draw from vitlab.plugin.noise"),
        (Idle, "steps at rate 0.01 move no weight"),
        (Ascent, "steps at rate 0.01 move no weight, or follow the gradients; go against them"),
    ],
)
def test_bad_optimizer_is_caught(kind: type[torch.optim.Optimizer], sentence: str) -> None:
    class Bad(Good):
        """SGD with momentum, and a fault."""

    globals()["Bad"] = Bad  # found again under its name
    Bad.__qualname__, Bad.kind = "Bad", kind
    with pytest.raises(AssertionError, match=sentence):
        check("optimizer", Bad)


def test_good_optimizer_passes() -> None:
    check("optimizer", Good)


# -- schedules --------------------------------------------------------------------------------------------------------


class Line(Schedule):
    """A line that ends at 0."""

    def factor(self, step: int, steps: int) -> float:
        return 1 - step / max(1, steps - 1)


class Warm(Schedule):
    """A warm-up that divides by the steps after it."""

    def __init__(self, *, warmup: float = 0.0) -> None:
        self.warmup = warmup

    def factor(self, step: int, steps: int) -> float:
        return 1 / (steps - round(self.warmup * steps))


class Falling(Schedule):
    """A factor that is the last one times 0.9."""

    def __init__(self) -> None:
        self.last = 1.0

    def factor(self, step: int, steps: int) -> float:
        self.last *= 0.9
        return self.last


@pytest.mark.parametrize(
    ("cls", "sentence"),
    [
        (Line, "the factor of step 1 of 2 is 0.0; it is a number above 0"),
        (Warm, "with warmup 1.0: factor in a training of 1 steps: ZeroDivisionError"),
        (Falling, "factors depend on the order of the calls"),
    ],
)
def test_bad_schedule_is_caught(cls: type[Schedule], sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check("schedule", cls)


# -- losses -----------------------------------------------------------------------------------------------------------


class Summed(Loss):
    """A sum over images."""

    def __call__(self, logits_by_head: Mapping[str, Tensor], target: Tensor) -> Value:
        return Value(F.cross_entropy(logits_by_head[""], target, reduction="sum"), {})


class Weighted(Loss):
    """A mean over the images of class 0, of which a microbatch may have none."""

    def __call__(self, logits_by_head: Mapping[str, Tensor], target: Tensor) -> Value:
        chosen = (target == 0).double() + 0.1
        loss_B = F.cross_entropy(logits_by_head[""], target, reduction="none")
        return Value((loss_B * chosen).sum() / chosen.sum(), {})


class Rooted(Loss):
    """A probability, whose logarithm is infinite."""

    def __call__(self, logits_by_head: Mapping[str, Tensor], target: Tensor) -> Value:
        p_B = logits_by_head[""].softmax(1).gather(1, target[:, None])
        return Value(-p_B.log().mean(), {})


class Noisy(Loss):
    """A mean with a draw of torch's generator."""

    def __call__(self, logits_by_head: Mapping[str, Tensor], target: Tensor) -> Value:
        logits = logits_by_head[""]
        return Value(F.cross_entropy(logits + 0.1 * torch.rand_like(logits), target), {})


class Halved(Loss):
    """A mean in half precision."""

    def __call__(self, logits_by_head: Mapping[str, Tensor], target: Tensor) -> Value:
        return Value(F.cross_entropy(logits_by_head[""], target).half(), {})


class Cut(Loss):
    """A mean whose gradient is lost."""

    def __call__(self, logits_by_head: Mapping[str, Tensor], target: Tensor) -> Value:
        return Value(F.cross_entropy(logits_by_head[""], target).detach(), {})


class Shifts(Loss):
    """A change of the logits that repeats nothing once it is made."""

    def __call__(self, logits_by_head: Mapping[str, Tensor], target: Tensor) -> Value:
        logits = logits_by_head[""]
        return Value(F.cross_entropy(logits.sub_(logits.max()), target), {})


class Turned(Loss):
    """A likelihood, which would be maximised."""

    def __call__(self, logits_by_head: Mapping[str, Tensor], target: Tensor) -> Value:
        return Value(-F.cross_entropy(logits_by_head[""], target), {})


class Shadowing(Loss):
    """An option with the name of a method."""

    def __init__(self, *, weight: float = 2.0) -> None:
        self.weight = weight  # type: ignore[method-assign,assignment]

    def __call__(self, logits_by_head: Mapping[str, Tensor], target: Tensor) -> Value:
        return Value(self.weight * F.cross_entropy(logits_by_head[""], target), {})  # type: ignore[operator]


@pytest.mark.parametrize(
    ("cls", "sentence"),
    [
        (Shadowing, "'float' object is not callable; an attribute, .* may have the name of a method .*: rename it"),
        (Summed, "in two parts, and .* at once: return a mean over the batch, not a sum"),
        (Weighted, "in two parts, and .* at once: .*, the number of its terms from weight"),
        (Noisy, "draws from a generator of torch, numpy or Python: draw from vitlab.plugin.noise"),
        (Halved, "is torch.float16 of logits in torch.float64; keep their dtype"),
        (Cut, "has no gradient; compute it by torch alone"),
        (Shifts, r"changes its arguments; .* x.clone\(\)"),
        (Rooted, "the gradient of logits up to 100 is not finite"),
        (Turned, "of right predictions and .* of wrong ones; it is minimised"),
    ],
)
def test_bad_loss_is_caught(cls: type[Loss], sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check("loss", cls)


# -- objectives -------------------------------------------------------------------------------------------------------


class Ramp(Supervised):
    """A loss whose weight grows in Python, where no checkpoint holds it."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.weight_now = 1.0

    def after_step(self, step: int) -> None:
        self.weight_now *= 1.5

    def loss(self, x: Tensor, target: Tensor) -> Value:
        return Value(self.weight_now * super().loss(x, target).total, {})


class Tossed(Supervised):
    """A loss times a number of Python's generator."""

    def loss(self, x: Tensor, target: Tensor) -> Value:
        return Value(random.random() * super().loss(x, target).total, {})


@pytest.mark.parametrize(
    ("cls", "sentence"),
    [
        (Ramp, "interrupted after 3 steps ends with other weights"),
        (Tossed, "draws from a generator of torch, numpy or Python: draw from vitlab.plugin.noise"),
    ],
)
def test_bad_objective_is_caught(cls: type[Supervised], sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check("objective", cls)


# -- data sets --------------------------------------------------------------------------------------------------------


class Dots(Dataset):
    """Noise with a bright corner."""

    def info(self) -> DataInfo:
        return DataInfo(image=(4, 4), channels=1, classes=3, identity="dots:1")

    def read(self, split: Split) -> Images:
        draw_ND = noise.uniform(noise.key(0, "dots", split), torch.arange(12), 16)
        return Images((draw_ND.view(12, 1, 4, 4) * 255).to(torch.uint8), torch.arange(12) % 3)


class Changing(Dots):
    """Another content at every reading."""

    def read(self, split: Split) -> Images:
        return Images(torch.from_numpy(np.random.randint(0, 256, (12, 1, 4, 4), np.uint8)), super().read(split).y_N)


class Leaking(Dots):
    """Equal splits."""

    def read(self, split: Split) -> Images:
        return super().read("train")


class FromOne(Dots):
    """Labels from 1."""

    def read(self, split: Split) -> Images:
        x_NCHW, y_N = super().read(split)
        return Images(x_NCHW, y_N + 1)


class Floating(Dots):
    """Pixels from 0 to 1."""

    def read(self, split: Split) -> Images:
        x_NCHW, y_N = super().read(split)
        return Images(x_NCHW / 255, y_N)


class Wide(Dots):
    """An info of another size."""

    def info(self) -> DataInfo:
        return DataInfo(image=(4, 8), channels=1, classes=3, identity="dots:1")


class Unnamed(Dots):
    """No identity, although it is here."""

    def info(self) -> DataInfo:
        return DataInfo(image=(4, 4), channels=1, classes=3)


class Short(Dots):
    """Labels of another type, one too few."""

    def read(self, split: Split) -> Images:
        x_NCHW, y_N = super().read(split)
        return Images(x_NCHW, y_N[1:].int())


class Grouped(Dots):
    """Groups of some images only."""

    def groups(self) -> Tensor:
        return torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("cls", "sentence"),
    [
        (Changing, "split train differs at the second reading"),
        (Leaking, "12 of 12 test images are training images, too"),
        (FromOne, r"there are labels \[3\], and info says 3 classes; labels are 0 to 2"),
        (Floating, "images are torch.float32; they are torch.uint8"),
        (Wide, r"images have shape \(1, 4, 4\), and info says \(1, 4, 8\)"),
        (Unnamed, "info has no identity"),
        (Short, r"labels are torch.int32 \(11,\); they are torch.int64 \(12,\)"),
        (Grouped, r"groups is torch.int64 \(3,\); it is torch.int64 \(12,\)"),
    ],
)
def test_bad_dataset_is_caught(cls: type[Dataset], sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check("dataset", cls)


def test_good_dataset_passes() -> None:
    check("dataset", Dots)


@pytest.mark.parametrize("option", ["classes", "size", "fraction", "augment"])
def test_option_of_every_dataset_is_refused_at_registration(option: str) -> None:
    namespace: dict[str, Any] = {"Dots": Dots}
    exec(f"class Own(Dots):\n    def __init__(self, *, {option}: int = 10) -> None: ...", namespace)
    with pytest.raises(BrokenComponent, match=f"option '{option}' is one of every dataset; rename it"):
        slot("dataset").register("own")(namespace["Own"])


# -- augmentations ----------------------------------------------------------------------------------------------------


class Brighter(Augment):
    """Brighter images."""

    def __call__(self, x_BCHW: Tensor, key: noise.Key, id_B: Tensor) -> Tensor:
        by_B = noise.uniform(key, id_B, 1)[:, :, None, None]
        return (x_BCHW * (1 + by_B)).clamp(max=255).to(x_BCHW.dtype)


class Torch(Brighter):
    """Torch's generator."""

    def __call__(self, x_BCHW: Tensor, key: noise.Key, id_B: Tensor) -> Tensor:
        return torch.where(torch.rand(len(x_BCHW), 1, 1, 1) < 0.5, x_BCHW, x_BCHW.flip(-1))


class Numpy(Brighter):
    """Numpy's generator."""

    def __call__(self, x_BCHW: Tensor, key: noise.Key, id_B: Tensor) -> Tensor:
        return x_BCHW.roll(int(np.random.randint(16)), -1)


class Places(Brighter):
    """Draws by the place in the batch."""

    def __call__(self, x_BCHW: Tensor, key: noise.Key, id_B: Tensor) -> Tensor:
        return super().__call__(x_BCHW, key, torch.arange(len(x_BCHW)))


class Averages(Brighter):
    """A batch's mean."""

    def __call__(self, x_BCHW: Tensor, key: noise.Key, id_B: Tensor) -> Tensor:
        return (x_BCHW - x_BCHW.float().mean()).clamp(min=0).to(x_BCHW.dtype)


class Floats(Brighter):
    """Another type."""

    def __call__(self, x_BCHW: Tensor, key: noise.Key, id_B: Tensor) -> Tensor:
        return x_BCHW.double()


class InPlace(Brighter):
    """A changed argument."""

    def __call__(self, x_BCHW: Tensor, key: noise.Key, id_B: Tensor) -> Tensor:
        return x_BCHW.mul_(0)


class Blends(Brighter):
    """Masks between labels."""

    def masks(self, y_BHW: Tensor, key: noise.Key, id_B: Tensor) -> Tensor:
        return y_BHW * 50


@pytest.mark.parametrize(
    ("cls", "sentence"),
    [
        (Torch, "draws from a generator of torch, numpy or Python: draw from vitlab.plugin.noise"),
        (Numpy, "draws from a generator of torch, numpy or Python: draw from vitlab.plugin.noise"),
        (Places, "changes an image differently in another call, or beside other images"),
        (Averages, "changes an image differently in another call, or beside other images"),
        (Floats, "returns torch.float64"),
        (InPlace, r"changes its argument; .* write x = x \+ y in place of x \+= y"),
        (Blends, r"masks: there are labels \[50, 100, 150\], which no mask had"),
    ],
)
def test_bad_augmentation_is_caught(cls: type[Augment], sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check("augment", cls)


def test_good_augmentation_passes() -> None:
    check("augment", Brighter)


# -- parts on another device, in training, and heads ------------------------------------------------------------------


class Straight(MLP):
    """A line."""

    def __init__(self, g: Geometry) -> None:
        super().__init__()
        self.fc = nn.Linear(g.dim, g.dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.fc(x_BTD)


class Constant(Straight):
    """A constant tensor as a plain attribute."""

    def __init__(self, g: Geometry) -> None:
        super().__init__(g)
        self.scale_D = torch.linspace(0.5, 1, g.dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.fc(x_BTD) * self.scale_D.to(x_BTD.dtype)


class Created(Straight):
    """A tensor that is created on the default device."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.fc(x_BTD) @ torch.diag(torch.linspace(0.5, 1, x_BTD.shape[-1]).to(x_BTD.dtype))


class Placed(Straight):
    """A tensor that is created on the device of the input."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.fc(x_BTD) * torch.linspace(0.5, 1, x_BTD.shape[-1], device=x_BTD.device).to(x_BTD.dtype)


class Running(Straight):
    """A running mean as a plain attribute, which evaluations use."""

    vmap_safe = False

    def __init__(self, g: Geometry) -> None:
        super().__init__(g)
        self.mean: Tensor | float = 0.0

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x_BTD.detach().mean()
        return self.fc(x_BTD if self.training else x_BTD - self.mean)


class OwnBatchNorm(Straight):
    """A batch norm that is not torch's."""

    vmap_safe = False

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.fc(x_BTD - x_BTD.mean((0, 1)) if self.training else x_BTD)


class TorchBatchNorm(Straight):
    """Torch's batch norm, whose statistics are buffers."""

    def __init__(self, g: Geometry) -> None:
        super().__init__(g)
        self.norm = nn.BatchNorm1d(g.dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.fc(self.norm(x_BTD.transpose(1, 2)).transpose(1, 2))


@pytest.mark.parametrize(
    ("cls", "sentence"),
    [
        (Constant, "moved to another device and run there; create tensors on the device of the input"),
        (Created, "moved to another device and run there; create tensors on the device of the input"),
        (Running, "register what it keeps as a parameter or a buffer"),
        (OwnBatchNorm, "depends on the other samples of its batch in training; use torch's batch norm"),
    ],
)
def test_bad_part_is_caught(cls: type[MLP], sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check("mlp", cls)


@pytest.mark.parametrize("cls", [Placed, TorchBatchNorm])
def test_good_part_passes(cls: type[MLP]) -> None:
    check("mlp", cls)


class Stays(Position):
    """A bias that stays on the CPU.  Reference: none."""

    def __init__(self, g: Geometry) -> None:
        super().__init__()
        self.bias_HTT = torch.ones(g.heads, g.tokens, g.tokens)

    def bias(self, layer: int) -> Tensor:
        return self.bias_HTT


def test_position_that_stays_on_the_cpu_is_caught() -> None:
    with pytest.raises(AssertionError, match=r"bias\(1\) stays on the CPU"):
        check("position", Stays)


class First(Head):
    """A head on the first token, whatever it is."""

    reads: tuple[str, ...] | None = ()

    def __init__(self, g: Geometry) -> None:
        super().__init__()
        self.fc = nn.Linear(g.dim, g.classes)

    def pool(self, x_BTD: Tensor) -> Tensor:
        return x_BTD[:, :1]

    def classify(self, x_BSD: Tensor) -> Logits:
        return Logits(self.fc(x_BSD[:, 0]))


class Mean(First):
    """A head on the mean of all tokens."""

    reads = ("class",)

    def pool(self, x_BTD: Tensor) -> Tensor:
        return x_BTD.mean(1, keepdim=True)


class Unknown(Mean):
    """A head that says nothing about its tokens."""

    reads = None


@pytest.mark.parametrize(
    ("cls", "sentence"),
    [
        (First, r"declares reads = \(\), and predicts from class"),
        (Mean, "and predicts from class, patches; name the prefix"),
    ],
)
def test_false_reads_is_caught(cls: type[Head], sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check("head", cls)


def test_head_without_reads_passes() -> None:
    check("head", Unknown)


# -- wrong types ------------------------------------------------------------------------------------------------------


class Bare(Unknown):
    """A head that returns logits alone."""

    def classify(self, x_BSD: Tensor) -> Any:
        return self.fc(x_BSD[:, 0])


class BareForward(Unknown):
    """A head that returns logits alone."""

    def forward(self, x_BTD: Tensor) -> Any:
        return self.fc(x_BTD[:, 0])


class NoTokens(Position):
    """An encoding that forgets to return.  Reference: none."""

    def __init__(self, g: Geometry) -> None:
        super().__init__()

    def add(self, x_BTD: Tensor, layer: int) -> Any:
        return None


class DroppedByTorch(Position):
    """An encoding whose drops are drawn by torch."""

    vmap_safe = False

    def __init__(self, g: Geometry) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def add(self, x_BTD: Tensor, layer: int) -> Tensor:
        return self.drop(x_BTD)


def test_position_that_draws_by_torch_in_training_is_detected() -> None:
    with pytest.raises(AssertionError, match="draws from a generator of torch, numpy or Python: draw from vitlab"):
        check("position", DroppedByTorch)


class Scaled(Straight):
    """A scale of Python's generator, which differs between instances, samples and members of a stack."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return random.random() * super().forward(x_BTD)


class Counted(Straight):
    """A scale that counts calls where no checkpoint holds it."""

    calls = 0

    def forward(self, x_BTD: Tensor) -> Tensor:
        self.calls += 1
        return self.calls * super().forward(x_BTD)


class Adds(Straight):
    """A sum in its argument."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD += 1
        return super().forward(x_BTD)


class Detached(Straight):
    """Values without a gradient."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return super().forward(x_BTD).detach()


class Unbegun(Straight):
    """A constructor that leaves out nn.Module's."""

    def __init__(self, g: Geometry) -> None:
        self.scale = 2


@pytest.mark.parametrize(
    ("cls", "sentence"),
    [
        (Scaled, "draws from a generator of torch, numpy or Python: draw from vitlab.plugin.noise"),
        (Counted, "differs under a state that was saved and loaded"),
        (Adds, r"; leave arguments as they are: write x = x \+ y in place of x \+= y"),
        (Detached, r"parameter \w+.* receives no gradient"),
        (Unbegun, r"; begin the constructor with super\(\).__init__\(\)"),
    ],
)
def test_one_mistake_of_an_author_is_one_sentence_with_its_remedy(cls: type[MLP], sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence) as failure:
        check("mlp", cls)
    assert len(str(failure.value).splitlines()) == 1


class OneAngle(NoTokens):
    """A rotation of one tensor.  Reference: none."""

    def add(self, x_BTD: Tensor, layer: int) -> Tensor:
        return x_BTD

    def rotation(self, layer: int) -> Any:
        return torch.ones(4, 4)


class BareLoss(Loss):
    """A loss without its parts."""

    def __call__(self, logits_by_head: Mapping[str, Tensor], target: Tensor) -> Any:
        return F.cross_entropy(logits_by_head[""], target)


class Unbuilt(Good):
    """SGD that is not built."""

    def build(self, groups: Sequence[Group]) -> Any:
        return self.kind


class Listed(Accuracy):
    """Accuracy as a list."""

    def rows(self, logits: Tensor, target: Tensor) -> Any:
        return super().rows(logits, target).tolist()


@pytest.mark.parametrize(
    ("name", "cls", "sentence"),
    [
        ("head", Bare, r"classify returned a Tensor; return Logits\(tensor\)"),
        ("head", BareForward, r"forward returned a Tensor; return Logits\(tensor\)"),
        ("position", NoTokens, r"add\(x, 0\) returned a NoneType; return a tensor"),
        ("position", OneAngle, r"rotation\(1\) returned a Tensor; return \(cosines, sines\), or None"),
        ("loss", BareLoss, r"__call__ returned a Tensor; return Value\(tensor, \{\}\)"),
        ("optimizer", Unbuilt, "build returned a type; return a torch.optim.Optimizer"),
        ("metric", Listed, "rows returned a list; return a tensor with a row for each image"),
    ],
)
def test_wrong_type_is_named(name: str, cls: type[Any], sentence: str) -> None:
    with pytest.raises(AssertionError, match=sentence):
        check(name, cls)


class OneByOne(Pictures):
    """The images of a split, one by one."""

    def __init__(self, images: Images) -> None:
        self.x_NCHW, self.y_N = images

    def image(self, index: int) -> Tensor:
        return self.x_NCHW[index]


class Stored(Dots):
    """Images that are read one by one."""

    def pictures(self, split: Split) -> Pictures:
        return OneByOne(super().read(split))

    def read(self, split: Split) -> Images:
        raise AssertionError("its images are read one by one")


def test_pictures_are_checked_one_by_one() -> None:
    check("dataset", Stored)
