"""Encodings that rotate queries and keys, so that their product depends on their relative position.

T tokens, N patches, H heads, K channels of a head, Q a quarter of K.
"""

import math
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, NonNegativeFloat
from torch import Tensor, nn

from vitlab import noise
from vitlab.components.base import Count, Options, Positive, Rotation, to_float32_or_wider
from vitlab.components.position import Position, patch_coordinates, position
from vitlab.geometry import Geometry

PLACE = 0x526F5045
"""Number by which the key of a step is folded for the coordinates of rotary encodings."""

Factor = Annotated[float, Field(ge=1)]


class _Rotary(Position):
    """Base of rotary encodings; rotation by row and by column needs groups of four channels."""

    def __init__(self, g: Geometry) -> None:
        super().__init__()
        self.prefix = len(g.prefix)

    @classmethod
    def incompatibility(cls, g: Geometry, options: Options) -> str | None:
        if g.head_dim % 4:
            return (
                "a rotary position in two dimensions turns channels in fours, and head_dim "
                f"{g.head_dim} (dim {g.dim} / heads {g.heads}) is not a multiple of 4"
            )
        return None

    def cos_and_sin(self, angle: Tensor) -> Rotation:
        """Return cosines and sines of all tokens for angles (..., N, K/2) of patches; prefix tokens have angle 0."""
        return F.pad(angle.cos(), (0, 0, self.prefix, 0), value=1.0), F.pad(angle.sin(), (0, 0, self.prefix, 0))


