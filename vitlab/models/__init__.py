"""Models: the Vision Transformer, assembled from components, convolutional networks, and two trivial baselines."""

from vitlab.models.baselines import LinearModel as LinearModel
from vitlab.models.baselines import Prior as Prior
from vitlab.models.contract import Model as Model
from vitlab.models.contract import model as model
from vitlab.models.convnet import ConvNet as ConvNet
from vitlab.models.vit import ViT as ViT
