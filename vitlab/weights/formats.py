"""The formats of timm, torchvision and Google: names and layouts of their tensors.

The canonical form has timm's names and layouts; one table a format translates names in both directions.  The tables are
tested against models of the libraries themselves.

D width, H heads, K channels of a head.
"""

import re
from collections.abc import Collection, Iterator
from functools import reduce
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from vitlab.errors import WeightsError, list_some
from vitlab.models.contract import NewState, State
from vitlab.weights.architecture import HALF, IMAGENET, RELATIVE, Encoding, ModelFacts

Table = tuple[tuple[str, str], ...]
"""Canonical names and a library's.

``{i}`` and ``{u}`` stand for numbers, ``{i1}`` and ``{u1}`` for the same counted from 1; ``{p}`` for weight or bias,
which flax calls ``{kernel}`` or bias in layers, and ``{scale}`` or bias in norms.
"""


def parse_table(text: str) -> Table:
    """Return the names in the lines of a text."""
    return tuple((ours, theirs) for ours, theirs in map(str.split, text.strip().splitlines()))


class Canonical(NamedTuple):
    """A state under canonical names, and the keys that have no canonical name."""

    state: NewState
    unknown: tuple[str, ...] = ()  #: keys the format does not have
    dropped: tuple[str, ...] = ()  #: keys that are no part of what the model computes, such as an optimizer's


class Format:
    """One library's checkpoint format; this one is of vitlab's trials, which only training writes."""

    name: ClassVar[str] = "vitlab"
    title: ClassVar[str] = "vitlab"  #: the library's name in sentences
    fixed: ClassVar[ModelFacts] = ModelFacts()  #: facts of every file
    convention: ModelFacts = ModelFacts()  #: facts that are assumed unless a file states others
    mark: ClassVar[str] = "$"  #: a pattern of names that only this format has
    table: ClassVar[Table] = ()  #: names that are read and written
    further: ClassVar[Table] = ()  #: names that are read, never written
    needs: tuple[str, ...] = ()  #: canonical names that are required
    square: ClassVar[bool] = False  #: whether images and patches must be square

    def recognise(self, names: Collection[str]) -> bool:
        """Return True if these look like the names of this format."""
        return any(re.search(self.mark, name) for name in names)

    def to_canonical(self, state: State) -> Canonical:
        """Convert this format's names and shapes to canonical ones."""
        return Canonical(*rename_to_canonical((*self.table, *self.further), state))

    def from_canonical(self, state: State, heads: int) -> NewState:
        """Convert canonical names and shapes to this format's.

        Raises:
            WeightsError: for tensors that this format has no name for, and for required ones that are missing.
        """
        missing = [name for name in self.needs if name not in state]
        if missing:
            raise WeightsError(
                f"the format {self.name} requires {list_some(missing)}, which this model does not have; use another "
                "format"
            )
        return self._from_canonical(state, heads)

    def _from_canonical(self, state: State, heads: int) -> NewState:
        return rename_from_canonical(self.table, state, self.title)

    def infer_facts_and_defaults(self, state: State) -> tuple[ModelFacts, ModelFacts]:
        """Return the facts that names and shapes show, and facts to assume unless a file states others."""
        return self.fixed, self.convention


# -- translation of names -------------------------------------------------------------------------------------------


def _expand_names(table: Table, state: State) -> Iterator[tuple[str, str]]:
    """Yield every pair of names that a table has for the numbers that occur in a state."""
    # Blocks have several tensors each, so that a larger number counts something else, such as the date in a name.
    numbers = (int(number) for name in state for number in re.findall(r"\d{1,9}", name))
    count = 1 + max((number for number in numbers if number < len(state)), default=0)
    for pair in table:
        for i in range(count if "{i" in pair[1] else 1):
            for u in range(count if "{u" in pair[1] else 1):
                for p in ("weight", "bias") if "{p}" in pair[0] else ("",):
                    flax = {word: word if p == "weight" else p for word in ("kernel", "scale")}
                    ours, theirs = (each.format(i=i, u=u, i1=i + 1, u1=u + 1, p=p, **flax) for each in pair)
                    yield ours, theirs


