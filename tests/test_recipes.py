"""Tests of recipes against timm: mixed images, averaged weights, layer decay, repeated augmentation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from job_helpers import run_trial
from pydantic import ValidationError
from scipy import stats
from torch import Tensor
from trainings import train

from vitlab import lab, noise
from vitlab.data.batches import Batch
from vitlab.data.prepare import Feed, Prepared, data_info, prepare
from vitlab.data.torchvision_import import torchvision
from vitlab.identity.code import trial_code_digest, used_optional_modules
from vitlab.models.contract import Model
from vitlab.planning.resolve import Faults, Resolver
from vitlab.planning.values import Trial
from vitlab.registry import OPTIONAL_MODULES, slot
from vitlab.runner.job import Settings
from vitlab.runner.models import load_model
from vitlab.spec import STREAMS, TrainSpec, TrialSpec
from vitlab.spec.trial import Ema, Mix
from vitlab.spec.yaml import parse_document
from vitlab.store.folders import TrialFolder
from vitlab.store.result import Outcome
from vitlab.training.ema import Average
from vitlab.training.loop import Training
from vitlab.training.mixup import Mixing

torchvision()  # timm imports torchvision, whose import may need a workaround
import timm.data  # noqa: E402
import timm.data.distributed_sampler  # noqa: E402
import timm.loss  # noqa: E402
import timm.utils  # noqa: E402

DATA = {"type": "synthetic", "image_size": 8, "train_images": 90, "test_images": 30, "num_classes": 6}
MODEL = {"type": "vit", "patch_size": 4, "dim": 12, "depth": 2, "heads": 2, "drop": 0.1}
SEEDS = dict.fromkeys(STREAMS, 0)
BOTH = {"mixup": 0.8, "cutmix": 1.0}


def spec(**options: Any) -> TrainSpec:
    defaults = {"steps": 12, "batch_size": 16, "evaluations": 3, "optimizer": {"type": "adamw", "lr": 0.01}}
    return TrainSpec.model_validate({**defaults, **options})


def built(data: Prepared, dtype: torch.dtype = torch.float32) -> Model:
    model: Model = slot("model").build(MODEL, data.info)
    model.initialise(0)
    return model.to(dtype)


def run(train_spec: TrainSpec, seeds: Mapping[str, int] = SEEDS, **options: Any) -> tuple[Outcome | None, Model]:
    data = prepare(DATA, SEEDS)
    model = built(data)
    return train(model, Feed(data, [], seeds), train_spec, seeds, **options), model


def assert_equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def assert_same_after_a_stop(train_spec: TrainSpec) -> None:
    """Check that a training stopped within an interval and resumed equals an uninterrupted one."""
    whole, model = run(train_spec)
    states: list[Any] = []
    calls = iter(range(100))
    stopped, _ = run(train_spec, save=states.append, stop=lambda: next(calls) == 6)
    assert stopped is None and states[-1]["step"] == 6
    resumed, again = run(train_spec, resume=states[-1])
    assert whole is not None and resumed is not None
    assert whole.history == resumed.history
    assert_equal(model.state_dict(), again.state_dict())


def resolve_section(train_options: dict[str, Any], data: dict[str, Any] = DATA, model: dict[str, Any] = MODEL) -> Any:
    tree = {"data": data, "model": model, "train": {"steps": 2, **train_options}}
    return Resolver(data_info).resolve_trial(tree)


# -- mixed images -----------------------------------------------------------------------------------------------------


def batch(n: int = 16, height: int = 9, width: int = 14, classes: int = 7) -> Batch:
    g = torch.Generator().manual_seed(3)
    x_BCHW = torch.randn(n, 3, height, width, generator=g)
    return Batch(x_BCHW, torch.randint(classes, (n,), generator=g), torch.arange(n), 0)


@pytest.mark.parametrize(
    "how", [BOTH, {"mixup": 0.2}, {"cutmix": 0.5}, {**BOTH, "prob": 0.6, "switch": 0.3}], ids=lambda how: str(how)
)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_mixed_batches_equal_timm_for_same_draws(
    how: dict[str, float], smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    mix = Mix.model_validate(how)
    ours = Mixing(mix, 5, 7)
    theirs = timm.data.Mixup(
        mixup_alpha=mix.mixup,
        cutmix_alpha=mix.cutmix,
        prob=mix.prob,
        switch_prob=mix.switch,
        label_smoothing=smoothing,
        num_classes=7,
    )
    batch_in = batch()
    kinds = set()
    for step in range(40):
        key = noise.key(5, "mixup", step)
        u = noise.uniform(key, torch.zeros(1, dtype=torch.long), 6)[0].double().tolist()
        uniforms, places = iter(u[:2]), iter((int(u[4] * 9), int(u[5] * 14)))
        monkeypatch.setattr(np.random, "rand", lambda uniforms=uniforms: next(uniforms))
        monkeypatch.setattr(np.random, "beta", lambda a, b, u=u: float(stats.beta.ppf(u[2] + u[3] / 2**24, a, b)))
        monkeypatch.setattr(np.random, "randint", lambda low, high, size=None, places=places: next(places))
        wanted_BCHW, wanted_BK = theirs(batch_in.x_BCHW.clone(), batch_in.y_B)
        before = batch_in.x_BCHW.clone()
        mixed = ours(batch_in, step)
        assert torch.equal(batch_in.x_BCHW, before), "the images of the feed are not written to"
        torch.testing.assert_close(mixed.x_BCHW, wanted_BCHW, rtol=0, atol=1e-6)
        logits_BK = torch.randn(16, 7, generator=torch.Generator().manual_seed(step))
        loss = slot("loss").build({"type": "cross_entropy", "label_smoothing": smoothing})
        theirs_loss = timm.loss.SoftTargetCrossEntropy()(logits_BK, wanted_BK)
        assert float(loss({"": logits_BK}, mixed.y_B).total) == pytest.approx(float(theirs_loss), rel=1e-5)
        loss = slot("loss").build({"type": "bce", "label_smoothing": smoothing})
        theirs_loss = timm.loss.BinaryCrossEntropy(smoothing=0.0)(logits_BK, wanted_BK)
        assert float(loss({"": logits_BK}, mixed.y_B).total) == pytest.approx(float(theirs_loss), rel=1e-5)
        assert mixed.y_B.sum(1).sub(1).abs().max() < 1e-6
        kinds.add(
            "none"
            if torch.equal(mixed.x_BCHW, batch_in.x_BCHW)
            else ("cutmix" if ours.draw_mixing(step, 9, 14).box else "mixup")
        )
    expected = {name for name in ("mixup", "cutmix") if name in how} | ({"none"} if "prob" in how else set())
    assert kinds - {"none"} == expected - {"none"} and ("none" in kinds or "none" not in expected)


@pytest.mark.parametrize("a", [0.2, 1.0, 3.0])
def test_mixing_weights_are_beta_distributed(a: float) -> None:
    weights = [Mixing(Mix(mixup=a), 1, 2).draw_mixing(step, 8, 8).weight for step in range(1500)]
    assert stats.kstest(weights, stats.beta(a, a).cdf).pvalue > 1e-3
    cut = [Mixing(Mix(cutmix=a), 1, 2).draw_mixing(step, 1000, 1000) for step in range(300)]
    inner = [weight for weight, box in cut if box and all(side.start > 0 and side.stop < 1000 for side in box)]
    # A rectangle that no border cuts off leaves what was drawn, so what was drawn is to be found again.
    samples = [float(stats.beta.ppf(u, a, a)) for u in _uniforms(300)]
    assert len(inner) > 10
    assert all(min(abs(weight - d) for d in samples) < 2e-3 for weight in inner)


def _uniforms(steps: int) -> list[float]:
    one = torch.zeros(1, dtype=torch.long)
    u_S6 = torch.cat([noise.uniform(noise.key(1, "mixup", step), one, 6) for step in range(steps)]).double()
    return (u_S6[:, 2] + u_S6[:, 3] / 2**24).tolist()


@pytest.mark.slow
def test_mixup_and_cutmix_frequencies() -> None:
    mixing = Mixing(Mix(mixup=1.0, cutmix=1.0, prob=0.7, switch=0.2), 0, 2)
    draws = [mixing.draw_mixing(step, 8, 8) for step in range(3000)]
    mixed = [samples for samples in draws if samples.box or samples.weight < 1]
    assert stats.binomtest(len(mixed), 3000, 0.7).pvalue > 1e-3
    assert stats.binomtest(sum(samples.box is not None for samples in mixed), len(mixed), 0.2).pvalue > 1e-3
    rows = [samples.box[0].start for samples in draws if samples.box]
    assert min(rows) == 0 and max(rows) > 4


def test_odd_batch_leaves_middle_image_unchanged() -> None:
    batch_in = batch(5)
    mixed = Mixing(Mix(mixup=1.0), 0, 7)(batch_in, 0)
    torch.testing.assert_close(mixed.x_BCHW[2], batch_in.x_BCHW[2])
    assert not torch.allclose(mixed.x_BCHW[1], batch_in.x_BCHW[1])


def test_mixing_depends_on_own_seed_and_step() -> None:
    mixing = spec(mix=BOTH, evaluations=12)
    (one, first), (again, second) = run(mixing), run(mixing)
    assert one is not None and again is not None and one.history == again.history
    assert_equal(first.state_dict(), second.state_dict())
    other, _ = run(mixing, {**SEEDS, "mixup": 1})
    without, _ = run(spec(evaluations=12))
    assert other is not None and without is not None
    losses = [[m.metrics["train/loss"] for m in batch.history] for batch in (one, other, without)]
    assert losses[0][0] != losses[1][0] != losses[2][0] != losses[0][0]


@pytest.mark.parametrize("loss", ["cross_entropy", "bce"])
def test_mixed_training_resume_equals_uninterrupted(loss: str) -> None:
    assert_same_after_a_stop(spec(mix={**BOTH, "prob": 0.8}, loss=loss))


def test_teacher_gets_mixed_images() -> None:
    from vitlab.models.trained import InputSpec
    from vitlab.spec.trial import Distill
    from vitlab.training.distillation import Distillation

    data = prepare(DATA, SEEDS)
    batches_seen: list[Tensor] = []
    teacher = built(data)
    teacher.register_forward_pre_hook(lambda _, inputs: batches_seen.append(inputs[0]))
    sight = InputSpec(data.info, data.mean, data.std)
    how = Distill.model_validate({"teacher": {"checkpoint": "x"}})
    result, _ = run(spec(mix=BOTH, steps=2), distillation=Distillation(how, teacher, sight, sight, "fp32"))
    assert result is not None and {"train/loss_base", "train/loss_distillation"} <= set(result.metrics)
    for step in range(2):
        mixed = Mixing(Mix.model_validate(BOTH), 0, 6)(Feed(data, [], SEEDS).batch(step, 16), step)
        assert torch.equal(batches_seen[step], mixed.x_BCHW)


def test_zero_mixing_is_no_mixing() -> None:
    without = resolve_section({})
    assert "mix" not in without.plain["train"]
    for nothing in (None, {"mixup": 0}, {"cutmix": 0, "mixup": 0}, {**BOTH, "prob": 0}):
        assert resolve_section({"mix": nothing}).identity == without.identity
    assert resolve_section({"mix": BOTH}).identity["train"]["mix"] == BOTH


def test_mixing_code_is_only_in_digest_of_mixing_trials() -> None:
    mixed, without = resolve_section({"mix": BOTH}), resolve_section({})
    assert OPTIONAL_MODULES["mixing"] in mixed.modules and OPTIONAL_MODULES["mixing"] not in without.modules
    assert mixed.modules - without.modules == used_optional_modules(mixed.spec) == {OPTIONAL_MODULES["mixing"]}
    assert trial_code_digest(mixed.modules) != trial_code_digest(without.modules)


def test_segmentation_labels_are_not_mixed() -> None:
    scenes = {"type": "digit_scenes", "train_images": 20, "test_images": 20}
    model = {"type": "vit", "patch_size": 8, "dim": 12, "depth": 1, "heads": 2, "head": "segmentation"}
    with pytest.raises(Faults, match=r"train\.mix needs classification, and the task of this data is segmentation"):
        resolve_section({"mix": BOTH}, scenes, model)
    resolve_section({}, scenes, model)


@pytest.mark.parametrize("wrong", [{"mixup": -1}, {"prob": 2}, {"mixupp": 1}])
def test_contradictory_mixing_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValidationError):
        spec(mix=wrong)


# -- averaged weights -------------------------------------------------------------------------------------------------


class Moving(torch.nn.Module):
    """A module with weights, statistics and a count, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(5, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.double()

    def step(self, g: torch.Generator) -> None:
        with torch.no_grad():
            for p in self.parameters():
                p.add_(torch.randn(p.shape, generator=g, dtype=torch.float64))
        self.norm(torch.randn(8, 3, generator=g, dtype=torch.float64))


@pytest.mark.parametrize("decay", [0.0, 0.9, 0.9999])
@pytest.mark.parametrize("warmup", [0.0, 2 / 3, 1.0])
def test_weight_average_equals_timm(decay: float, warmup: float) -> None:
    model = Moving()
    ours = Average(model, Ema(decay=decay, warmup=warmup))  # type: ignore[arg-type]  # it asks for no more than a module
    if warmup:
        theirs = timm.utils.ModelEmaV3(model, decay=decay, use_warmup=True, warmup_power=warmup)
    else:
        theirs = timm.utils.ModelEmaV2(model, decay=decay)
    g = torch.Generator().manual_seed(0)
    weights = []
    for step in range(1, 31):
        model.step(g)
        ours.update(step)
        if warmup:
            theirs.update(model, step=step)
        else:
            theirs.update(model)
        weights.append(model.body.weight.detach().clone())
        expected = theirs.module.state_dict()
        for name, value in ours.state_dict().items():
            if value.is_floating_point():
                torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-12)
            else:
                assert torch.equal(value, model.state_dict()[name]), "a count is no average"
    if warmup == 1 and decay == 0.9999:
        torch.testing.assert_close(ours.state_dict()["body.weight"], torch.stack(weights).mean(0))


