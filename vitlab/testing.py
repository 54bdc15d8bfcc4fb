"""Contract tests for components: what every part of a model must keep, for built-ins and for guests alike.

A plugin's whole test can be::

    from vitlab.testing import check_component

    def test_spiral() -> None:
        check_component("position", "spiral")

B images, C channels, H and W pixels, T tokens, N patches, D width, K members of a stack.
"""

from __future__ import annotations

import pickle
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitlab import slots
from vitlab.errors import BrokenComponent, GeometryError, OptionError, VitlabError
from vitlab.geometry import DataInfo, Geometry
from vitlab.slots import Resolved, slot

MODEL_SIDE = ("patch", "position", "attention", "mlp", "norm", "head", "init", "model")
"""The slots whose components :func:`check_component` runs; those of other slots it checks for form."""

B = 3
DEPTH = 2
DATA = DataInfo(image=(32, 32), channels=3, classes=5)


def components(slot: str) -> list[str]:
    """The names of every installed component of a slot, guests included; for ``pytest.mark.parametrize``.

    A name that two sources offer comes once for each, as ``source:name``.  Imports no guest.
    """
    entries = slots.listing(slot)
    offered = Counter(entry.name for entry in entries)
    return [entry.name if offered[entry.name] == 1 else f"{entry.origin.source}:{entry.name}" for entry in entries]


def check_component(slot: str, name: str) -> None:
    """Check that a component keeps the contract of its slot.

    Of every component: options have annotations and defaults, there is a docstring, and the class can be pickled by
    reference.  Of a part of a model, for a square and an oblong grid of patches and with no prefix tokens (each may be
    refused, with a reason): it builds on the CPU and on the meta device; shapes and types are kept, bfloat16 included;
    values and gradients are finite, and every parameter receives one; a state loads into another instance and computes
    the same; samples do not mix; what it declares (``needs_bias``, ``vmap_safe``, a canonical form, ...) is true.
    Of a tracker that is handed the journals: its files hold each point once though a driver dies between delivering and
    committing, and are those of the new journal where a trial is trained anew; those of the trials stay as they are.

    Args:
        slot: such as ``position``.
        name: such as ``rope2d``, or ``distribution:rope2d``.

    Raises:
        AssertionError: naming the component, what it did, and what is expected.
    """
    who = f"{slot} '{name}'"
    with _during(f"{who} is looked up", BrokenComponent, VitlabError):
        cls, _ = slots.slot(slot).find(name)
    _check_form(who, slot, name, cls)
    if slot == "tracker":
        _check_tracker(who, slots.slot(slot), name, cls)
    if slot not in MODEL_SIDE:
        return
    with _during(f"{who} with its default options", OptionError):
        choice = slots.slot(slot).resolve(name)
    if slot == "init":
        _check_scheme(who, choice)
    elif slot == "model":
        _check_model(who, choice)
    else:
        _check_part(who, choice)


# -- form -------------------------------------------------------------------------------------------------------------


def _check_form(who: str, slot: str, name: str, cls: type) -> None:
    with _during(f"the options of {who} are read", BrokenComponent, TypeError, NameError):
        options = slots.slot(slot).options(cls).model_fields
    if slot in MODEL_SIDE and slot != "model":
        known = sorted(set(options) & set(Geometry.__dataclass_fields__))
        _expect(not known, f"{who} has the option {', '.join(known)}: that is a size of the model and stands in g")
        missing = [option for option, field in options.items() if field.is_required()]
        _expect(not missing, f"{who}: option {', '.join(missing)} needs a default, so that the bare name can be used")
    _expect(bool((cls.__doc__ or "").strip()), f"{who} needs a docstring: its first line is what vitlab list prints")
    _expect(not (cls.__doc__ or "").startswith("\n"), f"{who}: the docstring begins with one sentence, not a new line")
    if slot in ("position", "attention") and name != "none":
        docs = [base.__doc__ or "" for base in cls.__mro__ if base.__module__.partition(".")[0] != "torch"]
        _expect(any("Reference:" in doc for doc in docs), f"{who}: the docstring names its paper: 'Reference: arXiv:…'")
    with _during(f"{who} is pickled by reference", pickle.PicklingError, AttributeError):
        _expect(pickle.loads(pickle.dumps(cls)) is cls, f"{who} must be found again under its module and name")


