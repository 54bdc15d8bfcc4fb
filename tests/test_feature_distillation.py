"""Tests of distillation by features and tokens, against formulas on modules of timm and torchvision."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from pydantic import ValidationError
from torch import Tensor, nn
from trainings import train

import vitlab
from vitlab.components.head import Logits
from vitlab.data.prepare import Feed, data_info, prepare
from vitlab.data.torchvision_import import torchvision
from vitlab.engines import engine_or_fallback
from vitlab.engines.compiled import compile_loss
from vitlab.errors import SpecError, WeightsError
from vitlab.geometry import DataInfo
from vitlab.lab import plan_study
from vitlab.models.contract import Model
from vitlab.models.trained import InputSpec, read_safetensors
from vitlab.planning.resolve import Faults, Resolver
from vitlab.registry import slot
from vitlab.spec import STREAMS, TrainSpec
from vitlab.spec.trial import Distill, TrialSpec
from vitlab.training import artifacts
from vitlab.training.distillation import Distillation, InputAdapter, Projected
from vitlab.training.distributed import SingleProcess
from vitlab.training.loop import Training
from vitlab.training.memory import MicroBatches, checkpoint_activations
from vitlab.training.optim import hidden_matrices

pytestmark = pytest.mark.usefixtures("no_report")
torchvision()  # timm imports torchvision, whose import may need a workaround
pytest.importorskip("timm")
from timm.models.vision_transformer import VisionTransformer  # noqa: E402
from timm.task import DistillationTeacher, FeatureDistillationTask  # noqa: E402

SEEDS = dict.fromkeys(STREAMS, 0)
DATA: dict[str, Any] = {"type": "digits"}
VIT: dict[str, Any] = {"type": "vit", "patch_size": 2, "dim": 16, "depth": 2, "heads": 2}
WIDE: dict[str, Any] = {"type": "vit", "patch_size": 4, "dim": 24, "depth": 1, "heads": 2, "registers": 1}
PREPARED = prepare(slot("dataset").resolve_choice(DATA), SEEDS)
MINE = InputSpec(PREPARED.info, PREPARED.mean, PREPARED.std)
PHOTOGRAPHS = InputSpec(
    DataInfo(image=(64, 64), channels=3, classes=10, identity=None), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
)


def built(choice: Any, seed: int = 0, info: DataInfo = PREPARED.info) -> Model:
    model: Model = slot("model").build(choice, info)
    model.initialise(seed)
    return model.double()


def spec(**options: Any) -> TrainSpec:
    defaults = {"steps": 6, "batch_size": 16, "evaluations": 2, "optimizer": {"type": "adamw", "lr": 3e-3}}
    return TrainSpec.model_validate({**defaults, "precision": "fp64", **options})


def settings(**options: Any) -> Distill:
    return Distill.model_validate({"teacher": {"checkpoint": "x"}, "kind": "none", **options})


def feed(dtype: torch.dtype = torch.float64) -> Feed:
    return Feed(PREPARED, [], SEEDS, dtype=dtype)


def training(
    how: Distill,
    teacher: Model,
    theirs: InputSpec = MINE,
    student: Any = VIT,
    train_spec: TrainSpec | None = None,
    **kw: Any,
) -> Training:
    model = built(student) if not isinstance(student, Model) else student
    distillation = Distillation(how, teacher, theirs, MINE, "fp64")
    return Training(model, feed(), train_spec or spec(), SEEDS, distillation, **kw)


def timm_vit(model: Model, choice: dict[str, Any]) -> VisionTransformer:
    """Return timm's model with the weights of ours."""
    theirs = VisionTransformer(
        img_size=8,
        patch_size=choice["patch_size"],
        in_chans=1,
        num_classes=10,
        embed_dim=choice["dim"],
        depth=choice["depth"],
        num_heads=2,
        reg_tokens=choice.get("registers", 0),
        fc_norm=False,
    ).double()
    theirs.load_state_dict(model.to_canonical(model.state_dict()))
    return theirs