def test_weight_average_is_evaluated_and_stored_without_changing_training() -> None:
    data = prepare(DATA, SEEDS)
    feed, steps = Feed(data, [], SEEDS), 8

    def train_recorded(**options: Any) -> tuple[Outcome, Model, list[dict[str, Tensor]]]:
        """Return a training and its weights after every step."""
        states: dict[int, dict[str, Tensor]] = {}

        def save(state: Mapping[str, Any]) -> None:
            states[state["step"]] = {name: value.clone() for name, value in state["model"].items()}

        trained, model = run(spec(steps=steps, evaluations=steps, **options), save=save, every_s=0.0)
        assert trained is not None and {*range(1, steps + 1)} <= states.keys()
        return trained, model, [states[step] for step in range(1, steps + 1)]

    plain, _, states = train_recorded()
    actual, model, stored = train_recorded(ema={"decay": 0.8, "warmup": 0})
    average, peer = {name: value.double() for name, value in built(data).state_dict().items()}, built(data)
    for mine, theirs, now, entry, without in zip(stored, states, states, actual.history, plain.history, strict=True):
        assert_equal(mine, theirs)  # averaging does not change the training
        assert entry.metrics["train/loss"] == without.metrics["train/loss"]
        average = {name: 0.8 * value + 0.2 * now[name].double() for name, value in average.items()}
        peer.load_state_dict({name: value.float() for name, value in average.items()})
        metrics = Training(peer, feed, spec(), SEEDS).evaluate("val").metrics
        assert entry.metrics["val/loss"] == pytest.approx(metrics["loss"], rel=1e-5)
        assert abs(entry.metrics["val/loss"] - without.metrics["val/loss"]) > 1e-4
    metrics = Training(peer, feed, spec(), SEEDS).evaluate("test").metrics
    assert actual.metrics["test/loss"] == pytest.approx(metrics["loss"], rel=1e-5)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, average[name].float(), rtol=1e-5, atol=1e-6)


