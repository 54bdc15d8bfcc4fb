"""How far a study has been delivered, kept in its folder and committed after every delivery.

A process that dies between a delivery and its commit delivers the same again, which MLflow takes for what it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from vitlab.store.folders import read_json, write_json


@dataclass
class Delivered:
    """What a run of MLflow holds of a trial."""

    run: str  #: MLflow's id
    offset: int = 0  #: bytes of the journal delivered
    described: bool = False  #: parameters and data set are there
    files: int = -1  #: bytes the journal had when the files of the ended trial were delivered
    status: str = "RUNNING"  #: as MLflow was told
    began: int = 0  #: time of the first event of the journal that fills the run; 0: not known
    step: int = -1  #: last step delivered
    artifacts: int = 0  #: files that MLflow had when those of the ended trial were delivered
    ended: str = ""  #: which end was delivered: ``result``, or a failure with its time
    last_kind: str = ""  #: of the last event delivered
    last_t: int = 0


@dataclass
class Offsets:
    """What one address holds of a study."""

    file: Path
    address: str
    experiment: str = ""
    runs: dict[str, Delivered] = field(default_factory=dict)  #: by identity of the run
    metrics: list[str] = field(default_factory=list)  #: names delivered so far, sorted
    images: dict[str, int] = field(default_factory=dict)  #: keys delivered so far, and the first step of each

    @classmethod
    def read(cls, file: Path, address: str) -> Offsets:
        """What the file says; what another version says of runs is dropped, and they are delivered again."""
        data = (read_json(file, _ACCOUNTS.validate_python) or {}).get(address, {})
        found = cls(file, address)
        with suppress(ValueError):
            account = _ACCOUNT.validate_python({"file": file, "address": address, **data, "runs": {}})
            found.experiment, found.metrics, found.images = account.experiment, account.metrics, account.images
            found.runs = _RUNS.validate_python(data.get("runs", {}))
        return found

    def commit(self) -> None:
        """Write what has been delivered; other addresses keep theirs."""
        whole = read_json(self.file, _ACCOUNTS.validate_python) or {}
        runs = {name: asdict(item) for name, item in self.runs.items()}
        now = {"experiment": self.experiment, "metrics": self.metrics, "images": self.images, "runs": runs}
        if whole.get(self.address) != now:
            write_json(self.file, {**whole, self.address: now})

    def saw(self, names: set[str]) -> None:
        """Remember names of metrics."""
        if not names <= set(self.metrics):
            self.metrics = sorted({*self.metrics, *names})

    def saw_images(self, steps: Mapping[str, int]) -> None:
        """Remember keys of images."""
        for key, step in steps.items():
            self.images[key] = min(step, self.images.get(key, step))


_ACCOUNTS = TypeAdapter(dict[str, dict[str, Any]])  #: by address
_ACCOUNT = TypeAdapter(Offsets)
_RUNS = TypeAdapter(dict[str, Delivered])
