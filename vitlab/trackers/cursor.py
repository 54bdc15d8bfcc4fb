"""Record of what has been delivered of a study, stored in its folder and committed after every delivery.

A process that dies between a delivery and its commit delivers the same data again; MLflow recognises the duplicates.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from vitlab.store.files import read_json, write_json


@dataclass
class RunState:
    """Delivery state of one trial's MLflow run."""

    run: str  #: MLflow's id
    offset: int = 0  #: bytes of the journal delivered
    described: bool = False  #: parameters and data set are delivered
    files: int = -1  #: bytes of the journal when the files of the ended trial were delivered
    status: str = "RUNNING"  #: last status sent to MLflow
    began: int = 0  #: time of the first event of the run's journal; 0: unknown
    step: int = -1  #: last step delivered
    artifacts: int = 0  #: number of files in MLflow when those of the ended trial were delivered
    ended: str = ""  #: the delivered ending: ``result``, or a failure with its time
    last_kind: str = ""  #: kind of the last event delivered
    last_t: int = 0


@dataclass
class Offsets:
    """Delivery state of one study at one address."""

    file: Path
    address: str
    experiment: str = ""
    runs: dict[str, RunState] = field(default_factory=dict)  #: by identity of the trial
    metrics: list[str] = field(default_factory=list)  #: delivered metric names, sorted
    images: dict[str, int] = field(default_factory=dict)  #: delivered image keys and the first step of each

    @classmethod
    def read(cls, file: Path, address: str) -> Offsets:
        """Read the state from a file; runs written by an incompatible version are dropped and delivered again."""
        data = (read_json(file, _ACCOUNTS.validate_python) or {}).get(address, {})
        offsets = cls(file, address)
        with suppress(ValueError):
            account = _ACCOUNT.validate_python({"file": file, "address": address, **data, "runs": {}})
            offsets.experiment, offsets.metrics, offsets.images = account.experiment, account.metrics, account.images
            offsets.runs = _RUNS.validate_python(data.get("runs", {}))
        return offsets

    def commit(self) -> None:
        """Write the state to the file and keep the entries of other addresses."""
        whole = read_json(self.file, _ACCOUNTS.validate_python) or {}
        runs = {name: asdict(item) for name, item in self.runs.items()}
        now = {"experiment": self.experiment, "metrics": self.metrics, "images": self.images, "runs": runs}
        if whole.get(self.address) != now:
            write_json(self.file, {**whole, self.address: now})

    def add_metrics(self, names: set[str]) -> None:
        """Add metric names to the delivered ones."""
        if not names <= set(self.metrics):
            self.metrics = sorted({*self.metrics, *names})

    def add_images(self, steps: Mapping[str, int]) -> None:
        """Add image keys and their first steps to the delivered ones."""
        for key, step in steps.items():
            self.images[key] = min(step, self.images.get(key, step))


_ACCOUNTS = TypeAdapter(dict[str, dict[str, Any]])  #: by address
_ACCOUNT = TypeAdapter(Offsets)
_RUNS = TypeAdapter(dict[str, RunState])
