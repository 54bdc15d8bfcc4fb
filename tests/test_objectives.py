"""Tests of objectives: MAE against the authors' procedure on timm's blocks, checkpoints, engines and refusals."""

from __future__ import annotations

import copy
import math
import pickle
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from job_helpers import run_spec
from torch import Tensor
from trainings import train

from vitlab.data.prepare import Feed, data_info, prepare
from vitlab.data.torchvision_import import torchvision
from vitlab.driver.planning import plan_study
from vitlab.engines import engine_or_fallback
from vitlab.engines.base import train as train_together
from vitlab.errors import SpecError
from vitlab.identity.code import iter_resolved_choices, modules_of_spec, transitive_digests
from vitlab.models.contract import Model
from vitlab.planning.resolve import Faults, Resolver
from vitlab.registry import slot
from vitlab.runner.circumstances import hook_chosen_kernels
from vitlab.runner.job import Settings
from vitlab.runner.models import load_model
from vitlab.spec import STREAMS, TrainSpec
from vitlab.store.folders import Keep, TrialFolder
from vitlab.store.result import Outcome, TrialResult
from vitlab.training.features import evaluate_features
from vitlab.training.loop import Training
from vitlab.training.memory import checkpoint_activations
from vitlab.training.objective import MeanLoss
from vitlab.training.objective.mae import MAE, MaskedAutoencoder

torchvision()  # timm imports torchvision, whose import may need a workaround
pytest.importorskip("timm")
from timm.models.vision_transformer import Block as TimmBlock  # noqa: E402
from timm.models.vision_transformer import VisionTransformer  # noqa: E402

SEEDS = dict.fromkeys(STREAMS, 0)
DATA: dict[str, Any] = {"type": "digits"}
VIT: dict[str, Any] = {"type": "vit", "patch_size": 2, "dim": 16, "depth": 2, "heads": 2}
MASKED: dict[str, Any] = {"type": "mae", "dim": 16, "heads": 2}


def spec(**options: Any) -> TrainSpec:
    defaults = {"steps": 6, "batch_size": 16, "evaluations": 2, "optimizer": {"type": "adamw", "lr": 3e-3}}
    return TrainSpec.model_validate({**defaults, "objective": MASKED, "precision": "fp64", **options})


def built(seed: int = 0, **options: Any) -> Model:
    model: Model = slot("model").build({**VIT, **options}, data_info(DATA))
    model.initialise(seed)
    return model.double()


def feed(seed: int = 0) -> Feed:
    seeds = {**SEEDS, "order": seed, "augment": seed}
    return Feed(prepare(DATA, seeds), [], seeds, dtype=torch.float64)


def training(train_spec: TrainSpec, seed: int = 0, **options: Any) -> Training:
    seeds = {**SEEDS, "init": seed, "order": seed, "augment": seed}
    return Training(built(seed, **options), feed(seed), train_spec, seeds)


def resolve(**changes: Any) -> Any:
    tree = {
        "data": DATA,
        "model": VIT,
        **changes,
        "train": {"steps": 1, "objective": "mae", **changes.get("train", {})},
    }
    return Resolver(data_info).resolve_trial(tree)


# -- the default ------------------------------------------------------------------------------------------------------


def test_default_objective_is_outside_the_key() -> None:
    plain = {"data": DATA, "model": VIT, "train": {"steps": 1}}
    without = Resolver(data_info).resolve_trial(plain)
    for name in ("supervised", {"type": "supervised"}):
        one = Resolver(data_info).resolve_trial({**plain, "train": {"steps": 1, "objective": name}})
        assert (one.identity, one.origins, one.modules) == (without.identity, without.origins, without.modules)
        assert "objective" not in one.identity["train"] and one.plain["train"]["objective"] == {"type": "supervised"}
    masked = resolve()
    assert masked.identity["train"]["objective"] == {"type": "mae"}
    assert pickle.loads(pickle.dumps(masked)) == masked
    other = resolve(train={"objective": {"type": "mae", "mask_ratio": 0.5}})
    assert other.identity["train"]["objective"] == {"type": "mae", "mask_ratio": 0.5}
    assert masked.modules - without.modules == {"vitlab.training.objective.mae"}
    assert without.modules <= modules_of_spec(without.spec)
    assert {one.slot for one in iter_resolved_choices(without.spec)} >= {"objective"}