# -- parts ------------------------------------------------------------------------------------------------------------


def _geometries(choice: Resolved) -> Iterator[tuple[str, Geometry]]:
    """A square grid, an oblong one with more prefix tokens, and one without any."""
    reduction = 1
    if choice.slot == "patch":
        reduction = choice.component.reduction_of(choice.options)  # type: ignore[attr-defined]
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


def _check_part(who: str, choice: Resolved) -> None:
    refused = []
    for what, g in _geometries(choice):
        reason = _refusal(who, choice, g)
        if reason is None:
            _check_on(f"{who} on {what}", choice, g)
        else:
            refused.append(f"{what}: {reason}")
    _expect(len(refused) < 3, f"{who} refuses every geometry it was offered: {'; '.join(refused)}")


def _refusal(who: str, choice: Resolved, g: Geometry) -> str | None:
    why_not = getattr(choice.component, "why_not", None)
    reason = why_not(g, choice.options) if why_not else None
    _expect(reason is None or bool(reason.strip()), f"{who}: why_not gives a reason in words, or None")
    if reason is not None:
        return str(reason)
    try:
        _built(choice, g)
    except (GeometryError, OptionError) as error:
        return str(error)
    except Exception as error:
        raise AssertionError(f"{who} does not build on {g}, and why_not does not say so: {error!r}") from error
    return None


class _Probe(nn.Module):
    """A part, called as the model calls it: one tensor in, all that the part makes of it out, each under a name."""

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
        if self.slot == "head":
            output = self.part(x)
            return {f"view '{name}'": view for name, view in self.part.views(output).items()}
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


def _check_on(who: str, choice: Resolved, g: Geometry) -> None:
    probe = _probe(choice, g)
    x = _input(choice.slot, g)
    _check_values(who, choice, g, probe, x)
    _check_state(who, choice, g, probe, x)
    _check_meta(who, choice, g, x)
    _check_half(who, choice, g, x)
    _check_alone(who, choice, g)
    _check_stacked(who, choice, g)
    if choice.slot == "position":
        _check_position(who, choice, g, probe)
    if choice.slot == "attention":
        _check_attention(who, g, probe.part, x)


def _check_values(who: str, choice: Resolved, g: Geometry, probe: _Probe, x: Tensor) -> None:
    for training in (False, True):
        probe.train(training)
        x = x.detach().requires_grad_()
        with _during(f"{who}: forward", Exception):
            out = probe(x)
        _check_shapes(who, choice.slot, g, out, x)
        for name, value in out.items():
            _expect(bool(value.isfinite().all()), f"{who}: {name} has values that are not finite")
        grown = [value.float().pow(2).sum() for value in out.values() if value.requires_grad]
        if not grown:
            continue
        with _during(f"{who}: backward", Exception):
            torch.autograd.backward(torch.stack(grown).sum())
        for name, parameter in probe.part.named_parameters():
            _expect(parameter.grad is not None, f"{who}: parameter {name} receives no gradient")
            assert parameter.grad is not None
            _expect(bool(parameter.grad.isfinite().all()), f"{who}: the gradient of {name} is not finite")
        _expect(x.grad is None or bool(x.grad.isfinite().all()), f"{who}: the gradient of the input is not finite")


def _check_alone(who: str, choice: Resolved, g: Geometry) -> None:
    """In float64, where rounding cannot hide a mistake."""
    probe = _probe(choice, g).double().eval()
    x = _input(choice.slot, g).double()
    with torch.no_grad(), _during(f"{who}: forward in float64, and of one sample", Exception):
        together, alone = probe(x), probe(x[:1])
    for name in together:
        if together[name].shape != alone[name].shape:  # not what is the same for all samples
            close = torch.allclose(together[name][:1], alone[name], rtol=1e-9, atol=1e-9)
            _expect(close, f"{who}: {name} of a sample depends on the other samples of its batch")


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
        _expect(shape in allowed, f"{who}: {name} has shape {shape}; expected {' or '.join(map(str, allowed))}")
        given = "rotation" in name or "bias" in name or value.dtype == x.dtype
        _expect(given, f"{who}: {name} is {value.dtype} for an input of {x.dtype}")


