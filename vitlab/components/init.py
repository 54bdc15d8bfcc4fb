"""Initial values: named schemes, drawn per canonical parameter name.

Each parameter is drawn from its own generator, seeded by the trial's seed and the parameter's canonical name, which
timm's checkpoint has.  So two arms have equal initial values of all parameters they share, in whatever order they are
built, and two implementations of one attention start as the same function.

A scheme draws the weights of linear and convolutional layers, tokens and the learned position table.  Norms,
layer scale, and parameters in a component's ``keeps_init`` keep the values of the component's constructor.
"""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from pydantic import NonNegativeFloat
from torch import Generator, Tensor, nn

from vitlab import noise
from vitlab.registry import Slot

Kind = Literal["linear", "linear_bias", "conv", "conv_bias", "token", "position"]
"""The kinds of parameters that a scheme draws."""

Scale = NonNegativeFloat

LAST_OF_BRANCH = re.compile(r"blocks\.(\d+)\.(?:[a-z]+\.\d+\.)?(?:attn\.proj|mlp\.fc2)\.weight")
"""Canonical names of the last layer of each residual branch."""


class Init:
    """Contract: ``fill_parameter`` draws one parameter; a scheme overrides it for the kinds that differ.

    ``x`` is float32 on the CPU, ``name`` canonical, ``fan_in`` the number of inputs of the layer (for a bias, of the
    layer it belongs to), and ``g`` seeded by the trial's seed and ``name``.

    Args:
        token_std: deviation of class, distillation and register tokens, instead of the scheme's.
        position_std: deviation of the learned position table, instead of the scheme's.
        residual: ``by_depth`` divides the last layers of attention and MLP in block i, counted from 1, by sqrt(2i), as
            BEiT (arXiv:2106.08254) and timm's ``fix_init`` do.
    """

    def __init__(
        self,
        *,
        token_std: Scale | None = None,
        position_std: Scale | None = None,
        residual: Literal["plain", "by_depth"] = "plain",
    ) -> None:
        self.token_std = token_std
        self.position_std = position_std
        self.residual = residual

    def base_variance_ratio(self, name: str, shape: tuple[int, int], base_shape: tuple[int, int]) -> float:
        """Return the variance of a linear map of ``base_shape``, (outputs, inputs), over the variance at ``shape``."""
        return 1.0

    def initialise_parameter(self, x: Tensor, name: str, kind: Kind, fan_in: int, seed: int) -> None:
        """Fill ``x`` with the initial values of the parameter ``name`` in a trial of this ``init`` seed."""
        # A generator for every parameter: none shifts the draws of another.
        g = torch.Generator().manual_seed(noise.key(seed, "init", name))
        if kind == "position":
            nn.init.trunc_normal_(x, std=0.02 if self.position_std is None else self.position_std, generator=g)
        elif kind == "token" and self.token_std is not None:
            nn.init.normal_(x, std=self.token_std, generator=g)
        else:
            self.fill_parameter(x, name, kind, fan_in, g)
        if self.residual == "by_depth" and (last := LAST_OF_BRANCH.fullmatch(name)):
            x.div_(math.sqrt(2 * (int(last[1]) + 1)))

    def fill_parameter(self, x: Tensor, name: str, kind: str, fan_in: int, g: Generator) -> None:
        """Draw as timm does: matrices and tokens normal, convolutions as in torch; set other biases to zero."""
        match kind:
            case "linear":
                # timm and torchvision truncate at an absolute ±2, torch's default, for any deviation; at 0.02 a plain
                # normal.
                nn.init.trunc_normal_(x, std=0.02, generator=g)
            case "conv":
                nn.init.kaiming_uniform_(x, a=math.sqrt(5), generator=g)
            case "conv_bias":
                nn.init.uniform_(x, -1 / math.sqrt(fan_in), 1 / math.sqrt(fan_in), generator=g)
            case "token":
                # timm starts its class token near zero, and DeiT's second token as any other weight.
                nn.init.trunc_normal_(x, std=0.02 if name == "dist_token" else 1e-6, generator=g)
            case _:
                nn.init.zeros_(x)


init = Slot("init", Init)


@init.register("timm")
class Timm(Init):
    """timm's default: normal of deviation 0.02, biases 0, convolutions as in torch, class token near 0."""


@init.register("deit")
class DeiT(Init):
    """DeiT's: as timm's, with all tokens of deviation 0.02.  Reference: arXiv:2012.12877."""

    def fill_parameter(self, x: Tensor, name: str, kind: str, fan_in: int, g: Generator) -> None:
        super().fill_parameter(x, name, "linear" if kind == "token" else kind, fan_in, g)


class _Xavier(Init):
    """Base of schemes with Xavier's uniform."""

    def base_variance_ratio(self, name: str, shape: tuple[int, int], base_shape: tuple[int, int]) -> float:
        return sum(shape) / sum(base_shape)

    def fill_parameter(self, x: Tensor, name: str, kind: str, fan_in: int, g: Generator) -> None:
        if kind == "linear":
            nn.init.xavier_uniform_(x, generator=g)
        else:
            super().fill_parameter(x, name, kind, fan_in, g)


