"""Tests that the contract tests detect every bad component, with a sentence on the reason."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import pytest
import slot_fixtures
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab import testing
from vitlab.components.attention import Attention, attention
from vitlab.components.base import Rotation
from vitlab.components.head import Head, Logits, head
from vitlab.components.init import Init, init
from vitlab.components.mlp import MLP, mlp
from vitlab.components.position import Position, position
from vitlab.geometry import Geometry
from vitlab.registry import SLOT_MODULES, slot
from vitlab.testing.assertions import check_each


@pytest.fixture(autouse=True)
def _rooms_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    slot_fixtures.keep(monkeypatch, attention, head, init, mlp, position)


class Good(MLP):
    """A line."""

    def __init__(self, g: Geometry, *, factor: float = 1.0) -> None:
        super().__init__()
        self.fc = nn.Linear(g.dim, g.dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.fc(x_BTD)


class Transposes(Good):
    """A line."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.fc(x_BTD).transpose(1, 2)


class Widens(Good):
    """A line."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.fc(x_BTD).float()


class Divides(Good):
    """A line."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.fc(x_BTD) / (x_BTD * 0)


class Roots(Good):
    """Finite values with an infinite gradient."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return (self.fc(x_BTD) * 0).abs().sqrt()


class Forgets(Good):
    """A parameter that is never used."""

    def __init__(self, g: Geometry) -> None:
        super().__init__(g)
        self.idle = nn.Parameter(torch.zeros(g.dim))


class Mixes(Good):
    """Samples that affect each other."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.fc(x_BTD - x_BTD.mean(0))


class Hides(Good):
    """Random state outside of the state dict."""

    def __init__(self, g: Geometry) -> None:
        super().__init__(g)
        self.secret = torch.randn(())

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.fc(x_BTD) + self.secret.to(x_BTD)


class Branches(Good):
    """A branch on a value, in a component declared stackable."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.fc(x_BTD) if x_BTD.device.type == "meta" or x_BTD.sum().item() > 0 else -self.fc(x_BTD)


class OnTheCPU(Good):
    """A component that fails on the meta device."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.fc(x_BTD) + torch.zeros((), device="cpu").expand(x_BTD.shape)


class OwnWidth(Good):
    """An option that the geometry has."""

    def __init__(self, g: Geometry, *, dim: int = 3) -> None:
        super().__init__(g)


class NoDefault(Good):
    """An option without a default."""

    def __init__(self, g: Geometry, *, factor: float) -> None:
        super().__init__(g)


class NoAnnotation(Good):
    """An option without an annotation."""

    def __init__(self, g: Geometry, *, factor=1.0) -> None:  # type: ignore[no-untyped-def]
        super().__init__(g)


class Anything(Good):
    """Options without names."""

    def __init__(self, g: Geometry, **options: Any) -> None:
        super().__init__(g)


class NoDocstring(Good):
    __doc__ = None


class RefusesAll(Good):
    """A component that is incompatible with everything."""

    @classmethod
    def incompatibility(cls, g: Geometry, options: Mapping[str, Any]) -> str | None:
        return "it is Monday"


class Breaks(Good):
    """A failing constructor without incompatibility."""

    def __init__(self, g: Geometry) -> None:
        super().__init__(g)
        if g.grid[0] != g.grid[1]:
            raise ValueError("squares only")


class Cuts(Good):
    """A component that assumes a square grid."""

    def __init__(self, g: Geometry) -> None:
        super().__init__(g)
        self.tokens = len(g.prefix) + g.grid[0] ** 2

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.fc(x_BTD[:, : self.tokens])


class Doubles(Good):
    """Correct values with twice their gradient."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        y_BTD = self.fc(x_BTD)
        return 2 * y_BTD - y_BTD.detach()


class Draws(Good):
    """A different result in every call."""

    vmap_safe = False

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.fc(x_BTD) + torch.rand(())


CALLS: list[int] = []


class Counts(Good):
    """A dependence on a global."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        CALLS.append(1)
        return self.fc(x_BTD) * len(CALLS)


