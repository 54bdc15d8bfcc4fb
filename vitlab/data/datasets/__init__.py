"""The slot ``dataset`` and its data sets, one module per format."""

from vitlab.data.datasets.base import Dataset, Images, dataset

__all__ = ["Dataset", "Images", "dataset"]
