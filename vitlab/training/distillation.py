"""Distillation: training on labels and on a teacher's logits and features for the same augmented images.

The teacher is frozen and in evaluation mode.  The student's batch is converted to the teacher's channels, image size
and normalisation.

B batch, K classes, C channels, H and W pixels, T tokens, D width of the student, E width of the teacher, h and w rows
and columns of patch tokens or of a feature map; ``...`` none for pooled features, h and w for tokens.
Reference: arXiv:2012.12877 (DeiT), arXiv:1503.02531 (soft distillation), arXiv:1412.6550 (features), arXiv:2205.14141
(tokens).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.components.init import draw_matrices_and_zero_biases, fill_lecun
from vitlab.data.pixels import LUMA, per_channel
from vitlab.errors import WeightsError
from vitlab.models.contract import Model
from vitlab.models.trained import InputSpec
from vitlab.spec.trial import Distill, Matching
from vitlab.training.distributed import ByBatch
from vitlab.training.evaluation import autocast, forward_logits
from vitlab.training.features import FeatureReader
from vitlab.training.losses import Loss, Value

Tensors = Mapping[str, Tensor]

SMOOTH_L1_BETA = 2.0
"""Difference at which the smooth L1 loss becomes linear, as in arXiv:2205.14141."""


class Distillation:
    """The distillation loss; without a teacher, both tokens are trained on labels (a control).

    Args:
        how: Settings of the loss.
        teacher: Model on the device and in the dtype of the student, which is frozen here; None for labels alone.
        theirs: Input of the teacher.
        mine: Input of the student.
        precision: Precision of the student, used for the teacher too.

    Raises:
        WeightsError: If the teacher has another number of classes and its logits are used, or if it lacks features.
    """

    def __init__(
        self, how: Distill, teacher: Model | None, teacher_input: InputSpec, student_input: InputSpec, precision: str
    ) -> None:
        if how.kind in ("hard", "soft") and teacher_input.info.classes != student_input.info.classes:
            raise WeightsError(
                f"the teacher has {teacher_input.info.classes} classes and this trial has "
                f"{student_input.info.classes}; use a teacher with the same number of classes"
            )
        self.how = how
        self.mine = student_input
        self.precision = precision
        self.teacher: FeatureReader | None = None
        if teacher is not None:
            teacher.eval().requires_grad_(False)
            self.teacher = FeatureReader(teacher, teacher_input.info, how.matchings, precision, "the teacher")
            self.adapter = InputAdapter(student_input, teacher_input, like=next(teacher.parameters()))

    def make_module_to_train(self, student: Model, seed: int) -> Model:
        """Return the module to train: the student, or a :class:`Projected` one if its features are matched.

        Raises:
            WeightsError: If the student lacks features.
        """
        if self.teacher is None or not self.how.matchings:
            return student
        reader = FeatureReader(student, self.mine.info, self.how.matchings, self.precision, "this trial's model")
        projected = Projected(reader, self.teacher.widths)
        draw_matrices_and_zero_biases(projected.projections, seed, "projections", fill_lecun)
        return projected

    def __call__(self, loss: Loss, module: Model, target: Tensor, x_BCHW: Tensor) -> Value:
        """Return the loss of a batch over labels and teacher, and its terms.

        Args:
            loss: Loss on labels.
            module: The module of :meth:`make_module_to_train`.
            target: Target of ``loss``.
            x_BCHW: The student's input images.
        """
        predicted: Tensors = {}
        if isinstance(module, Projected):
            logits_by_head, predicted = module(x_BCHW)
        else:
            logits_by_head = forward_logits(module, x_BCHW, self.precision)
        if self.teacher is None:
            return self.loss_on_labels_and_teacher(loss, logits_by_head, target, None)
        with torch.no_grad():
            teacher_logits, features = self.teacher(self.adapter(x_BCHW))
        total, parts = self.loss_on_labels_and_teacher(loss, logits_by_head, target, teacher_logits[""])
        for name, how in self.how.matchings.items():
            term = matching_loss(predicted[name], features[name], how)
            total, parts = total + how.weight * term, {**parts, f"loss_{name}": term}
        return Value(total, parts)

    def loss_on_labels_and_teacher(
        self, loss: Loss, logits_by_head: Mapping[str, Tensor], target: Tensor, teacher_BK: Tensor | None
    ) -> Value:
        """Return the loss over labels and the teacher's logits, if any, and its terms.

        Args:
            loss: Loss on labels.
            logits_by_head: The student's logits.  With a distillation head, ``cls`` is trained on labels, ``dist`` on
                the teacher.
            target: Target of ``loss``.
            teacher_BK: The teacher's logits; None for labels alone.
        """
        how = self.how
        if how.kind == "none":
            base = loss(logits_by_head, target)
            return Value(base.total, {**base.parts, "loss_base": base.total})
        main_BK = logits_by_head[""]
        base = loss({**logits_by_head, "": logits_by_head.get("cls", main_BK)}, target)
        student_BK = logits_by_head.get("dist", main_BK)
        if teacher_BK is None:
            distillation_term = loss({**logits_by_head, "": student_BK}, target).total
        elif how.kind == "hard":
            distillation_term = F.cross_entropy(student_BK, teacher_BK.argmax(1))
        else:
            distillation_term = soft_target_loss(student_BK, teacher_BK.to(student_BK.dtype), how.tau, how.reduction)
        total = (1 - how.alpha) * base.total + how.alpha * distillation_term
        return Value(total, {**base.parts, "loss_base": base.total, "loss_distillation": distillation_term})

    @contextmanager
    def collecting_token_cosine(self, student: Model) -> Iterator[ByBatch]:
        """Yield a mapping that holds further metrics of the student's evaluation after the block, by batch.

        ``token_cosine`` is the mean cosine similarity of the class and the distillation token after the final norm.
        DeiT reports 0.93, and 0.999 for two class tokens.  It is missing for a student without these two tokens.
        """
        cosines: list[Tensor] = []
        norm, tokens = getattr(student, "norm", None), getattr(getattr(student, "geometry", None), "prefix", ())
        pair = ("class", "distillation")
        if norm is None or not set(pair) <= set(tokens):
            yield {}
            return
        first, second = map(tokens.index, pair)

        def hook_norm(_module: Any, _inputs: Any, x_BTD: Tensor) -> None:
            cosines.append(F.cosine_similarity(x_BTD[:, first].double(), x_BTD[:, second].double(), dim=-1))

        with norm.register_forward_hook(hook_norm):
            yield {"token_cosine": cosines}


class Projected(Model):
    """A student, and linear maps from its features to the teacher's.

    Args:
        student: The student with its features.
        widths: E of each of the features.
    """

    def __init__(self, student: FeatureReader, widths: Mapping[str, int]) -> None:
        super().__init__()
        self.model = student.model
        self.student = student
        maps = {name: nn.Linear(student.widths[name], width) for name, width in widths.items()}
        self.projections = nn.ModuleDict(maps).to(next(student.model.parameters()))

    def forward(self, x_BCHW: Tensor) -> tuple[Tensors, Tensors]:  # type: ignore[override]
        """Return logits by head and predictions of the teacher's features, (B, ..., E), in float32 or wider."""
        logits_by_head, features = self.student(x_BCHW)
        predicted = {}
        with autocast(x_BCHW.device, self.student.precision):
            for name, projection in self.projections.items():
                # In the student's precision, then as wide as its features.
                predicted[name] = projection(features[name].movedim(1, -1)).to(features[name].dtype)
        return logits_by_head, predicted