def test_averaged_training_resume_equals_uninterrupted() -> None:
    assert_same_after_a_stop(spec(ema={"decay": 0.9}))


def test_averaging_code_is_only_in_digest_of_averaging_trials() -> None:
    averaged, without = resolve_section({"ema": {}}), resolve_section({"ema": None})
    assert (
        averaged.modules - without.modules == {OPTIONAL_MODULES["averaging"]} and "ema" not in without.identity["train"]
    )


# -- rates by layer ---------------------------------------------------------------------------------------------------


def test_layer_decay_rates_reach_weights() -> None:
    data = prepare(DATA, SEEDS)
    start = built(data).state_dict()
    options = {"steps": 1, "optimizer": {"type": "sgd", "lr": 0.1, "momentum": 0.0}}
    (_, even), (_, falling) = run(spec(**options)), run(spec(**options, layer_decay=0.5))
    for name, value in even.state_dict().items():
        if name in dict(even.named_parameters()):
            scale = 0.5 ** (3 - even.layer_of(name))
            expected = start[name] + scale * (value - start[name])
            torch.testing.assert_close(falling.state_dict()[name], expected, rtol=0, atol=1e-6)


def test_layer_decay_resume_equals_uninterrupted() -> None:
    assert_same_after_a_stop(spec(layer_decay=0.7))