class Drops(Good):
    """Torch's dropout, in a component declared stackable."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        return F.dropout(self.fc(x_BTD), 0.5, self.training)


class Unwritten(Good):
    """An option that cannot be written to a file."""

    def __init__(self, g: Geometry, *, kinds: frozenset[str] = frozenset({"a"})) -> None:
        super().__init__(g)


@pytest.mark.parametrize(
    ("cls", "sentence"),
    [
        (Cuts, r"on an oblong grid, .*: tokens has shape \(3, 7, 16\); expected \(3, 11, 16\)"),
        (Doubles, "the gradient of fc.weight differs from finite differences"),
        (Draws, "draws from a generator of torch, numpy or Python: draw from vitlab.plugin.noise"),
        (Counts, "tokens differs under a state that was saved and loaded; .*: register what it keeps"),
        (Drops, "draws from a generator of .*, or by vitlab.plugin.Dropout"),
        (Unwritten, "its options are written as JSON and read again: TypeError"),
        (Transposes, r"on a square grid and a class token: tokens has shape \(3, 16, 17\); expected \(3, 17, 16\)"),
        (Widens, r"in bfloat16: tokens is torch.float32 for an input of torch.bfloat16"),
        (Divides, "tokens has values that are not finite"),
        (Roots, "gradient of fc.weight is not finite"),
        (Forgets, "parameter idle receives no gradient"),
        (Mixes, "tokens of a sample depends on the other samples"),
        (Hides, "register what it keeps as a parameter or a buffer"),
        (Branches, "fails under torch.vmap.*; write vmap_safe = False in the class"),
        (OnTheCPU, "on the meta device, as a plan is checked"),
        (OwnWidth, "has the option dim: remove it, it is a size of the model"),
        (NoDefault, "option factor needs a default"),
        (NoAnnotation, "option 'factor' needs an annotation"),
        (Anything, r"replace \*\*options by options with names"),
        (NoDocstring, "needs a docstring"),
        (RefusesAll, "refuses every geometry .* it is Monday"),
        (Breaks, "incompatibility does not say so: ValueError: squares only"),
    ],
)
def test_bad_mlp_is_caught(cls: type[MLP], sentence: str) -> None:
    mlp.register("bad")(cls)
    with pytest.raises(AssertionError, match=sentence):
        testing.check_component("mlp", "bad")


def test_good_mlp_passes() -> None:
    mlp.register("good")(Good)
    testing.check_component("mlp", "good")


class Zero(Init):
    """Zeros."""

    def fill_parameter(self, x: Tensor, name: str, kind: str, fan_in: int, g: torch.Generator) -> None:
        x.zero_()


class FormerZero(Init):
    """Zeros, by a method that nothing calls."""

    def draw(self, x: Tensor, name: str, kind: str, fan_in: int, seed: int) -> None:
        x.zero_()


def test_scheme_without_any_hook_of_the_contract_is_caught() -> None:
    init.register("zero")(Zero)
    testing.check_component("init", "zero")
    init.register("former")(FormerZero)
    with pytest.raises(AssertionError, match=r"overrides none of .*'fill_parameter'"):
        testing.check_component("init", "former")


class Turns(Position):
    """A rotation of the class token too.  Reference: none."""

    def __init__(self, g: Geometry) -> None:
        super().__init__()
        self.register_buffer("ones_TK", torch.ones(g.tokens, g.head_dim // 2), persistent=False)

    def rotation(self, layer: int) -> Rotation:
        return 0 * self.get_buffer("ones_TK"), self.get_buffer("ones_TK")


class Stuck(Position):
    """A component that cannot be resampled.  Reference: none."""

    def __init__(self, g: Geometry) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(g.tokens, g.dim))

    def add(self, x_BTD: Tensor, layer: int) -> Tensor:
        return x_BTD + self.table


@pytest.mark.parametrize(
    ("cls", "sentence"),
    [
        (Turns, "rotates prefix tokens"),
        (Stuck, "resampled for a grid twice as large"),
    ],
)
def test_bad_position_is_caught(cls: type[Position], sentence: str) -> None:
    position.register("bad")(cls)
    with pytest.raises(AssertionError, match=sentence):
        testing.check_component("position", "bad")


class Means(Attention):
    """Uniform attention.  Reference: none."""

    canonical = None
    takes_rotation = False
    takes_bias = False

    def __init__(self, g: Geometry) -> None:
        super().__init__()
        self.heads = g.heads
        self.proj = nn.Linear(g.dim, g.dim)

    def forward(self, x_BTD: Tensor, rotation: Rotation | None, bias_HTT: Tensor | None) -> Tensor:
        return self.proj(x_BTD.mean(1, keepdim=True).expand_as(x_BTD))


class Deaf(Means):
    """An unused rotation.  Reference: none."""

    takes_bias = True


class Blind(Means):
    """An unused bias.  Reference: none."""

    takes_rotation = True


class Foreign(Means):
    """A wrong canonical form.  Reference: none."""

    canonical = "timm"


class Uneven(Means):
    """Weights that do not sum to 1.  Reference: none."""

    def maps(self, x_BTD: Tensor, rotation: Rotation | None, bias_HTT: Tensor | None) -> Tensor:
        return torch.ones(x_BTD.shape[0], self.heads, x_BTD.shape[1], x_BTD.shape[1])


@pytest.mark.parametrize(
    ("cls", "sentence"),
    [
        (Deaf, "declares takes_bias, and computes the same without one"),
        (Blind, "declares takes_rotation, and computes the same without one"),
        (Foreign, r"qkv.weight of the canonical form is missing or .* than \(48, 16\); .* or canonical = None"),
        (Uneven, "do not sum to 1"),
    ],
)
def test_bad_attention_is_caught(cls: type[Attention], sentence: str) -> None:
    attention.register("bad")(cls)
    with pytest.raises(AssertionError, match=sentence):
        testing.check_component("attention", "bad")


def test_attention_without_weights_or_canonical_form_passes() -> None:
    attention.register("good")(Means)
    testing.check_component("attention", "good")


class TooMany(Head):
    """A logit too many."""

    def __init__(self, g: Geometry) -> None:
        super().__init__()
        self.fc = nn.Linear(g.dim, g.classes + 1)

    def forward(self, x_BTD: Tensor) -> Logits:
        return Logits(self.fc(x_BTD.mean(1)))


def test_bad_head_is_caught() -> None:
    head.register("bad")(TooMany)
    with pytest.raises(AssertionError, match=r"view '' has shape \(3, 6\); expected \(3, 5\)"):
        testing.check_component("head", "bad")


def test_independent_faults_are_reported_together_with_line_of_class() -> None:
    @mlp.register("twice wrong")
    class TwiceWrong(MLP):
        def __init__(self, g: Geometry, *, scale: float = 1.0) -> None:
            super().__init__()
            self.scale = scale

        def forward(self, x: Tensor) -> Tensor:
            return (x - x.mean(dim=0)).float() * self.scale

    line = inspect.getsourcelines(TwiceWrong)[1]
    with pytest.raises(AssertionError) as failure:
        testing.check_component("mlp", "twice wrong")
    lines = str(failure.value).split("\n")
    assert all(each.startswith(f"mlp 'twice wrong' (tests/test_testing.py:{line}): ") for each in lines)
    for words in (
        "needs a docstring",
        "depends on the other samples",
        "float32 for an input",
    ):
        assert any(words in each for each in lines), words


def test_message_of_an_assertion_need_be_no_text() -> None:
    def check() -> None:
        raise AssertionError((2, 3))

    with pytest.raises(AssertionError, match=r"\(2, 3\)"):
        check_each(check)


def test_one_fault_of_several_checks_is_reported_once() -> None:
    @position.register("square")
    class Square(Position):
        """A bias for one head."""

        def bias(self, layer: int) -> Tensor:
            return torch.zeros(17, 17)

    with pytest.raises(AssertionError, match=r"bias\(1\) has shape \(17, 17\); expected \(2, 17, 17\)") as failure:
        testing.check_component("position", "square")
    assert str(failure.value).count("expected (2, 17, 17)") == 1


def test_component_that_reads_values_is_told_a_remedy_that_works() -> None:
    class Reads(Good):
        """A branch on values."""

        def forward(self, x_BTD: Tensor) -> Tensor:
            y_BTD = self.fc(x_BTD)
            return y_BTD if float(x_BTD.detach().abs().max()) < 1e9 else -y_BTD

    class Guarded(Reads):
        """The same, which says so."""

        vmap_safe = False

        def forward(self, x_BTD: Tensor) -> Tensor:
            return torch.empty_like(x_BTD) if x_BTD.is_meta else super().forward(x_BTD)

    for cls in (Reads, Guarded):
        globals()[cls.__name__] = cls
        cls.__qualname__ = cls.__name__
        mlp.register(cls.__name__.lower())(cls)
    with pytest.raises(AssertionError, match=r"set vmap_safe = False and return empty_like.x. if x.is_meta"):
        testing.check_component("mlp", "reads")
    testing.check_component("mlp", "guarded")


def test_unknown_name_is_refused() -> None:
    with pytest.raises(AssertionError, match="Did you mean 'swiglu'"):
        testing.check_component("mlp", "swigul")


class Rounds(Doubles):
    """Another gradient than its own, as in a straight-through rounding."""

    exact_gradient = False


def test_part_may_declare_approximate_gradient() -> None:
    mlp.register("rounds")(Rounds)
    testing.check_component("mlp", "rounds")


def test_components_lists_without_importing() -> None:
    assert {"gelu", "swiglu"} <= set(testing.components("mlp"))
    every = testing.parametrize_components().mark.args[1]
    assert every == [(slot, name) for slot in testing.CHECKS for name in testing.components(slot)]
    assert set(testing.CHECKS) == set(SLOT_MODULES)
    own = testing.parametrize_components("mlp", source="vitlab").mark.args[1]
    assert ("mlp", "swiglu") in own and not testing.parametrize_components(source="nobody").mark.args[1]


@pytest.mark.parametrize("name", ["position", "attention"])
def test_built_in_components_name_their_paper(name: str) -> None:
    for component in set(testing.components(name)) - {"none"}:
        bases = [base for base in slot(name).get(component).__mro__ if "torch" not in base.__module__]
        assert any("Reference:" in (base.__doc__ or "") for base in bases), component