# -- MAE --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_pixels", [True, False])
@pytest.mark.parametrize("prefix", [[], ["class"]])
def test_mae_equals_authors_procedure(prefix: list[str], norm_pixels: bool) -> None:
    """The reference follows models_mae.py of facebookresearch/mae, step by step, on timm's own modules."""
    model = built(prefix=prefix, head={"type": "linear", "pool": "cls" if prefix else "gap"})
    one = Training(model, feed(), spec(objective={**MASKED, "norm_pixels": norm_pixels}), SEEDS)
    module, decoder = one.objective.module, one.objective.module.decoder
    assert isinstance(module, MaskedAutoencoder) and isinstance(one.objective, MAE)
    batch = one.objective.batch(0, range(16))

    body = VisionTransformer(
        img_size=8,
        patch_size=2,
        in_chans=1,
        num_classes=10,
        embed_dim=16,
        depth=2,
        num_heads=2,
        class_token=bool(prefix),
        global_pool="token" if prefix else "avg",
        fc_norm=False,
    ).double()
    body.load_state_dict(model.to_canonical(model.state_dict()))
    block = TimmBlock(16, 2, qkv_bias=True, norm_layer=partial(torch.nn.LayerNorm, eps=1e-6)).double()
    block.load_state_dict(decoder.blocks[0].state_dict())

    patches, visible = 16, 4
    x = body.patch_embed(batch.x_BCHW) + body.pos_embed[:, len(prefix) :]
    ids_shuffle = batch.y_B
    ids_restore = ids_shuffle.argsort(1)
    x = x.gather(1, ids_shuffle[:, :visible, None].expand(-1, -1, 16))
    mask = torch.ones(16, patches, dtype=torch.float64)
    mask[:, :visible] = 0
    mask = mask.gather(1, ids_restore)
    if prefix:
        x = torch.cat([(body.cls_token + body.pos_embed[:, :1]).expand(16, -1, -1), x], 1)
    x = body.norm(body.blocks(x))

    x = F.linear(x, decoder.embed.weight, decoder.embed.bias)
    tokens = decoder.mask_token.expand(16, patches - visible, -1)
    shuffled = torch.cat([x[:, len(prefix) :], tokens], 1)
    x = torch.cat([x[:, : len(prefix)], shuffled.gather(1, ids_restore[:, :, None].expand(-1, -1, 16))], 1)
    x = x + torch.cat([torch.zeros(len(prefix), 16), sincos_of_authors(16, 4)])
    x = F.layer_norm(block(x), (16,), decoder.norm.weight, decoder.norm.bias, 1e-6)
    predicted = F.linear(x, decoder.pred.weight, decoder.pred.bias)[:, len(prefix) :]
    target = F.unfold(batch.x_BCHW, 2, stride=2).transpose(1, 2)
    if norm_pixels:
        target = (target - target.mean(-1, keepdim=True)) / (target.var(-1, keepdim=True) + 1e-6) ** 0.5
    expected = (((predicted - target) ** 2).mean(-1) * mask).sum() / mask.sum()

    actual = one.objective.loss(batch.x_BCHW, batch.y_B).total
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    actual.backward()
    expected.backward()
    for name, parameter in body.named_parameters():
        mine = model.get_parameter({"pos_embed": "position.pos_embed"}.get(name, name.replace("head.", "head.fc.")))
        if not name.startswith("head."):
            torch.testing.assert_close(mine.grad.view_as(parameter), parameter.grad, rtol=1e-9, atol=1e-10)