def test_layer_decay_of_one_is_none() -> None:
    assert resolve_section({"layer_decay": 1}).identity == resolve_section({}).identity


# -- repeated augmentation --------------------------------------------------------------------------------------------


def test_repeated_augmentation_equals_timm_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    data = prepare(DATA, SEEDS)
    n, size = len(data.train), 10
    feed = Feed(data, [], SEEDS)
    place = {identity: i for i, identity in enumerate(data.train.id_N.tolist())}
    for epoch in range(3):
        order = noise.permutation(noise.key(0, "order", epoch), n)
        monkeypatch.setattr(torch, "randperm", lambda n, generator=None, order=order: order)
        expected = list(
            timm.data.distributed_sampler.RepeatAugSampler(
                range(n), num_replicas=1, rank=0, num_repeats=3, selected_round=0
            )
        )
        assert len(expected) == n
        steps = feed.steps_per_epoch(size)
        batches = [feed.batch(epoch * steps + i, size, 3) for i in range(steps)]
        ids = torch.cat([batch.id_B for batch in batches])
        assert [place[i] for i in (ids & 0xFFFFFFFF).tolist()] == expected[: steps * size]
        assert (ids >> 32).tolist() == [i % 3 for i in range(steps * size)]
        for batch in batches:
            rows = torch.tensor([place[i] for i in (batch.id_B & 0xFFFFFFFF).tolist()])
            assert torch.equal(batch.y_B, data.train.y_N[rows])


