"""TensorBoard as a tracker: one run per trial, in event files under the output folder.

A cursor is the name of a trial's event file and its length.  Bytes beyond that length belong to an interrupted delivery
and are cut off and written again.  The new bytes are the same, because no event depends on the time of its delivery, so
a running TensorBoard reads every point once.

tensorboard is imported with the first delivery.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator

from vitlab.plugin import Cursor, Plan, Replay, RunSpec, Store, TrackedTrial, TrialUpdate, public, records, write_bytes

VERSION = "brain.Event:2"
STUDY = "study"
"""The run with the study file and the report; it has no points."""


def _inside(folder: str) -> str:
    path = Path(folder)
    if path.is_absolute() or not path.parts or ".." in path.parts or path.parts[0] in ("trials", "studies"):
        raise ValueError(f"a folder inside the output folder, beside trials and studies; found '{folder}'")
    return path.as_posix()


class TensorBoard(Replay):
    """Event files of TensorBoard: curves by step, final values, hyperparameters, and every trial's spec as text.

    Args:
        plan: the study.
        store: the output folder.
        run: where and how trials run.
        folder: folder of all studies' event files, relative to the output folder.
    """

    title = "TensorBoard"

    def __init__(
        self,
        plan: Plan,
        store: Store,
        run: RunSpec,
        *,
        folder: Annotated[str, AfterValidator(_inside)] = "tensorboard",
    ) -> None:
        super().__init__(plan, store, run)
        self.into = folder
        self.root = store.root / folder / plan.study

    def place(self) -> str:
        """Return the directory of the event files."""
        return self.into

    def write(self, news: TrialUpdate, mark: Cursor | None) -> Cursor:
        """Append the update to the trial's event file and return the new cursor."""
        name = _file(news)
        if mark is None:
            mark = {"file": name, "bytes": 0}
        path = self._path(mark)
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "r+b" if path.exists() else "w+b") as file:
            file.truncate(mark["bytes"])
            file.seek(mark["bytes"])
            for event in self._events(news, begins=mark["bytes"] == 0):
                _record(file, event)
            file.flush()
            os.fsync(file.fileno())
            return {"file": mark["file"], "bytes": file.tell()}

    def stored_points(self, mark: Cursor) -> Iterator[tuple[str, float, int]]:
        """Yield the scalars of the trial's event file."""
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.util.tensor_util import make_ndarray

        for event in EventFileLoader(str(self._path(mark))).Load():
            for value in event.summary.value:
                if value.metadata.plugin_data.plugin_name == "scalars":
                    yield value.tag, float(make_ndarray(value.tensor)), event.step

    def holds(self, mark: Cursor) -> bool:
        """Return True if the event file still has every byte up to the cursor."""
        path = self._path(mark)
        return path.exists() and path.stat().st_size >= mark["bytes"]

    def remove_trial(self, mark: Cursor) -> None:
        """Delete the trial's event file, and the folders that this leaves empty."""
        path = self._path(mark)
        path.unlink(missing_ok=True)
        for folder in (path.parent, path.parent.parent):
            if folder != self.root and folder.exists() and not any(folder.iterdir()):
                folder.rmdir()

    def _path(self, mark: Cursor) -> Path:
        """Return the path of a cursor's event file; a cursor of foreign results may not point outside the root."""
        path = self.root / mark["file"]
        if not path.resolve().is_relative_to(self.root.resolve()):
            raise ValueError(f"{mark['file']!r} is no event file of this study")
        return path

    def _events(self, news: TrialUpdate, *, begins: bool) -> Iterator[Any]:
        from tensorboard.compat.proto.event_pb2 import Event

        if begins:
            yield Event(wall_time=news.began / 1000, file_version=VERSION)
            for summary in _introduction(news.item, f"final/{self.plan.analysis.metric}"):
                yield Event(wall_time=news.began / 1000, summary=summary)
        for event in news.events:
            if event.kind == "metrics":
                yield from map(_scalar, records.points(event))
        end = news.end
        if end is None:
            return
        if end.reason:
            yield Event(wall_time=end.t / 1000, summary=_text("failure", end.reason))
        if end.result is not None:
            yield from map(_scalar, records.final_points(end.result, self.plan.analysis))
            yield Event(wall_time=end.t / 1000, summary=_session_end(end.how == "done"))

    def write_study(self, report: Sequence[Path]) -> str:
        """Write the study's run, which has texts only, from the beginning."""
        from tensorboard.compat.proto.event_pb2 import Event

        arms = [arm.name + (f", compared with {arm.baseline}" if arm.baseline else "") for arm in self.plan.arms]
        texts = {"question": self.plan.question or self.plan.study, "arms": _block("\n".join(arms))}
        file = self.folder / "study.yaml"
        if file.exists():
            texts["study file"] = _block(public(file.read_text(encoding="utf-8")))
        texts |= {path.stem: path.read_text(encoding="utf-8") for path in report if path.suffix == ".md"}
        events = BytesIO()
        _record(events, Event(wall_time=0, file_version=VERSION))
        for tag, text in texts.items():
            _record(events, Event(wall_time=0, summary=_text(tag, text)))
        write_bytes(self.root / STUDY / "events.out.tfevents.0000000000.study", events.getvalue())
        return f"tensorboard --logdir {self.root}"


