"""TrialSpec: one complete training, as YAML states it under ``base``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vitlab.spec.choice import Choice

STREAMS = ("init", "order", "augment", "mixup", "dropout", "drop_path", "subset", "split")
"""The streams of randomness of a trial; ``seeds`` says which of them a replicate varies."""

LENGTHS = ("epochs", "steps", "images")
"""The ways to state the length of a training; exactly one is given."""


class Frozen(BaseModel):
    """Base of everything YAML may say: immutable, and unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class TrainSpec(Frozen):
    """How a trial is trained.  Its length is ``epochs``, ``steps`` or ``images``: exactly one."""

    epochs: Annotated[float, Field(gt=0)] | None = None
    steps: Annotated[int, Field(ge=0)] | None = None
    images: Annotated[int, Field(gt=0)] | None = None
    batch_size: Annotated[int, Field(gt=0)] = 128
    optimizer: Choice = Choice("adamw")
    schedule: Choice = Choice("cosine")
    loss: Choice = Choice("cross_entropy")
    clip_grad: Annotated[float, Field(gt=0)] | None = None  #: largest global norm of the gradient
    precision: Literal["fp32", "bf16", "fp64"] = "fp32"  #: bf16 is autocast over fp32 weights
    evaluations: Annotated[int, Field(ge=1)] = 10  #: evaluations on validation, evenly spaced, the last at the end

    @model_validator(mode="before")
    @classmethod
    def _one_length(cls, value: Any) -> Any:
        if isinstance(value, dict):
            given = [name for name in LENGTHS if value.get(name) is not None]
            if len(given) != 1:
                found = " and ".join(given) if given else "none of them"
                raise ValueError(f"the length of a training is epochs, steps or images, exactly one; found {found}")
        return value


class InitFrom(Frozen):
    """Weights to start from: a checkpoint file of any known format, or another trial, named by its spec."""

    checkpoint: str | None = None
    trial: dict[str, Any] | None = None  #: a complete trial; it is trained once and shared by all who name it
    seed: Literal["same"] | Annotated[int, Field(ge=0)] = "same"  #: of that trial; same pairs replicates one to one
    resample: Literal["timm", "google", "deit", "torchvision", "hf"] = "timm"  #: how positions reach another grid
    head: Literal["new", "keep"] = "new"  #: a fresh head, or the one in the weights
    tokens: Literal["same", "convert"] = "same"
    """Tokens before the patches that only one of the two models has: refused, or left out here and new there."""
    freeze: Literal["nothing", "body"] = "nothing"  #: what is not trained: the body leaves a linear probe

    @model_validator(mode="after")
    def _one_source(self) -> InitFrom:
        if (self.checkpoint is None) == (self.trial is None):
            raise ValueError("init_from names a checkpoint or a trial, exactly one")
        return self


class TrialSpec(Frozen):
    """One complete trial: what it sees, what it is, how it is trained."""

    data: Choice
    model: Choice
    train: TrainSpec
    init_from: InitFrom | None = None


SLOTS_OF_A_TRIAL = {
    ("data",): "dataset",
    ("model",): "model",
    ("train", "optimizer"): "optimizer",
    ("train", "schedule"): "schedule",
    ("train", "loss"): "loss",
}
"""Where a trial names components, and in which slot each is looked up."""
