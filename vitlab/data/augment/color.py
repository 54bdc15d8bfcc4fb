"""Augmentations that change colours: ``color_jitter``, ``three_augment``, ``rand_augment``.

B images of a batch, C channels, H rows, W columns.
"""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from vitlab import noise
from vitlab.data.augment import pixels
from vitlab.data.augment.base import Augment, augment
from vitlab.data.pixels import VOID

Strength = Annotated[float, Field(ge=0)]


@augment.register("color_jitter")
class ColorJitter(Augment):
    """Change brightness, contrast, saturation and hue by random amounts, in random order.

    Factors are uniform in [max(0, 1 - v), 1 + v] and hue shifts in [-v, v], as in torchvision; a property with v = 0 is
    not changed.  Reference: arXiv:1312.5402.

    Args:
        brightness: largest change of the factor.
        contrast: largest change of the factor.
        saturation: largest change of the factor.
        hue: largest shift of the hue, as a share of the colour circle.
    """

    def __init__(
        self,
        *,
        brightness: Strength = 0.3,
        contrast: Strength = 0.3,
        saturation: Strength = 0.3,
        hue: Annotated[float, Field(ge=0, le=0.5)] = 0.0,
    ) -> None:
        self.factors = {"brightness": brightness, "contrast": contrast, "saturation": saturation}
        self.hue = hue

    def __call__(self, x_BCHW: Tensor, key: noise.Key, id_B: Tensor) -> Tensor:
        """Change brightness, contrast, saturation and hue in a drawn order."""
        amount_B4, order_B4 = self.draws(key, id_B)
        changes = (pixels.brightness, pixels.contrast, pixels.saturation, pixels.hue)
        strengths = (*self.factors.values(), self.hue)
        for turn in range(4):
            for i, (change, strength) in enumerate(zip(changes, strengths, strict=True)):
                if strength:
                    x_BCHW = pixels.apply_where(x_BCHW, order_B4[:, turn] == i, change, amount_B4[:, i])
        return x_BCHW

    def masks(self, y_BHW: Tensor, key: noise.Key, id_B: Tensor) -> Tensor:
        """Return the masks unchanged."""
        return y_BHW

    def draws(self, key: noise.Key, id_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return (B, 4) amounts of brightness, contrast, saturation and hue, and (B, 4) their order."""
        u_B8 = noise.uniform(key, id_B, 8)
        low_4 = torch.tensor([*(max(0.0, 1 - v) for v in self.factors.values()), -self.hue], device=id_B.device)
        high_4 = torch.tensor([*(1 + v for v in self.factors.values()), self.hue], device=id_B.device)
        return low_4 + (high_4 - low_4) * u_B8[:, :4], u_B8[:, 4:].argsort(1)


@augment.register("three_augment")
class ThreeAugment(Augment):
    """Apply one of three at random: greyscale, solarise at the middle level, or blur.  Reference: arXiv:2204.07118.

    DeiT III's recipe is ``[crop, flip, three_augment, color_jitter]``.  The blur is a true Gaussian of standard
    deviation 0.1 to 2 pixels, cut off at 6; the paper's code uses Pillow's approximation by box filters.
    """

    def __call__(self, x_BCHW: Tensor, key: noise.Key, id_B: Tensor) -> Tensor:
        """Apply one of greyscale, solarisation and blur to each image."""
        which_B, sigma_B = self.draws(key, id_B)
        middle_B = torch.full_like(sigma_B, 128)
        x_BCHW = pixels.apply_where(x_BCHW, which_B == 0, pixels.grey)
        x_BCHW = pixels.apply_where(x_BCHW, which_B == 1, pixels.solarize, middle_B)
        return pixels.apply_where(x_BCHW, which_B == 2, pixels.blur, sigma_B)

    def masks(self, y_BHW: Tensor, key: noise.Key, id_B: Tensor) -> Tensor:
        """Return the masks unchanged."""
        return y_BHW

    def draws(self, key: noise.Key, id_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return (B,) indices of the three operations, and (B,) standard deviations of the blur in pixels."""
        which_B = noise.integers(key, id_B, 1, 3)[:, 0]
        return which_B, 0.1 + 1.9 * noise.uniform(noise.fold(key, 1), id_B, 1)[:, 0]


OPERATIONS = (
    "identity",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
    "rotate",
    "brightness",
    "color",
    "contrast",
    "sharpness",
    "posterize",
    "solarize",
    "autocontrast",
    "equalize",
)
LEVELS = 31
"""Magnitudes 0 to 30."""

FACTORS = {
    "brightness": pixels.brightness,
    "color": pixels.saturation,
    "contrast": pixels.contrast,
    "sharpness": pixels.sharpness,
}
GEOMETRIC = ("shear_x", "shear_y", "translate_x", "translate_y", "rotate")


@augment.register("rand_augment")
class RandAugment(Augment):
    """Apply operations drawn uniformly from fourteen, all at one strength.  Reference: arXiv:1909.13719.

    Operations, ranges and pixel values are torchvision's (nearest neighbour, black outside); float images are
    quantised to 256 levels and back.  Unlike torchvision, every image of a batch has its own draws.  timm's and
    DeiT's ``rand-m9-mstd0.5-inc1`` is another policy, ``rand_augment_timm``.

    Args:
        num_ops: operations applied in sequence.
        magnitude: strength, 0 to 30.
    """

    def __init__(
        self,
        *,
        num_ops: Annotated[int, Field(ge=1)] = 2,
        magnitude: Annotated[int, Field(ge=0, lt=LEVELS)] = 9,
    ) -> None:
        self.num_ops = num_ops
        self.magnitude = magnitude

    def __call__(self, x_BCHW: Tensor, key: noise.Key, id_B: Tensor) -> Tensor:
        """Apply ``num_ops`` drawn operations to each image."""
        which_BT, sign_BT = self.draws(key, id_B)
        level_BCHW = (x_BCHW * 255).round().to(torch.uint8) if x_BCHW.is_floating_point() else x_BCHW
        for turn in range(self.num_ops):
            level_BCHW = self.apply_operation(level_BCHW, which_BT[:, turn], sign_BT[:, turn])
        return level_BCHW.to(x_BCHW.dtype) / 255 if x_BCHW.is_floating_point() else level_BCHW

    def masks(self, y_BHW: Tensor, key: noise.Key, id_B: Tensor) -> Tensor:
        """Apply the geometric operations to the masks."""
        which_BT, sign_BT = self.draws(key, id_B)
        # The affine transform fills with 0, so the XOR swaps VOID and 0 meanwhile.
        level_BCHW = y_BHW[:, None] ^ VOID
        for turn in range(self.num_ops):
            geometric_B, matrix_B23 = self._geometric(level_BCHW, which_BT[:, turn], sign_BT[:, turn])
            level_BCHW = pixels.apply_where(level_BCHW, geometric_B, pixels.affine, matrix_B23)
        return level_BCHW[:, 0] ^ VOID

    def draws(self, key: noise.Key, id_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return (B, T) indices of the operations at T turns, and (B, T) the signs of their strengths, -1 or 1."""
        which_BT = noise.integers(key, id_B, self.num_ops, len(OPERATIONS))
        sign_BT = 2 * noise.integers(noise.fold(key, 1), id_B, self.num_ops, 2) - 1
        return which_BT, sign_BT

    def apply_operation(self, x_BCHW: Tensor, which_B: Tensor, sign_B: Tensor) -> Tensor:
        """Apply to each uint8 image one operation, an index in :data:`OPERATIONS`, with the sign of its strength."""
        share = self.magnitude / (LEVELS - 1)
        geometric_B, matrix_B23 = self._geometric(x_BCHW, which_B, sign_B)
        x_BCHW = pixels.apply_where(x_BCHW, geometric_B, pixels.affine, matrix_B23)
        factor_B = 1 + torch.linspace(0, 0.9, LEVELS)[self.magnitude].double() * sign_B
        for name, change in FACTORS.items():
            x_BCHW = pixels.apply_where(x_BCHW, which_B == OPERATIONS.index(name), change, factor_B)
        bits_B = torch.full_like(which_B, 8 - round(4 * share))
        threshold_B = torch.full_like(factor_B, 255 * (1 - share))
        x_BCHW = pixels.apply_where(x_BCHW, which_B == OPERATIONS.index("posterize"), pixels.posterize, bits_B)
        x_BCHW = pixels.apply_where(x_BCHW, which_B == OPERATIONS.index("solarize"), pixels.solarize, threshold_B)
        x_BCHW = pixels.apply_where(x_BCHW, which_B == OPERATIONS.index("autocontrast"), pixels.autocontrast)
        return pixels.apply_where(x_BCHW, which_B == OPERATIONS.index("equalize"), pixels.equalize)

    def _geometric(self, x_BCHW: Tensor, which_B: Tensor, sign_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return (B,) a mask of the images with a geometric operation, and (B, 2, 3) their matrices."""
        geometric_B = (which_B >= 1) & (which_B <= len(GEOMETRIC))
        return geometric_B, self._matrices(which_B, sign_B, x_BCHW.shape[-2], x_BCHW.shape[-1])

    def _matrices(self, which_B: Tensor, sign_B: Tensor, height: int, width: int) -> Tensor:
        """Return (B, 2, 3) matrices from output to input coordinates; the identity for other operations."""
        share = self.magnitude / (LEVELS - 1)
        shear_B = 0.3 * share * sign_B
        across_B, down_B = (int(150 / 331 * size * share) * sign_B.float() for size in (width, height))
        angle_B = torch.deg2rad(30.0 * share * sign_B)
        one_B, zero_B = torch.ones_like(shear_B), torch.zeros_like(shear_B)
        matrices = {
            "identity": (one_B, zero_B, zero_B, zero_B, one_B, zero_B),
            # about the upper left corner
            "shear_x": (one_B, shear_B, shear_B * height / 2, zero_B, one_B, zero_B),
            "shear_y": (one_B, zero_B, zero_B, shear_B, one_B, shear_B * width / 2),
            "translate_x": (one_B, zero_B, -across_B, zero_B, one_B, zero_B),
            "translate_y": (one_B, zero_B, zero_B, zero_B, one_B, -down_B),
            "rotate": (angle_B.cos(), -angle_B.sin(), zero_B, angle_B.sin(), angle_B.cos(), zero_B),
        }
        matrix_OB23 = torch.stack([torch.stack(entries, 1).view(-1, 2, 3) for entries in matrices.values()])
        row_B = torch.arange(len(which_B), device=which_B.device)
        return matrix_OB23[torch.where(which_B <= len(GEOMETRIC), which_B, 0), row_B]
