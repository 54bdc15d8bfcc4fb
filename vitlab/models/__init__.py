"""Models: the Vision Transformer, assembled from components, convolutional networks, and two trivial baselines."""

from vitlab.models.contract import Model as Model
from vitlab.models.contract import model as model
from vitlab.models.vit import ViT as ViT