def rename_to_canonical(table: Table, state: State) -> tuple[NewState, tuple[str, ...]]:
    """Return the tensors under canonical names, and the names that the table does not have.

    Two tensors of one canonical name are refused.
    """
    ours = {theirs: ours for ours, theirs in _expand_names(table, state)}
    out: NewState = {}
    for name in (name for name in state if name in ours):
        if ours[name] in out:
            raise WeightsError(f"the file holds {name} twice, under two spellings; remove one of them")
        out[ours[name]] = state[name]
    return join_qkv(out, *QKV), tuple(name for name in state if name not in ours)


def rename_from_canonical(table: Table, state: State, title: str) -> NewState:
    """Return canonical tensors under a library's names; those that it has no name for are refused."""
    theirs = dict(_expand_names(table, state))
    if unsupported := [name for name in state if name not in theirs]:
        raise WeightsError(
            f"{title} has no tensor for {list_some(unsupported)}; try --to timm, or --head drop to leave out a head"
        )
    return {theirs[name]: value for name, value in state.items()}


QKV = (r"blocks\.\d+\.attn", "qkv")  #: attentions, and the parts of their one matrix
POOLING = ("attn_pool", "kv")


def join_qkv(state: State, attention: str, parts: str) -> NewState:
    """Concatenate the parts of an attention, such as ``q``, ``k`` and ``v``, to one matrix and bias ``qkv``."""
    out = dict(state)
    for match in filter(None, (re.fullmatch(rf"({attention})\.{parts[0]}\.(weight|bias)", name) for name in state)):
        if match[2] == "bias":  # of keys, some attentions have none
            out.setdefault(f"{match[1]}.k.bias", torch.zeros_like(state[match[0]]))
        names = [f"{match[1]}.{part}.{match[2]}" for part in parts]
        if all(name in out for name in names):
            out[f"{match[1]}.{parts}.{match[2]}"] = torch.cat([out.pop(name) for name in names])
    return out


def split_qkv(state: State, attention: str, parts: str) -> NewState:
    """Take the parts of an attention's matrix and bias apart; the inverse of :func:`join_qkv`."""
    out = dict(state)
    for match in filter(None, (re.fullmatch(rf"({attention})\.{parts}\.(weight|bias)", name) for name in state)):
        for part, rows in zip(parts, out.pop(match[0]).chunk(len(parts)), strict=True):
            out[f"{match[1]}.{part}.{match[2]}"] = rows.clone()
    return out


# -- timm -------------------------------------------------------------------------------------------------------------

_GAMMA = re.compile(r"(blocks\.\d+)\.gamma_([12])")
_GATED = re.compile(r"(blocks\..+\.mlp)\.fc1\.(weight|bias)")
_PARTS = parse_table("""
reg_token   register_tokens
reg_token   storage_tokens
mlp.fc1.    mlp.w12.
mlp.fc1_g.  mlp.w1.
mlp.fc1_x.  mlp.w2.
mlp.fc2.    mlp.w3.
attn.q.bias attn.q_bias
attn.v.bias attn.v_bias
""")
"""Parts of canonical names, and of those in Meta's files of DINOv2 and DINOv3 and in timm's of EVA and BEiT."""
PERIODS = "rope_embed.periods"
"""The periods of DINOv3's rotations in Meta's files, one for each of a quarter of the channels of a head."""
_UNREAD = re.compile(r"mask_token|rope_embed\..*|local_cls_norm\..*|.*\.(bias_mask|relative_position_index)")


META = ModelFacts(eps=1e-5).with_defaults(IMAGENET)


def stack_relative_tables(state: State) -> NewState:
    """Return a state whose tables of relative positions, one a block or one for all, are one tensor."""
    names = [name for name in state if name.endswith(".relative_position_bias_table") and name != RELATIVE]
    if not names:
        return dict(state)
    names.sort(key=lambda name: [int(number) for number in re.findall(r"\d+", name)])
    rest = {name: value for name, value in state.items() if name not in names}
    return {**rest, RELATIVE: torch.stack([state[name] for name in names])}


