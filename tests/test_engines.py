"""Tests of stacked trials: results equal those of single trials bitwise, and of the loop up to rounding."""

from __future__ import annotations

import copy
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import slot_fixtures
import torch
import yaml
from job_helpers import run_together, run_trial
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import vitlab
from vitlab import lab
from vitlab.components.base import Part, inside_vmap
from vitlab.data.prepare import Feed, prepare
from vitlab.engines import base
from vitlab.engines.base import train
from vitlab.engines.batch_last import model_incompatibility
from vitlab.errors import SpecError
from vitlab.geometry import Work
from vitlab.planning.engine_choice import (
    MAX_GPU_VALUES,
    MAX_PRODUCTS,
    MAX_TOGETHER,
    MAX_VALUES,
    MIN_COMPILED_STEPS,
    choose_engine,
    group_trials,
    joint_training_key,
    speed_digest,
)
from vitlab.planning.values import Planned, Trial
from vitlab.registry import list_entries, slot
from vitlab.runner.attempt import Attempt
from vitlab.runner.job import Settings
from vitlab.spec import STREAMS, Choice, TrainSpec, TrialSpec
from vitlab.spec.trial import InitFrom
from vitlab.store.folders import TrialFolder
from vitlab.store.result import Outcome, TrialResult
from vitlab.training.loop import Training
from vitlab.weights.transfer import load_and_freeze_weights

DATA = {"type": "synthetic", "image_size": 8, "train_images": 90, "test_images": 30, "num_classes": 6}
MODEL = {"type": "vit", "patch_size": 4, "dim": 16, "depth": 2, "heads": 2, "drop": 0.1, "drop_path": 0.2}
TRAIN = {"steps": 9, "batch_size": 16, "evaluations": 3, "optimizer": {"type": "adamw", "lr": 3e-3}}


def training(
    seed: int = 0, *, data: dict[str, Any] = {}, model: dict[str, Any] = {}, frozen: bool = False, **train: Any
) -> Training:
    seeds = {**dict.fromkeys(STREAMS, seed), "split": 0}
    spec = TrainSpec.model_validate({**TRAIN, **train})
    choice = slot("dataset").resolve_choice({**DATA, **data})
    prepared = prepare(choice, seeds)
    built = slot("model").build({**MODEL, **model}, prepared.info)
    built.initialise(seed)
    if frozen:
        source = slot("model").build({**MODEL, **model}, prepared.info)
        source.initialise(seed)
        source.train()(torch.randn(32, 1, 8, 8, generator=torch.Generator().manual_seed(seed)))  # statistics of a body
        load_and_freeze_weights(built, source, InitFrom.model_validate({"checkpoint": "x", "freeze": "body"}))
    dtype = torch.float64 if spec.precision == "fp64" else torch.float32
    feed = Feed(prepared, choice.options["augment"], seeds, dtype=dtype)
    return Training(built.to(dtype), feed, spec, seeds)


def state_of(one: Training) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in one.model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one | other)


# -- alone, and among others ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "precision"), [("vmap", "fp32"), ("vmap", "fp64"), ("vmap", "bf16"), ("batch_last", "fp32")]
)
def test_trial_does_not_depend_on_batch_of_trials(engine: str, precision: str) -> None:
    """Trials differ in data order, augmentation, masks, mixing, rate, decay, clipping and optimizer."""
    ways: list[dict[str, Any]] = [
        {},
        {"optimizer": {"type": "adamw", "lr": 1e-2, "weight_decay": 0.3}, "clip_grad": 0.5},
        {"optimizer": {"type": "sgd", "lr": 0.1}, "schedule": "constant"},
        {"mix": {"mixup": 0.8, "cutmix": 1.0}, "layer_decay": 0.8},
        {},
    ]
    # Mixed images have shares of classes for labels, and those trained together have one shape.
    ways = [{**way, "mix": {"mixup": 0.2}} if "mix" not in way else way for way in ways]

    def new_training(seed: int) -> Training:
        augment = [{"type": "crop", "padding": seed % 2 + 1}, "flip"]
        return training(seed, data={"augment": augment}, precision=precision, steps=6, evaluations=2, **ways[seed])

    alone = []
    for seed in range(5):
        one = new_training(seed)
        (outcome,) = train([one], slot("engine").get(engine))
        alone.append((one, outcome))
    for size in (2, 5):
        together = [new_training(seed) for seed in range(size)]
        results = train(together, slot("engine").get(engine))
        for one, (other, expected), result in zip(together, alone, results, strict=False):
            assert same(state_of(other), state_of(one))
            assert result is not None and expected is not None
            assert result.metrics == expected.metrics
            assert [point.metrics for point in result.history] == [point.metrics for point in expected.history]
            assert same(dict(one.predictions["test"]), dict(other.predictions["test"]))


