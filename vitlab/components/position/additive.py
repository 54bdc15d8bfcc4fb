"""Encodings that are added to the tokens, of their places or computed from the tokens.

``where`` names the layers at which they are added (arXiv:2010.11929, appendix D.4): the stem, every layer with rows of
its own, or every layer with shared rows.  The stem is the beginning of the first block, which adds no further rows.

B images, T tokens, P prefix tokens, N patches, D width, L tables (the depth for ``every_layer``, else 1),
R and C rows and columns of the grid.
"""

import math
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from vitlab.components.base import NewState, Options, Positive, State
from vitlab.components.position import Position, Resampling, patch_coordinates, position, resample_grid
from vitlab.errors import WeightsError
from vitlab.geometry import Geometry

Where = Literal["stem", "every_layer", "every_layer_shared"]
PrefixRows = Literal["own", "none"]


@position.register("none")
class NoPosition(Position):
    """No encoding: the model sees a bag of patches."""


class Additive(Position):
    """Base of encodings that add rows to tokens at the layers of ``where``.

    Args:
        where: added to the tokens before the first block, or also before every block, from tables of its own or shared.
    """

    def __init__(self, g: Geometry, where: Where) -> None:
        super().__init__()
        self.tables = g.depth if where == "every_layer" else 1
        # The stem is the beginning of the first block, so layer 1 adds no rows of its own.
        self.layers = frozenset({0} if where == "stem" else {0, *range(2, g.depth + 1)})

    @classmethod
    def acts_in_blocks(cls, options: Options) -> bool:
        return super().acts_in_blocks(options) or options.get("where", "stem") != "stem"

    def rows(self, table: int) -> Tensor:
        """Return the rows (T, D), or (N, D) if prefix tokens have none."""
        raise NotImplementedError

    def add(self, x_BTD: Tensor, layer: int) -> Tensor:
        if layer not in self.layers:
            return x_BTD
        # Tables are counted from 0, and the first is the stem's.
        rows = self.rows(max(layer - 1, 0) if self.tables > 1 else 0)
        missing = x_BTD.shape[1] - rows.shape[0]
        return x_BTD + (F.pad(rows, (0, 0, missing, 0)) if missing else rows)


@position.register("learned")
class Learned(Additive):
    """A learned row for every token.  Reference: arXiv:2010.11929, 1-D.

    ``prefix_rows: none`` is timm's ``no_embed_class``, as in DeiT III (arXiv:2204.07118).

    Args:
        prefix_rows: ``own``: rows for the prefix tokens, too; ``none``: only patches have rows.
    """

    def __init__(self, g: Geometry, *, where: Where = "stem", prefix_rows: PrefixRows = "own") -> None:
        super().__init__(g, where)
        self.prefix_rows = prefix_rows
        count = g.tokens if prefix_rows == "own" else g.patches
        self.pos_embed = nn.Parameter(torch.empty(self.tables, count, g.dim))
        nn.init.trunc_normal_(self.pos_embed, std=0.02)

    def no_weight_decay(self) -> frozenset[str]:
        return frozenset({"pos_embed"})

    def rows(self, table: int) -> Tensor:
        return self.pos_embed[table]

    def resample(self, state: State, old: Geometry, new: Geometry, how: Resampling) -> NewState:
        prefix = len(old.prefix) if self.prefix_rows == "own" else 0
        tables = []
        for rows_TD in state["pos_embed"]:
            grid = resample_grid(rows_TD[prefix:].unflatten(0, old.grid), new.grid, how).flatten(0, 1)
            if self.prefix_rows == "own":
                grid = torch.cat([_select_prefix_rows(rows_TD[:prefix], old, new), grid])
            tables.append(grid)
        return {**state, "pos_embed": torch.stack(tables)}