def sincos_of_authors(dim: int, side: int) -> Tensor:
    """Return ``get_2d_sincos_pos_embed`` of facebookresearch/mae: the column's half, then the row's."""

    def one_axis(place: Tensor) -> Tensor:
        omega = 1.0 / 10000 ** (torch.arange(dim // 4, dtype=torch.float64) / (dim / 4.0))
        out = place.reshape(-1, 1) * omega
        return torch.cat([out.sin(), out.cos()], 1)

    row, column = torch.meshgrid(torch.arange(side).double(), torch.arange(side).double(), indexing="ij")
    return torch.cat([one_axis(column), one_axis(row)], 1).float().double()


def test_masks_are_drawn_per_image_and_epoch_and_fixed_in_evaluation() -> None:
    one, other = training(spec()), training(spec(batch_size=32))
    first, again = one.objective.batch(0, range(16)), other.objective.batch(0, range(8, 16))
    assert torch.equal(first.y_B.sort(1).values, torch.arange(16).expand(16, -1))
    assert torch.equal(first.y_B[8:], again.y_B), "a mask does not depend on the batch"
    assert len({tuple(order) for order in first.y_B.tolist()}) == 16
    epoch = one.feed.steps_per_epoch(16)
    later = {int(id): order for id, order in zip(*_epoch(one, epoch), strict=True)}
    assert any(
        not torch.equal(later[int(id)], order)
        for id, order in zip(first.id_B, first.y_B, strict=True)
        if int(id) in later
    )
    evaluations = [training(spec(), seed).evaluate("test").columns for seed in (0, 0)]
    assert torch.equal(evaluations[0]["loss"], evaluations[1]["loss"]) and set(evaluations[0]) == {"id", "loss"}


def _epoch(one: Training, first: int) -> tuple[Tensor, Tensor]:
    batches = [one.objective.batch(first + step, range(16)) for step in range(one.feed.steps_per_epoch(16))]
    return torch.cat([batch.id_B for batch in batches]), torch.cat([batch.y_B for batch in batches])


POSITIONS: list[dict[str, Any]] = [
    {"position": "rope2d", "drop": 0.1, "drop_path": 0.2},
    {"position": "rope2d_mixed"},
    {"position": {"type": "learned", "where": "every_layer"}},
    {"position": "none", "prefix": [], "head": {"type": "linear", "pool": "gap"}},
]


@pytest.mark.parametrize("options", POSITIONS, ids=str)
def test_trials_together_equal_trials_alone(options: dict[str, Any]) -> None:
    train_spec = spec(steps=3, optimizer={"type": "adamw", "lr": 3e-3, "weight_decay": 0.1}, ema={"decay": 0.5})
    alone = [training(train_spec, seed, **options) for seed in range(2)]
    together = [training(train_spec, seed, **options) for seed in range(2)]
    assert engine_or_fallback("batch_last", together[0])[0] == "vmap"
    expected = [train_together([one])[0] for one in alone]
    for before, after in zip(expected, train_together(together, slot("engine").get("vmap")), strict=True):
        assert isinstance(before, Outcome) and isinstance(after, Outcome)
        assert after.metrics == pytest.approx(before.metrics, rel=1e-9)
        assert set(before.metrics) == {"train/loss", "train/lr", "val/loss", "test/loss"}
    for one, other in zip(alone, together, strict=True):
        for name, value in one.module.state_dict().items():
            torch.testing.assert_close(other.module.state_dict()[name], value, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("position", ["rope2d", {"type": "learned", "where": "every_layer"}], ids=str)
def test_model_on_all_patches_in_order_is_unchanged(position: Any) -> None:
    """With every patch visible, the selection of patches is the identity up to their order."""
    from vitlab.training.objective.mae import PartialPosition

    model = built(position=position, prefix=["class"]).eval()
    x_BCHW = torch.randn(3, 1, 8, 8, dtype=torch.float64)
    order_BN = torch.rand(3, 16).argsort(1)
    whole_BTD = model.forward_features(x_BCHW)
    some_BTD = model.forward_features(x_BCHW, PartialPosition(model.position, order_BN, model.geometry))
    rows = torch.cat([torch.zeros(3, 1, dtype=torch.int64), order_BN + 1], 1)
    expected = whole_BTD.gather(1, rows[:, :, None].expand(-1, -1, 16))
    torch.testing.assert_close(some_BTD, expected, rtol=1e-12, atol=1e-12)


def test_resume_restores_decoder_bit_for_bit() -> None:
    whole, model = training(spec()), built()
    expected = train_together([whole])[0]
    states: list[Any] = []
    calls = iter(range(100))
    stopped = train(model, feed(), spec(), SEEDS, save=states.append, stop=lambda: next(calls) == 4)
    assert stopped is None and any(name.startswith("decoder.") for name in states[-1]["model"])
    again = training(spec())
    again.load(states[-1])
    resumed = train_together([again])[0]
    assert expected is not None and resumed is not None and expected.history == resumed.history
    for name, value in whole.module.state_dict().items():
        assert torch.equal(again.module.state_dict()[name], value), name
    assert set(whole.model.state_dict()) == set(built().state_dict()), "the decoder is not among the model's weights"


def test_micro_batches_equal_the_whole_batch() -> None:
    from vitlab.training.distributed import SingleProcess
    from vitlab.training.memory import MicroBatches

    whole = training(spec(steps=2))
    cut = Training(built(), feed(), spec(steps=2), SEEDS, None, MicroBatches(5, SingleProcess()))
    for one in (whole, cut):
        one.train_step()
        one.train_step()
    for name, value in whole.module.state_dict().items():
        torch.testing.assert_close(cut.module.state_dict()[name], value, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"position": "relative_bias"}, "position 'relative_bias' adds a bias for every pair of them"),
        ({"position": "conditional"}, "position 'conditional' is computed from all of them"),
        ({"patch": "conv_stem"}, "patch 'conv_stem' reads the pixels of others"),
        ({"final_norm_at": "pooled", "head": {"type": "linear", "pool": "gap"}}, "write final_norm_at: tokens"),
        ({"patch_drop": 0.5}, "patch_drop 0.5 removes some of those"),
        ({"block": "token_merging"}, "block 'token_merging' merges some of those"),
        ({"type": "resnet8"}, "hides patches of a ViT, and model 'resnet8' is none"),
        ({"patch_size": 8}, "leaves no patch visible: mask_ratio is 0.75, and the model has 1 patches"),
    ],
)
def test_impossible_models_are_skipped_with_a_reason(model: dict[str, Any], reason: str) -> None:
    options = model if "type" in model else {**VIT, **model}
    assert reason in resolve(model=options).incompatibility
    assert not resolve().incompatibility


