"""Tests of the training loop against a plain loop, and of checkpoints against damaged files."""

from __future__ import annotations

import copy
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from trainings import train

from vitlab import noise
from vitlab.components.base import DropPath
from vitlab.data.prepare import Feed, Prepared, prepare
from vitlab.engines import base
from vitlab.engines.base import evaluation_steps
from vitlab.engines.base import train as train_together
from vitlab.errors import VitlabError
from vitlab.geometry import DataInfo
from vitlab.models.contract import Model, weights_digest
from vitlab.models.trained import HEADER, InputSpec, read_safetensors, write_weights
from vitlab.registry import slot
from vitlab.spec import STREAMS, TrainSpec
from vitlab.store.files import Damaged
from vitlab.store.locks import LockLost
from vitlab.store.result import Measurement, Outcome
from vitlab.training import artifacts
from vitlab.training.evaluation import EVALUATION_BATCH
from vitlab.training.loop import Training, count_steps
from vitlab.training.memory import peak_memory
from vitlab.weights.files import write_file

DATA = {
    "type": "synthetic",
    "image_size": 8,
    "train_images": 90,
    "test_images": 30,
    "num_classes": 6,
    "validation": 0.2,
}
MODEL = {"type": "vit", "patch_size": 4, "dim": 12, "depth": 2, "heads": 2, "drop": 0.1, "drop_path": 0.3}
SEEDS = dict.fromkeys(STREAMS, 0)


def spec(**options: Any) -> TrainSpec:
    defaults = {"steps": 12, "batch_size": 16, "evaluations": 3, "optimizer": {"type": "adamw", "lr": 0.01}}
    if {"epochs", "images"} & set(options):
        del defaults["steps"]
    return TrainSpec.model_validate({**defaults, **options})


def prepared(**options: Any) -> Prepared:
    return prepare({**DATA, **options}, SEEDS)


def built(data: Prepared, dtype: torch.dtype = torch.float32, **options: Any) -> Model:
    model: Model = slot("model").build({**MODEL, **options}, data.info)
    model.initialise(SEEDS["init"])
    return model.to(dtype)


def run(train_spec: TrainSpec, *, model: Model | None = None, **options: Any) -> tuple[Outcome | None, Model]:
    data = prepared()
    model = model or built(data)
    return train(model, Feed(data, [], SEEDS), train_spec, SEEDS, **options), model


def run_training(train_spec: TrainSpec) -> tuple[Training, Outcome]:
    data = prepared()
    training = Training(built(data), Feed(data, [], SEEDS), train_spec, SEEDS)
    (outcome,) = train_together([training])
    assert outcome is not None
    return training, outcome


def state_of(model: Model) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


# -- one training, written twice --------------------------------------------------------------------------------------


def test_loop_equals_plain_loop_in_float64() -> None:
    steps, batch_size, lr, warm = 11, 16, 0.02, 2
    data = prepared()
    ours, theirs = built(data, torch.float64), built(data, torch.float64)
    result = train(
        ours,
        Feed(data, [], SEEDS, dtype=torch.float64),
        spec(
            steps=steps,
            precision="fp64",
            clip_grad=0.5,
            evaluations=steps,
            optimizer={"type": "adamw", "lr": lr, "weight_decay": 0.2},
            schedule={"type": "cosine", "warmup": warm / steps},
            loss={"type": "cross_entropy", "label_smoothing": 0.1},
        ),
        SEEDS,
    )
    assert result is not None

    decay = [p for name, p in theirs.named_parameters() if name not in theirs.no_weight_decay()]
    rest = [p for name, p in theirs.named_parameters() if name in theirs.no_weight_decay()]
    groups = [{"params": decay, "weight_decay": 0.2}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, foreach=False)
    mean, std = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (data.mean, data.std))
    n = len(data.train)
    per_epoch = n // batch_size
    assert per_epoch * 2 < steps, "the test should see more than two epochs"
    for step in range(steps):
        epoch, place = divmod(step, per_epoch)
        order = noise.permutation(noise.key(0, "order", epoch), n)[place * batch_size : (place + 1) * batch_size]
        x = (data.train.x_NCHW[order].double() / 255 - mean) / std
        y, ids = data.train.y_N[order], data.train.id_N[order]
        rate = (step + 1) / (warm + 1) if step < warm else (1 + math.cos(math.pi * (step - warm) / (steps - warm))) / 2
        for group in optimizer.param_groups:
            group["lr"] = lr * rate
        with noise.use_model_draws(
            noise.Draws(noise.key(0, "dropout", epoch), noise.key(0, "drop_path", epoch), ids, step)
        ):
            logits = theirs(x).logits
        log_p = logits.log_softmax(1)
        loss = -(0.9 * log_p[torch.arange(batch_size), y] + 0.1 * log_p.mean(1)).mean()
        theirs.zero_grad()
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in theirs.parameters() if p.grad is not None]).norm()
        for p in theirs.parameters():
            assert p.grad is not None
            p.grad *= min(1.0, 0.5 / (float(norm) + 1e-6))
        optimizer.step()
        entry = result.history[step]
        assert entry.metrics["train/loss"] == pytest.approx(loss.item(), abs=1e-12)
        assert entry.metrics["train/lr"] == pytest.approx(lr * rate, abs=1e-15)
        assert entry.step == step + 1 and entry.images == (step + 1) * batch_size
        assert entry.epoch == pytest.approx((step + 1) / per_epoch)
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")

    theirs.eval()
    with torch.no_grad():
        logits = theirs((data.val.x_NCHW.double() / 255 - mean) / std).logits
    p = logits.softmax(1)[torch.arange(len(data.val)), data.val.y_N]
    assert result.metrics["val/loss"] == pytest.approx(float(-p.log().mean()), abs=1e-10)
    assert result.metrics["val/accuracy"] == float((logits.argmax(1) == data.val.y_N).double().mean())