SIZES_THAT_DO_NOT_ALIGN = """
import sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from vitlab.engines.base import train
from vitlab.registry import slot
from job_helpers import run_trial
from test_engines import SETTINGS, same, state_of, training, trial, work
run_trial(*work(Path({folder!r}), trial(0))[0], SETTINGS)
odd = dict(model=dict(dim=9, heads=3, drop=0.0, drop_path=0.0), batch_size=13, steps=4, evaluations=1)
for engine in ("vmap", "batch_last"):
    together = [training(seed, **odd) for seed in range(3)]
    train(together, slot("engine").get(engine))
    for seed in (1, 2):
        alone = training(seed, **odd)
        train([alone], slot("engine").get(engine))
        assert same(state_of(alone), state_of(together[seed])), (engine, seed)
"""


@pytest.mark.slow
def test_trial_does_not_depend_on_memory_layout(tmp_path: Path) -> None:
    """In a process that trained another by the loop before, as workers do: 9 numbers wide, 13 images."""
    program = SIZES_THAT_DO_NOT_ALIGN.format(tests=str(Path(__file__).parent), folder=str(tmp_path))
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


def test_diverging_trial_leaves_others_untouched() -> None:
    good = training(0)
    train([good], slot("engine").get("vmap"))
    together = [training(0), training(1, optimizer={"type": "sgd", "lr": 1e30}), training(2)]
    counts: Counter[int] = Counter()
    for m, one in enumerate(together):
        one.emit = lambda _, m=m: counts.update([m])  # type: ignore[misc]
    first, wild, last = train(together, slot("engine").get("vmap"))
    assert wild is not None and re.search(r"not finite at step \d of 9", together[1].failure)
    assert wild.metrics == {} and first is not None and last is not None and not together[0].failure
    assert same(state_of(good), state_of(together[0]))
    assert counts == {0: 3, 2: 3}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["vmap", "batch_last"])
def test_resume_from_different_steps_equals_uninterrupted(engine: str) -> None:
    undisturbed = [training(seed) for seed in range(3)]
    expected = train(undisturbed, slot("engine").get(engine))
    draw = random.Random(0)
    for _ in range(2):
        calls = iter(range(draw.randint(1, 8)))
        states: list[list[Any]] = [[], [], []]
        first = [training(seed) for seed in range(3)]
        for m, one in enumerate(first):
            one.write = states[m].append
        results = train(first, slot("engine").get(engine), stop=lambda: next(calls, None) is None, every_s=0.0)  # noqa: B023
        assert results == [None] * 3
        # As after a kill between two checkpoints: one trial loses its latest, another all.
        second = [training(seed) for seed in range(3)]
        second[0].load(_copied(states[0][-1]))
        second[1].load(_copied(states[1][max(0, len(states[1]) - 2)]))
        actual = train(second, slot("engine").get(engine))
        for one, other, before, after in zip(undisturbed, second, expected, actual, strict=True):
            assert same(state_of(one), state_of(other))
            assert before is not None and after is not None and before.metrics == after.metrics