def _file(news: TrialUpdate) -> str:
    """Return the path of a trial's event file: the run's name, then a name that is unique per training."""
    trial = news.item.planned.trial
    kind, seed = news.item.name.rsplit("/", 1)
    if news.item.kind != "trial":  # rivals of a tuning share a name
        kind = f"{kind} {trial.key[:8]}"
    return f"{_folder(kind)}/{seed}/events.out.tfevents.{news.began // 1000:010d}.{trial.key[:8]}-{trial.code[:8]}"


def _folder(name: str) -> str:
    """Return a name that any file system accepts; a changed name ends with a digest of the original."""
    plain = re.sub(r"[^\w\-.=,()+ \[\]]", "_", name).strip(". ")[:100]
    if plain == name and plain != STUDY:
        return plain
    return f"{plain}-{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"


def _record(file: Any, event: Any) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    RecordWriter(file).write(event.SerializeToString(deterministic=True))


def _scalar(point: records.Point) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event
    from torch.utils.tensorboard.summary import scalar

    return Event(wall_time=point.t / 1000, step=point.step, summary=scalar(point.name, point.value, new_style=True))


def _text(tag: str, text: str) -> Any:
    from torch.utils.tensorboard.summary import text as text_summary

    return text_summary(tag, text)


def _block(text: str) -> str:
    """Return the text as a Markdown code block."""
    return "".join(f"    {line}\n" for line in text.splitlines())


def _introduction(item: TrackedTrial, headline: str) -> list[Any]:
    """Return the trial's spec as text and its hyperparameters for the HParams table."""
    from torch.utils.tensorboard.summary import hparams

    trial = item.planned.trial
    own = {
        "arm": item.planned.arm or item.kind,
        "seed": str(item.planned.seed),
        **records.flatten_spec(trial.spec.plain()),
    }
    experiment, start, _ = hparams({key: _value(text) for key, text in sorted(own.items())}, {headline: 0.0})
    spec = yaml.safe_dump(trial.to_json(), sort_keys=False, allow_unicode=True)
    return [_text("spec", _block(spec)), experiment, start]


def _session_end(successful: bool) -> Any:
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.plugins.hparams import metadata
    from tensorboard.plugins.hparams.api_pb2 import Status
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo

    status = Status.Value("STATUS_SUCCESS" if successful else "STATUS_FAILURE")
    data = HParamsPluginData(version=metadata.PLUGIN_DATA_VERSION, session_end_info=SessionEndInfo(status=status))
    plugin_data = SummaryMetadata.PluginData(plugin_name=metadata.PLUGIN_NAME, content=data.SerializeToString())
    value = Summary.Value(tag=metadata.SESSION_END_INFO_TAG, metadata=SummaryMetadata(plugin_data=plugin_data))
    return Summary(value=[value])


def _value(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
