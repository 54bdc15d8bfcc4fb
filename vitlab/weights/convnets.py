"""Weights of convolutional networks: torchvision's ResNets and RegNetY-16GF, and DeiT's teacher, timm's RegNet.

They serve as teachers; their files are not converted to other formats.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from vitlab.errors import WeightsError
from vitlab.geometry import DataInfo
from vitlab.models.contract import Model
from vitlab.models.convnet import RegNetY16GF, ResNet8, ResNet18, ResNet50
from vitlab.weights.facts import IMAGENET, ModelFacts, Values, some

ResNet = ResNet8 | ResNet18 | ResNet50

BLOCKS: Mapping[tuple[str, tuple[int, ...]], type[ResNet]] = {
    ("conv2", ResNet8.layers): ResNet8,
    ("conv2", ResNet18.layers): ResNet18,
    ("conv3", ResNet50.layers): ResNet50,
}
"""Model class by the last convolution of a block and the number of blocks of each stage."""

SIZE = 224
"""Default image side, in pixels, of networks with the stem of ImageNet."""

STEMS = (
    {"conv1.weight", "layer1.0.conv1.weight"},
    {"stem.0.weight"},
    {"stem.conv.weight", "s1.b1.conv1.conv.weight"},
)
"""Names that only ResNets, torchvision's RegNets and timm's RegNets have."""

_TIMM_NAMES = {
    "stem.conv": "stem.0",
    "stem.bn": "stem.1",
    "head.fc": "fc",
    "conv1.conv": "f.a.0",
    "conv1.bn": "f.a.1",
    "conv2.conv": "f.b.0",
    "conv2.bn": "f.b.1",
    "se.fc1": "f.se.fc1",
    "se.fc2": "f.se.fc2",
    "conv3.conv": "f.c.0",
    "conv3.bn": "f.c.1",
    "downsample.conv": "proj.0",
    "downsample.bn": "proj.1",
}
"""Modules of timm's RegNet and of its blocks, and torchvision's names of them."""


def is_convnet(tensors: Mapping[str, Tensor]) -> bool:
    """Return True for the weights of a ResNet or a RegNet, under the names of torchvision or timm."""
    return any(stem <= tensors.keys() for stem in STEMS)


def open_convnet(tensors: Mapping[str, Tensor], known: ModelFacts) -> tuple[Model, DataInfo, Values, Values, list[str]]:
    """Return the network in evaluation mode, its data, mean and standard deviation of pixels, and the assumptions.

    Args:
        tensors: under the names of torchvision or of timm's RegNet.
        known: size and normalisation of its images, and names of its classes.

    Raises:
        WeightsError: without the name of the file.
    """
    state = _from_timm(tensors) if "s1.b1.conv1.conv.weight" in tensors else dict(tensors)
    regnet = "stem.0.weight" in state
    stem_weight = "stem.0.weight" if regnet else "conv1.weight"
    if "fc.weight" not in state:
        raise WeightsError("this network has no classifier (fc.weight); use weights that have one")
    for name, axes in ((stem_weight, 4), ("fc.weight", 2)):
        if state[name].ndim != axes:
            raise WeightsError(
                f"{name} has shape {tuple(state[name].shape)}; expected {axes} axes. Use weights of torchvision or "
                "timm."
            )
    width, channels, _, side = state[stem_weight].shape
    stem: Literal["small", "imagenet"] = "imagenet" if regnet or side == 7 else "small"
    assumed = []
    image, mean, std = known.image, known.mean, known.std
    if image is None:
        if stem == "small":
            raise WeightsError("the file does not state the size of its images; set 'size' of the teacher, in pixels")
        image = (SIZE, SIZE)
        assumed.append(f"images of {SIZE} pixels, as is the custom of ImageNet")
    if mean is None or std is None:
        if channels != len(IMAGENET[0]):
            raise WeightsError(
                f"the file does not state how its images of {channels} channels were normalised; use weights for RGB "
                "images"
            )
        mean, std = IMAGENET
        assumed.append("pixels normalised as ImageNet's, as is the custom of torchvision")
    info = DataInfo(image=image, channels=channels, classes=len(state["fc.weight"]), labels=known.labels or ())
    with torch.random.fork_rng(devices=[]):
        if regnet:
            model: Model = RegNetY16GF(info)
        else:
            kind = _resnet(state)
            model = kind(info, stem=stem, width_factor=width / kind.channels)
    expected = model.state_dict()
    counters = {key: value for key, value in expected.items() if key.endswith("num_batches_tracked")}
    state = {**counters, **state}  # old files have no counters; nothing reads them
    wrong = [key for key in expected if key not in state or expected[key].shape != state[key].shape]
    wrong += [key for key in state if key not in expected]
    if wrong:
        raise WeightsError(
            f"these are not the weights of a {type(model).__name__}: {some(wrong)}; use weights of torchvision or timm"
        )
    model.load_state_dict(state)
    return model.eval(), info, mean, std, assumed


def _from_timm(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of timm's RegNet to torchvision's names."""
    state = {}
    for name, value in tensors.items():
        block = re.match(r"s(\d)\.b(\d+)\.", name)
        part, _, last = name.removeprefix(block[0] if block else "").rpartition(".")
        if part not in _TIMM_NAMES:
            raise WeightsError(f"{name} is not a tensor of timm's RegNets; use unchanged weights")
        where = f"trunk_output.block{block[1]}.block{block[1]}-{int(block[2]) - 1}." if block else ""
        state[f"{where}{_TIMM_NAMES[part]}.{last}"] = value
    return state


def _resnet(state: Mapping[str, Tensor]) -> type[ResNet]:
    stages: dict[str, set[str]] = {}
    for match in filter(None, (re.match(r"layer(\d)\.(\d+)\.", name) for name in sorted(state))):
        stages.setdefault(match[1], set()).add(match[2])
    depths = tuple(map(len, stages.values()))
    last = "conv3" if "layer1.0.conv3.weight" in state else "conv2"
    if (last, depths) not in BLOCKS:
        names = ", ".join(kind.__name__ for kind in BLOCKS.values())
        raise WeightsError(
            f"a ResNet with stages of {' + '.join(map(str, depths))} blocks is not supported; use one of {names}"
        )
    return BLOCKS[last, depths]