class InputAdapter:
    """Conversion of one model's input images to another's: channels, normalisation and size.

    Args:
        mine: Input of the model that the images were prepared for.
        theirs: Input of the other model.
        like: A tensor of the images' device and dtype.

    Raises:
        WeightsError: If the channels cannot be converted.
    """

    def __init__(self, source: InputSpec, target: InputSpec, like: Tensor) -> None:
        mean_C11, std_C11 = per_channel(source.mean), per_channel(source.std)
        self._luma_C11: Tensor | None = None
        own, theirs = source.info.channels, target.info.channels
        if own != theirs:
            if (own, theirs) == (3, 1):
                self._luma_C11 = (per_channel(LUMA) * std_C11).to(like)
                mean_C11, std_C11 = (per_channel(LUMA) * mean_C11).sum(0, keepdim=True), torch.ones_like(mean_C11[:1])
            elif own != 1:
                raise WeightsError(
                    f"the teacher takes images of {theirs} channels, and this trial's images have {own}; set "
                    f"data.channels: {theirs}"
                )
        their_std_C11 = per_channel(target.std)
        self._scale_C11 = (std_C11 / their_std_C11).to(like)
        self._shift_C11 = ((mean_C11 - per_channel(target.mean)) / their_std_C11).to(like)
        self.renormalised = (source.mean, source.std) != (target.mean, target.std)
        self.image = target.info.image

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


def soft_target_loss(
    student_BK: Tensor, teacher_BK: Tensor, tau: float, reduction: Literal["numel", "batchmean"]
) -> Tensor:
    """Return tau^2 times the Kullback-Leibler divergence of the student from the teacher at temperature ``tau``.

    Args:
        student_BK: Logits.
        teacher_BK: Logits.
        tau: Temperature of both softmaxes.
        reduction: Divide the sum by batch times classes (``numel``) or by the batch (``batchmean``).

    Reference: arXiv:2012.12877, equation 2; its code reduces by ``numel``, timm by ``batchmean``.
    """
    divergence = F.kl_div(
        (student_BK / tau).log_softmax(1), (teacher_BK / tau).log_softmax(1), reduction="sum", log_target=True
    )
    count = student_BK.numel() if reduction == "numel" else len(student_BK)
    return divergence * tau**2 / count


def matching_loss(predicted: Tensor, teacher: Tensor, how: Matching) -> Tensor:
    """Return the loss of predictions of the teacher's features.

    Args:
        predicted: Predictions, (B, ..., E).
        teacher: The teacher's features, (B, E, ...); maps of another size are resampled.
        how: Loss and normalisation.
    """
    size = predicted.shape[1:-1]
    if teacher.shape[2:] != size:
        # The target is resampled, since the backward pass of interpolation is not deterministic on GPUs.
        teacher = F.interpolate(teacher, size=size, mode="bilinear", antialias=True, align_corners=False)
    target = teacher.movedim(1, -1).to(predicted.dtype)
    if how.norm == "layernorm":
        target = F.layer_norm(target, [target.shape[-1]])
    if how.loss == "mse":
        return F.mse_loss(predicted, target)
    if how.loss == "smooth_l1":
        return F.smooth_l1_loss(predicted, target, beta=SMOOTH_L1_BETA)
    return (1 - F.cosine_similarity(predicted, target, dim=-1)).mean()
