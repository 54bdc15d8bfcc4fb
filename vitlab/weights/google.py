"""The format of Google's checkpoints, of vit_jax and of big_vision: flax's names and layouts, in an ``.npz``.

D width, H heads, K channels of a head, N patches.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import torch
from torch import Tensor

from vitlab.weights.known import HALF, ORIGINAL_VIT, Encoding, ModelFacts
from vitlab.weights.names import SAME, Canonical, Format, KeyEntry, KeyMap, Layout, State, fuse_qkv, split_qkv

_LINEAR = Layout(lambda x: _2d(x).T.contiguous(), lambda x, heads: x.T.contiguous())
_CONV = Layout(
    lambda x_hwio: x_hwio.permute(3, 2, 0, 1).contiguous(),
    lambda x_oihw, heads: x_oihw.permute(2, 3, 1, 0).contiguous(),
)
_TO_HEADS = Layout(  # (D, H, K) there
    lambda x_DHK: x_DHK.flatten(1).T.contiguous(), lambda x, heads: x.T.reshape(x.shape[1], heads, -1)
)
_HEADS_BIAS = Layout(lambda x_HK: x_HK.flatten(), lambda x, heads: x.reshape(heads, -1))
_FROM_HEADS = Layout(  # (H, K, D) there
    lambda x_HKD: x_HKD.flatten(0, 1).T.contiguous(), lambda x, heads: x.T.reshape(heads, -1, x.shape[0])
)
_GROUP = Layout(
    lambda x: x.flatten(), lambda x, heads: x.view(1, 1, 1, -1)
)  # old versions of flax keep the normalised axes


def _2d(x: Tensor) -> Tensor:
    if x.ndim != 2:
        raise ValueError
    return x


def _norm(theirs: str, ours: str, layout: Layout = SAME) -> list[KeyEntry]:
    return [KeyEntry(f"{theirs}/scale", f"{ours}.weight", layout), KeyEntry(f"{theirs}/bias", f"{ours}.bias", layout)]


def _dense(theirs: str, ours: str) -> list[KeyEntry]:
    return [KeyEntry(f"{theirs}/kernel", f"{ours}.weight", _LINEAR), KeyEntry(f"{theirs}/bias", f"{ours}.bias")]


def _attention(theirs: str, ours: str) -> list[KeyEntry]:
    entries = []
    for name, part in (("query", "q"), ("key", "k"), ("value", "v")):
        entries.append(KeyEntry(f"{theirs}/{name}/kernel", f"{ours}.{part}.weight", _TO_HEADS))
        entries.append(KeyEntry(f"{theirs}/{name}/bias", f"{ours}.{part}.bias", _HEADS_BIAS))
    out = [
        KeyEntry(f"{theirs}/out/kernel", f"{ours}.proj.weight", _FROM_HEADS),
        KeyEntry(f"{theirs}/out/bias", f"{ours}.proj.bias"),
    ]
    return entries + out


def _block(theirs: str, attention: int, norm2: int, mlp: int) -> list[KeyEntry]:
    """Return the entries of a block; flax numbers parts in order of creation, which differs between the code bases."""
    ours = "blocks.{i}"
    return [
        *_norm(f"{theirs}/LayerNorm_0", f"{ours}.norm1"),
        *_attention(f"{theirs}/MultiHeadDotProductAttention_{attention}", f"{ours}.attn"),
        *_norm(f"{theirs}/LayerNorm_{norm2}", f"{ours}.norm2"),
        *_dense(f"{theirs}/MlpBlock_{mlp}/Dense_0", f"{ours}.mlp.fc1"),
        *_dense(f"{theirs}/MlpBlock_{mlp}/Dense_1", f"{ours}.mlp.fc2"),
    ]


def _resnet() -> list[KeyEntry]:
    theirs, ours = "block{s+1}/unit{u+1}", "patch_embed.backbone.stages.{s}.blocks.{u}"
    entries = [
        KeyEntry("conv_root/kernel", "patch_embed.backbone.stem.conv.weight", _CONV),
        *_norm("gn_root", "patch_embed.backbone.stem.norm", _GROUP),
        KeyEntry(f"{theirs}/conv_proj/kernel", f"{ours}.downsample.conv.weight", _CONV),
        *_norm(f"{theirs}/gn_proj", f"{ours}.downsample.norm", _GROUP),
    ]
    for layer in (1, 2, 3):
        entries.append(KeyEntry(f"{theirs}/conv{layer}/kernel", f"{ours}.conv{layer}.weight", _CONV))
        entries += _norm(f"{theirs}/gn{layer}", f"{ours}.norm{layer}", _GROUP)
    return entries


_ENTRIES = [
    KeyEntry("cls", "cls_token"),
    KeyEntry("Transformer/posembed_input/pos_embedding", "pos_embed"),
    KeyEntry("embedding/kernel", "patch_embed.proj.weight", _CONV),
    KeyEntry("embedding/bias", "patch_embed.proj.bias"),
    *_block("Transformer/encoderblock_{i}", 1, 2, 3),
    *_norm("Transformer/encoder_norm", "norm"),
    *_dense("pre_logits", "pre_logits.fc"),
    *_dense("head", "head"),
    *_resnet(),
    KeyEntry("MAPHead_0/probe", "attn_pool.latent"),
    *_attention("MAPHead_0/MultiHeadDotProductAttention_0", "attn_pool"),
    *_norm("MAPHead_0/LayerNorm_0", "attn_pool.norm"),
    *_dense("MAPHead_0/MlpBlock_0/Dense_0", "attn_pool.mlp.fc1"),
    *_dense("MAPHead_0/MlpBlock_0/Dense_1", "attn_pool.mlp.fc2"),
    # Names of big_vision: read, never written.
    KeyEntry("pos_embedding", "pos_embed"),
    *_block("Transformer/encoderblock_{i}", 0, 1, 0),
]
_STEM_ALONE = {"patch_embed.backbone.stem.": "patch_embed.backbone."}
_SCANNED = "Transformer/encoderblock/"
_ROOTS = ("opt/target/", "params/img/", "params/", "")
_BIG_VISION = re.compile(r"Transformer/encoderblock(_\d+)?/MlpBlock_0/Dense_0/kernel")
"""A name that only big_vision has; a file of it without a table of positions uses sincos2d."""
_HAS_HEADS = re.compile(r"(?:.*/)?Transformer/encoderblock(?:_\d+)?/MultiHeadDotProductAttention_\d/query/kernel")


class GoogleFormat(Format):
    """Google's original checkpoints, hybrids included.  Files are written in vit_jax's layout.

    Reference: arXiv:2010.11929, arXiv:2106.10270; github.com/google-research/vision_transformer.
    """

    name = "google"
    title = "Google"
    convention = ModelFacts(eps=1e-6, gelu="tanh", mean=HALF[0], std=HALF[1]).or_else(ORIGINAL_VIT)
    fixed = frozenset({"heads", "prefix_rows", "pool", "norm", "blocks", "pre_logits"})
    needs_rows = True
    needs = ("pos_embed", "patch_embed.proj.bias", "blocks.0.norm1.bias", "blocks.0.attn.qkv.bias", "norm.bias")
    _names = KeyMap(_ENTRIES)

    def recognise(self, names: Collection[str]) -> bool:
        """Return True for the names of Google's JAX checkpoints."""
        return any(f"{root}embedding/kernel" in names for root in _ROOTS)

    def to_canonical(self, state: State) -> Canonical:
        """Rename and transpose the weights, and fuse qkv."""
        root = _root(state)
        dropped = tuple(name for name in state if not name.startswith(root))
        inside = {name.removeprefix(root): value for name, value in state.items() if name.startswith(root)}
        translated = self._names.to_canonical(_unstack_blocks(inside))
        canonical = _fuse_kv(fuse_qkv(translated.state))
        if "patch_embed.backbone.stem.conv.weight" in canonical and not any(".stages." in name for name in canonical):
            canonical = _rename_prefixes(canonical, _STEM_ALONE)
        positions = canonical.get("pos_embed")
        if positions is not None and positions.ndim == 2:
            canonical["pos_embed"] = positions[None]
        return Canonical(canonical, translated.unknown, dropped)

    def _from_canonical(self, state: State, heads: int) -> dict[str, Tensor]:
        out = split_qkv(state)
        if "patch_embed.backbone.conv.weight" in out:
            out = _rename_prefixes(out, {"patch_embed.backbone.": "patch_embed.backbone.stem."})
        for kind in ("weight", "bias"):
            if f"attn_pool.kv.{kind}" in out:
                key, value = out.pop(f"attn_pool.kv.{kind}").chunk(2)
                out |= {f"attn_pool.k.{kind}": key.clone(), f"attn_pool.v.{kind}": value.clone()}
        return self._names.from_canonical(out, heads, self.title)

    def infer_facts(self, state: State) -> ModelFacts:
        """Return heads, rows of prefix tokens and position encoding, as names and shapes of the tensors show them."""
        kernel = next((value for name, value in state.items() if _HAS_HEADS.fullmatch(name)), None)
        root = _root(state)
        learned = {f"{root}{name}" for name in ("pos_embedding", "Transformer/posembed_input/pos_embedding")}
        big_vision = any(_BIG_VISION.fullmatch(name.removeprefix(root)) for name in state)
        computed = Encoding(type="sincos2d", options={"convention": "big_vision"}) if big_vision else None
        return ModelFacts(
            heads=int(kernel.shape[-2]) if kernel is not None and kernel.ndim >= 3 else None,
            prefix_rows="none" if f"{root}pos_embedding" in state else "own",
            position=Encoding(type="none") if learned & state.keys() else computed,
        )


