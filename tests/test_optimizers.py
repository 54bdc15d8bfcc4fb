"""Tests of the optimizers that are not torch's elementwise ones: authors' updates, routing, resume, joint steps.

Gradients are a function of the weights and the step, so that a difference of one step grows in the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_engines import same, state_of, training
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from vitlab.engines.base import train
from vitlab.engines.vmap import join_optimizers
from vitlab.geometry import DataInfo
from vitlab.models.contract import Model
from vitlab.registry import slot
from vitlab.training import artifacts, optim
from vitlab.training.optim import (
    group_by_decay,
    hidden_matrices,
    set_learning_rates,
    split_for_layer_decay,
    subclass_without_compile_hooks,
)

NEW = ["adafactor", "lamb", "lion", "muon", "normuon", "soap", "schedule_free"]
DATA = DataInfo(image=(8, 8), channels=1, classes=3)
VIT = {"type": "vit", "patch_size": 4, "dim": 8, "depth": 2, "heads": 2, "mlp": {"type": "gelu", "ratio": 2}}
RATE = 0.02


def vit(seed: int = 0, dtype: torch.dtype = torch.float64, **options: Any) -> Model:
    model: Model = slot("model").build({**VIT, **options}, DATA)
    model.initialise(seed)
    return model.to(dtype)


def component(name: str, **options: Any) -> Any:
    return slot("optimizer").build({"type": name, **options})


def built(one: Any, model: Model, layer_decay: float | None = None) -> torch.optim.Optimizer:
    groups = one.route(group_by_decay(model, one.weight_decay, model.no_weight_decay()), model)
    if layer_decay is not None:
        groups = split_for_layer_decay(
            groups, {name: model.layer_of(name) for name, _ in model.named_parameters()}, layer_decay
        )
    optimizer: torch.optim.Optimizer = one.build(groups)
    return optimizer


@cache
def random(step: int, count: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def set_gradients(parameters: list[Any], step: int) -> None:
    """Set gradients of a noisy quadratic whose curvature differs by tensor."""
    values = random(step, sum(p.numel() for p in parameters)).to(parameters[0].dtype)
    for index, (p, value) in enumerate(zip(parameters, values.split([p.numel() for p in parameters]), strict=True)):
        p.grad = p.detach().sub(value.view_as(p), alpha=0.1).mul_(0.1 + index % 3)


def rate(step: int) -> float:
    return RATE * (1 - step / 200)


def take(optimizer: torch.optim.Optimizer, parameters: list[Any], steps: range) -> None:
    for step in steps:
        set_learning_rates(optimizer, rate(step))
        set_gradients(parameters, step)
        optimizer.step()


# -- the authors' updates ---------------------------------------------------------------------------------------------

Update = Callable[[Tensor, Tensor, dict[str, Any], int, float, float], None]


def adafactor(p: Tensor, g: Tensor, state: dict[str, Any], t: int, lr: float, decay: float) -> None:
    """arXiv:1804.04235, algorithms 4 and 5, with torch's rate, weight decay and epsilon."""
    eps, share = torch.finfo(p.dtype).eps, t**-0.8
    scale = max(1e-3, float(p.square().mean().sqrt())) * min(lr, t**-0.5)
    p.mul_(1 - lr * decay)
    if p.ndim > 1:
        row, column = g.square().mean(-1, keepdim=True), g.square().mean(-2, keepdim=True)
        state["row"] = (1 - share) * state.get("row", 0 * row) + share * row
        state["column"] = (1 - share) * state.get("column", 0 * column) + share * column
        v = state["row"] * state["column"] / state["row"].mean(-2, keepdim=True).clamp(min=eps)
    else:
        v = state["v"] = (1 - share) * state.get("v", 0 * g) + share * g.square()
    u = g / v.clamp(min=eps * eps).sqrt()
    p.sub_(scale * u / max(1.0, float(u.square().mean().sqrt())))


def lamb(p: Tensor, g: Tensor, state: dict[str, Any], t: int, lr: float, decay: float) -> None:
    """arXiv:1904.00962, algorithm 2; parameters without weight decay are not adapted, as in the authors' code."""
    m = state["m"] = 0.9 * state.get("m", 0 * g) + 0.1 * g
    v = state["v"] = 0.999 * state.get("v", 0 * g) + 0.001 * g * g
    r = m / (1 - 0.9**t) / ((v / (1 - 0.999**t)).sqrt() + 1e-6) + decay * p
    ratio = p.norm() / r.norm() if decay and p.norm() > 0 else 1.0
    p.sub_(lr * ratio * r)


