"""Data: images in memory as uint8, split once and for all, fed as batches whose every draw is keyed by the sample."""
