"""A trial, from its spec to its result: what a worker does.

Everything is written to the trial's folder while its lease is held.  Whoever takes the lease goes on where the last one
was: from the checkpoint, and after the last line of the journal.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import shutil
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, cast

import torch

import vitlab
from vitlab import noise
from vitlab.data.prepare import Feed, Prepared, prepare
from vitlab.errors import DataError, Lost, OutOfMemory, Refused, TrialFailed, UserError, VitlabError
from vitlab.geometry import DataInfo
from vitlab.models.contract import Model
from vitlab.models.cost import macs, parameters
from vitlab.plan.key import DISTILLATION, PROBE, READER, code_of
from vitlab.plan.trial import Trial
from vitlab.result import Circumstances, Measurement, Outcome, Result
from vitlab.slots import Resolved, load_file, slot
from vitlab.spec import TrainSpec
from vitlab.spec.trial import Distill, InitFrom
from vitlab.store import Busy, TrialFolder, read_json, write_json
from vitlab.training import checkpoint
from vitlab.training.artifacts import Sight, Transform, read_weights, write_predictions, write_weights
from vitlab.training.cohort import Member, require_stackable, train_cohort
from vitlab.training.distributed import Alone, Gone, Unlike, meeting
from vitlab.training.loop import EVALUATION_BATCH, Trained, Training, complete, peak_memory
from vitlab.training.parts import parts_of
from vitlab.training.start import start_from
from vitlab.training.together import Word, together

OUT_OF_MEMORY = ("can't allocate memory", "CUDA error: out of memory", "STATUS_ALLOC_FAILED")
"""What the errors say that torch raises for it without a type of their own."""


@dataclass(frozen=True)
class Settings:
    """How a trial is run; nothing here is part of what it is."""

    threads: int = 1
    device: str = "auto"  #: auto, cpu or cuda
    deterministic: bool = True
    keep: str = "last"  #: weights to keep: none or last
    plugins: tuple[str, ...] = ()  #: files of components to load first
    every_s: float = 60.0  #: longest time between two checkpoints
    processes: int = 1  #: that train the trial together, each with its share of every batch
    micro_batch_size: int | None = None  #: images of a batch that a process computes at a time; None: all


def check_trial(trial: Trial) -> None:
    """Refuse a trial that would not be, here, what it was planned to be.

    Raises:
        Refused: if the code here is not that the trial was planned under, or a component of it is not here at all.
    """
    if not trial.code:
        return  # nobody planned it
    try:
        here = code_of(trial.spec, trial.needs)
    except VitlabError as error:
        raise Refused(f"what this trial is made of is not here as it was planned: {error}") from error
    if here != trial.code:
        raise Refused(
            f"the code here ({here[:12]}) is not the code this trial was planned under ({trial.code[:12]}); "
            "plan it again with 'vitlab run'"
        )


def run_trial(
    trial: Trial, folder: TrialFolder, settings: Settings, stop: Callable[[], bool] = lambda: False
) -> Result | None:
    """Train a trial, or go on with it, or find that it has ended.

    Args:
        trial: what to run.
        folder: where; everything is written there.
        settings: on what, and what to keep.
        stop: asked before every step.

    Returns:
        the result (``diverged`` is one), or None if it was stopped; then a checkpoint waits for the next call.

    Raises:
        Busy: if another process has the trial.
        Refused: if it would not be what it was planned to be; then nothing is written.
        OutOfMemory: if memory ran out.
        Lost: if one of several processes died.
        Exception: whatever the trial or its components raise; the reason is in the folder, too.
    """
    for plugin in settings.plugins:
        load_file(plugin)
    check_trial(trial)
    if settings.processes > 1:
        return _shared(trial, folder, settings, stop)
    with folder.lease():
        result = _result(folder, settings)
        if result is not None:
            return result
        try:
            device = _device(settings.device)
            with _torch_set(settings, device):
                return _alone(_Attempt(trial, folder, settings, device), stop)
        except Exception as error:
            sentence = _failed(error, trial, folder)
            if _out_of_memory(error):
                raise OutOfMemory(sentence) from error
            raise


def run_cohort(
    work: Sequence[tuple[Trial, TrialFolder]], settings: Settings, stop: Callable[[], bool] = lambda: False
) -> None:
    """Train trials of one shape together, their weights stacked.  What becomes of each stands in its folder.

    Where their models cannot be stacked, they are trained one after another, and their journals say why.  Where memory
    runs out, they are trained in halves.

    Args:
        work: trials of equal :func:`vitlab.plan.cohorts.stack_key`, and where they live.  Those that have ended, and
            those that another process has, are left alone.
        settings: as of :func:`run_trial`.
        stop: asked before every step; what has not ended then has a checkpoint.

    Raises:
        Refused: if one of them would not be what it was planned to be; then nothing is written.
    """
    for plugin in settings.plugins:
        load_file(plugin)
    for trial, _ in work:
        check_trial(trial)
    with ExitStack() as leases:
        attempts: list[_Attempt] = []
        for trial, folder in work:
            with suppress(Busy):
                leases.enter_context(folder.lease())
                if _result(folder, settings) is None:
                    attempts.append(_Attempt(trial, folder, settings, _device(settings.device)))
        if not attempts:
            return
        with _torch_set(settings, attempts[0].device):
            try:
                _together(attempts, stop)
                return
            except Exception as error:
                left = [attempt for attempt in attempts if not attempt.over]
                if not _out_of_memory(error) or len(attempts) == 1:
                    for attempt in left:
                        attempt.failed(error)
                    return
    half = len(work) // 2
    run_cohort(work[:half], settings, stop)
    run_cohort(work[half:], settings, stop)


@contextmanager
def begin_trial(trial: Trial, folder: TrialFolder, settings: Settings) -> Iterator[Training]:
    """A trial before its first step, with torch set as it wants it: for whoever wants to see how its training begins.

    Raises:
        Busy: if another process has the trial.
    """
    for plugin in settings.plugins:
        load_file(plugin)
    check_trial(trial)
    device = _device(settings.device)
    with folder.lease(), _torch_set(settings, device):
        yield _Attempt(trial, folder, settings, device).begin("loop")


def load_model(folder: TrialFolder) -> tuple[Model, Transform]:
    """The trained model of a trial, in evaluation mode on the CPU, and the transform from images to its input.

    Raises:
        WeightsError: if the trial has not ended or kept no weights.
    """
    state, sight = read_weights(folder.weights)
    trial = Trial.from_json(read_json(folder.spec))
    model: Model = slot("model").build(trial.spec["model"], sight.info)
    dtype = _dtype(trial.spec["train"])
    model.to(dtype).load_state_dict(state)
    return model.eval(), Transform(sight, dtype=dtype)


# -- how it is done ---------------------------------------------------------------------------------------------------


def _alone(attempt: _Attempt, stop: Callable[[], bool], note: str = "") -> Result | None:
    """Train one trial by the loop."""
    training = attempt.begin("loop", note)
    every_s = attempt.settings.every_s
    trained = complete(training, emit=attempt.tell, save=attempt.save, stop=stop, every_s=every_s)
    return None if trained is None else attempt.finish(training, trained)


def _together(attempts: Sequence[_Attempt], stop: Callable[[], bool]) -> None:
    """Train several as a cohort; one that cannot even begin fails, and the others go on without it."""
    begun: list[tuple[_Attempt, Training]] = []
    for attempt in attempts:
        try:
            begun.append((attempt, attempt.begin("vmap")))
        except Exception as error:
            if _out_of_memory(error):
                raise
            attempt.failed(error)
    steps = [training.step for _, training in begun]
    try:
        for _, training in begun:
            require_stackable(training.model)
        members = [Member(training, attempt.tell, attempt.save) for attempt, training in begun]
        ended = train_cohort(members, stop=stop, every_s=attempts[0].settings.every_s)
    except Exception as error:
        if _out_of_memory(error) or [training.step for _, training in begun] != steps:
            raise
        note = f"trained by itself, for it could not be stacked: {_sentence(error, attempts[0].trial)}"
        for attempt, _ in begun:
            try:
                _alone(attempt, stop, note)
            except Exception as own:
                attempt.failed(own)
        return
    for (attempt, training), trained in zip(begun, ended, strict=True):
        if trained is not None:
            try:
                attempt.finish(training, trained, len(begun))
            except Exception as error:  # such as a full disk, and it is this member's alone
                attempt.failed(error)


def _shared(trial: Trial, folder: TrialFolder, settings: Settings, stop: Callable[[], bool]) -> Result | None:
    """Train one trial by several processes.  This one watches over them; the first of them writes to the folder."""
    result = _result(folder, settings)
    if result is not None:
        return result
    word = together(settings.processes, _share, (trial, folder, settings), stop)
    match word.how:
        case "done":
            return folder.result()
        case "stopped":
            return None
        case "busy":
            raise Busy(str(folder.path))
        case "lost":
            raise Lost(word.sentence)
    with suppress(Busy), folder.lease():
        folder.fail(word.sentence, word.traceback, word.how)
        folder.emit("end", status="failed", failure=word.sentence)
    raise (OutOfMemory if word.how == "oom" else TrialFailed)(word.sentence) from _Elsewhere(word.traceback)


def _share(
    rank: int, place: Path, stop: Callable[[], bool], trial: Trial, folder: TrialFolder, settings: Settings
) -> Word:
    """What each of several processes does; see :data:`vitlab.training.together.Work`."""
    try:
        for plugin in settings.plugins:
            load_file(plugin)
        with ExitStack() as held:
            if rank == 0:
                held.enter_context(folder.lease())
                if _result(folder, settings) is not None:
                    return Word("done")
            device = _device(settings.device)
            peers = held.enter_context(meeting(rank, settings.processes, place, device))  # chooses the GPU, so first
            held.enter_context(_torch_set(settings, device))
            attempt = (_Attempt if rank == 0 else _Onlooker)(trial, folder, settings, device, peers)
            return Word("stopped" if _alone(attempt, peers.agreed(stop)) is None else "done")
    except Busy:
        return Word("busy")
    except Gone as error:
        return Word("gone", str(error), traceback.format_exc())
    except Unlike as error:
        return Word("lost", str(error), traceback.format_exc())
    except (Exception, SystemExit) as error:  # whatever a guest raises
        how: Literal["oom", "error"] = "oom" if _out_of_memory(error) else "error"
        return Word(how, _sentence(error, trial), traceback.format_exc())


class _Elsewhere(Exception):
    """The traceback of another process, as the cause of what is raised here."""

    def __str__(self) -> str:
        return f"in another process\n{self.args[0]}"


class _Attempt:
    """One worker's work on a trial."""

    def __init__(
        self,
        trial: Trial,
        folder: TrialFolder,
        settings: Settings,
        device: torch.device,
        peers: Alone | None = None,
    ) -> None:
        self.trial = trial
        self.folder = folder
        self.settings = settings
        self.device = device
        self.peers = peers if peers is not None else Alone()
        self.over = False  #: whether its end has been written down
        self.began, self._since = time.time(), time.monotonic()  # a clock may be set; seconds go by
        events, _ = folder.events()
        starts = [event for event in events if event.kind == "start"]
        self.number = len(starts) + 1
        self.first_began = starts[0].t / 1000 if starts else self.began
        self.told = max((event.body["step"] for event in events if event.kind == "metrics"), default=-1)
        self.size = 0, 0  #: parameters and multiply-accumulates
        self.before_s = 0.0  #: seconds that earlier attempts put into what is gone on from

    def begin(self, engine: str, note: str = "") -> Training:
        """Everything up to the first step, or to the next.

        Args:
            engine: ``loop``, or ``vmap`` in a cohort.
            note: for the journal.
        """
        trial = self.trial
        self.open()
        if self.device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]
            torch.cuda.reset_peak_memory_stats(self.device)  # an inline trial is not the first in its process
        self.engine = engine
        spec = TrainSpec.model_validate(trial.spec["train"])
        data: Resolved = slot("dataset").resolve(trial.spec["data"])
        prepared = prepare(data, trial.seeds)
        if trial.data is not None and prepared.info.identity != trial.data:
            raise DataError(
                f"the data here is not the data this trial was planned for: {data.type} has the identity "
                f"{prepared.info.identity}, and the plan says {trial.data}"
            )
        feed = Feed(prepared, data.options["augment"], trial.seeds, self.device, _dtype(trial.spec["train"]))
        model = self._model(prepared)
        self._fit_head(model, feed)
        self.size = _size(model, trial, prepared.info)
        distillation = self._distillation(prepared)
        parts = parts_of(self.settings.micro_batch_size, self.peers)
        training = Training(model, feed, spec, trial.seeds, prepared.info.task, distillation, parts)
        resume, damage = self._checkpoint()
        if resume is not None:
            training.load(resume)
        parts.met(model, training.step)
        self.announce(training, "; ".join(filter(None, (damage, note))))
        self.kernels = _kernels_of_first_pass(model)
        self.sight = Sight(prepared.info, prepared.mean, prepared.std)
        return training

    def open(self) -> None:
        """Make the folder ready."""
        self.folder.mend()
        write_json(self.folder.spec, self.trial.to_json())

    def announce(self, training: Training, note: str) -> None:
        """Say in the journal that it begins, or goes on."""
        self.folder.emit(
            "start",
            attempt=self.number,
            host=socket.gethostname(),
            pid=os.getpid(),
            step=training.step,
            effective_batch_size=training.batch_images,
            numerics=self._numerics(),
            **({"note": note} if note else {}),
        )

    def failed(self, error: Exception) -> None:
        """Write down why it failed."""
        self.over = True
        _failed(error, self.trial, self.folder)

    def finish(self, training: Training, trained: Trained, members: int = 1) -> Result:
        """Write what is left behind; the result last, for where it is, everything is.

        Args:
            training: what :meth:`begin` gave.
            trained: what came of it.
            members: how many were trained together: each took its share of the time.
        """
        params, macs = self.size
        circumstances = Circumstances(
            started=self.first_began,
            wall_s=self._spent_s() / members,
            host=socket.gethostname(),
            attempts=self.number,
            params=params,
            macs=macs,
            memory_bytes=peak_memory(self.device),
            versions=_versions(),
            numerics={**self._numerics(), "attention": _attention(self.kernels, self.trial.spec["model"])},
        )
        return self._finish(trained, training.model, circumstances)

    def _model(self, prepared: Prepared) -> Model:
        torch.manual_seed(noise.key(self.trial.seeds["init"], "init"))
        model: Model = slot("model").build(self.trial.spec["model"], prepared.info)
        model.initialise(self.trial.seeds["init"])
        self._start_from(model)
        return model.to(self.device, _dtype(self.trial.spec["train"]))

    def _start_from(self, model: Model) -> None:
        """Take over the weights the trial starts from, if it names any."""
        named = self.trial.spec.get("init_from")
        if named is None:
            return
        how = InitFrom.model_validate(named)
        if how.checkpoint is not None:
            heads = getattr(getattr(model, "geometry", None), "heads", None)  # which hardly any file says
            source = _opened(how.checkpoint, {"heads": heads}, "keep" if how.head == "keep" else "new").model
        else:
            source, _ = self._needed("init_from")
        start_from(model, source, how)

    def _fit_head(self, model: Model, feed: Feed) -> None:
        """Solve for the head on the training images, if the trial starts from one that is fitted."""
        named = self.trial.spec.get("init_from")
        if named is not None and (how := InitFrom.model_validate(named)).head == "fitted":
            probe: Any = importlib.import_module(PROBE)  # by name, as distillation
            probe.fit_head(model, feed, how.l2, self.trial.spec["train"].get("precision", "fp32"))

    def _distillation(self, prepared: Prepared) -> Any:
        """The teacher that the trial learns from, if it names one."""
        named = self.trial.spec.get("distill")
        if named is None:
            return None
        how = Distill.model_validate(named)
        train = self.trial.spec["train"]
        mine = theirs = Sight(prepared.info, prepared.mean, prepared.std)
        teacher: Model | None = None
        if how.teacher is not None and how.teacher.checkpoint is not None:
            size = None if how.teacher.size is None else (how.teacher.size, how.teacher.size)
            opened = _opened(how.teacher.checkpoint, {"heads": how.teacher.heads, "image": size}, "keep")
            teacher, theirs = opened.model, Sight(opened.info, opened.mean, opened.std)
        elif how.teacher is not None and how.teacher.pretrained is not None:
            weights: Any = importlib.import_module(READER)
            opened = weights.open_pretrained(how.teacher.pretrained)
            teacher, theirs = opened.model, Sight(opened.info, opened.mean, opened.std)
        elif how.teacher is not None:
            teacher, transform = self._needed("teacher")
            theirs = transform.sight
        if teacher is not None:
            teacher.to(self.device, _dtype(train))
        # By name, so that distillation is no part of the code of trials without a teacher.
        distillation: Any = importlib.import_module(DISTILLATION)
        return distillation.Distillation(how, teacher, theirs, mine, train.get("precision", "fp32"))

    def _needed(self, role: str) -> tuple[Model, Transform]:
        """What a trial that this one needs has left."""
        return load_model(TrialFolder(self.folder.path.parents[1] / self.trial.needs[role]))

    def _checkpoint(self) -> tuple[Mapping[str, Any] | None, str]:
        """The state to go on from, if there is one; and what to say of one that is damaged."""
        try:
            found = checkpoint.read(self.folder.checkpoint)
        except checkpoint.Damaged as error:
            print(f"{error}; the trial begins anew", file=sys.stderr)
            return None, f"{error}; begun anew"
        if found is None:
            return None, ""
        self.before_s = found["wall_s"]
        if self.engine not in found["engine"].split("+"):
            self.engine = f"{found['engine']}+{self.engine}"
        return found["training"], ""

    def save(self, state: Mapping[str, Any]) -> None:
        content = {"training": state, "wall_s": self._spent_s(), "engine": self.engine}
        checkpoint.write(self.folder.checkpoint, content)

    def tell(self, measurement: Measurement) -> None:
        """Into the journal, unless an earlier attempt, that got further than its last checkpoint, has said it."""
        if measurement.step > self.told:
            self.folder.emit(
                "metrics",
                step=measurement.step,
                epoch=measurement.epoch,
                images=measurement.images,
                metrics=dict(measurement.metrics),
            )

    def _finish(self, trained: Trained, model: Model, circumstances: Circumstances) -> Result:
        state = model.state_dict()
        status: Literal["done", "diverged"] = "diverged" if trained.diverged else "done"
        if status == "done":
            write_predictions(self.folder.predictions, trained.predictions)
            if self.settings.keep == "last":
                write_weights(self.folder.weights, state, self.sight)
        outcome = Outcome(
            metrics=trained.metrics,
            history=trained.history,
            weights=checkpoint.digest(state) if status == "done" else "",
            steps=trained.steps,
            images=trained.images,
        )
        result = Result(self.trial.key, self.trial.code, status, outcome, circumstances, trained.diverged)
        failure = {"failure": trained.diverged} if trained.diverged else {}
        self.folder.emit("end", status=status, **failure)
        self.folder.finish(result)
        self.over = True
        shutil.rmtree(self.folder.checkpoint, ignore_errors=True)
        return result

    def _spent_s(self) -> float:
        return self.before_s + time.monotonic() - self._since

    def _numerics(self) -> dict[str, Any]:
        return {
            "torch": torch.__version__,
            "device": self.device.type,
            "processor": torch.cuda.get_device_name(self.device)
            if self.device.type == "cuda"
            else f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
            "engine": self.engine,
            "threads": self.settings.threads,
            "precision": self.trial.spec["train"].get("precision", "fp32"),
            "deterministic": self.settings.deterministic,
            "evaluation_batch": EVALUATION_BATCH,
            "processes": self.peers.count,
            **({"micro_batch_size": micro} if (micro := self.settings.micro_batch_size) is not None else {}),
        }