def _root(names: Collection[str]) -> str:
    """Return the prefix of the model's names; the file may hold an optimizer's under others."""
    return next((root for root in _ROOTS if f"{root}embedding/kernel" in names), "")


def _unstack_blocks(state: State) -> dict[str, Tensor]:
    """Split the blocks that big_vision stacks on axis 0."""
    out: dict[str, Tensor] = {}
    for name, value in state.items():
        if name.startswith(_SCANNED):
            rest = name.removeprefix(_SCANNED)
            out |= {f"Transformer/encoderblock_{i}/{rest}": layer.clone() for i, layer in enumerate(value)}
        else:
            out[name] = value
    return out


def _fuse_kv(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Concatenate keys and values of attention pooling to one ``kv``, as in timm."""
    for kind in ("weight", "bias"):
        parts = [f"attn_pool.{part}.{kind}" for part in "kv"]
        if all(part in state for part in parts):
            state[f"attn_pool.kv.{kind}"] = torch.cat([state.pop(part) for part in parts])
    return state


def _rename_prefixes(state: State, prefixes: dict[str, str]) -> dict[str, Tensor]:
    out = {}
    for name, value in state.items():
        for old, new in prefixes.items():
            if name.startswith(old):
                name = new + name.removeprefix(old)
        out[name] = value
    return out
