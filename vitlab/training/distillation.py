"""Distillation: a student learns from labels, and from what a teacher makes of the same augmented images.

The teacher is in evaluation mode and is not trained.  It sees the student's batch as itself was taught to see: in its
own colours, at its own size, normalised by its own mean and deviation.

B batch, K classes, C channels, H and W pixels, D width.
Reference: arXiv:2012.12877 (DeiT), arXiv:1503.02531 (soft distillation).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.errors import WeightsError
from vitlab.geometry import Geometry
from vitlab.models.contract import Model
from vitlab.spec.trial import Distill
from vitlab.training.artifacts import InputSpec
from vitlab.training.loop import forward_logits
from vitlab.training.losses import Loss, Value
from vitlab.training.metrics import mean

LUMA = (0.299, 0.587, 0.114)
"""Red, green and blue in grey: ITU-R 601."""


class Distillation:
    """A teacher, and what is learned from it; or two tokens that learn from the labels, to compare with."""

    def __init__(self, how: Distill, teacher: Model | None, theirs: InputSpec, mine: InputSpec, precision: str) -> None:
        """
        Args:
            how: what is learned.
            teacher: on the device and in the dtype of the student; it is frozen here.  None where labels teach alone.
            theirs: what the teacher sees.
            mine: what the student sees.
            precision: in which the teacher computes: the student's.

        Raises:
            WeightsError: if the teacher tells another number of classes apart.
        """
        if theirs.info.classes != mine.info.classes:
            raise WeightsError(
                f"the teacher tells {theirs.info.classes} classes apart, and this trial {mine.info.classes}"
            )
        self.how = how
        self.precision = precision
        self.teacher = teacher
        if teacher is not None:
            teacher.eval().requires_grad_(False)
            self.glasses = InputAdapter(mine, theirs, like=next(teacher.parameters()))

    def __call__(self, loss: Loss, views: Mapping[str, Tensor], target: Tensor, x_BCHW: Tensor) -> Value:
        """The loss of a batch, of labels and teacher together, and its terms.

        Args:
            loss: what is learned from labels.
            views: the student's logits; with a distillation head ``cls`` learns from labels, ``dist`` from the teacher.
            target: as ``loss`` takes it.
            x_BCHW: the images as the student has seen them.
        """
        base = loss({**views, "": views["cls"]} if "cls" in views else views, target)
        student_BK = views["dist"] if "dist" in views else views[""]
        if self.teacher is None:
            distilled = loss({**views, "": student_BK}, target).total
        else:
            distilled = self.distilled(student_BK, self.logits(self.teacher, x_BCHW).to(student_BK.dtype))
        total = (1 - self.how.alpha) * base.total + self.how.alpha * distilled
        return Value(total, {**base.parts, "loss_base": base.total, "loss_distillation": distilled})

    @torch.no_grad()
    def logits(self, teacher: Model, x_BCHW: Tensor) -> Tensor:
        """(B, K): what the teacher says of images as the student sees them."""
        return forward_logits(teacher, self.glasses(x_BCHW), self.precision)[""]

    def distilled(self, student_BK: Tensor, teacher_BK: Tensor) -> Tensor:
        """The distance of the student from the teacher, by their logits."""
        if self.how.kind == "hard":
            return hard(student_BK, teacher_BK)
        return soft(student_BK, teacher_BK, self.how.tau, self.how.reduction)

    @contextmanager
    def watching(self, student: Model) -> Iterator[dict[str, float]]:
        """A mapping that holds, after the block, what was seen of the student's evaluation in it.

        ``token_cosine``: the mean cosine of the angle between its class and its distillation token after the last
        block, normalised where the last norm is of tokens.  DeiT's reach 0.93, and two class tokens 0.999; nothing for
        a student that does not have one of each.
        """
        found: dict[str, float] = {}
        cosines: list[Tensor] = []
        geometry, norm = getattr(student, "geometry", None), getattr(student, "norm", None)
        pair = ("class", "distillation")
        if norm is None or not isinstance(geometry, Geometry) or not set(pair) <= set(geometry.prefix):
            yield found
            return
        first, second = (geometry.prefix.index(token) for token in pair)

        def look(_module: Any, _inputs: Any, x_BTD: Tensor) -> None:
            cosines.append(F.cosine_similarity(x_BTD[:, first].double(), x_BTD[:, second].double(), dim=-1))

        hook = norm.register_forward_hook(look)
        try:
            yield found
        finally:
            hook.remove()
        if cosines:
            found["token_cosine"] = mean(torch.cat(cosines).cpu())


class InputAdapter:
    """Images as one model sees them, to images as another does: its colours, its normalisation, its size."""

    def __init__(self, mine: InputSpec, theirs: InputSpec, like: Tensor) -> None:
        """
        Args:
            mine: what the images were made for.
            theirs: what they become.
            like: a tensor on their device and in their dtype.

        Raises:
            WeightsError: for channels that are neither those of colours nor of grey.
        """
        mean_C11, std_C11 = (_channels(values) for values in (mine.mean, mine.std))
        luma_C11 = None
        if mine.info.channels != theirs.info.channels:
            if (mine.info.channels, theirs.info.channels) == (3, 1):
                luma_C11 = _channels(LUMA) * std_C11
                mean_C11, std_C11 = (_channels(LUMA) * mean_C11).sum(0, keepdim=True), torch.ones_like(mean_C11[:1])
            elif mine.info.channels != 1:
                raise WeightsError(
                    f"the teacher sees images of {theirs.info.channels} channels, and those here have "
                    f"{mine.info.channels}"
                )
        scale_C11, shift_C11 = (
            std_C11 / _channels(theirs.std),
            (mean_C11 - _channels(theirs.mean)) / _channels(theirs.std),
        )
        self.renormalised = (mine.mean, mine.std) != (theirs.mean, theirs.std)
        self.image = theirs.info.image
        self._scale_C11, self._shift_C11 = scale_C11.to(like), shift_C11.to(like)
        self._luma_C11 = None if luma_C11 is None else luma_C11.to(like)

    def __call__(self, x_BCHW: Tensor) -> Tensor:
        """(B, C, H, W), of the channels and the size of the other model."""
        if self._luma_C11 is not None:
            x_BCHW = (x_BCHW * self._luma_C11).sum(1, keepdim=True)
        if self.renormalised:
            x_BCHW = torch.addcmul(self._shift_C11, x_BCHW, self._scale_C11)
        if tuple(x_BCHW.shape[-2:]) != self.image:
            # Its weights add up to one, so it makes no difference that the normalisation comes first.
            x_BCHW = F.interpolate(x_BCHW, size=self.image, mode="bilinear", antialias=True, align_corners=False)
        return x_BCHW


def hard(student_BK: Tensor, teacher_BK: Tensor) -> Tensor:
    """Cross-entropy with the class the teacher decides for.  Reference: arXiv:2012.12877, equation 3."""
    return F.cross_entropy(student_BK, teacher_BK.argmax(1))


def soft(
    student_BK: Tensor, teacher_BK: Tensor, tau: float, reduction: Literal["numel", "batchmean"] = "numel"
) -> Tensor:
    """tau^2 times the Kullback-Leibler divergence of the student from the teacher, both softened by ``tau``.

    Args:
        student_BK: logits.
        teacher_BK: logits.
        tau: temperature of both softmaxes.
        reduction: the sum over batch and classes is divided by both, or by the batch: apart by a factor of K.

    Reference: arXiv:2012.12877, equation 2; the reduction of its code is ``numel``, that of timm ``batchmean``.
    """
    divergence = F.kl_div(
        (student_BK / tau).log_softmax(1), (teacher_BK / tau).log_softmax(1), reduction="sum", log_target=True
    )
    count = student_BK.numel() if reduction == "numel" else len(student_BK)
    return divergence * tau**2 / count


def _channels(values: tuple[float, ...]) -> Tensor:
    """A number for every channel, (C, 1, 1), float64."""
    return torch.tensor(values, dtype=torch.float64)[:, None, None]
