"""``prior``: a baseline that ignores the image.

B images, C channels, H and W pixels, K classes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitlab.components.head import Logits
from vitlab.geometry import DataInfo
from vitlab.models.contract import Model, model


@model.register("prior")
class Prior(Model):
    """The same score for every image and every pixel: all it can learn is how often each class occurs.

    A lower bound for other models.  It predicts the most frequent class everywhere, after its first step; in
    segmentation that is the background, and its row of a report shows the pixel accuracy and mean IoU of that trivial
    prediction.  As an arm:
    ``arms: {all-background: {model: {type: prior}}}``.
    """

    def __init__(self, data: DataInfo) -> None:
        super().__init__()
        self.pixels = data.image if data.task == "segmentation" else ()
        self.bias = nn.Parameter(torch.zeros(data.classes))

    def forward(self, x_BCHW: Tensor) -> Logits:
        """Return the same logits for every image."""
        shape = (len(self.bias), *(1 for _ in self.pixels))
        return Logits(self.bias.view(shape).expand(len(x_BCHW), -1, *self.pixels))

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Set the bias to zero."""
        self.bias.zero_()

    def layer_of(self, name: str) -> int:
        """Return 0: there is one layer."""
        return 0
