"""``rand_augment``, ``trivial_augment`` and ``rand_augment_timm``: random operations by policies of two libraries.

B images of a batch, C channels, H rows, W columns, T operations one after another.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, TypeAlias

import torch
from pydantic import Field, NonNegativeFloat, PositiveInt
from torch import Tensor

from vitlab import noise
from vitlab.data.augment import Augment, Probability, augment, pixels
from vitlab.data.pixels import VOID

LEVELS = 31
"""Magnitudes of torchvision, 0 to 30."""

MAX_LEVEL = 10
"""Levels of timm are 0 to 10."""

GREY = 128
"""timm's fill level outside of the image."""

GEOMETRIC = ("shear_x", "shear_y", "translate_x", "translate_y", "rotate")
FACTORS = {
    "brightness": pixels.brightness,
    "color": pixels.saturation,
    "contrast": pixels.contrast,
    "sharpness": pixels.sharpness,
}

Moves = tuple[Tensor, Tensor, Tensor, Tensor]
"""Shears, shifts to the left and upwards in pixels, and angles in radians, float (B,) each."""

Changes: TypeAlias = dict[str, tuple[Callable[..., Tensor], *tuple[Tensor, ...]]]
"""Function and amounts, each amount (B,), of every operation that changes colours and moves no pixel."""


class _Policy(Augment):
    """Base of both policies: a subclass names its operations, draws their strengths, and says what strengths mean.

    A strength is one (B,) tensor or several, as drawn.
    """

    operations: ClassVar[tuple[str, ...]]
    warp: ClassVar[Callable[..., Tensor]] = staticmethod(pixels.affine)  #: the affine transform of images

    @abstractmethod
    def draws(self, key: noise.Key, id_B: Tensor) -> tuple[Tensor, ...]:
        """Return indices of the operations, and the tensors of their strengths, (B, T) each."""

    @abstractmethod
    def _geometric_magnitudes(self, height: int, width: int, *strength_B: Tensor) -> Moves:
        """Return the strengths of the operations that move pixels, in images of this size."""

    @abstractmethod
    def _color_operations(self, *strength_B: Tensor) -> tuple[Tensor, Changes]:
        """Return for these strengths the factor of :data:`FACTORS`, and the other operations that have an amount."""

    def _iter_operations(self, key: noise.Key, id_B: Tensor) -> Iterable[tuple[Tensor, ...]]:
        """Return for each operation in turn its index and strengths, (B,) each."""
        return zip(*(drawn_BT.unbind(1) for drawn_BT in self.draws(key, id_B)), strict=True)

    def __call__(self, x_BCHW: Tensor, key: noise.Key, id_B: Tensor) -> Tensor:
        for drawn_B in self._iter_operations(key, id_B):
            x_BCHW = self.apply_operation(x_BCHW, *drawn_B)
        return x_BCHW

    def masks(self, y_BHW: Tensor, key: noise.Key, id_B: Tensor) -> Tensor:
        # The affine transform fills with 0, so the XOR swaps VOID and 0 meanwhile.
        out_BCHW = y_BHW[:, None] ^ VOID
        for drawn_B in self._iter_operations(key, id_B):
            out_BCHW = self._apply_geometric_operations(out_BCHW, pixels.affine, *drawn_B)
        return out_BCHW[:, 0] ^ VOID

    def apply_operation(self, x_BCHW: Tensor, which_B: Tensor, *strength_B: Tensor) -> Tensor:
        """Return images after one operation on each.

        ``which_B`` is its index in :attr:`operations`, -1 for none; strengths are those of :meth:`draws` for one turn.
        """
        x_BCHW = self._apply_geometric_operations(x_BCHW, self.warp, which_B, *strength_B)
        factor_B, changes = self._color_operations(*strength_B)
        changes |= {name: (change, factor_B) for name, change in FACTORS.items()}
        changes |= {"autocontrast": (pixels.autocontrast,), "equalize": (pixels.equalize,)}
        for name, (change, *amounts_B) in changes.items():
            x_BCHW = pixels.apply_where(x_BCHW, which_B == self.operations.index(name), change, *amounts_B)
        return x_BCHW

    def _apply_geometric_operations(
        self, x_BCHW: Tensor, warp: Callable[..., Tensor], which_B: Tensor, *strength_B: Tensor
    ) -> Tensor:
        """Apply the geometric operations, by matrices from output to input coordinates."""
        height, width = x_BCHW.shape[-2:]
        shear_B, left_B, up_B, angle_B = self._geometric_magnitudes(height, width, *strength_B)
        one_B, zero_B = torch.ones_like(shear_B), torch.zeros_like(shear_B)
        matrices = {
            # about the upper left corner
            "shear_x": (one_B, shear_B, shear_B * height / 2, zero_B, one_B, zero_B),
            "shear_y": (one_B, zero_B, zero_B, shear_B, one_B, shear_B * width / 2),
            "translate_x": (one_B, zero_B, left_B, zero_B, one_B, zero_B),
            "translate_y": (one_B, zero_B, zero_B, zero_B, one_B, up_B),
            "rotate": (angle_B.cos(), -angle_B.sin(), zero_B, angle_B.sin(), angle_B.cos(), zero_B),
        }
        matrix_B6 = torch.stack([one_B, zero_B, zero_B, zero_B, one_B, zero_B], 1)
        moved_B = torch.zeros_like(which_B, dtype=torch.bool)
        for name, entries in matrices.items():
            is_B = which_B == self.operations.index(name)
            matrix_B6 = torch.where(is_B[:, None], torch.stack(entries, 1), matrix_B6)
            moved_B |= is_B
        return pixels.apply_where(x_BCHW, moved_B, warp, matrix_B6.view(-1, 2, 3))


