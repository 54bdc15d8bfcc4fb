"""The weights of a trial: a safetensors file with the input of its model, beside the trial's spec.

The file and the spec suffice to predict without the data set.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from vitlab.errors import OptionError, UserError, WeightsError, first_sentence
from vitlab.geometry import DataInfo
from vitlab.models.contract import Model, NewState, State, weights_digest
from vitlab.registry import ResolvedChoice, slot
from vitlab.spec import TrialSpec
from vitlab.spec.tree import parse_as
from vitlab.store.files import display_path, read_json, require_mapping, sort_safetensors_header, write_bytes
from vitlab.store.folders import TrialFolder

HEADER, DIGEST = "vitlab", "sha256"
"""Keys of JSON text in the header of a safetensors file, and of the digest of this text."""


@dataclass(frozen=True)
class InputSpec:
    """The input of a model: its images and their normalisation."""

    info: DataInfo
    mean: tuple[float, ...]  #: per channel, of pixels in [0, 1]
    std: tuple[float, ...]


@contextmanager
def naming_file_in_errors(file: Path) -> Iterator[None]:
    """Put the name of a file before the sentences of errors in its contents."""
    try:
        yield
    except (WeightsError, OptionError) as error:
        raise WeightsError(f"{display_path(file)}: {error}") from None


def write_weights(file: Path, state: State, input_spec: InputSpec) -> None:
    """Write the weights and the input description of a model, without fsync; the trial's result is synced last."""
    # Without them a new test set would change the file of every model.
    info = {name: value for name, value in asdict(input_spec.info).items() if name != "test_sets"}
    header = json.dumps({"info": info, "mean": input_spec.mean, "std": input_spec.std})
    # Copies, since the format rejects shared memory.
    own = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in state.items()}
    data = safetensors.torch.save(own, {HEADER: header, DIGEST: hash_text(header)})
    write_bytes(file, sort_safetensors_header(data), fsync=False)


def read_safetensors(file: Path) -> tuple[NewState, Mapping[str, str]]:
    """Return the tensors of a safetensors file, on the CPU, and its metadata."""
    with safetensors.safe_open(file, framework="pt") as reader:
        # It is not a mapping.
        return {name: reader.get_tensor(name) for name in reader.keys()}, reader.metadata() or {}  # noqa: SIM118


def build_trained_model(
    file: Path, state: State, metadata: Mapping[str, str]
) -> tuple[Model, ResolvedChoice, InputSpec]:
    """Return the model in a trial's file, in evaluation mode on the CPU, with its options and its input.

    Args:
        file: of the trial, for the spec and the result beside it; errors do not name it.
        state: its tensors.
        metadata: its header.

    Raises:
        WeightsError: if the file was changed after the trial had written it, or its spec is missing or another's.
    """
    text = metadata.get(HEADER, "")
    if metadata.get(DIGEST) != hash_text(text):
        raise WeightsError("its header is damaged; copy the file again, or delete its folder and run the study again")
    folder = TrialFolder(file.parent)
    # The result has the digest of the last weights, not of those that were kept on the way.
    result = None if file.name.startswith("weights-") else folder.result()
    if result is not None and result.outcome.weights not in ("", weights_digest(state)):
        raise WeightsError(
            "its tensors are not the weights that the trial ended with; copy the file again, or delete its folder and "
            "run the study again"
        )
    trial = read_json(folder.spec, require_mapping)
    if trial is None:
        raise WeightsError(
            f"these are the weights of a trial, and {folder.spec} does not exist or is damaged; copy both, or run the "
            "study again, which writes this file again"
        )
    try:
        header = json.loads(text)
        sees = InputSpec(parse_as(DataInfo, header["info"]), tuple(header["mean"]), tuple(header["std"]))
        choice = slot("model").resolve_choice(TrialSpec.model_validate(trial["spec"]).model)
        model: Model = slot("model").build(choice, sees.info)
        wide = next((value.dtype for value in state.values() if value.is_floating_point()), torch.float32)
        model.to(wide).load_state_dict(state)
    except UserError as error:
        raise WeightsError(f"its model cannot be built: {error}") from None
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(
            f"{folder.spec} is not the spec of these weights: {first_sentence(error)}. Restore it."
        ) from None
    return model.eval(), choice, sees


def hash_text(text: str) -> str:
    """Return the SHA-256 of a text."""
    return hashlib.sha256(text.encode()).hexdigest()
