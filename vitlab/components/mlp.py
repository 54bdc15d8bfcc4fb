"""MLPs: the feed-forward half of a block, which treats each token by itself.

B batch, T tokens, D width, M hidden width.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from vitlab.components.base import Dropout, Part
from vitlab.geometry import Geometry
from vitlab.registry import Slot

Ratio = Annotated[float, Field(gt=0)]
Probability = Annotated[float, Field(ge=0, lt=1)]


class MLP(Part):
    """Contract: ``MLP(g, *, options)``; (B, T, D) to (B, T, D)."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the output for tokens, BTD to BTD."""
        raise NotImplementedError


mlp = Slot("mlp", MLP)


@mlp.register("gelu")
class GeluMLP(MLP):
    """Two linear layers with a GELU between.  Reference: arXiv:2010.11929, arXiv:1606.08415.

    Dropout follows both layers, as in the ViT paper.

    Args:
        g: the sizes of the model.
        ratio: hidden width over ``g.dim``; the hidden width is rounded down.
        drop: dropout after both layers.
        approximate: ``none`` is the exact GELU of the PyTorch ports; ``tanh`` the approximation that JAX
            computes by default, and with it Google's checkpoints.
    """

    def __init__(
        self,
        g: Geometry,
        *,
        ratio: Ratio = 4.0,
        drop: Probability = 0.0,
        approximate: Literal["none", "tanh"] = "none",
    ) -> None:
        super().__init__()
        hidden = int(g.dim * ratio)
        self.fc1 = nn.Linear(g.dim, hidden)
        self.act = nn.GELU(approximate)
        self.drop1 = Dropout(drop)
        self.fc2 = nn.Linear(hidden, g.dim)
        self.drop2 = Dropout(drop)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Apply two linear layers with a GELU between them, BTD to BTD."""
        x_BTD = self.drop2(self.fc2(self.drop1(self.act(self.fc1(x_BTD)))))
        return x_BTD


@mlp.register("swiglu")
class SwiGLU(MLP):
    """A linear layer gated by the SiLU of another.  Reference: arXiv:2002.05202.

    Parameters are named as in timm's ``SwiGLU``: ``fc1_g`` the gate, ``fc1_x`` what it gates, ``fc2``.  At a ratio of
    8/3 it has as many parameters as the plain MLP at 4; that is the default.

    Args:
        ratio: width of the hidden layer by that of the tokens.
        drop: dropout after each of the layers.
    """

    def __init__(self, g: Geometry, *, ratio: Ratio = 8 / 3, drop: Probability = 0.0) -> None:
        super().__init__()
        hidden = int(g.dim * ratio)
        self.fc1_g = nn.Linear(g.dim, hidden)
        self.fc1_x = nn.Linear(g.dim, hidden)
        self.drop1 = Dropout(drop)
        self.fc2 = nn.Linear(hidden, g.dim)
        self.drop2 = Dropout(drop)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Apply the SiLU-gated linear unit, BTD to BTD."""
        x_BTM = self.drop1(F.silu(self.fc1_g(x_BTD)) * self.fc1_x(x_BTD))
        x_BTD = self.drop2(self.fc2(x_BTM))
        return x_BTD
