"""The slot ``dataset`` and its data sets, one module per format.

digits           1797 handwritten digits that come with scikit-learn, 8x8; always here
fashion_mnist    70000 articles of clothing, 28x28 grey
mnist            70000 handwritten digits, 28x28 grey
cifar10          60000 small photographs in 10 classes, 32x32 colour
cifar100         the same in 100 classes
image_folder     your own pictures, one folder per class
image_table      pictures in rows of Parquet, Arrow, CSV and WebDataset files, with one label or several
voc_segmentation segmentation: 2913 photographs of Pascal VOC 2012, 20 kinds of things and background
pets             segmentation: 7349 photographs of cats and dogs, Oxford-IIIT Pets
digit_scenes     segmentation: digits at random positions on a canvas; always here
synthetic        generated images of any size; for tests and experiments
"""

from vitlab.data.datasets.base import Dataset, Images, dataset

__all__ = ["Dataset", "Images", "dataset"]
