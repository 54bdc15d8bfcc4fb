"""``synthetic``: generated, learnable images of any size."""

from dataclasses import dataclass

import torch
from pydantic import PositiveInt

from vitlab import noise
from vitlab.data.datasets.base import Dataset, Images, Size, Split, dataset
from vitlab.geometry import DataInfo
from vitlab.spec.choice import Share, TwoOrMore


@dataset.register("synthetic")
@dataclass(kw_only=True)
class Synthetic(Dataset):
    """Noisy images of one random 4x4 pattern per class, enlarged to the image size.

    Labels cycle through the classes, so classes are balanced.  The images are a function of the options alone, which
    are therefore the identity.

    Args:
        image_size: pixels of an image.
        num_channels: channels of an image.
        num_classes: number of classes, and of patterns.
        train_images: images for training and validation.
        test_images: images for the test.
        seed: seed of the patterns and the noise.
        contrast: share of the pattern in a pixel, the rest is noise; with 0 there is nothing to learn.
    """

    image_size: Size = (16, 16)
    num_channels: PositiveInt = 1
    num_classes: TwoOrMore = 10
    train_images: TwoOrMore = 512
    test_images: PositiveInt = 128
    contrast: Share = 0.5
    seed: int = 0

    def info(self) -> DataInfo:
        return DataInfo(
            image=self.image_size,
            channels=self.num_channels,
            classes=self.num_classes,
            identity="synthetic:1",
        )

    def read(self, split: Split) -> Images:
        n = self.train_images if split == "train" else self.test_images
        channels, (height, width) = self.num_channels, self.image_size
        pattern_K = noise.uniform(
            noise.key(self.seed, "synthetic", "pattern"), torch.arange(self.num_classes), 16 * channels
        )
        row_H = torch.arange(height) * 4 // height
        column_W = torch.arange(width) * 4 // width
        pattern_KCHW = pattern_K.view(-1, channels, 4, 4)[:, :, row_H][..., column_W]
        y_N = torch.arange(n) % self.num_classes
        grain_ND = noise.uniform(noise.key(self.seed, "synthetic", split), torch.arange(n), channels * height * width)
        x_NCHW = self.contrast * pattern_KCHW[y_N] + (1 - self.contrast) * grain_ND.view(n, channels, height, width)
        return Images((x_NCHW * 255).round().to(torch.uint8), y_N)
