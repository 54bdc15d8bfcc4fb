"""Contract tests of models, of initialisation schemes, and of the parts of a model, from patch embeddings to heads.

B images, C channels, H and W pixels, T tokens, N patches, D width, K members of a stack.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import SkipTest

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vitlab import noise
from vitlab.components.base import State, set_dropout_ids
from vitlab.components.init import Init
from vitlab.errors import GeometryError, OptionError
from vitlab.geometry import DataInfo, Geometry
from vitlab.registry import ResolvedChoice, slot
from vitlab.registry.plugins import sentence_with_place
from vitlab.testing.assertions import (
    ONE_DEVICE,
    FirstCallFailed,
    check_each,
    check_gradient,
    check_type,
    checked_reason,
    equal_states,
    forbid_global_draws,
    forbid_mixed_devices,
    prefix_failures,
)

B = 3
GRIDS = (
    ("a square grid and a class token", (4, 4), ("class",)),
    ("an oblong grid, class, distillation and register tokens", (2, 4), ("class", "distillation", "register")),
    ("no prefix tokens", (3, 3), ()),
)
"""Descriptions, rows and columns of patches, and prefix tokens."""

DATA = DataInfo(image=(32, 32), channels=3, classes=5)


def check_part(choice: ResolvedChoice) -> None:
    """Check a part on a square and an oblong grid and without prefix tokens; it may refuse each with a reason."""
    component: Any = choice.component
    reduction = component.reduction_of(choice.options) if choice.slot == "patch" else 1
    side = 4 if reduction == 1 else 1
    of_slot = {"position": [_check_position], "attention": [_check_attention], "head": [_check_tokens_read]}
    checks = [_check_forward_and_backward, _check_repeatable, _check_meta_device, _check_bfloat16]
    checks += of_slot.get(choice.slot, [])
    cases, reasons = [], []  # a part need not support every grid, but one of them
    for what, grid, prefix in GRIDS:
        g = Geometry(
            image=(grid[0] * side * reduction, grid[1] * side * reduction),
            channels=3,
            patch=(side, side),
            reduction=reduction,
            prefix=prefix,
            dim=16,
            depth=2,
            heads=2,
            classes=5,
        )
        case = _Case(choice, g)
        with prefix_failures(f"on {what}"):
            if (reason := case.refusal()) is None:
                check_each(*(partial(check, case) for check in checks))
                cases.append(case)
            else:
                reasons.append(f"{what}: {reason}")
    refusal = f"refuses every geometry it was offered: {'; '.join(reasons)}"
    if not cases and choice.hashed() != {"type": choice.type}:  # options of a study may need a larger grid
        raise SkipTest(refusal)
    assert cases, refusal
    if component.exact_gradient:
        # On one geometry only: the check takes two passes per parameter.
        check_gradient(cases[0].build_perturbed().double().eval(), cases[0].input().double())


@dataclass(frozen=True)
class _Case:
    """A part and the geometry on which it is checked."""

    choice: ResolvedChoice
    g: Geometry

    def refusal(self) -> str | None:
        """Return why the part cannot have this geometry, by its ``incompatibility`` or by its constructor."""
        if reason := checked_reason(self.choice.component.incompatibility(self.g, self.choice.options)):
            return reason
        try:
            self.build()
        except (GeometryError, OptionError) as error:
            return str(error)
        except Exception as error:
            sentence = sentence_with_place(error)
            raise FirstCallFailed(f"does not build, and incompatibility does not say so: {sentence}") from error
        return None

    def build(self) -> _Probe:
        """Build the part; a block has the parts that the model gives it by default, layer scale and drop path."""
        from vitlab.components.block import Place

        g = self.g
        sizes = {"norm": g.dim, "block": Place(g, 1, layer_scale=0.5, drop_path=0.3, receives_values=True)}
        part = slot(self.choice.slot).build(self.choice, sizes.get(self.choice.slot, g))
        if self.choice.slot == "block":
            for name, role in part.parts.items():
                default = {"norm": "layernorm", "attention": "auto", "mlp": "gelu"}[role]
                part.add_part(name, slot(role).build(default, sizes.get(role, g)))
        return _Probe(self, part)

    def build_perturbed(self, seed: int = 0) -> _Probe:
        """Build the part and move its parameters away from special values, such as zero initialisation."""
        probe = self.build()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in probe.parameters():
                # Zeros would hide a wrong gradient or a missing conversion.
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        return probe

    def input(self) -> Tensor:
        """Return images for a patch embedding, and tokens for other parts."""
        g = self.g
        shape = (B, g.channels, *g.image) if self.choice.slot == "patch" else (B, g.tokens, g.dim)
        return torch.randn(shape, generator=torch.Generator().manual_seed(0))

    def position_hints(self, attention: Any, x: Tensor) -> tuple[tuple[Tensor, Tensor] | None, Tensor | None]:
        """Return a rotation and a bias as positions give them, or None where the attention does not take them."""
        rotation = bias_HTT = None
        if attention.takes_rotation:
            cos, sin = slot("position").build("rope2d", self.g).rotation(1)
            rotation = cos.to(x), sin.to(x)
        if attention.takes_bias:
            bias_HTT = slot("position").build("alibi2d", self.g).bias(1).to(x)
        return rotation, bias_HTT


class _Probe(nn.Module):
    """A module that calls a part as the model does and returns all its outputs by name."""

    def __init__(self, case: _Case, part: Any) -> None:
        super().__init__()
        self.case = case
        self.part = part
        set_dropout_ids(self)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        part, case, kind = self.part, self.case, self.case.choice.slot
        if kind == "position":
            return self._call_position(x)
        if kind == "attention":
            return {"tokens": part(x, *case.position_hints(part, x))}
        if kind == "block":
            attention = next(part.get_submodule(at) for at, role in part.parts.items() if role == "attention")
            hints = case.position_hints(attention, x)
            if part.passes is None:
                return {"tokens": part(x, *hints)}
            # Any values do: the block must only compute the same from the same ones.
            first_BHTK = x.view(*x.shape[:2], case.g.heads, -1).transpose(1, 2).sin()
            out, passed = part(x, *hints, first_BHTK if part.passes == "values" else None)
            return {"tokens": passed.unmerge_rows(out) if part.passes == "merged" and passed is not None else out}
        if kind == "head":
            output = part(x)
            check_type(output, tuple, "forward" if "forward" in vars(type(part)) else "classify", "Logits(tensor)")
            return {f"view '{name}'": view for name, view in part.logits_by_head(output).items()}
        return {"tokens": part(x)}

    def _call_position(self, x: Tensor) -> dict[str, Tensor]:
        out = {"add(x, 0)": self.part.add(x, 0)}
        for layer in range(1, self.case.g.depth + 1):
            out[f"add(x, {layer})"] = self.part.add(x, layer)
            out[f"mix(x, {layer})"] = self.part.mix(x, layer)
            rotation, bias = self.part.rotation(layer), self.part.bias(layer)
            if rotation is not None:
                check_type(rotation, tuple, f"rotation({layer})", "(cosines, sines), or None")
                out[f"cosines of rotation({layer})"], out[f"sines of rotation({layer})"] = rotation
            if bias is not None:
                out[f"bias({layer})"] = bias
        return out


def _check_forward_and_backward(case: _Case) -> None:
    """Check shapes, and that values and the gradients of the input and of all parameters are finite."""
    probe = case.build_perturbed()
    for training in (False, True):
        probe.train(training)
        x = case.input().requires_grad_()
        with prefix_failures("forward", FirstCallFailed):
            out = probe(x)
        _check_outputs(case, out, x)
        # One number whose gradient reaches every output.
        squares = [value.float().pow(2).sum() for value in out.values() if value.requires_grad]
        if squares:
            with prefix_failures("backward"):
                torch.autograd.backward(torch.stack(squares).sum())
        for name, parameter in probe.part.named_parameters():
            assert parameter.grad is not None, f"parameter {name} receives no gradient"
            assert parameter.grad.isfinite().all(), f"the gradient of {name} is not finite"
        assert x.grad is None or x.grad.isfinite().all(), "the gradient of the input is not finite"


def _check_outputs(case: _Case, out: Mapping[str, Tensor], x: Tensor) -> None:
    """Check the shapes, the dtypes and, outside of the meta device, the values of outputs for ``x``."""
    g = case.g
    for name, value in out.items():
        check_type(value, Tensor, "forward" if name == "tokens" else name, "a tensor")
        of_position = "rotation" in name or "bias" in name
        if "rotation" in name:
            allowed: list[tuple[int, ...]] = [(g.tokens, g.head_dim // 2), (g.heads, g.tokens, g.head_dim // 2)]
        elif "bias" in name:
            allowed = [(g.heads, g.tokens, g.tokens)]
        elif case.choice.slot == "patch":
            allowed = [(len(x), g.patches, g.dim)]
        elif case.choice.slot == "head":
            allowed = [(len(x), g.classes), (len(x), g.classes, *g.image)]
        else:
            allowed = [tuple(x.shape)]
        shape = tuple(value.shape)
        assert shape in allowed, f"{name} has shape {shape}; expected {' or '.join(map(str, allowed))}"
        assert of_position or value.dtype == x.dtype, (
            f"{name} is {value.dtype} for an input of {x.dtype}: convert {name} by .to(x.dtype)"
        )
        assert value.is_meta or value.isfinite().all(), f"{name} has values that are not finite"


def _run_with_draws(probe: Callable[[Tensor], Any], x: Tensor) -> Any:
    """Return the outputs under keyed draws, as a training sets the keys of drops."""
    draws = noise.Draws(dropout=1, drop_path=2, sample_B=torch.arange(len(x)), step=3)
    with torch.no_grad(), noise.use_model_draws(draws), forbid_global_draws():
        return probe(x)


def _check_repeatable(case: _Case) -> None:
    """Check that results are equal in another instance, beside other samples and stacked; each needs the one before."""
    _check_state_is_complete(case)
    _check_samples_independent(case)
    if case.choice.component.vmap_safe:
        _check_vmap(case)


def _check_state_is_complete(case: _Case) -> None:
    """Check that the state is all that a pass in training changes, and all that another instance needs."""
    probe, other, x = case.build_perturbed(), case.build(), case.input()
    _run_with_draws(probe, x + 1)  # running statistics change in it
    with prefix_failures("its state is loaded into another instance"):
        other.load_state_dict(probe.state_dict(), strict=True)
    for training in (False, True):
        first, second = (_run_with_draws(each.train(training), x) for each in (probe, other))
        for name in first:
            assert torch.equal(first[name], second[name]), (
                f"{name} differs {'in training ' * training}under a state that was saved and loaded; it must depend on "
                "state, input and keyed draws alone: register what it keeps as a parameter or a buffer, and draw by "
                "vitlab.plugin.Dropout or vitlab.plugin.noise"
            )


def _check_meta_device(case: _Case) -> None:
    """Check a part on the meta device, in the place of a GPU: built there, and moved there after it was built."""
    x = case.input().to("meta")
    with prefix_failures("built and run on the meta device, as a plan is checked"), torch.device("meta"):
        _check_outputs(case, case.build()(x), x)
    on_device = case.build().to("meta")
    with forbid_mixed_devices():
        out = on_device(x)
    # A value that does not depend on the input, such as a bias, stays where its buffers are.
    for name, value in out.items():
        assert value.is_meta, f"{name} stays on the CPU if the part is moved to another device; {ONE_DEVICE}"


def _check_bfloat16(case: _Case) -> None:
    x = case.input().to(torch.bfloat16)
    with prefix_failures("in bfloat16"):
        _check_outputs(case, _run_with_draws(case.build_perturbed().to(torch.bfloat16).eval(), x), x)


def _check_samples_independent(case: _Case) -> None:
    """Check that samples do not mix, in float64, so that rounding cannot hide an error.

    In training, torch's batch norm may mix them: a training in micro-batches looks for its class and refuses it.
    """
    probe, x = case.build_perturbed().double(), case.input().double()
    has_batch_norm = any(isinstance(module, _BatchNorm) for module in probe.modules())
    for training in (False,) if has_batch_norm else (False, True):
        with prefix_failures("forward in float64, and of one sample"):
            batched, single = _run_with_draws(probe.train(training), x), _run_with_draws(probe, x[:1])
        when = " in training; use torch's batch norm, which micro-batches refuse" if training else ""
        for name in batched:
            if batched[name].shape != single[name].shape:  # outputs with no batch axis have equal shapes
                assert torch.allclose(batched[name][:1], single[name], rtol=1e-9, atol=1e-9), (
                    f"{name} of a sample depends on the other samples of its batch{when}"
                )


def _check_vmap(case: _Case) -> None:
    """Check that a stack of two members under ``torch.vmap`` computes the same as each alone, buffers included."""
    x = case.input().double()
    for when, training in (("evaluation", False), ("training", True)):
        members = [case.build_perturbed(seed).double().train(training) for seed in (1, 2)]
        parameters, buffers = torch.func.stack_module_state(members)

        def stack(x: Tensor, member: nn.Module = members[0], state: Any = (parameters, buffers)) -> Any:
            # Draws of torch's generator have a sentence of their own.
            own = torch.vmap(lambda state, x: torch.func.functional_call(member, state, (x,)), randomness="different")
            # An engine may have the images last in memory, so that nothing may depend on the order there.
            inputs = torch.stack([x, x])
            order = (0, *range(inputs.ndim - 1, 0, -1))
            return own(state, inputs.permute(order).contiguous().permute(order))

        with (
            prefix_failures(
                "fails under torch.vmap, which trains several seeds together; write vmap_safe = False in the class, "
                "or draw by vitlab.plugin.Dropout, and use no .item(), float(), numpy or if on values"
            ),
            warnings.catch_warnings(),
        ):
            # Without a batching rule, torch falls back to a slow but correct loop and warns.
            warnings.filterwarnings("ignore", message="There is a performance drop")
            stacked = _run_with_draws(stack, x)
        for index, member in enumerate(members):
            alone = _run_with_draws(member, x)
            # Buffers are compared after the pass, which may change them.
            for name, value in {**alone, **dict(member.named_buffers())}.items():
                actual = (stacked if name in stacked else buffers)[name][index].to(value.dtype)
                assert torch.allclose(actual, value, rtol=1e-9, atol=1e-9), (
                    f"stacked by torch.vmap, its {name} in {when} differs from a loop's; write vmap_safe = False"
                )


def _check_position(case: _Case) -> None:
    from vitlab.components.position import Resampling, encodings_by_prefix

    position, g = case.build_perturbed().part, case.g
    layers = range(1, g.depth + 1)
    rotation = next((rotation for layer in layers if (rotation := position.rotation(layer))), None)
    if rotation is not None:
        cos, sin = (part[..., [name != "register" for name in g.prefix] + [False] * g.patches, :] for part in rotation)
        assert (cos == 1).all() and (sin == 0).all(), (
            "rotates prefix tokens other than registers; their rows have cosine 1 and sine 0"
        )
    # A model may go on at twice the resolution, as in fine-tuning.
    larger = _Case(case.choice, replace(g, image=(g.image[0] * 2, g.image[1] * 2)))
    if larger.refusal() is None:
        with prefix_failures(
            "its state is resampled for a grid twice as large, and loaded there; define resample(self, state, old, "
            "new, how), and use vitlab.plugin.resample_grid for a table with a vector per patch"
        ):
            targets = encodings_by_prefix(larger.build().part)
            for at, encoding in encodings_by_prefix(position).items():
                state = encoding.resample(encoding.state_dict(), g, larger.g, Resampling())
                targets[at].load_state_dict(state, strict=True)


def _check_attention(case: _Case) -> None:
    attention, x, g = case.build_perturbed().part, case.input(), case.g
    rotation, bias = case.position_hints(attention, x)
    with torch.no_grad():
        plain = attention(x, None, None)  # a model without a position calls it like this
        for flag, hints in (("takes_rotation", (rotation, None)), ("takes_bias", (None, bias))):
            assert not getattr(attention, flag) or not torch.allclose(attention(x, *hints), plain), (
                f"declares {flag}, and computes the same without one"
            )
        try:
            maps = attention.maps(x, rotation, bias)
        except NotImplementedError:
            pass
        else:
            shape = (len(x), g.heads, g.tokens, g.tokens)
            assert tuple(maps.shape) == shape, f"maps have shape {tuple(maps.shape)}; expected {shape}"
            sums = maps.sum(-1)
            assert torch.allclose(sums, torch.ones(shape[:-1]), atol=1e-5), "the rows of its maps do not sum to 1"
    if attention.canonical is None:
        return
    qkv_shape = _round_trip_canonical(attention).get("qkv.weight", torch.empty(0)).shape
    assert qkv_shape == (3 * g.dim, g.dim), (
        f"qkv.weight of the canonical form is missing or has another shape than {(3 * g.dim, g.dim)}; write "
        "to_canonical and from_canonical, or canonical = None"
    )


def _round_trip_canonical(part: Any) -> State:
    """Return the state of an attention or a model in the canonical form, which is converted back to the same state."""
    state = part.state_dict()
    with prefix_failures("its state is converted to the canonical form and back"):
        canonical: State = part.to_canonical(state)
        restored = part.from_canonical(canonical)
    assert equal_states(restored, state), "from_canonical(to_canonical(state)) is not the state"
    return canonical


def _check_tokens_read(case: _Case) -> None:
    """Check that a head predicts from the tokens that it declares, and from no others."""
    probe, x = case.build_perturbed().eval(), case.input().requires_grad_()
    reads = probe.part.reads
    if reads is None:
        return
    torch.autograd.backward(torch.stack([value.sin().sum() for value in probe(x).values()]).sum())
    assert x.grad is not None, "its logits do not depend on tokens"
    # A token is read if any of its values changes a logit of any image.
    used_T = (x.grad != 0).any(0).any(-1).tolist()
    tokens = [*case.g.prefix, *("patches" for _ in range(case.g.patches))]
    used = {name for name, is_used in zip(tokens, used_T, strict=True) if is_used}
    assert used == (set(reads) or {"patches"}), (
        f"declares reads = {reads!r}, and predicts from {', '.join(sorted(used)) or 'no token'}; name the prefix "
        "tokens, () for patches alone, or None for anything else"
    )


# -- initialisation schemes and models --------------------------------------------------------------------------------


def check_init_scheme(choice: ResolvedChoice) -> None:
    """Check that draws depend only on the seed and the parameter's name, and set every value."""
    component, hooks = choice.component, ("fill_parameter", "initialise_parameter", "base_variance_ratio")
    # Hooks under other names, such as an earlier version's, would silently leave the values of the default.
    assert {*dir(component)} <= {*dir(Init)} or any(
        getattr(component, hook) is not getattr(Init, hook) for hook in hooks
    ), f"overrides none of {hooks}, so it draws as the scheme timm does"
    scheme: Any = slot(choice.slot).build(choice)
    for kind, name, shape in (
        ("linear", "blocks.0.attn.qkv.weight", (48, 16)),
        ("linear_bias", "blocks.0.mlp.fc1.bias", (64,)),
        ("conv", "patch_embed.proj.weight", (16, 3, 4, 4)),
        ("conv_bias", "patch_embed.proj.bias", (16,)),
        ("token", "cls_token", (1, 1, 16)),
        ("position", "pos_embed", (1, 17, 16)),
    ):
        draws = []
        for seed in (0, 0, 1):
            x = torch.full(shape, torch.nan)
            with prefix_failures(f"draws {name}"):
                scheme.initialise_parameter(x, name, kind, 16, seed)
            draws.append(x)
        first, again, other = draws
        assert first.isfinite().all(), f"leaves values of {name} unset or not finite"
        assert torch.equal(first, again), f"draws {name} differently in two calls under one seed"
        constant = bool((first == first.flatten()[0]).all())
        assert constant or not torch.equal(first, other), f"draws {name} the same under every seed"