def lion(p: Tensor, g: Tensor, state: dict[str, Any], t: int, lr: float, decay: float) -> None:
    """arXiv:2302.06675, algorithm 2."""
    m = state.get("m", 0 * g)
    c = 0.9 * m + 0.1 * g
    p.sub_(lr * (c.sign() + decay * p))
    state["m"] = 0.99 * m + 0.01 * g


def schedule_free(p: Tensor, g: Tensor, state: dict[str, Any], t: int, lr: float, decay: float) -> None:
    """arXiv:2405.15682, algorithm 1, with the weights of averaging of section 4; ``p`` is y, and x is in the state."""
    z, x = state.get("z", p.clone()), state.get("x", p.clone())
    v = state["v"] = 0.999 * state.get("v", 0 * g) + 0.001 * g * g
    z = z - lr * (g / ((v / (1 - 0.999**t)).sqrt() + 1e-8) + decay * p)
    state["top"] = max(lr, state.get("top", 0.0))
    state["sum"] = state.get("sum", 0.0) + state["top"] ** 2
    share = state["top"] ** 2 / state["sum"]
    x = (1 - share) * x + share * z
    state["z"], state["x"] = z, x
    p.copy_(0.1 * z + 0.9 * x)


def soap(p: Tensor, g: Tensor, state: dict[str, Any], t: int, lr: float, decay: float) -> None:
    """arXiv:2409.11321, algorithm 3, for tensors of any number of axes; as the authors', QR is in single precision."""
    axes = range(p.ndim) if p.ndim > 1 else ()

    def outer(axis: int) -> Tensor:
        others = [other for other in axes if other != axis]
        return torch.tensordot(g, g, [others, others])

    def rotated(x: Tensor, back: bool = False) -> Tensor:
        for axis in axes:
            q = state["q"][axis]
            x = torch.movedim(torch.tensordot(x.movedim(axis, -1), q.T if back else q, 1), -1, axis)
        return x

    if t == 1:
        # The first gradient leaves axes of the bases undetermined, so rounding decides on them.
        state["l"] = [torch.zeros_like(outer(axis)).lerp(outer(axis), 1 - 0.95) for axis in axes]
        state["q"] = [torch.linalg.eigh(m + 1e-30 * torch.eye(len(m)).to(m)).eigenvectors.flip(1) for m in state["l"]]
        state["m"], state["v"] = 0 * g, 0 * g
        return
    state["m"] = 0.95 * state["m"] + 0.05 * g
    state["v"] = 0.95 * state["v"] + 0.05 * rotated(g).square()
    correction = math.sqrt(1 - 0.95 ** (t - 1)) / (1 - 0.95 ** (t - 1))
    p.sub_(lr * correction * rotated(rotated(state["m"]) / (state["v"].sqrt() + 1e-8), back=True))
    p.mul_(1 - lr * decay)
    for axis in axes:
        state["l"][axis] = 0.95 * state["l"][axis] + 0.05 * outer(axis)
    if (t - 1) % 10 == 0:
        for axis in axes:
            product = state["l"][axis] @ state["q"][axis]
            order = (state["q"][axis] * product).sum(0).argsort(descending=True)
            state["v"] = state["v"].index_select(axis, order)
            state["q"][axis] = torch.linalg.qr(product[:, order].float()).Q.to(product)


