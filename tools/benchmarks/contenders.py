"""Training steps of the compared libraries: ViTs of one shape, one step at a time.

Peers train on float32 images that lie in memory, drawn anew every step by an index: nothing is faster that shuffles.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from measuring import Contender
from torch import Tensor, nn
from torch.nn import functional as F

from vitlab.data.prepare import Feed, prepare
from vitlab.data.torchvision_import import torchvision as import_torchvision
from vitlab.planning.values import Trial
from vitlab.registry import slot
from vitlab.spec import STREAMS, TrialSpec
from vitlab.training.loop import Training

import_torchvision()  # as vitlab does; timm and vit-pytorch import it, too

CLASSES = 10
FOREVER = 1_000_000
"""Steps: longer than anybody measures."""


@dataclass(frozen=True)
class Shape:
    """Shape of a ViT with a class token and a learned table of positions, and of its batches."""

    channels: int
    patch: int
    dim: int
    heads: int
    depth: int
    batch: int = 128
    image: int = 32
    images: int = 4096  #: to train on


TINY = Shape(channels=1, patch=16, dim=9, heads=3, depth=3)
MICRO = Shape(channels=3, patch=4, dim=64, heads=4, depth=6)


# -- peers ------------------------------------------------------------------------------------------------------------


def timm(shape: Shape) -> nn.Module:
    """Build timm's ViT: joint projections, scaled_dot_product_attention."""
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=shape.image,
        patch_size=shape.patch,
        in_chans=shape.channels,
        num_classes=CLASSES,
        embed_dim=shape.dim,
        depth=shape.depth,
        num_heads=shape.heads,
    )


def torchvision(shape: Shape) -> nn.Module:
    """Build torchvision's ViT: nn.MultiheadAttention."""
    from torchvision.models import VisionTransformer

    network = VisionTransformer(
        image_size=shape.image,
        patch_size=shape.patch,
        num_layers=shape.depth,
        num_heads=shape.heads,
        hidden_dim=shape.dim,
        mlp_dim=4 * shape.dim,
        num_classes=CLASSES,
    )
    network.conv_proj = nn.Conv2d(shape.channels, shape.dim, shape.patch, shape.patch)
    return network


class _Logits(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return self.network(x_BCHW).logits


def hugging_face(shape: Shape) -> nn.Module:
    """Build transformers' ViT: three projections, scaled_dot_product_attention."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        image_size=shape.image,
        patch_size=shape.patch,
        num_channels=shape.channels,
        hidden_size=shape.dim,
        num_hidden_layers=shape.depth,
        num_attention_heads=shape.heads,
        intermediate_size=4 * shape.dim,
        num_labels=CLASSES,
    )
    return _Logits(ViTForImageClassification(config))


def vit_pytorch(shape: Shape) -> nn.Module:
    """Build vit-pytorch's ViT: an explicit softmax."""
    from vit_pytorch import ViT

    return ViT(
        image_size=shape.image,
        patch_size=shape.patch,
        num_classes=CLASSES,
        dim=shape.dim,
        depth=shape.depth,
        heads=shape.heads,
        mlp_dim=4 * shape.dim,
        dim_head=shape.dim // shape.heads,
        channels=shape.channels,
    )


PEERS: Mapping[str, Callable[[Shape], nn.Module]] = {
    name: build
    for name, build in (
        ("timm", timm),
        ("torchvision", torchvision),
        ("transformers", hugging_face),
        ("vit_pytorch", vit_pytorch),
    )
    if importlib.util.find_spec(name)
}
"""Those that are installed."""


def peer(name: str, shape: Shape, *, fused: bool, bf16: bool = False) -> Contender:
    """Return a training step of another library by AdamW; ``fused=False`` is torch's default loop over tensors."""
    torch.manual_seed(0)
    network = PEERS[name](shape).train()
    x_NCHW = torch.rand(shape.images, shape.channels, shape.image, shape.image)
    y_N = torch.randint(CLASSES, (shape.images,))
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=0.05, fused=fused or None)

    def step() -> float:
        drawn_B = torch.randint(shape.images, (shape.batch,))
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits_BK = network(x_NCHW[drawn_B])
        optimizer.zero_grad()
        F.cross_entropy(logits_BK.float(), y_N[drawn_B]).backward()
        optimizer.step()
        return shape.batch

    return step


# -- vitlab -----------------------------------------------------------------------------------------------------------


def start_training(spec: TrialSpec, seeds: Mapping[str, int], device: str = "cpu") -> Training:
    """Start a training as a worker does."""
    data = slot("dataset").resolve_choice(spec.data)
    prepared = prepare(data, seeds)
    network = slot("model").build(spec.model, prepared.info)
    network.initialise(seeds["init"])
    network.to(device)
    feed = Feed(prepared, data.options["augment"], seeds, device)
    return Training(network, feed, spec.train, seeds)


def planned(trial: Trial) -> Training:
    """Return the training of a trial of a study, without an end."""
    train = trial.spec.train.model_copy(update={"epochs": None, "images": None, "steps": FOREVER})
    return start_training(trial.spec.model_copy(update={"train": train}), trial.seeds)


def training_spec(shape: Shape, *, bf16: bool = False) -> dict[str, Any]:
    """Return the spec of a training of a shape, with vitlab's defaults."""
    held_out = 96
    return {
        "data": {
            "type": "synthetic",
            "image_size": shape.image,
            "num_channels": shape.channels,
            "num_classes": CLASSES,
            "train_images": shape.images + held_out,
            "test_images": held_out,
            "validation": held_out / (shape.images + held_out),
        },
        "model": {
            "type": "vit",
            "patch_size": shape.patch,
            "dim": shape.dim,
            "heads": shape.heads,
            "depth": shape.depth,
        },
        "train": {
            "steps": FOREVER,
            "batch_size": shape.batch,
            "optimizer": {"type": "adamw", "lr": 1e-3},
            "precision": "bf16" if bf16 else "fp32",
        },
    }


def training(shape: Shape, seed: int = 0, *, bf16: bool = False) -> Training:
    """Start the training of a spec."""
    return start_training(
        TrialSpec.model_validate(training_spec(shape, bf16=bf16)), {**dict.fromkeys(STREAMS, seed), "split": 0}
    )


def loop(one: Training) -> Contender:
    """Return a step of one training, in images."""

    def step() -> float:
        one.train_step()
        return one.spec.batch_size

    return step


def together(trainings: list[Training], engine: str = "batch_last") -> Contender:
    """Return a joint step of several trainings, in images of all; the engine is that of the rule for small models."""
    stacked = slot("engine").get(engine)(trainings)

    def step() -> float:
        stacked.train_step()
        return sum(one.spec.batch_size for one in trainings)

    return step
