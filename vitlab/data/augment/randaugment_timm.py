"""``rand_augment_timm``: timm's and DeiT's RandAugment, with other operations and ranges than ``rand_augment``.

B images of a batch, C channels, H rows, W columns, T operations one after another.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from vitlab import noise
from vitlab.data.augment import pixels
from vitlab.data.augment.base import Augment, augment
from vitlab.data.pixels import VOID

OPERATIONS = (
    "autocontrast",
    "equalize",
    "invert",
    "rotate",
    "posterize",
    "solarize",
    "solarize_add",
    "color",
    "contrast",
    "brightness",
    "sharpness",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
)
FACTORS = {
    "color": pixels.saturation,
    "contrast": pixels.contrast,
    "brightness": pixels.brightness,
    "sharpness": pixels.sharpness,
}
GEOMETRIC = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")
MAX_LEVEL = 10
"""Levels are 0 to 10."""
GREY = 128
"""Fill level outside of the image."""


@augment.register("rand_augment_timm")
class RandAugmentTimm(Augment):
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

    def __init__(
        self,
        *,
        num_ops: Annotated[int, Field(ge=1)] = 2,
        magnitude: Annotated[float, Field(ge=0, le=MAX_LEVEL)] = 9.0,
        magnitude_std: Annotated[float, Field(ge=0)] = 0.5,
        p: Annotated[float, Field(ge=0, le=1)] = 0.5,
    ) -> None:
        self.num_ops = num_ops
        self.magnitude = magnitude
        self.magnitude_std = magnitude_std
        self.p = p

    def __call__(self, x_BCHW: Tensor, key: noise.Key, id_B: Tensor) -> Tensor:
        """Apply ``num_ops`` drawn operations to each image."""
        which_BT, level_BT, sign_BT = self.draws(key, id_B)
        out_BCHW = (x_BCHW * 255).round().to(torch.uint8) if x_BCHW.is_floating_point() else x_BCHW
        for turn in range(self.num_ops):
            out_BCHW = apply_operation(out_BCHW, which_BT[:, turn], level_BT[:, turn], sign_BT[:, turn])
        return out_BCHW.to(x_BCHW.dtype) / 255 if x_BCHW.is_floating_point() else out_BCHW

    def masks(self, y_BHW: Tensor, key: noise.Key, id_B: Tensor) -> Tensor:
        """Apply the geometric operations to the masks."""
        which_BT, level_BT, sign_BT = self.draws(key, id_B)
        # The affine transform fills with 0, so the XOR swaps VOID and 0 meanwhile.
        out_BCHW = y_BHW[:, None] ^ VOID
        for turn in range(self.num_ops):
            which_B = which_BT[:, turn]
            matrix_B23 = _matrices(which_B, level_BT[:, turn] * sign_BT[:, turn], *y_BHW.shape[-2:])
            out_BCHW = pixels.apply_where(out_BCHW, _is_geometric(which_B), pixels.affine, matrix_B23)
        return out_BCHW[:, 0] ^ VOID

    def draws(self, key: noise.Key, id_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return, (B, T) each, indices of the operations (-1 for none), their levels, and signs, -1 or 1."""
        which_BT = noise.integers(key, id_B, self.num_ops, len(OPERATIONS))
        applied_BT = noise.uniform(noise.fold(key, 1), id_B, self.num_ops) < self.p
        spread_BT = self.magnitude_std * noise.normal(noise.fold(key, 2), id_B, self.num_ops)
        sign_BT = 2 * noise.integers(noise.fold(key, 3), id_B, self.num_ops, 2) - 1
        return torch.where(applied_BT, which_BT, -1), (self.magnitude + spread_BT).clamp(0, MAX_LEVEL), sign_BT


def apply_operation(x_BCHW: Tensor, which_B: Tensor, level_B: Tensor, sign_B: Tensor) -> Tensor:
    """Apply one operation to each uint8 image.

    Args:
        x_BCHW: not modified.
        which_B: its index in :data:`OPERATIONS`, -1 for none.
        level_B: its strength, 0 to 10.
        sign_B: -1 or 1, for operations that have a sign.
    """
    share_B = level_B.double() / MAX_LEVEL
    matrix_B23 = _matrices(which_B, level_B * sign_B, *x_BCHW.shape[-2:])
    x_BCHW = pixels.apply_where(x_BCHW, _is_geometric(which_B), partial(pixels.affine_smooth, outside=GREY), matrix_B23)
    factor_B = (1 + 0.9 * share_B * sign_B).clamp(min=0.1)
    for name, change in FACTORS.items():
        x_BCHW = pixels.apply_where(x_BCHW, which_B == OPERATIONS.index(name), change, factor_B)
    amounts: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]] = {
        "autocontrast": (pixels.autocontrast, ()),
        "equalize": (pixels.equalize, ()),
        "invert": (pixels.solarize, (torch.zeros_like(share_B),)),
        "posterize": (pixels.posterize, (4 - (4 * share_B).long(),)),
        "solarize": (pixels.solarize, (256.0 - (256 * share_B).long(),)),
        "solarize_add": (_solarize_add, ((110 * share_B).long(),)),
    }
    for name, (change, amount) in amounts.items():
        x_BCHW = pixels.apply_where(x_BCHW, which_B == OPERATIONS.index(name), change, *amount)
    return x_BCHW


def _solarize_add(x_BCHW: Tensor, add_B: Tensor) -> Tensor:
    """Add ``add_B`` to the pixels of the dark half of the levels."""
    brighter_BCHW = (x_BCHW.long() + add_B[:, None, None, None]).clamp(max=255).to(torch.uint8)
    return torch.where(x_BCHW < 128, brighter_BCHW, x_BCHW)


def _is_geometric(which_B: Tensor) -> Tensor:
    """Return (B,) a mask of the images with a geometric operation."""
    index_G = torch.tensor([OPERATIONS.index(name) for name in GEOMETRIC], device=which_B.device)
    return (which_B[:, None] == index_G).any(1)


def _matrices(which_B: Tensor, level_B: Tensor, height: int, width: int) -> Tensor:
    """Return (B, 2, 3) matrices from output to input coordinates; the identity for other operations."""
    share_B = level_B / MAX_LEVEL
    shear_B, shift_B, angle_B = 0.3 * share_B, 0.45 * share_B, torch.deg2rad(30 * share_B)
    one_B, zero_B = torch.ones_like(share_B), torch.zeros_like(share_B)
    matrices = {
        "rotate": (angle_B.cos(), -angle_B.sin(), zero_B, angle_B.sin(), angle_B.cos(), zero_B),
        # about the upper left corner
        "shear_x": (one_B, shear_B, shear_B * height / 2, zero_B, one_B, zero_B),
        "shear_y": (one_B, zero_B, zero_B, shear_B, one_B, shear_B * width / 2),
        "translate_x": (one_B, zero_B, shift_B * width, zero_B, one_B, zero_B),
        "translate_y": (one_B, zero_B, zero_B, zero_B, one_B, shift_B * height),
    }
    matrix_B6 = torch.stack([one_B, zero_B, zero_B, zero_B, one_B, zero_B], 1)
    for name, entries in matrices.items():
        matrix_B6 = torch.where((which_B == OPERATIONS.index(name))[:, None], torch.stack(entries, 1), matrix_B6)
    return matrix_B6.view(-1, 2, 3)
