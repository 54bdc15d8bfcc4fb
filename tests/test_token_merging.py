"""Tests of token merging against the algorithm of arXiv:2210.09461, written image by image in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitlab.components.attention import Attention
from vitlab.explaining.capture import capture
from vitlab.geometry import DataInfo, Geometry
from vitlab.models import ViT, model
from vitlab.models.cost import cost_of
from vitlab.registry import slot
from vitlab.testing import check_component

DATA = DataInfo(image=(12, 20), channels=3, classes=5)
SIZES = {"dim": 16, "depth": 3, "heads": 2, "patch_size": 4}
PATCHES = 15
Array = NDArray[np.float64]


def build(**options: Any) -> ViT:
    """Return a model whose weights are far from special values, such as biases of 0."""
    built = model.build({"type": "vit", **SIZES, **options}, DATA)
    assert isinstance(built, ViT)
    built.initialise(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return built.double().eval()


def merging(tokens: int) -> dict[str, Any]:
    return {"type": "token_merging", "tokens": tokens}


def images(count: int = 3) -> Tensor:
    return torch.randn(count, 3, *DATA.image, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def reference(state: dict[str, Array], x_TD: Array, tokens: int, prefix: int) -> tuple[Array, list[list[int]]]:
    """Return the normalised tokens after the last block, and the first tokens that each stands for, of one image."""

    def linear(x: Array, name: str) -> Array:
        result: Array = x @ state[f"{name}.weight"].T + state[f"{name}.bias"]
        return result

    def normed(x: Array, name: str) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6)
        result: Array = scaled * state[f"{name}.weight"] + state[f"{name}.bias"]
        return result

    members = [[token] for token in range(len(x_TD))]
    for i in range(SIZES["depth"]):
        q, k, v = np.split(linear(normed(x_TD, f"blocks.{i}.norm1"), f"blocks.{i}.attn.qkv"), 3, -1)
        sizes = np.array([len(each) for each in members], dtype=np.float64)
        heads = []
        for q_TK, k_TK, v_TK in zip(*(np.split(part, SIZES["heads"], -1) for part in (q, k, v)), strict=True):
            weights = np.exp(q_TK @ k_TK.T / np.sqrt(q_TK.shape[1])) * sizes
            heads.append(weights / weights.sum(-1, keepdims=True) @ v_TK)
        x_TD = x_TD + linear(np.concatenate(heads, -1), f"blocks.{i}.attn.proj")
        key = np.mean(np.split(k, SIZES["heads"], -1), 0)
        key = key / np.linalg.norm(key, axis=-1, keepdims=True)
        patches = range(prefix, len(x_TD))
        first, second = ([token for token in patches if token % 2 == side] for side in (0, 1))
        edges = [max((float(key[a] @ key[b]), a, b) for b in second) for a in first]
        count = min(tokens, len(patches) // 2)
        partner = {a: b for _, a, b in sorted(edges, reverse=True)[:count]}
        groups = [[token] for token in range(prefix)] + [[a] for a in first if a not in partner]
        groups += [[b, *(a for a in partner if partner[a] == b)] for b in second]
        x_TD = np.stack([np.average(x_TD[group], axis=0, weights=sizes[group]) for group in groups])
        members = [[token for each in group for token in members[each]] for group in groups]
        hidden = torch.from_numpy(linear(normed(x_TD, f"blocks.{i}.norm2"), f"blocks.{i}.mlp.fc1"))
        x_TD = x_TD + linear(nn.functional.gelu(hidden).numpy(), f"blocks.{i}.mlp.fc2")
    return normed(x_TD, "norm"), members


@pytest.mark.parametrize("tokens", [2, 100])
@pytest.mark.parametrize(("prefix", "registers"), [((), 0), (("class",), 0), (("class", "distillation"), 1)])
def test_logits_equal_the_paper_image_by_image(prefix: tuple[str, ...], registers: int, tokens: int) -> None:
    """The prediction from a mean over patches is that of the remaining tokens, weighted by their size."""
    options = {"prefix": prefix, "registers": registers, "head": {"type": "linear", "pool": "gap"}}
    built = build(block=merging(tokens), **options)
    plain = build(**options)
    plain.load_state_dict(built.state_dict())
    stem: list[Tensor] = []
    plain.blocks[0].register_forward_pre_hook(lambda module, inputs: stem.append(inputs[0]))
    x_BCHW = images()
    plain(x_BCHW)
    state = {name: value.numpy() for name, value in built.to_canonical(built.state_dict()).items()}
    features_BTD, logits_BC = built.forward_features(x_BCHW), built(x_BCHW).logits
    before = len(prefix) + registers
    for image, x_TD in enumerate(stem[0].detach().numpy()):
        rows, members = reference(state, x_TD, tokens, before)
        assert len(rows) == before + {2: PATCHES - 6, 100: 2}[tokens]
        for row, group in zip(rows, members, strict=True):
            for token in group:
                np.testing.assert_allclose(features_BTD[image, token].detach(), row, rtol=1e-9, atol=1e-9)
        weights = [len(group) for group in members[before:]]
        pooled = np.average(rows[before:], axis=0, weights=weights)
        expected = pooled @ state["head.weight"].T + state["head.bias"]
        np.testing.assert_allclose(logits_BC[image].detach(), expected, rtol=1e-9, atol=1e-9)


def test_no_merged_tokens_equal_prenorm_bitwise() -> None:
    built, plain = build(block=merging(0)), build()
    assert torch.equal(built(images()).logits, plain(images()).logits)


def test_contract_holds_where_nothing_is_merged() -> None:
    check_component("block", {"type": "token_merging", "tokens": 0})


def test_work_is_that_of_the_remaining_tokens() -> None:
    tokens, dim, hidden = 4, SIZES["dim"], 4 * SIZES["dim"]
    expected = PATCHES * 3 * 4 * 4 * dim + dim * DATA.classes
    remaining = 1 + PATCHES
    for _ in range(SIZES["depth"]):
        patches = remaining - 1
        count = min(tokens, patches // 2)
        expected += 4 * remaining * dim**2 + 2 * remaining**2 * dim  # attention
        expected += (patches // 2) * (patches - patches // 2) * dim // SIZES["heads"]  # similarities
        remaining -= count
        expected += 2 * remaining * dim * hidden
    cost = cost_of({"type": "vit", **SIZES, "block": merging(tokens)}, DATA)
    plain = cost_of({"type": "vit", **SIZES}, DATA)
    assert cost.macs == expected < plain.macs and cost.params == plain.params


COUNTING = [name for name in slot("attention").names() if slot("attention").get(name).counts_keys]


@pytest.mark.parametrize("name", COUNTING)
def test_weighed_key_equals_repeated_key(name: str) -> None:
    """A key with the bias log(3) gives the output of three equal keys, for every attention that claims it."""
    g = Geometry(image=(8, 8), channels=3, patch=(4, 4), prefix=(), dim=16, depth=1, heads=2, classes=2)
    attend = slot("attention").build(name, g).double().eval()
    assert isinstance(attend, Attention) and attend.mixes_values
    x_BTD = torch.randn(2, 4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    keys: list[Tensor] = []
    size_BT = torch.tensor([[1.0, 3, 1, 1], [2, 1, 1, 2]], dtype=torch.float64)

    def observed(k_BHTK: Tensor, v_BHTK: Tensor) -> Tensor:
        keys.append(k_BHTK)
        return v_BHTK

    weighed = attend(x_BTD, None, size_BT.log()[:, None, None], observed)
    assert keys[0].shape == (2, 2, 4, 8)
    for image, sizes in enumerate(size_BT.long()):
        repeated = attend(x_BTD[image : image + 1].repeat_interleave(sizes, 1), None, None)
        first = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)[:-1]])
        torch.testing.assert_close(weighed[image], repeated[0, first], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"attention": "sigmoid"}, "attention 'sigmoid' (block 0) does not support that; change one of the two"),
        ({"attention": "linear"}, "attention 'linear' (block 0) does not support that; change one of the two"),
        (
            {"position": "rope2d"},
            "position 'rope2d' places every patch in the blocks, and block 'token_merging' merges",
        ),
        ({"position": "relative_bias"}, "position 'relative_bias' places every patch in the blocks"),
        ({"blocks": {"2": {"block": "prenorm"}}}, "use {type: token_merging, tokens: 0} there, which merges none"),
    ],
)
def test_parts_that_need_every_patch_are_refused(options: dict[str, Any], sentence: str) -> None:
    reason = ViT.incompatibility(DATA, {**SIZES, "block": "token_merging", **options})
    assert reason is not None and sentence in reason


def test_attention_maps_cover_every_patch() -> None:
    """Patches that are one token attend alike, and attention to it is shared by them."""
    captured = capture(build(block=merging(3)), images(1))
    total = 1 + PATCHES
    for maps_BHTT, tokens_BTD in zip(captured.maps_LBHTT, captured.tokens_LBTD[1:], strict=True):
        assert maps_BHTT.shape == (1, 2, total, total) and tokens_BTD.shape == (1, total, 16)
        torch.testing.assert_close(maps_BHTT.sum(-1), torch.ones(1, 2, total, dtype=torch.float64))
    last = captured.maps_LBHTT[-1][0]
    same = [(a, b) for a in range(total) for b in range(a) if torch.equal(*captured.tokens_LBTD[2][0, [a, b]])]
    assert len(same) >= 6
    for a, b in same:
        assert torch.equal(last[:, a], last[:, b]) and torch.equal(last[:, :, a], last[:, :, b])