class _Onlooker(_Attempt):
    """The work of every process on a trial but the first: the same, and nothing of it is written."""

    def open(self) -> None:
        pass

    def announce(self, training: Training, note: str) -> None:
        pass

    def tell(self, measurement: Measurement) -> None:
        pass

    def save(self, state: Mapping[str, Any]) -> None:
        pass

    def _finish(self, trained: Trained, model: Model, circumstances: Circumstances) -> Result:
        return Result(self.trial.key, self.trial.code, "done", _NOTHING, circumstances)


_NOTHING = Outcome({}, (), "", 0, 0)


def _opened(file: str, said: Mapping[str, Any], head: Literal["keep", "new"]) -> Any:
    """The model of a checkpoint file, with what the study has ``said`` of it.

    Its reader is imported by name, so that the formats of files are no part of the code of trials that read none.
    """
    weights: Any = importlib.import_module(READER)
    return weights.open_model(Path(file), said=weights.Known(**said), head=head)


def _result(folder: TrialFolder, settings: Settings) -> Result | None:
    """The result that is there, if it needs no more; without its weights, where they are wanted, it is made again."""
    result = folder.result()
    if result is None or settings.keep == "none" or result.status != "done" or folder.weights.exists():
        return result
    return None


def _failed(error: Exception, trial: Trial, folder: TrialFolder) -> str:
    """Leave behind why a trial failed, in one sentence, and return it."""
    sentence = _sentence(error, trial)
    kind = "oom" if _out_of_memory(error) else "error"
    folder.fail(sentence, "".join(traceback.format_exception(error)), kind)
    folder.emit("end", status="failed", failure=sentence)
    return sentence


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("run.device is cuda, and torch finds no CUDA device here")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def _dtype(train: Mapping[str, Any]) -> torch.dtype:
    """Of weights and images; bf16 is autocast over float32."""
    return torch.float64 if train.get("precision") == "fp64" else torch.float32


