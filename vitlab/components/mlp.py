"""MLPs: the feed-forward half of a block, which treats each token by itself.

B batch, T tokens, D width, M hidden width.
"""

from abc import abstractmethod
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.components.base import Dropout, Gelu, Part, Positive, Probability
from vitlab.components.norm import NormChoice
from vitlab.geometry import Geometry
from vitlab.registry import Slot, slot


class SigmoidGELU(nn.Module):
    """x sigmoid(1.702 x), the approximation that OpenAI's CLIP calls QuickGELU.  Reference: arXiv:1606.08415."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation of every number."""
        return x * (1.702 * x).sigmoid()


class MLP(Part):
    """Contract: ``MLP(g, *, options)``; (B, T, D) to (B, T, D)."""

    @abstractmethod
    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the output for tokens, BTD to BTD."""


mlp = Slot("mlp", MLP)  # type: ignore[type-abstract]  # a contract is not built


class _Hidden(MLP):
    """Base of MLPs with one hidden layer, whose activation is ``act``.

    Args:
        ratio: hidden width over ``g.dim``; the hidden width is rounded down.
        drop: dropout after both layers.
        bias: whether the linear layers have biases.
        norm: the norm of the hidden layer, before the second linear layer (timm's ``scale_mlp_norm``).
    """

    act: Callable[[Tensor], Tensor]

    def __init__(
        self,
        g: Geometry,
        *,
        ratio: Positive = 4.0,
        drop: Probability = 0.0,
        bias: bool = True,
        norm: NormChoice = "none",
    ) -> None:
        super().__init__()
        # Rounded down as in timm, whose checkpoints have such widths.
        hidden = int(g.dim * ratio)
        self._build_input_layer(g.dim, hidden, bias)
        self.drop1 = Dropout(drop)
        self.norm = slot("norm").build(norm, hidden)
        self.fc2 = nn.Linear(hidden, g.dim, bias=bias)
        self.drop2 = Dropout(drop)

    def _build_input_layer(self, dim: int, hidden: int, bias: bool) -> None:
        self.fc1 = nn.Linear(dim, hidden, bias=bias)

    def _compute_hidden(self, x_BTD: Tensor) -> Tensor:
        """Return the hidden layer, BTM."""
        return self.act(self.fc1(x_BTD))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.drop2(self.fc2(self.norm(self.drop1(self._compute_hidden(x_BTD)))))


@mlp.register("gelu")
class GeluMLP(_Hidden):
    """Two linear layers with a GELU between.  Reference: arXiv:2010.11929, arXiv:1606.08415.

    Dropout follows both layers, as in the ViT paper.

    Args:
        approximate: ``none`` is the exact GELU of the PyTorch ports; ``tanh`` the approximation that JAX
            computes by default, and with it Google's checkpoints; ``sigmoid`` is x sigmoid(1.702 x), OpenAI's
            QuickGELU in CLIP.
    """

    def __init__(
        self,
        g: Geometry,
        *,
        ratio: Positive = 4.0,
        drop: Probability = 0.0,
        approximate: Gelu = "none",
        bias: bool = True,
        norm: NormChoice = "none",
    ) -> None:
        super().__init__(g, ratio=ratio, drop=drop, bias=bias, norm=norm)
        self.act = SigmoidGELU() if approximate == "sigmoid" else nn.GELU(approximate)


@mlp.register("relu2")
class ReLU2(_Hidden):
    """Two linear layers with the square of a ReLU between.  Reference: arXiv:2109.08668 (Primer)."""

    def act(self, x_BTM: Tensor) -> Tensor:
        """Return the square of a ReLU."""
        return x_BTM.relu().square()


class _Gated(_Hidden):
    """Base of MLPs with a linear layer gated by the activation of another.

    Parameters are named as in timm's ``SwiGLU``: ``fc1_g`` the gate, ``fc1_x`` what it gates, ``fc2``.  At a ratio of
    8/3 it has as many parameters as the plain MLP at 4; that is the default.

    Args:
        drop: dropout after each of the layers.
        norm: the norm of the hidden layer, before the last linear layer (timm's ``scale_mlp_norm``).
    """

    def __init__(
        self,
        g: Geometry,
        *,
        ratio: Positive = 8 / 3,
        drop: Probability = 0.0,
        bias: bool = True,
        norm: NormChoice = "none",
    ) -> None:
        super().__init__(g, ratio=ratio, drop=drop, bias=bias, norm=norm)

    def _build_input_layer(self, dim: int, hidden: int, bias: bool) -> None:
        self.fc1_g = nn.Linear(dim, hidden, bias=bias)
        self.fc1_x = nn.Linear(dim, hidden, bias=bias)

    def _compute_hidden(self, x_BTD: Tensor) -> Tensor:
        return self.act(self.fc1_g(x_BTD)) * self.fc1_x(x_BTD)


@mlp.register("swiglu")
class SwiGLU(_Gated):
    """A linear layer gated by the SiLU of another.  Reference: arXiv:2002.05202."""

    act = staticmethod(F.silu)


@mlp.register("geglu")
class GEGLU(_Gated):
    """A linear layer gated by the GELU of another.  Reference: arXiv:2002.05202."""

    act = staticmethod(F.gelu)
