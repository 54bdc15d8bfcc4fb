"""TrialSpec: one complete training, as YAML states it under ``base``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from vitlab.spec.choice import Choice, Frozen
from vitlab.spec.collect import conflict

STREAMS = ("init", "order", "augment", "mixup", "dropout", "drop_path", "subset", "split")
"""The streams of randomness of a trial; ``seeds`` says which of them a replicate varies."""

LENGTHS = ("epochs", "steps", "images")
"""The ways to state the length of a training; exactly one is given."""

LONGEST = 1_000_000_000
"""Steps, or epochs, of a training: more are a mistake, and would not end in a lifetime."""


class Mix(Frozen):
    """Training on pairs of images: two overlaid, or a rectangle of one pasted into the other; their labels likewise.

    Reference: arXiv:1710.09412 (mixup), arXiv:1905.04899 (cutmix).
    """

    mixup: Annotated[float, Field(ge=0)] = (
        0.0  #: a of Beta(a, a), from which the weight of an overlay is drawn; 0: none
    )
    cutmix: Annotated[float, Field(ge=0)] = 0.0  #: a of Beta(a, a), the share a rectangle leaves; 0: no rectangles
    prob: Annotated[float, Field(ge=0, le=1)] = 1.0  #: share of the batches that are mixed
    switch: Annotated[float, Field(ge=0, le=1)] = 0.5  #: where there are both, share of the mixed that are cutmix


class Ema(Frozen):
    """An exponential moving average of the weights, which is what is evaluated and kept.

    After step t, counted from 1, the average keeps the share min(decay, 1 - t ** -warmup) of itself.
    """

    decay: Annotated[float, Field(ge=0, lt=1)] = 0.9999
    warmup: Annotated[float, Field(ge=0)] = 2 / 3
    """The initial weights are forgotten at once, and the average grows longer with the training; 1: it is the mean of
    all steps.  0: none, the share is ``decay`` from the first step and the initial weights fade slowly, as in DeiT."""


class TrainSpec(Frozen):
    """How a trial is trained.  Its length is ``epochs``, ``steps`` or ``images``: exactly one."""

    epochs: Annotated[float, Field(gt=0, le=LONGEST)] | None = None
    steps: Annotated[int, Field(ge=0, le=LONGEST)] | None = None
    images: Annotated[int, Field(gt=0, le=1000 * LONGEST)] | None = None
    batch_size: Annotated[int, Field(gt=0)] = 128
    repeats: Annotated[int, Field(ge=1)] = 1
    """How often an image stands in an epoch, one after another and augmented anew, of an epoch as long as with 1: it
    passes through a share 1 / repeats of the images.  Reference: arXiv:1901.09335, arXiv:2012.12877."""
    optimizer: Choice = Choice("adamw")
    schedule: Choice = Choice("cosine")
    loss: Choice = Choice("cross_entropy")
    mix: Mix | None = None
    ema: Ema | None = None
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    """Factor between the learning rates of a layer and the one below it; the head has that of the optimizer."""
    clip_grad: Annotated[float, Field(gt=0)] | None = None  #: largest global norm of the gradient
    precision: Literal["fp32", "bf16", "fp64"] = "fp32"  #: bf16 is autocast over fp32 weights
    evaluations: Annotated[int, Field(ge=1, le=1_000_000)] = 10
    """Evaluations on validation, evenly spaced, the last at the end."""
    metrics: tuple[Choice, ...] = ()  #: what they report beside the metrics that every trial of the task does

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        given = [name for name in LENGTHS if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else "none of them"
            sentence = f"the length of a training is epochs, steps or images, exactly one; found {found}"
            raise conflict(sentence, *LENGTHS)
        return self

    @field_validator("layer_decay")
    @classmethod
    def _equal_rates(cls, value: float | None) -> float | None:
        """A factor of 1 is none."""
        return None if value == 1 else value

    @field_validator("mix")
    @classmethod
    def _nothing_mixed(cls, value: Mix | None) -> Mix | None:
        """What never mixes is no mix, so that an arm that says so is the arm without."""
        return None if value is None or not value.prob or not (value.mixup or value.cutmix) else value


class Source(Frozen):
    """The weights of another model: a checkpoint file of any known format, or another trial, named by its spec."""

    checkpoint: str | None = None
    trial: dict[str, Any] | None = None  #: a complete trial; it is trained once and shared by all who name it
    seed: Literal["same"] | Annotated[int, Field(ge=0)] = "same"  #: of that trial; same pairs replicates one to one

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        kinds = [name for name in ("checkpoint", "trial", "pretrained") if name in type(self).model_fields]
        if sum(getattr(self, name) is not None for name in kinds) != 1:
            raise conflict(f"it names exactly one of {', '.join(kinds)}", *kinds)
        return self


class InitFrom(Source):
    """Weights to start from.

    A trial that trains them on the same data set has the validation split of what starts from it.
    """

    resample: Literal["timm", "google", "deit", "torchvision", "hf"] = "timm"  #: how positions reach another grid
    head: Literal["new", "keep", "fitted"] = "new"
    """A fresh head, the one in the weights, or a fresh one solved for in closed form: with ``train.steps: 0`` that is
    the few-shot linear probe of arXiv:2010.11929, and with more steps, training begins at it."""
    l2: Annotated[float, Field(gt=0)] | None = None
    """Of a fitted head: weight of the sum of its squared weights beside the sum of the squared errors; 1 by default."""
    tokens: Literal["same", "convert"] = "same"
    """Tokens before the patches that only one of the two models has: refused, or left out here and new there."""
    freeze: Literal["nothing", "body"] = "nothing"
    """What is not trained; ``body`` leaves a linear probe, and the body in evaluation mode."""

    @model_validator(mode="before")
    @classmethod
    def _default_l2(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and value.get("head") == "fitted" and value.get("l2") is None:
            return {**value, "l2": 1.0}
        return value

    @model_validator(mode="after")
    def _l2_of_a_fitted_head(self) -> Self:
        if self.l2 is not None and self.head != "fitted":
            raise conflict("l2 is that of a fitted head: it needs head: fitted", "l2", "head")
        return self


class Teacher(Source):
    """A model to learn from.

    A trial that trains one has the validation split of those who learn from it, and their data, unless it says its own.
    """

    pretrained: Annotated[str, Field(pattern=r"^\w+_Weights\.\w+$")] | None = None
    """torchvision's name of weights it publishes, such as ``RegNet_Y_16GF_Weights.IMAGENET1K_V2``."""
    heads: Annotated[int, Field(gt=0)] | None = None  #: of attention, where a checkpoint does not say
    size: Annotated[int, Field(gt=0)] | None = None  #: pixels a side of its images, where a checkpoint does not say

    @model_validator(mode="after")
    def _of_a_file(self) -> Self:
        for name in ("heads", "size"):
            if getattr(self, name) is not None and self.checkpoint is None:
                raise conflict(f"{name} is that of a checkpoint; anything else says its own", name, "checkpoint")
        return self

    @field_validator("pretrained")
    @classmethod
    def _always_the_same(cls, value: str | None) -> str | None:
        if value is not None and value.endswith(".DEFAULT"):
            raise ValueError("DEFAULT are other weights in other versions of torchvision; name the ones you mean")
        return value