def test_impossible_decoder_is_skipped_with_a_reason() -> None:
    trial = resolve(train={"objective": {"type": "mae", "dim": 30, "heads": 4}})
    assert "decoder of objective 'mae': dim 30 is not a multiple of heads 4" in trial.incompatibility


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"distill": {"kind": "labels"}}, "learns without labels and without a teacher; remove distill"),
        ({"train": {"mix": {"mixup": 0.2}}}, "learns without labels, which train.mix mixes"),
        ({"init_from": {"trial": {"data": DATA, "model": VIT, "train": {"steps": 0}}, "head": "fitted"}}, "no head"),
        ({"init_from": {"trial": {"data": DATA, "model": VIT, "train": {"steps": 0}}, "freeze": "body"}}, "the body"),
        ({"init_from": {"trial": {"data": DATA, "model": VIT, "train": {"steps": 0}}, "freeze": 2}}, "the body"),
        ({"train": {"metrics": ["brier"]}}, "metric 'brier' reads predictions, and objective 'mae' trains none"),
    ],
)
def test_parts_that_need_labels_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Faults, match=message):
        resolve(**changes)


# -- trials -----------------------------------------------------------------------------------------------------------


def ran(folder: TrialFolder, key: str, spec: dict[str, Any], needs: dict[str, str] = {}) -> TrialResult:
    return run_spec(folder, key, spec, SEEDS, replace(Settings(deterministic=False), keep=Keep()), needs)