def _check_state(who: str, choice: Resolved, g: Geometry, probe: _Probe, x: Tensor) -> None:
    other = _Probe(choice.slot, _built(choice, g), g).eval()
    with _during(f"{who}: its state is loaded into another instance", RuntimeError):
        other.load_state_dict(probe.state_dict(), strict=True)
    with torch.no_grad():
        first, second = probe.eval()(x), other(x)
    for name in first:
        same = torch.equal(first[name], second[name])
        _expect(same, f"{who}: {name} differs under a state that was saved and loaded: something is not in the state")


def _check_meta(who: str, choice: Resolved, g: Geometry, x: Tensor) -> None:
    with _during(f"{who}: built and run on the meta device, as a plan is checked", Exception), torch.device("meta"):
        out = _Probe(choice.slot, _built(choice, g), g)(x.to("meta"))
    _check_shapes(f"{who} (meta device)", choice.slot, g, out, x)


def _check_half(who: str, choice: Resolved, g: Geometry, x: Tensor) -> None:
    probe = _probe(choice, g).to(torch.bfloat16).eval()
    with torch.no_grad(), _during(f"{who}: forward in bfloat16", Exception):
        out = probe(x.to(torch.bfloat16))
    _check_shapes(f"{who} (bfloat16)", choice.slot, g, out, x.to(torch.bfloat16))
    for name, value in out.items():
        _expect(bool(value.isfinite().all()), f"{who}: {name} has values that are not finite in bfloat16")


def _check_stacked(who: str, choice: Resolved, g: Geometry) -> None:
    """Stacked members compute what each computes alone."""
    if not getattr(choice.component, "vmap_safe", False):
        return
    members = [_probe(choice, g, seed).double().eval() for seed in (1, 2)]
    x = _input(choice.slot, g).double()
    parameters, buffers = torch.func.stack_module_state(members)

    def one(parameters: Any, buffers: Any, x: Tensor) -> Any:
        return torch.func.functional_call(members[0], (parameters, buffers), (x,))

    sentence = f"{who} declares vmap_safe and does not run under torch.vmap (vmap_safe = False says that it cannot)"
    with torch.no_grad(), _during(sentence, Exception), warnings.catch_warnings():
        # Where torch has no batching rule it falls back to a loop and says so: slow, and right.
        warnings.filterwarnings("ignore", message="There is a performance drop")
        stacked = torch.vmap(one)(parameters, buffers, torch.stack([x, x]))
    with torch.no_grad():
        for index, member in enumerate(members):
            for name, value in member(x).items():
                close = torch.allclose(stacked[name][index].to(value.dtype), value, rtol=1e-9, atol=1e-9)
                _expect(close, f"{who} declares vmap_safe, and stacked its {name} differs from that of a loop")


def _check_position(who: str, choice: Resolved, g: Geometry, probe: _Probe) -> None:
    position = probe.part
    for flag, hook in (("needs_bias", position.bias), ("needs_rotation", position.rotation)):
        given = any(hook(layer) is not None for layer in range(1, g.depth + 1))
        says = getattr(position, flag)
        does = "something" if given else "None"
        _expect(says == given, f"{who} declares {flag} = {says}, and {hook.__name__}(layer) returns {does}")
    if position.needs_rotation:
        cos, sin = next(rotation for layer in range(1, g.depth + 1) if (rotation := position.rotation(layer)))
        still = bool((cos[..., : len(g.prefix), :] == 1).all() and (sin[..., : len(g.prefix), :] == 0).all())
        _expect(still, f"{who} rotates prefix tokens; their rows have cosine 1 and sine 0")
    from vitlab.components.position import Resampling

    larger = replace(g, grid=(g.grid[0] * 2, g.grid[1] * 2), image=(g.image[0] * 2, g.image[1] * 2))
    if _refusal(who, choice, larger) is None:
        with _during(f"{who}: its state is resampled for a grid twice as large and loaded there", Exception):
            state = position.resample(position.state_dict(), g, larger, Resampling())
            _built(choice, larger).load_state_dict(state, strict=True)


