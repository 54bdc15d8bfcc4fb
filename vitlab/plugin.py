"""The names for authors of plugins: contracts and slots, what components are made of, and the contract test.

A component imports from here and from ``vitlab`` alone::

    from vitlab.plugin import Geometry, Position, check_component

These names stay within a minor version of vitlab; all other modules may change at any time.  The page "Write a plugin"
of the documentation lists them.  Each is imported on first use, so that ``import vitlab.plugin`` imports no torch.
"""

from typing import TYPE_CHECKING, Any

from vitlab import imports

if TYPE_CHECKING:
    from vitlab import noise
    from vitlab.components.attention import Attention, attention, rotate
    from vitlab.components.base import Dropout, DropPath, Rotation
    from vitlab.components.block import Block, Place, Role, block
    from vitlab.components.head import Head, Logits, head
    from vitlab.components.init import Init, init, seeded
    from vitlab.components.mlp import MLP, mlp
    from vitlab.components.norm import Norm, norm
    from vitlab.components.patch import PatchEmbedding, patch
    from vitlab.components.position import Position, Resampling, position, resample_grid
    from vitlab.data.augment import Augment, augment
    from vitlab.data.datasets import Dataset, Images, dataset, files
    from vitlab.data.datasets.base import Split
    from vitlab.data.datasets.pictures import Decoded, Decoding, EncodedPictures, Pictures
    from vitlab.data.pixels import IGNORED, VOID
    from vitlab.data.torchvision_import import torchvision
    from vitlab.engines import Engine, engine
    from vitlab.errors import DataError, OptionError, WeightsError, nearest, public
    from vitlab.executors import Executor, Job, JobEnd, executor
    from vitlab.executors.worker import WorkerCommand
    from vitlab.geometry import DataInfo, Geometry
    from vitlab.models import Model, model
    from vitlab.models.contract import State
    from vitlab.planning.values import Plan
    from vitlab.registry import Pick, Slot, Unhashed, slot
    from vitlab.report.drawing import Drawing
    from vitlab.report.phrasing import Column, Scale
    from vitlab.report.report import Report
    from vitlab.report.sections import Findings, Image, Section, Table, section
    from vitlab.spec import Choice, RunSpec
    from vitlab.store.files import write_bytes
    from vitlab.store.folders import Store
    from vitlab.testing import check_component, components, parametrize_components
    from vitlab.trackers import records, tracker
    from vitlab.trackers.replay import Cursor, Replay, TrackedTrial, TrialUpdate
    from vitlab.training.evaluation import EvaluationResult
    from vitlab.training.losses import Loss, Value, flat, loss, mean_labelled
    from vitlab.training.metrics import Metric, metric
    from vitlab.training.objective import Objective, Setup, objective
    from vitlab.training.objective.supervised import Supervised
    from vitlab.training.optim import Group, Optimizer, WeightAverage, optimizer
    from vitlab.training.optim.schedules import Schedule, schedule

__all__ = [
    "IGNORED",
    "MLP",
    "VOID",
    "Attention",
    "Augment",
    "Block",
    "Choice",
    "Column",
    "Cursor",
    "DataError",
    "DataInfo",
    "Dataset",
    "Decoded",
    "Decoding",
    "Drawing",
    "DropPath",
    "Dropout",
    "EncodedPictures",
    "Engine",
    "EvaluationResult",
    "Executor",
    "Findings",
    "Geometry",
    "Group",
    "Head",
    "Image",
    "Images",
    "Init",
    "Job",
    "JobEnd",
    "Logits",
    "Loss",
    "Metric",
    "Model",
    "Norm",
    "Objective",
    "Optimizer",
    "OptionError",
    "PatchEmbedding",
    "Pick",
    "Pictures",
    "Place",
    "Plan",
    "Position",
    "Replay",
    "Report",
    "Resampling",
    "Role",
    "Rotation",
    "RunSpec",
    "Scale",
    "Schedule",
    "Section",
    "Setup",
    "Slot",
    "Split",
    "State",
    "Store",
    "Supervised",
    "Table",
    "TrackedTrial",
    "TrialUpdate",
    "Unhashed",
    "Value",
    "WeightAverage",
    "WeightsError",
    "WorkerCommand",
    "attention",
    "augment",
    "block",
    "check_component",
    "components",
    "dataset",
    "engine",
    "executor",
    "files",
    "flat",
    "head",
    "init",
    "loss",
    "mean_labelled",
    "metric",
    "mlp",
    "model",
    "nearest",
    "noise",
    "norm",
    "objective",
    "optimizer",
    "parametrize_components",
    "patch",
    "position",
    "public",
    "records",
    "resample_grid",
    "rotate",
    "schedule",
    "section",
    "seeded",
    "slot",
    "torchvision",
    "tracker",
    "write_bytes",
]


def __getattr__(name: str) -> Any:
    return imports.import_lazy_name(__name__, name)


def __dir__() -> list[str]:
    return __all__
