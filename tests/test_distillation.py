"""Tests of distillation: losses against formulas, timm and torchvision; teachers in plans, runs and kills."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import warm
import yaml
from click.testing import CliRunner
from job_helpers import alive, run_trial, until
from torch import Tensor, nn
from trainings import train

import vitlab
from vitlab import report
from vitlab.cli.plan import plan_command as command
from vitlab.data.torchvision_import import torchvision
from vitlab.errors import SpecError, WeightsError
from vitlab.geometry import DataInfo
from vitlab.identity.code import modules_of_spec, trial_code_digest
from vitlab.lab import Answer, plan_study
from vitlab.models.trained import InputSpec
from vitlab.planning import sources
from vitlab.planning.values import Plan
from vitlab.registry import OPTIONAL_MODULES, slot
from vitlab.runner.job import Settings
from vitlab.spec import Choice, Seeds
from vitlab.spec.trial import Distill
from vitlab.store.folders import Store
from vitlab.training.distillation import Distillation, InputAdapter

torchvision()  # timm imports torchvision, whose import may need a workaround
from timm.task import DistillationTeacher, TokenDistillationTask  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_report")
COLOUR = DataInfo(image=(8, 8), channels=3, classes=10, identity=None)
NORMAL = InputSpec(COLOUR, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF = InputSpec(COLOUR, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


class Student(nn.Module):
    """A model with constant logits of every head."""

    def __init__(self, logits_by_head: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.logits = logits_by_head

    def forward(self, x_BCHW: Tensor) -> Mapping[str, Tensor]:
        return self.logits

    def logits_by_head(self, output: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return output


class Fixed(nn.Module):
    """A model with constant logits; as a teacher of ours and of timm's, and as a student of timm's."""

    def __init__(self, *logits: Tensor) -> None:
        super().__init__()
        self.logits = logits
        self.weight = nn.Parameter(torch.zeros((), dtype=logits[0].dtype))
        self.pretrained_cfg = {"mean": NORMAL.mean, "std": NORMAL.std}

    def forward(self, x_BCHW: Tensor) -> Any:
        return self.logits if len(self.logits) > 1 else self.logits[0]

    def logits_by_head(self, output: Tensor) -> dict[str, Tensor]:
        return {"": output}

    def set_distilled_training(self, enable: bool) -> None:
        assert enable


def logits(seed: int, classes: int = 10) -> Tensor:
    return 3 * torch.randn(16, classes, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def log_softmax(z: np.ndarray) -> np.ndarray:
    z = z - z.max(1, keepdims=True)
    return z - np.log(np.exp(z).sum(1, keepdims=True))


X = torch.zeros(16, 3, 8, 8, dtype=torch.float64)
TARGET = torch.arange(16) % 10


def value(how: Mapping[str, Any], views: Mapping[str, Tensor], teacher: Tensor, dtype: torch.dtype) -> Any:
    """Return the loss of a batch with a teacher of these logits."""
    model: Any = Fixed(teacher.to(dtype))
    distillation = Distillation(
        Distill.model_validate({"teacher": {"trial": {}}, **how}), model, NORMAL, NORMAL, "fp32"
    )
    loss = slot("loss").build({"type": "cross_entropy", "label_smoothing": 0.1})
    student: Any = Student({name: view.to(dtype) for name, view in views.items()})
    return distillation(loss, student, TARGET, X.to(dtype))


# -- loss -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", ["one", "two"])
@pytest.mark.parametrize(
    "how",
    [
        {"kind": "hard"},
        {"kind": "hard", "alpha": 0.3},
        {"kind": "soft", "alpha": 0.1, "tau": 3.0},
        {"kind": "soft", "alpha": 0.7, "tau": 0.5, "reduction": "batchmean"},
    ],
    ids=str,
)
def test_loss_equals_deit(how: dict[str, Any], head: str) -> None:
    """The reference is equations 2 and 3 of arXiv:2012.12877 in numpy, with the division of its code."""
    cls, dist, teacher = (logits(seed) for seed in range(3))
    views = {"": cls} if head == "one" else {"": (cls + dist) / 2, "cls": cls, "dist": dist}
    student = (cls if head == "one" else dist).numpy()
    wanted_BK = np.full((16, 10), 0.01)
    wanted_BK[np.arange(16), TARGET] += 0.9
    base = -(wanted_BK * log_softmax(cls.numpy())).sum(1).mean()
    if how["kind"] == "hard":
        distilled = -log_softmax(student)[np.arange(16), teacher.numpy().argmax(1)].mean()
    else:
        tau = how["tau"]
        log_s, log_t = log_softmax(student / tau), log_softmax(teacher.numpy() / tau)
        count = 16 if how.get("reduction") == "batchmean" else 160
        distilled = (np.exp(log_t) * (log_t - log_s)).sum() * tau**2 / count
    alpha = how.get("alpha", 0.5)
    loss_value = value(how, views, teacher, torch.float64)
    assert float(loss_value.total) == pytest.approx((1 - alpha) * base + alpha * distilled, rel=1e-12)
    assert float(loss_value.parts["loss_base"]) == pytest.approx(base, rel=1e-12)
    assert float(loss_value.parts["loss_distillation"]) == pytest.approx(distilled, rel=1e-12)
    narrow = value(how, views, teacher, torch.float32)
    assert float(narrow.total) == pytest.approx(float(loss_value.total), rel=1e-5)


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_loss_equals_timm(kind: Any) -> None:
    cls, dist, teacher = (logits(seed) for seed in range(3))
    task = TokenDistillationTask(
        Fixed(cls, dist),
        DistillationTeacher(Fixed(teacher)),
        criterion=nn.CrossEntropyLoss(label_smoothing=0.1),
        distill_type=kind,
        task_loss_weight=0.4,
        temperature=2.5,
        dtype=torch.float64,
        verbose=False,
    )
    theirs = task(X, TARGET)
    how = {"kind": kind, "alpha": 0.6, "tau": 2.5, "reduction": "batchmean"}
    ours = value(how, {"": (cls + dist) / 2, "cls": cls, "dist": dist}, teacher, torch.float64)
    assert float(ours.total) == pytest.approx(float(theirs["loss"]), abs=1e-6, rel=1e-9)
    assert float(ours.parts["loss_distillation"]) == pytest.approx(float(theirs["distill_loss"]), abs=1e-6, rel=1e-9)


def test_teacher_is_frozen_and_other_classes_are_refused() -> None:
    teacher = slot("model").build({"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2}, COLOUR)
    how = Distill.model_validate({"teacher": {"trial": {}}})
    seven = InputSpec(DataInfo(image=(8, 8), channels=3, classes=7, identity=None), NORMAL.mean, NORMAL.std)
    with pytest.raises(WeightsError, match="has 10 classes and this trial has 7"):
        Distillation(how, teacher, NORMAL, seven, "fp32")
    x_BCHW = torch.randn(3, 3, 8, 8)
    reader = Distillation(how, teacher, HALF, NORMAL, "fp32")
    assert reader.teacher is not None
    assert not reader.teacher(reader.adapter(x_BCHW))[0][""].requires_grad and not teacher.training


def test_target_labels_trains_both_heads_on_labels() -> None:
    cls, dist = logits(0), logits(1)
    how = Distill(kind="labels", alpha=0.3)
    smooth = slot("loss").build({"type": "cross_entropy", "label_smoothing": 0.1})
    views = {"": (cls + dist) / 2, "cls": cls, "dist": dist}
    student: Any = Student(views)
    loss_value = Distillation(how, None, NORMAL, NORMAL, "fp32")(smooth, student, TARGET, X)
    reference = nn.CrossEntropyLoss(label_smoothing=0.1)
    assert float(loss_value.total) == pytest.approx(
        0.7 * float(reference(cls, TARGET)) + 0.3 * float(reference(dist, TARGET))
    )


# -- teacher input ----------------------------------------------------------------------------------------------------


def sight(channels: int, size: int, mean: float, std: float) -> InputSpec:
    """Return an input spec with a different mean and deviation in each channel."""
    info = DataInfo(image=(size, size), channels=channels, classes=10, identity=None)
    return InputSpec(
        info, tuple(mean + 0.05 * c for c in range(channels)), tuple(std + 0.03 * c for c in range(channels))
    )


@pytest.mark.parametrize("channels", [(3, 3), (1, 1), (1, 3), (3, 1)], ids=str)
@pytest.mark.parametrize("size", [12, 8, 5])
def test_teacher_input_equals_torchvision_transform(channels: tuple[int, int], size: int) -> None:
    transforms = torchvision("torchvision.transforms.v2.functional")
    mine, theirs = sight(channels[0], 8, 0.4, 0.2), sight(channels[1], size, 0.5, 0.3)
    pixels = torch.rand(4, channels[0], 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    teacher_pixels = transforms.normalize(pixels, list(mine.mean), list(mine.std))
    if channels == (1, 3):
        pixels = transforms.grayscale_to_rgb(pixels)
    elif channels == (3, 1):
        red, green, blue = pixels.unbind(1)
        pixels = (0.299 * red + 0.587 * green + 0.114 * blue)[:, None]  # torchvision rounds them to 0.2989 and 0.110
    expected = transforms.normalize(
        transforms.resize(pixels, [size, size], antialias=True), list(theirs.mean), list(theirs.std)
    )
    prepared = InputAdapter(mine, theirs, like=teacher_pixels)(teacher_pixels)
    torch.testing.assert_close(prepared, expected, rtol=0, atol=1e-12)
    narrow = InputAdapter(mine, theirs, like=teacher_pixels.float())(teacher_pixels.float())
    torch.testing.assert_close(narrow.double(), expected, rtol=0, atol=1e-5)


def test_teacher_with_same_input_gets_same_batch() -> None:
    x_BCHW = torch.randn(2, 3, 8, 8)
    assert InputAdapter(NORMAL, NORMAL, like=x_BCHW)(x_BCHW) is x_BCHW
    with pytest.raises(WeightsError, match="of 3 channels, and this trial's images have 4"):
        InputAdapter(sight(4, 8, 0.5, 0.2), NORMAL, like=x_BCHW)


# -- studies ----------------------------------------------------------------------------------------------------------

TRAIN = {"steps": 6, "batch_size": 16, "evaluations": 2}
VIT = {"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2, "position": "sinusoidal"}
DISTILLED = {**VIT, "prefix": ["class", "distillation"], "head": "distilled"}
CONVNET = {"type": "resnet8", "width_factor": 0.25}
TEACHER = {"data": {"type": "digits"}, "model": CONVNET, "train": {**TRAIN, "steps": 8}}


def trials(store: Path) -> dict[str, bytes]:
    """Return the content of every trial of a store, by its folder."""
    return {str(file.parent.relative_to(store)): file.read_bytes() for file in store.glob("trials/*/*/result.json")}


def study(folder: Path, name: str = "taught", **changes: Any) -> Path:
    """Write a study: a student with a distillation token of a convnet, in two kinds, and two seeds."""
    content = {
        "study": name,
        "base": {
            "data": {"type": "digits"},
            "model": DISTILLED,
            "train": TRAIN,
            "distill": {"teacher": {"trial": TEACHER}, "kind": "hard"},
        },
        "design": {"one_at_a_time": {"distill.kind": ["soft"]}},
        "seeds": 2,
        "run": {"executor": "inline", "tracker": "none"},
        **changes,
    }
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(copy.deepcopy(content), sort_keys=False))
    return file


def base(**changes: Any) -> dict[str, Any]:
    """Return the base of :func:`study`, with changes below ``distill``."""
    distill = {"teacher": {"trial": TEACHER}, "kind": "hard", **changes}
    return {"data": {"type": "digits"}, "model": DISTILLED, "train": TRAIN, "distill": distill}


def planned(folder: Path, **changes: Any) -> Plan:
    return plan_study(study(folder, **changes), out=folder / "out")[1]


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Answer:
    folder = tmp_path_factory.mktemp("taught")
    return vitlab.run(study(folder), out=folder / "out")


@pytest.mark.slow
def test_teacher_is_trained_once_per_seed_and_shared_by_arms(taught: Answer) -> None:
    assert (taught.trained, taught.cached, taught.failed) == (6, 0, 0), "two teachers and four students"
    plan, store = taught.plan, taught.store
    teachers = {f"{trial.key}/{trial.code}": trial for trial in plan.prerequisites}
    assert len(teachers) == 2 and {trial.seeds["init"] for trial in teachers.values()} == {0, 1}
    for item in plan.trials:
        teacher = teachers[item.trial.needs["teacher"]]
        assert teacher.seeds == item.trial.seeds and teacher.seeds["init"] == item.seed
        began, end = (store.trial(t.key, t.code).result().circumstances.started for t in (item.trial, teacher))
        assert end < began
    frame = taught.results()
    assert len(frame) == 4 and (frame["status"] == "done").all()
    notes = json.loads((taught.folder / "report" / "report.json").read_text())["notes"]
    assert not any("teacher" in note for note in notes), "each seed has its own"


def test_journal_records_both_heads_losses_and_tokens(taught: Answer) -> None:
    store = taught.store
    for item in taught.plan.trials:
        events = store.trial(item.trial.key, item.trial.code).events()[0]
        measurements = [event.body["metrics"] for event in events if event.kind == "metrics"]
        assert len(measurements) == 2
        for metrics in measurements:
            for view in ("cls", "dist", "logits", "softmax"):
                assert 0 <= metrics[f"val/accuracy_{view}"] <= 1
            both = 0.5 * metrics["train/loss_base"] + 0.5 * metrics["train/loss_distillation"]
            assert metrics["train/loss"] == pytest.approx(both, rel=1e-5)
            assert -1 <= metrics["val/token_cosine"] <= 1
        assert "test/token_cosine" in measurements[-1] and "test/accuracy_dist" in measurements[-1]


def test_cosine_of_tokens_is_a_metric_to_compare_by(tmp_path: Path) -> None:
    analysis = {"metric": "val/token_cosine"}
    assert planned(tmp_path, analysis=analysis).analysis.metric == "val/token_cosine"
    control = {**base(), "model": {**DISTILLED, "prefix": ["distillation"]}}
    with pytest.raises(SpecError, match="no trial reports val/token_cosine"):
        planned(tmp_path, analysis=analysis, base=control)


def test_report_has_table_of_heads(taught: Answer) -> None:
    folder, frame = taught.folder / "report", taught.results()
    rows = json.loads((folder / "report.json").read_text())["heads"]
    views = ("accuracy_cls", "accuracy_dist", "accuracy_logits", "accuracy_softmax", "token_cosine")
    assert [(row["arm"], row["metric"]) for row in rows] == [
        (arm, f"val/{view}") for arm in ("baseline", "kind=soft") for view in views
    ]
    for row in rows:
        values = frame.loc[frame["arm"] == row["arm"], row["metric"]]
        assert (row["mean"], row["sd"]) == pytest.approx((values.mean(), values.std(ddof=1)))
    assert "## Further metrics" in (folder / "report.md").read_text()
    assert re.search(r"<h2[^>]*>Further metrics</h2>", (folder / "report.html").read_text())


def test_teacher_kinds_are_compared_from_three_trainings_on(tmp_path: Path) -> None:
    from vitlab.comparison.study import refusals_by_arm

    other = {"one_at_a_time": {"distill.teacher.trial.model": [VIT]}}
    (reason,) = refusals_by_arm(planned(tmp_path, design=other, seeds=2)).values()
    assert "differ by their teacher, of which 2 trainings stand behind an arm: fewer than 3" in reason
    assert refusals_by_arm(planned(tmp_path, design=other, seeds=3)) == {}
    assert refusals_by_arm(planned(tmp_path, seeds=2)) == {}, "of one and the same two teachers"


def test_token_cosine_equals_trained_model(taught: Answer) -> None:
    from vitlab.data.prepare import prepare

    model, transform = vitlab.load(taught.folder, arm="kind=soft", seed=1)
    trial = taught.plan.find("kind=soft", 1).trial
    test = prepare(slot("dataset").resolve_choice(trial.spec.data), trial.seeds).test
    with torch.no_grad():
        x_BTD = model.forward_features(transform(test.x_NCHW))
    first, second = x_BTD[:, 0].double().numpy(), x_BTD[:, 1].double().numpy()
    cosine = (first * second).sum(1) / np.linalg.norm(first, axis=1) / np.linalg.norm(second, axis=1)
    row = taught.results().set_index(["arm", "seed"]).loc[("kind=soft", 1)]
    assert row["test/token_cosine"] == pytest.approx(cosine.mean(), abs=1e-5)


def test_teacher_stays_fixed_and_student_learns_its_outputs(tmp_path: Path) -> None:
    """Its batch norm stays fixed too, and a student trained on the teacher alone comes to agree with it."""
    from vitlab.data.prepare import Feed, prepare
    from vitlab.spec import STREAMS, TrainSpec

    seeds = dict.fromkeys(STREAMS, 0)
    prepared = prepare(slot("dataset").resolve_choice("digits"), seeds)
    teacher = slot("model").build(CONVNET, prepared.info)
    teacher.initialise(5)
    teacher.train()(torch.randn(64, 1, 8, 8))  # so that its statistics are meaningful
    before = copy.deepcopy(teacher.state_dict())
    mine = InputSpec(prepared.info, prepared.mean, prepared.std)
    how = Distill.model_validate({"teacher": {"trial": {}}, "kind": "soft", "alpha": 1.0, "reduction": "batchmean"})
    distillation = Distillation(how, teacher, mine, mine, "fp32")
    student = slot("model").build({**DISTILLED, "dim": 16}, prepared.info)
    student.initialise(0)
    spec = TrainSpec.model_validate(
        {"steps": 60, "batch_size": 32, "evaluations": 6, "optimizer": {"type": "adamw", "lr": 0.01}}
    )
    trained = train(
        student, Feed(prepared, [], seeds, torch.device("cpu"), torch.float32), spec, seeds, distillation=distillation
    )
    assert trained is not None
    assert all(torch.equal(teacher.state_dict()[name], value) for name, value in before.items())
    assert not teacher.training
    far = [moment.metrics["train/loss_distillation"] for moment in trained.history]
    assert far[-1] < 0.5 * far[0]


def test_second_study_reuses_teacher(taught: Answer, tmp_path: Path) -> None:
    """As a prerequisite and, in the study of convnets, as an arm."""
    out = tmp_path / "out"
    shutil.copytree(taught.store.root, out)
    before = trials(out)
    other = study(tmp_path, "other", base={**base(alpha=0.9), "model": VIT}, design=None, seeds=2)
    answer = vitlab.run(other, out=out)
    assert (answer.trained, answer.cached) == (2, 2) and before.items() <= trials(out).items()
    convnets = study(tmp_path, "convnets", base=TEACHER, design=None, seeds=2)
    answer = vitlab.run(convnets, out=out)
    assert (answer.trained, answer.cached) == (0, 2)


@pytest.mark.slow
def test_distillation_code_is_only_in_digest_of_students(taught: Answer, tmp_path: Path) -> None:
    shutil.copytree(Path(vitlab.__file__).parent, tmp_path / "vitlab")
    assert OPTIONAL_MODULES["distillation"] == "vitlab.training.distillation"
    with (tmp_path / "vitlab" / "training" / "distillation.py").open("a") as stream:
        stream.write("\nCHANGED = True\n")
    student, teacher = taught.plan.trials[0].trial, taught.plan.prerequisites[0]
    keys = [[trial.spec.plain(), trial.needs] for trial in (student, teacher)]
    code = (
        "import json; from vitlab.identity.code import trial_code_digest, modules_of_spec; from vitlab.spec import TrialSpec; "
        f"print(*[trial_code_digest(modules_of_spec(TrialSpec.model_validate(spec)), needs) for spec, needs in json.loads({json.dumps(keys)!r})])"
    )
    done = warm.python(code, tmp_path, os.environ)  # it finds the copy in its folder
    assert done.returncode == 0, done.stderr
    assert [trial_code_digest(modules_of_spec(trial.spec), trial.needs) for trial in (student, teacher)] == [
        student.code,
        teacher.code,
    ]
    theirs, its = done.stdout.split()
    assert theirs != student.code and its == teacher.code


@pytest.mark.slow
def test_driver_killed_between_teacher_and_student_loses_nothing(tmp_path: Path) -> None:
    """SIGKILL after a teacher has ended and during a student; then the same command again."""
    slow = {**base(), "train": {"steps": 100, "batch_size": 16, "evaluations": 10}}
    file, out = study(tmp_path, base=slow, design=None, seeds=1), tmp_path / "out"
    words = ["vitlab", "run", str(file), "--out", str(out)]
    code = f"import sys; sys.argv = {words!r}; from vitlab.cli import main; main()"
    driver = warm.start(code, tmp_path, {**os.environ, "OMP_NUM_THREADS": "1"})
    (teacher,) = plan_study(file, out=out)[1].prerequisites
    patience = time.monotonic() + 120
    while alive(driver) and time.monotonic() < patience:
        journals = [journal for journal in out.glob("trials/*/*/events.jsonl") if '"metrics"' in journal.read_text()]
        if trials(out) and any(teacher.key not in str(journal) for journal in journals):
            break
        time.sleep(0.01)
    os.kill(driver, signal.SIGKILL)
    until(lambda: not alive(driver))
    final = trials(out)
    assert len(final) == 1 and teacher.key in next(iter(final)), "it ended before it could be killed"

    again = vitlab.run(file, out=out)
    assert (again.trained, again.failed) == (1, 0), "the student alone"
    assert final.items() <= trials(out).items() and len(trials(out)) == 2
    folder = Store(out).trial(teacher.key, teacher.code)
    assert sum(event.kind == "start" for event in folder.events()[0]) == 1
    student, elsewhere = again.plan.trials[0].trial, Store(tmp_path / "undisturbed")
    shutil.copytree(folder.path, elsewhere.trial(teacher.key, teacher.code).path)
    undisturbed = run_trial(student, elsewhere.trial(student.key, student.code), Settings(device="cpu"))
    killed = Store(out).trial(student.key, student.code).result()
    assert undisturbed is not None and killed is not None and killed.outcome == undisturbed.outcome


# -- teachers in files ------------------------------------------------------------------------------------------------


def test_teacher_from_timm_file(tmp_path: Path) -> None:
    """The teacher's logits equal timm's, with its own normalisation and size."""
    import timm

    torch.manual_seed(0)
    theirs = timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2, num_classes=10
    ).eval()
    file = tmp_path / "teacher.pth"
    torch.save(theirs.state_dict(), file)
    taught = base(teacher={"checkpoint": str(file), "heads": 2}, kind="soft", reduction="batchmean")
    path = study(tmp_path, base=taught, design=None, seeds=1)
    answer = vitlab.run(path, out=tmp_path / "out", changes={"train.steps": 1})
    trial = answer.plan.trials[0].trial
    assert not answer.plan.prerequisites and trial.spec.plain()["distill"]["teacher"]["checkpoint"] == str(file)

    from vitlab.data.prepare import Feed, prepare

    prepared = prepare(slot("dataset").resolve_choice(trial.spec.data), trial.seeds)
    batch = Feed(prepared, [], trial.seeds, torch.device("cpu"), torch.float32).batch(0, 16)
    pixels = (batch.x_BCHW * prepared.std[0] + prepared.mean[0]).expand(-1, 3, -1, -1)
    transforms = torchvision("torchvision.transforms.v2.functional")
    pixels_in = (transforms.resize(pixels, [16, 16], antialias=True) - 0.5) / 0.5
    student = slot("model").build(trial.spec.model, prepared.info)
    student.initialise(0)
    with torch.no_grad():
        said_BK = theirs(pixels_in).double().numpy()
        dist_BK = student(batch.x_BCHW).dist.double().numpy()
    log_t, log_s = log_softmax(said_BK), log_softmax(dist_BK)
    row = answer.results().iloc[0]
    assert row["train/loss_distillation"] == pytest.approx((np.exp(log_t) * (log_t - log_s)).sum() / 16, rel=1e-3)

    (note,) = [note for note in answer.plan.notes if "Validation seen by teacher" in note]
    assert "'baseline'" in note and "teacher.pth" in note
    assert note in json.loads(str(report.render(answer.plan, answer.store, "json")))["notes"]
    printed = CliRunner().invoke(command, [str(path), "--out", str(tmp_path / "out")])
    assert printed.exit_code == 0 and "Validation seen by teacher" in " ".join(printed.output.split())


def open_teacher(folder: Path, state: Any, **said: Any) -> Any:
    from vitlab.weights.architecture import ModelFacts
    from vitlab.weights.opening import open_model

    torch.save(state, folder / "teacher.pth")
    return open_model(folder / "teacher.pth", facts=ModelFacts(**said))


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_resnet_teacher_from_torchvision_file(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = getattr(torchvision("torchvision.models"), name)(num_classes=7, width_per_group=64).eval()
    model = open_teacher(tmp_path, theirs.state_dict())
    assert (model.info.image, model.info.channels, model.info.classes) == ((224, 224), 3, 7)
    assert (model.mean, model.std) == (NORMAL.mean, NORMAL.std) and len(model.notes) == 2
    x_BCHW = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(model.model(x_BCHW).logits, theirs(x_BCHW), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_regnet_of_deit_can_teach(tmp_path: Path) -> None:
    """In the layout of its file: timm's names, under 'model'."""
    import timm

    torch.manual_seed(0)
    theirs = timm.create_model("regnety_160", num_classes=5).eval()
    model = open_teacher(tmp_path, {"model": theirs.state_dict()}, image=(96, 96))
    x_BCHW = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(model.model(x_BCHW).logits, theirs(x_BCHW), rtol=1e-4, atol=1e-5)
    assert model.info.image == (96, 96)


