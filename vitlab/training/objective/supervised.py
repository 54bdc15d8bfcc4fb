"""The objective ``supervised``: a loss on labels, optionally with mixed images or a teacher."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from torch import Tensor

from vitlab.data.batches import Batch
from vitlab.geometry import DataInfo
from vitlab.registry import import_optional, slot
from vitlab.training.evaluation import forward_logits
from vitlab.training.losses import CrossEntropy, Loss, Value
from vitlab.training.metrics import Metric, build_metrics
from vitlab.training.objective import Objective, Setup, objective

if TYPE_CHECKING:
    from vitlab.training.distributed import ByBatch
    from vitlab.training.mixup import Mixing


@objective.register("supervised")
class Supervised(Objective):
    """The loss ``train.loss`` on labels, of mixed images with ``train.mix``, and of a teacher with ``distill``."""

    vmap_safe = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        spec, feed = setup.spec, setup.feed
        self.criterion: Loss = slot("loss").build(spec.loss)
        is_own = type(self.criterion).set_class_counts is not Loss.set_class_counts
        is_weighted = not isinstance(self.criterion, CrossEntropy) or self.criterion.class_weights == "balanced"
        self.uses_class_counts = is_own and is_weighted
        if self.uses_class_counts and feed.info.task == "classification":
            self.criterion.set_class_counts(feed.class_counts())
        self.distillation = setup.distillation
        if self.distillation is not None:
            self.module = self.distillation.make_module_to_train(setup.model, setup.seeds["init"])
        self.mixing: Mixing | None = None
        if spec.mix is not None:
            self.mixing = import_optional("mixing").Mixing(spec.mix, setup.seeds["mixup"], feed.info.classes)

    @classmethod
    def standard_metrics(cls, data: DataInfo) -> dict[str, Metric]:
        return build_metrics(data)

    def batch(self, step: int, rows: range) -> Batch:
        """Return the images and their labels; class shares for mixed images."""
        if self.mixing is None:
            return super().batch(step, rows)
        spec, feed = self.setup.spec, self.setup.feed
        ranges = self.mixing.rows(rows, feed.images_per_batch(spec.batch_size))
        x_BCHW, y_B, id_B, epoch, host_id_B = self.mixing(feed.batch(step, spec.batch_size, spec.repeats, ranges), step)
        # The partners were needed for mixing alone.
        own = slice(len(rows))
        return Batch(x_BCHW[own], y_B[own], id_B[own], epoch, None if host_id_B is None else host_id_B[own])

    def loss(self, x: Tensor, target: Tensor) -> Value:
        if self.distillation is None:
            return self.criterion(self.views(x, target), target)
        return self.distillation(self.criterion, self.module, target, x)

    def views(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        return forward_logits(self.setup.model, x, self.setup.spec.precision)

    def weight(self, target: Tensor) -> Tensor:
        return self.criterion.weight(target)

    def evaluation_metrics(self) -> AbstractContextManager[ByBatch]:
        if self.distillation is None:
            return super().evaluation_metrics()
        return self.distillation.collecting_token_cosine(self.setup.model)

    def stacking_incompatibility(self) -> str | None:
        if self.distillation is not None:
            return "engine vmap does not support distillation"
        if self.uses_class_counts:  # they may differ between the trials of a stack, which share one loss
            return "engine vmap does not support a loss that depends on class counts"
        return super().stacking_incompatibility()