@position.register("learned2d")
class Learned2D(Additive):
    """A learned half for the column and one for the row, side by side: [X of the column, Y of the row].

    Reference: arXiv:2010.11929, appendix D.4.

    Args:
        prefix_rows: ``own``: rows for the prefix tokens, too; ``none``: only patches have rows.
    """

    def __init__(self, g: Geometry, *, where: Where = "stem", prefix_rows: PrefixRows = "own") -> None:
        super().__init__(g, where)
        self.x_embed = nn.Parameter(torch.empty(self.tables, g.grid[1], g.dim // 2))
        self.y_embed = nn.Parameter(torch.empty(self.tables, g.grid[0], g.dim // 2))
        own = g.prefix and prefix_rows == "own"
        self.prefix_embed = nn.Parameter(torch.empty(self.tables, len(g.prefix), g.dim)) if own else None
        for parameter in self.parameters():
            nn.init.trunc_normal_(parameter, std=0.02)

    @classmethod
    def incompatibility(cls, g: Geometry, options: Options) -> str | None:
        return f"position 'learned2d' halves the width, and dim {g.dim} is odd" if g.dim % 2 else None

    def no_weight_decay(self) -> frozenset[str]:
        return frozenset(name for name, _ in self.named_parameters())

    def rows(self, table: int) -> Tensor:
        x_CE, y_RE = self.x_embed[table], self.y_embed[table]
        shape = (y_RE.shape[0], x_CE.shape[0], -1)
        rows_ND = torch.cat([x_CE[None].expand(shape), y_RE[:, None].expand(shape)], 2).flatten(0, 1)
        return rows_ND if self.prefix_embed is None else torch.cat([self.prefix_embed[table], rows_ND])

    def resample(self, state: State, old: Geometry, new: Geometry, how: Resampling) -> NewState:
        out = dict(state)
        for name, size in (("x_embed", new.grid[1]), ("y_embed", new.grid[0])):
            out[name] = torch.stack([resample_grid(axis[None], (1, size), how)[0] for axis in state[name]])
        if "prefix_embed" in state:
            out["prefix_embed"] = torch.stack([_select_prefix_rows(rows, old, new) for rows in state["prefix_embed"]])
        return out


class _Fixed(Additive):
    """Base of encodings by a formula, without parameters or state."""

    pos_embed: Tensor

    @classmethod
    def incompatibility(cls, g: Geometry, options: Options) -> str | None:
        if options.get("where") == "every_layer":
            return "rows from a formula are the same at every layer: write where: every_layer_shared"
        return None

    def rows(self, table: int) -> Tensor:
        return self.pos_embed


@position.register("sinusoidal")
class Sinusoidal(_Fixed):
    """Sines and cosines of the token's index, as for text; a width that is odd ends in a sine.

    Channel pair i has frequency temperature^(-2i/D).  ``interleaved`` puts sine and cosine side by side, as the paper,
    ``concatenated`` all sines before all cosines.  ``tensor2tensor`` is the paper's own code: as ``concatenated``, but
    pair i of n has frequency temperature^(-i/(n-1)), and a width that is odd ends in a zero.  With ``prefix_rows: own``
    the count starts at the first prefix token, with ``none`` at the first patch.

    Reference: arXiv:1706.03762.

    Args:
        temperature: base of the wavelengths.
        layout: order of sines and cosines in the width.
        prefix_rows: ``own``: rows for the prefix tokens, too; ``none``: only patches have rows.
    """

    def __init__(
        self,
        g: Geometry,
        *,
        where: Where = "stem",
        temperature: Positive = 10_000.0,
        layout: Literal["interleaved", "concatenated", "tensor2tensor"] = "interleaved",
        prefix_rows: PrefixRows = "own",
    ) -> None:
        super().__init__(g, where)
        count = g.tokens if prefix_rows == "own" else g.patches
        # In float64, so that the rows are rounded once, at the end.
        pair, half = torch.arange((g.dim + 1) // 2).double(), g.dim // 2
        exponent = pair / max(half - 1, 1) if layout == "tensor2tensor" else 2 * pair / g.dim
        angle = torch.arange(count).double()[:, None] * temperature**-exponent
        sin, cos = angle.sin(), angle.cos()
        if layout == "interleaved":
            rows = torch.stack([sin, cos], 2).flatten(1)[:, : g.dim]
        elif layout == "concatenated":
            rows = torch.cat([sin, cos[:, :half]], 1)
        else:
            rows = F.pad(torch.cat([sin[:, :half], cos[:, :half]], 1), (0, g.dim % 2))
        self._register_constant("pos_embed", rows)


@position.register("sincos2d")
class SinCos2D(_Fixed):
    """Sines and cosines of row and column, a quarter of the width each.  Prefix tokens get nothing.

    Four conventions that are not interchangeable; i counts from 0 to D/4 - 1, T is the temperature:

    ==========  ===================  ==============================
    convention  frequency            channel blocks
    ==========  ===================  ==============================
    timm        T^(-i / (D/4))       sin row, sin column, cos row, cos column
    big_vision  T^(-i / (D/4 - 1))   sin column, cos column, sin row, cos row
    moco        T^(-i / (D/4))       sin column, cos column, sin row, cos row, places counted column by column
    mae         T^(-i / (D/4))       sin column, cos column, sin row, cos row
    ==========  ===================  ==============================

    Reference: arXiv:2205.01580 (big_vision), arXiv:2104.02057 (moco), arXiv:2111.06377 (mae).

    Args:
        temperature: base of the wavelengths.
        convention: one of the four above.
    """

    def __init__(
        self,
        g: Geometry,
        *,
        where: Where = "stem",
        temperature: Positive = 10_000.0,
        convention: Literal["timm", "big_vision", "moco", "mae"] = "timm",
    ) -> None:
        super().__init__(g, where)
        self._register_constant("pos_embed", sincos2d(g, temperature, convention))

    @classmethod
    def incompatibility(cls, g: Geometry, options: Options) -> str | None:
        if g.dim % 4:
            return f"position 'sincos2d' has four blocks of channels, and dim {g.dim} is not a multiple of 4"
        if options.get("convention") == "big_vision" and g.dim == 4:
            return "position 'sincos2d' in the convention of big_vision needs two frequencies or more, so dim 8 or more"
        return super().incompatibility(g, options)


class _Fourier(nn.Module):
    """Cosines and sines of learned frequencies, mixed by a small MLP: places (N, 2) to rows (N, D)."""

    def __init__(self, dim: int, features: int, hidden: int, gamma: float) -> None:
        super().__init__()
        self.frequencies = nn.Parameter(torch.randn(features // 2, 2) / gamma)
        self.fc1 = nn.Linear(features, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, place_N2: Tensor) -> Tensor:
        # Not a matrix product, because autocast would round the angles to 8 bits.
        angle_NF = (place_N2[:, None] * self.frequencies).sum(-1)
        features_NF = torch.cat([angle_NF.cos(), angle_NF.sin()], 1) / math.sqrt(2 * angle_NF.shape[1])
        return self.fc2(F.gelu(self.fc1(features_NF)))


@position.register("fourier")
class Fourier(Additive):
    """Learnable Fourier features of row and column, and an MLP.  Prefix tokens get nothing.

    Places are counted in patches, and ``gamma`` is the distance, in patches, over which neighbours look alike at the
    start.  Nothing depends on the size of the grid, so other resolutions need no resampling.

    Reference: arXiv:2106.02795.

    Args:
        features: number of sines and cosines.
        hidden: width of the hidden layer.
        gamma: distance over which neighbours look alike, in patches.
    """

    place_N2: Tensor

    def __init__(
        self,
        g: Geometry,
        *,
        where: Where = "stem",
        features: Annotated[int, Field(ge=2, multiple_of=2)] = 384,
        hidden: PositiveInt = 32,
        gamma: Positive = 1.0,
    ) -> None:
        super().__init__(g, where)
        self._register_constant("place_N2", torch.stack(patch_coordinates(g), 1))
        self.encoders = nn.ModuleList([_Fourier(g.dim, features, hidden, gamma) for _ in range(self.tables)])

    def no_weight_decay(self) -> frozenset[str]:
        return frozenset(f"encoders.{table}.frequencies" for table in range(self.tables))

    def rows(self, table: int) -> Tensor:
        return self.encoders[table](self.place_N2)


def sincos2d(g: Geometry, temperature: float, convention: str) -> Tensor:
    """Return the rows (N, D) in float64; see :class:`SinCos2D`."""
    quarter = g.dim // 4
    row, column = patch_coordinates(g)
    if convention == "moco":
        # MoCo's mesh runs over columns first, but tokens run over rows first: token n gets column n // rows.
        place = torch.arange(g.patches)
        row, column = place % g.grid[0], place // g.grid[0]
    steps = quarter - 1 if convention == "big_vision" else quarter
    frequency = temperature ** (-torch.arange(quarter).double() / steps)
    y, x = row[:, None] * frequency, column[:, None] * frequency
    if convention == "timm":
        return torch.cat([y.sin(), x.sin(), y.cos(), x.cos()], 1)
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], 1)


def _select_prefix_rows(rows_PD: Tensor, old: Geometry, new: Geometry) -> Tensor:
    """Return the rows of ``new``'s prefix tokens among the rows of ``old``, by name; registers by order."""
    # Equal names are told apart by the number of those before.
    available, required = (
        [(name, names[:place].count(name)) for place, name in enumerate(names)] for names in (old.prefix, new.prefix)
    )
    for token in required:
        if token not in available:
            raise WeightsError(
                f"the position table has no row for prefix token '{token[0]}' number {token[1] + 1}; its prefix "
                f"tokens: {', '.join(old.prefix) or 'none'}"
            )
    return rows_PD[[available.index(token) for token in required]]


@position.register("conditional")
class Conditional(Position):
    """A depthwise convolution over the grid of patches, added after the first block.

    Zero padding makes the distance to the border visible.  Prefix tokens are unchanged.

    Reference: arXiv:2102.10882 (CPVT, its position encoding generator).

    Args:
        kernel_size: side of the kernel in patches, an odd number.
    """

    def __init__(self, g: Geometry, *, kernel_size: PositiveInt = 3) -> None:
        super().__init__()
        self.prefix = len(g.prefix)
        self.grid = g.grid
        self.proj = nn.Conv2d(g.dim, g.dim, kernel_size, padding=kernel_size // 2, groups=g.dim)

    @classmethod
    def incompatibility(cls, g: Geometry, options: Options) -> str | None:
        kernel_size = options.get("kernel_size", 3)
        if kernel_size % 2 == 0:
            return f"position 'conditional' centres its kernel on each patch, and kernel_size {kernel_size} is even"
        return None

    def no_weight_decay(self) -> frozenset[str]:
        return frozenset({"proj.weight"})

    def mix(self, x_BTD: Tensor, layer: int) -> Tensor:
        if layer != 1:
            return x_BTD
        prefix_BPD, patches_BND = x_BTD[:, : self.prefix], x_BTD[:, self.prefix :]
        # Tokens lie row by row, so this is the image's own grid.
        map_BDRC = patches_BND.transpose(1, 2).reshape(-1, patches_BND.shape[2], *self.grid)
        return torch.cat([prefix_BPD, patches_BND + self.proj(map_BDRC).flatten(2).transpose(1, 2)], 1)
