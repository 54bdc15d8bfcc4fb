"""Tests of a trial from spec to result: equal results after any fault."""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import random
import re
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from job_helpers import run_together, run_trial
from PIL import Image
from pyarrow import parquet

from vitlab.data.prepare import prepare
from vitlab.errors import TrialFailed, UserError, VitlabError, WeightsError
from vitlab.identity.code import modules_of_spec, trial_code_digest
from vitlab.identity.trial import checkpoint_identity, weight_file_digests
from vitlab.planning.values import Trial
from vitlab.registry import slot
from vitlab.runner import attempt, circumstances
from vitlab.runner.job import Settings
from vitlab.runner.models import load_model
from vitlab.spec import STREAMS, TrialSpec
from vitlab.store import files
from vitlab.store.files import display_path, read_json
from vitlab.store.folders import Keep, TrialFolder
from vitlab.store.locks import Busy
from vitlab.store.result import TrialResult
from vitlab.training import artifacts
from vitlab.weights.files import read_file

DATA = {"type": "synthetic", "image_size": 8, "train_images": 90, "test_images": 30, "num_classes": 6}
MODEL = {"type": "vit", "patch_size": 4, "dim": 12, "depth": 2, "heads": 2, "drop": 0.1, "drop_path": 0.2}
TRAIN = {
    "steps": 24,
    "batch_size": 16,
    "evaluations": 6,
    "optimizer": {"type": "adamw", "lr": 0.01},
    "schedule": "cosine",
    "loss": "cross_entropy",
    "clip_grad": 1.0,
}

GUESTS = """
import torch
from torch import nn
from vitlab.components.head import Logits
from vitlab.models.contract import Model, model
from vitlab.training.losses import CrossEntropy, loss

@loss.register("explosive")
class Explosive(CrossEntropy):
    def __init__(self, *, memory: bool = False) -> None:
        super().__init__(label_smoothing=0.0)
        self.memory = memory

    def __call__(self, views, target):
        if self.memory:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        raise ArithmeticError("the loss\\nwent off")

@model.register("guest")
class Guest(Model):
    '''Draws from torch's own generator, as parts of others do.'''
    def __init__(self, data, *, width: int = 8) -> None:
        super().__init__()
        pixels = data.channels * data.image[0] * data.image[1]
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(pixels, width), nn.BatchNorm1d(width), nn.Dropout(0.5),
            nn.Linear(width, data.classes),
        )

    def forward(self, x_BCHW):
        return Logits(self.net(x_BCHW))

    def initialise(self, seed: int) -> None:
        for name, p in sorted(self.named_parameters()):
            nn.init.normal_(p, generator=torch.Generator().manual_seed(seed))
"""


def trial(
    seed: int = 0, *, model: dict[str, Any] = {}, train: dict[str, Any] = {}, data: dict[str, Any] = {}, **rest: Any
) -> Trial:
    spec = {"data": {**DATA, **data}, "model": {**MODEL, **model}, "train": {**TRAIN, **train}}
    return Trial(TrialSpec.model_validate(spec), dict.fromkeys(STREAMS, seed), (), None, **{"key": "key", **rest})


@pytest.fixture
def folder(tmp_path: Path) -> Callable[[str], TrialFolder]:
    return lambda name: TrialFolder(tmp_path / name)


