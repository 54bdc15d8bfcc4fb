"""Run: replicates of trials and looks at them, their execution and resources, and the handling of failures."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    field_validator,
    model_validator,
)

from vitlab.spec.choice import Choice, Frozen, OneOrMore, Portion, choice_from_slot
from vitlab.spec.mistakes import conflict_error, value_in_words
from vitlab.spec.trial import STREAMS, Stream

Cores = Annotated[int, Field(ge=1, le=4096)]  #: of a machine, or processes and threads on them


class Resources(Frozen):
    """Resources of one trial."""

    gpu: Annotated[float, Field(gt=0, le=4096)] | None = None
    """Share of a GPU, or a number of GPUs, each of which then trains with a process of its own; by default 1."""
    cpu: Cores | None = None
    """Cores; by default ``run.threads`` for each process."""
    processes: Cores | None = None
    """Number of processes that train the trial together on the CPU.  They share every batch, as on several GPUs, so
    that the number changes a result by rounding only."""

    nodes: Annotated[int, Field(ge=1, le=1024)] = 1
    """Machines that train the trial together, each with an equal part of its processes; with executor ray or slurm."""

    @property
    def share_per_node(self) -> Resources:
        """The part of these resources that each of the machines gives."""
        parts = {name: getattr(self, name) for name in ("gpu", "cpu", "processes")}
        own = {name: -(-value // self.nodes) for name, value in parts.items() if value is not None and self.nodes > 1}
        return self.model_copy(update={**own, "nodes": 1})

    @property
    def together(self) -> int:
        """Number of processes that train one trial."""
        return int(self.gpu) if self.gpu is not None and self.gpu > 1 else self.processes or 1

    def cores(self, threads: int) -> int:
        """Return the number of cores of one trial with ``threads`` threads in each process."""
        return self.cpu or threads * self.together

    @model_validator(mode="after")
    def _check_gpus_and_nodes(self) -> Resources:
        if self.gpu is not None and self.gpu > 1 and self.gpu != int(self.gpu):
            raise conflict_error(
                f"found gpu: {self.gpu}; allowed: a share of one GPU, such as 0.25, or whole GPUs, such as 1 or 8",
                "gpu",
            )
        if self.together % self.nodes:
            raise conflict_error(
                f"{self.together} processes cannot be divided equally among {self.nodes} machines; set gpu, or "
                "processes, to a multiple of nodes",
                "nodes",
            )
        return self


class Retries(Frozen):
    """Further attempts at a trial, by how the last one ended; each resumes from the last checkpoint.

    A trial that diverged is not retried: divergence is a result, and another attempt would diverge, too.
    """

    lost: NonNegativeInt = 1
    """Its worker died."""
    preempted: NonNegativeInt | Literal["always"] = "always"
    """The machine was taken for another job."""
    timeout: NonNegativeInt = 0
    """It took longer than ``run.timeout``."""
    oom: NonNegativeInt = 0
    """Memory ran out although the trial had the device alone, and ``run.on_oom`` did not help."""
    error: NonNegativeInt = 0
    """It raised an error, which recurs under the same code unless a disk or a network caused it."""

    def allowed(self, ending: str) -> float:
        """Return the number of further attempts after an attempt that ended in this way."""
        value = getattr(self, ending, 0)
        return float("inf") if value == "always" else int(value)


class Abort(Frozen):
    """The share of failed trials at which a study is aborted, because the cause must lie outside the trials."""

    failed_fraction: Portion = 0.5
    """Share of failed trials from which on a study is aborted."""
    min_finished: OneOrMore = 8
    """Number of trials that must have ended, in any way, before the share is checked."""


class Weights(Frozen):
    """Trained weights that stay as files in a trial's folder.  ``best`` is short for ``{which: best}``."""

    which: Literal["none", "last", "best"] = "last"
    """None; the last ones; best: the last ones, and those of the evaluation with the best value of ``analysis.metric``
    on validation."""
    every: OneOrMore | None = None
    """Steps between further ones; by default there are none."""


