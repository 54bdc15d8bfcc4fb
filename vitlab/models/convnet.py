"""Convolutional networks, to compare a ViT with and to distil from: torchvision's blocks, named as in torchvision.

B images, C channels, H and W pixels or positions of a map, D width of the last map.

Every one is a chain of layers that ends in a linear classifier, ``fc``.  A state of one loads into torchvision's model
of the same name, and the other way round, where stem, channels and classes are the usual ones.
"""

from typing import ClassVar, Literal, cast

import torch
from torch import Generator, Tensor, nn

from vitlab.components.base import Options, Positive
from vitlab.components.head import Logits
from vitlab.components.init import Torch, parameters_with_fan_in
from vitlab.data.torchvision_import import torchvision
from vitlab.geometry import DataInfo
from vitlab.models.contract import Model, model

Stem = Literal["imagenet", "small"]


class ConvNet(Model):
    """Base of convolutional networks.  A subclass adds layers in order, ``avgpool`` and ``fc`` last, and ``blocks``."""

    scheme: ClassVar[Torch]
    """The scheme of initial values of convolutions and the classifier."""
    blocks: tuple[str, ...]
    """The paths of the residual blocks, in order."""
    fc: nn.Linear

    @classmethod
    def halvings(cls, stem: Stem) -> int:
        """Return how many times height and width are halved."""
        raise NotImplementedError

    @classmethod
    def incompatibility(cls, data: DataInfo, options: Options) -> str | None:
        if data.task == "segmentation":
            return f"this network has one prediction per image, and the task is {data.task}; use another model"
        stem: Stem = options["stem"]
        # Every halving needs two rows and two columns.
        least, least_small = (2 ** (cls.halvings(which) - 1) + 1 for which in (stem, "small"))
        side = min(data.image)
        if side >= least:
            return None
        hint = f"; stem: small takes {least_small}" if side >= least_small else ""
        return (
            f"this network halves an image {cls.halvings(stem)} times, and {data.image[0]} by {data.image[1]} pixels "
            f"are too few for it: at least {least} a side{hint}"
        )

    @property
    def vmap_safe(self) -> bool:
        """Return False: batch normalisation updates its running statistics in place."""
        return False

    @property
    def head(self) -> nn.Linear:
        """The classifier."""
        return self.fc

    def forward(self, x_BCHW: Tensor) -> Logits:
        return self.forward_head(self.forward_features(x_BCHW))

    def forward_features(self, x_BCHW: Tensor) -> Tensor:
        """Return the last feature map, (B, D, H, W)."""
        first, *body, _avgpool, _fc = self.children()
        x_BCHW = first(x_BCHW)
        if x_BCHW.device.type == "cpu" and self._is_safe_channels_last():
            # Convolutions of few channels are a third faster in this layout, and later layers keep it.
            x_BCHW = x_BCHW.contiguous(memory_format=torch.channels_last)
        for layer in body:
            x_BCHW = layer(x_BCHW)
        return x_BCHW

    def forward_head(self, x_BDHW: Tensor) -> Logits:
        """Return the logits from the map of :meth:`forward_features`."""
        *_, avgpool, fc = self.children()
        return Logits(fc(avgpool(x_BDHW).flatten(1)))

    def _is_safe_channels_last(self) -> bool:
        """Return False where torch's CPU kernels would write beyond their buffers.

        In torch 2.13 (oneDNN) the backward pass of a strided 1x1 convolution of fewer than 8 input channels corrupts
        the heap when its input is channels-last.
        """
        shortcuts = (m for m in self.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (1, 1) != m.stride)
        return all(shortcut.in_channels >= 8 for shortcut in shortcuts)

    def layer_of(self, name: str) -> int:
        """Return 0 for the stem, from 1 for the residual blocks, and the last layer for the classifier."""
        if name.startswith("fc."):
            return len(self.blocks) + 1
        return next((i for i, block in enumerate(self.blocks, 1) if name.startswith(f"{block}.")), 0)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.reset_parameters()  # scale 1, shift 0, fresh running statistics
        own = dict(self.named_parameters())
        for name, kind, fan_in in parameters_with_fan_in(self):
            if name in own:
                x = torch.empty(own[name].shape)
                self.scheme.initialise_parameter(x, name, kind, fan_in, seed)
                own[name].copy_(x)


class _He(Torch):
    """Normal convolutions with variance 2 / fan_out; other layers as in torch.  Reference: arXiv:1502.01852."""

    def fill_parameter(self, x: Tensor, name: str, kind: str, fan_in: int, g: Generator) -> None:
        if kind == "conv":
            nn.init.kaiming_normal_(x, mode="fan_out", nonlinearity="relu", generator=g)
        else:
            super().fill_parameter(x, name, kind, fan_in, g)


class _SmallHeadInit(_He):
    """As :class:`_He`, with a classifier of deviation 0.01 and bias 0, as in torchvision's RegNets."""

    def fill_parameter(self, x: Tensor, name: str, kind: str, fan_in: int, g: Generator) -> None:
        if kind == "linear":
            nn.init.normal_(x, std=0.01, generator=g)
        elif kind == "linear_bias":
            nn.init.zeros_(x)
        else:
            super().fill_parameter(x, name, kind, fan_in, g)


# -- ResNet -----------------------------------------------------------------------------------------------------------


