"""Distillation: training on labels and on a teacher's logits for the same augmented images.

The teacher is frozen and in evaluation mode.  The student's batch is converted to the teacher's channels, image size
and normalisation.

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
from vitlab.training.evaluation import forward_logits
from vitlab.training.losses import Loss, Value
from vitlab.training.metrics import mean

LUMA = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in grey (ITU-R 601)."""


class Distillation:
    """The distillation loss; without a teacher, both tokens are trained on labels (a control).

    Args:
        how: Settings of the loss.
        teacher: Model on the device and in the dtype of the student, which is frozen here; None for labels alone.
        theirs: Input of the teacher.
        mine: Input of the student.
        precision: Precision of the student, used for the teacher too.

    Raises:
        WeightsError: If the teacher has another number of classes.
    """

    def __init__(self, how: Distill, teacher: Model | None, theirs: InputSpec, mine: InputSpec, precision: str) -> None:
        if theirs.info.classes != mine.info.classes:
            raise WeightsError(
                f"the teacher has {theirs.info.classes} classes and this trial has {mine.info.classes}; use a teacher "
                "with the same number of classes"
            )
        self.how = how
        self.precision = precision
        self.teacher = teacher
        if teacher is not None:
            teacher.eval().requires_grad_(False)
            self.adapter = InputAdapter(mine, theirs, like=next(teacher.parameters()))

    def __call__(self, loss: Loss, logits_by_head: Mapping[str, Tensor], target: Tensor, x_BCHW: Tensor) -> Value:
        """Return the loss of a batch over labels and teacher, and its terms.

        Args:
            loss: Loss on labels.
            logits_by_head: The student's logits.  With a distillation head, ``cls`` is trained on labels, ``dist`` on
                the teacher.
            target: Target of ``loss``.
            x_BCHW: The student's input images.
        """
        base = loss(
            {**logits_by_head, "": logits_by_head["cls"]} if "cls" in logits_by_head else logits_by_head, target
        )
        student_BK = logits_by_head["dist"] if "dist" in logits_by_head else logits_by_head[""]
        if self.teacher is None:
            distillation_term = loss({**logits_by_head, "": student_BK}, target).total
        else:
            distillation_term = self.distillation_term(
                student_BK, self.logits(self.teacher, x_BCHW).to(student_BK.dtype)
            )
        total = (1 - self.how.alpha) * base.total + self.how.alpha * distillation_term
        return Value(total, {**base.parts, "loss_base": base.total, "loss_distillation": distillation_term})

    @torch.no_grad()
    def logits(self, teacher: Model, x_BCHW: Tensor) -> Tensor:
        """Return the teacher's logits, (B, K), for the student's input images."""
        return forward_logits(teacher, self.adapter(x_BCHW), self.precision)[""]

    def distillation_term(self, student_BK: Tensor, teacher_BK: Tensor) -> Tensor:
        """Return the distillation term of the student's and the teacher's logits."""
        if self.how.kind == "hard":
            return hard(student_BK, teacher_BK)
        return soft(student_BK, teacher_BK, self.how.tau, self.how.reduction)

    @contextmanager
    def evaluation_metrics(self, student: Model) -> Iterator[dict[str, float]]:
        """Yield a mapping that holds further metrics of the student's evaluation after the block.

        ``token_cosine`` is the mean cosine similarity of the class and the distillation token after the final norm.
        DeiT reports 0.93, and 0.999 for two class tokens.  It is missing for a student without these two tokens.
        """
        metrics: dict[str, float] = {}
        cosines: list[Tensor] = []
        geometry, norm = getattr(student, "geometry", None), getattr(student, "norm", None)
        pair = ("class", "distillation")
        if norm is None or not isinstance(geometry, Geometry) or not set(pair) <= set(geometry.prefix):
            yield metrics
            return
        first, second = (geometry.prefix.index(token) for token in pair)

        def hook_norm(_module: Any, _inputs: Any, x_BTD: Tensor) -> None:
            cosines.append(F.cosine_similarity(x_BTD[:, first].double(), x_BTD[:, second].double(), dim=-1))

        hook = norm.register_forward_hook(hook_norm)
        try:
            yield metrics
        finally:
            hook.remove()
        if cosines:
            metrics["token_cosine"] = mean(torch.cat(cosines).cpu())


class InputAdapter:
    """Conversion of one model's input images to another's: channels, normalisation and size.

    Args:
        mine: Input of the model that the images were prepared for.
        theirs: Input of the other model.
        like: A tensor of the images' device and dtype.

    Raises:
        WeightsError: If the channels cannot be converted.
    """

    def __init__(self, mine: InputSpec, theirs: InputSpec, like: Tensor) -> None:
        mean_C11, std_C11 = (_channels(values) for values in (mine.mean, mine.std))
        luma_C11 = None
        if mine.info.channels != theirs.info.channels:
            if (mine.info.channels, theirs.info.channels) == (3, 1):
                luma_C11 = _channels(LUMA) * std_C11
                mean_C11, std_C11 = (_channels(LUMA) * mean_C11).sum(0, keepdim=True), torch.ones_like(mean_C11[:1])
            elif mine.info.channels != 1:
                raise WeightsError(
                    f"the teacher takes images of {theirs.info.channels} channels, and those of this trial have "
                    f"{mine.info.channels}; set data.channels: {theirs.info.channels}"
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
        """Return the images, (B, C, H, W), with the channels and the size of the other model."""
        if self._luma_C11 is not None:
            x_BCHW = (x_BCHW * self._luma_C11).sum(1, keepdim=True)
        if self.renormalised:
            x_BCHW = torch.addcmul(self._shift_C11, x_BCHW, self._scale_C11)
        if tuple(x_BCHW.shape[-2:]) != self.image:
            # Interpolation weights sum to one, so normalising first gives the same result.
            x_BCHW = F.interpolate(x_BCHW, size=self.image, mode="bilinear", antialias=True, align_corners=False)
        return x_BCHW


def hard(student_BK: Tensor, teacher_BK: Tensor) -> Tensor:
    """Return the cross-entropy with the teacher's predicted class.  Reference: arXiv:2012.12877, equation 3."""
    return F.cross_entropy(student_BK, teacher_BK.argmax(1))


def soft(
    student_BK: Tensor, teacher_BK: Tensor, tau: float, reduction: Literal["numel", "batchmean"] = "numel"
) -> Tensor:
    """Return tau^2 times the Kullback-Leibler divergence of the student from the teacher at temperature ``tau``.

    Args:
        student_BK: Logits.
        teacher_BK: Logits.
        tau: Temperature of both softmaxes.
        reduction: Divide the sum by batch times classes (``numel``) or by the batch (``batchmean``).

    Reference: arXiv:2012.12877, equation 2; the reduction of its code is ``numel``, that of timm ``batchmean``.
    """
    divergence = F.kl_div(
        (student_BK / tau).log_softmax(1), (teacher_BK / tau).log_softmax(1), reduction="sum", log_target=True
    )
    count = student_BK.numel() if reduction == "numel" else len(student_BK)
    return divergence * tau**2 / count


def _channels(values: tuple[float, ...]) -> Tensor:
    """Return one number per channel, (C, 1, 1), float64."""
    return torch.tensor(values, dtype=torch.float64)[:, None, None]
