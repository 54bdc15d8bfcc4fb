"""``prior`` and ``linear``: baselines that ignore the image, or have no hidden layers.

B images, C channels, H and W pixels, K classes.
"""

from math import prod

import torch
from torch import Tensor, nn

from vitlab.components.base import Options
from vitlab.components.head import Logits
from vitlab.geometry import DataInfo
from vitlab.models.contract import Model, model


class _Baseline(Model):
    """Base of models whose parameters start at zero and have one layer."""

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        for parameter in self.parameters():
            parameter.zero_()

    def layer_of(self, name: str) -> int:
        return 0


@model.register("prior")
class Prior(_Baseline):
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
        shape = (len(self.bias), *(1 for _ in self.pixels))
        return Logits(self.bias.view(shape).expand(len(x_BCHW), -1, *self.pixels))


@model.register("linear")
class LinearModel(_Baseline):
    """Multinomial logistic regression on the pixels: each class is one weight per pixel and a bias, and no more.

    A lower bound for models with layers.  It starts at zero, where all classes are equally likely; its loss is convex,
    so all seeds converge to the same weights.  As an arm: ``arms: {linear: {model: linear}}``.

    Reference: D. R. Cox, "The regression analysis of binary sequences", J. R. Stat. Soc. B 20 (1958); for ten classes
    of clothes arXiv:1708.07747, Table 3.
    """

    def __init__(self, data: DataInfo) -> None:
        super().__init__()
        self.head = nn.Linear(data.channels * prod(data.image), data.classes)

    @classmethod
    def incompatibility(cls, data: DataInfo, options: Options) -> str | None:
        if data.task == "segmentation":
            return f"a linear model has one prediction per image, and the task is {data.task}; use another model"
        return None

    def forward(self, x_BCHW: Tensor) -> Logits:
        return Logits(self.head(x_BCHW.flatten(1)))