def test_unsuitable_convnets_are_refused_as_teachers(tmp_path: Path) -> None:
    models = torchvision("torchvision.models")
    small = slot("model").build(CONVNET, COLOUR).state_dict()
    with pytest.raises(WeightsError, match="does not state the size of its images; set 'size' of the teacher"):
        open_teacher(tmp_path, small)
    assert open_teacher(tmp_path, small, image=(8, 8)).info.image == (8, 8)
    grey = slot("model").build(CONVNET, DataInfo(image=(8, 8), channels=1, classes=10, identity=None)).state_dict()
    with pytest.raises(WeightsError, match="does not state how its images of 1 channels were normalised"):
        open_teacher(tmp_path, grey, image=(8, 8))
    state = models.resnet18(num_classes=3).state_dict()
    with pytest.raises(WeightsError, match="no classifier"):
        open_teacher(tmp_path, {name: value for name, value in state.items() if not name.startswith("fc.")})
    with pytest.raises(WeightsError, match=r"teacher.pth: these are not the weights of a ResNet18: layer1.0.bn1.bias"):
        open_teacher(tmp_path, {name: value for name, value in state.items() if name != "layer1.0.bn1.bias"})
    with pytest.raises(WeightsError, match="of 3 \\+ 4 \\+ 6 \\+ 3 blocks is not supported"):
        open_teacher(tmp_path, models.resnet34(num_classes=3).state_dict())