class Distill(Frozen):
    """Learning from labels and from a teacher: (1 - alpha) loss + alpha distillation.  Reference: arXiv:2012.12877.

    The head of the distillation token, where the model has one, learns from the teacher, and that of the class token
    from the labels; otherwise one head learns from both.
    """

    teacher: Teacher | None = None
    kind: Literal["hard", "soft", "labels", "none"] = "hard"
    """From the class the teacher decides for, or from its probabilities.  ``labels``: both heads learn from the labels,
    without a teacher, as a control for the second token.  ``none``: nothing of this, whatever else stands here."""
    alpha: Annotated[float, Field(ge=0, le=1)] = 0.5  #: weight of the distillation
    tau: Annotated[float, Field(gt=0)] = 1.0  #: temperature of both softmaxes; of soft distillation alone
    reduction: Literal["numel", "batchmean"] = "numel"
    """Soft: the sum over batch and classes is divided by both, as in DeiT's code, or by the batch, as in timm."""

    @model_validator(mode="after")
    def _taught(self) -> Self:
        if self.teacher is None and self.kind in ("hard", "soft"):
            sentence = f"kind '{self.kind}' learns from a teacher: name one, by a trial or a checkpoint"
            raise conflict(sentence, "kind", "teacher")
        return self


class TrialSpec(Frozen):
    """One complete trial: what it sees, what it is, how it is trained."""

    data: Choice
    model: Choice
    train: TrainSpec
    init_from: InitFrom | None = None
    distill: Distill | None = None

    @field_validator("distill")
    @classmethod
    def _as_read(cls, value: Distill | None) -> Distill | None:
        """Without what its kind does not read, so that nothing unread makes another trial."""
        if value is None or value.kind == "none":
            return None
        return Distill(kind="labels", alpha=value.alpha) if value.kind == "labels" else value


SLOTS_OF_A_TRIAL = {
    ("data",): "dataset",
    ("model",): "model",
    ("train", "optimizer"): "optimizer",
    ("train", "schedule"): "schedule",
    ("train", "loss"): "loss",
}
"""Where a trial names components, and in which slot each is looked up."""

METRICS = ("train", "metrics")
"""Where a trial names components of the slot ``metric``, as many as it likes."""

SOURCES = {"init_from": ("init_from",), "teacher": ("distill", "teacher")}
"""What the weights of another model are to a trial, and where it names them: each a :class:`Source`."""