@pytest.mark.parametrize("update", [adafactor, lamb, lion, schedule_free, soap], ids=lambda update: update.__name__)
def test_hundred_steps_equal_authors_update(update: Update) -> None:
    ours, theirs = (vit(depth=1, position="none") for _ in range(2))
    one = component(update.__name__, lr=RATE, weight_decay=0.1)
    optimizer = built(one, ours)
    exempt = {name for name, p in theirs.named_parameters() if p.ndim == 1} | theirs.no_weight_decay()
    states: dict[str, dict[str, Any]] = {name: {} for name, _ in theirs.named_parameters()}
    mine, other = list(ours.parameters()), list(theirs.parameters())
    start = [p.detach().clone() for p in other]
    take(optimizer, mine, range(100))
    for step in range(100):
        set_gradients(other, step)
        for name, p in theirs.named_parameters():
            assert p.grad is not None
            with torch.no_grad():
                update(p, p.grad, states[name], step + 1, rate(step), 0.0 if name in exempt else 0.1)
    for p, q, before in zip(mine, other, start, strict=True):
        assert not torch.allclose(q, before, rtol=1e-2)
        tolerance = 1e-6 if update is soap else 1e-9
        torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)
    if update is schedule_free:
        with one.average(optimizer).averaged_weights():
            for (name, _), p in zip(theirs.named_parameters(), mine, strict=True):
                torch.testing.assert_close(p.detach(), states[name]["x"], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("name", ["muon", "normuon"])
def test_muon_equals_other_implementation(name: str, adjust: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import pytorch_optimizer
    from pytorch_optimizer.optimizer.muon import base, normuon

    for module in (base, normuon):  # iterations in double precision
        wide = partial(module.zero_power_via_newton_schulz_5, dtype=torch.float64)
        monkeypatch.setattr(module, "zero_power_via_newton_schulz_5", wide)
    ours, theirs = vit(attention="split"), vit(attention="split")
    one = component(name, lr=RATE, weight_decay=0.1, adjust=adjust, adamw_scale=0.5)
    optimizer = built(one, ours)
    matrices = [p for name, p in theirs.named_parameters() if name.startswith("blocks.") and p.ndim == 2]
    assert len(matrices) == 2 * 6
    rest = {True: [], False: []}  # type: ignore[var-annotated]
    for parameter, p in theirs.named_parameters():
        if not any(p is matrix for matrix in matrices):
            rest[parameter in theirs.no_weight_decay()].append(p)
    options: dict[str, Any] = {"use_adjusted_lr": adjust == "match_rms_adamw"}
    if name == "normuon":
        options = {"update_scale": "match_rms" if adjust == "match_rms_adamw" else "preserve_norm"}
    adamw = {"use_muon": False, "betas": (0.9, 0.95), "eps": 1e-8}
    kind = {"muon": pytorch_optimizer.Muon, "normuon": pytorch_optimizer.NorMuon}[name]
    reference = kind(
        [
            {"params": matrices, "use_muon": True, "weight_decay": 0.1},
            {"params": rest[True], "weight_decay": 0.0, "lr_scale": 0.5, **adamw},
            {"params": rest[False], "weight_decay": 0.1, "lr_scale": 0.5, **adamw},
        ],
        **options,
    )
    take(optimizer, list(ours.parameters()), range(100))
    take(reference, list(theirs.parameters()), range(100))
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-8)


def test_muon_equals_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = vit(attention="split"), vit(attention="split")
    optimizer = built(component("muon", lr=RATE, weight_decay=0.1), ours)
    matrices = [(name, p) for name, p in theirs.named_parameters() if name in hidden_matrices(theirs)]
    reference = torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    monkeypatch.setattr(Tensor, "bfloat16", lambda self: self)  # iterations in double precision
    names = [name for name, _ in matrices]
    for step in range(100):
        for one, model in ((optimizer, ours), (reference, theirs)):
            set_learning_rates(one, rate(step))
            set_gradients(list(model.parameters()), step)
            one.step()
    for name in names:
        torch.testing.assert_close(ours.get_parameter(name), theirs.get_parameter(name), rtol=1e-8, atol=1e-8)


def test_steps_of_muon_are_orthogonal() -> None:
    model = vit()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = built(component("muon", weight_decay=0.0, ns_precision="bfloat16"), model)
    take(optimizer, list(model.parameters()), range(1))
    name = "blocks.0.attn.qkv.weight"
    for step in (before[name] - model.get_parameter(name).detach()).chunk(3):
        values = torch.linalg.svdvals(step / (RATE * 0.2 * math.sqrt(8)))
        assert values.max() < 1.3 and values[:-1].min() > 0.5  # the iteration's values lie between 0.7 and 1.2


# -- routing ----------------------------------------------------------------------------------------------------------


def test_hidden_matrices_of_vit() -> None:
    model = vit(position="relative_bias", head={"type": "linear", "pool": "gap"}, prefix=[])
    blocks = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    expected = {f"blocks.{i}.{name}.weight": 3 if name == "attn.qkv" else 1 for i in range(2) for name in blocks}
    assert hidden_matrices(model) == expected
    tables = [name for name, _ in model.named_parameters() if "relative_position_bias_table" in name]
    assert tables and not set(tables) & set(expected)


def test_models_without_hidden_layers_have_adamw() -> None:
    model = slot("model").build("linear", DATA)
    one = component("muon")
    optimizer = built(one, model)
    assert hidden_matrices(model) == {}
    assert [type(part) for part in optimizer.parts] == [subclass_without_compile_hooks(torch.optim.AdamW)]  # type: ignore[attr-defined]


def test_muon_is_independent_of_layout_of_qkv() -> None:
    fused, split = vit(attention="explicit"), vit(attention="split")
    split.load_state_dict(split.from_canonical(fused.to_canonical(fused.state_dict())))
    optimizers = [built(component("normuon", lr=RATE), model) for model in (fused, split)]
    for step in range(5):
        set_gradients(list(fused.parameters()), step)
        gradients = {name: p.grad for name, p in fused.named_parameters() if p.grad is not None}
        for name, gradient in split.from_canonical(fused.to_canonical(gradients)).items():
            split.get_parameter(name).grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert same(split.to_canonical(split.state_dict()), fused.to_canonical(fused.state_dict()))


def test_rates_of_muon_and_adamw_follow_schedule_and_layers() -> None:
    model = vit()
    optimizer = built(component("muon", lr=1.0, adamw_scale=0.25), model, layer_decay=0.5)
    set_learning_rates(optimizer, 0.1)
    rates = {("maps" in group, round(group["lr"], 12)) for group in optimizer.param_groups}
    matrix = {(True, 0.1 * 0.5), (True, 0.1 * 0.25)}
    assert rates == matrix | {(False, 0.1 * 0.25 * 0.5**depth) for depth in range(4)}
    decays = {group["weight_decay"] for group in optimizer.param_groups if "maps" not in group}
    assert decays == {0.0, 0.05}


# -- state ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NEW)
def test_resume_is_bitwise_and_evaluation_leaves_no_trace(name: str, tmp_path: Path) -> None:
    straight, model = vit(dtype=torch.float32), vit(dtype=torch.float32)
    one = component(name, lr=RATE)
    take(built(one, straight, 0.9), list(straight.parameters()), range(24))
    first = built(one, model, 0.9)
    take(first, list(model.parameters()), range(12))
    if (average := one.average(first)) is not None:
        own = {name: value.clone() for name, value in model.state_dict().items()}
        with average.averaged_weights():
            assert not same(own, model.state_dict())
        assert same(own, model.state_dict())
    artifacts.make_checkpoint_writer(tmp_path, {"model": model.state_dict(), "optimizer": first.state_dict()})()
    stored = artifacts.clean_up_and_read_checkpoint(tmp_path)
    assert stored is not None
    resumed = vit(1, dtype=torch.float32)
    second = built(one, resumed, 0.9)
    resumed.load_state_dict(stored["model"])
    second.load_state_dict(stored["optimizer"])
    take(second, list(resumed.parameters()), range(12, 24))
    assert same(straight.state_dict(), resumed.state_dict())


def states_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [dict(optimizer.state[p]) for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("name", [*NEW, "adam", "adamw", "sgd"])
def test_joint_steps_equal_single_steps(name: str) -> None:
    """Bit for bit, whatever settings are equal, and with states that a checkpoint restores."""
    one = component(name, lr=RATE)
    for count in (1, 3):
        alone, together = ([vit(seed, dtype=torch.float32) for seed in range(count)] for _ in range(2))
        separate, members = ([built(one, model) for model in models] for models in (alone, together))
        joint = join_optimizers(members)
        for step in range(6):
            for models, optimizers in ((alone, separate), (together, members)):
                for seed, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                    set_learning_rates(optimizer, rate(step) * (1 if seed < 2 else 0.5))
                    set_gradients(list(model.parameters()), step + 100 * seed)
            for optimizer in separate:
                optimizer.step()
            for joined in joint:
                joined.step()
        assert all(same(a.state_dict(), b.state_dict()) for a, b in zip(alone, together, strict=True))
        for optimizer, member in zip(separate, members, strict=True):
            states = [[states_of(part) for part in getattr(each, "parts", [each])] for each in (optimizer, member)]
            torch.testing.assert_close(*states, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_joint_step_of_adam_is_one_call_of_the_kernel(name: str) -> None:
    models = [vit(seed, dtype=torch.float32) for seed in range(2)]
    joint = join_optimizers([built(component(name, lr=RATE), model) for model in models])
    for step in range(2):
        for seed, model in enumerate(models):
            set_gradients(list(model.parameters()), step + 100 * seed)
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            for joined in joint:
                joined.step()
    calls = {event.key: event.count for event in recorded.key_averages()}
    kernels = [name for name in calls if "fused_adam" in name]
    assert len(kernels) == 1 and calls[kernels[0]] <= 2, "one for each weight decay"
    assert not any("foreach" in name for name in calls)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_joint_step_leaves_out_parameters_without_gradient(name: str) -> None:
    one = component(name, lr=RATE)
    alone, together = ([vit(seed, dtype=torch.float32) for seed in range(2)] for _ in range(2))
    separate, members = ([built(one, model) for model in models] for models in (alone, together))
    joint = join_optimizers(members)
    for step in range(4):
        for models in (alone, together):
            for seed, model in enumerate(models):
                set_gradients(list(model.parameters()), step + 100 * seed)
                if step == 2:
                    next(model.parameters()).grad = None
        for optimizer in separate:
            optimizer.step()
        for joined in joint:
            joined.step()
    assert all(same(a.state_dict(), b.state_dict()) for a, b in zip(alone, together, strict=True))


def test_orthogonal_steps_of_all_trials_are_one_iteration_per_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    from vitlab.training.optim import muon

    sizes: list[tuple[int, ...]] = []
    original = muon.orthogonalise
    monkeypatch.setattr(muon, "orthogonalise", lambda x, *rest: (sizes.append(tuple(x.shape)), original(x, *rest))[1])
    models = [vit(seed) for seed in range(3)]
    members = [built(component("muon"), model) for model in models]
    for model in models:
        set_gradients(list(model.parameters()), 0)
    for joined in join_optimizers(members):
        joined.step()
    assert sorted(sizes) == [(6, 8, 8), (6, 8, 16), (6, 8, 16), (6, 16, 8), (18, 8, 8)]  # (6, 16, 8) is transposed


@pytest.mark.parametrize("name", ["muon", "schedule_free"])
def test_trial_does_not_depend_on_batch_of_trials(name: str) -> None:
    options: dict[str, Any] = {"optimizer": {"type": name, "lr": 0.01}, "schedule": "constant", "clip_grad": 1.0}
    results = {}
    for count in (1, 3):
        together = [training(seed, **options) for seed in range(count)]
        results[count] = train(together, slot("engine").get("vmap"))[0], state_of(together[0])
    (alone, state), (among, other) = results[1], results[3]
    assert alone is not None and among is not None
    assert alone.metrics == among.metrics and same(state, other)


def test_training_ends_with_averaged_weights() -> None:
    options: dict[str, Any] = {"optimizer": {"type": "schedule_free", "lr": 0.01}, "schedule": "constant"}
    one = training(0, **options)
    (result,) = train([one])
    assert result is not None
    assert not any(group["train_mode"] for group in one.optimizer.param_groups)
    assert one.evaluate("test")[1]["loss"] == result.metrics["test/loss"]


# -- mistakes ---------------------------------------------------------------------------------------------------------


def test_missing_library_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim, "find_spec", lambda name: None)
    for name, library in (("lion", "timm"), ("soap", "pytorch_optimizer"), ("schedule_free", "schedulefree")):
        reason = slot("optimizer").resolve_choice(name).component.incompatibility({"schedule": "constant"})  # type: ignore[attr-defined]
        assert reason is not None and library in reason and "pip install 'vitlab[optimizers]'" in reason
    assert slot("optimizer").resolve_choice("muon").component.incompatibility({}) is None  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ("ema: {decay: 0.9}", r"schedule_free averages the weights itself; remove train\.ema"),
        ("schedule: {type: cosine}", "write schedule: {type: constant"),
        ("batch_size: 8", "write schedule: {type: constant"),
        ("schedule: {type: constant, warmup: 0.1}", ""),
        ("schedule: constant", ""),
    ],
)
def test_schedule_free_refuses_a_second_average_and_a_falling_rate(tmp_path: Path, options: str, sentence: str) -> None:
    from vitlab.errors import SpecError
    from vitlab.lab import plan_study

    file = tmp_path / "study.yaml"
    file.write_text(
        "study: twice\nbase:\n  data: {type: digits}\n"
        "  model: {type: vit, patch_size: 4, dim: 8, depth: 1, heads: 2}\n"
        f"  train: {{steps: 2, optimizer: schedule_free, {options}}}\n"
    )
    with pytest.raises(SpecError, match=sentence) if sentence else nullcontext():
        plan_study(file, out=tmp_path)