def _copied(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    return [_copied(value) for value in state] if isinstance(state, list) else state


# -- against the loop -------------------------------------------------------------------------------------------------


def options() -> list[Any]:
    """Return every installed stackable part, plugins included; every optimizer, schedule and loss."""
    dropping = {"attention": {"type": "auto", "proj_drop": 0.1}, "mlp": {"type": "gelu", "drop": 0.1}}
    cases: list[Any] = [
        pytest.param({}, {}, id="base"),
        pytest.param({**dropping, "layer_scale": 0.1}, {}, id="dropping"),
        pytest.param({"attention": {"type": "explicit", "drop": 0.1}}, {}, id="dropping-weights"),
        pytest.param({"patch": {"type": "linear", "norm": "layernorm"}, "registers": 2}, {}, id="registers"),
        pytest.param({"position": {"type": "learned", "where": "every_layer"}}, {}, id="every-layer"),
        pytest.param({"head": {"type": "linear", "pool": "gap"}, "final_norm_at": "pooled"}, {}, id="pooled"),
    ]
    plain: dict[str, Any] = {"drop": 0.0, "drop_path": 0.0}  # draws take most of the time of so small a model
    small = {"resnet": {"type": "resnet", "layers": [1, 2, 1]}}  # a narrow one has groups of one value, all rounding
    for name in ("position", "block", "attention", "mlp", "norm", "patch"):
        for entry in list_entries(name):
            if getattr(slot(name).get(entry.name), "vmap_safe", True):
                choice = small.get(entry.name, entry.name)
                cases.append(pytest.param({**plain, name: choice}, {}, id=f"{name}-{entry.name}"))
        if name == "block":
            # Of the other parts, only windows and the factor of differential attention vary with depth.
            plain["depth"] = 1
    if "windowed" in slot("attention").names():  # a grid of 4 x 4 has smaller windows, which differ between blocks
        shifted = {"attention": {"type": "windowed", "window": 3}, "patch_size": 2, "depth": 2}
        cases.append(pytest.param({**plain, **shifted}, {}, id="windows-shifted"))
    for head in ("linear", "mlp", "distilled"):
        cases.append(pytest.param({**plain, "head": head}, {}, id=f"head-{head}"))
    cases.append(pytest.param({**plain, "head": {"type": "linear", "pool": "map"}}, {}, id="pool-map"))
    for name in ("optimizer", "schedule", "loss"):
        for entry in list_entries(name):
            if entry.name == "soap":
                continue  # rounding decides on the axes of its bases that the first gradient leaves undetermined
            choice = {"type": entry.name, "lr": 1e-3} if name == "optimizer" else {"type": entry.name}
            if entry.name == "schedule_free":
                choice["eps"] = 1e-3  # it divides gradients in place, also those that are zero but for rounding
            # Built-in schedules and losses keep no state from step to step; those of plugins may.
            steps = 8 if name == "optimizer" or entry.origin.source != "vitlab" else 6
            cases.append(pytest.param(plain, {name: choice, "steps": steps}, id=f"{name}-{entry.name}"))
    return cases


@pytest.mark.parametrize(("model", "train"), options())
def test_engines_agree_in_float64(model: dict[str, Any], train: dict[str, Any]) -> None:
    """Gradients of the first step to 1e-12, losses to 1e-10."""
    prefix = {"prefix": ["class", "distillation"]} if model.get("head") == "distilled" else {}
    steps, size, data = train.get("steps", 4), {}, {}
    if isinstance(model.get("patch"), dict) and model["patch"].get("layers"):  # it halves the image four times
        steps, size, data = 1, {"patch_size": 1, "depth": 1}, {"image_size": 16}
    how = {"precision": "fp64", "steps": steps, "evaluations": 1, "batch_size": 8, "optimizer": {"type": "adamw"}}

    def new_training(seed: int) -> Training:
        return training(seed, data=data, model={**model, **size, **prefix}, **{**how, **train})

    one = new_training(1)
    assert slot("engine").get("vmap").incompatibility(one) is None
    names = [name for name in ("vmap", "batch_last") if slot("engine").get(name).incompatibility(one) is None]
    engines = {name: slot("engine").get(name)([new_training(seed) for seed in range(2)]) for name in names}
    for step in range(steps):
        one.train_step()
        for engine in engines.values():
            engine.train_step()
            if step == 0:
                other = engine.trainings[1].model
                for name, parameter in one.model.named_parameters():
                    if parameter.grad is not None:
                        actual, expected = other.get_parameter(name).grad, parameter.grad
                        torch.testing.assert_close(
                            actual, expected, rtol=1e-10, atol=1e-12, msg=f"{type(engine).__name__}: {name}"
                        )
    for engine in engines.values():
        actual, expected = (torch.stack(each.losses["loss"]) for each in (engine.trainings[1], one))
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    (evaluated,) = engine.evaluate(("val",))[1]
    assert evaluated.metrics == pytest.approx(one.evaluate("val").metrics, rel=1e-8)


def test_vmap_equals_loop_up_to_rounding_in_float32() -> None:
    alone, together = [training(seed) for seed in range(3)], [training(seed) for seed in range(3)]
    expected: list[Outcome | None] = train(alone)
    results = train(together, slot("engine").get("vmap"))
    for before, after in zip(expected, results, strict=True):
        assert before is not None and after is not None
        assert after.metrics == pytest.approx(before.metrics, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("engine", ["vmap", "batch_last"])
@pytest.mark.parametrize("count", [1, 3])
def test_weight_averages_follow_stack(engine: str, count: int) -> None:
    """Averages, their evaluations and checkpoints equal those of the loop."""
    how: dict[str, Any] = {"precision": "fp64", "ema": {"decay": 0.9}}
    alone, together = ([training(seed, **how) for seed in range(count)] for _ in range(2))
    expected: list[Outcome | None] = train(alone)
    kept_states: list[list[Any]] = [[] for _ in range(count)]
    for m, one in enumerate(together):
        one.write = kept_states[m].append
    calls = iter(range(4))
    train(together, slot("engine").get(engine), stop=lambda: next(calls, None) is None, every_s=0.0)
    together = [training(seed, **how) for seed in range(count)]
    for one, states in zip(together, kept_states, strict=True):
        one.load(_copied(states[-1]))
    results = train(together, slot("engine").get(engine))
    for one, other, before, after in zip(alone, together, expected, results, strict=True):
        assert one.average is not None and other.average is not None and before is not None and after is not None
        averages, weights = one.average.state_dict(), state_of(one)
        for name, average in other.average.state_dict().items():
            torch.testing.assert_close(average, averages[name], rtol=1e-8, atol=1e-10)
            torch.testing.assert_close(state_of(other)[name], weights[name], rtol=1e-8, atol=1e-10)
        for mine, theirs in zip(after.history, before.history, strict=True):
            assert mine.metrics == pytest.approx(theirs.metrics, rel=1e-8, abs=1e-10)


def test_training_with_teacher_is_not_stacked() -> None:
    one = training()
    one.objective.distillation = object()  # type: ignore[attr-defined]
    assert "does not support distillation" in (slot("engine").get("vmap").incompatibility(one) or "")


@pytest.mark.parametrize("engine", ["loop", "vmap", "batch_last"])
def test_frozen_body_is_in_evaluation_mode(engine: str) -> None:
    """The reference is torch's logistic regression on features in evaluation mode: batch norm, dropout, drop path."""
    model = {
        "patch": "conv_stem",
        "drop": 0.3,
        "drop_path": 0.5,
        "attention": {"type": "explicit", "drop": 0.2 if engine == "loop" else 0.0, "proj_drop": 0.3},
        "mlp": {"type": "gelu", "drop": 0.3},
    }
    how: dict[str, Any] = {"precision": "fp64", "optimizer": {"type": "sgd", "lr": 0.1, "momentum": 0.0}}
    how |= {"schedule": "constant", "steps": 5, "evaluations": 1}
    trainings = [training(seed, model=model, frozen=True, **how) for seed in range(2)]
    expected, before = [], [state_of(one) for one in trainings]
    for one in trainings:
        assert one.model.training, "what is not frozen is trained"
        body = copy.deepcopy(one.model).eval()
        layer = torch.nn.Linear(16, 6, dtype=torch.float64)
        layer.load_state_dict(one.model.get_submodule("head.fc").state_dict())
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for step in range(5):
            batch = one.feed.batch(step, one.spec.batch_size, one.spec.repeats, [range(16)])
            with torch.no_grad():
                x_BD = body.forward_features(batch.x_BCHW)[:, 0]
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(layer(x_BD), batch.y_B).backward()
            optimizer.step()
        expected.append(layer.state_dict())
    assert slot("engine").get(engine).incompatibility(trainings[0]) is None
    train(trainings, slot("engine").get(engine))
    for one, state, head in zip(trainings, before, expected, strict=True):
        after = state_of(one)
        for name in state.keys() - {"head.fc.weight", "head.fc.bias"}:
            assert torch.equal(after[name], state[name]), name
        assert state["patch_embed.convs.0.norm.running_mean"].any()
        torch.testing.assert_close(after["head.fc.weight"], head["weight"], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(after["head.fc.bias"], head["bias"], rtol=1e-10, atol=1e-12)


# -- how many kernels -------------------------------------------------------------------------------------------------

VIEWS = re.compile(
    r"^(_record_function_enter_new|_record_function_exit|promote_types|view|_unsafe_view|reshape|permute|transpose|t|expand|unsqueeze|squeeze|select|slice|unbind|split|detach|alias"
    r"|as_strided|_reshape_alias|split_with_sizes|chunk|movedim|diagonal|unfold|lift_fresh)$"
)


TINY = {"patch_size": 16, "dim": 9, "heads": 3, "depth": 3, "position": "sinusoidal"}


class Counting(TorchDispatchMode):
    """Counter of operations that compute something."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not VIEWS.match(func.overloadpacket.__name__):
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("engine", "model", "data", "most"),
    [
        ("vmap", TINY, {"image_size": 32}, 20),
        ("batch_last", TINY, {"image_size": 32}, 21),
        pytest.param(
            *("vmap", {"patch_size": 4, "dim": 64, "heads": 4, "depth": 6}, {"image_size": 32}, 32),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["tiny", "tiny-batch-last", "micro"],
)
def test_sixteen_seeds_take_few_operations_each(
    engine: str, model: dict[str, Any], data: dict[str, Any], most: int
) -> None:
    """Counts forward, backward and update, without drawing batches, which cost the loop the same."""
    plain = {"drop": 0.0, "drop_path": 0.0}
    trainings = [training(seed, data=data, model={**plain, **model}, batch_size=8) for seed in range(16)]
    stacked = slot("engine").get(engine)(trainings)
    stacked.train_step()
    draws = [one.draw_batch(range(8)) for one in trainings]
    for one, batch in zip(trainings, draws, strict=True):
        one.draw_batch = lambda rows, batch=batch: batch  # type: ignore[method-assign,misc]
    with Counting() as counting:
        stacked.train_step()
    assert counting.count / 16 <= most


# -- trials -----------------------------------------------------------------------------------------------------------


def trial(seed: int, *, model: dict[str, Any] = {}, **train: Any) -> Trial:
    choice = slot("dataset").resolve_choice(DATA)
    spec = {
        "data": choice.plain(),
        "model": slot("model").resolve_choice({**MODEL, **model}).plain(),
        "train": TrainSpec.model_validate({**TRAIN, **train}).model_dump(mode="json", exclude_none=True),
    }
    seeds = {**dict.fromkeys(STREAMS, seed), "split": 0}
    return Trial(spec=TrialSpec.model_validate(spec), seeds=seeds, origins=(), data=None, key=f"k{seed}", code="")


def work(root: Path, *trials: Trial) -> list[tuple[Trial, TrialFolder]]:
    return [(one, TrialFolder(root / one.key)) for one in trials]


def results(items: list[tuple[Trial, TrialFolder]]) -> list[TrialResult]:
    outcomes = [folder.result() for _, folder in items]
    assert None not in outcomes
    return outcomes  # type: ignore[return-value]


SETTINGS = Settings(device="cpu", every_s=0.0)


@pytest.mark.slow
def test_stacked_trials_write_same_files_as_single_trials(tmp_path: Path) -> None:
    together = work(tmp_path / "together", *(trial(seed) for seed in range(3)))
    run_together(together, SETTINGS)
    for seed, result in enumerate(results(together)):
        alone = work(tmp_path / "alone", trial(seed))
        run_together(alone, SETTINGS)
        assert results(alone)[0].outcome == result.outcome
        assert result.circumstances.numerics["engine"] == "vmap"
        events, _ = together[seed][1].events()
        (end,) = [event for event in events if event.kind == "end"]
        assert abs(result.circumstances.ended - end.t / 1000) < 60
        assert result.circumstances.ended > result.circumstances.started + result.circumstances.wall_s, "its share"
        assert [event.kind for event in events] == ["start", "metrics", "metrics", "metrics", "end"]
        assert together[seed][1].weights_file.exists() and not together[seed][1].checkpoint.exists()


@pytest.mark.slow
def test_unsupported_batch_last_falls_back_to_vmap_with_reason(tmp_path: Path) -> None:
    settings = replace(SETTINGS, engine="batch_last")
    normalised = {"type": "split", "qk_norm": "layernorm"}
    supported, unknown = (
        work(tmp_path / name, trial(0, model={"attention": attention}))
        for name, attention in (("supported", {"type": "split"}), ("unknown", normalised))
    )
    for items in (supported, unknown):
        run_together(items, settings)
    assert [results(items)[0].circumstances.numerics["engine"] for items in (supported, unknown)] == [
        "batch_last",
        "vmap",
    ]
    notes = [items[0][1].events()[0][0].body.get("note", "") for items in (supported, unknown)]
    assert notes[0] == "" and re.search(
        "trained by engine vmap: blocks.0.attn normalises queries and keys, which is not supported by", notes[1]
    )
    alike = work(tmp_path / "vmap", trial(0, model={"attention": normalised}))
    run_together(alike, SETTINGS)
    assert results(alike)[0].outcome == results(unknown)[0].outcome


@pytest.mark.slow
def test_stopped_batch_resumes_without_duplicate_lines(tmp_path: Path) -> None:
    undisturbed, stopped = (
        work(tmp_path / name, *(trial(seed) for seed in range(3))) for name in ("undisturbed", "stopped")
    )
    run_together(undisturbed, SETTINGS)
    for steps in (2, 5, 1):
        calls = iter(range(steps))
        run_together(stopped, SETTINGS, stop=lambda: next(calls, None) is None)  # noqa: B023
    run_together(stopped, SETTINGS)
    assert [one.outcome for one in results(stopped)] == [one.outcome for one in results(undisturbed)]
    for _, folder in stopped:
        steps_told = [event.body["step"] for event in folder.events()[0] if event.kind == "metrics"]
        assert steps_told == [3, 6, 9]


def test_result_names_every_engine_used(tmp_path: Path) -> None:
    def after(steps: int) -> Callable[[], bool]:
        calls = iter(range(steps))
        return lambda: next(calls, None) is None

    items = work(tmp_path, trial(0))
    assert run_trial(*items[0], SETTINGS, after(2)) is None
    run_together(items, SETTINGS, after(2))
    run_trial(*items[0], SETTINGS)
    assert results(items)[0].circumstances.numerics["engine"] == "loop+vmap"


@pytest.mark.slow
def test_unstackable_trial_falls_back_to_loop_with_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The incompatibility may be declared, and so known before the first step, or not."""
    mlp = slot("mlp").get("gelu")
    forward = mlp.forward

    def failing(self: Any, x_BTD: Tensor) -> Tensor:
        if inside_vmap():
            raise RuntimeError("no batching rule")
        return forward(self, x_BTD)  # type: ignore[no-any-return]

    declared, failed = work(tmp_path / "declared", trial(0), trial(1)), work(tmp_path / "failed", trial(0), trial(1))
    with monkeypatch.context() as patched:
        patched.setattr(Part, "vmap_safe", True)
        patched.setattr(mlp, "vmap_safe", False, raising=False)
        run_together(declared, SETTINGS)
    with monkeypatch.context() as patched:
        patched.setattr(mlp, "forward", failing)
        run_together(failed, SETTINGS)
    looped = work(tmp_path / "loop", trial(0))
    run_trial(*looped[0], SETTINGS)
    for items, note, attempts in (
        (declared, r"^trained by engine loop: .*blocks.0.mlp.* does not support engine vmap", [1]),
        (failed, "^trained by engine loop, for engine vmap failed: RuntimeError: no batching rule", [1, 1]),
    ):
        assert results(items)[0].outcome == results(looped)[0].outcome
        assert results(items)[0].circumstances.numerics["engine"] == "loop"
        starts = [event for event in items[1][1].events()[0] if event.kind == "start"]
        assert re.search(note, starts[-1].body["note"])
        assert [event.body["attempt"] for event in starts] == attempts, "one attempt, which may fall back"
        assert Attempt(*items[1], SETTINGS, torch.device("cpu")).number == 2


def test_trial_that_cannot_begin_fails_alone(tmp_path: Path) -> None:
    bad = trial(1)
    bad = Trial(**{**vars(bad), "data": "another set"})
    items = work(tmp_path, trial(0), bad, trial(2))
    run_together(items, SETTINGS)
    assert [folder.done() for _, folder in items] == [True, False, True]
    assert "not the data this was planned with" in items[1][1].failure().failure


def test_unwritable_result_fails_one_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = TrialFolder.write_result

    def finish(self: TrialFolder, result: TrialResult) -> None:
        if self.path.name == "k1":
            raise OSError(28, "No space left on device")
        real(self, result)

    monkeypatch.setattr(TrialFolder, "write_result", finish)
    items = work(tmp_path, *(trial(seed) for seed in range(3)))
    run_together(items, SETTINGS)
    assert [folder.done() for _, folder in items] == [True, False, True]
    failures = [folder.failure() for _, folder in items]
    assert failures[0] is failures[2] is None and "No space left" in failures[1].failure
    for _, folder in (items[0], items[2]):
        assert [event.body["status"] for event in folder.events()[0] if event.kind == "end"] == ["done"]
    assert items[1][1].checkpoint.exists(), "it goes on from its last step"


def test_finished_trial_is_not_failed_by_later_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = Trial(**{**vars(trial(1)), "data": "another set"})

    def fall(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vitlab.runner.execution.train", fall)
    items = work(tmp_path, trial(0), bad, trial(2))
    run_together(items, SETTINGS)
    assert "not the data this was planned with" in items[1][1].failure().failure
    assert all("No space left" in items[seed][1].failure().failure for seed in (0, 2))


def test_stacked_is_true_only_inside_vmap() -> None:
    flags: list[bool] = []

    def look(x: Tensor) -> Tensor:
        flags.append(inside_vmap())
        return x.sum()

    x = torch.ones(2, 3)
    look(x)
    torch.func.grad(look)(x)
    torch.func.vmap(look)(x)
    torch.func.vmap(torch.func.grad(look))(x)
    torch.func.grad(lambda x: torch.func.vmap(look)(x).sum())(x)
    assert flags == [False, False, True, True, True]


@pytest.mark.slow
def test_batch_too_large_for_memory_is_halved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    real = base.train

    def small(trainings: list[Training], *rest: Any, **options: Any) -> list[Outcome | None]:
        sizes.append(len(trainings))
        if len(trainings) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(trainings, *rest, **options)

    monkeypatch.setattr("vitlab.runner.execution.train", small)
    items = work(tmp_path, *(trial(seed) for seed in range(5)))
    run_together(items, SETTINGS)
    assert sizes == [5, 2, 3, 1, 2]
    assert len(results(items)) == 5


# -- selection --------------------------------------------------------------------------------------------------------


def planned(seed: int, **options: Any) -> Planned:
    return Planned("arm", seed, trial(seed, **options))


def test_batches_have_one_shape_and_are_filled() -> None:
    todo = [planned(seed) for seed in range(20)] + [planned(seed, model={"dim": 24}) for seed in range(3)]
    todo += [planned(seed, optimizer={"type": "sgd", "lr": 0.1}) for seed in (30, 31)]
    groups = group_trials(todo, 2, "vmap", lambda _: None)
    assert [[item.seed for item in group] for _, group in groups] == [
        list(range(11)),
        [*range(11, 20), 30, 31],
        [0],
        [1, 2],
    ]
    assert (
        max(len(group) for _, group in group_trials([planned(seed) for seed in range(40)], 1, "vmap", lambda _: None))
        <= MAX_TOGETHER
    )
    assert joint_training_key(trial(0)) != joint_training_key(trial(0, batch_size=8))
    assert joint_training_key(trial(0)) != joint_training_key(
        trial(0, loss={"type": "cross_entropy", "label_smoothing": 0.1})
    )


@pytest.mark.parametrize(
    ("places", "stacks", "loops", "sizes"),
    [
        (2, [16, 16, 16], 0, [16, 16, 8, 8]),
        (2, [15] * 5, 0, [15, 15, 15, 15, 7, 8]),
        (1, [16, 16, 5], 0, [16, 16, 5]),
        (2, [16, 1], 0, [8, 8, 1]),
        (4, [16], 3, [4, 4, 4, 4, 1, 1, 1]),
        (3, [16, 16], 0, [5, 5, 6, 5, 5, 6]),
        (8, [10, 10, 10], 0, [2] * 15),
        (64, [15], 1, [1, 2, 2, 2, 2, 2, 2, 2, 1]),
        (2, [40], 0, [13, 13, 7, 7]),
    ],
)
def test_batches_are_split_as_far_as_that_saves_time(
    places: int, stacks: list[int], loops: int, sizes: list[int]
) -> None:
    """No batch is split where that only divides the work of a worker."""
    todo = [planned(seed, model={"dim": 8 + 4 * arm}) for arm, count in enumerate(stacks) for seed in range(count)]
    todo += [planned(seed, ema={"decay": 0.9}) for seed in range(loops)]
    groups = group_trials(todo, places, "vmap", lambda _: None)
    assert [len(group) for _, group in groups] == sizes
    assert sorted(item.trial.key for _, group in groups for item in group) == sorted(item.trial.key for item in todo)


def test_speed_key_depends_on_picture_crops_only() -> None:
    cut = {"type": "random_resized_crop", "of": "picture"}
    augments: list[list[Any]] = [[], ["flip"], ["random_resized_crop"], [cut], [{**cut, "scale": [0.5, 1.0]}, "flip"]]
    data = {"type": "image_folder", "root": "nowhere", "num_classes": 2}
    plain, flipped, cropped, pictures, others = (
        speed_digest(replace(trial(0), spec=trial(0).spec.model_copy(update={"data": Choice.parse(choice.plain())})))
        for choice in (slot("dataset").resolve_choice({**data, "augment": augment}) for augment in augments)
    )
    assert plain == flipped == cropped != pictures == others


def test_engine_is_function_of_trial() -> None:
    def engine(engine_name: str, work: Work | None, **train: Any) -> str:
        return choose_engine(trial(0, **train), engine_name, lambda _: work).engine

    most = MAX_VALUES // TRAIN["batch_size"]
    assert [engine("auto", Work(values)) for values in (most, most + 1)] == ["vmap", "loop"]
    assert [engine("auto", Work(1, products)) for products in (MAX_PRODUCTS, MAX_PRODUCTS + 1)] == [
        "batch_last",
        "vmap",
    ]
    assert engine("auto", None) == engine("auto", Work(most + 1, 1)) == "loop"
    assert (
        engine("auto", Work(1, 1), precision="bf16") == "vmap"
        and engine("auto", Work(1, 1), precision="fp64") == "batch_last"
    )
    assert [engine(engine_name, Work(1, 1)) for engine_name in ("loop", "vmap", "batch_last")] == [
        "loop",
        "vmap",
        "batch_last",
    ]
    assert engine("batch_last", Work(1, 1), ema={"decay": 0.9}) == "loop"


def test_engine_on_gpu_is_cohort_of_models_too_small_for_it() -> None:
    def engine(values: int | None, **train: Any) -> str:
        work = None if values is None else Work(values, 1)
        choice = choose_engine(trial(0, **train), "auto", lambda _: work, device="cuda")
        assert train.get("ema") or values is None or f"{values * TRAIN['batch_size']:,} values" in choice.reason
        return choice.engine

    most = MAX_GPU_VALUES // TRAIN["batch_size"]
    assert most > MAX_VALUES // TRAIN["batch_size"]
    assert [engine(values) for values in (1, most, most + 1, None)] == ["vmap", "vmap", "loop", "loop"]
    long = {"steps": MIN_COMPILED_STEPS}
    assert engine(1, **long) == engine(most, **long) == "compiled_vmap"
    assert engine(1, steps=MIN_COMPILED_STEPS - 1) == engine(1, **long, precision="fp64") == "vmap"
    images = MIN_COMPILED_STEPS * TRAIN["batch_size"]
    assert engine(1, steps=None, images=images) == "compiled_vmap"
    assert engine(1, steps=None, epochs=1000) == "vmap", "a plan does not know the steps of an epoch"
    assert engine(1, ema={"decay": 0.9}) == "loop"
    alone = [engine(1, ema={"decay": 0.9}, **long), engine(most + 1, **long), engine(None, **long)]
    assert alone == ["compiled"] * 3
    assert engine(most + 1, **long, precision="fp64") == "loop"
    assert choose_engine(trial(0, ema={"decay": 0.9}, **long), "vmap", lambda _: None, device="cuda").engine == "loop"
    planned = [Planned("a", seed, trial(seed, **long)) for seed in range(40)]
    groups = group_trials(planned, 1, "auto", lambda _: Work(1, 1), device="cuda")
    assert [(name, len(group)) for name, group in groups] == [
        ("compiled_vmap", 13),
        ("compiled_vmap", 13),
        ("compiled_vmap", 14),
    ]


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"attention": "per_head", "position": "none"},
        {"attention": {"type": "explicit", "drop": 0.1}},
        {"attention": {"type": "split", "qk_norm": "layernorm"}},
        {"position": "rope2d"},
        {"position": "alibi2d"},
        {"blocks": {"1": {"attention": "linear"}}},
    ],
)
def test_plan_predicts_engine_of_worker(model: dict[str, Any]) -> None:
    info = prepare(DATA, dict.fromkeys(STREAMS, 0)).info
    choice = slot("model").resolve_choice({**MODEL, **model})
    work = choice.component.work(info, choice.options)  # type: ignore[attr-defined]
    tokens, dim, heads = 1 + 4, 16, 2
    assert work.values == tokens * dim
    reason = model_incompatibility(slot("model").build(choice, info), "fp32", torch.device("cpu")) is None
    assert work.products == (tokens**2 * dim // heads if reason else None)


@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize("engine", ["vmap", pytest.param("batch_last", marks=pytest.mark.slow)])
def test_study_ends_the_same_for_any_batching(tmp_path: Path, engine: str) -> None:
    """All at once in two worker processes; then one seed and then the others."""
    text = """
study: cut
base:
  data: {type: digits}
  model: {type: vit, patch_size: 4, dim: 8, depth: 1, heads: 2}
  train: {steps: 4, batch_size: 16, evaluations: 2}
design: {one_at_a_time: {train.optimizer.lr: [1.0e-4]}}
seeds: %s
run: {executor: %s, engine: %s, workers: 2, tracker: none}
"""
    frames = []
    for name, cuts, executor in (
        ("once", ["4"], "local"),
        ("singly", ["1", "4"], "inline"),
    ):
        file = tmp_path / f"{name}.yaml"
        for seeds in cuts:
            file.write_text(text % (seeds, executor, engine))
            answer = lab.run(file, out=tmp_path / name)
        frames.append(answer.results().sort_values(["arm", "seed"]))
    first, other = [frame[["arm", "seed", "val/loss", "val/accuracy", "test/loss", "engine"]] for frame in frames]
    assert len(first) == 8 and set(first["engine"]) == {engine}
    assert first.reset_index(drop=True).equals(other.reset_index(drop=True))


# -- engines of others ------------------------------------------------------------------------------------------------

THEIRS = '''
from vitlab.engines.base import Loop, engine

@engine.register("counted")
class Counted(Loop):
    """The loop, with a note of every step."""

    def compute_step(self) -> None:
        super().compute_step()
        with open({file!r}, "a") as log:
            log.write("step ")
'''


def test_engine_of_a_file_trains_a_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slot_fixtures.keep(monkeypatch, slot("engine"))
    plugin = tmp_path / "my_engines.py"
    plugin.write_text(THEIRS.format(file=str(tmp_path / "log")))
    base = {
        "data": {"type": "digits"},
        "model": {"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2},
        "train": {"steps": 3, "batch_size": 16, "evaluations": 1},
    }
    run = {"executor": "local", "workers": 1, "tracker": "none", "engine": "counted"}
    study = {"study": "theirs", "base": base, "seeds": 2, "analysis": {"compare": "none"}, "run": run}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study))
    answer = vitlab.run(tmp_path / "study.yaml", out=tmp_path / "out", plugins=[plugin])
    assert answer.trained == 2 and (tmp_path / "log").read_text().split() == ["step"] * 6
    assert set(answer.results()["engine"]) == {"counted"}
    print(f"\nfiles to add an engine: 1, {plugin.name}")
    with pytest.raises(SpecError, match=r"no engine called 'conted'. Did you mean 'counted'\?"):
        lab.plan_study(tmp_path / "study.yaml", changes={"run.engine": "conted"}, plugins=[plugin])


def test_vmap_computes_in_sixteen_bits_what_the_loop_does() -> None:
    """A bias in 32 bits would widen the output of every linear layer."""
    dtypes: dict[str, set[str]] = {}

    def train_once(name: str, step: Callable[[], object]) -> None:
        def record(module: torch.nn.Module, inputs: object, output: Tensor) -> None:
            if isinstance(module, torch.nn.Linear):
                dtypes.setdefault(name, set()).add(str(output.dtype))

        with torch.nn.modules.module.register_module_forward_hook(record):
            step()

    train_once("loop", training(seed=0, precision="bf16").train_step)
    train_once(
        "vmap", slot("engine").get("vmap")([training(seed=seed, precision="bf16") for seed in range(2)]).train_step
    )
    assert dtypes == {"loop": {"torch.bfloat16"}, "vmap": {"torch.bfloat16"}}