def test_resnet_file_teaches(tmp_path: Path) -> None:
    torch.save(slot("model").build(CONVNET, COLOUR).state_dict(), tmp_path / "teacher.pth")
    taught = base(teacher={"checkpoint": str(tmp_path / "teacher.pth"), "size": 12})
    answer = vitlab.run(study(tmp_path, base=taught, design=None, seeds=1), out=tmp_path / "out")
    assert (answer.results()["status"] == "done").all()


RESNET18 = "ResNet18_Weights.IMAGENET1K_V1"


def test_published_torchvision_weights_teach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read from torch's cache, under the name of the published file, without network."""
    from vitlab.weights import opening
    from vitlab.weights.opening import open_torchvision_weights

    monkeypatch.setattr(opening, "_torchvision_weights", opening._torchvision_weights.__wrapped__)
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    models = torchvision("torchvision.models")
    (tmp_path / "checkpoints").mkdir()
    file = tmp_path / "checkpoints" / "resnet18-f37072fd.pth"
    torch.save(models.resnet18().state_dict(), file)
    theirs = models.resnet18(weights=RESNET18.partition(".")[2]).eval()
    with pytest.raises(
        WeightsError, match=r"resnet18-f37072fd\.pth is not the expected file: .* expected is one with f37072fd"
    ):
        open_torchvision_weights(RESNET18, planned=None)
    published = hashlib.sha256(file.read_bytes()).hexdigest()[:8]
    file = file.rename(file.with_name(f"resnet18-{published}.pth"))
    weights = models.get_weight(RESNET18)
    ours = SimpleNamespace(url=f"https://host/{file.name}", transforms=weights.transforms, meta=weights.meta)
    get_weight = models.get_weight
    monkeypatch.setattr(models, "get_weight", lambda name: ours if name == RESNET18 else get_weight(name))
    model = open_torchvision_weights(RESNET18, planned=None)
    x_BCHW = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(model.model(x_BCHW).logits, theirs(x_BCHW), rtol=1e-4, atol=1e-4)
    sees = weights.transforms()
    assert (list(model.mean), list(model.std), model.info.image) == (sees.mean, sees.std, (224, 224))
    assert model.info.labels[:2] == ("tench", "goldfish") and model.info.classes == 1000

    with pytest.raises(WeightsError, match=r"no weights called 'ResNet18_Weights.IMAGENET1K_V7'.*IMAGENET1K_V1"):
        open_torchvision_weights("ResNet18_Weights.IMAGENET1K_V7", planned=None)

    def no_network(url: str, **_: Any) -> None:
        raise OSError("the network is unreachable")

    monkeypatch.setattr(sys.modules["torchvision.models._api"], "load_state_dict_from_url", no_network)
    with pytest.raises(
        WeightsError, match=r"put https://.*regnet_y_16gf.*\.pth at .*checkpoints.* by hand: the network"
    ):
        open_torchvision_weights("RegNet_Y_16GF_Weights.IMAGENET1K_V2", planned=None)


