"""TrialSpec: one complete training, as written under ``base`` in a study file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticKnownError

from vitlab.spec.choice import Choice, Frozen, OneOrMore, Portion, Share, choice_from_slot
from vitlab.spec.mistakes import conflict_error
from vitlab.spec.tree import NewTree

Stream = Literal["init", "order", "augment", "mixup", "dropout", "drop_path", "subset", "split"]
STREAMS: tuple[str, ...] = get_args(Stream)
"""Random streams of a trial; ``seeds.vary`` lists those that differ between replicates."""

LENGTHS = ("epochs", "steps", "images")
"""Units of the length of a training; exactly one is set."""

LONGEST = 1_000_000_000
"""Largest number of steps or epochs of a training."""


class Mix(Frozen):
    """Training on mixed pairs of images, overlaid or with a rectangle of one pasted into the other, and their labels.

    Reference: arXiv:1710.09412 (mixup), arXiv:1905.04899 (cutmix).
    """

    mixup: NonNegativeFloat = 0.0
    """A of Beta(a, a), the distribution of an overlay's weight; 0: none."""
    cutmix: NonNegativeFloat = 0.0
    """A of Beta(a, a), the share outside the rectangle; 0: none."""
    prob: Share = 1.0
    """Share of the batches that are mixed."""
    switch: Share = 0.5
    """Share of cutmix among the mixed batches, if both are on."""


class Ema(Frozen):
    """An exponential moving average of the weights, which replaces them in evaluation and in stored weights.

    After step t, counted from 1, the average keeps the share min(decay, 1 - t ** -warmup) of itself.
    """

    decay: Annotated[float, Field(ge=0, lt=1)] = 0.9999
    """Largest share that the average keeps of itself in a step."""
    warmup: NonNegativeFloat = 2 / 3
    """Exponent of the warmup: the initial weights drop out after the first step, and the window grows with the
    training.  1: the mean of all steps.  0: no warmup, the share is ``decay`` from the first step, as in DeiT."""


class StopEarly(Frozen):
    """The end of a training that validation shows no more progress of.

    The training ends after the evaluation by which ``patience`` evaluations in a row have found no better value, or
    at its length.
    """

    patience: OneOrMore
    """Evaluations on validation without a better value, see ``evaluations``."""
    metric: str = "loss"
    """Metric of validation by name, of those that the trial reports; better is what the metric declares."""
    weights: Literal["last", "best"] = "last"
    """Weights that the result is of, on test images too, and that are stored: the weights at the end, or those of the
    evaluation with the best value of ``metric``, whose step the result states as ``train/weights_step``."""


