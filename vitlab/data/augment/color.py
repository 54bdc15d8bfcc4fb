"""Augmentations that change colours: ``color_jitter``, ``three_augment``.

B images of a batch, C channels, H rows, W columns.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field, NonNegativeFloat
from torch import Tensor

from vitlab import noise
from vitlab.data.augment import Stationary, augment, pixels

Strength = NonNegativeFloat


@augment.register("color_jitter")
@dataclass(kw_only=True)
class ColorJitter(Stationary):
    """Change brightness, contrast, saturation and hue by random amounts, in random order.

    Factors are uniform in [max(0, 1 - v), 1 + v] and hue shifts in [-v, v], as in torchvision; a property with v = 0 is
    not changed.  Reference: arXiv:1312.5402.

    Args:
        brightness: largest change of the factor.
        contrast: largest change of the factor.
        saturation: largest change of the factor.
        hue: largest shift of the hue, as a share of the colour circle.
    """

    brightness: Strength = 0.3
    contrast: Strength = 0.3
    saturation: Strength = 0.3
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.0

    def __call__(self, x_BCHW: Tensor, key: noise.Key, id_B: Tensor) -> Tensor:
        amount_B4, order_B4 = self.draws(key, id_B)
        changes = (pixels.brightness, pixels.contrast, pixels.saturation, pixels.hue)
        strengths = (self.brightness, self.contrast, self.saturation, self.hue)
        for turn in range(4):
            for i, (change, strength) in enumerate(zip(changes, strengths, strict=True)):
                if strength:
                    x_BCHW = pixels.apply_where(x_BCHW, order_B4[:, turn] == i, change, amount_B4[:, i])
        return x_BCHW

    def draws(self, key: noise.Key, id_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return (B, 4) amounts of brightness, contrast, saturation and hue, and (B, 4) their order."""
        u_B8 = noise.uniform(key, id_B, 8)
        factors = (self.brightness, self.contrast, self.saturation)
        low = [*(max(0.0, 1 - v) for v in factors), -self.hue]
        high = [*(1 + v for v in factors), self.hue]
        low_4, high_4 = (noise.to_device(torch.tensor(values), id_B.device) for values in (low, high))
        return low_4 + (high_4 - low_4) * u_B8[:, :4], u_B8[:, 4:].argsort(1)


@augment.register("three_augment")
class ThreeAugment(Stationary):
    """Apply one of three at random: greyscale, solarise at the middle level, or blur.  Reference: arXiv:2204.07118.

    DeiT III's recipe is ``[crop, flip, three_augment, color_jitter]``.  The blur is a true Gaussian of standard
    deviation 0.1 to 2 pixels, cut off at 6; the paper's code uses Pillow's approximation by box filters.
    """

    def __call__(self, x_BCHW: Tensor, key: noise.Key, id_B: Tensor) -> Tensor:
        which_B, sigma_B = self.draws(key, id_B)
        middle_B = torch.full_like(sigma_B, 128)
        x_BCHW = pixels.apply_where(x_BCHW, which_B == 0, pixels.grey)
        x_BCHW = pixels.apply_where(x_BCHW, which_B == 1, pixels.solarize, middle_B)
        return pixels.apply_where(x_BCHW, which_B == 2, pixels.blur, sigma_B)

    def draws(self, key: noise.Key, id_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return (B,) indices of the three operations, and (B,) standard deviations of the blur in pixels."""
        which_B = noise.integers(key, id_B, 1, 3)[:, 0]
        return which_B, 0.1 + 1.9 * noise.uniform(noise.fold(key, 1), id_B, 1)[:, 0]