@pytest.mark.slow
def test_probe_of_pretrained_body_beats_that_of_a_random_one(tmp_path: Path) -> None:
    model = {**VIT, "dim": 32, "position": "sincos2d", "prefix": [], "head": {"type": "linear", "pool": "gap"}}
    accuracies = {}
    for name, steps in (("random", 0), ("mae", 200)):
        train_options = {"steps": steps, "batch_size": 64, "evaluations": 1, "optimizer": {"type": "adamw", "lr": 4e-3}}
        source = {"data": DATA, "model": model, "train": {**train_options, "objective": {**MASKED, "mask_ratio": 0.5}}}
        result = ran(TrialFolder(tmp_path / name / "code"), name, source)
        assert set(result.outcome.metrics) >= {"val/loss", "test/loss"} and "val/accuracy" not in result.outcome.metrics
        probe = {
            "data": {**DATA, "per_class": 10},
            "model": model,
            "train": {"steps": 0},
            "init_from": {"trial": source, "head": "fitted"},
        }
        probed = ran(TrialFolder(tmp_path / f"p{name}" / "code"), f"p{name}", probe, {"init_from": f"{name}/code"})
        accuracies[name] = probed.outcome.metrics["test/accuracy"]
        body, _ = load_model(TrialFolder(tmp_path / name / "code"))
        assert torch.equal(body.state_dict()["head.fc.bias"], torch.zeros(10)), "its head was not trained"
    assert accuracies["mae"] > accuracies["random"] + 0.05, accuracies


# -- DINO -------------------------------------------------------------------------------------------------------------

DISTILLED: dict[str, Any] = {"type": "dino", "prototypes": 12, "hidden": 16, "bottleneck": 8, "views": 3}
CROPS = [{"type": "random_resized_crop", "scale": [0.4, 1.0]}]


def self_distilled(train_spec: TrainSpec, **options: Any) -> Training:
    data = Feed(prepare(DATA, SEEDS), CROPS, SEEDS, dtype=torch.float64)
    return Training(built(**options), data, train_spec, SEEDS)


@pytest.mark.parametrize("patch", ["linear", "conv_stem"])
def test_dino_equals_authors_procedure(patch: str) -> None:
    """The reference is Algorithm 1 of arXiv:2104.14294, with the multi-crop loss of the authors' code, over two steps.

    The teacher's statistics of batch normalisation are averaged like its weights.
    """
    how = spec(steps=2, objective=DISTILLED, optimizer={"type": "sgd", "lr": 0.5, "momentum": 0.0})
    one = self_distilled(how, patch=patch)
    student = copy.deepcopy(one.objective.module.student)
    teacher, center = copy.deepcopy(student).eval(), torch.zeros(12, dtype=torch.float64)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.5)
    for step in range(2):
        batch = one.objective.batch(step, range(16))
        crops = batch.x_BCHW.unbind(1)
        assert len(crops) == 3 and not torch.equal(crops[0], crops[1])
        with torch.no_grad():
            teacher_output = [teacher(crop) for crop in crops[:2]]
        losses, student_output = [], [student(crop) for crop in crops]
        for iq, t in enumerate(teacher_output):
            q = F.softmax((t - center) / 0.04, dim=-1)
            for v, output in enumerate(student_output):
                if v != iq:
                    losses.append(torch.sum(-q * F.log_softmax(output / 0.1, dim=-1), dim=-1).mean())
        loss = sum(losses) / len(losses)
        optimizer.param_groups[0]["lr"] = one.learning_rate(step)
        optimizer.zero_grad()
        loss.backward()
        one.train_step()
        torch.testing.assert_close(one.losses["loss"][-1], loss.detach(), rtol=1e-10, atol=1e-10)
        one.losses["loss"].clear()
        decay = {name for name, _ in student.named_parameters()} - {
            name.removeprefix("student.") for name in one.module.no_weight_decay()
        }
        assert "model.blocks.0.attn.qkv.weight" in decay and "model.cls_token" not in decay
        optimizer.step()
        center = center * 0.9 + torch.cat(teacher_output).mean(0) * 0.1
        m = 1 - (1 - 0.996) * (1 + math.cos(math.pi * step / 2)) / 2
        with torch.no_grad():
            for own, other in zip(teacher.parameters(), student.parameters(), strict=True):
                own.mul_(m).add_(other, alpha=1 - m)
            for own, other in zip(teacher.modules(), student.modules(), strict=True):
                if isinstance(own, torch.nn.BatchNorm2d):
                    assert isinstance(other, torch.nn.BatchNorm2d)
                    for mine, theirs in ((own.running_mean, other.running_mean), (own.running_var, other.running_var)):
                        assert mine is not None and theirs is not None and not torch.equal(mine, theirs)
                        mine.mul_(m).add_(theirs, alpha=1 - m)
    module = one.objective.module
    torch.testing.assert_close(module.centre_K, center, rtol=1e-10, atol=1e-12)
    for mine, reference in ((module.student, student), (module.teacher, teacher)):
        for name, value in [*reference.named_parameters(), *reference.named_buffers()]:
            if not name.endswith("num_batches_tracked"):
                torch.testing.assert_close(mine.state_dict()[name], value.detach(), rtol=1e-9, atol=1e-11)