def test_repeats_are_augmented_differently_and_first_is_unchanged() -> None:
    data = prepare(DATA, SEEDS)
    feed = Feed(data, [{"type": "crop", "padding": 4}, "erasing"], SEEDS)
    once, thrice = feed.batch(0, 20), feed.batch(0, 60, 3)
    assert torch.equal(thrice.id_B.view(20, 3)[:, 0], once.id_B)
    images = thrice.x_BCHW.view(20, 3, *thrice.x_BCHW.shape[1:])
    assert torch.equal(images[:, 0], once.x_BCHW)
    pairs = torch.stack([(images[:, i] - images[:, j]).flatten(1).abs().amax(1) for i, j in ((0, 1), (0, 2), (1, 2))])
    assert (pairs > 1e-3).all(0).float().mean() > 0.8
    again = Feed(data, [{"type": "crop", "padding": 4}, "erasing"], SEEDS).batch(0, 60, 3)
    assert torch.equal(again.x_BCHW, thrice.x_BCHW)


def test_repeats_of_batch_larger_than_data() -> None:
    data = prepare(DATA, SEEDS)
    batch = Feed(data, [], SEEDS).batch(1, 500, 3)
    assert len(batch.y_B) == len(data.train) and len(set((batch.id_B & 0xFFFFFFFF).tolist())) == len(data.train) // 3
    assert batch.epoch == 1


def test_repeats_draw_different_dropout_and_resume_equals_uninterrupted() -> None:
    assert_same_after_a_stop(spec(repeats=3))
    once, _ = run(spec(repeats=1, evaluations=12))
    default, _ = run(spec(evaluations=12))
    thrice, _ = run(spec(repeats=3, evaluations=12))
    assert once is not None and default is not None and thrice is not None
    assert once.history == default.history != thrice.history
    assert thrice.images == once.images, "an epoch is as long as without"


