"""The slot ``augment``: batched, keyed versions of the augmentations used to train Vision Transformers.

flip                   horizontal flip
crop                   pad, then random crop
random_resized_crop    random rectangle, resized
erasing                cover a random rectangle
color_jitter           brightness, contrast, saturation, hue
three_augment          greyscale, solarise or blur (DeiT III)
rand_augment           random operations of one strength, as in torchvision
rand_augment_timm      random operations of random strengths, as in timm and DeiT
"""

from vitlab.data.augment.base import Augment, augment

__all__ = ["Augment", "augment"]