def test_dino_resumes_bit_for_bit_with_teacher_and_centre() -> None:
    train_spec = spec(objective=DISTILLED)
    whole, again = self_distilled(train_spec, drop=0.1), self_distilled(train_spec, drop=0.1)
    states: list[Any] = []
    stopped = self_distilled(train_spec, drop=0.1)
    stopped.write = lambda state: states.append(copy.deepcopy(state))
    calls = iter(range(100))
    assert train_together([stopped], stop=lambda: next(calls) == 4) == [None]
    again.load(states[-1])
    (expected,), (resumed,) = train_together([whole]), train_together([again])
    assert expected is not None and resumed is not None and expected.history == resumed.history
    for name, value in whole.module.state_dict().items():
        assert torch.equal(again.module.state_dict()[name], value), name
    assert "engine vmap does not support objective 'dino'" in (slot("engine").get("vmap").incompatibility(whole) or "")


def test_further_metrics_of_an_objective_are_not_lost_by_vmap() -> None:
    one = training(spec())

    class Measured(type(one.objective)):  # type: ignore[misc]
        def evaluation_metrics(self) -> nullcontext[dict[str, list[Tensor]]]:
            return nullcontext({"seen": []})

    vmap = slot("engine").get("vmap")
    assert vmap.incompatibility(one) is None
    one.objective.__class__ = Measured
    assert vmap.incompatibility(one) == "engine vmap does not report seen of objective 'mae'"


def test_teacher_of_recomputed_blocks_has_its_own_weights() -> None:
    fast = {**DISTILLED, "momentum": 0.5}
    metrics = []
    for is_recomputed in (False, True):
        model = built(drop=0.1)
        if is_recomputed:
            checkpoint_activations(model)
        data = Feed(prepare({**DATA, "fraction": 0.2}, SEEDS), CROPS, SEEDS, dtype=torch.float64)
        (result,) = train_together([Training(model, data, spec(steps=2, objective=fast, evaluations=1), SEEDS)])
        assert result is not None
        metrics.append(result.metrics)
    assert metrics[0] == metrics[1] and "val/loss" in metrics[0]


@pytest.mark.slow
def test_features_of_dino_beat_those_of_a_random_model() -> None:
    """Votes of neighbours among all training images for all others; guesses have 10 %."""
    train_spec = spec(
        steps=60,
        batch_size=64,
        precision="fp32",
        objective={"type": "dino", "prototypes": 128, "hidden": 64, "bottleneck": 32},
        optimizer={"type": "adamw", "lr": 2e-3},
        schedule={"type": "cosine", "warmup": 0.1},
        clip_grad=1.0,
    )
    model = built(dim=32, depth=1, prefix=[], head={"type": "linear", "pool": "gap"}, init="jax").float()
    data = Feed(prepare(DATA, SEEDS), [{"type": "random_resized_crop", "scale": [0.6, 1.0]}], SEEDS)
    one = Training(model, data, train_spec, SEEDS)
    before = votes(one)
    for _ in range(one.steps):
        one.train_step()
    gains = [after - value for after, value in zip(votes(one), before, strict=True)]
    assert sum(gains) / len(gains) > 0.03, gains
    assert torch.stack(one.losses["loss"])[-10:].mean() < math.log(128) - 0.3


