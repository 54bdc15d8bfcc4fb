"""One attempt at a trial: set-up, training and the files it writes."""

import os
import platform
import shutil
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from vitlab.data.prepare import Feed, prepare
from vitlab.engines import Engine, engine_or_fallback
from vitlab.identity.code import imported_requirements
from vitlab.identity.trial import Trial
from vitlab.models.contract import weights_digest
from vitlab.models.trained import InputSpec, write_weights
from vitlab.registry import ResolvedChoice, slot
from vitlab.registry.plugins import sentence_with_place
from vitlab.runner.circumstances import (
    cuda_settings,
    describe_kernels,
    flops_metrics,
    hook_chosen_kernels,
    measured_matrix_rate,
    model_params_and_macs,
    versions,
)
from vitlab.runner.job import Deferral, Settings, TrialEnd
from vitlab.runner.models import dtype_of, fit_head_if_asked, load_prerequisite, make_distillation, make_initial_model
from vitlab.store.files import Damaged, write_json
from vitlab.store.folders import TrialFolder
from vitlab.store.locks import Busy
from vitlab.store.result import Circumstances, Ending, EndingWithResult, Measurement, Outcome, TrialResult
from vitlab.training import artifacts
from vitlab.training.artifacts import write_predictions
from vitlab.training.distributed import ALONE, SingleProcess
from vitlab.training.evaluation import EVALUATION_BATCH
from vitlab.training.loop import WEIGHTS_STEP, Training, index_of_best
from vitlab.training.memory import MicroBatches, checkpoint_activations, is_out_of_memory, peak_memory


