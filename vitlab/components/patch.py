"""Patch embeddings: from an image to patch tokens.

B images, C channels, H height and W width in pixels, I by J patches of h by w pixels, N patches (row by row), F = C*h*w
numbers of a patch, D width.
"""

import math
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import torch.nn.functional as F
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from vitlab.components.base import Options, Part, Positive
from vitlab.components.norm import NormChoice
from vitlab.geometry import Geometry
from vitlab.registry import Slot, slot


class PatchEmbedding(Part):
    """Base of patch embeddings, from an image to the tokens of its patches."""

    reduction: ClassVar[int] = 1
    """Stride of the layers before the patches; ``patch_size`` counts pixels of their feature map."""

    @classmethod
    def reduction_of(cls, options: Options) -> int:
        """Return the ``reduction`` for these options."""
        return cls.reduction

    @abstractmethod
    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Embed patches, (B, C, H, W) to (B, N, D)."""


patch = Slot("patch", PatchEmbedding)  # type: ignore[type-abstract]  # a contract is not built


@patch.register("linear")
class LinearPatches(PatchEmbedding):
    """One linear map for all patches.  Reference: arXiv:2010.11929.

    It is a convolution whose stride equals its kernel, computed as a matrix product, which is faster in small models
    and can be vectorised.  Its weights have the shape of a convolution's, as in timm.

    Args:
        bias: whether the map has a bias.
        norm: normalisation of the resulting tokens.
    """

    def __init__(self, g: Geometry, *, bias: bool = True, norm: NormChoice = "none") -> None:
        super().__init__()
        # A convolution for its initial values and its name in checkpoints; it is never called as one.
        self.proj = nn.Conv2d(g.channels, g.dim, kernel_size=g.patch, stride=g.patch, bias=bias)
        self.norm = slot("norm").build(norm, g.dim)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x_BNF = cut_patches(x_BCHW, self.proj.kernel_size)
        return self.norm(F.linear(x_BNF, self.proj.weight.flatten(1), self.proj.bias))


def cut_patches(x_BCHW: Tensor, size: Sequence[int]) -> Tensor:
    """Cut images (..., C, H, W) into patches of ``size`` pixels, (..., N, F)."""
    height, width = size
    # Views alone; the last flatten copies.
    x_BCIhJw = x_BCHW.unflatten(-1, (-1, width)).unflatten(-3, (-1, height))  # type: ignore[no-untyped-call]
    return x_BCIhJw.movedim((-4, -2), (-5, -4)).flatten(-3).flatten(-3, -2)


@patch.register("conv_stem")
class ConvStem(PatchEmbedding):
    """3x3 convolutions of stride 2, doubling the channels up to D, until their stride is the patch; then a 1x1.

    The shorter side of a patch continues with stride 1, so patches need not be square.

    Reference: arXiv:2106.14881 (Early Convolutions Help Transformers See Better).

    Args:
        norm: what follows each 3x3; the paper's ``batchnorm`` mixes the samples of a batch, ``groupnorm`` (one
            group) does not.
    """

    def __init__(self, g: Geometry, *, norm: Literal["batchnorm", "groupnorm"] = "batchnorm") -> None:
        super().__init__()
        # Sides are powers of two, so these are their logarithms.
        halvings = tuple(side.bit_length() - 1 for side in g.patch)
        layers = max(halvings)
        # The last layer has D channels, each before it half as many.
        widths = [g.channels, *(max(1, g.dim >> (layers - 1 - layer)) for layer in range(layers))]
        self.convs = nn.Sequential()
        for layer in range(layers):
            stride = (2 if layer < halvings[0] else 1, 2 if layer < halvings[1] else 1)
            width = widths[layer + 1]
            conv = nn.Conv2d(widths[layer], width, 3, stride=stride, padding=1, bias=False)
            normalise = nn.BatchNorm2d(width) if norm == "batchnorm" else nn.GroupNorm(1, width)
            self.convs.append(nn.Sequential(OrderedDict(conv=conv, norm=normalise, act=nn.ReLU())))
        self.proj = nn.Conv2d(widths[-1], g.dim, 1)

    @classmethod
    def incompatibility(cls, g: Geometry, options: Options) -> str | None:
        for side in g.patch:
            if side & (side - 1):
                return f"patch 'conv_stem' needs a patch_size that is a power of 2; found {side}"
        return None

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return _map_to_tokens(self.proj(self.convs(x_BCHW)))


@patch.register("resnet")
class ResNet(PatchEmbedding):
    """Patches of the feature map of a ResNet (version 2 as in Big Transfer): the hybrid.

    ``layers`` counts the bottlenecks of each stage.  The first stage keeps the stem's stride of 4, each other doubles
    it: three stages make 16, four 32, and no stage leaves the stem alone.  R50+ViT-B/16 is ``layers: [3, 4, 9]`` with
    ``patch_size: 1``.  Parameters are named as in timm's hybrids, and images are padded as by TensorFlow.

    Reference: arXiv:2010.11929; arXiv:1912.11370 (Big Transfer); arXiv:1903.10520 (weight standardisation).

    Args:
        layers: bottlenecks in each of up to four stages.
        width_factor: factor on the channels, 64 after the stem and 256 after the first stage.
    """

    def __init__(
        self,
        g: Geometry,
        *,
        layers: Annotated[Sequence[PositiveInt], Field(max_length=4)] = (3, 4, 9),
        width_factor: Positive = 1.0,
    ) -> None:
        super().__init__()
        channels = _round_channels(64 * width_factor)
        conv, norm = _StdConv(g.channels, channels, 7, 2), _group_norm(channels)
        stem = nn.Sequential(OrderedDict(conv=conv, norm=norm, act=nn.ReLU(), pool=_MaxPool()))
        self.backbone = nn.Sequential(OrderedDict(stem=stem)) if layers else stem
        if layers:
            stages = nn.Sequential()
            for stage, depth in enumerate(layers):
                width = _round_channels(256 * 2**stage * width_factor)
                blocks = nn.Sequential(_Bottleneck(channels, width, 1 if stage == 0 else 2, project=True))
                blocks.extend(_Bottleneck(width, width, 1, project=False) for _ in range(depth - 1))
                stages.append(nn.Sequential(OrderedDict(blocks=blocks)))
                channels = width
            self.backbone.add_module("stages", stages)
        self.proj = nn.Conv2d(channels, g.dim, kernel_size=g.patch, stride=g.patch)

    @classmethod
    def reduction_of(cls, options: Options) -> int:
        """Return the backbone's reduction: 4, doubled for each stage after the first."""
        return 4 << max(len(options.get("layers", (3, 4, 9))) - 1, 0)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return _map_to_tokens(self.proj(self.backbone(x_BCHW)))


