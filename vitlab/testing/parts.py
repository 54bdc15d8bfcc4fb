"""Contract tests of a model's parts: patch embeddings, positions, blocks, attentions, MLPs, norms and heads.

B images, C channels, H and W pixels, T tokens, N patches, D width, K members of a stack.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vitlab import noise
from vitlab.components.base import name_draws
from vitlab.errors import GeometryError, OptionError
from vitlab.geometry import Geometry
from vitlab.registry import ResolvedChoice, slot
from vitlab.testing.assertions import ONE_DEVICE, check_gradient, during, expect, on_another_device
from vitlab.testing.engines import check_engines

B = 3
DEPTH = 2


def check_part(who: str, choice: ResolvedChoice) -> None:
    """Check a part on a square and an oblong grid and without prefix tokens; it may refuse each with a reason."""
    refused, first = [], True
    for what, g in _geometries(choice):
        reason = _refusal(who, choice, g)
        if reason is not None:
            refused.append(f"{what}: {reason}")
            continue
        _check_on(f"{who} on {what}", choice, g)
        # On one geometry only: the check takes two passes per parameter.
        if first and getattr(choice.component, "exact_gradient", True):
            probe = _probe(choice, g).double().eval()
            check_gradient(who, probe, _input(choice.slot, g).double())
        first = False
    check_engines(who, choice)
    expect(not first, f"{who} refuses every geometry it was offered: {'; '.join(refused)}")


def _geometries(choice: ResolvedChoice) -> Iterator[tuple[str, Geometry]]:
    """Yield a square grid, an oblong one with more prefix tokens, and one without prefix tokens."""
    reduction = 1
    if choice.slot == "patch":
        reduction = choice.component.reduction_of(choice.options)
    side = 4 if reduction == 1 else 1
    for what, grid, prefix in (
        ("a square grid and a class token", (4, 4), ("class",)),
        ("an oblong grid, class, distillation and register tokens", (2, 4), ("class", "distillation", "register")),
        ("no prefix tokens", (3, 3), ()),
    ):
        yield (
            what,
            Geometry.of(
                image=(grid[0] * side * reduction, grid[1] * side * reduction),
                channels=3,
                patch=(side, side),
                reduction=reduction,
                prefix=prefix,
                dim=16,
                depth=DEPTH,
                heads=2,
                classes=5,
            ),
        )


def _refusal(who: str, choice: ResolvedChoice, g: Geometry) -> str | None:
    incompatibility = getattr(choice.component, "incompatibility", None)
    reason = incompatibility(g, choice.options) if incompatibility else None
    expect(reason is None or bool(reason.strip()), f"{who}: incompatibility must return a sentence or None")
    if reason is not None:
        return str(reason)
    try:
        _build(choice, g)
    except (GeometryError, OptionError) as error:
        return str(error)
    except Exception as error:
        raise AssertionError(f"{who} does not build on {g}, and incompatibility does not say so: {error!r}") from error
    return None


class _Probe(nn.Module):
    """A module that calls a part as the model does and returns all its outputs by name."""

    def __init__(self, slot: str, part: Any, g: Geometry) -> None:
        super().__init__()
        self.slot = slot
        self.part = part
        self.g = g

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        if self.slot == "position":
            return self._position(x)
        if self.slot == "attention":
            rotation, bias = _hints(self.part, self.g, x)
            return {"tokens": self.part(x, rotation, bias)}
        if self.slot == "block":
            attention = next(self.part.get_submodule(at) for at, role in self.part.parts.items() if role == "attention")
            hints = _hints(attention, self.g, x)
            if self.part.passes is None:
                return {"tokens": self.part(x, *hints)}
            first_BHTK = x.view(*x.shape[:2], self.g.heads, -1).transpose(1, 2).sin()
            out, passed = self.part(x, *hints, first_BHTK if self.part.passes == "values" else None)
            return {"tokens": passed.restore(out) if self.part.passes == "merged" and passed is not None else out}
        if self.slot == "head":
            output = self.part(x)
            return {f"view '{name}'": view for name, view in self.part.logits_by_head(output).items()}
        return {"tokens": self.part(x)}

    def _position(self, x: Tensor) -> dict[str, Tensor]:
        out = {"add(x, 0)": self.part.add(x, 0)}
        for layer in range(1, self.g.depth + 1):
            out[f"add(x, {layer})"] = self.part.add(x, layer)
            out[f"mix(x, {layer})"] = self.part.mix(x, layer)
            rotation, bias = self.part.rotation(layer), self.part.bias(layer)
            if rotation is not None:
                out[f"cosines of rotation({layer})"], out[f"sines of rotation({layer})"] = rotation
            if bias is not None:
                out[f"bias({layer})"] = bias
        return out


def _check_on(who: str, choice: ResolvedChoice, g: Geometry) -> None:
    probe = _probe(choice, g)
    x = _input(choice.slot, g)
    _check_values(who, choice, g, probe, x)
    _check_repeatable(who, choice, g, x)
    _check_state(who, choice, g, probe, x)
    _check_meta(who, choice, g, x)
    _check_bfloat16(who, choice, g, x)
    _check_samples_independent(who, choice, g)
    _check_stacked(who, choice, g)
    if choice.slot == "position":
        _check_position(who, choice, g, probe)
    if choice.slot == "attention":
        _check_attention(who, g, probe.part, x)
    if choice.slot == "head":
        _check_reads(who, g, probe, x)


def _check_values(who: str, choice: ResolvedChoice, g: Geometry, probe: _Probe, x: Tensor) -> None:
    for training in (False, True):
        probe.train(training)
        x = x.detach().requires_grad_()
        with during(f"{who}: forward", Exception):
            out = probe(x)
        _check_shapes(who, choice.slot, g, out, x)
        for name, value in out.items():
            expect(bool(value.isfinite().all()), f"{who}: {name} has values that are not finite")
        squares = [value.float().pow(2).sum() for value in out.values() if value.requires_grad]
        if not squares:
            continue
        with during(f"{who}: backward", Exception):
            torch.autograd.backward(torch.stack(squares).sum())
        for name, parameter in probe.part.named_parameters():
            expect(parameter.grad is not None, f"{who}: parameter {name} receives no gradient")
            assert parameter.grad is not None
            expect(bool(parameter.grad.isfinite().all()), f"{who}: the gradient of {name} is not finite")
        expect(x.grad is None or bool(x.grad.isfinite().all()), f"{who}: the gradient of the input is not finite")


def _check_repeatable(who: str, choice: ResolvedChoice, g: Geometry, x: Tensor) -> None:
    """Check that results repeat exactly and depend only on the state, the input and keyed draws."""
    probe = _probe(choice, g)
    name_draws(probe)
    for when, training in (("evaluation", False), ("training", True)):
        probe.train(training)
        outputs = []
        with torch.random.fork_rng([]), torch.no_grad(), noise.drawing(_draws(B)):
            for _ in range(2):
                before = torch.manual_seed(0).get_state()
                outputs.append(probe(x))
                used_torch_rng = not torch.equal(before, torch.get_rng_state())
        expect(training or not used_torch_rng, f"{who} draws random numbers in evaluation")
        for name, value in outputs[0].items():
            same = torch.equal(value, outputs[1][name])
            expect(
                same,
                f"{who}: {name} differs between two equal calls in {when}; it must depend on state and input alone",
            )
        safe = getattr(choice.component, "vmap_safe", False)
        expect(
            not (safe and used_torch_rng),
            f"{who} declares vmap_safe, and draws from torch's generator in {when}: "
            "use vitlab.components.base.Dropout, or set vmap_safe = False",
        )


def _check_samples_independent(who: str, choice: ResolvedChoice, g: Geometry) -> None:
    """Check that samples do not mix, in float64, so that rounding cannot hide an error.

    In training, torch's batch norm may mix them: a training in micro-batches looks for its class and refuses it.
    """
    probe = _probe(choice, g).double()
    has_batch_norm = any(isinstance(module, _BatchNorm) for module in probe.modules())
    x = _input(choice.slot, g).double()
    for training in (False,) if has_batch_norm else (False, True):
        probe.train(training)
        name_draws(probe)
        with torch.no_grad(), during(f"{who}: forward in float64, and of one sample", Exception):
            with noise.drawing(_draws(B)):
                batched = probe(x)
            with noise.drawing(_draws(1)):
                single = probe(x[:1])
        when = " in training; use torch's batch norm, which micro-batches refuse" if training else ""
        for name in batched:
            if batched[name].shape != single[name].shape:  # outputs with no batch axis have equal shapes
                close = torch.allclose(batched[name][:1], single[name], rtol=1e-9, atol=1e-9)
                expect(close, f"{who}: {name} of a sample depends on the other samples of its batch{when}")


def _draws(samples: int) -> noise.Draws:
    return noise.Draws(dropout=1, drop_path=2, sample_B=torch.arange(samples), step=3)


def _check_shapes(who: str, slot: str, g: Geometry, out: Mapping[str, Tensor], x: Tensor) -> None:
    half = g.head_dim // 2
    for name, value in out.items():
        allowed = [tuple(x.shape)]
        if slot == "patch":
            allowed = [(len(x), g.patches, g.dim)]
        elif slot == "head":
            allowed = [(len(x), g.classes), (len(x), g.classes, *g.image)]
        elif "rotation" in name:
            allowed = [(g.tokens, half), (g.heads, g.tokens, half)]
        elif "bias" in name:
            allowed = [(g.heads, g.tokens, g.tokens)]
        shape = tuple(value.shape)
        expect(shape in allowed, f"{who}: {name} has shape {shape}; expected {' or '.join(map(str, allowed))}")
        allowed_dtype = "rotation" in name or "bias" in name or value.dtype == x.dtype
        expect(allowed_dtype, f"{who}: {name} is {value.dtype} for an input of {x.dtype}")


def _check_state(who: str, choice: ResolvedChoice, g: Geometry, probe: _Probe, x: Tensor) -> None:
    """Check that the state is all that a pass in training changes, and all that another instance needs."""
    name_draws(probe.train())
    with torch.no_grad(), torch.random.fork_rng([]), noise.drawing(_draws(B)):
        probe(x + 1)
    other = _Probe(choice.slot, _build(choice, g), g).eval()
    with during(f"{who}: its state is loaded into another instance", RuntimeError):
        other.load_state_dict(probe.state_dict(), strict=True)
    with torch.no_grad():
        first, second = probe.eval()(x), other(x)
    for name in first:
        same = torch.equal(first[name], second[name])
        expect(
            same,
            f"{who}: {name} differs under a state that was saved and loaded: something is not in the state; register "
            "it as a parameter or a buffer",
        )


def _check_meta(who: str, choice: ResolvedChoice, g: Geometry, x: Tensor) -> None:
    """Check a part on the meta device, in the place of a GPU: built there, and moved there after it was built."""
    with during(f"{who}: built and run on the meta device, as a plan is checked", Exception), torch.device("meta"):
        out = _Probe(choice.slot, _build(choice, g), g)(x.to("meta"))
    _check_shapes(f"{who} (meta device)", choice.slot, g, out, x)
    moved = _Probe(choice.slot, _build(choice, g), g).to("meta")
    with on_another_device(who):
        out = moved(x.to("meta"))
    for name, value in out.items():
        expect(value.is_meta, f"{who}: {name} stays on the CPU if the part is moved to another device; {ONE_DEVICE}")


def _check_reads(who: str, g: Geometry, probe: _Probe, x: Tensor) -> None:
    """Check that a head predicts from the tokens that it declares, and from no others."""
    reads = probe.part.reads
    if reads is None:
        return
    x = x.detach().requires_grad_()
    outputs = probe.eval()(x)
    torch.autograd.backward(torch.stack([value.sin().sum() for value in outputs.values()]).sum())
    assert x.grad is not None
    used_T = (x.grad != 0).any(0).any(-1).tolist()
    tokens = [*g.prefix, *("patches" for _ in range(g.patches))]
    used = {name for name, is_used in zip(tokens, used_T, strict=True) if is_used}
    declared = set(reads) or {"patches"}
    expect(
        used == declared,
        f"{who} declares reads = {reads!r}, and predicts from {', '.join(sorted(used)) or 'no token'}; name the prefix "
        "tokens, () for patches alone, or None for anything else",
    )


def _check_bfloat16(who: str, choice: ResolvedChoice, g: Geometry, x: Tensor) -> None:
    probe = _probe(choice, g).to(torch.bfloat16).eval()
    with torch.no_grad(), during(f"{who}: forward in bfloat16", Exception):
        out = probe(x.to(torch.bfloat16))
    _check_shapes(f"{who} (bfloat16)", choice.slot, g, out, x.to(torch.bfloat16))
    for name, value in out.items():
        expect(bool(value.isfinite().all()), f"{who}: {name} has values that are not finite in bfloat16")


def _check_stacked(who: str, choice: ResolvedChoice, g: Geometry) -> None:
    """Check that a stack of two members under ``torch.vmap`` computes the same as each alone, buffers included."""
    if not getattr(choice.component, "vmap_safe", False):
        return
    x = _input(choice.slot, g).double()
    for training in (False, True):
        members = [_probe(choice, g, seed).double().train(training) for seed in (1, 2)]
        for member in members:
            name_draws(member)
        parameters, buffers = torch.func.stack_module_state(members)

        def one(parameters: Any, buffers: Any, x: Tensor, member: nn.Module = members[0]) -> Any:
            return torch.func.functional_call(member, (parameters, buffers), (x,))

        sentence = f"{who} declares vmap_safe and does not run under torch.vmap (set vmap_safe = False if it cannot)"
        with torch.no_grad(), noise.drawing(_draws(B)), during(sentence, Exception), warnings.catch_warnings():
            # Without a batching rule, torch falls back to a slow but correct loop and warns.
            warnings.filterwarnings("ignore", message="There is a performance drop")
            stacked = torch.vmap(one)(parameters, buffers, torch.stack([x, x]))
        for index, member in enumerate(members):
            with torch.no_grad(), noise.drawing(_draws(B)):
                alone = {**member(x), **{f"buffer {name}": value for name, value in member.named_buffers()}}
            together = {**stacked, **{f"buffer {name}": value for name, value in buffers.items()}}
            for name, value in alone.items():
                close = torch.allclose(together[name][index].to(value.dtype), value, rtol=1e-9, atol=1e-9)
                when = "training" if training else "evaluation"
                expect(close, f"{who} declares vmap_safe, and stacked its {name} in {when} differs from that of a loop")


def _check_position(who: str, choice: ResolvedChoice, g: Geometry, probe: _Probe) -> None:
    from vitlab.components.position import Resampling, choices_of

    position = probe.part
    components = [each.component for each in choices_of(choice)]
    for flag, hook in (("needs_bias", position.bias), ("needs_rotation", position.rotation)):
        provided = any(hook(layer) is not None for layer in range(1, g.depth + 1))
        declared = any(getattr(component, flag) for component in components)
        returned = "something" if provided else "None"
        sentence = f"{who} declares {flag} = {declared}, and {hook.__name__}(layer) returns {returned}"
        expect(declared == provided, sentence)
    rotation = next((rotation for layer in range(1, g.depth + 1) if (rotation := position.rotation(layer))), None)
    if rotation is not None:
        cos, sin = (part[..., [name != "register" for name in g.prefix] + [False] * g.patches, :] for part in rotation)
        unrotated = bool((cos == 1).all() and (sin == 0).all())
        expect(unrotated, f"{who} rotates prefix tokens other than registers; their rows have cosine 1 and sine 0")
    larger = replace(g, grid=(g.grid[0] * 2, g.grid[1] * 2), image=(g.image[0] * 2, g.image[1] * 2))
    if _refusal(who, choice, larger) is None:
        with during(f"{who}: its state is resampled for a grid twice as large and loaded there", Exception):
            state = position.resample(position.state_dict(), g, larger, Resampling())
            _build(choice, larger).load_state_dict(state, strict=True)


def _check_attention(who: str, g: Geometry, attention: Any, x: Tensor) -> None:
    rotation, bias = _hints(attention, g, x)
    with torch.no_grad():
        plain = attention(x, None, None)
        if rotation is not None:
            differs = not torch.allclose(attention(x, rotation, None), plain)
            expect(differs, f"{who} declares takes_rotation, and computes the same without one")
        if bias is not None:
            differs = not torch.allclose(attention(x, None, bias), plain)
            expect(differs, f"{who} declares takes_bias, and computes the same without one")
        try:
            maps = attention.maps(x, rotation, bias)
        except NotImplementedError:
            maps = None
    if maps is not None:
        shape = (len(x), g.heads, g.tokens, g.tokens)
        expect(tuple(maps.shape) == shape, f"{who}: maps have shape {tuple(maps.shape)}; expected {shape}")
        ones = torch.allclose(maps.sum(-1), torch.ones(shape[:-1]), atol=1e-5)
        expect(ones, f"{who}: the rows of its maps do not sum to 1")
    if attention.canonical is None:
        return
    state = attention.state_dict()
    with during(f"{who}: its state is converted to the canonical form and back", Exception):
        canonical = attention.to_canonical(state)
        restored = attention.from_canonical(canonical)
    qkv = canonical.get("qkv.weight")
    detail = "is missing" if qkv is None else f"has shape {tuple(qkv.shape)}"
    expect(
        qkv is not None and qkv.shape == (3 * g.dim, g.dim),
        f"{who}: qkv.weight of the canonical form {detail}; expected {(3 * g.dim, g.dim)}, or canonical = None",
    )
    same = restored.keys() == state.keys() and all(torch.equal(restored[name], state[name]) for name in state)
    expect(same, f"{who}: from_canonical(to_canonical(state)) is not the state")


def _build(choice: ResolvedChoice, g: Geometry) -> Any:
    if choice.slot == "block":
        return _block(choice, g)
    return slot(choice.slot).build(choice, g.dim if choice.slot == "norm" else g)


def _block(choice: ResolvedChoice, g: Geometry) -> Any:
    """Build a block with the parts that the model has by default, layer scale and drop path."""
    from vitlab.components.block import Place

    block = slot("block").build(choice, Place(g, index=1, layer_scale=0.5, drop_path=0.3, receives_values=True))
    for name, role in block.parts.items():
        default = {"norm": "layernorm", "attention": "auto", "mlp": "gelu"}[role]
        block.add_part(name, slot(role).build(default, g.dim if role == "norm" else g))
    return block


def _probe(choice: ResolvedChoice, g: Geometry, seed: int = 0) -> _Probe:
    """Build a part and move its parameters away from special values, such as zero initialisation."""
    probe = _Probe(choice.slot, _build(choice, g), g)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in probe.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return probe


def _input(slot: str, g: Geometry) -> Tensor:
    shape = (B, g.channels, *g.image) if slot == "patch" else (B, g.tokens, g.dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _hints(attention: Any, g: Geometry, x: Tensor) -> tuple[tuple[Tensor, Tensor] | None, Tensor | None]:
    """Return a rotation and a bias like those of a position, or None where the attention does not take them."""
    place_T = torch.arange(g.tokens, dtype=torch.float64)
    angle_TK = place_T[:, None] * (torch.arange(g.head_dim // 2) + 1) / 3
    rotation = (angle_TK.cos().to(x), angle_TK.sin().to(x)) if attention.takes_rotation else None
    slope_H = torch.arange(1, g.heads + 1)[:, None, None]
    bias_HTT = (-slope_H * (place_T - place_T[:, None]).abs() / 4).to(x)
    return rotation, bias_HTT if attention.takes_bias else None