# -- recipes ----------------------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[1] / "docs" / "pages" / "guides" / "recipes.md").read_text(encoding="utf-8")
RECIPES = [
    parse_document(text, "recipes.md").data
    for text in re.findall(r"```yaml\n(.*?)```", PAGE.partition("## Without labels")[0], re.S)
]


def test_page_has_recipes_and_levels() -> None:
    whole, optimizers = [["data", "model", "train"]] * 2, [["train"]] * 2
    assert [sorted(recipe["base"]) for recipe in RECIPES] == [*whole, *optimizers, ["data"]]
    assert [name for recipe in RECIPES for name in recipe if name != "base"] == ["design"]


@pytest.mark.parametrize("recipe", [each["base"] for each in RECIPES[:2]], ids=["deit", "deit3"])
def test_recipe_is_valid_and_trains(recipe: dict[str, Any]) -> None:
    data = {**DATA, "num_channels": 3, "augment": recipe["data"]["augment"]}
    model = {**MODEL, **recipe["model"]}
    section = resolve_section({**recipe["train"], "steps": None}, data, model)
    assert not section.incompatibility
    options = {**recipe["train"], "epochs": None, "steps": 3, "batch_size": 20, "evaluations": 1}
    prepared = prepare(data, SEEDS)
    built_model: Model = slot("model").build(model, prepared.info)
    built_model.initialise(0)
    trained = train(built_model, Feed(prepared, data["augment"], SEEDS), TrainSpec.model_validate(options), SEEDS)
    assert trained is not None and trained.metrics["train/loss"] > 0


def test_augreg_levels_equal_paper(tmp_path: Path) -> None:
    base = {"data": {**DATA, "augment": ["random_resized_crop", "flip"]}, "model": MODEL, "train": {"steps": 2}}
    file = tmp_path / "levels.yaml"
    file.write_text(json.dumps({"study": "levels", "base": base, "seeds": 1, "design": RECIPES[-1]["design"]}))
    plan = lab.plan_study(file, out=tmp_path)[1]
    levels = {}
    for planned in plan.trials:
        augment = planned.trial.spec.plain()["data"]["augment"][2:]
        strength = (augment[0]["num_ops"], augment[0]["magnitude"]) if augment else None
        levels[planned.arm] = (strength, planned.trial.spec.plain()["train"].get("mix", {}).get("mixup", 0))
    assert levels == {
        "none": (None, 0),
        "light1": ((2, 0), 0),
        "light2": ((2, 10), 0.2),
        "medium1": ((2, 15), 0.2),
        "medium2": ((2, 15), 0.5),
        "strong1": ((2, 20), 0.5),
        "strong2": ((2, 20), 0.8),
    }


def test_trial_with_all_options_resumes_and_keeps_evaluations(tmp_path: Path) -> None:
    everything = {"mix": BOTH, "ema": {"decay": 0.9}, "layer_decay": 0.8, "repeats": 3, "evaluations": 3}
    data = {**DATA, "augment": ["flip", {"type": "erasing", "p": 1.0}]}
    train_spec = spec(**everything).model_dump(mode="json", exclude_none=True)
    options = {"data": data, "model": MODEL, "train": train_spec}
    trial = Trial(TrialSpec.model_validate(options), SEEDS, (), None, key="key")
    whole = run_trial(trial, TrialFolder(tmp_path / "whole"), Settings(device="cpu"))
    folder, calls = TrialFolder(tmp_path / "parts"), iter(range(100))
    assert run_trial(trial, folder, Settings(device="cpu"), stop=lambda: next(calls) == 7) is None
    parts = run_trial(trial, folder, Settings(device="cpu"))
    assert whole is not None and parts is not None and parts.circumstances.attempts == 2
    assert whole.outcome == parts.outcome and whole.outcome.weights
    prepared = prepare(data, SEEDS)
    model, _ = load_model(folder)
    for split in ("val", "test"):
        metrics = Training(model, Feed(prepared, [], SEEDS), spec(), SEEDS).evaluate(split).metrics
        assert metrics["loss"] == whole.outcome.metrics[f"{split}/loss"]