# -- the hybrid's parts -----------------------------------------------------------------------------------------------


class _StdConv(nn.Conv2d):
    """A convolution with filters standardised to mean 0 and variance 1, padded to an output of size / stride."""

    def __init__(self, channels: int, width: int, kernel: int, stride: int = 1) -> None:
        super().__init__(channels, width, kernel, stride=stride, bias=False)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        mean = self.weight.mean((1, 2, 3), keepdim=True)
        variance = self.weight.var((1, 2, 3), correction=0, keepdim=True)
        weight = (self.weight - mean) * (variance + 1e-8).rsqrt()
        padded = _pad_same(x_BCHW, self.kernel_size[0], self.stride[0], 0.0)
        return F.conv2d(padded, weight, None, self.stride)


class _MaxPool(nn.Module):
    """A 3x3 max-pool at stride 2, padded to an output of size / stride."""

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return F.max_pool2d(_pad_same(x_BCHW, 3, 2, -math.inf), 3, 2)


class _Bottleneck(nn.Module):
    """1x1, 3x3, 1x1, each normalised, around a shortcut; the first of a stage projects its shortcut."""

    def __init__(self, channels: int, width: int, stride: int, project: bool) -> None:
        super().__init__()
        inner = _round_channels(width / 4)
        self.downsample: nn.Module = nn.Identity()
        if project:
            shortcut = OrderedDict(conv=_StdConv(channels, width, 1, stride), norm=_group_norm(width))
            self.downsample = nn.Sequential(shortcut)
        self.conv1, self.norm1 = _StdConv(channels, inner, 1), _group_norm(inner)
        self.conv2, self.norm2 = _StdConv(inner, inner, 3, stride), _group_norm(inner)
        self.conv3, self.norm3 = _StdConv(inner, width, 1), _group_norm(width)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y_BCHW = F.relu(self.norm1(self.conv1(x_BCHW)))
        y_BCHW = F.relu(self.norm2(self.conv2(y_BCHW)))
        return F.relu(self.norm3(self.conv3(y_BCHW)) + self.downsample(x_BCHW))


def _group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(math.gcd(channels, 32), channels)


def _round_channels(channels: float) -> int:
    """Return the nearest multiple of 8 that is at least 0.9 times ``channels``."""
    near = max(8, int(channels + 4) // 8 * 8)
    return near + 8 if near < 0.9 * channels else near


def _pad_same(x_BCHW: Tensor, kernel: int, stride: int, value: float) -> Tensor:
    """Pad so that the output has ceil(size / stride) positions; an odd pixel is added right and below."""
    pads: list[int] = []
    for size in (x_BCHW.shape[3], x_BCHW.shape[2]):
        total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
        pads += [total // 2, total - total // 2]
    return F.pad(x_BCHW, pads, value=value) if any(pads) else x_BCHW


def _map_to_tokens(x_BDHW: Tensor) -> Tensor:
    return x_BDHW.flatten(2).transpose(1, 2)
