"""Augmentation: the slot, and batched, keyed versions of what recipes for Vision Transformers use."""

from vitlab.data.augment import geometric as geometric
from vitlab.data.augment.base import Augment as Augment
from vitlab.data.augment.base import augment as augment
