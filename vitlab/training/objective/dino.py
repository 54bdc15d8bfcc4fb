"""The objective ``dino``: self-distillation of views of an image.

B images, V views of each, of which the teacher sees the first G, C channels, H and W pixels, S pooled
vectors, D width, K prototypes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab import noise
from vitlab.components.base import Count, Positive, Probability, to_float32_or_wider
from vitlab.components.head import Head
from vitlab.components.init import draw_matrices_and_zero_biases, fill_lecun
from vitlab.data.batches import Batch
from vitlab.geometry import DataInfo
from vitlab.models.contract import Model
from vitlab.models.vit import ViT
from vitlab.registry import ResolvedChoice
from vitlab.spec.choice import TwoOrMore
from vitlab.training.ema import move_towards
from vitlab.training.evaluation import autocast
from vitlab.training.losses import Value
from vitlab.training.objective import Objective, Setup, objective
from vitlab.training.optim.schedules import half_cosine

TEACHER_VIEWS = 2
"""Views that the teacher sees."""


@objective.register("dino")
class DINO(Objective):
    """Predict the teacher's output for another view of an image.  Reference: arXiv:2104.14294.

    The views of an image are drawn by ``data.augment``, such as ``random_resized_crop``.  The teacher, an exponential
    moving average of the student, sees two of them, and the student all; each predicts a distribution over prototypes
    from what the head reads, through a projection.  The teacher's output is centred and sharpened, which prevents a
    constant solution.  Differs from the paper: all views have the size of the image and one distribution, the last
    layer of the projection is trained from the first step, and the teacher's temperature is constant.

    A loss near ln K, as of uniform outputs, need not be a failure; ``val/knn`` is the measure.  In trials of a few
    hundred steps on small images, features improved while the loss stayed there, and teachers of smaller ``momentum``
    had a lower loss and worse features.  The loss falls if the teacher's outputs for different images differ by more
    than its temperature.  In narrow models with initial values of standard deviation 0.02 they did not at first;
    ``init: jax`` with ``position: learned`` helped there.

    Stored weights are the student's; at the end of a schedule that falls to 0 they are close to the teacher's.

    Args:
        setup: Parts of the training.
        views: Number of views of an image.
        prototypes: Outputs of the projection.
        hidden: Width of the two hidden layers of the projection.
        bottleneck: Width of the layer before the prototypes.
        student_temperature: Temperature of the student's softmax.
        teacher_temperature: Temperature of the teacher's softmax.
        momentum: Share that the teacher keeps of itself in the first step; it grows to 1 along half a cosine.
        centre_momentum: Share that the centre of the teacher's outputs keeps of itself in a step.
    """

    labels = False
    unread = (  # of the head, it reads the pooling alone
        "train.loss",
        *(f"model.head.{name}" for name in ("type", "drop", "representation_size", "weights")),
    )
    whole_batch = True
    needs_end = True  # of the course of the teacher's momentum

    def __init__(
        self,
        setup: Setup,
        *,
        views: TwoOrMore = 2,
        prototypes: Count = 1024,
        hidden: Count = 256,
        bottleneck: Count = 64,
        student_temperature: Positive = 0.1,
        teacher_temperature: Positive = 0.04,
        momentum: Probability = 0.996,
        centre_momentum: Probability = 0.9,
    ) -> None:
        super().__init__(setup)
        model = setup.model
        assert isinstance(model, ViT)
        self.count = views
        self.student_temperature = student_temperature
        self.teacher_temperature = teacher_temperature
        self.momentum = momentum
        self.centre_momentum = centre_momentum
        projection = Projection(model.geometry.dim, hidden, bottleneck, prototypes)
        # The deviation of 0.02 in the authors' code is about 1 / sqrt(2,048), their inputs; in narrow layers it would
        # make the outputs of all images alike.
        draw_matrices_and_zero_biases(projection, setup.seeds["init"], "projection", fill_lecun)
        self.student = ProjectedViT(model, projection.to(next(model.parameters())))
        self.module: SelfDistillation = SelfDistillation(self.student)

    @classmethod
    def incompatibility(cls, data: DataInfo, model: ResolvedChoice, trial: Mapping[str, Any]) -> str | None:
        """Return a sentence if the model does not pool its tokens to one vector."""
        if data.task != "classification":
            return f"objective 'dino' is for images with one label each, and the task of this data is {data.task}"
        if not issubclass(model.component, ViT):
            return f"objective 'dino' trains a ViT, and model '{model.type}' is none; use model 'vit'"
        head = model.component.anatomy(data, model.options).head
        if head.component.forward is not Head.forward or head.type.endswith("distilled"):
            return f"objective 'dino' reads one vector of an image, and head '{head.type}' pools to none; use 'linear'"
        if not trial["data"]["augment"]:
            return (
                "objective 'dino' learns from views that data.augment draws, and it is empty; add random_resized_crop"
            )
        if trial["train"].get("repeats", 1) > 1:
            return "objective 'dino' draws several views of every image itself; remove train.repeats"
        if trial["train"].get("ema"):
            return "objective 'dino' averages weights itself, for its teacher; remove train.ema"
        return None

    def batch(self, step: int, rows: range) -> Batch:
        """Return the views of the images, (B, V, C, H, W)."""
        batch = self.setup.feed.batch(step, self.setup.spec.batch_size, views=self.count)
        x_BVCHW = batch.x_BCHW.unflatten(0, (-1, self.count))  # type: ignore[no-untyped-call]
        return Batch(x_BVCHW, batch.y_B[:: self.count], batch.id_B[:: self.count], batch.epoch)

    def loss(self, x: Tensor, target: Tensor) -> Value:
        """Return the mean cross-entropy over pairs of different views, and update the centre."""
        views = x.unbind(1)
        with torch.no_grad():
            teacher = torch.stack([self._outputs(self.module.teacher, view) for view in views[:TEACHER_VIEWS]])
            # Sharpened by the centre of the steps before, which is moved afterwards.
            target_GBK = self._sharpen(teacher)
            self.module.centre_K.lerp_(teacher.mean((0, 1)).to(self.module.centre_K), 1 - self.centre_momentum)
        terms = []
        for number, view in enumerate(views):
            with self._use_view_draws(number):
                log_BK = self._student_logs(view)
            # Equal views are left out: predicting one's own output teaches nothing.
            terms += [
                -(target_BK * log_BK).sum(1).mean() for other, target_BK in enumerate(target_GBK) if other != number
            ]
        return Value(torch.stack(terms).mean(), {})

    @torch.no_grad()
    def views(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        """Return the cross-entropy of student and teacher on each image, (B,), for the metrics to read."""
        return {"": -(self._sharpen(self._outputs(self.module.teacher, x)) * self._student_logs(x)).sum(1)}

    def after_step(self, step: int) -> None:
        """Move weights and statistics of the teacher towards the student's; copy its integer buffers."""
        progress = (step - 1) / max(1, self.setup.steps)
        share = 1 - (1 - self.momentum) * half_cosine(progress)
        # The statistics of batch normalisation belong to the weights: the teacher, in evaluation mode, updates none.
        move_towards(self.module.teacher.state_dict(), self.student.state_dict(), 1 - share)

    def _outputs(self, model: ProjectedViT, x_BCHW: Tensor) -> Tensor:
        with autocast(x_BCHW.device, self.setup.spec.precision):
            return to_float32_or_wider(model(x_BCHW))

    def _student_logs(self, x_BCHW: Tensor) -> Tensor:
        """Return the logarithms of the student's distribution over prototypes, (B, K)."""
        return (self._outputs(self.student, x_BCHW) / self.student_temperature).log_softmax(1)

    def _sharpen(self, teacher: Tensor) -> Tensor:
        return ((teacher - self.module.centre_K) / self.teacher_temperature).softmax(-1)

    def _use_view_draws(self, view: int) -> AbstractContextManager[None]:
        """Return a context with random draws of its own for a view."""
        draws = noise.current()
        if draws is None:
            return nullcontext()
        dropout, drop_path, step = (noise.fold(key, view) for key in (draws.dropout, draws.drop_path, draws.step))
        return noise.use_model_draws(noise.Draws(dropout, drop_path, draws.sample_B, step))