@init.register("jax")
class Jax(_Xavier):
    """Google's, as timm ports it: Xavier, MLP biases near 0, LeCun convolutions, a head of zeros.

    Reference: arXiv:2010.11929.

    Args:
        head_bias: bias of the classifier; -ln(classes) starts a sigmoid loss near a probability of 1 / classes.
    """

    def __init__(
        self, *, head_bias: float = 0.0, token_std: Scale | None = None, position_std: Scale | None = None
    ) -> None:
        super().__init__(token_std=token_std, position_std=position_std)
        self.head_bias = head_bias

    def fill_parameter(self, x: Tensor, name: str, kind: str, fan_in: int, g: Generator) -> None:
        match kind:
            case "linear" if _is_head(name):
                nn.init.zeros_(x)
            case "linear_bias" if _is_head(name):
                nn.init.constant_(x, self.head_bias)
            case "linear_bias" if "mlp." in name:
                nn.init.normal_(x, std=1e-6, generator=g)
            case "conv":
                # LeCun normal, truncated at two deviations and scaled so that the variance is 1 / fan_in.
                nn.init.trunc_normal_(x, a=-2.0, b=2.0, generator=g)
                x.mul_(1 / math.sqrt(x[0].numel()) / 0.87962566103423978)
            case "conv_bias":
                nn.init.zeros_(x)
            case _:
                super().fill_parameter(x, name, kind, fan_in, g)


@init.register("moco")
class MoCo(_Xavier):
    """MoCo v3's: Xavier, with query, key and value as three matrices.  Reference: arXiv:2104.02057."""

    def fill_parameter(self, x: Tensor, name: str, kind: str, fan_in: int, g: Generator) -> None:
        if kind == "linear" and "qkv" in name:
            bound = math.sqrt(6 / (x.shape[0] // 3 + x.shape[1]))
            nn.init.uniform_(x, -bound, bound, generator=g)
        else:
            super().fill_parameter(x, name, kind, fan_in, g)


@init.register("torchvision")
class Torchvision(_Xavier):
    """torchvision's: Xavier (attention's output as in torch), LeCun convolutions, class token and head of zeros."""

    def base_variance_ratio(self, name: str, shape: tuple[int, int], base_shape: tuple[int, int]) -> float:
        """Return the growth that :meth:`fill_parameter` divides the variance by."""
        if name.endswith("attn.proj.weight") or name.startswith("pre_logits"):
            return shape[1] / base_shape[1]
        return super().base_variance_ratio(name, shape, base_shape)

    def fill_parameter(self, x: Tensor, name: str, kind: str, fan_in: int, g: Generator) -> None:
        match kind:
            case "linear" if name.endswith("attn.proj.weight"):
                nn.init.kaiming_uniform_(x, a=math.sqrt(5), generator=g)
            case "linear" if name.startswith("pre_logits"):
                nn.init.trunc_normal_(x, std=1 / math.sqrt(x.shape[1]), generator=g)
            case "linear" if not _is_head(name):
                nn.init.xavier_uniform_(x, generator=g)
            case "linear_bias" if "mlp." in name:
                nn.init.normal_(x, std=1e-6, generator=g)
            case "conv":
                nn.init.trunc_normal_(x, std=1 / math.sqrt(x[0].numel()), generator=g)
            case _:
                nn.init.zeros_(x)


@init.register("torch")
class Torch(Init):
    """torch's defaults: uniform within 1 / sqrt(fan_in), biases too.  Tokens as in timm."""

    def base_variance_ratio(self, name: str, shape: tuple[int, int], base_shape: tuple[int, int]) -> float:
        return shape[1] / base_shape[1]

    def fill_parameter(self, x: Tensor, name: str, kind: str, fan_in: int, g: Generator) -> None:
        super().fill_parameter(x, name, kind.replace("linear", "conv"), fan_in, g)


@contextmanager
def seeded(seed: int, path: str) -> Iterator[None]:
    """Seed torch's CPU generator by the trial's seed and a path in the model, inside of a ``with`` block."""
    # The caller's draws go on as if nothing had been built.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(noise.key(seed, "init", path))
        yield


def parameters_with_fan_in(model: nn.Module) -> Iterator[tuple[str, Kind, int]]:
    """Yield the name, the kind and the layer's number of inputs of every weight and bias of linear and conv layers."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            is_linear, inputs = isinstance(module, nn.Linear), module.weight[0].numel()
            yield f"{path}.weight", "linear" if is_linear else "conv", inputs
            yield f"{path}.bias", "linear_bias" if is_linear else "conv_bias", inputs


@torch.no_grad()
def draw_matrices_and_zero_biases(module: nn.Module, seed: int, prefix: str, draw: Callable[..., object]) -> None:
    """Draw the matrices of a module that no scheme draws, each keyed by its name, and set its biases to zero."""
    for name, parameter in module.named_parameters():
        if parameter.ndim == 2:
            x = torch.empty(parameter.shape)
            draw(x, generator=torch.Generator().manual_seed(noise.key(seed, "init", f"{prefix}.{name}")))
            parameter.copy_(x)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)


def fill_lecun(x: Tensor, generator: Generator) -> None:
    """Draw from a normal of deviation 1 / sqrt(inputs)."""
    nn.init.normal_(x, std=x.shape[1] ** -0.5, generator=generator)


def _is_head(name: str) -> bool:
    return name.startswith("head")