def _check_attention(who: str, g: Geometry, attention: Any, x: Tensor) -> None:
    rotation, bias = _hints(attention, g, x)
    with torch.no_grad():
        plain = attention(x, None, None)
        if rotation is not None:
            turns = not torch.allclose(attention(x, rotation, None), plain)
            _expect(turns, f"{who} declares takes_rotation, and computes the same without one")
        if bias is not None:
            bends = not torch.allclose(attention(x, None, bias), plain)
            _expect(bends, f"{who} declares takes_bias, and computes the same without one")
        try:
            maps = attention.maps(x, rotation, bias)
        except NotImplementedError:
            maps = None
    if maps is not None:
        shape = (len(x), g.heads, g.tokens, g.tokens)
        _expect(tuple(maps.shape) == shape, f"{who}: maps have shape {tuple(maps.shape)}; expected {shape}")
        ones = torch.allclose(maps.sum(-1), torch.ones(shape[:-1]), atol=1e-5)
        _expect(ones, f"{who}: the rows of its maps do not sum to 1")
    if attention.canonical is None:
        return
    state = attention.state_dict()
    with _during(f"{who}: its state is converted to the canonical form and back", Exception):
        canonical = attention.to_canonical(state)
        back = attention.from_canonical(canonical)
    qkv = canonical.get("qkv.weight")
    found = "is missing" if qkv is None else f"has shape {tuple(qkv.shape)}"
    _expect(
        qkv is not None and qkv.shape == (3 * g.dim, g.dim),
        f"{who}: qkv.weight of the canonical form {found}; expected {(3 * g.dim, g.dim)}, or canonical = None",
    )
    same = back.keys() == state.keys() and all(torch.equal(back[name], state[name]) for name in state)
    _expect(same, f"{who}: from_canonical(to_canonical(state)) is not the state")


# -- schemes and models -----------------------------------------------------------------------------------------------


def _check_scheme(who: str, choice: Resolved) -> None:
    scheme: Any = slot(choice.slot).build(choice)
    for kind, name, shape in (
        ("linear", "blocks.0.attn.qkv.weight", (48, 16)),
        ("linear_bias", "blocks.0.mlp.fc1.bias", (64,)),
        ("conv", "patch_embed.proj.weight", (16, 3, 4, 4)),
        ("conv_bias", "patch_embed.proj.bias", (16,)),
        ("token", "cls_token", (1, 1, 16)),
        ("position", "pos_embed", (1, 17, 16)),
    ):
        drawn = []
        for seed in (0, 0, 1):
            x = torch.full(shape, torch.nan)
            with _during(f"{who} draws {name}", Exception):
                scheme.draw(x, name, kind, 16, seed)
            drawn.append(x)
        _expect(bool(drawn[0].isfinite().all()), f"{who} leaves values of {name} unset or not finite")
        _expect(torch.equal(drawn[0], drawn[1]), f"{who} draws {name} otherwise a second time under the same seed")
        constant = bool((drawn[0] == drawn[0].flatten()[0]).all())
        _expect(constant or not torch.equal(drawn[0], drawn[2]), f"{who} draws {name} the same under every seed")