class _TorchvisionPolicy(_Policy):
    """Base of torchvision's policies (nearest neighbour, black outside), at levels of 0 to 30."""

    operations = ("identity", *GEOMETRIC, *FACTORS, "posterize", "solarize", "autocontrast", "equalize")
    # At the highest level: shear, rotation, change of a factor, and bits that posterising removes.
    shear, degrees, factor, bits = 0.3, 30.0, 0.9, 4
    num_ops = 1

    def draws(self, key: noise.Key, id_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return indices of the operations, their levels, and signs, -1 or 1, (B, T) each."""
        which_BT = noise.integers(key, id_B, self.num_ops, len(self.operations))
        sign_BT = 2 * noise.integers(noise.fold(key, 1), id_B, self.num_ops, 2) - 1
        return which_BT, self.levels(key, id_B), sign_BT

    def levels(self, key: noise.Key, id_B: Tensor) -> Tensor:
        """Return the level of each operation, int64 (B, T), by default drawn uniformly."""
        return noise.integers(noise.fold(key, 2), id_B, self.num_ops, LEVELS)

    def largest_shift(self, size: int) -> float:
        """Return the shift in pixels at the highest level, along a side of ``size`` pixels."""
        return 150 / 331 * size

    def _geometric_magnitudes(self, height: int, width: int, *strength_B: Tensor) -> Moves:
        level_B, sign_B = strength_B
        share_B = level_B.double() / (LEVELS - 1) * sign_B
        left_B, up_B = (-(self.largest_shift(size) * share_B).trunc().float() for size in (width, height))
        return (self.shear * share_B).float(), left_B, up_B, torch.deg2rad((self.degrees * share_B).float())

    def _color_operations(self, *strength_B: Tensor) -> tuple[Tensor, Changes]:
        level_B, sign_B = strength_B
        share_B = level_B.double() / (LEVELS - 1)
        change_L = noise.to_device(torch.linspace(0, self.factor, LEVELS), level_B.device)
        factor_B = 1 + change_L[level_B].double() * sign_B
        return factor_B, {
            "posterize": (pixels.posterize, 8 - (self.bits * share_B).round()),
            "solarize": (pixels.solarize, 255 * (1 - share_B)),
        }


@augment.register("rand_augment")
@dataclass(kw_only=True)
class RandAugment(_TorchvisionPolicy):
    """Apply operations drawn uniformly from fourteen, all at one strength.  Reference: arXiv:1909.13719.

    Operations, ranges and pixel values are torchvision's.  Unlike torchvision, every image of a batch has its own
    draws.  timm's and DeiT's ``rand-m9-mstd0.5-inc1`` is another policy, ``rand_augment_timm``.

    Args:
        num_ops: operations applied in sequence.
        magnitude: strength, 0 to 30.
    """

    num_ops: PositiveInt = 2
    magnitude: Annotated[int, Field(ge=0, lt=LEVELS)] = 9

    def levels(self, key: noise.Key, id_B: Tensor) -> Tensor:
        return torch.full_like(id_B, self.magnitude)[:, None].expand(-1, self.num_ops)


@augment.register("trivial_augment")
class TrivialAugment(_TorchvisionPolicy):
    """Apply one operation drawn uniformly from fourteen, at a strength drawn uniformly.  Reference: arXiv:2103.10158.

    Operations, ranges and pixel values are those of torchvision's ``TrivialAugmentWide``; there is nothing to tune.
    """

    shear, degrees, factor, bits = 0.99, 135.0, 0.99, 6

    def largest_shift(self, size: int) -> float:
        return 32


@augment.register("rand_augment_timm")
@dataclass(kw_only=True)
class RandAugmentTimm(_Policy):
    """Apply operations drawn uniformly from fifteen, each at its own strength: DeiT's ``rand-m9-mstd0.5-inc1``.

    Each drawn operation is applied with probability ``p``.  Its level is normally distributed around the magnitude,
    clamped to 0..10, and every operation grows stronger with it.  Ranges and pixel values match timm on Pillow to a
    level or two; interpolation is always bilinear, where DeiT uses bicubic and timm draws one of the two.
    Reference: arXiv:1909.13719, arXiv:2012.12877.

    Args:
        num_ops: operations drawn for an image.
        magnitude: mean level of their strength, 0 to 10.
        magnitude_std: standard deviation of the level.
        p: probability that a drawn operation is applied.
    """

    operations = (
        *("autocontrast", "equalize", "invert", "rotate", "posterize", "solarize", "solarize_add", "color"),
        *("contrast", "brightness", "sharpness", "shear_x", "shear_y", "translate_x", "translate_y"),
    )

    warp = staticmethod(partial(pixels.affine_smooth, fill=GREY))

    num_ops: PositiveInt = 2
    magnitude: Annotated[float, Field(ge=0, le=MAX_LEVEL)] = 9.0
    magnitude_std: NonNegativeFloat = 0.5
    p: Probability = 0.5

    def draws(self, key: noise.Key, id_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return, (B, T) each, indices of the operations (-1 for none), their levels, and signs, -1 or 1."""
        which_BT = noise.integers(key, id_B, self.num_ops, len(self.operations))
        applied_BT = noise.uniform(noise.fold(key, 1), id_B, self.num_ops) < self.p
        spread_BT = self.magnitude_std * noise.normal(noise.fold(key, 2), id_B, self.num_ops)
        sign_BT = 2 * noise.integers(noise.fold(key, 3), id_B, self.num_ops, 2) - 1
        return torch.where(applied_BT, which_BT, -1), (self.magnitude + spread_BT).clamp(0, MAX_LEVEL), sign_BT

    def _geometric_magnitudes(self, height: int, width: int, *strength_B: Tensor) -> Moves:
        level_B, sign_B = strength_B
        share_B = level_B * sign_B / MAX_LEVEL
        shift_B = 0.45 * share_B
        return 0.3 * share_B, shift_B * width, shift_B * height, torch.deg2rad(30 * share_B)

    def _color_operations(self, *strength_B: Tensor) -> tuple[Tensor, Changes]:
        level_B, sign_B = strength_B
        share_B = level_B.double() / MAX_LEVEL
        factor_B = (1 + 0.9 * share_B * sign_B).clamp(min=0.1)
        return factor_B, {
            "invert": (pixels.solarize, torch.zeros_like(share_B)),
            "posterize": (pixels.posterize, 4 - (4 * share_B).long()),
            "solarize": (pixels.solarize, 256.0 - (256 * share_B).long()),
            "solarize_add": (_solarize_add, (110 * share_B).long()),
        }


def _solarize_add(x_BCHW: Tensor, add_B: Tensor) -> Tensor:
    brighter_BCHW = (x_BCHW.long() + add_B[:, None, None, None]).clamp(max=255).to(torch.uint8)
    return torch.where(x_BCHW < 128, brighter_BCHW, x_BCHW)