def test_plan_with_published_weights_downloads_nothing(tmp_path: Path) -> None:
    from torchvision.models import ResNet18_Weights

    from vitlab.weights.opening import open_torchvision_weights

    data = {"type": "synthetic", "num_classes": 1000}
    taught = {**base(teacher={"pretrained": RESNET18}), "data": data}
    plan = planned(tmp_path, base=taught, design=None)
    assert any("Validation seen by teacher" in note and RESNET18 in note for note in plan.notes)
    digest = ResNet18_Weights.IMAGENET1K_V1.url.rpartition("-")[2].removesuffix(".pth")
    assert plan.trials[0].trial.files == {"teacher": {RESNET18: digest}}
    with pytest.raises(WeightsError, match=f"publishes other weights .*{digest}.* than the plan names .0123abcd"):
        open_torchvision_weights(RESNET18, "0123abcd")
    other = planned(
        tmp_path, base={**base(teacher={"pretrained": "ResNet50_Weights.IMAGENET1K_V2"}), "data": data}, design=None
    )
    assert plan.trials[0].trial.key != other.trials[0].trial.key
    with pytest.raises(SpecError, match=r"no weights called 'ResNet18_Weights.IMAGENET1K_V7'.*IMAGENET1K_V1"):
        planned(tmp_path, base=base(teacher={"pretrained": RESNET18.replace("V1", "V7")}), design=None)
    with pytest.raises(SpecError, match="DEFAULT depends on the version of torchvision"):
        planned(tmp_path, base=base(teacher={"pretrained": "ResNet18_Weights.DEFAULT"}), design=None)
    with pytest.raises(SpecError, match="exactly one of checkpoint, trial, pretrained, timm, hub"):
        planned(tmp_path, base=base(teacher={}), design=None)