def test_train_loss_is_mean_over_interval() -> None:
    every, _ = run(spec(evaluations=12))
    seldom, _ = run(spec(evaluations=3))
    assert every is not None and seldom is not None
    losses = [entry.metrics["train/loss"] for entry in every.history]
    for i, entry in enumerate(seldom.history):
        assert entry.metrics["train/loss"] == pytest.approx(sum(losses[4 * i : 4 * i + 4]) / 4, rel=1e-12)
    assert seldom.history[-1].metrics.items() >= {"val/loss": every.history[-1].metrics["val/loss"]}.items()


def test_logged_rates_equal_schedule() -> None:
    result, _ = run(
        spec(steps=10, evaluations=10, schedule={"type": "linear", "warmup": 0.2, "final": 0.5}, optimizer="sgd")
    )
    assert result is not None
    expected = [1 / 3, 2 / 3, *(1 - 0.5 * i / 8 for i in range(8))]
    assert [m.metrics["train/lr"] for m in result.history] == pytest.approx([0.01 * factor for factor in expected])


@pytest.mark.slow
def test_training_reduces_loss() -> None:
    result, _ = run(spec(steps=150, batch_size=32, evaluations=2, optimizer={"type": "adamw", "lr": 5e-3}))
    assert result is not None
    assert result.metrics["val/accuracy"] > 0.8 > 0.5 > 1 / 6
    assert result.metrics["train/loss"] < math.log(6) / 2


def test_test_split_is_evaluated_once_at_end() -> None:
    training, result = run_training(spec())
    assert [any(name.startswith("test/") for name in m.metrics) for m in result.history] == [False, False, True]
    assert {name.partition("/")[2] for name in result.metrics if name.startswith("test/")} == {
        "loss",
        "accuracy",
        "top5",
        "ece",
    }
    assert {split: len(columns["id"]) for split, columns in training.predictions.items()} == {"val": 18, "test": 30}


def test_zero_steps_evaluate_initial_model() -> None:
    data = prepared()
    model = built(data)
    before = state_of(model)
    result, _ = run(spec(steps=0), model=model)
    assert result is not None and result.steps == result.images == 0
    assert_equal(before, model.state_dict())
    assert [m.step for m in result.history] == [0]
    assert {name.partition("/")[0] for name in result.metrics} == {"val", "test"}


def test_evaluation_does_not_depend_on_training_batch() -> None:
    one, *others = (run(spec(steps=0, batch_size=size))[0] for size in (1, 7, 64))
    assert one is not None and one.metrics
    assert all(evaluation is not None and evaluation.metrics == one.metrics for evaluation in others)


def test_evaluation_in_many_batches_counts_every_image_once() -> None:
    data = prepare({**DATA, "test_images": EVALUATION_BATCH + 5}, SEEDS)
    training = Training(built(data), Feed(data, [], SEEDS), spec(), SEEDS)
    _, metrics, columns = training.evaluate("test")
    assert columns["id"].tolist() == list(range(EVALUATION_BATCH + 5))
    assert metrics["accuracy"] == float((columns["prediction"] == data.test.y_N).double().mean())


def test_evaluation_restores_training_mode() -> None:
    data = prepared()
    for training in (True, False):
        model = built(data)
        one = Training(model, Feed(data, [], SEEDS), spec(), SEEDS)
        model.train(training)
        one.evaluate("val")
        assert model.training is training