def _check_model(who: str, choice: Resolved) -> None:
    reason = choice.component.why_not(DATA, choice.options)  # type: ignore[attr-defined]
    if reason is not None:
        _expect(bool(reason.strip()), f"{who}: why_not gives a reason in words, or None")
        return
    with _during(f"{who}: built and run on the meta device, as a plan is checked", Exception), torch.device("meta"):
        shape = _logits(_model(choice), torch.zeros(B, DATA.channels, *DATA.image)).shape
    _expect(shape[:2] == (B, DATA.classes), f"{who}: logits have shape {tuple(shape)}; expected {(B, DATA.classes)}")
    first, second, third = (_model(choice) for _ in range(3))
    for model, seed in ((first, 0), (second, 0), (third, 1)):
        model.initialise(seed)
    state = first.state_dict()
    _expect(_same(state, second.state_dict()), f"{who}: initialise(seed) is not a function of the seed")
    drawn = any(len(parameter.unique()) > 1 for parameter in first.parameters())  # a convex model may begin at zero
    _expect(not drawn or not _same(state, third.state_dict()), f"{who}: initialise draws the same under every seed")
    x = torch.randn(B, DATA.channels, *DATA.image, generator=torch.Generator().manual_seed(0))
    with _during(f"{who}: forward and backward", Exception):
        logits = _logits(first, x)
        torch.autograd.backward(logits.square().sum())
    _expect(bool(logits.isfinite().all()), f"{who}: logits are not finite")
    for name, parameter in first.named_parameters():
        _expect(parameter.grad is not None, f"{who}: parameter {name} receives no gradient")
        _expect(first.layer_of(name) >= 0, f"{who}: layer_of({name}) is below 0")
    unknown = first.no_weight_decay() - {name for name, _ in first.named_parameters()}
    _expect(not unknown, f"{who}: no_weight_decay names what is no parameter: {', '.join(sorted(unknown))}")
    with _during(f"{who}: its state is converted to the canonical form and back", Exception):
        back = third.from_canonical(third.to_canonical(third.state_dict()))
    _expect(_same(back, third.state_dict()), f"{who}: from_canonical(to_canonical(state)) is not the state")


def _model(choice: Resolved) -> Any:
    return slot("model").build(choice, DATA)


def _logits(model: Any, x: Tensor) -> Tensor:
    views: dict[str, Tensor] = model.views(model(x))
    return views[""]


# -- trackers ---------------------------------------------------------------------------------------------------------


def _check_tracker(who: str, room: slots.Slot[Any], name: str, cls: type) -> None:
    from vitlab.trackers import Replay
    from vitlab.trackers.rehearsal import rehearse

    if not issubclass(cls, Replay):
        return  # only its author knows where its points are
    with _during(f"{who} with its default options", OptionError):
        choice = room.resolve(name)
    with tempfile.TemporaryDirectory() as folder:
        try:
            rehearse(lambda plan, store, run: room.build(choice, plan, store, run), Path(folder))
        except AssertionError as error:
            raise AssertionError(f"{who}: {error}") from None
        except Exception as error:
            raise AssertionError(f"{who} is handed journals: {error!r}") from error


# -- how it is done ---------------------------------------------------------------------------------------------------


def _built(choice: Resolved, g: Geometry) -> Any:
    return slot(choice.slot).build(choice, g.dim if choice.slot == "norm" else g)


def _probe(choice: Resolved, g: Geometry, seed: int = 0) -> _Probe:
    """A part whose parameters stand apart from special values, such as the zeros some begin with."""
    probe = _Probe(choice.slot, _built(choice, g), g)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in probe.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return probe


def _input(slot: str, g: Geometry) -> Tensor:
    shape = (B, g.channels, *g.image) if slot == "patch" else (B, g.tokens, g.dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _hints(attention: Any, g: Geometry, x: Tensor) -> tuple[tuple[Tensor, Tensor] | None, Tensor | None]:
    """A rotation and a bias as a position gives them, where the attention takes them."""
    place_T = torch.arange(g.tokens, dtype=torch.float64)
    angle_TK = place_T[:, None] * (torch.arange(g.head_dim // 2) + 1) / 3
    rotation = (angle_TK.cos().to(x), angle_TK.sin().to(x)) if attention.takes_rotation else None
    slope_H = torch.arange(1, g.heads + 1)[:, None, None]
    bias_HTT = (-slope_H * (place_T - place_T[:, None]).abs() / 4).to(x)
    return rotation, bias_HTT if attention.takes_bias else None


def _same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _expect(holds: bool, sentence: str) -> None:
    if not holds:
        raise AssertionError(sentence)


@contextmanager
def _during(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """What the block raises becomes a failed expectation that says when it happened."""
    try:
        yield
    except AssertionError:
        raise
    except kinds as error:
        raise AssertionError(f"{what}: {error}" if isinstance(error, VitlabError) else f"{what}: {error!r}") from error
