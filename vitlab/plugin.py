"""The names for authors of plugins: contracts and slots, what components are made of, and the contract test.

A component imports from here and from ``vitlab`` alone::

    from vitlab.plugin import Geometry, Position, check_component

These names stay within a minor version of vitlab; all other modules may change at any time.  The page "Write a plugin"
of the documentation lists them.  Each is imported on first use, so that ``import vitlab.plugin`` imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitlab import noise as noise
    from vitlab.components.attention import Attention as Attention
    from vitlab.components.attention import Rotation as Rotation
    from vitlab.components.attention import attention as attention
    from vitlab.components.attention import rotate as rotate
    from vitlab.components.base import Dropout as Dropout
    from vitlab.components.base import DropPath as DropPath
    from vitlab.components.block import Block as Block
    from vitlab.components.block import Place as Place
    from vitlab.components.block import Role as Role
    from vitlab.components.block import block as block
    from vitlab.components.head import Head as Head
    from vitlab.components.head import Logits as Logits
    from vitlab.components.head import head as head
    from vitlab.components.init import Init as Init
    from vitlab.components.init import init as init
    from vitlab.components.init import seeded as seeded
    from vitlab.components.mlp import MLP as MLP
    from vitlab.components.mlp import mlp as mlp
    from vitlab.components.norm import Norm as Norm
    from vitlab.components.norm import norm as norm
    from vitlab.components.patch import PatchEmbedding as PatchEmbedding
    from vitlab.components.patch import patch as patch
    from vitlab.components.position import Position as Position
    from vitlab.components.position import Resampling as Resampling
    from vitlab.components.position import position as position
    from vitlab.components.position import resample_grid as resample_grid
    from vitlab.data.augment import Augment as Augment
    from vitlab.data.augment import augment as augment
    from vitlab.data.datasets import Dataset as Dataset
    from vitlab.data.datasets import Images as Images
    from vitlab.data.datasets import dataset as dataset
    from vitlab.data.datasets import files as files
    from vitlab.data.datasets.base import Split as Split
    from vitlab.data.datasets.pictures import Decoded as Decoded
    from vitlab.data.datasets.pictures import Decoding as Decoding
    from vitlab.data.datasets.pictures import EncodedPictures as EncodedPictures
    from vitlab.data.datasets.pictures import Pictures as Pictures
    from vitlab.data.pixels import IGNORED as IGNORED
    from vitlab.data.pixels import VOID as VOID
    from vitlab.data.torchvision_import import torchvision as torchvision
    from vitlab.engines import Engine as Engine
    from vitlab.engines import engine as engine
    from vitlab.errors import DataError as DataError
    from vitlab.errors import OptionError as OptionError
    from vitlab.errors import WeightsError as WeightsError
    from vitlab.errors import nearest as nearest
    from vitlab.executors import Executor as Executor
    from vitlab.executors import Job as Job
    from vitlab.executors import JobEnd as JobEnd
    from vitlab.executors import executor as executor
    from vitlab.executors.command import WorkerCommand as WorkerCommand
    from vitlab.geometry import DataInfo as DataInfo
    from vitlab.geometry import Geometry as Geometry
    from vitlab.models import Model as Model
    from vitlab.models import model as model
    from vitlab.models.contract import State as State
    from vitlab.plan.values import Plan as Plan
    from vitlab.registry import Pick as Pick
    from vitlab.registry import Slot as Slot
    from vitlab.registry import Unhashed as Unhashed
    from vitlab.registry import slot as slot
    from vitlab.report.document import Report as Report
    from vitlab.report.drawing import Drawing as Drawing
    from vitlab.report.phrasing import Column as Column
    from vitlab.report.phrasing import Scale as Scale
    from vitlab.report.sections import Findings as Findings
    from vitlab.report.sections import Image as Image
    from vitlab.report.sections import Section as Section
    from vitlab.report.sections import Table as Table
    from vitlab.report.sections import section as section
    from vitlab.spec import Choice as Choice
    from vitlab.spec import RunSpec as RunSpec
    from vitlab.spec.changes import public as public
    from vitlab.store.files import write_bytes as write_bytes
    from vitlab.store.folders import Store as Store
    from vitlab.testing import check_component as check_component
    from vitlab.testing import components as components
    from vitlab.testing import parametrize_components as parametrize_components
    from vitlab.trackers import Cursor as Cursor
    from vitlab.trackers import Replay as Replay
    from vitlab.trackers import TrackedTrial as TrackedTrial
    from vitlab.trackers import TrialUpdate as TrialUpdate
    from vitlab.trackers import records as records
    from vitlab.trackers import tracker as tracker
    from vitlab.training.evaluation import EvaluationResult as EvaluationResult
    from vitlab.training.losses import Loss as Loss
    from vitlab.training.losses import Value as Value
    from vitlab.training.losses import flat as flat
    from vitlab.training.losses import loss as loss
    from vitlab.training.losses import mean_labelled as mean_labelled
    from vitlab.training.metrics import Metric as Metric
    from vitlab.training.metrics import metric as metric
    from vitlab.training.objective import Objective as Objective
    from vitlab.training.objective import Setup as Setup
    from vitlab.training.objective import objective as objective
    from vitlab.training.objective.contract import Weights as Weights
    from vitlab.training.objective.supervised import Supervised as Supervised
    from vitlab.training.optim import Group as Group
    from vitlab.training.optim import Optimizer as Optimizer
    from vitlab.training.optim import Schedule as Schedule
    from vitlab.training.optim import WeightAverage as WeightAverage
    from vitlab.training.optim import optimizer as optimizer
    from vitlab.training.optim import schedule as schedule

_NAMES = {
    "vitlab": ["noise"],
    "vitlab.components.attention": ["Attention", "Rotation", "attention", "rotate"],
    "vitlab.components.base": ["DropPath", "Dropout"],
    "vitlab.components.block": ["Block", "Place", "Role", "block"],
    "vitlab.components.head": ["Head", "Logits", "head"],
    "vitlab.components.init": ["Init", "init", "seeded"],
    "vitlab.components.mlp": ["MLP", "mlp"],
    "vitlab.components.norm": ["Norm", "norm"],
    "vitlab.components.patch": ["PatchEmbedding", "patch"],
    "vitlab.components.position": ["Position", "Resampling", "position", "resample_grid"],
    "vitlab.data.augment": ["Augment", "augment"],
    "vitlab.data.datasets": ["Dataset", "Images", "dataset", "files"],
    "vitlab.data.datasets.base": ["Split"],
    "vitlab.data.datasets.pictures": ["Decoded", "Decoding", "EncodedPictures", "Pictures"],
    "vitlab.data.pixels": ["IGNORED", "VOID"],
    "vitlab.data.torchvision_import": ["torchvision"],
    "vitlab.engines": ["Engine", "engine"],
    "vitlab.errors": ["DataError", "OptionError", "WeightsError", "nearest"],
    "vitlab.executors": ["Executor", "Job", "JobEnd", "executor"],
    "vitlab.executors.command": ["WorkerCommand"],
    "vitlab.geometry": ["DataInfo", "Geometry"],
    "vitlab.models": ["Model", "model"],
    "vitlab.models.contract": ["State"],
    "vitlab.plan.values": ["Plan"],
    "vitlab.registry": ["Pick", "Slot", "Unhashed", "slot"],
    "vitlab.report.document": ["Report"],
    "vitlab.report.drawing": ["Drawing"],
    "vitlab.report.phrasing": ["Column", "Scale"],
    "vitlab.report.sections": ["Findings", "Image", "Section", "Table", "section"],
    "vitlab.spec": ["Choice", "RunSpec"],
    "vitlab.spec.changes": ["public"],
    "vitlab.store.files": ["write_bytes"],
    "vitlab.store.folders": ["Store"],
    "vitlab.testing": ["check_component", "components", "parametrize_components"],
    "vitlab.trackers": ["Cursor", "Replay", "TrackedTrial", "TrialUpdate", "records", "tracker"],
    "vitlab.training.evaluation": ["EvaluationResult"],
    "vitlab.training.losses": ["Loss", "Value", "flat", "loss", "mean_labelled"],
    "vitlab.training.metrics": ["Metric", "metric"],
    "vitlab.training.objective": ["Objective", "Setup", "objective"],
    "vitlab.training.objective.contract": ["Weights"],
    "vitlab.training.objective.supervised": ["Supervised"],
    "vitlab.training.optim": ["Group", "Optimizer", "Schedule", "WeightAverage", "optimizer", "schedule"],
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'vitlab.plugin' has no attribute '{name}'")
    home = importlib.import_module(_HOMES[name])
    if not hasattr(home, name):  # a module in a package
        return importlib.import_module(f"{_HOMES[name]}.{name}")
    return getattr(home, name)


def __dir__() -> list[str]:
    return __all__