def fold_class_position_into_token(state: State) -> NewState:
    """Return the class token with its row of positions added, and the rows without it; the sums are the same."""
    rows_1TD = state["pos_embed"]
    return {"cls_token": state["cls_token"] + rows_1TD[:, :1], "pos_embed": rows_1TD[:, 1:]}


def dinov3_rotation(theta: float) -> Encoding:
    """Return the rotary positions of DINOv3 (arXiv:2508.10104), with its order of channels."""
    return Encoding(type="rope2d", options={"theta": theta, "coordinates": "centred"}, axes="ij", pairs="halves")


class TimmFormat(Format):
    """timm's format: the canonical names; read as well: DeiT III's and BEiT's, and Meta's names of DINOv2 and DINOv3.

    EVA, DINOv3 and timm's other rotary models use these names, too; only a config beside the file distinguishes them.
    Older models of timm also had ``pre_logits.fc``.

    Reference: arXiv:2012.12877, arXiv:2204.07118.
    """

    name = "timm"
    title = "timm"
    mark = r"^(patch_embed\.proj\.weight|blocks\.\d+\.norm1\.weight)$"
    convention = ModelFacts(eps=1e-6, gelu="none").with_defaults(HALF)

    def to_canonical(self, state: State) -> Canonical:
        """Rename DeiT III's gammas and Meta's names, fuse q's and v's biases, and split the halves of a gated MLP."""
        out, dropped = {}, tuple(filter(_UNREAD.fullmatch, state))
        for name, value in state.items():
            if name not in dropped:
                mask = state.get(f"{name}_mask")
                ours = _GAMMA.sub(r"\1.ls\2.gamma", reduce(lambda text, pair: text.replace(*pair[::-1]), _PARTS, name))
                out[ours] = value if mask is None else value * mask
        if "register_tokens" in state:
            out |= fold_class_position_into_token(out)
        out = stack_relative_tables(out)
        state = out.copy()
        if "rope.freqs" in out:
            out["position.freqs"] = out.pop("rope.freqs")
        for match in filter(None, map(_GATED.fullmatch, state)):
            back = state.get(f"{match[1]}.fc2.weight")
            if back is not None and back.ndim == 2 and len(state[match[0]]) == 2 * back.shape[1]:
                halves = out.pop(match[0]).chunk(2)
                out |= {f"{match[1]}.fc1_{half}.{match[2]}": rows for half, rows in zip("gx", halves, strict=True)}
        return Canonical(join_qkv(out, *QKV), (), dropped)

    def _from_canonical(self, state: State, heads: int) -> NewState:
        return dict(state)

    def infer_facts_and_defaults(self, state: State) -> tuple[ModelFacts, ModelFacts]:
        """Return rotations and heads that DINOv3's periods show, and whether prefix tokens have rows."""
        if PERIODS not in state:
            of_deit = any(map(_GAMMA.fullmatch, state))
            no_rows = of_deit or "register_tokens" in state
            usual = IMAGENET.with_defaults(self.convention) if of_deit else self.convention
            return ModelFacts(prefix_rows="none" if no_rows else None), usual
        period_Q, dim = state[PERIODS].double(), len(state["norm.weight"])
        theta = float((period_Q[-1] / period_Q[0]) ** (len(period_Q) / max(len(period_Q) - 1, 1)))
        position = dinov3_rotation(round(theta, 3))
        return ModelFacts(heads=dim // (4 * len(period_Q)), position=position), META.with_defaults(self.convention)


# -- torchvision ------------------------------------------------------------------------------------------------------

NEEDS = ("cls_token", "pos_embed", "patch_embed.proj.bias", "blocks.0.norm1.bias", "norm.bias")


class TorchvisionFormat(Format):
    """``torchvision.models.VisionTransformer``."""

    name = "torchvision"
    title = "torchvision"
    mark = r"^encoder\.(pos_embedding$|layers\.encoder_layer_)"
    fixed = ModelFacts(prefix_rows="own", pool="cls", norm="layernorm", gelu="none", position=Encoding())
    convention = ModelFacts(eps=1e-6).with_defaults(IMAGENET)
    needs = (*NEEDS, "blocks.0.attn.qkv.bias")
    square = True
    table = parse_table("""
cls_token                class_token
pos_embed                encoder.pos_embedding
patch_embed.proj.{p}     conv_proj.{p}
blocks.{i}.norm1.{p}     encoder.layers.encoder_layer_{i}.ln_1.{p}
blocks.{i}.attn.qkv.{p}  encoder.layers.encoder_layer_{i}.self_attention.in_proj_{p}
blocks.{i}.attn.proj.{p} encoder.layers.encoder_layer_{i}.self_attention.out_proj.{p}
blocks.{i}.norm2.{p}     encoder.layers.encoder_layer_{i}.ln_2.{p}
blocks.{i}.mlp.fc1.{p}   encoder.layers.encoder_layer_{i}.mlp.0.{p}
blocks.{i}.mlp.fc2.{p}   encoder.layers.encoder_layer_{i}.mlp.3.{p}
norm.{p}                 encoder.ln.{p}
pre_logits.fc.{p}        heads.pre_logits.{p}
head.{p}                 heads.head.{p}
""")
    # Before version 0.12.
    further = parse_table("""
blocks.{i}.mlp.fc1.{p} encoder.layers.encoder_layer_{i}.mlp.linear_1.{p}
blocks.{i}.mlp.fc2.{p} encoder.layers.encoder_layer_{i}.mlp.linear_2.{p}
""")


# -- Google -----------------------------------------------------------------------------------------------------------


# flax numbers parts in order of creation, which differs between the code bases.
_VIT_JAX = parse_table("""
cls_token                                                      cls
pos_embed                                                      Transformer/posembed_input/pos_embedding
patch_embed.proj.{p}                                           embedding/{kernel}
blocks.{i}.norm1.{p}                                           Transformer/encoderblock_{i}/LayerNorm_0/{scale}
blocks.{i}.attn.q.{p} Transformer/encoderblock_{i}/MultiHeadDotProductAttention_1/query/{kernel}
blocks.{i}.attn.k.{p} Transformer/encoderblock_{i}/MultiHeadDotProductAttention_1/key/{kernel}
blocks.{i}.attn.v.{p} Transformer/encoderblock_{i}/MultiHeadDotProductAttention_1/value/{kernel}
blocks.{i}.attn.proj.{p} Transformer/encoderblock_{i}/MultiHeadDotProductAttention_1/out/{kernel}
blocks.{i}.norm2.{p}                                           Transformer/encoderblock_{i}/LayerNorm_2/{scale}
blocks.{i}.mlp.fc1.{p} Transformer/encoderblock_{i}/MlpBlock_3/Dense_0/{kernel}
blocks.{i}.mlp.fc2.{p} Transformer/encoderblock_{i}/MlpBlock_3/Dense_1/{kernel}
norm.{p}                                                       Transformer/encoder_norm/{scale}
pre_logits.fc.{p}                                              pre_logits/{kernel}
head.{p}                                                       head/{kernel}
patch_embed.backbone.stem.conv.{p}                             conv_root/{kernel}
patch_embed.backbone.stem.norm.{p}                             gn_root/{scale}
patch_embed.backbone.stages.{i}.blocks.{u}.downsample.conv.{p} block{i1}/unit{u1}/conv_proj/{kernel}
patch_embed.backbone.stages.{i}.blocks.{u}.downsample.norm.{p} block{i1}/unit{u1}/gn_proj/{scale}
patch_embed.backbone.stages.{i}.blocks.{u}.conv1.{p}           block{i1}/unit{u1}/conv1/{kernel}
patch_embed.backbone.stages.{i}.blocks.{u}.conv2.{p}           block{i1}/unit{u1}/conv2/{kernel}
patch_embed.backbone.stages.{i}.blocks.{u}.conv3.{p}           block{i1}/unit{u1}/conv3/{kernel}
patch_embed.backbone.stages.{i}.blocks.{u}.norm1.{p}           block{i1}/unit{u1}/gn1/{scale}
patch_embed.backbone.stages.{i}.blocks.{u}.norm2.{p}           block{i1}/unit{u1}/gn2/{scale}
patch_embed.backbone.stages.{i}.blocks.{u}.norm3.{p}           block{i1}/unit{u1}/gn3/{scale}
attn_pool.latent                                               MAPHead_0/probe
attn_pool.q.{p}                                                MAPHead_0/MultiHeadDotProductAttention_0/query/{kernel}
attn_pool.k.{p}                                                MAPHead_0/MultiHeadDotProductAttention_0/key/{kernel}
attn_pool.v.{p}                                                MAPHead_0/MultiHeadDotProductAttention_0/value/{kernel}
attn_pool.proj.{p}                                             MAPHead_0/MultiHeadDotProductAttention_0/out/{kernel}
attn_pool.norm.{p}                                             MAPHead_0/LayerNorm_0/{scale}
attn_pool.mlp.fc1.{p}                                          MAPHead_0/MlpBlock_0/Dense_0/{kernel}
attn_pool.mlp.fc2.{p}                                          MAPHead_0/MlpBlock_0/Dense_1/{kernel}
""")
_BIG_VISION = parse_table("""
pos_embed                pos_embedding
blocks.{i}.norm1.{p}     Transformer/encoderblock_{i}/LayerNorm_0/{scale}
blocks.{i}.attn.q.{p}    Transformer/encoderblock_{i}/MultiHeadDotProductAttention_0/query/{kernel}
blocks.{i}.attn.k.{p}    Transformer/encoderblock_{i}/MultiHeadDotProductAttention_0/key/{kernel}
blocks.{i}.attn.v.{p}    Transformer/encoderblock_{i}/MultiHeadDotProductAttention_0/value/{kernel}
blocks.{i}.attn.proj.{p} Transformer/encoderblock_{i}/MultiHeadDotProductAttention_0/out/{kernel}
blocks.{i}.norm2.{p}     Transformer/encoderblock_{i}/LayerNorm_1/{scale}
blocks.{i}.mlp.fc1.{p}   Transformer/encoderblock_{i}/MlpBlock_0/Dense_0/{kernel}
blocks.{i}.mlp.fc2.{p}   Transformer/encoderblock_{i}/MlpBlock_0/Dense_1/{kernel}
""")
_STEM, _STEM_ALONE = "patch_embed.backbone.stem.", "patch_embed.backbone."
_STACKED = "Transformer/encoderblock/"
_ROOTS = ("opt/target/", "params/img/", "params/", "")
_OF_QKV = ("query", "key", "value")


class GoogleFormat(Format):
    """Google's original checkpoints, of vit_jax and big_vision, hybrids included; flax's layouts in an ``.npz``.

    Files are written in vit_jax's layout.

    Reference: arXiv:2010.11929, arXiv:2106.10270; github.com/google-research/vision_transformer.
    """

    name = "google"
    title = "Google"
    mark = r"^(opt/target/|params/img/|params/)?embedding/kernel$"
    convention = ModelFacts(eps=1e-6, gelu="tanh").with_defaults(HALF)
    table = _VIT_JAX
    further = _BIG_VISION
    needs = ("pos_embed", "patch_embed.proj.bias", "blocks.0.norm1.bias", "blocks.0.attn.qkv.bias", "norm.bias")

    def to_canonical(self, state: State) -> Canonical:
        """Rename and transpose the weights, and fuse qkv."""
        inside, outside = _select_model_and_unstack_blocks(state)
        translated = {name: _from_flax_layout(name, value) for name, value in inside.items()}
        canonical, unknown = rename_to_canonical((*self.table, *self.further), translated)
        canonical = join_qkv(canonical, *POOLING)
        if not any(".stages." in name for name in canonical):  # timm has no module "stem" then
            canonical = {name.replace(_STEM, _STEM_ALONE): value for name, value in canonical.items()}
        positions = canonical.get("pos_embed")
        if positions is not None and positions.ndim == 2:
            canonical["pos_embed"] = positions[None]
        return Canonical(canonical, unknown, outside)

    def _from_canonical(self, state: State, heads: int) -> NewState:
        out = split_qkv(split_qkv(state, *QKV), *POOLING)
        if "patch_embed.backbone.conv.weight" in out:
            out = {name.replace(_STEM_ALONE, _STEM): value for name, value in out.items()}
        renamed = rename_from_canonical(self.table, out, self.title)
        return {name: _to_flax_layout(name, value, heads) for name, value in renamed.items()}

    def infer_facts_and_defaults(self, state: State) -> tuple[ModelFacts, ModelFacts]:
        """Return heads and rows of prefix tokens, and that big_vision's files without positions use computed ones."""
        inside, _ = _select_model_and_unstack_blocks(state)
        kernel = next(
            (value for name, value in inside.items() if re.search(r"encoderblock_.*query/kernel", name)), None
        )
        facts = ModelFacts(
            heads=int(kernel.shape[-2]) if kernel is not None and kernel.ndim == 3 else None,
            prefix_rows="none" if "pos_embedding" in inside else "own",
            pool="cls" if "cls" in inside else None,
            norm="layernorm",
        )
        learned = any(name.endswith("pos_embedding") for name in inside)
        big_vision = any("MlpBlock_0/" in name and name.startswith("Transformer/") for name in inside)
        computed = Encoding(type="sincos2d", options={"convention": "big_vision"}) if big_vision else None
        return facts, ModelFacts(position=Encoding() if learned else computed).with_defaults(self.convention)


def _select_model_and_unstack_blocks(state: State) -> tuple[NewState, tuple[str, ...]]:
    """Return the tensors of the model, with the blocks that big_vision stacks on axis 0 apart, and the other names."""
    root = next((root for root in _ROOTS if f"{root}embedding/kernel" in state), "")
    out: NewState = {}
    for name, value in state.items():
        inside = name.removeprefix(root)
        if inside.startswith(_STACKED):
            rest = inside.removeprefix(_STACKED)
            out |= {f"Transformer/encoderblock_{i}/{rest}": layer.clone() for i, layer in enumerate(value)}
        elif name.startswith(root):
            out[inside] = value
    return out, tuple(name for name in state if not name.startswith(root))


def _from_flax_layout(name: str, value: Tensor) -> Tensor:
    *_, layer, kind = ("", *name.split("/"))
    if kind in ("bias", "scale"):
        return value.flatten()  # biases by head, and norms of groups, which keep further axes in old versions of flax
    if kind != "kernel":
        return value
    expected = 4 if layer == "embedding" or layer.startswith("conv") else 3 if layer in (*_OF_QKV, "out") else 2
    if value.ndim != expected:
        raise WeightsError(f"{name} has the unexpected shape {tuple(value.shape)}; use an unchanged checkpoint")
    if value.ndim == 4:
        return value.permute(3, 2, 0, 1).contiguous()
    matrix = value.flatten(0, 1) if layer == "out" else value.flatten(1)  # (H, K, D), or (D, H, K)
    return matrix.T.contiguous()


def _to_flax_layout(name: str, value: Tensor, heads: int) -> Tensor:
    """Return a tensor in flax's layout; the inverse of :func:`_from_flax_layout`."""
    *_, layer, kind = ("", *name.split("/"))
    if layer.startswith("gn"):
        return value.view(1, 1, 1, -1)
    if kind == "bias" and layer in _OF_QKV:
        return value.reshape(heads, -1)
    if kind != "kernel":
        return value
    if value.ndim == 4:
        return value.permute(2, 3, 1, 0).contiguous()
    if layer in _OF_QKV:
        return value.T.reshape(value.shape[1], heads, -1)
    return value.T.reshape(heads, -1, len(value)) if layer == "out" else value.T.contiguous()