@pytest.fixture(scope="session")
def guests(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    file = tmp_path_factory.mktemp("plugin") / "guests_of_trials.py"
    file.write_text(GUESTS)
    return Settings(plugins=(str(file),))


def done(result: TrialResult | None) -> TrialResult:
    assert result is not None and result.status == "done"
    return result


def kinds(folder: TrialFolder) -> list[str]:
    return [event.kind for event in folder.events()[0]]


def stop_after(steps: int) -> Callable[[], bool]:
    countdown = iter(range(steps))
    return lambda: next(countdown, None) is None


# -- equal to itself --------------------------------------------------------------------------------------------------


def test_two_runs_are_bitwise_equal(folder: Any) -> None:
    augmented = {"augment": ["crop"]}
    one, two = (done(run_trial(trial(data=augmented), folder(name), Settings())) for name in ("one", "two"))
    assert one.outcome == two.outcome and len(one.outcome.weights) == 64
    assert folder("one").weights_file.read_bytes() == folder("two").weights_file.read_bytes()
    other = done(run_trial(trial(1, data=augmented), folder("other"), Settings()))
    assert other.outcome.weights != one.outcome.weights
    assert other.outcome.metrics != one.outcome.metrics


def test_global_random_state_is_ignored_and_unchanged(folder: Any) -> None:
    torch.manual_seed(1)
    one = done(run_trial(trial(), folder("one"), Settings()))
    torch.manual_seed(2)
    torch.rand(3)
    before = torch.get_rng_state(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    two = done(run_trial(trial(), folder("two"), Settings(deterministic=False)))
    after = torch.get_rng_state(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    assert one.outcome == two.outcome
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]


def test_stored_result_is_read_and_not_computed_again(folder: Any) -> None:
    result = done(run_trial(trial(), folder("t"), Settings()))
    events = folder("t").events()[0]
    assert folder("t").result() == result
    assert run_trial(trial(), folder("t"), Settings(), stop=lambda: pytest.fail("it ran again")) == result
    assert folder("t").events()[0] == events


@pytest.mark.slow
def test_resume_after_kill_equals_uninterrupted(folder: Any) -> None:
    """Two trials are killed by SIGKILL at random moments, each in its own process; ``make soak`` kills more."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["vitlab.runner.execution", "vitlab.models", "torch._dynamo", "pyarrow.parquet"])
    what = trial(train={"steps": 60, "evaluations": 12})
    settings = Settings(every_s=0.0)
    expected = done(run_trial(what, folder("never killed"), settings))
    draw = random.Random(time.time_ns())
    resumed_from, killed = [], 0
    for number in range(2):
        where = folder(f"killed {number}")
        for _ in range(2):
            process = context.Process(target=run_trial, args=(what, where, settings))
            process.start()
            killed_at = len(where.events()[0]) + draw.randint(1, 5)  # of 12 measurements, so that two kills leave some
            patience = time.monotonic() + 60
            while process.is_alive() and len(where.events()[0]) < killed_at and time.monotonic() < patience:
                time.sleep(0.002)
            process.kill()
            process.join()
            killed += process.exitcode == -9
            if where.done():
                break
        result = done(run_trial(what, where, settings))
        events = where.events()[0]
        resumed_from += [event.body["step"] for event in events if event.kind == "start"][1:]
        assert result.outcome == expected.outcome, f"it went on from {resumed_from}"
        steps = [event.body["step"] for event in events if event.kind == "metrics"]
        assert steps == sorted(set(steps)) == [m.step for m in expected.outcome.history], "something was told twice"
    assert killed >= 2 and max(resumed_from) > 0, (
        f"killed {killed} times, resumed from {resumed_from}: it tests nothing"
    )


def test_resume_after_stop_equals_uninterrupted(folder: Any) -> None:
    expected = done(run_trial(trial(), folder("straight"), Settings()))
    where = folder("stopped")
    for _ in range(3):
        assert run_trial(trial(), where, Settings(), stop=stop_after(7)) is None
        assert not where.done() and not where.is_locked() and where.failure() is None
    result = done(run_trial(trial(), where, Settings()))
    assert result.outcome == expected.outcome
    assert result.circumstances.attempts == 4
    starts = [event.body["step"] for event in where.events()[0] if event.kind == "start"]
    assert starts == [0, 7, 14, 21]
    assert [e.body["metrics"]["val/loss"] for e in where.events()[0] if e.kind == "metrics"] == [
        m.metrics["val/loss"] for m in expected.outcome.history
    ]
    assert not where.checkpoint.exists()


def test_parts_with_torch_generator_resume(folder: Any, guests: Settings) -> None:
    spec = {"data": DATA, "model": {"type": "guest"}, "train": TRAIN}
    what = Trial(TrialSpec.model_validate(spec), dict.fromkeys(STREAMS, 3), (), None, key="guest")
    expected = done(run_trial(what, folder("straight"), guests))
    where = folder("stopped")
    assert run_trial(what, where, guests, stop=stop_after(9)) is None
    assert done(run_trial(what, where, guests)).outcome == expected.outcome


def test_damaged_checkpoint_only_costs_time(folder: Any, capsys: pytest.CaptureFixture[str]) -> None:
    expected = done(run_trial(trial(), folder("straight"), Settings()))
    where = folder("damaged")
    assert run_trial(trial(), where, Settings(), stop=stop_after(10)) is None
    file = where.checkpoint / artifacts.CHECKPOINT
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert done(run_trial(trial(), where, Settings())).outcome == expected.outcome
    start = [event for event in where.events()[0] if event.kind == "start"][-1]
    assert (
        start.body["step"] == 0 and "is damaged: its digest differs; started from the beginning" in start.body["note"]
    )
    assert "the trial starts from the beginning" in capsys.readouterr().err
    steps = [event.body["step"] for event in where.events()[0] if event.kind == "metrics"]
    assert steps == [m.step for m in expected.outcome.history]


def test_kill_during_write_of_checkpoint_only_costs_time(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kill would leave is a copy of the folder, made by the thread that has written half of a checkpoint."""
    where, killed, sync, threads = folder("whole"), folder("killed"), files.fsync_all, []

    def fsync_all(written: list[Path]) -> None:
        if written[0].name.startswith(f".{artifacts.CHECKPOINT}"):
            threads.append(threading.current_thread())
            if len(threads) == 3:
                whole = written[0].read_bytes()
                written[0].write_bytes(whole[: len(whole) // 2])
                shutil.copytree(where.path, killed.path)
                written[0].write_bytes(whole)
        sync(written)

    monkeypatch.setattr(files, "fsync_all", fsync_all)
    expected = done(run_trial(trial(), where, Settings(every_s=0.0)))
    assert len(list(killed.checkpoint.iterdir())) == 2 and threading.main_thread() not in threads
    assert done(run_trial(trial(), killed, Settings())).outcome == expected.outcome
    assert [event.body["step"] for event in killed.events()[0] if event.kind == "start"] == [0, 2]


def test_torn_last_journal_line_is_cut_off(folder: Any) -> None:
    where = folder("torn")
    assert run_trial(trial(), where, Settings(), stop=stop_after(10)) is None
    with (where.path / "events.jsonl").open("a") as journal:
        journal.write('{"t": 1, "kind": "metr')
    done(run_trial(trial(), where, Settings()))
    assert [json.loads(line)["kind"] for line in (where.path / "events.jsonl").read_text().splitlines()] == kinds(where)


# -- weights of another trial -----------------------------------------------------------------------------------------


def fine_tuning(before: Trial, *, model: dict[str, Any] = {}, train: dict[str, Any] = {}, **how: Any) -> Trial:
    what = trial(1, model=model, train=train, data={"size": 12}, needs={"init_from": "before/code"}, key="after")
    spec = {**what.spec.plain(), "init_from": {"trial": before.spec.plain(), **how}}
    return Trial(TrialSpec.model_validate(spec), what.seeds, (), None, what.needs, key="after")


@pytest.fixture
def pretrained(tmp_path: Path) -> Trial:
    what = trial()
    done(run_trial(what, TrialFolder(tmp_path / "before" / "code"), Settings()))
    return what


def test_trial_starts_from_weights_on_other_grid(pretrained: Trial, tmp_path: Path) -> None:
    after = TrialFolder(tmp_path / "after" / "code")
    what = fine_tuning(pretrained, model={"attention": {"type": "split"}}, train={"steps": 0})
    done(run_trial(what, after, Settings()))
    source, _ = load_model(TrialFolder(tmp_path / "before" / "code"))
    model, _ = load_model(after)
    old, new = (which.to_canonical(which.state_dict()) for which in (source, model))
    for name in set(old) - {"pos_embed", "head.weight", "head.bias"}:
        assert torch.equal(new[name], old[name]), name
    table = old["pos_embed"][:, 1:].view(1, 2, 2, 12).permute(0, 3, 1, 2)
    expected = torch.nn.functional.interpolate(table, size=(3, 3), mode="bicubic", antialias=True)
    torch.testing.assert_close(new["pos_embed"][:, 1:], expected.permute(0, 2, 3, 1).flatten(1, 2))
    assert torch.equal(new["pos_embed"][:, 0], old["pos_embed"][:, 0])
    model.initialise(1)
    assert torch.equal(new["head.weight"], model.to_canonical(model.state_dict())["head.weight"]), "the head is new"


@pytest.mark.parametrize("freeze", ["nothing", "body"])
def test_frozen_body_stays_and_head_learns(freeze: str, pretrained: Trial, tmp_path: Path) -> None:
    after = TrialFolder(tmp_path / "after" / "code")
    result = done(run_trial(fine_tuning(pretrained, freeze=freeze, head="keep"), after, Settings()))
    source, _ = load_model(TrialFolder(tmp_path / "before" / "code"))
    model, _ = load_model(after)
    old, new = source.state_dict(), model.state_dict()
    changed = {name for name in new if name != "position.pos_embed" and not torch.equal(new[name], old[name])}
    assert (changed == {"head.fc.weight", "head.fc.bias"}) is (freeze == "body")
    stopped = TrialFolder(tmp_path / "stopped" / "code")
    assert run_trial(fine_tuning(pretrained, freeze=freeze, head="keep"), stopped, Settings(), stop_after(9)) is None
    again = done(run_trial(fine_tuning(pretrained, freeze=freeze, head="keep"), stopped, Settings()))
    assert again.outcome == result.outcome


def test_unfitting_weights_are_refused_by_name(pretrained: Trial, tmp_path: Path) -> None:
    after = TrialFolder(tmp_path / "after" / "code")
    for model, sentence in (
        ({"dim": 16}, r"weights have dim \d+, and this model has dim 16; set model\.dim: \d+"),
        ({"depth": 3}, r"set model\.depth: 2"),
        ({"mlp": {"type": "gelu", "ratio": 1}}, r"fc1\.weight: \[\d+, \d+\], and here \[\d+, \d+\].*init_from\.trial"),
        ({"layer_scale": 0.1}, r"ls1\.gamma, .* are missing"),
    ):
        with pytest.raises(TrialFailed, match=sentence):
            run_trial(fine_tuning(pretrained, model=model), after, Settings())


def by_file(role: str, file: Path, digests: Any) -> Trial:
    source = {"checkpoint": str(file)}
    how = {"init_from": source} if role == "init_from" else {"distill": {"teacher": source, "kind": "hard"}}
    spec = {**trial(1).spec.plain(), **how}
    return Trial(
        TrialSpec.model_validate(spec),
        dict.fromkeys(STREAMS, 1),
        (),
        None,
        files={role: digests} if digests else {},
        key="after",
    )


@pytest.mark.slow
@pytest.mark.parametrize("role", ["init_from", "teacher"])
def test_checkpoint_replaced_since_plan_fails_trial(role: str, pretrained: Trial, tmp_path: Path) -> None:
    """At the first attempt and at a later one; a plan of an older version has nothing to compare."""
    before, after = tmp_path / "before" / "code", tmp_path / "after"
    file = before / "weights.safetensors"
    own = weight_file_digests(file)
    assert own == {"weights.safetensors": hashlib.sha256(file.read_bytes()).hexdigest()}
    what = by_file(role, file, own)
    expected = done(run_trial(what, TrialFolder(after / "whole"), Settings()))
    assert run_trial(what, TrialFolder(after / "resumed"), Settings(), stop_after(9)) is None
    good = file.read_bytes()
    before.rename(tmp_path / "moved")
    done(run_trial(replace(pretrained, seeds=dict.fromkeys(STREAMS, 5)), TrialFolder(before), Settings()))
    assert file.read_bytes() != good
    for name in ("new", "resumed"):
        folder = TrialFolder(after / name)
        with pytest.raises(TrialFailed, match=r"weights\.safetensors is not the expected file: .*; restore it"):
            run_trial(what, folder, Settings())
        assert folder.result() is None
    other = done(run_trial(by_file(role, file, None), TrialFolder(after / "old"), Settings()))
    assert other.outcome.metrics != expected.outcome.metrics, "and this is what it would have come to"
    shutil.rmtree(before)
    (tmp_path / "moved").rename(before)
    assert done(run_trial(what, TrialFolder(after / "resumed"), Settings())).outcome == expected.outcome


def test_config_beside_checkpoint_is_part_of_it(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"weights")
    bare = weight_file_digests(file)
    assert checkpoint_identity(bare) == bare["model.safetensors"] == hashlib.sha256(b"weights").hexdigest()
    beside = tmp_path / "config.json"
    beside.write_text('{"layer_norm_eps": 1e-6}')
    described = weight_file_digests(file)
    assert list(described) == ["model.safetensors", "config.json"] and checkpoint_identity(
        described
    ) != checkpoint_identity(bare)
    for digests in (bare, {**described, "config.json": "0" * 64}, {**described, "preprocessor_config.json": "1" * 64}):
        with pytest.raises(WeightsError, match=r"config\.json is not the expected file"):
            read_file(file, digests)
    with pytest.raises(WeightsError, match="cannot be read as a safetensors file"):  # past the comparison
        read_file(file, described)


def test_replaced_prerequisite_weights_fail_dependent_trials(pretrained: Trial, tmp_path: Path) -> None:
    before = TrialFolder(tmp_path / "before" / "code")
    done(run_trial(trial(5), TrialFolder(tmp_path / "other" / "code"), Settings()))
    before.weights_file.write_bytes(TrialFolder(tmp_path / "other" / "code").weights_file.read_bytes())
    with pytest.raises(TrialFailed, match="not the weights that the trial ended with"):
        run_trial(fine_tuning(pretrained), TrialFolder(tmp_path / "after" / "code"), Settings())


# -- output -----------------------------------------------------------------------------------------------------------


def test_journal_and_result_agree(folder: Any) -> None:
    result = done(run_trial(trial(), folder("t"), Settings()))
    events = folder("t").events()[0]
    assert [event.kind for event in events] == ["start", *["metrics"] * 6, "end"]
    assert events[0].body["attempt"] == 1 and events[0].body["host"] == result.circumstances.host
    assert events[-1].body == {"status": "done"}
    for event, entry in zip(events[1:-1], result.outcome.history, strict=True):
        metrics = {name: value for name, value in event.body["metrics"].items() if not name.startswith("system/")}
        assert (event.body["step"], event.body["epoch"], event.body["images"]) == (
            entry.step,
            entry.epoch,
            entry.images,
        )
        assert metrics == entry.metrics
        system = {name: value for name, value in event.body["metrics"].items() if name not in metrics}
        assert set(system) == {f"system/{name}" for name in ("images_per_s", "memory_bytes", "tflops", "mfu")}
        done_a_second = 6 * result.circumstances.macs * system["system/images_per_s"]
        assert system["system/tflops"] == pytest.approx(done_a_second / 1e12)
        rate = circumstances.measured_matrix_rate(torch.device(events[0].body["numerics"]["device"]), "fp32", 1)
        assert system["system/mfu"] == pytest.approx(done_a_second / rate)
    assert result.outcome.metrics == result.outcome.history[-1].metrics
    assert (result.outcome.steps, result.outcome.images) == (24, 24 * 16)


def test_matmul_rate_is_that_of_fastest_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fake clock."""
    ticks = iter([0.0, 4.0, 5.0, 7.0, 10.0, 13.0, 20.0, 28.0])
    with monkeypatch.context() as patched:
        patched.setattr(circumstances, "time", SimpleNamespace(thread_time=lambda: next(ticks), perf_counter=None))
        rate = circumstances._measure_product_rate(torch.device("cpu"), "fp32")
    assert rate == 2 * 384**3 / 2.0
    assert next(ticks, None) is None


def test_rate_of_several_threads_is_unknown_on_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    circumstances.measured_matrix_rate.cache_clear()
    monkeypatch.setattr(circumstances, "_measure_product_rate", lambda device, precision: 5.0)
    for threads, rate in ((1, 5.0), (3, math.nan)):
        assert circumstances.measured_matrix_rate(torch.device("cpu"), "fp32", threads) == pytest.approx(
            rate, nan_ok=True
        )
    circumstances.measured_matrix_rate.cache_clear()
    assert "system/mfu is not recorded: the peak speed of 3 threads of a CPU is not known" in capsys.readouterr().err
    assert set(circumstances.flops_metrics({"system/images_per_s": 2.0}, 3, math.nan)) == {"system/tflops"}


def test_failing_matmul_benchmark_does_not_prevent_training(
    folder: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usual = done(run_trial(trial(), folder("usual"), Settings(device="cpu")))

    def fail(device: torch.device, precision: str) -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(circumstances, "_measure_product_rate", fail)
    circumstances.measured_matrix_rate.cache_clear()  # as in a new process
    result = done(run_trial(trial(), folder("t"), Settings(device="cpu")))
    circumstances.measured_matrix_rate.cache_clear()  # other tests of this process measure it
    assert result.outcome.weights == usual.outcome.weights
    assert "cannot be measured: CUDA out of memory" in capsys.readouterr().err
    for event in folder("t").events()[0][1:-1]:
        system = {name for name in event.body["metrics"] if name.startswith("system/")}
        assert system == {f"system/{name}" for name in ("images_per_s", "memory_bytes", "tflops")}


def test_benchmark_matrices_are_not_counted_as_trial_memory(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrices are multiplied before the peak is reset."""
    calls: list[str] = []

    def reset(device: torch.device) -> None:
        calls.append("reset")
        raise InterruptedError

    monkeypatch.setattr(torch.cuda, "init", lambda: calls.append("init"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(attempt, "measured_matrix_rate", lambda *_: calls.append("rate") or 1.0)
    with pytest.raises(InterruptedError):
        attempt.Attempt(trial(), folder("t"), Settings(), torch.device("cuda")).build_or_resume_training("loop")
    assert calls == ["init", "rate", "reset"]


def test_model_cost_is_counted_once_per_code(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(circumstances, "_sizes", {})
    monkeypatch.setattr(circumstances, "count_macs", lambda model, info: calls.append(1) or 640 + len(calls))
    info = prepare(slot("dataset").resolve_choice(DATA), trial().seeds).info
    model = slot("model").build(MODEL, info)

    def work(code: str) -> int:
        params, size = circumstances.model_params_and_macs(model, trial(code=code), info)
        assert params == sum(parameter.numel() for parameter in model.parameters())
        return size

    assert [work("a"), work("a"), work("b"), work("a")] == [641, 641, 642, 641]


def test_environment_record_is_complete(folder: Any) -> None:
    record = done(run_trial(trial(), folder("t"), Settings(threads=1))).circumstances
    # (C p^2 + 1) D + P D + (P + N) D + L (4 D + 4 D^2 + 4 D + 2 D M + M + D) + 2 D + (D + 1) K
    d, m = 12, 48
    block = 4 * d + 4 * d * d + 4 * d + 2 * d * m + m + d
    assert record.params == 17 * d + d + 5 * d + 2 * block + 2 * d + (d + 1) * 6
    assert record.macs > 4 * 16 * d + 2 * (4 * 5 * d * d)
    assert record.attempts == 1 and 0 < record.wall_s < 60 and abs(record.started - time.time()) < 60
    assert record.memory_bytes > 2**20 and set(record.versions) >= {"vitlab", "torch", "python"}
    assert record.numerics["device"] in ("cpu", "cuda") and record.numerics["torch"] == torch.__version__
    assert {name: record.numerics[name] for name in ("engine", "attention", "threads", "precision")} == {
        "engine": "loop",
        "attention": "sdpa",
        "threads": 1,
        "precision": "fp32",
    }


def test_used_attention_kernel_is_recorded(folder: Any) -> None:
    for options, kernel in (
        ({"attention": {"type": "split"}}, "split"),
        ({"attention": {"type": "auto", "drop": 0.1}}, "explicit"),
    ):
        result = done(run_trial(trial(model=options, train={"steps": 1}), folder(kernel), Settings()))
        assert result.circumstances.numerics["attention"] == kernel


@pytest.mark.parametrize("engine", ["vmap", "batch_last"])
def test_attention_kernel_of_every_stacked_trial_is_recorded(engine: str, folder: Any) -> None:
    together = [(trial(seed, train={"steps": 1}), folder(f"{seed}")) for seed in range(2)]
    run_together(together, Settings(device="cpu", engine=engine))
    numerics = [done(where.result()).circumstances.numerics for _, where in together]
    assert [(entry["engine"], entry["attention"]) for entry in numerics] == [(engine, "explicit")] * 2


def test_predictions_have_every_image_and_agree_with_metrics(folder: Any) -> None:
    result = done(run_trial(trial(), folder("t"), Settings()))
    table = parquet.read_table(folder("t").predictions).to_pandas()
    data = prepare(DATA, trial().seeds)
    assert list(table.columns) == ["split", "id", "label", "prediction", "probability", "loss"]
    for split, subset in (("val", data.val), ("test", data.test)):
        rows = table[table["split"] == split]
        assert rows["id"].tolist() == subset.id_N.tolist() and rows["label"].tolist() == subset.y_N.tolist()
        right = (rows["label"] == rows["prediction"]).mean()
        assert right == pytest.approx(result.outcome.metrics[f"{split}/accuracy"], abs=1e-12)
        assert rows["loss"].mean() == pytest.approx(result.outcome.metrics[f"{split}/loss"], rel=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_loaded_model_reproduces_predictions(precision: str, folder: Any) -> None:
    where = folder("t")
    done(run_trial(trial(train={"precision": precision}), where, Settings()))
    model, transform = load_model(where)
    test = prepare(DATA, trial().seeds).test
    with torch.no_grad():
        p, prediction = model(transform(test.x_NCHW)).logits.softmax(1).max(1)
        pictures = [Image.fromarray(image[0].numpy()) for image in test.x_NCHW]
        from_pictures = model(transform(pictures)).logits.softmax(1).max(1).values
        one = model(transform(pictures[3])).logits.softmax(1).max(1).values
    table = parquet.read_table(where.predictions).to_pandas()
    rows = table[table["split"] == "test"]
    assert (
        not model.training
        and next(model.parameters()).dtype == {"fp32": torch.float32, "fp64": torch.float64}[precision]
    )
    assert prediction.tolist() == rows["prediction"].tolist()
    assert p.tolist() == pytest.approx(rows["probability"].tolist(), rel=1e-6)
    assert from_pictures.tolist() == p.tolist() and one.item() == pytest.approx(p[3].item(), rel=1e-5)


def test_transform_prepares_images_for_model(folder: Any) -> None:
    where = folder("t")
    done(run_trial(trial(data={"channels": 3, "size": 12}, train={"steps": 0}), where, Settings()))
    model, transform = load_model(where)
    grey, colour, palette = Image.new("L", (30, 20), 200), Image.new("RGB", (5, 40)), Image.new("P", (12, 12))
    x = transform([grey, colour, palette])
    assert x.shape == (3, 3, 12, 12) and x.dtype == torch.float32
    data = prepare({**DATA, "channels": 3, "size": 12}, trial().seeds)
    expected = [(200 / 255 - mean) / std for mean, std in zip(data.mean, data.std, strict=True)]
    assert x[0, :, 5, 5].tolist() == pytest.approx(expected, rel=1e-5)
    assert model(x).logits.shape == (3, 6)
    with pytest.raises(TypeError, match="uint8"):
        transform(torch.rand(3, 12, 12))


def test_weights_are_kept_only_if_configured(folder: Any) -> None:
    result = done(run_trial(trial(), folder("t"), Settings(keep=Keep(last=False))))
    assert result.outcome.weights and not folder("t").weights_file.exists()
    with pytest.raises(WeightsError, match="kept no weights"):
        load_model(folder("t"))
    with pytest.raises(WeightsError, match="the trial has the status 'missing'"):
        load_model(folder("not begun"))
    folder("t").weights_file.write_bytes(b"something else")
    with pytest.raises(WeightsError, match="not a file of trained weights"):
        load_model(folder("t"))


def test_flipped_bit_in_weights_is_refused_everywhere(folder: Any) -> None:
    where = folder("t")
    done(run_trial(trial(train={"steps": 1}), where, Settings()))
    whole = where.weights_file.read_bytes()
    model, transform = load_model(where)
    start = 8 + int.from_bytes(whole[:8], "little")
    mean = whole.index(b"mean")
    names = whole.index(b'"F32"')
    for at in [0, names + 1, *range(mean + 8, mean + 60), start, (start + len(whole)) // 2, len(whole) - 1]:
        where.weights_file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        try:
            other, theirs = load_model(where)
        except WeightsError as error:
            assert display_path(where.weights_file) in str(error) and "\n" not in str(error)
        else:
            assert theirs.input_spec == transform.input_spec, whole[at - 9 : at + 9]
            assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    where.weights_file.write_bytes(whole)
    assert load_model(where)[1].input_spec == transform.input_spec


# -- errors -----------------------------------------------------------------------------------------------------------


def test_diverged_trial_is_a_result(folder: Any) -> None:
    wild = trial(train={"optimizer": {"type": "sgd", "lr": 1e30}, "schedule": "constant", "clip_grad": None})
    result = run_trial(wild, folder("t"), Settings())
    assert result is not None and result.status == "diverged"
    assert result.failure.startswith("the loss is not finite at step 2 of 24")
    assert result.outcome.metrics == {} and result.outcome.weights == ""
    assert folder("t").result() == result and folder("t").failure() is None
    assert not folder("t").weights_file.exists() and not folder("t").predictions.exists()
    assert folder("t").events()[0][-1].body == {"step": 4, "status": "diverged", "failure": result.failure}
    again = run_trial(wild, folder("again"), Settings(every_s=0.0))
    assert again is not None and again.outcome == result.outcome


def test_exception_of_component_is_stored_in_folder(folder: Any, guests: Settings) -> None:
    where = folder("t")
    with pytest.raises(TrialFailed, match="error: ArithmeticError"):
        run_trial(trial(train={"loss": "explosive"}), where, guests)
    assert re.fullmatch(r"ArithmeticError: the loss went off, at .*\.py:\d+", where.failure().failure)
    assert "went off" in read_json(where.path / "failure.json")["traceback"]
    assert kinds(where) == ["start", "end"] and not where.done() and not where.is_locked()
    assert where.events()[0][-1].body == {"status": "failed", "failure": where.failure().failure}


def test_out_of_memory_is_reported_plainly(folder: Any, guests: Settings) -> None:
    where = folder("t")
    with pytest.raises(TrialFailed, match=r"oom: memory ran out, with train\.batch_size 16"):
        run_trial(trial(train={"loss": {"type": "explosive", "memory": True}}), where, guests)
    assert where.failure().failure.startswith("memory ran out")


def test_failed_trial_can_be_retried(folder: Any) -> None:
    where = folder("t")
    with pytest.raises(TrialFailed):
        run_trial(trial_with(data="something else"), where, Settings())
    assert where.failure() is not None
    done(run_trial(trial_with(data="synthetic:1"), where, Settings()))
    assert where.failure() is None


def trial_with(data: str) -> Trial:
    return Trial(trial().spec, trial().seeds, (), data, key="key")


def test_data_differing_from_plan_is_refused(folder: Any) -> None:
    with pytest.raises(TrialFailed, match="planned synthetic:0, found synthetic:1"):
        run_trial(trial_with(data="synthetic:0"), folder("t"), Settings())


def test_code_differing_from_plan_is_refused(folder: Any) -> None:
    code = trial_code_digest(modules_of_spec(trial().spec))
    done(run_trial(trial(code=code), folder("t"), Settings()))
    with pytest.raises(VitlabError, match="is not the code this trial was planned under"):
        run_trial(trial(code="f" * 32), folder("other"), Settings())
    assert not folder("other").path.exists()


def test_trial_run_elsewhere_is_busy(folder: Any) -> None:
    with folder("t").lease(), pytest.raises(Busy):
        run_trial(trial(), folder("t"), Settings())
    assert kinds(folder("t")) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_missing_device_is_reported_plainly(folder: Any) -> None:
    with pytest.raises(UserError, match="no CUDA device"):
        run_trial(trial(), folder("t"), Settings(device="cuda"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("default")  # torch warns of its own code while it compiles
@pytest.mark.parametrize("engine", ["loop", "compiled"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_cuda_runs_and_resumed_run_are_equal(precision: str, engine: str, folder: Any) -> None:
    what, settings = trial(train={"precision": precision}), Settings(device="cuda", engine=engine)
    one, two = (done(run_trial(what, folder(name), settings)) for name in ("one", "two"))
    assert run_trial(what, folder("stopped"), settings, stop=stop_after(10)) is None
    three = done(run_trial(what, folder("stopped"), settings))
    assert one.outcome == two.outcome == three.outcome
    assert one.circumstances.numerics["engine"] == engine
    assert one.circumstances.numerics["device"] == "cuda" and one.circumstances.memory_bytes > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.filterwarnings("default")  # torch warns of its own code while it compiles
@pytest.mark.parametrize(
    ("engine", "micro_batch_size", "change", "tolerance"),
    [
        ("compiled", None, {}, 1e-4),
        ("compiled", None, {"ema": {"decay": 0.9}}, 1e-4),
        ("compiled", 4, {}, 1e-4),
        ("compiled", None, {"precision": "fp16"}, 1e-2),
        ("compiled_vmap", None, {}, 1e-4),
    ],
)
def test_compiled_engines_equal_loop_up_to_rounding_on_cuda(
    engine: str, micro_batch_size: int | None, change: dict[str, Any], tolerance: float, folder: Any
) -> None:
    """With dropout and drop path; losses are compared, too, because a CUDA graph overwrites its last results."""
    what = trial(train={"optimizer": {"type": "sgd", "lr": 0.1}, **change})
    settings = Settings(device="cuda", micro_batch_size=micro_batch_size)
    one = done(run_trial(what, folder("loop"), settings))
    two = done(run_trial(what, folder("compiled"), replace(settings, engine=engine)))
    assert two.circumstances.numerics["engine"] == engine
    for actual, expected in zip(two.outcome.history, one.outcome.history, strict=True):
        assert actual.metrics["train/loss"] == pytest.approx(expected.metrics["train/loss"], rel=tolerance)
    weights = load_model(folder("loop"))[0].state_dict()
    for key, value in load_model(folder("compiled"))[0].state_dict().items():
        torch.testing.assert_close(value, weights[key], rtol=tolerance, atol=tolerance)