class RunSpec(Frozen):
    """Execution of trials.  On one kind of machine, no option here changes a result by more than rounding."""

    executor: Annotated[Choice, choice_from_slot("executor")] = Choice("local")
    """Where trials run."""
    workers: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Trials at a time; by default as many as fit on the machine."""
    threads: Cores = 1
    """CPU threads of one process."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Device of the trials; ``auto``: a CUDA GPU if there is one, or else the CPU; ``mps``: the GPU of a Mac."""
    resources: Resources = Resources()
    """Resources of one trial, or of a batch of trials trained together."""
    micro_batch_size: OneOrMore | None = None
    """Images of a batch that a process computes at a time, to save memory: gradients are accumulated, and those of a
    step are still the mean over ``train.batch_size``."""
    activation_checkpointing: Literal["none", "blocks"] = "none"
    """blocks: the backward pass computes the activations inside a model's blocks again instead of storing them, which
    saves memory for about a third more computation and changes no result; trials are then trained by engine loop."""
    engine: str = "auto"
    """loop: each trial by itself; compiled: the same by torch.compile, which takes a minute or more per trial before
    its first step and is meant for GPUs and long trainings; vmap: trials of one shape together; batch_last: the same
    with the batch as the last axis, for small ViTs on a CPU; compiled_vmap: vmap by torch.compile, for many seeds of a
    small model on a GPU; auto: one of these by the size of the model and the type of device; measured: the fastest of
    loop, vmap and batch_last in a benchmark of each shape of the study, which is stored in plan.json."""
    deterministic: bool = True
    """On CUDA, request deterministic kernels."""
    timeout: PositiveFloat | None = None
    """Seconds of training per attempt at a trial; by default there is no limit."""
    checkpoint_interval: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 60.0
    """Seconds of training after which a checkpoint is written while the training goes on; further ones are written at
    evaluations, and when the run is stopped."""
    retries: Annotated[
        Retries,
        BeforeValidator(
            lambda value: {"lost": value} if type(value) is int else value,
            json_schema_input_type=NonNegativeInt | Retries,
        ),
    ] = Retries()
    """Further attempts at a trial; ``2`` is short for ``{lost: 2}``."""
    on_oom: Literal["fail", "cpu"] = "fail"
    """Action if a trial runs out of memory on a GPU that it has alone."""
    abort_study: Abort | None = None
    """Share of failed trials at which the study is aborted; by default it is not."""
    keep: Annotated[
        Weights,
        BeforeValidator(
            lambda value: {"which": value} if isinstance(value, str) else value,
            json_schema_input_type=Literal["none", "last", "best"] | Weights,
        ),
    ] = Weights()
    """Trained weights that stay after a trial, by default the last: none, last, best, or {every: N}, the last
    ones and those after every N steps."""
    explain: tuple[NonNegativeInt, ...] = ()
    """Test images, by index from 0, such as ``[0, 3]``, in which the report shows what the first seed of every arm
    attends to."""
    tracker: Annotated[Choice, choice_from_slot("tracker")] = Choice("mlflow")
    """Experiment tracker."""

    @field_validator("tracker", mode="before")
    @classmethod
    def _complete_tracker(cls, value: Any) -> Any:
        """Complete the options of a tracker without ``type`` by the type of the default."""
        if isinstance(value, Mapping) and "type" not in value:
            return {"type": f"vitlab:{cls.model_fields['tracker'].default.type}", **value}
        return value

    @model_validator(mode="after")
    def _check_explain(self) -> RunSpec:
        if self.explain and self.keep.which == "none":
            raise conflict_error("explain needs stored weights; write keep: last", "explain", "keep")
        return self

    @model_validator(mode="after")
    def _check_engine_and_resources(self) -> RunSpec:
        count, resources = self.resources.together, self.resources
        if resources.processes is not None and self.device != "cpu":
            raise conflict_error(
                "resources.processes needs device: cpu; for GPUs, set resources.gpu",
                "resources",
                "device",
            )
        if resources.gpu is not None and resources.gpu > 1 and self.device == "cpu":
            raise conflict_error(
                f"resources.gpu is {count} and device is cpu; for the CPU, set resources.processes",
                "resources",
                "device",
            )
        if self.engine in ("auto", "loop"):
            return self
        if count > 1:
            raise conflict_error(
                f"engine {self.engine} trains in one process, and resources request {count} processes for one trial; "
                "remove one of the two",
                "resources",
                "engine",
            )
        if self.activation_checkpointing != "none":
            raise conflict_error(
                f"engine {self.engine} stores all activations; set engine: loop, or activation_checkpointing: none",
                "activation_checkpointing",
                "engine",
            )
        return self

    @property
    def effective_engine(self) -> str:
        """``engine``, or ``loop`` if no other supports the settings."""
        is_loop = self.resources.together > 1 or self.activation_checkpointing != "none"
        return "loop" if is_loop else self.engine


# -- seeds ------------------------------------------------------------------------------------------------------------

REPORTING_SEEDS = 1_000_000  #: seeds of replicates are smaller; larger ones are for tuning
MAX_LOOKS = 20  #: at the results of a study whose seeds are added until it is decided

Count = Annotated[int, Field(ge=1, le=REPORTING_SEEDS)]
Values = tuple[Annotated[int, Field(ge=0, lt=REPORTING_SEEDS)], ...]