def test_plan_with_published_weights_is_refused_without_torchvision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vitlab.weights import opening

    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'torchvision'")

    monkeypatch.setattr(opening, "_torchvision_weights", missing)
    with pytest.raises(SpecError, match="No module named 'torchvision'"):
        planned(tmp_path, base=base(teacher={"pretrained": RESNET18}), design=None)


def test_trial_weight_file_has_known_split(taught: Answer, tmp_path: Path) -> None:
    teacher = taught.plan.prerequisites[0]
    file = taught.store.trial(teacher.key, teacher.code).weights_file
    by_file = base(teacher={"checkpoint": str(file)})

    def messages_of(**changes: Any) -> list[str]:
        return [note for note in planned(tmp_path, base=by_file, **changes).notes if "seen by teacher" in note]

    assert messages_of() == [], "the validation images were held out from it, too"
    (note,) = messages_of(seeds={"count": 2, "vary": ["split"]})
    assert "was trained on another split of digits" in note
    answer = vitlab.run(study(tmp_path, base=by_file, design=None, seeds=1), out=tmp_path / "out")
    first = taught.results().set_index(["arm", "seed"]).loc[("baseline", teacher.seeds["init"])]
    again = answer.results().iloc[0]
    if teacher.seeds["init"] == 0:
        assert again["test/loss"] == first["test/loss"], "by file or by trial, it is the same teacher"


