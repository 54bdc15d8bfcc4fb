"""Augmentation: the slot, and batched, keyed versions of what recipes for Vision Transformers use.

flip                   mirrored left and right
crop                   padded and cut
random_resized_crop    a random rectangle enlarged
erasing                a random rectangle covered
color_jitter           brightness, contrast, saturation, hue
three_augment          grey, solarised or blurred (DeiT III)
rand_augment           random operations of one strength, torchvision's
rand_augment_timm      random operations of random strengths, timm's and DeiT's
"""

from vitlab.data.augment import color as color
from vitlab.data.augment import geometric as geometric
from vitlab.data.augment import randaugment_timm as randaugment_timm
from vitlab.data.augment.base import Augment as Augment
from vitlab.data.augment.base import augment as augment