class Seeds(Frozen):
    """Replicates.  Each seed sets the streams in ``vary`` to itself; the other streams are 0 in every replicate."""

    count: Count | None = None
    """Number of seeds of every arm; they are 0, 1, 2, ..."""
    at_least: Count | None = None
    """Number of seeds of every arm before the first look, with ``until``."""
    values: Annotated[Values, Field(min_length=1)] = (0, 1, 2)
    """Seeds of every arm."""
    vary: tuple[Stream, ...] = ("init", "order", "augment", "mixup", "dropout", "drop_path", "subset")
    """Random streams that depend on the seed; the others are equal in all trials."""
    escalate_to: Count | None = None
    """Total number of seeds of inconclusive arms, added at once."""
    until: Literal["decided"] | None = None
    """``decided``: inconclusive arms get ``every`` more seeds at a time, until they have ``at_most``."""
    at_most: Count | None = None
    """Total number of seeds of an arm, with ``until``."""
    every: Count | None = None
    """Seeds that are added at a time, with ``until``; by default as many as at first."""

    @model_validator(mode="before")
    @classmethod
    def _expand_count(cls, value: Any) -> Any:
        """Set ``values`` to 0, 1, 2, ... if their number is given."""
        if not isinstance(value, Mapping):
            return value
        # All else reads ``values``; the count stays beside it as the file has it.
        numbers = [name for name in ("count", "at_least", "values") if name in value]
        if len(numbers) > 1:
            raise ValueError(f"found {numbers[0]} and {numbers[1]}; give one of count, at_least and values")
        if "at_least" in numbers and "until" not in value:
            raise ValueError("at_least needs until: decided; otherwise give count")
        count = value.get("count", value.get("at_least"))
        if isinstance(count, int) and 0 < count <= REPORTING_SEEDS:  # otherwise reported as a wrong count
            return {**value, "values": tuple(range(count))}
        return value

    @field_validator("values")
    @classmethod
    def _check_distinct(cls, values: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(values)) < len(values):
            raise ValueError("a seed is listed twice; each seed is one replicate")
        return values

    @model_validator(mode="after")
    def _check_more_seeds(self) -> Self:
        first_look = len(self.values)
        if self.until is None:
            for name in ("at_most", "every"):
                if getattr(self, name) is not None:
                    raise conflict_error(f"{name} needs until: decided", name, "until")
        elif self.escalate_to is not None:
            raise conflict_error("escalate_to and until are two ways to add seeds; remove one", "escalate_to", "until")
        elif self.at_most is None or self.at_most <= first_look:
            raise conflict_error(
                f"until: decided needs at_most, the total number of seeds of an arm: more than the {first_look} "
                f"of the first look; found {self.at_most or 'none'}",
                "at_most",
                "values",
                "until",
            )
        elif len(self._look_sizes) > MAX_LOOKS:
            raise conflict_error(
                f"a study has at most {MAX_LOOKS} looks at its results, and this one has {len(self._look_sizes):,}; "
                "raise every",
                "every",
                "at_most",
            )
        if len(self._look_sizes) > 1 and first_look < 2:
            sentence = "adding seeds needs at least 2 seeds at first, which have a spread"
            raise conflict_error(sentence, "values", "count", "at_least")
        if self.escalate_to is not None and self.escalate_to <= first_look:
            raise conflict_error(
                f"escalate_to is the total number of seeds: more than the {first_look} of the first look; found "
                f"{self.escalate_to}",
                "escalate_to",
                "values",
            )
        return self

    def values_extended_to(self, count: int) -> tuple[int, ...]:
        """Return these seeds and the smallest others, ``count`` in all."""
        existing = set(self.values)
        further = (seed for seed in itertools.count() if seed not in existing)
        return (*self.values, *itertools.islice(further, max(0, count - len(existing))))

    @property
    def all(self) -> tuple[int, ...]:
        """All seeds that may run, including the seeds of later looks."""
        return self.values_extended_to(self._most)

    @property
    def looks(self) -> tuple[tuple[int, ...], ...]:
        """Seeds of each look, of which the last has all."""
        return tuple(self.all[:size] for size in self._look_sizes)

    @property
    def _look_sizes(self) -> Sequence[int]:
        """Number of seeds at each look."""
        step = self._most if self.until is None else self.every or len(self.values)
        return [*range(len(self.values), self._most, step), self._most]

    @property
    def _most(self) -> int:
        """Largest number of seeds of an arm."""
        return max(self.escalate_to or 0, self.at_most or 0, len(self.values))

    def stream_seeds(self, seed: int) -> dict[str, int]:
        """Return stream to seed, for the replicate ``seed``."""
        return {stream: seed if stream in self.vary else 0 for stream in STREAMS}


def _expand_seeds_shorthand(value: Any) -> Any:
    """Expand ``5`` and ``[0, 1, 7]``."""
    if value is None or isinstance(value, bool | float | str):
        what = "write their number, such as 5, or a list, such as [1, 2, 3, 4, 5]"
        raise ValueError(f"found {value_in_words(value)}; {what}")
    if isinstance(value, int):
        return {"count": value}
    return {"values": value} if isinstance(value, list | tuple) else value


SeedsOrNumber = Annotated[
    Seeds, BeforeValidator(_expand_seeds_shorthand, json_schema_input_type=Count | Values | Seeds)
]
"""Seeds as a study file has them: their number, a list, or a mapping."""