@position.register("rope2d")
class RoPE2D(_Rotary):
    """Axial rotary encoding: half of the channel pairs turn with the column, the other half with the row.

    Pair i of a half turns by theta^(-4i/K) per unit of its coordinate.  Prefix tokens are not turned, except registers
    under ``registers``.

    ``shift``, ``jitter`` and ``rescale`` are DINOv3's augmentation of coordinates: in each step of a training, one
    transform of the whole grid, drawn by the key of the step.  In evaluation the coordinates are unchanged.

    Registers are turned as in the code of ViT-5: they form a square of their own, with rows and columns counted from 0,
    and frequencies of the base ``register_theta``.  There, the first half of the pairs turns with the row, which is the
    same function under another order of channels.

    Reference: arXiv:2403.13298 (axial); arXiv:2104.09864; arXiv:2508.10104 (DINOv3); arXiv:2602.08071 (ViT-5).

    Args:
        theta: the base of the frequencies.
        coordinates: ``patches`` counts rows and columns from 0.  ``centred`` runs from -1 to 1 over each side of
            the image, whatever the grid, at the centres of the patches, and turns by 2 pi per unit, as in DINOv3.
        offset: added to the row and the column of every patch, timm's ``grid_offset``.
        reference: rows and columns of a grid to which ``patches`` are stretched, timm's ``ref_feat_shape``: the places
            of a grid twice as fine are then half as far apart.
        normalize: the side of the image that ``centred`` divides by: each its own, or the larger or smaller for both.
        periods: the shortest and the longest period of ``centred`` in units of the coordinate, in place of ``theta``.
        shift: largest shift of each coordinate in training, in its units; 0 for none.
        jitter: largest factor, and inverse of the smallest, of each coordinate in training; 1 for none.
        rescale: the same for a factor that both coordinates share.
        registers: whether registers are turned; their number is a square.
        register_theta: the base of the frequencies of registers; smaller than ``theta``, it turns them faster.
    """

    cos: Tensor
    sin: Tensor
    place_2N: Tensor
    frequency_Q: Tensor

    def __init__(
        self,
        g: Geometry,
        *,
        theta: Positive = 100.0,
        coordinates: Literal["patches", "centred"] = "patches",
        offset: float = 0.0,
        reference: tuple[Count, Count] | None = None,
        normalize: Literal["separate", "max", "min"] = "separate",
        periods: tuple[Positive, Positive] | None = None,
        shift: NonNegativeFloat = 0.0,
        jitter: Factor = 1.0,
        rescale: Factor = 1.0,
        registers: bool = False,
        register_theta: Positive = 100.0,
    ) -> None:
        super().__init__(g)
        self.shift, self.jitter, self.rescale = shift, jitter, rescale
        self.augments = (shift, jitter, rescale) != (0, 1, 1)
        place_2N = torch.stack(patch_coordinates(g)).double() + offset
        unit = 1.0  # angle of the first pair at coordinate 1
        if coordinates == "centred":
            unit = 2 * math.pi
            sides = {"separate": g.grid, "max": (max(g.grid),) * 2, "min": (min(g.grid),) * 2}[normalize]
            place_2N = 2 * (place_2N + 0.5) / torch.tensor(sides)[:, None] - 1
        elif reference is not None:
            place_2N = place_2N / torch.tensor(g.grid)[:, None] * torch.tensor(reference)[:, None]
        frequency_Q = _frequencies(theta, g)
        if periods is not None:
            shortest, longest = periods
            share_Q = torch.linspace(0, 1, g.head_dim // 4, dtype=torch.float64)
            frequency_Q = 1 / (shortest * (longest / shortest) ** share_Q)
        cos, sin = self.cos_and_sin(_rotation_angles(unit * place_2N, frequency_Q))
        if registers:
            count = g.prefix.count("register")
            place_R, side = torch.arange(count), math.isqrt(count)
            place_2R = torch.stack([place_R // side, place_R % side]).double()
            angle = _rotation_angles(place_2R, _frequencies(register_theta, g))
            end = len(g.prefix)
            first = end - count
            cos[first:end], sin[first:end] = angle.cos(), angle.sin()
        self._register_constant("cos", cos)
        self._register_constant("sin", sin)
        if self.augments:
            self._register_constant("place_2N", place_2N)
            self._register_constant("frequency_Q", unit * frequency_Q)

    @classmethod
    def incompatibility(cls, g: Geometry, options: Options) -> str | None:
        if options.get("coordinates") == "centred":
            if options.get("reference") is not None:
                return "position 'rope2d' with coordinates: centred does not depend on the grid; remove reference"
        elif options.get("normalize", "separate") != "separate" or options.get("periods") is not None:
            name = "normalize" if options.get("periods") is None else "periods"
            return f"position 'rope2d' uses {name} with coordinates: centred alone; write it, or remove {name}"
        count = g.prefix.count("register")
        if options.get("registers") and math.isqrt(count) ** 2 != count:
            return (
                f"position 'rope2d' places registers on a square, and their number is {count}; set model.registers to "
                "0, 1, 4, 9 or another square"
            )
        return super().incompatibility(g, options)

    def rotation(self, layer: int) -> Rotation:
        """Return the cosines and sines, of transformed coordinates in a step of a training that transforms them."""
        draws = noise.current()
        if not (self.augments and self.training) or draws is None:
            return self.cos, self.sin
        place_2N = self._transform_places(draws.step)
        angle = _rotation_angles(place_2N, self.frequency_Q.to(place_2N.dtype))
        cos, sin = (
            torch.cat([fixed[: self.prefix], value.to(fixed.dtype)])
            for fixed, value in ((self.cos, angle.cos()), (self.sin, angle.sin()))
        )
        return cos, sin

    def _transform_places(self, step: noise.Key) -> Tensor:
        """Return rows and columns after DINOv3's shift, jitter and rescaling, in this order."""
        place_2N = to_float32_or_wider(self.place_2N)
        # One sample: all images of a step share a transform, as in DINOv3.
        sample = torch.zeros(1, dtype=torch.int64, device=place_2N.device)
        u_5 = 2 * noise.uniform(noise.fold(step, PLACE), sample, 5)[0].to(place_2N.dtype) - 1
        place_2N = place_2N + self.shift * u_5[:2, None]
        place_2N = place_2N * (math.log(self.jitter) * u_5[2:4, None]).exp()
        return place_2N * (math.log(self.rescale) * u_5[4]).exp()


def _frequencies(theta: float, g: Geometry) -> Tensor:
    """Return theta^(-4i/K), float64 (Q,)."""
    return theta ** (-4 * torch.arange(g.head_dim // 4).double() / g.head_dim)


def _rotation_angles(place_2N: Tensor, frequency_Q: Tensor) -> Tensor:
    """Return the angle of every place and pair, (N, K/2): first the pairs of the column, then of the row."""
    row_N, column_N = place_2N
    return torch.cat([column_N[:, None] * frequency_Q, row_N[:, None] * frequency_Q], 1)


@position.register("rope2d_mixed")
class RoPE2DMixed(_Rotary):
    """Rotary encoding along learned directions: every pair of every head and block has its own.

    A pair turns by x * fx + y * fy.  At the start each head has two orthogonal directions, turned by a random angle,
    and frequencies theta^(-4i/K).

    Reference: arXiv:2403.13298 (mixed).

    Args:
        theta: base of the initial frequencies.
    """

    column: Tensor
    row: Tensor

    def __init__(self, g: Geometry, *, theta: Positive = 10.0) -> None:
        super().__init__(g)
        frequency_Q = theta ** (-4 * torch.arange(g.head_dim // 4) / g.head_dim)
        turn_LH1 = 2 * math.pi * torch.rand(g.depth, g.heads, 1)
        direction_LH2 = torch.cat([turn_LH1, turn_LH1 + math.pi / 2], 2)
        fx = (direction_LH2.cos()[..., None] * frequency_Q).flatten(2)
        fy = (direction_LH2.sin()[..., None] * frequency_Q).flatten(2)
        self.freqs = nn.Parameter(torch.stack([fx, fy]).to(torch.get_default_dtype()))  # (2, depth, H, K/2)
        row_N, column_N = patch_coordinates(g)
        self._register_constant("column", column_N)
        self._register_constant("row", row_N)

    def no_weight_decay(self) -> frozenset[str]:
        return frozenset({"freqs"})

    def rotation(self, layer: int) -> Rotation:
        # Angles grow with the grid and are wrapped by the cosine: 16 bits would not separate neighbours.
        freqs = to_float32_or_wider(self.freqs)
        fx_HK, fy_HK = freqs[0, layer - 1], freqs[1, layer - 1]
        return self.cos_and_sin(self.column[:, None] * fx_HK[:, None] + self.row[:, None] * fy_HK[:, None])
