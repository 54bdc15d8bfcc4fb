"""Models of trials: initial, teacher and trained ones."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import safetensors
import torch

from vitlab import noise
from vitlab.data.prepare import Feed, data_info, prepare
from vitlab.errors import WeightsError
from vitlab.geometry import DataInfo
from vitlab.identity.trial import Trial
from vitlab.models.contract import Model
from vitlab.models.trained import InputSpec, build_trained_model, naming_file_in_errors, read_safetensors
from vitlab.registry import import_optional, slot
from vitlab.spec import TrialSpec
from vitlab.spec.trial import Source
from vitlab.store.folders import TrialFolder
from vitlab.store.result import Ending
from vitlab.training import features
from vitlab.training.artifacts import State, Transform
from vitlab.training.loop import Training


def load_model(folder: TrialFolder) -> tuple[Model, Transform]:
    """Return the trained model of a trial, in evaluation mode on the CPU, and the transform from images to its input.

    Raises:
        WeightsError: If the trial has not ended, kept no weights, or its weights have changed since.
    """
    file = folder.weights_file
    with naming_file_in_errors(file):
        try:
            state, metadata = read_safetensors(file)
        except FileNotFoundError:
            status = folder.state()
            reason = "kept no weights (run.keep)" if status == Ending.DONE else f"has the status '{status}'"
            raise WeightsError(f"it does not exist: the trial {reason}") from None
        except (OSError, safetensors.SafetensorError) as error:
            raise WeightsError(f"it is not a file of trained weights: {error}") from None
        model, _, input_spec = build_trained_model(file, state, metadata)
    return model, Transform(input_spec, dtype=next(model.parameters()).dtype)


Load = Callable[[str], tuple[Model, InputSpec]]
"""Returns the model of a prerequisite, by its role, and the model's input."""


def load_prerequisite(trial: Trial, folder: TrialFolder, role: str) -> tuple[Model, InputSpec]:
    """Return the trained model of a trial's prerequisite, whose folder is in the same store."""
    model, transform = load_model(TrialFolder(folder.path.parents[1] / trial.needs[role]))
    return model, transform.input_spec


def check_weights_of_role(trial: Trial, role: str) -> None:
    """Raise WeightsError, as its training would, if a trial cannot use the weights of ``init_from`` or ``teacher``."""

    def build(role: str = "") -> tuple[Model, InputSpec]:
        spec: Any = trial.spec.sources()[role].trial if role else trial.spec
        info = data_info(spec.data)
        return slot("model").build(spec.model, info), InputSpec(info, *[(0.5,) * info.channels] * 2)

    model, mine = build()
    if role == "init_from":
        _load_starting_weights(model, trial, build, mine.info)
    else:
        make_distillation(trial, build, mine, torch.device("cpu")).make_module_to_train(model, 0)


def make_initial_model(trial: Trial, load: Load, info: DataInfo, device: torch.device) -> tuple[Model, list[str]]:
    """Return the model of a trial before its first step, initialised or with the weights the trial starts from.

    Returns:
        The model, and notes on these weights: what was loaded, resampled, assumed and left out.
    """
    noise.seed_torch(noise.key(trial.seeds["init"], "init"), device)
    model: Model = slot("model").build(trial.spec.model, info)
    model.initialise(trial.seeds["init"])
    notes = _load_starting_weights(model, trial, load, info)
    return model.to(device, dtype_of(trial.spec.train.precision)), notes


def make_training(
    spec: TrialSpec, seeds: Mapping[str, int], write: Callable[[State], None] = lambda state: None
) -> Training:
    """Return a training of a spec from initial values, on the CPU, without files; the spec starts from no weights."""
    data = slot("dataset").resolve_choice(spec.data)
    prepared = prepare(data, seeds)
    model: Model = slot("model").build(spec.model, prepared.info)
    model.initialise(seeds["init"])
    dtype = dtype_of(spec.train.precision)
    feed = Feed(prepared, data.options["augment"], seeds, dtype=dtype)
    return Training(model.to(dtype), feed, spec.train, seeds, write=write)


def fit_head_if_asked(model: Model, trial: Trial, feed: Feed) -> None:
    """Solve for the head on the training images, if the trial starts from one that is fitted."""
    source = trial.spec.init_from
    if source is not None and source.head == "fitted":
        assert source.l2 is not None
        features.fit_head(model, feed, source.l2, trial.spec.train.precision)


def make_distillation(trial: Trial, load: Load, student_input: InputSpec, device: torch.device) -> Any:
    """Return the distillation of a trial, or None if it has none."""
    how, precision = trial.spec.distill, trial.spec.train.precision
    if how is None:
        return None
    theirs, teacher, source = student_input, None, how.teacher
    if source is not None and source.trial is None:
        size = None if source.size is None else (source.size, source.size)
        loaded = _open_weights("teacher", source, {"heads": source.heads, "image": size}, "keep", trial)
        teacher, theirs = loaded.model, InputSpec(loaded.info, loaded.mean, loaded.std)
        for note in loaded.notes:
            print(f"of the teacher's weights: {note}", file=sys.stderr)
    elif source is not None:
        teacher, theirs = load("teacher")
    if teacher is not None:
        teacher.to(device, dtype_of(precision))
    return import_optional("distillation").Distillation(how, teacher, theirs, student_input, precision)


def _load_starting_weights(model: Model, trial: Trial, load: Load, info: DataInfo) -> list[str]:
    """Load the weights the trial starts from, if any, and return notes on them."""
    how = trial.spec.init_from
    if how is None:
        return []
    # Imported for the trials that need it alone, with the readers of other libraries' weights.
    from vitlab.weights.transfer import load_and_freeze_weights

    notes: list[str] = []
    if how.trial is None:
        heads = getattr(getattr(model, "geometry", None), "heads", None)  # few weight files record them
        head: Literal["keep", "new"] = "keep" if how.head == "keep" else "new"
        loaded = _open_weights("init_from", how, {"heads": heads}, head, trial)
        source, notes = loaded.model, list(loaded.notes)
        labels = loaded.info.labels
        if head == "keep" and labels != info.labels and len(labels) == len(info.labels):
            first = next(i for i, (one, other) in enumerate(zip(labels, info.labels, strict=True)) if one != other)
            notes.append(
                f"head: keep keeps outputs for other classes: {first} is {labels[first]}, here {info.labels[first]}"
            )
    else:
        source, _ = load("init_from")
    return [*load_and_freeze_weights(model, source, how), *notes]


def _open_weights(
    role: str, source: Source, facts: Mapping[str, object], head: Literal["keep", "new"], trial: Trial
) -> Any:
    """Open published weights, or a file after checking that it is the one the trial was planned with.

    Args:
        role: Of the weights in the trial, ``init_from`` or ``teacher``.
        source: Of the weights, other than a trial.
        facts: What the study states about a file.
        head: See :func:`vitlab.weights.opening.open_model`.
        trial: The trial, with the digests of its plan.
    """
    weights, digests = import_optional("weights"), trial.files.get(role)
    if source.pretrained is not None:
        return weights.open_torchvision_weights(source.pretrained, (digests or {}).get(source.pretrained))
    assert source.checkpoint is not None  # planning makes one of the other sources
    return weights.open_model(Path(source.checkpoint), facts=weights.ModelFacts(**facts), head=head, digests=digests)


def dtype_of(precision: str) -> torch.dtype:
    """Return the dtype of weights and images; bf16 and fp16 are autocast over float32."""
    return torch.float64 if precision == "fp64" else torch.float32
