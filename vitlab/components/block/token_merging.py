"""Blocks that merge similar tokens, so that later ones have fewer.

B images, T tokens before any was merged, S tokens of a block, A tokens of one half of its patches, R merged ones, P
tokens before the patches, D width, H heads, K channels of a head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from pydantic import NonNegativeInt
from torch import Tensor

from vitlab.components.base import Rotation, gather_rows
from vitlab.components.block import Block, Place, block


class MergeState(NamedTuple):
    """Tokens that were merged: the index of each among the remaining ones, and the size of each remaining one."""

    source_BT: Tensor  #: of every token before the first block that merged, its index among the remaining ones
    size_BS: Tensor

    @classmethod
    def initial(cls, x_BTD: Tensor) -> MergeState:
        """Return the state in which every token is its own."""
        images, tokens, _ = x_BTD.shape
        size_BT = x_BTD.new_ones(images, tokens, dtype=torch.promote_types(x_BTD.dtype, torch.float32))
        return cls(torch.arange(tokens, device=x_BTD.device).expand(images, -1), size_BT)

    def unmerge_rows(self, x_BSD: Tensor) -> Tensor:
        """Return a row for each of the T tokens, the row of the token it was merged into, BTD."""
        return gather_rows(x_BSD, self.source_BT)

    def expand_attention_maps(self, maps_BHSS: Tensor) -> Tensor:
        """Return attention weights over the T tokens, BHTT: a merged key's are shared equally; rows sum to 1."""
        shared_BHSS = maps_BHSS / self.size_BS[:, None, None]
        _, heads, remaining, _ = shared_BHSS.shape
        tokens = self.source_BT.shape[1]
        rows_BHTS = self.source_BT[:, None, :, None].expand(-1, heads, -1, remaining)
        columns_BHTT = self.source_BT[:, None, None].expand(-1, heads, tokens, -1)
        return shared_BHSS.gather(2, rows_BHTS).gather(3, columns_BHTT)


@block.register("token_merging")
class TokenMerging(Block):
    """A pre-norm block that merges the most similar patches between attention and MLP.  Reference: arXiv:2210.09461.

    ToMe, in training and inference: patches are split by turns into two halves; each of the first has an edge to the
    one of the second whose key, the mean over heads, has the most similar direction, and the ``tokens`` most similar
    pairs become their mean, weighted by the number of patches in each.  Attention weighs a key by that number.  Tokens
    before the patches are never merged.  Remaining tokens of the first half precede the second half, as in the
    authors' code for models with a class token.  There is no gradient through the choice of pairs, which rounding may
    decide, so that results of different engines and kernels may differ by more than rounding.

    After the last block every patch has the row of the token it was merged into, so that heads see all of them: a mean
    over patches is weighted by size.  Blocks after this one are of this kind too; with ``tokens: 0`` they merge none.

    Args:
        tokens: patches that a block removes, at most half of those it receives.
    """

    passes = "merged"
    plan_note = (
        "block 'token_merging': rounding may choose the pairs of tokens, so that trainings by different engines or on "
        "different processors may differ by more than rounding; keep these equal in a comparison."
    )

    def __init__(self, place: Place, *, tokens: NonNegativeInt = 8) -> None:
        super().__init__(place)
        self.tokens = tokens
        self.prefix = len(place.geometry.prefix)

    def forward(  # type: ignore[override]
        self,
        x_BTD: Tensor,
        rotation: Rotation | None,
        bias_HTT: Tensor | None,
        merged: MergeState | None = None,
    ) -> tuple[Tensor, MergeState | None]:
        """Return the tokens after this block, and what earlier blocks and this one merged; None if nothing."""
        keys: list[Tensor] = []

        def observed(k_BHTK: Tensor, v_BHTK: Tensor) -> Tensor:
            keys.append(k_BHTK)
            return v_BHTK

        if merged is not None:
            # A softmax with log(n) added counts a key n times.
            size_B11T = merged.size_BS.log()[:, None, None]
            bias_HTT = size_B11T if bias_HTT is None else bias_HTT + size_B11T
        y_BTD = self.attn(self.norm1(x_BTD), rotation, bias_HTT, observed)
        x_BTD = x_BTD + self.drop_path1(self.ls1(y_BTD))
        # A pair leaves one patch, so at most half of them can go.
        count = min(self.tokens, (x_BTD.shape[1] - self.prefix) // 2)
        if count:
            new_BT = index_after_merging(keys[0].mean(1), count, self.prefix)
            x_BTD, merged = merge_tokens(x_BTD, new_BT, count, MergeState.initial(x_BTD) if merged is None else merged)
        x_BTD = x_BTD + self._mlp_branch(x_BTD)
        return x_BTD, merged


@torch.no_grad()
def index_after_merging(key_BSK: Tensor, count: int, n_prefix: int) -> Tensor:
    """Return the index of every token after ``count`` of the patches, at most half of them, were merged, (B, S)."""
    images, tokens, _ = key_BSK.shape
    key_BSK = F.normalize(key_BSK, dim=-1, eps=torch.finfo(key_BSK.dtype).tiny)
    halves = [
        torch.arange(n_prefix + first, tokens, 2, device=key_BSK.device) for first in (n_prefix % 2, 1 - n_prefix % 2)
    ]
    a_BAK, b_BBK = (key_BSK.index_select(1, half) for half in halves)
    # Every patch of the first half has one edge, to its most similar one of the second.
    similarity_BA, partner_BA = (a_BAK @ b_BBK.mT).max(-1)
    order_BA = similarity_BA.argsort(dim=-1, descending=True, stable=True)
    # Sorted, so that those that remain keep their order.
    merged_BR, remaining_BA = order_BA[:, :count], order_BA[:, count:].sort(-1).values
    second = n_prefix + remaining_BA.shape[1]
    rank_A = torch.arange(n_prefix, second, device=key_BSK.device).expand_as(remaining_BA)
    new_BA = torch.cat([rank_A, second + partner_BA.gather(1, merged_BR)], 1)
    new_BA = new_BA.gather(1, torch.cat([remaining_BA, merged_BR], 1).argsort(1))
    new_BB = torch.arange(second, second + len(halves[1]), device=key_BSK.device).expand(images, -1)
    new_P = torch.arange(n_prefix, device=key_BSK.device)
    # From the order prefix, first half, second half back to the order of the tokens.
    place_S = torch.cat([new_P, *halves]).argsort()
    return torch.cat([new_P.expand(images, -1), new_BA, new_BB], 1).index_select(1, place_S)


def merge_tokens(x_BSD: Tensor, index_BS: Tensor, count: int, merged: MergeState) -> tuple[Tensor, MergeState]:
    """Return the means of tokens of equal index, weighted by size, and the new sizes; ``count`` tokens are removed."""
    images, tokens, width = x_BSD.shape
    size_BS = merged.size_BS
    new_size_BS = size_BS.new_zeros(images, tokens - count).scatter_add(1, index_BS, size_BS)
    # Sizes have at least 32 bits, and so have these sums.
    weighted_BSD = x_BSD * size_BS[..., None]
    sum_BSD = weighted_BSD.new_zeros(images, tokens - count, width)
    sum_BSD = sum_BSD.scatter_add(1, index_BS[..., None].expand_as(weighted_BSD), weighted_BSD)
    mean_BSD = (sum_BSD / new_size_BS[..., None]).to(x_BSD.dtype)
    return mean_BSD, MergeState(index_BS.gather(1, merged.source_BT), new_size_BS)