def test_bf16_is_autocast_over_float32_weights() -> None:
    data = prepared()
    model = built(data)
    feed = Feed(data, [], SEEDS)
    metrics = Training(model, feed, spec(precision="bf16"), SEEDS).evaluate("val").metrics
    x, y, *_ = next(feed.evaluation("val", 100))
    model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = model(x).logits
    assert logits.dtype == torch.bfloat16
    assert metrics["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(logits.float(), y)), abs=1e-6)
    result, model = run(spec(precision="bf16"))
    assert result is not None and all(p.dtype == torch.float32 for p in model.parameters())
    exact, _ = run(spec())
    assert exact is not None
    assert result.metrics["train/loss"] != exact.metrics["train/loss"]
    assert result.metrics["train/loss"] == pytest.approx(exact.metrics["train/loss"], rel=0.05)


def test_arms_get_same_batches_and_initial_function() -> None:
    inputs_of: dict[str, list[Tensor]] = {}
    losses = {}
    for attention in ("explicit", "split", "per_head", "sdpa"):
        data = prepared()
        model = built(data, attention=attention)
        pixels = inputs_of.setdefault(attention, [])
        model.get_submodule("patch_embed").register_forward_pre_hook(
            lambda module, inputs, pixels=pixels: pixels.append(inputs[0].clone())
        )
        result, _ = run(spec(steps=6, evaluations=6), model=model)
        assert result is not None
        losses[attention] = result.history[0].metrics["train/loss"]
    for attention, pixels in inputs_of.items():
        assert len(pixels) == len(inputs_of["explicit"])
        assert all(torch.equal(one, other) for one, other in zip(pixels, inputs_of["explicit"], strict=True)), attention
        assert losses[attention] == pytest.approx(losses["explicit"], abs=1e-6)


def test_drop_path_grows_linearly_to_last_block() -> None:
    data = prepared()
    model = built(data, depth=5, drop_path=0.4)
    rates = [m.p for m in model.modules() if isinstance(m, DropPath)]
    expected = torch.linspace(0, 0.4, 5).repeat_interleave(2).tolist()  # timm's rule, two in every block
    assert rates == pytest.approx(expected, abs=1e-7)


# -- evaluation -------------------------------------------------------------------------------------------------------


@given(steps=st.integers(1, 300), evaluations=st.integers(1, 40))
def test_evaluations_are_evenly_spaced_and_end_at_last_step(steps: int, evaluations: int) -> None:
    evaluation = evaluation_steps(steps, evaluations)
    assert len(evaluation) == min(steps, evaluations) and evaluation[-1] == steps and evaluation[0] >= 1
    gaps = [b - a for a, b in zip([0, *evaluation], evaluation, strict=False)]
    assert max(gaps) - min(gaps) <= 1


def test_length_in_epochs_steps_or_images() -> None:
    feed = Feed(prepared(), [], SEEDS)  # 72 images to train on
    assert feed.count() == 72
    assert count_steps(spec(epochs=2.5), feed) == 10
    assert count_steps(spec(epochs=0.01), feed) == 1
    assert count_steps(spec(images=100), feed) == 6
    assert count_steps(spec(images=720, batch_size=1000), feed) == 10
    assert count_steps(spec(steps=7), feed) == 7


def test_batch_larger_than_data_counts_its_images() -> None:
    result, _ = run(spec(steps=3, batch_size=1000))
    assert result is not None and result.images == 3 * 72


# -- stopping, going on, going wrong ----------------------------------------------------------------------------------


class Stopped:
    """Stop at the n-th step, keeping the last saved state through a file."""

    def __init__(self, folder: Path, at: int) -> None:
        self.folder = folder
        self.left = at

    def stop(self) -> bool:
        self.left -= 1
        return self.left < 0

    def save(self, state: Mapping[str, Any]) -> None:
        artifacts.make_checkpoint_writer(self.folder, dict(state))()


@pytest.mark.parametrize("optimizer", ["adamw", "adam", {"type": "sgd", "lr": 0.1, "nesterov": True}])
@pytest.mark.parametrize("at", [0, 3, 4, 11])
def test_resume_equals_uninterrupted(optimizer: Any, at: int, tmp_path: Path) -> None:
    train_spec = spec(optimizer=optimizer, clip_grad=1.0)
    straight, whole = run(train_spec)
    stopped = Stopped(tmp_path, at)
    nothing, _ = run(train_spec, stop=stopped.stop, save=stopped.save)
    assert nothing is None
    state = artifacts.clean_up_and_read_checkpoint(tmp_path)
    assert state is not None and state["step"] == at
    other = built(prepared())
    other.initialise(99)
    resumed, _ = run(train_spec, model=other, resume=state)
    assert straight is not None and resumed is not None
    assert resumed.history == straight.history and resumed.metrics == straight.metrics
    assert_equal(other.state_dict(), whole.state_dict())


def test_resume_after_last_step_only_evaluates() -> None:
    states: list[Mapping[str, Any]] = []
    straight, _ = run(spec(), save=lambda state: states.append({**state, "model": {**state["model"]}}), every_s=0.0)
    events: list[Measurement] = []
    resumed, _ = run(spec(), resume=states[-1], emit=events.append)
    assert straight is not None and resumed is not None
    assert states[-1]["step"] == 12 and [m.step for m in events] == [12]
    assert resumed.history == straight.history


@pytest.mark.slow
def test_resume_from_any_checkpoint() -> None:
    states: list[Mapping[str, Any]] = []

    def save(state: Mapping[str, Any]) -> None:
        states.append(copy.deepcopy(state))

    straight, whole = run(spec(), save=save, every_s=0.0)
    assert straight is not None and len(states) > 12
    for state in states:
        events: list[Measurement] = []
        resumed, model = run(spec(), resume=state, emit=events.append)
        assert resumed is not None and resumed.history == straight.history, f"it went on from step {state['step']}"
        assert_equal(model.state_dict(), whole.state_dict())


def test_checkpoints_are_saved_at_evaluations_and_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    for worth_s, saved in ((1e9, []), (0.0, [4, 8, 12])):
        monkeypatch.setattr(base, "WORTH_SAVING_S", worth_s)
        run(spec(), save=lambda state: steps.append(state["step"]), every_s=1e9)
        assert steps == saved
    steps.clear()
    run(spec(), save=lambda state: steps.append(state["step"]), every_s=0.0)
    assert sorted(set(steps)) == list(range(1, 13))


def test_system_metrics_are_logged_and_not_stored() -> None:
    events: list[Measurement] = []
    result, _ = run(spec(), emit=events.append)
    assert result is not None
    for event, entry in zip(events, result.history, strict=True):
        system = {name for name in event.metrics if name.startswith("system/")}
        assert system == {"system/images_per_s", "system/memory_bytes"}
        assert {name: value for name, value in event.metrics.items() if name not in system} == entry.metrics
    assert peak_memory(torch.device("cpu")) > 10 * 2**20


def test_non_finite_loss_ends_training_with_step() -> None:
    wild = spec(optimizer={"type": "sgd", "lr": 1e30}, schedule="constant", evaluations=2)
    training, result = run_training(wild)
    assert training.failure.startswith("the loss is not finite at step 2 of 12")
    assert result.metrics == {} and result.history == () and result.steps == 6, "found when the interval closes"


def test_divergence_does_not_depend_on_checkpoints() -> None:
    wild = spec(optimizer={"type": "sgd", "lr": 1e30}, schedule="constant", evaluations=2)
    steps: list[int] = []
    result, _ = run(wild, every_s=0.0, save=lambda state: steps.append(state["step"]))
    straight, _ = run(wild)
    assert result == straight
    assert steps == [1], "a training that has diverged is not saved"


def test_non_finite_final_weights_are_found_by_evaluation() -> None:
    training, _ = run_training(spec(steps=1, optimizer={"type": "sgd", "lr": 1e38}))
    assert training.failure == "the loss on val is not finite after step 1"


# -- checkpoints ------------------------------------------------------------------------------------------------------


def something() -> dict[str, Any]:
    return {
        "tensors": {
            0: {"x": torch.arange(6).view(2, 3), "half": torch.ones(3, dtype=torch.bfloat16)},
            "nothing": torch.empty(0, 4),
            "scalar": torch.tensor(2.5, dtype=torch.float64),
            "truth": torch.tensor([True, False]),
        },
        "shared": [base := torch.arange(5.0), base[1:3]],
        "rest": [1, 2.5, None, True, "text", (1, 0.1 + 0.2)],
        "tensor": "a key like those of the format",
        "pairs": {1: {"tensor": "x"}},
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_checkpoint_round_trips(tmp_path: Path) -> None:
    assert artifacts.clean_up_and_read_checkpoint(tmp_path) is None
    artifacts.make_checkpoint_writer(tmp_path, something())()
    state = artifacts.clean_up_and_read_checkpoint(tmp_path)
    assert state is not None and same(something(), state)
    before = os.umask(0o002)
    artifacts.make_checkpoint_writer(tmp_path, {"step": 2})()
    os.umask(before)
    assert artifacts.clean_up_and_read_checkpoint(tmp_path) == {"step": 2}
    assert [file.stat().st_mode & 0o777 for file in tmp_path.iterdir()] == [0o664], "a colleague can resume"


def test_checkpoint_of_a_lost_lock_replaces_nothing(tmp_path: Path) -> None:
    artifacts.make_checkpoint_writer(tmp_path, {"step": 2})()

    def require() -> None:
        raise LockLost("taken over")

    with pytest.raises(LockLost):
        artifacts.make_checkpoint_writer(tmp_path, {"step": 1}, require)()
    assert artifacts.clean_up_and_read_checkpoint(tmp_path) == {"step": 2} and len(list(tmp_path.iterdir())) == 1


def test_damaged_checkpoint_is_never_accepted(tmp_path: Path) -> None:
    artifacts.make_checkpoint_writer(tmp_path, something())()
    file = tmp_path / artifacts.CHECKPOINT
    whole = file.read_bytes()
    places = range(0, len(whole), 7)
    for place in places:
        torn = bytearray(whole)
        torn[place] ^= 1 << (place % 8)
        file.write_bytes(torn)
        try:
            state = artifacts.clean_up_and_read_checkpoint(tmp_path)
        except Damaged:
            continue
        assert state is not None and same(something(), state), f"byte {place} was changed and nobody noticed"
    for length in (0, 1, 8, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(Damaged):
            artifacts.clean_up_and_read_checkpoint(tmp_path)


def test_equal_weights_are_equal_files(tmp_path: Path) -> None:
    """safetensors writes the metadata keys in a different order at each call."""
    state = {"head.weight": torch.arange(6.0).view(2, 3), "b": torch.ones(1, dtype=torch.float16)}
    input_spec = InputSpec(DataInfo(image=(8, 8), channels=1, classes=2, labels=("ä", "b")), (0.5,), (0.2,))
    trained, converted = tmp_path / "weights.safetensors", tmp_path / "converted.safetensors"
    digests, exported = set(), set()
    for _ in range(20):
        write_weights(trained, state, input_spec)
        write_file(converted, state, {"one": "1", "two": "2"})
        digests.add(trained.read_bytes())
        exported.add(converted.read_bytes())
    assert len(digests) == len(exported) == 1
    with safetensors.safe_open(converted, framework="pt") as file:
        assert file.metadata() == {"format": "pt", "one": "1", "two": "2"}
    for file in (trained, converted):
        tensors = safetensors.torch.load_file(file)
        assert tensors.keys() == state.keys() and all(tensors[name].equal(state[name]) for name in state)
    header = json.loads(read_safetensors(trained)[1][HEADER])
    assert (header["info"]["labels"], header["mean"], header["std"]) == (["ä", "b"], [0.5], [0.2])


def test_leftovers_of_killed_writer_are_deleted(tmp_path: Path) -> None:
    artifacts.make_checkpoint_writer(tmp_path, {"step": 1})()
    (tmp_path / f".{artifacts.CHECKPOINT}.12345").write_bytes(b"half")
    assert artifacts.clean_up_and_read_checkpoint(tmp_path) == {"step": 1}
    assert [file.name for file in tmp_path.iterdir()] == [artifacts.CHECKPOINT]


def test_checkpoint_has_no_objects(tmp_path: Path) -> None:
    with pytest.raises(VitlabError, match="found object at /optimizer/state/0"):
        artifacts.make_checkpoint_writer(tmp_path, {"optimizer": {"state": [object()]}})()
    assert list(tmp_path.iterdir()) == []


def test_checkpoint_distinguishes_similar_names(tmp_path: Path) -> None:
    x = torch.ones(1)
    for state in ({1: x, "1": 2 * x}, {"a/b": x, "a": {"b": 2 * x}}):
        with pytest.raises(VitlabError, match="two tensors of the state have the path"):
            artifacts.make_checkpoint_writer(tmp_path, {"state": state})()


def test_digest_depends_on_names_dtypes_shapes_and_values() -> None:
    x = torch.arange(4.0)
    digests = [
        weights_digest(tensors)
        for tensors in (
            {"x": x},
            {"y": x},
            {"x": x.view(2, 2)},
            {"x": x.view(torch.int32)},
            {"x": -x},
            {"x": x, "y": torch.empty(0)},
        )
    ]
    assert len(set(digests)) == len(digests)
    assert weights_digest({"a": x, "b": x[1:]}) == weights_digest({"b": x[1:].clone(), "a": x})
