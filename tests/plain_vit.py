"""The network of ``pipelines/tutorial.yaml`` as a tutorial would write it, without vitlab.

One module a head, a table of sines and cosines filled entry by entry, a softmax at the end of the model, and torch's own
initial values.  Nothing here is vitlab's.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor, nn

STUDY = Path(__file__).parents[1] / "pipelines" / "tutorial.yaml"
PUBLISHED, CORRECTED = "softmax-inside", "logits"  #: its arms


class OneHead(nn.Module):
    def __init__(self, dim: int, size: int) -> None:
        super().__init__()
        self.query = nn.Linear(dim, size)
        self.key = nn.Linear(dim, size)
        self.value = nn.Linear(dim, size)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2) / math.sqrt(self.key.out_features)
        return torch.softmax(scores, -1) @ self.value(x)


class Layer(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(dim)
        self.heads = nn.ModuleList(OneHead(dim, dim // heads) for _ in range(heads))
        self.joined = nn.Linear(dim, dim)
        self.before_mlp = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        normed = self.before_attention(x)
        x = x + self.joined(torch.cat([head(normed) for head in self.heads], -1))
        return x + self.mlp(self.before_mlp(x))


class PlainViT(nn.Module):
    """Network from 32x32 grey images to 10 probabilities, or to logits without the final softmax."""

    def __init__(self, ending: nn.Module, dim: int = 9, heads: int = 3, layers: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, dim, 16, 16)
        self.class_token = nn.Parameter(torch.randn(1, 1, dim))
        table = torch.zeros(1 + 4, dim)
        for place in range(1 + 4):
            for channel in range(dim):
                angle = place / 10_000 ** ((channel - channel % 2) / dim)
                table[place, channel] = math.cos(angle) if channel % 2 else math.sin(angle)
        self.register_buffer("table", table)
        self.layers = nn.Sequential(*(Layer(dim, heads) for _ in range(layers)))
        self.classifier = nn.Linear(dim, 10)
        self.ending = ending

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1) + self.table
        return self.ending(self.classifier(self.layers(x)[:, 0]))


def plain(arm: str) -> PlainViT:
    return PlainViT(nn.Softmax(-1) if arm == PUBLISHED else nn.Identity())