def check_model(choice: ResolvedChoice) -> None:
    """Check a model's meta build, seeded initialisation, gradients and round trip through the canonical form."""
    if checked_reason(choice.component.incompatibility(DATA, choice.options)) is not None:
        return
    build = partial(slot("model").build, choice, DATA)
    with prefix_failures("built and run on the meta device, as a plan is checked"), torch.device("meta"):
        shape = _logits(build(), torch.zeros(B, DATA.channels, *DATA.image)).shape
    assert shape[:2] == (B, DATA.classes), f"logits have shape {tuple(shape)}; expected {(B, DATA.classes)}"
    with forbid_mixed_devices():
        _logits(build().to("meta"), torch.zeros(B, DATA.channels, *DATA.image, device="meta"))
    # Two instances: initialise must not depend on what the constructor drew.
    first, second = build(), build()
    for model in (first, second):
        model.initialise(0)
    assert equal_states(first.state_dict(), second.state_dict()), "initialise(seed) is not a function of the seed"
    second.initialise(1)
    is_random = any(len(parameter.unique()) > 1 for parameter in first.parameters())  # a convex model may start at zero
    differs = not equal_states(first.state_dict(), second.state_dict())
    assert differs or not is_random, "initialise draws the same under every seed"
    x = torch.randn(B, DATA.channels, *DATA.image, generator=torch.Generator().manual_seed(0))
    with prefix_failures("forward and backward"):
        logits = _logits(first, x)
        torch.autograd.backward(logits.square().sum())
    assert logits.isfinite().all(), "logits are not finite"
    for name, parameter in first.named_parameters():
        assert parameter.grad is not None, f"parameter {name} receives no gradient"
        assert first.layer_of(name) >= 0, f"layer_of({name}) is below 0"
    unknown = first.no_weight_decay() - {name for name, _ in first.named_parameters()}
    assert not unknown, f"no_weight_decay returns names of no parameters: {', '.join(sorted(unknown))}"
    _round_trip_canonical(second)


def _logits(model: Any, x: Tensor) -> Tensor:
    output = model(x)
    check_type(output, tuple, "forward", "Logits(tensor)")
    views: dict[str, Tensor] = model.logits_by_head(output)
    return views[""]
