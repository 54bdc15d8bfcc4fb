"""MLPs: the feed-forward half of a block, which treats each token by itself.

B batch, T tokens, D width, M hidden width.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from vitlab.components.base import Dropout, Part, Probability
from vitlab.components.norm import NormChoice
from vitlab.geometry import Geometry
from vitlab.registry import Slot, slot

Ratio = Annotated[float, Field(gt=0)]


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
        bias: whether the linear layers have biases.
        norm: of the hidden layer, before the second linear layer (timm's ``scale_mlp_norm``).
    """

    def __init__(
        self,
        g: Geometry,
        *,
        ratio: Ratio = 4.0,
        drop: Probability = 0.0,
        approximate: Literal["none", "tanh"] = "none",
        bias: bool = True,
        norm: NormChoice = "none",
    ) -> None:
        super().__init__()
        hidden = int(g.dim * ratio)
        self.fc1 = nn.Linear(g.dim, hidden, bias=bias)
        self.act = nn.GELU(approximate)
        self.drop1 = Dropout(drop)
        self.norm = slot("norm").build(norm, hidden)
        self.fc2 = nn.Linear(hidden, g.dim, bias=bias)
        self.drop2 = Dropout(drop)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Apply two linear layers with a GELU between them, BTD to BTD."""
        x_BTD = self.drop2(self.fc2(self.norm(self.drop1(self.act(self.fc1(x_BTD))))))
        return x_BTD


@mlp.register("relu2")
class ReLU2(MLP):
    """Two linear layers with the square of a ReLU between.  Reference: arXiv:2109.08668 (Primer).

    Args:
        ratio: hidden width over ``g.dim``; the hidden width is rounded down.
        drop: dropout after both layers.
        bias: whether the linear layers have biases.
        norm: of the hidden layer, before the second linear layer.
    """

    def __init__(
        self,
        g: Geometry,
        *,
        ratio: Ratio = 4.0,
        drop: Probability = 0.0,
        bias: bool = True,
        norm: NormChoice = "none",
    ) -> None:
        super().__init__()
        hidden = int(g.dim * ratio)
        self.fc1 = nn.Linear(g.dim, hidden, bias=bias)
        self.drop1 = Dropout(drop)
        self.norm = slot("norm").build(norm, hidden)
        self.fc2 = nn.Linear(hidden, g.dim, bias=bias)
        self.drop2 = Dropout(drop)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Apply two linear layers with a squared ReLU between them, BTD to BTD."""
        x_BTM = self.norm(self.drop1(self.fc1(x_BTD).relu().square()))
        x_BTD = self.drop2(self.fc2(x_BTM))
        return x_BTD


class _Gated(MLP):
    """Base of MLPs with a linear layer gated by the activation of another.

    Parameters are named as in timm's ``SwiGLU``: ``fc1_g`` the gate, ``fc1_x`` what it gates, ``fc2``.  At a ratio of
    8/3 it has as many parameters as the plain MLP at 4; that is the default.

    Args:
        ratio: width of the hidden layer by that of the tokens.
        drop: dropout after each of the layers.
        bias: whether the linear layers have biases.
        norm: of the hidden layer, before the last linear layer (timm's ``scale_mlp_norm``).
    """

    def __init__(
        self,
        g: Geometry,
        *,
        ratio: Ratio = 8 / 3,
        drop: Probability = 0.0,
        bias: bool = True,
        norm: NormChoice = "none",
    ) -> None:
        super().__init__()
        hidden = int(g.dim * ratio)
        self.fc1_g = nn.Linear(g.dim, hidden, bias=bias)
        self.fc1_x = nn.Linear(g.dim, hidden, bias=bias)
        self.drop1 = Dropout(drop)
        self.norm = slot("norm").build(norm, hidden)
        self.fc2 = nn.Linear(hidden, g.dim, bias=bias)
        self.drop2 = Dropout(drop)

    def _activate(self, x_BTM: Tensor) -> Tensor:
        """Return the activation of the gate."""
        raise NotImplementedError

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Apply the gated linear unit, BTD to BTD."""
        x_BTM = self.norm(self.drop1(self._activate(self.fc1_g(x_BTD)) * self.fc1_x(x_BTD)))
        x_BTD = self.drop2(self.fc2(x_BTM))
        return x_BTD


@mlp.register("swiglu")
class SwiGLU(_Gated):
    """A linear layer gated by the SiLU of another.  Reference: arXiv:2002.05202."""

    def _activate(self, x_BTM: Tensor) -> Tensor:
        return F.silu(x_BTM)


@mlp.register("geglu")
class GEGLU(_Gated):
    """A linear layer gated by the GELU of another.  Reference: arXiv:2002.05202."""

    def _activate(self, x_BTM: Tensor) -> Tensor:
        return F.gelu(x_BTM)