class TrainSpec(Frozen):
    """Training of a trial.  Exactly one of ``epochs``, ``steps`` and ``images`` sets its length."""

    epochs: Annotated[float, Field(gt=0, le=LONGEST)] | None = None
    """Length in passes over the training images."""
    steps: Annotated[int, Field(ge=0, le=LONGEST)] | None = None
    """Length in optimizer steps."""
    images: Annotated[int, Field(gt=0, le=1000 * LONGEST)] | None = None
    """Length in images."""
    batch_size: Annotated[int, Field(gt=0, le=LONGEST)] = 128
    """Images per optimizer step."""
    repeats: Annotated[int, Field(ge=1, le=1000)] = 1
    """Consecutive repetitions of an image in an epoch, each augmented anew.  The length of an epoch does not change: it
    contains a share 1 / repeats of the images.  Reference: arXiv:1901.09335, arXiv:2012.12877."""
    optimizer: Annotated[Choice, choice_from_slot("optimizer")] = Choice("adamw")
    """Optimizer and its learning rate."""
    schedule: Annotated[Choice, choice_from_slot("schedule")] = Choice("cosine")
    """Learning rate over the training."""
    loss: Annotated[Choice, choice_from_slot("loss")] = Choice("cross_entropy")
    """Training loss."""
    objective: Annotated[Choice, choice_from_slot("objective")] = Choice("supervised")
    """What is minimised: ``loss`` on labels, or a task that needs none; then the head is not trained."""
    mix: Mix | None = None
    """Training on mixed pairs of images."""
    ema: Ema | None = None
    """Moving average of the weights, which is evaluated and stored."""
    layer_decay: Portion | None = None
    """Ratio of the learning rate of a layer to the rate of the layer above; the head has the optimizer's rate."""
    clip_grad: PositiveFloat | None = None
    """Largest global norm of the gradient; by default any."""
    precision: Literal["fp32", "tf32", "bf16", "fp16", "fp64"] = "fp32"
    """tf32 rounds the factors of products and convolutions to 10 bits on GPUs, which is several times faster, and is
    fp32 on CPUs; bf16 and fp16 are autocast over fp32 weights; fp16 scales the loss, and skips steps whose gradients
    overflow."""
    evaluations: Annotated[int, Field(ge=1, le=1_000_000)] = 10
    """Number of evaluations on validation, evenly spaced, the last at the end."""
    metrics: tuple[Annotated[Choice, choice_from_slot("metric")], ...] = ()
    """Metrics beside those that every trial of the task reports."""
    stop_early: StopEarly | None = None
    """Rule by which trainings end before their length, the same for all arms."""

    @model_validator(mode="after")
    def _check_patience(self) -> Self:
        if self.stop_early is not None and self.stop_early.patience >= self.evaluations:
            raise conflict_error(
                f"stop_early.patience {self.stop_early.patience} is never used up by {self.evaluations} evaluations; "
                "set more evaluations",
                "stop_early",
                "evaluations",
            )
        return self

    @model_validator(mode="after")
    def _check_one_length(self) -> Self:
        units = [name for name in LENGTHS if getattr(self, name) is not None]
        if len(units) != 1:
            actual = " and ".join(units) if units else "none of them"
            sentence = f"the length of a training is epochs, steps or images, exactly one; found {actual}"
            raise conflict_error(sentence, *LENGTHS)
        return self

    def images_seen(self, examples: int | None = None) -> int | None:
        """Return the number of images that a training sees, in whole batches.

        Args:
            examples: number of training images; if None, a length in epochs gives None.
        """
        size = self.batch_size
        if self.steps is not None:
            return self.steps * size
        if self.images is not None:
            return max(1, round(self.images / size)) * size
        if examples is not None and self.epochs is not None:
            return max(1, round(self.epochs * max(1, examples // size))) * min(size, examples)
        return None

    @field_validator("epochs", "images", mode="before")
    @classmethod
    def _say_how_to_train_nothing(cls, value: Any) -> Any:
        if value == 0 and value is not False:
            raise conflict_error("found 0; allowed: more than 0. To train nothing, write steps: 0 in its place")
        return value

    @field_validator("layer_decay")
    @classmethod
    def _drop_neutral_decay(cls, value: float | None) -> float | None:
        """Return None for a factor of 1, which has no effect."""
        return None if value == 1 else value

    @field_validator("mix")
    @classmethod
    def _drop_unused_mix(cls, value: Mix | None) -> Mix | None:
        """Return None for options that never mix, so that such an arm equals the arm without ``mix``."""
        return None if value is None or not value.prob or not (value.mixup or value.cutmix) else value


class Source(Frozen):
    """A source of weights: a file of any supported format, published weights, or another trial, given by its spec."""

    checkpoint: str | None = None
    """File of weights, of any supported format."""
    pretrained: Annotated[str, Field(pattern=r"^\w+_Weights\.\w+$")] | None = None
    """Name of weights published by torchvision, such as ``RegNet_Y_16GF_Weights.IMAGENET1K_V2``."""
    timm: Annotated[str, Field(pattern=r"^\w+\.\w+$")] | None = None
    """Name of weights in timm, with their tag, such as ``vit_base_patch16_clip_224.openai``; see ``vitlab list
    weights``.  Planning fetches the file, whose content identifies it."""
    hub: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+(@[\w.-]+)?$")] | None = None
    """Repository of Hugging Face's hub, ``ORG/NAME`` or ``ORG/NAME@REVISION``.  Planning fetches the file, whose
    content identifies it."""
    trial: TrialSpec | NewTree | None = None
    """A complete trial; it is trained once and shared by all trials that need it.  A mapping only in a study file,
    where a teacher may leave out its data."""
    seed: Literal["same"] | NonNegativeInt = "same"
    """Seed of that trial; ``same``: the seed of the trial that starts from it."""

    @field_validator("trial", mode="plain", json_schema_input_type=NewTree | None)
    @classmethod
    def _parse_trial_if_complete(cls, value: Any) -> TrialSpec | NewTree | None:
        """Parse a complete trial; any other mapping is completed by planning, which reports the mistakes in it."""
        if value is None or isinstance(value, TrialSpec):
            return value
        if not isinstance(value, dict):
            raise PydanticKnownError("dict_type")
        try:
            return TrialSpec.model_validate(value)
        except ValidationError:
            return value

    @field_validator("pretrained")
    @classmethod
    def _reject_default_weights(cls, value: str | None) -> str | None:
        if value is not None and value.endswith(".DEFAULT"):
            raise ValueError("DEFAULT depends on the version of torchvision; name the weights, such as IMAGENET1K_V2")
        return value

    @model_validator(mode="after")
    def _check_one_source(self) -> Self:
        kinds = ("checkpoint", "trial", "pretrained", "timm", "hub")
        if sum(getattr(self, name) is not None for name in kinds) != 1:
            raise conflict_error(f"exactly one of {', '.join(kinds)} must be set", *kinds)
        return self


class InitFrom(Source):
    """Initial weights.

    A trial that trains them on the same data set uses the validation split of the trial that starts from it.
    """

    resample: Literal["timm", "google", "deit", "torchvision", "hf"] = "timm"
    """Library whose interpolation fits stored positions to another grid."""
    head: Literal["new", "keep", "fitted"] = "new"
    """A new head, the stored one, or one fitted in closed form: with ``train.steps: 0``, this is the few-shot linear
    probe of arXiv:2010.11929; with more steps, training starts from it."""
    l2: PositiveFloat | None = None
    """Weight of the squared norm of a fitted head, relative to the sum of squared errors; 1 by default."""
    tokens: Literal["same", "convert"] = "same"
    """Handling of prefix tokens that only one of the two models has.  ``same``: an error.  ``convert``: stored tokens
    that this model lacks are dropped, and tokens that only this model has are new."""
    freeze: Literal["nothing", "body"] | OneOrMore = "nothing"
    """Part that is not trained, in evaluation mode: ``body``, all but the head, for a linear probe; or the first N
    blocks, and all before them."""

    @model_validator(mode="before")
    @classmethod
    def _default_l2(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and value.get("head") == "fitted" and value.get("l2") is None:
            return {**value, "l2": 1.0}
        return value

    @model_validator(mode="after")
    def _check_l2(self) -> Self:
        if self.l2 is not None and self.head != "fitted":
            raise conflict_error("l2 needs head: fitted", "l2", "head")
        return self


class Teacher(Source):
    """The teacher of a distillation.

    A trial that trains a teacher uses the validation split of its student, and its data unless it sets its own.
    """

    heads: PositiveInt | None = None
    """Attention heads, for a checkpoint that does not record them."""
    size: PositiveInt | None = None
    """Pixels per side of its images, for a checkpoint without them."""

    @model_validator(mode="after")
    def _check_options_need_checkpoint(self) -> Self:
        for name in ("heads", "size"):
            if getattr(self, name) is not None and self.checkpoint is None:
                raise conflict_error(
                    f"{name} needs a checkpoint; other sources record it themselves", name, "checkpoint"
                )
        return self


class Matching(Frozen):
    """A loss between a linear map of the student's features and the teacher's features for the same image.

    The map is trained with the student and is no part of the stored weights.  The defaults are those of
    arXiv:2205.14141; ``{loss: mse, norm: none}`` is the loss of arXiv:1412.6550 (FitNets), and ``loss: cosine`` that of
    arXiv:2211.07636 (EVA).
    """

    weight: NonNegativeFloat = 1.0
    """Factor of the term, which is added to the loss."""
    loss: Literal["smooth_l1", "mse", "cosine"] = "smooth_l1"
    """Mean over all numbers of the squared difference (``mse``), or of ``smooth_l1``, which is quadratic below 2 and
    linear above; ``cosine``: mean over vectors of 1 - cosine."""
    norm: Literal["layernorm", "none"] = "layernorm"
    """Normalisation of each vector of the teacher to mean 0 and variance 1, or none."""


MATCHINGS = ("features", "tokens")
"""Keys of ``distill`` that match features of the teacher."""


class Distill(Frozen):
    """Training on labels and on a teacher: (1 - alpha) loss + alpha distillation.  Reference: arXiv:2012.12877.

    The head of the distillation token, where the model has one, learns from the teacher, and the class token's head
    from the labels; otherwise one head learns from both.  ``features`` and ``tokens`` add terms to this sum.
    """

    teacher: Teacher | None = None
    """Source of the teacher."""
    kind: Literal["hard", "soft", "labels", "none"] = "hard"
    """``hard``: the teacher's predicted class.  ``soft``: its probabilities.  ``labels``: both heads learn from the
    labels, without a teacher, as a control for the second token.  ``none``: the teacher's logits are not used; without
    ``features`` and ``tokens`` there is no distillation, and other keys are ignored."""
    alpha: Share = 0.5
    """Weight of the distillation."""
    tau: PositiveFloat = 1.0
    """Temperature of both softmaxes in soft distillation."""
    reduction: Literal["numel", "batchmean"] = "numel"
    """Divisor of the sum over batch and classes in soft distillation: both, as in DeiT's code, or the batch, as in
    timm."""
    features: Matching | None = None
    """Learning from the teacher's pooled features, the input of its linear classifier.  Reference: arXiv:1412.6550."""
    tokens: Matching | None = None
    """Learning from the teacher's last patch tokens or feature map, place by place; a grid of another size is resampled
    to the student's.  Reference: arXiv:2205.14141."""

    @field_validator(*MATCHINGS)
    @classmethod
    def _drop_zero_weight(cls, value: Matching | None) -> Matching | None:
        """Return None for a weight of 0, so that such an arm equals the arm without the term."""
        return None if value is None or not value.weight else value

    @model_validator(mode="after")
    def _check_needs_teacher(self) -> Self:
        if self.teacher is None and self.kind in ("hard", "soft"):
            sentence = f"kind '{self.kind}' needs a teacher; set teacher.trial or teacher.checkpoint"
            raise conflict_error(sentence, "kind", "teacher")
        for name in self.matchings:
            if self.kind == "labels":
                raise conflict_error(f"kind 'labels' has no teacher, and {name} needs one; remove {name}", "kind", name)
            if self.teacher is None:
                raise conflict_error(
                    f"{name} needs a teacher; set teacher.trial or teacher.checkpoint", name, "teacher"
                )
        return self

    @property
    def matchings(self) -> dict[str, Matching]:
        """Return the terms on features by name: ``features`` and ``tokens``, where they are set."""
        return {name: term for name in MATCHINGS if (term := getattr(self, name)) is not None}


class TrialSpec(Frozen):
    """One complete trial: its data, its model and its training."""

    data: Annotated[Choice, choice_from_slot("dataset")]
    """Data set, its split, augmentation and normalisation."""
    model: Annotated[Choice, choice_from_slot("model")]
    """Model and its components."""
    train: TrainSpec
    """Training of the model."""
    init_from: InitFrom | None = None
    """Initial weights from a file or another trial."""
    distill: Distill | None = None
    """Learning from a teacher."""

    @field_validator("distill")
    @classmethod
    def _drop_unused_distill_options(cls, value: Distill | None) -> Distill | None:
        """Drop the options that the kind does not use, so that they do not change the trial."""
        if value is None or (value.kind == "none" and not value.matchings):
            return None
        unused = {
            "hard": {"tau", "reduction"},
            "soft": set[str](),
            "labels": {"teacher", "tau", "reduction"},
            "none": {"alpha", "tau", "reduction"},
        }
        used = {name: option for name, option in value if name not in unused[value.kind]}
        return Distill(**used)

    def sources(self) -> dict[str, Source]:
        """Return role to source, for the weights of other models that the trial uses; see :data:`SOURCES`."""
        teacher = None if self.distill is None else self.distill.teacher
        sources = {"init_from": self.init_from, "teacher": teacher}
        return {role: source for role, source in sources.items() if source is not None}

    def plain(self) -> NewTree:
        """Return the spec in plain JSON values, without options that are None."""
        return self.model_dump(mode="json", exclude_none=True)


OBJECTIVE = ("train", "objective")
"""Path of a trial's objective."""

SLOTS_OF_A_TRIAL = {
    ("data",): "dataset",
    ("model",): "model",
    ("train", "optimizer"): "optimizer",
    ("train", "schedule"): "schedule",
    ("train", "loss"): "loss",
    OBJECTIVE: "objective",
}
"""Path of a component in a trial to its slot."""

TEST_SET_OPTIONS = {"corrupted": "mce", "shifted": "shifted_accuracy", "real_labels": "real_accuracy"}
"""Options of a data set that add test sets beside its test split, such as corrupted images, and the metric of each."""

METRICS = ("train", "metrics")
"""Path of the list of metrics in a trial, components of the slot ``metric``."""

SOURCES = {"init_from": ("init_from",), "teacher": ("distill", "teacher")}
"""Role of other models' weights in a trial to the path of their :class:`Source`."""