@contextmanager
def _torch_set(settings: Settings, device: torch.device) -> Iterator[None]:
    """Torch as the trial wants it, and afterwards as it was: an inline trial is a guest in its process."""
    threads = torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    if settings.deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS refuses to be deterministic
    try:
        torch.set_num_threads(settings.threads)
        torch.use_deterministic_algorithms(settings.deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it costs time
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


_sizes: dict[tuple[Any, ...], tuple[int, int]] = {}


def _size(model: Model, trial: Trial, info: DataInfo) -> tuple[int, int]:
    """Parameters and multiply-accumulates of a trial's model, counted once a process for trials of equal models.

    These are 0 where a part of somebody else's cannot be counted, for it is no reason not to train.
    """
    known = json.dumps(trial.spec["model"], sort_keys=True), trial.origins, info
    if known not in _sizes:
        work = 0
        try:
            work = macs(model, info)
        except (NotImplementedError, RuntimeError) as error:
            print(f"the work of this model cannot be counted: {error}", file=sys.stderr)
        _sizes[known] = parameters(model), work
    return _sizes[known]


def _kernels_of_first_pass(model: Model) -> set[str]:
    """A set that will hold the kernels that parts chose by themselves in the first forward pass, a training step's."""
    kernels: set[str] = set()

    def look(*_: Any) -> None:
        found = (getattr(module, "kernel", None) for module in model.modules())
        kernels.update(kernel for kernel in found if isinstance(kernel, str))
        hook.remove()

    hook = model.register_forward_hook(look)
    return kernels


def _attention(kernels: set[str], choice: Mapping[str, Any]) -> str:
    """Which kernel attention took where it chose by itself, and its name elsewhere."""
    named = choice.get("attention")
    return "+".join(sorted(kernels)) or (cast(str, named["type"]) if isinstance(named, Mapping) else "")


@cache
def _versions() -> Mapping[str, str]:
    return {
        "vitlab": vitlab.__version__,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "numpy")},
    }


def _out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, of the host or of the device, be it where a library of the device asked for it."""
    said = isinstance(error, RuntimeError) and any(sign in str(error) for sign in OUT_OF_MEMORY)
    return said or isinstance(error, MemoryError | torch.OutOfMemoryError)


def _sentence(error: BaseException, trial: Trial) -> str:
    """Why it failed: ours as they are, others with their type."""
    if _out_of_memory(error):
        batch_size = trial.spec["train"].get("batch_size")
        return (
            f"memory ran out, with train.batch_size {batch_size}; a smaller one, a smaller model, "
            f"or fewer trials at a time (run.workers) need less"
        )
    text = " ".join(str(error).split())
    return text if isinstance(error, VitlabError) else f"{type(error).__name__}: {text}"