def normalised(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def formula(loss: str, predicted: Tensor, target: Tensor) -> Tensor:
    difference = predicted - target
    if loss == "mse":
        return difference.square().mean()
    if loss == "smooth_l1":
        size = difference.abs()
        return torch.where(size < 2, size.square() / 4, size - 1).mean()
    norms = predicted.square().sum(-1).sqrt() * target.square().sum(-1).sqrt()
    return (1 - (predicted * target).sum(-1) / norms).mean()


# -- loss -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("teacher", "features", "tokens"),
    [
        ("vit", {"loss": "mse", "norm": "none", "weight": 0.3}, {}),
        ("vit", {"loss": "smooth_l1", "norm": "none"}, {"loss": "cosine", "weight": 2.0}),
        ("resnet", {"loss": "cosine", "norm": "none"}, {"loss": "mse", "norm": "none", "weight": 0.5}),
    ],
    ids=["vit-mse-default", "vit-smooth_l1-cosine", "resnet-cosine-mse"],
)
def test_loss_and_gradients_equal_formula(teacher: str, features: dict[str, Any], tokens: dict[str, Any]) -> None:
    """Grids differ: the ViT's is 2 by 2 tokens and resampled to 4 by 4, as is the map of the ResNet."""
    how = settings(kind="soft", alpha=0.25, tau=2.0, reduction="batchmean", features=features, tokens=tokens)
    if teacher == "vit":
        ours, theirs = built(WIDE, 5), MINE
        body = timm_vit(ours, WIDE).eval()

        def taught(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            x_BTE = body.forward_features(x)
            return body.forward_head(x_BTE), x_BTE[:, 0], x_BTE[:, 2:].transpose(1, 2).reshape(4, 24, 2, 2)
    else:
        ours, theirs = built("resnet18", 5, PHOTOGRAPHS.info), PHOTOGRAPHS
        net = torchvision("torchvision.models").resnet18(num_classes=10).double().eval()
        net.load_state_dict(ours.state_dict())
        trunk = nn.Sequential(*list(net.children())[:-2])

        def taught(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            x_BEhw = trunk(x)
            return net(x), x_BEhw.mean((2, 3)), x_BEhw

    one = training(how, ours, theirs, train_spec=spec(batch_size=4))
    batch, _ = one.draw_batch(range(4))
    loss = one.forward_backward(range(4)).loss

    with torch.no_grad():
        teacher_BK, pooled_BE, map_BEhw = taught(InputAdapter(MINE, theirs, like=batch.x_BCHW)(batch.x_BCHW))
        map_BEhw = F.interpolate(map_BEhw, size=(4, 4), mode="bilinear", align_corners=False)
        wanted = {"features": pooled_BE, "tokens": map_BEhw.flatten(2).transpose(1, 2)}
    student = timm_vit(one.model, VIT)
    x_BTD = student.forward_features(batch.x_BCHW)
    logits_BK = student.forward_head(x_BTD)
    vectors = {"features": x_BTD[:, 0], "tokens": x_BTD[:, 1:]}
    assert isinstance(one.module, Projected)
    maps = {name: nn.Linear(16, w.shape[-1]).double() for name, w in wanted.items()}
    for name, linear in maps.items():
        linear.load_state_dict(one.module.projections[name].state_dict())
    log_t, log_s = (teacher_BK / 2).log_softmax(1), (logits_BK / 2).log_softmax(1)
    expected = 0.75 * F.cross_entropy(logits_BK, batch.y_B)
    expected = expected + 0.25 * 4 * (log_t.exp() * (log_t - log_s)).sum() / 4
    for name, options in (("features", features), ("tokens", tokens)):
        target = wanted[name] if options.get("norm") == "none" else normalised(wanted[name])
        term = formula(options.get("loss", "smooth_l1"), maps[name](vectors[name]), target)
        torch.testing.assert_close(loss.parts[f"loss_{name}"], term.detach(), rtol=1e-10, atol=1e-12)
        expected = expected + options.get("weight", 1.0) * term
    torch.testing.assert_close(loss.total, expected.detach(), rtol=1e-10, atol=1e-12)

    expected.backward()
    actual = one.model.to_canonical({name: p.grad for name, p in one.model.named_parameters()})
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(actual[name], parameter.grad, rtol=1e-9, atol=1e-12, msg=name)
    for name, linear in maps.items():
        for mine, other in zip(one.module.projections[name].parameters(), linear.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-9, atol=1e-12)
    assert all(p.grad is None for p in ours.parameters())


def test_features_of_the_fitnets_loss_equal_timm() -> None:
    one = training(settings(features={"loss": "mse", "norm": "none", "weight": 3.0}), built(WIDE, 5))
    batch, _ = one.draw_batch(range(16))
    student, teacher = timm_vit(one.model, VIT), timm_vit(built(WIDE, 5), WIDE)
    student.pretrained_cfg = teacher.pretrained_cfg = {"mean": (0.5,), "std": (0.25,)}
    task = FeatureDistillationTask(
        student,
        DistillationTeacher(teacher, dtype=torch.float64),
        criterion=nn.CrossEntropyLoss(),
        task_loss_weight=1.0,
        distill_loss_weight=3.0,
        dtype=torch.float64,
        verbose=False,
    )
    assert isinstance(one.module, Projected)
    task.trainable_module.projection.load_state_dict(one.module.projections["features"].state_dict())
    theirs = task(batch.x_BCHW, batch.y_B)
    loss = one.forward_backward(range(16)).loss
    torch.testing.assert_close(loss.parts["loss_features"], theirs["kd_loss"].detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(loss.total, theirs["loss"].detach(), rtol=1e-9, atol=1e-12)


class LinearMaps(Model):
    """A linear map of every 2 by 2 patch, the mean over patches, and a classifier."""

    def __init__(self, dim: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.patch_embed = nn.Conv2d(1, dim, 2, stride=2)
        self.fc = nn.Linear(dim, 10)
        self.double()

    def forward(self, x_BCHW: Tensor) -> Logits:
        return self.forward_head(self.forward_features(x_BCHW))

    def forward_features(self, x_BCHW: Tensor) -> Tensor:
        x_BDhw: Tensor = self.patch_embed(x_BCHW)
        return x_BDhw

    def forward_head(self, x_BDhw: Tensor) -> Logits:
        return Logits(self.fc(x_BDhw.mean((2, 3))))

    def layer_of(self, name: str) -> int:
        return int(name.startswith("fc"))


def test_linear_student_learns_linear_teacher() -> None:
    plain = {"loss": "mse", "norm": "none", "weight": 100.0}
    one = training(
        settings(features=plain, tokens=plain),
        LinearMaps(7, 1),
        student=LinearMaps(4, 2),
        train_spec=spec(steps=150, batch_size=64, optimizer={"type": "adam", "lr": 0.03}),
    )
    first = one.forward_backward(range(64)).loss.parts
    for _ in range(150):
        one.train_step()
    last = one.forward_backward(range(64)).loss.parts
    for name in ("loss_features", "loss_tokens"):
        assert last[name] < 0.01 * first[name], name


# -- training ---------------------------------------------------------------------------------------------------------

BOTH: dict[str, Any] = {"kind": "hard", "features": {}, "tokens": {"loss": "cosine"}}
RECIPE: dict[str, Any] = {"mix": {"mixup": 0.4, "cutmix": 1.0}, "ema": {"decay": 0.9}, "clip_grad": 1.0}


def test_resume_equals_uninterrupted(tmp_path: Path) -> None:
    """Through a checkpoint file, with a mixed batch, an average of weights and dropout."""
    student, train_spec = {**VIT, "drop": 0.1, "drop_path": 0.2}, spec(**RECIPE)
    results, weights, saved = [], [], []
    for resume in (False, True):
        model = built(student)
        distillation = Distillation(settings(**BOTH), built(WIDE, 5), MINE, MINE, "fp64")
        options: dict[str, Any] = {"distillation": distillation}
        if resume:
            stops = [True, *[False] * 4]
            stopped = Distillation(settings(**BOTH), built(WIDE, 5), MINE, MINE, "fp64")
            other = built(student)
            assert not train(other, feed(), train_spec, SEEDS, distillation=stopped, save=saved.append, stop=stops.pop)
            artifacts.make_checkpoint_writer(tmp_path, saved[-1])()
            options["resume"] = artifacts.clean_up_and_read_checkpoint(tmp_path)
        results.append(train(model, feed(), train_spec, SEEDS, **options))
        weights.append(model.state_dict())
    assert "projections.tokens.weight" in saved[-1]["model"] and saved[-1]["step"] == 4
    assert len(saved[-1]["optimizer"]["state"]) == len(list(built(student).parameters())) + 4
    first, second = results
    assert first is not None and second is not None and first.history == second.history
    assert {"train/loss_features", "train/loss_tokens", "train/loss_distillation"} <= set(first.metrics)
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def gradients(one: Training) -> dict[str, Tensor]:
    one.optimizer.zero_grad()
    parts = [one.forward_backward(rows) for rows in one.micro_batches.rows(16)]
    loss = one.micro_batches.combine_losses_and_gradients(parts, one.parameters)
    return {"loss": loss.total} | {
        name: p.grad.clone() for name, p in one.module.named_parameters() if p.grad is not None
    }


def test_microbatches_and_recomputed_blocks_have_gradients_of_whole_batch() -> None:
    student, train_spec = {**VIT, "drop": 0.1, "drop_path": 0.2}, spec(mix={"mixup": 0.4})
    how = settings(**BOTH)
    whole = gradients(training(how, built(WIDE, 5), student=student, train_spec=train_spec))
    assert "projections.features.weight" in whole
    parts = MicroBatches(5, SingleProcess())
    cut = gradients(training(how, built(WIDE, 5), student=student, train_spec=train_spec, micro_batches=parts))
    model = built(student)
    checkpoint_activations(model)
    again = gradients(training(how, built(WIDE, 5), student=model, train_spec=train_spec))
    for name, value in whole.items():
        torch.testing.assert_close(cut[name], value, rtol=1e-9, atol=1e-12)
        assert torch.equal(again[name], value), name


@pytest.mark.slow
def test_compiled_loss_is_one_graph_and_engines_that_stack_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitlab.engines.compiled.BACKEND", "eager")
    one, other = (training(settings(**BOTH), LinearMaps(7, 1), student=LinearMaps(4, 2)) for _ in range(2))
    one.compiled_loss = compile_loss(one)
    compiled, looped = gradients(one), gradients(other)
    for name, value in looped.items():
        torch.testing.assert_close(compiled[name], value, rtol=1e-9, atol=1e-12)
    for engine in ("vmap", "batch_last"):
        name, _, note = engine_or_fallback(engine, one)
        assert name == "loop" and "does not support distillation" in note


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_narrow_precision_is_near_fp32(precision: str) -> None:
    losses = []
    for name in ("fp32", precision):
        model, teacher = built(VIT).float(), built(WIDE, 5).float()
        distillation = Distillation(settings(**BOTH), teacher, MINE, MINE, name)
        one = Training(model, feed(torch.float32), spec(precision=name), SEEDS, distillation=distillation)
        losses.append(one.forward_backward(range(16)).loss)
        assert losses[-1].total.dtype == torch.float32
    for name, value in losses[0].parts.items():
        torch.testing.assert_close(losses[1].parts[name], value, rtol=0.03, atol=0.01)


def test_projections_are_trained_as_the_head_is() -> None:
    one = training(settings(**BOTH), built("resnet8", 5), train_spec=spec(layer_decay=0.5, ema={"decay": 0.9}))
    groups = [
        g for g in one.optimizer.param_groups for p in g["params"] if p is one.module.projections["tokens"].weight
    ]
    assert [(g["weight_decay"] > 0, g["lr_scale"]) for g in groups] == [(True, 1.0)]
    assert not any("projections" in name for name in hidden_matrices(one.module))
    assert any("blocks" in name for name in hidden_matrices(one.module))
    assert {"projections.tokens.bias", "model.cls_token"} <= one.module.no_weight_decay()
    start = built(VIT).state_dict()
    assert all(torch.equal(start[name], value) for name, value in one.model.state_dict().items())


# -- studies ----------------------------------------------------------------------------------------------------------

TRAIN = {"steps": 3, "batch_size": 16, "evaluations": 1}
TEACHER = {"data": DATA, "model": {"type": "resnet8", "width_factor": 0.25}, "train": TRAIN}


def tree(model: Any = VIT, teacher: Any = TEACHER, train_changes: Any = {}, **distill: Any) -> dict[str, Any]:
    return {
        "data": DATA,
        "model": model,
        "train": {**TRAIN, **train_changes},
        "distill": {"teacher": {"trial": teacher}, "kind": "none", **distill},
    }


def faults(plain: dict[str, Any]) -> list[tuple[Any, str]]:
    with pytest.raises(Faults) as caught:
        Resolver(data_info).resolve_trial(plain)
    return caught.value.faults


def test_study_stores_the_student_alone(tmp_path: Path) -> None:
    """Its teacher has other classes, which features do not need."""
    teacher = {**TEACHER, "data": {**DATA, "classes": [0, 1, 2]}}
    base = tree(teacher=teacher, features={}, tokens={"loss": "cosine"})
    content = {"study": "taught", "base": base, "seeds": 1, "run": {"executor": "inline", "tracker": "none"}}
    file = tmp_path / "taught.yaml"
    file.write_text(yaml.safe_dump(content))
    answer = vitlab.run(file, out=tmp_path / "out")
    row = answer.results().iloc[0]
    terms = row["train/loss_base"] + row["train/loss_features"] + row["train/loss_tokens"]
    assert row["status"] == "done" and row["train/loss"] == pytest.approx(terms, rel=1e-5)
    assert "train/loss_distillation" not in row.dropna()
    trial = answer.plan.trials[0].trial
    weights, _ = read_safetensors(answer.store.trial(trial.key, trial.code).weights_file)
    assert weights.keys() == built(VIT).state_dict().keys()
    content["base"] = tree(teacher=teacher, kind="hard", features={})
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(SpecError, match="has 3 classes and this trial has 10; make them equal, or learn from"):
        plan_study(file, out=tmp_path / "out")


def test_weight_of_zero_is_today_and_unused_options_are_outside_the_key() -> None:
    def identity(**distill: Any) -> Any:
        return Resolver(data_info).resolve_trial(tree(**distill)).identity

    zero = {"weight": 0, "loss": "mse"}
    assert identity(kind="soft", features=zero, tokens=zero) == identity(kind="soft")
    assert "features" not in identity(kind="soft")["distill"]
    assert identity(features=zero) == {name: value for name, value in identity().items() if name != "distill"}
    assert identity(features={}, alpha=0.3, tau=3.0) == identity(features={"weight": 1.0})
    assert identity(kind="soft", features={}) != identity(kind="soft", tokens={})
    whole = TrialSpec.model_validate(tree(features={}))
    assert TrialSpec.model_validate(whole.plain()) == whole


@pytest.mark.parametrize(
    ("distill", "sentence"),
    [
        ({"kind": "none", "tokens": {}}, "tokens needs a teacher; set teacher.trial or teacher.checkpoint"),
        ({"kind": "labels", "features": {}}, "kind 'labels' has no teacher, and features needs one; remove features"),
        ({"teacher": {"checkpoint": "x"}, "features": {"loss": "kl"}}, "'smooth_l1', 'mse' or 'cosine'"),
    ],
)
def test_contradictory_options_are_refused(distill: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        Distill.model_validate(distill)


@pytest.mark.parametrize(
    ("changes", "place", "sentence"),
    [
        (
            {"model": "linear", "tokens": {}},
            "tokens",
            "this trial's model, 'linear', has no patch tokens and no feature",
        ),
        (
            {"teacher": {**TEACHER, "model": "linear"}, "tokens": {}},
            "tokens",
            "its teacher, 'linear', has no patch tokens",
        ),
        ({"model": {**VIT, "patch_drop": 0.5}, "tokens": {}}, "tokens", "and model.patch_drop leaves some out"),
        ({"model": {**VIT, "parametrization": "mup"}, "features": {}}, "features", "use parametrization: standard"),
    ],
)
def test_impossible_pairs_are_refused_in_planning(changes: dict[str, Any], place: str, sentence: str) -> None:
    (fault,) = faults(tree(**changes))
    assert fault[0] == ("distill", place) and sentence in fault[1]


def test_objective_without_labels_and_fixed_body_are_refused() -> None:
    messages = faults(tree(features={}, train_changes={"objective": "mae"}))
    assert "learns without labels and without a teacher; remove distill" in messages[0][1]
    start = {"trial": {"data": DATA, "model": VIT, "train": TRAIN}}
    for freeze in ("body", VIT["depth"]):
        (fault,) = faults({**tree(tokens={}), "init_from": {**start, "freeze": freeze}})
        assert fault[0] == ("distill", "tokens") and "which init_from.freeze holds fixed" in fault[1]
    Resolver(data_info).resolve_trial({**tree(tokens={}), "init_from": {**start, "freeze": 1}})


def test_models_without_features_are_refused() -> None:
    prior = built("prior")
    for name, message in (
        ("features", "needs a head whose last layer is linear, and the teacher, a Prior, has none"),
        ("tokens", "needs patch tokens or a feature map, and the teacher, a Prior, has none"),
    ):
        with pytest.raises(WeightsError, match=f"distill.{name} {message}"):
            Distillation(settings(**{name: {}}), prior, MINE, MINE, "fp64")
    with pytest.raises(WeightsError, match="and this trial's model, a Prior, has none"):
        training(settings(features={}), built(WIDE), student=prior)


def test_every_kind_of_features_trains_every_kind_of_model() -> None:
    for student in ("resnet8", {**VIT, "prefix": ["class", "distillation"], "head": "distilled"}):
        one = training(settings(**BOTH), built(WIDE, 5), student=student)
        one.train_step()
        assert math.isfinite(one.losses["loss"][0])
        assert one.evaluate("val").metrics.keys() >= {"loss", "accuracy"}
