"""Run: where and how trials run, what each takes of a machine, and what is done when one fails."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, GetJsonSchemaHandler, field_validator, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from vitlab.spec.choice import Choice, Frozen
from vitlab.spec.collect import conflict

Engine = Literal["auto", "loop", "vmap", "stack", "measured"]

Count = Annotated[int, Field(ge=0)]

UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


class Resources(Frozen):
    """What one trial takes of a machine."""

    gpu: Annotated[float, Field(gt=0)] | None = None
    """Share of a GPU, or how many: the trial is then trained by a process on each.  By default a whole one."""
    gpu_mem: Annotated[int, Field(gt=0)] | None = None  #: memory of the GPU, in bytes or such as 6GiB
    cpu: Annotated[int, Field(ge=1)] | None = None  #: cores; by default ``run.threads`` for each process
    processes: Annotated[int, Field(ge=1)] | None = None
    """On the CPU, how many train the trial together.  They share every batch, as those on several GPUs do, so a trial
    comes to the same but for rounding, whatever it is given."""

    @property
    def together(self) -> int:
        """How many processes train one trial."""
        return int(self.gpu) if self.gpu is not None and self.gpu > 1 else self.processes or 1

    def cores(self, threads: int) -> int:
        """How many cores one trial takes, of so many threads in each process."""
        return self.cpu or threads * self.together

    @model_validator(mode="after")
    def _whole_gpus(self) -> Resources:
        if self.gpu is not None and self.gpu > 1:
            if self.gpu != int(self.gpu):
                raise conflict(
                    f"a trial takes a share of one GPU, or whole ones, such as 0.25, 1 or 8; found {self.gpu}", "gpu"
                )
            if self.gpu_mem is not None:
                raise conflict(
                    "gpu_mem is of a GPU that trials share, and here each trial has several to itself", "gpu_mem", "gpu"
                )
        return self

    @field_validator("gpu_mem", mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]i?B)\s*", value)
        if match is None:
            raise ValueError(f"an amount of memory is bytes, or such as 6GiB or 512MiB; found '{value}'")
        return int(float(match[1]) * UNITS[match[2]])

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        reference = handler(schema)
        amount = handler.resolve_ref_schema(reference)["properties"]["gpu_mem"]
        amount["anyOf"].append({"type": "string", "pattern": r"^\d+(\.\d+)? *[KMG]i?B$"})
        return reference


class Retries(Frozen):
    """New attempts at a trial, by what ended the last one; each goes on from the last checkpoint.

    A trial that diverged is not among them: that is a result, and another attempt would come to the same.
    """

    lost: Count = 1  #: its worker died
    preempted: Count | Literal["always"] = "always"  #: the machine was wanted for something else
    timeout: Count = 0  #: it took longer than ``run.timeout``
    oom: Count = 0  #: memory ran out though it had the device for itself, and ``run.on_oom`` did not help
    error: Count = 0  #: it raised an error; under the same code it would again, unless a disk or a network was to blame

    @model_validator(mode="before")
    @classmethod
    def _shorthand(cls, value: Any) -> Any:
        """``2`` is short for ``{lost: 2}``."""
        if isinstance(value, int) and not isinstance(value, bool):
            return {"lost": value}
        if isinstance(value, Mapping) and "diverged" in value:
            raise ValueError("a trial that diverged has a result and is not tried again; remove 'diverged'")
        return value

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        reference = handler(schema)
        definition = handler.resolve_ref_schema(reference)
        long_form = dict(definition)
        definition.clear()
        definition["anyOf"] = [{"type": "integer", "minimum": 0}, long_form]
        return reference

    def allowed(self, how: str) -> float:
        """How many new attempts this end of one entitles to."""
        value = getattr(self, {"failed": "error"}.get(how, how), 0)
        return float("inf") if value == "always" else int(value)


class Abort(Frozen):
    """When a study is given up: too many of its trials have failed for the fault to be theirs."""

    failed_fraction: Annotated[float, Field(gt=0, le=1)] = 0.5
    min_finished: Annotated[int, Field(ge=1)] = 8  #: trials that must have ended, well or not, before it is judged


class RunSpec(Frozen):
    """Where and how trials run.  Nothing here but rounding changes what a trial computes on one kind of machine."""

    executor: Choice = Choice("local")
    workers: Annotated[int, Field(ge=1)] | None = None  #: trials at a time; by default what the machine holds
    threads: Annotated[int, Field(ge=1)] = 1  #: CPU threads of one trial
    device: Literal["auto", "cpu", "cuda"] = "auto"
    resources: Resources = Resources()  #: what one trial, or one cohort, takes of a machine
    micro_batch_size: Annotated[int, Field(ge=1)] | None = None
    """Images of a batch that a process computes at a time, where memory holds no more: gradients are accumulated, and
    those of a step are still the mean over ``train.batch_size``."""
    engine: Engine = "auto"
    """loop: each trial by itself; vmap: trials of one shape stacked; stack: so, with the batch innermost, for small
    ViTs on a CPU; auto: stacked where it pays, in the way that pays, by their sizes; measured: as was measured to be
    fastest, once for each shape of the study, and kept in its plan.json."""
    deterministic: bool = True  #: on CUDA, ask for deterministic kernels
    timeout: Annotated[float, Field(gt=0)] | None = None  #: seconds that one attempt at a trial may train
    retries: Retries = Retries()
    on_oom: Literal["fail", "cpu"] = "fail"  #: where a GPU's memory runs out for a trial that has it to itself
    abort_study: Abort | None = None
    keep: Literal["none", "last"] = "last"  #: trained weights kept as an artifact of the trial
    explain: tuple[Annotated[int, Field(ge=0)], ...] = ()  #: test images explained for the first seed of every arm
    tracker: Choice = Choice("mlflow")  #: where trials are shown
    tracking_uri: str | None = None
    """An MLflow server; by default a database under the output folder.  One on another machine, or one that MLflow
    would send credentials to, is named by ``--tracking-uri`` or ``MLFLOW_TRACKING_URI``."""

    @model_validator(mode="after")
    def _weights_to_explain(self) -> RunSpec:
        if self.explain and self.keep == "none":
            raise conflict("what is to be explained must keep its weights: keep: last", "explain", "keep")
        return self

    @model_validator(mode="after")
    def _several_processes(self) -> RunSpec:
        count, resources = self.resources.together, self.resources
        if resources.processes is not None and self.device != "cpu":
            raise conflict(
                "resources.processes are of the CPU, and need device: cpu; on GPUs, resources.gpu says how many",
                "resources",
                "device",
            )
        if resources.gpu is not None and resources.gpu > 1 and self.device == "cpu":
            raise conflict(
                f"resources.gpu is {count} and device is cpu; on the CPU, resources.processes says how many",
                "resources",
                "device",
            )
        if count > 1 and self.engine in ("vmap", "stack", "measured"):
            raise conflict(
                f"engine {self.engine} has many trials trained in one process, and resources ask for {count} processes "
                "for one trial; remove one of the two",
                "resources",
                "engine",
            )
        return self

    @property
    def effective_engine(self) -> Engine:
        """What ``engine`` comes to: where several processes train a trial, they train it by the loop."""
        return "loop" if self.resources.together > 1 else self.engine

    @model_validator(mode="after")
    def _whose_uri(self) -> RunSpec:
        if self.tracking_uri is not None and self.tracker.type.rpartition(":")[2] != "mlflow":
            sentence = f"tracking_uri is where MLflow is, and the tracker is {self.tracker.type}; remove one"
            raise conflict(sentence, "tracking_uri", "tracker")
        return self