def test_split_search_ends_for_cycles_and_foreign_files(taught: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Foreign specs may have such prerequisites."""
    teacher = taught.plan.prerequisites[0]
    trial: Any = SimpleNamespace(spec=SimpleNamespace(data=Choice("synthetic")), info=SimpleNamespace(content="other"))
    for file, dependency in (("/out/trials/a/c/w.safetensors", "a/c"), ("/w.safetensors", "b/c")):
        spec = {**teacher.to_json(), "needs": {"init_from": dependency}}
        monkeypatch.setattr(sources, "read_json", lambda path, spec=spec: spec)
        assert sources._find_validation_leak(Path(file), trial, Seeds()) == ""
    around = {"a": "b/c", "b": "a/c"}
    monkeypatch.setattr(
        sources, "read_json", lambda path: {**teacher.to_json(), "needs": {"teacher": around[path.parts[3]]}}
    )
    assert sources._find_validation_leak(Path("/out/trials/a/c/w.safetensors"), trial, Seeds()) == ""


# -- plans ------------------------------------------------------------------------------------------------------------


def test_teacher_has_split_of_student(tmp_path: Path) -> None:
    """For any own seed; otherwise it would be trained on the student's validation images."""
    plan = planned(tmp_path, seeds={"count": 2, "vary": ["init", "split"]})
    teachers = {f"{trial.key}/{trial.code}": trial for trial in plan.prerequisites}
    assert all(
        teachers[i.trial.needs["teacher"]].seeds["split"] == i.seed == i.trial.seeds["split"] for i in plan.trials
    )
    fixed = base()
    fixed["distill"]["teacher"]["seed"] = 7
    plan = planned(tmp_path, base=fixed, seeds={"count": 2, "vary": ["init", "split"]})
    assert sorted(trial.seeds["split"] for trial in plan.prerequisites) == [0, 1]
    assert {trial.seeds["init"] for trial in plan.prerequisites} == {7}


def test_unread_teacher_options_do_not_change_trial(tmp_path: Path) -> None:
    hard = planned(
        tmp_path,
        design={"one_at_a_time": {"distill.tau": [2.0], "distill.reduction": ["batchmean"], "distill.kind": ["soft"]}},
    )
    assert [arm.name for arm in hard.arms] == ["baseline", "kind=soft"] and len(hard.arms[0].aliases) == 2
    soft = planned(
        tmp_path,
        base=base(kind="soft"),
        design={"one_at_a_time": {"distill.tau": [2.0], "distill.reduction": ["batchmean"], "distill.alpha": [0.1]}},
    )
    assert len(soft.arms) == 4


def test_arms_may_be_named_by_kind(tmp_path: Path) -> None:
    """``none`` is the trial without distillation, and ``labels`` has no teacher."""
    kinds = {"one_at_a_time": {"distill.kind": ["none", "labels", "soft"]}}
    plan = planned(tmp_path, design=kinds, seeds=1)
    by_arm = {item.arm: item.trial for item in plan.trials}
    assert len(by_arm) == 4
    without, labels = by_arm["kind=none"], by_arm["kind=labels"]
    plain = {name: value for name, value in base().items() if name != "distill"}
    assert planned(tmp_path, base=plain, design=None, seeds=1).trials[0].trial == without
    assert without.spec.distill is None and not without.needs and not labels.needs
    assert labels.code != without.code and labels.key != without.key
    alone = {**base(), "distill": {"kind": "labels", "tau": 3.0}}
    assert planned(tmp_path, base=alone, design=None, seeds=1).trials[0].trial == labels
    with pytest.raises(SpecError, match="kind 'labels' needs a distillation token"):
        planned(tmp_path, base={**alone, "model": VIT}, design=None)
    with pytest.raises(SpecError, match="kind 'soft' needs a teacher"):
        planned(tmp_path, base={**alone, "distill": {"kind": "soft"}}, design=None)


def test_two_tokens_with_one_target_train(tmp_path: Path) -> None:
    answer = vitlab.run(study(tmp_path, base=base(kind="labels"), design=None, seeds=1), out=tmp_path / "out")
    row = answer.results().iloc[0]
    assert (answer.trained, row["status"]) == (1, "done") and -1 <= row["test/token_cosine"] <= 1
    assert row["train/loss"] == pytest.approx((row["train/loss_base"] + row["train/loss_distillation"]) / 2, rel=1e-5)


def test_teacher_without_data_uses_data_of_student(tmp_path: Path) -> None:
    """An arm of other images has a teacher of such images, and one root is used for both."""
    trial = {name: value for name, value in TEACHER.items() if name != "data"}
    inherits = planned(tmp_path, base=base(teacher={"trial": trial}), design={"one_at_a_time": {"data.size": [16]}})
    explicit = planned(tmp_path)
    assert {t.key for t in explicit.prerequisites} < {t.key for t in inherits.prerequisites}
    assert sorted({str(t.spec.plain()["data"]["size"]) for t in inherits.prerequisites}) == ["None", "[16, 16]"]
    with pytest.raises(SpecError) as caught:
        planned(tmp_path, base={**base(teacher={"trial": trial}), "data": {"type": "digit"}}, design=None)
    assert len(caught.value.problems) == 1


def test_explicit_default_validation_share_gives_same_teacher(tmp_path: Path) -> None:
    explicit = {**TEACHER, "data": {"type": "digits", "validation": 0.2}}
    assert len(planned(tmp_path, base=base(teacher={"trial": explicit})).trials) == 4


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"data": {"type": "synthetic", "num_classes": 7}}, "the teacher has 7 classes and this trial has 10"),
        ({"data": {"type": "digits", "validation": 0.1}}, "the teacher's data.validation is 0.1, and here it is 0.2"),
        ({"data": {"type": "digits", "classes": [1, 2, 3]}}, "the teacher has 3 classes and this trial has 10"),
        (
            {"data": {"type": "digits", "classes": [1, 0, 2, 3, 4, 5, 6, 7, 8, 9]}},
            "the teacher learned other classes: 1, 0, 2, 3 and 6 more, and here they are 0, 1, 2, 3",
        ),
        ({"model": {**CONVNET, "width_factor": 0}}, "width_factor"),
        ({"model": {**VIT, "heads": 3}}, "heads 3"),
    ],
    ids=["classes", "validation", "fewer", "order", "option", "geometry"],
)
def test_unsuitable_teacher_is_refused_in_plan(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        planned(tmp_path, base=base(teacher={"trial": {**TEACHER, **changes}}), design=None)
    assert len(caught.value.problems) == 1 and sentence in str(caught.value)


def test_teachers_for_pixels_are_refused(tmp_path: Path) -> None:
    data = {"type": "digit_scenes"}
    taught = {**base(), "data": data, "model": {**VIT, "head": "segmentation"}}
    with pytest.raises(SpecError, match="distill needs classification, and the task of this data is segm"):
        planned(tmp_path, base=taught, design=None)


PIPELINES = Path(__file__).parents[1] / "pipelines"


def test_laptop_study_has_teachers_as_arm() -> None:
    _, plan = plan_study(PIPELINES / "distillation.yaml")
    assert len(plan.arms) == 7 and len(plan.trials) == 35 and not plan.prerequisites
    for item in plan.trials:
        if item.trial.needs:
            teacher = plan.find("teacher", item.seed).trial
            assert item.trial.needs == {"teacher": f"{teacher.key}/{teacher.code}"}
    taught = {item.arm for item in plan.trials if item.trial.needs}
    assert taught == {"soft", "soft per image", "hard", "distillation token"}
    assert {arm.baseline for arm in plan.arms} == {None, "no distillation"}


def test_full_study_compares_kinds_and_teachers_on_same_trials() -> None:
    by = {"analysis.compare": {"to": {"distill.teacher.trial.model": {"type": "resnet18", "stem": "small"}}}}
    (_, kinds), (_, teachers) = (plan_study(PIPELINES / "distillation_full.yaml", changes=c) for c in ({}, by))
    assert {i.trial.key for i in kinds.trials} == {i.trial.key for i in teachers.trials} and len(kinds.trials) == 63
    for arm in kinds.arms:
        size = arm.name.partition(", ")[0]
        assert arm.baseline == (None if "no distillation" in arm.name else f"{size}, no distillation")
    for arm in teachers.arms:
        other = arm.name.replace("transformer", "convnet")
        assert arm.baseline == (other if "transformer" in arm.name else None)
        behind = {dependency for i in teachers.trials if i.arm == arm.name for dependency in i.trial.needs.values()}
        assert len(behind) == (0 if "no distillation" in arm.name else 3)


def test_imagenet_study_plans_without_images_and_teacher() -> None:
    _, plan = plan_study(PIPELINES / "imagenet" / "distillation.yaml")
    assert len(plan.arms) == 8 and not plan.prerequisites
    taught = {i.arm for i in plan.trials if i.trial.spec.distill}
    assert len(taught) == 6 and all(name in "".join(plan.notes) for name in taught)
