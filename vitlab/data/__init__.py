"""Data sets, splits, augmentation and batches; images are uint8 and every random draw is keyed by the sample."""