def votes(one: Training) -> list[float]:
    knn = {"knn": slot("metric").build("knn")}
    return [evaluate_features(one.model, one.feed, split, "fp32", knn)["knn"] for split in ("val", "test")]


@pytest.mark.parametrize("objective", [MASKED, DISTILLED], ids=["mae", "dino"])
def test_circumstances_of_trials_without_labels(objective: dict[str, Any], tmp_path: Path) -> None:
    """The kernel is recorded though the model itself is never called; a step is not three forward passes."""
    train_options = {"steps": 1, "batch_size": 16, "evaluations": 1, "objective": objective}
    folder = TrialFolder(tmp_path / "trial" / "code")
    result = ran(folder, "trial", {"data": {**DATA, "augment": CROPS}, "model": VIT, "train": train_options})
    assert result.circumstances.numerics["attention"] in ("sdpa", "explicit")
    (logged,) = [event.body["metrics"] for event in folder.events()[0] if event.kind == "metrics"]
    assert "system/images_per_s" in logged and not logged.keys() & {"system/mfu", "system/tflops"}


def test_kernels_of_parts_are_observed_once() -> None:
    model = built()
    kernels = hook_chosen_kernels(model, is_joint=False)
    model.forward_features(torch.zeros(2, 1, 8, 8).double())
    assert kernels == {"sdpa"}
    assert not any(module._forward_hooks for module in model.modules())


def test_digest_covers_parts_that_are_built_by_name() -> None:
    parts = {"vitlab.components.mlp", "vitlab.components.norm", "vitlab.components.position.additive"}
    assert parts <= transitive_digests({"vitlab.training.objective.mae"}).keys()
    assert "vitlab.components.norm" in transitive_digests({"vitlab.components.attention.differential"})


@pytest.mark.parametrize("run", ["{micro_batch_size: 4}", "{device: cpu, resources: {processes: 2}}"])
def test_dino_with_cut_batches_is_refused_in_planning(run: str, tmp_path: Path) -> None:
    study = tmp_path / "study.yaml"
    study.write_text(f"""\
study: cut
base:
  data: {{type: digits, augment: [random_resized_crop]}}
  model: {VIT}
  train: {{steps: 1, objective: dino}}
design: {{one_at_a_time: {{model.depth: [1]}}}}
seeds: 2
analysis: {{metric: val/loss, goal: min}}
run: {run}
""")
    with pytest.raises(SpecError, match="objective 'dino' needs the images of a step in one piece"):
        plan_study(study, out=tmp_path)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"data": DATA}, "learns from views that data.augment draws, and it is empty"),
        ({"model": {"type": "resnet8"}}, "trains a ViT, and model 'resnet8' is none"),
        ({"train": {"ema": {"decay": 0.5}}}, "averages weights itself"),
        ({"model": {**VIT, "prefix": ["class", "distillation"], "head": "distilled"}}, "pools to none; use 'linear'"),
    ],
)
def test_impossible_self_distillation_is_skipped(changes: dict[str, Any], reason: str) -> None:
    tree = {"data": {**DATA, "augment": CROPS}, **changes}
    trial = resolve(**{**tree, "train": {"objective": "dino", **tree.get("train", {})}})
    assert reason in trial.incompatibility


def test_views_that_are_no_losses_are_refused() -> None:
    with pytest.raises(ValueError, match=r"views of an objective .* are losses, \(B,\); found \(4, 10\)"):
        MeanLoss().rows(torch.zeros(4, 10), torch.zeros(4))