class _ResNet(ConvNet):
    """Stages of residual blocks; from one to the next the map is halved and the channels double.

    Args:
        stem: ``imagenet`` is 7x7 at stride 2 and a max-pool at stride 2; ``small`` is 3x3 at stride 1.
    """

    block: ClassVar[Literal["BasicBlock", "Bottleneck"]]
    layers: ClassVar[tuple[int, ...]]  #: blocks of each stage
    channels: ClassVar[int]  #: of the stem
    scheme = _He()

    def __init__(self, data: DataInfo, *, stem: Stem = "imagenet", width_factor: Positive = 1.0) -> None:
        super().__init__()
        block = getattr(torchvision("torchvision.models.resnet"), self.block)
        width = max(1, round(self.channels * width_factor))
        kernel, stride = (7, 2) if stem == "imagenet" else (3, 1)
        self.conv1 = nn.Conv2d(data.channels, width, kernel, stride=stride, padding=kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1) if stem == "imagenet" else nn.Identity()
        before, blocks = width, []
        for stage, depth in enumerate(self.layers):
            layer = nn.Sequential()
            inner = width * 2**stage
            after = inner * block.expansion
            for i in range(depth):
                stride = 2 if stage > 0 and i == 0 else 1
                shortcut = None  # a projection, where the shape of the map changes
                if stride > 1 or before != after:
                    conv = nn.Conv2d(before, after, 1, stride=stride, bias=False)
                    shortcut = nn.Sequential(conv, nn.BatchNorm2d(after))
                layer.append(block(before, inner, stride, shortcut))
                before = after
                blocks.append(f"layer{stage + 1}.{i}")
            self.add_module(f"layer{stage + 1}", layer)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(before, data.classes)
        self.blocks = tuple(blocks)

    @classmethod
    def halvings(cls, stem: Stem) -> int:
        return len(cls.layers) + (1 if stem == "imagenet" else -1)


@model.register("resnet8")
class ResNet8(_ResNet):
    """ResNet-8, the smallest of the ResNets for small images: three stages of one block, 16 channels to begin with.

    On a laptop, for 28 by 28 pixels: ``width_factor: 0.5``, or ``stem: imagenet``, which is faster still.

    Reference: arXiv:1512.03385, section 4.2, with n = 1.  Differs from the paper in its shortcuts, which are
    projections (option B) where the paper pads with zeros (A).

    Args:
        width_factor: factor on the channels, 16 after the stem.
    """

    block = "BasicBlock"
    layers = (1, 1, 1)
    channels = 16

    def __init__(self, data: DataInfo, *, stem: Stem = "small", width_factor: Positive = 1.0) -> None:
        super().__init__(data, stem=stem, width_factor=width_factor)


@model.register("resnet18")
class ResNet18(_ResNet):
    """ResNet-18, torchvision's.  Reference: arXiv:1512.03385.

    Args:
        width_factor: factor on the channels, 64 after the stem.
    """

    block = "BasicBlock"
    layers = (2, 2, 2, 2)
    channels = 64


@model.register("resnet50")
class ResNet50(_ResNet):
    """ResNet-50, torchvision's: bottlenecks halve the map in their 3x3 convolution ("v1.5"), the paper's in the first.

    Reference: arXiv:1512.03385.

    Args:
        width_factor: factor on the channels, 64 after the stem and 256 after the first stage.
    """

    block = "Bottleneck"
    layers = (3, 4, 6, 3)
    channels = 64


# -- RegNet -----------------------------------------------------------------------------------------------------------


@model.register("regnet_y_16gf")
class RegNetY16GF(ConvNet):
    """RegNetY-16GF, torchvision's: the teacher of DeiT.  Reference: arXiv:2003.13678; arXiv:2012.12877.

    Args:
        stem: a 3x3 convolution, at stride 2 (``imagenet``) or 1 (``small``).
    """

    scheme = _SmallHeadInit()
    depths = (2, 4, 11, 1)  #: blocks of each stage
    widths = (224, 448, 1232, 3024)  #: channels of each stage
    group_width = 112

    def __init__(self, data: DataInfo, *, stem: Stem = "imagenet") -> None:
        super().__init__()
        regnet = torchvision("torchvision.models.regnet")
        stages = len(self.depths)
        net = regnet.RegNet(
            regnet.BlockParams(
                depths=list(self.depths),
                widths=list(self.widths),
                group_widths=[self.group_width] * stages,
                bottleneck_multipliers=[1.0] * stages,
                strides=[2] * stages,
                se_ratio=0.25,
            ),
            num_classes=data.classes,
        )
        for name, layer in net.named_children():
            self.add_module(name, layer)
        usual = cast(nn.Conv2d, self.get_submodule("stem.0"))
        stride = 2 if stem == "imagenet" else 1
        conv = nn.Conv2d(data.channels, usual.out_channels, 3, stride=stride, padding=1, bias=False)
        self.set_submodule("stem.0", conv)
        self.blocks = tuple(
            f"trunk_output.{stage}.{block}"
            for stage, blocks in self.get_submodule("trunk_output").named_children()
            for block, _ in blocks.named_children()
        )

    @classmethod
    def halvings(cls, stem: Stem) -> int:
        return len(cls.depths) + (1 if stem == "imagenet" else 0)