class Attempt:
    """One worker's attempt at a trial, whose choices are resolved."""

    # Set by build_or_resume_training().
    training: Training
    engine: str  #: its name; joined to the names of earlier attempts after a resume
    engine_type: type[Engine]
    kernels: set[str]  #: of attention, see :func:`hook_chosen_kernels`
    input_spec: InputSpec
    weights_notes: Sequence[str]  #: notes on the weights that the trial starts from
    params: int
    macs: int  #: multiply-accumulates of an image
    step_macs: int  #: of an image in a step; 0 if a step does not compute the model once on all of it
    matrix_rate: float  #: peak operations per second of these devices; NaN if it is not known

    def __init__(
        self,
        trial: Trial,
        folder: TrialFolder,
        settings: Settings,
        device: torch.device,
        peers: SingleProcess = ALONE,
    ) -> None:
        self.trial = trial
        self.folder = folder
        self.settings = settings
        self.device = device
        self.peers = peers
        self.writes = peers.rank == 0  #: to the folder
        self.end: TrialEnd | None = None  #: None until it has ended
        self._since = time.monotonic()  # wall-clock time may be adjusted
        events, _ = folder.events()
        starts = [event for event in events if event.kind == "start"]
        numbers = [number for event in starts if isinstance(number := event.body.get("attempt"), int)]
        self.number = max(numbers, default=0) + 1  # an attempt that falls back to the loop starts twice
        self.first_began = starts[0].t / 1000 if starts else time.time()
        logged = [event.body for event in events if event.kind == "metrics"]
        self.logged = {(body["step"], WEIGHTS_STEP in body["metrics"]) for body in logged}  #: by earlier attempts
        self.before_s = 0.0  #: seconds that earlier attempts spent on the checkpoint
        self.writer = ThreadPoolExecutor(1)  #: of checkpoints; the trial's lock is held until it is shut down
        self._writing: Future[None] | None = None
        self.resumed = ""  #: numerics of earlier attempts that differ from this one's, such as ``from device cuda``

    def build_or_resume_training(self, engine: str, note: str = "") -> Training:
        """Return the training before its first step, or its next one after a resume.

        Args:
            engine: Name of the engine; :attr:`engine_type` is it or a fallback that supports the training.
            note: A note for the journal.
        """
        self.wait_for_checkpoint()
        if self.writes:
            self.folder.prepare_for_attempt()
            write_json(self.folder.spec, self.trial.to_json(), fsync=False)
        if self.device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]
        rate = measured_matrix_rate(self.device, self.trial.spec.train.precision, self.settings.threads)
        self.matrix_rate = self.peers.count * rate
        if self.device.type == "cuda":  # excludes the memory of the rate measurement
            torch.cuda.reset_peak_memory_stats(self.device)  # a process may run several trials
        training = self.training = self._build_training()
        self.engine, self.engine_type, engine_note = engine_or_fallback(engine, training)
        content, damage = self._read_checkpoint()
        if content is not None:
            self._resume_from(content)
        self.peers.require_equal_weights(training.module, training.step)
        read_note = "images are read as batches ask for them" if training.feed.stored else ""
        notes = (f"of the weights it starts from: {note}" for note in self.weights_notes)
        resumed = self.resumed and f"resumed {self.resumed}"
        if self.writes:
            self.write_start_event("; ".join(filter(None, (damage, note, engine_note, read_note, resumed, *notes))))
        self.kernels = hook_chosen_kernels(training.model, not self.engine_type.one_at_a_time)
        return training

    def _build_training(self) -> Training:
        """Return the training of the trial before its first step, with its data and the weights it starts from."""
        trial, spec = self.trial, self.trial.spec.train
        data: ResolvedChoice = slot("dataset").resolve_choice(trial.spec.data)
        prepared = prepare(data, trial.seeds, trial.data)
        self.input_spec = InputSpec(prepared.info, prepared.mean, prepared.std)
        feed = Feed(prepared, data.options["augment"], trial.seeds, self.device, dtype_of(spec.precision))
        load = partial(load_prerequisite, trial, self.folder)
        model, self.weights_notes = make_initial_model(trial, load, prepared.info, self.device)
        fit_head_if_asked(model, trial, feed)
        self.params, self.macs = model_params_and_macs(model, trial, prepared.info)
        if self.settings.activation_checkpointing == "blocks":
            checkpoint_activations(model)
        training = Training(
            model,
            feed,
            spec,
            trial.seeds,
            make_distillation(trial, load, self.input_spec, self.device),
            MicroBatches(self.settings.micro_batch_size, self.peers),
            emit=self.record_and_keep_best,
            write=self.save_checkpoint,
            on_step=self.keep_due_weights,
            on_diverge=self.record_divergence,
        )
        # Objectives without labels and models that drop patches compute another number of images or tokens in a step.
        is_whole = training.objective.labels and not trial.spec.model.options.get("patch_drop")
        self.step_macs = self.macs if is_whole else 0
        return training

    def write_start_event(self, note: str) -> None:
        """Log the start or resume of the attempt in the journal."""
        self.folder.emit(
            "start",
            attempt=self.number,
            host=socket.gethostname(),
            pid=os.getpid(),
            step=self.training.step,
            steps=self.training.steps,
            epoch=self.training.epoch,
            images=self.training.images,
            effective_batch_size=self.training.images_per_batch,
            numerics=self._collect_numerics(),
            **({"note": note} if note else {}),
        )

    def end_with_error(self, error: Exception) -> None:
        """End the attempt with an error, which is recorded unless another process has taken the trial over."""
        self.end = end_of(error, self.trial)
        if self.end.ending != Deferral.BUSY:
            record_failure(self.folder, self.end)

    def end_with_outcome(self, outcome: Outcome, wall_s: float) -> None:
        """Write the files of a trial that is trained, the result last: it means that all others exist.

        Args:
            outcome: The outcome of the training.
            wall_s: Its share of :meth:`spent_s`.
        """
        self.folder.raise_if_lock_lost()
        self.wait_for_checkpoint()
        failure = self.training.failure
        status: EndingWithResult = Ending.DIVERGED if failure else Ending.DONE
        if not failure:
            state = self.training.model.state_dict()
            outcome = replace(outcome, weights=weights_digest(state))
            write_predictions(self.folder.predictions, self.training.predictions, self.input_spec.info.labels)
            if self.settings.keep.last:
                write_weights(self.folder.weights_file, state, self.input_spec)
            self.folder.emit("end", status=status)
        circumstances = self._collect_circumstances(wall_s)
        self.folder.write_result(TrialResult(self.trial.key, self.trial.code, status, outcome, circumstances, failure))
        self.end = TrialEnd(Ending.DONE, failure)  # there is a result, which may say that the trial diverged
        shutil.rmtree(self.folder.checkpoint, ignore_errors=True)

    def _collect_circumstances(self, wall_s: float) -> Circumstances:
        return Circumstances(
            started=self.first_began,
            wall_s=wall_s,
            host=socket.gethostname(),
            attempts=self.number,
            params=self.params,
            macs=self.macs,
            memory_bytes=peak_memory(self.device),
            versions={**versions(), **imported_requirements(self.trial.spec)},
            numerics={**self._collect_numerics(), "attention": describe_kernels(self.kernels, self.trial.spec.model)},
            ended=time.time(),
            weights=tuple(self.weights_notes),
        )

    def _read_checkpoint(self) -> tuple[Mapping[str, Any] | None, str]:
        """Return the content of the checkpoint to resume from, if any, and a note if there is one that is not used."""
        try:
            content = artifacts.clean_up_and_read_checkpoint(self.folder.checkpoint)
        except Damaged as error:
            print(f"{error}; the trial starts from the beginning", file=sys.stderr)
            return None, f"{error}; started from the beginning"
        if content is None:
            return None, ""
        state, keep = content["training"], self.settings.keep
        if not state["history"]:
            keep = keep._replace(best=None)
        if not all(file.exists() for file in self.folder.expected_weights_files(keep, state["step"])):
            return None, "weights that run.keep asks for now were not kept so far; started from the beginning"
        return content, ""

    def _resume_from(self, content: Mapping[str, Any]) -> None:
        """Load a checkpoint into the training, and count in the time and the numerics of the attempts before it."""
        self.training.load(content["training"])
        self.before_s = content["wall_s"]
        before, here = content["numerics"], self._collect_numerics()
        engines, self.resumed = before["engine"], before.get("resumed", "")
        self.engine = engines if self.engine in engines.split("+") else f"{engines}+{self.engine}"
        names = [name for name in {**before, **here} if name not in ("engine", "resumed")]
        changed = [name for name in names if before.get(name) != here.get(name)]
        if others := [f"{name} {before[name]}" if name in before else f"no {name}" for name in changed]:
            self.resumed = f"{self.resumed and f'{self.resumed}, '}from {', '.join(others)}"

    def save_checkpoint(self, state: Mapping[str, Any]) -> None:
        """Write a checkpoint of the training, by a thread that goes on during the next steps."""
        if not self.writes:
            return
        self.folder.raise_if_lock_lost()
        self.wait_for_checkpoint()
        content = {"training": state, "wall_s": self.spent_s(), "numerics": self._collect_numerics()}
        self._writing = self.writer.submit(
            artifacts.make_checkpoint_writer(self.folder.checkpoint, content, self.folder.raise_if_lock_lost)
        )

    def wait_for_checkpoint(self) -> None:
        """Wait until the last checkpoint is written; raise the error that prevented it."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def record_and_keep_best(self, measurement: Measurement) -> None:
        """Log a measurement, unless an earlier attempt logged its step; keep the weights if it is the best so far."""
        if not self.writes:
            return
        is_restored = WEIGHTS_STEP in measurement.metrics  # a second measurement of a step
        if (measurement.step, is_restored) not in self.logged:
            self.folder.emit(
                "metrics",
                step=measurement.step,
                epoch=measurement.epoch,
                images=measurement.images,
                metrics={
                    **measurement.metrics,
                    **flops_metrics(measurement.metrics, self.step_macs, self.matrix_rate),
                },
            )
        keep, history = self.settings.keep, self.training.history
        if keep.best is not None and not is_restored and index_of_best(history, *keep.best) == len(history) - 1:
            self.write_extra_weights(keep.best_name)

    def record_divergence(self, why: str) -> None:
        """Log that the training has diverged, for who watches: its result is written with those of its stack."""
        if self.writes:
            self.folder.emit("end", step=self.training.step, status=Ending.DIVERGED, failure=why)

    def keep_due_weights(self, step: int) -> None:
        """Keep the weights after a step if ``run.keep`` says so."""
        every = self.settings.keep.every
        if self.writes and every and step % every == 0:
            self.write_extra_weights(f"step-{step}")

    def write_extra_weights(self, suffix: str) -> None:
        """Write the weights that are evaluated at this moment, beside the last ones."""
        began = time.perf_counter()
        self.folder.raise_if_lock_lost()
        with self.training.evaluated_weights():
            file = self.folder.path / f"weights-{suffix}.safetensors"
            write_weights(file, self.training.model.state_dict(), self.input_spec)
        self.training.exclude_time_since(began)

    def spent_s(self) -> float:
        """Return the seconds of all attempts at the trial so far."""
        return self.before_s + time.monotonic() - self._since

    def _collect_numerics(self) -> dict[str, object]:
        return {
            "torch": torch.__version__,
            "device": self.device.type,
            "processor": torch.cuda.get_device_name(self.device)
            if self.device.type == "cuda"
            else f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
            "engine": self.engine,
            "threads": self.settings.threads,
            "precision": self.trial.spec.train.precision,
            "deterministic": self.settings.deterministic,
            "evaluation_batch": EVALUATION_BATCH,
            "processes": self.peers.count,
            **({"resumed": self.resumed} if self.resumed else {}),
            **(cuda_settings() if self.device.type == "cuda" else {}),
            **({"micro_batch_size": micro} if (micro := self.settings.micro_batch_size) is not None else {}),
            **({} if (how := self.settings.activation_checkpointing) == "none" else {"activation_checkpointing": how}),
        }


def end_of(error: BaseException, trial: Trial) -> TrialEnd:
    """Return how a trial ends by an error."""
    if isinstance(error, Busy):
        return TrialEnd(Deferral.BUSY, str(error))
    ending = Ending.OOM if is_out_of_memory(error) else Ending.ERROR
    return TrialEnd(ending, describe_failure(error, trial), "".join(traceback.format_exception(error)))


def record_failure(folder: TrialFolder, end: TrialEnd) -> None:
    """Write how an attempt has failed into the trial's folder."""
    folder.write_failure(end.detail, end.traceback, Ending(end.ending))
    folder.emit("end", status=Ending.FAILED, failure=end.detail)


def describe_failure(error: BaseException, trial: Trial) -> str:
    """Return why a trial failed; errors from outside vitlab get their type and the line in the plugin."""
    if is_out_of_memory(error):
        batch_size = trial.spec.train.batch_size
        return (
            f"memory ran out, with train.batch_size {batch_size}; a smaller one, a smaller model, "
            f"or fewer trials at a time (run.workers) need less"
        )
    return sentence_with_place(error)