class SelfDistillation(Model):
    """Student, teacher and the centre of the teacher's outputs.

    Args:
        student: The model and its projection, which are trained.
    """

    centre_K: Tensor

    def __init__(self, student: ProjectedViT) -> None:
        super().__init__()
        self.student = student
        # The teacher starts as the student, and gets no gradient.
        self.teacher = copy.deepcopy(student).requires_grad_(False)
        like = student.projection.prototypes
        self.register_buffer("centre_K", like.new_zeros(len(like)))

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the student; the teacher stays in evaluation mode."""
        super().train(mode)
        self.teacher.eval()
        return self


class ProjectedViT(nn.Module):
    """A ViT with a projection in the place of its classifier."""

    def __init__(self, model: ViT, projection: Projection) -> None:
        super().__init__()
        self.model = model
        self.projection = projection

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return one score per prototype, (B, K), from the vector that the head pools."""
        model = self.model
        x_BSD = model.fc_norm(model.head.pool(model.forward_features(x_BCHW)))
        return self.projection(x_BSD[:, 0])


class Projection(nn.Module):
    """Three linear layers with GELU, then the cosine similarity with every prototype."""

    def __init__(self, dim: int, hidden: int, bottleneck: int, prototypes: int) -> None:
        super().__init__()
        widths = (dim, hidden, hidden, bottleneck)
        self.layers = nn.ModuleList([nn.Linear(*pair) for pair in pairwise(widths)])
        self.prototypes = nn.Parameter(torch.empty(prototypes, bottleneck))

    def forward(self, x_BD: Tensor) -> Tensor:
        """Return the similarities, (B, K)."""
        *hidden, last = self.layers
        for layer in hidden:
            x_BD = F.gelu(layer(x_BD))
        return F.normalize(last(x_BD), dim=1) @ F.normalize(self.prototypes, dim=1).T
