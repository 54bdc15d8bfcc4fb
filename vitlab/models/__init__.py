"""Models: the Vision Transformer, assembled from components, and the convolutional baselines beside it, and a prior."""

from vitlab.models.contract import Model as Model
from vitlab.models.contract import model as model
from vitlab.models.convnet import ConvNet as ConvNet
from vitlab.models.prior import Prior as Prior
from vitlab.models.vit import ViT as ViT
