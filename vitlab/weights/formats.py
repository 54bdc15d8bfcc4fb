"""The formats of timm, DeiT, torchvision, Hugging Face and Google: names and layouts of their tensors.

The canonical form has timm's names and layouts; one table a format translates names in both directions.  The tables are
tested against models of the libraries themselves.

D width, H heads, K channels of a head.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from vitlab.errors import WeightsError
from vitlab.weights.facts import HALF, IMAGENET, Encoding, ModelFacts, some

State = Mapping[str, Tensor]

Table = tuple[tuple[str, str], ...]
"""Canonical names and a library's.

``{i}`` and ``{u}`` stand for numbers, ``{i1}`` and ``{u1}`` for the same counted from 1; ``{p}`` for weight or bias,
which flax calls ``{kernel}`` or bias in layers, and ``{scale}`` or bias in norms.
"""


class Canonical(NamedTuple):
    """A state under canonical names, and the keys that have no canonical name."""

    state: dict[str, Tensor]
    unknown: tuple[str, ...] = ()  #: keys the format does not have
    dropped: tuple[str, ...] = ()  #: keys that are no part of what the model computes, such as an optimizer's


class Format:
    """One library's checkpoint format; this one is of vitlab's trials, which only training writes."""

    name: ClassVar[str] = "vitlab"
    title: ClassVar[str] = "vitlab"  #: the library's name in sentences
    fixed: ClassVar[ModelFacts] = ModelFacts()  #: facts of every file
    convention: ClassVar[ModelFacts] = ModelFacts()  #: facts that are assumed unless a file states others
    mark: ClassVar[str] = "$"  #: a pattern of names that only this format has
    table: ClassVar[Table] = ()  #: names that are read and written
    further: ClassVar[Table] = ()  #: names that are read, never written
    needs: ClassVar[tuple[str, ...]] = ()  #: canonical names that are required
    square: ClassVar[bool] = False  #: whether images and patches must be square

    def recognise(self, names: Collection[str]) -> bool:
        """Return True if these look like the names of this format."""
        return any(re.search(self.mark, name) for name in names)

    def to_canonical(self, state: State) -> Canonical:
        """Convert this format's names and shapes to canonical ones."""
        return Canonical(*_read((*self.table, *self.further), state))

    def from_canonical(self, state: State, heads: int) -> dict[str, Tensor]:
        """Convert canonical names and shapes to this format's.

        Raises:
            WeightsError: for tensors that this format has no name for, and for required ones that are missing.
        """
        missing = [name for name in self.needs if name not in state]
        if missing:
            raise WeightsError(
                f"the format {self.name} requires {some(missing)}, which this model does not have; use another format"
            )
        return self._from_canonical(state, heads)

    def _from_canonical(self, state: State, heads: int) -> dict[str, Tensor]:
        return _written(self.table, state, self.title)

    def facts(self, state: State) -> tuple[ModelFacts, ModelFacts]:
        """Return the facts that names and shapes show, and facts to assume unless a file states others."""
        return self.fixed, self.convention


# -- translation of names -------------------------------------------------------------------------------------------


def _names(table: Table, state: State) -> Iterator[tuple[str, str]]:
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


def _read(table: Table, state: State) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the tensors under canonical names, and the names that the table does not have.

    Raises:
        WeightsError: if two tensors have the same canonical name.
    """
    ours = {theirs: ours for ours, theirs in _names(table, state)}
    out: dict[str, Tensor] = {}
    for name in (name for name in state if name in ours):
        if ours[name] in out:
            raise WeightsError(f"the file holds {name} twice, under two spellings; remove one of them")
        out[ours[name]] = state[name]
    return _joined(out, *_QKV), tuple(name for name in state if name not in ours)


def _written(table: Table, state: State, title: str) -> dict[str, Tensor]:
    """Return canonical tensors under a library's names.

    Raises:
        WeightsError: for tensors that it has no name for.
    """
    theirs = dict(_names(table, state))
    if unsupported := [name for name in state if name not in theirs]:
        raise WeightsError(f"{title} has no tensor for {some(unsupported)}; use another format")
    return {theirs[name]: value for name, value in state.items()}


_QKV = (r"blocks\.\d+\.attn", "qkv")  #: attentions, and the parts of their one matrix
_POOLING = ("attn_pool", "kv")


def _joined(state: State, attention: str, parts: str) -> dict[str, Tensor]:
    """Concatenate the parts of an attention, such as ``q``, ``k`` and ``v``, to one matrix and bias ``qkv``."""
    out = dict(state)
    for match in filter(None, (re.fullmatch(rf"({attention})\.{parts[0]}\.(weight|bias)", name) for name in state)):
        names = [f"{match[1]}.{part}.{match[2]}" for part in parts]
        if all(name in state for name in names):
            out[f"{match[1]}.{parts}.{match[2]}"] = torch.cat([out.pop(name) for name in names])
    return out


def _split(state: State, attention: str, parts: str) -> dict[str, Tensor]:
    """Take the parts of an attention's matrix and bias apart; the inverse of :func:`_joined`."""
    out = dict(state)
    for match in filter(None, (re.fullmatch(rf"({attention})\.{parts}\.(weight|bias)", name) for name in state)):
        for part, rows in zip(parts, out.pop(match[0]).chunk(len(parts)), strict=True):
            out[f"{match[1]}.{part}.{match[2]}"] = rows.clone()
    return out


# -- timm and DeiT ----------------------------------------------------------------------------------------------------

_GAMMA = re.compile(r"(blocks\.\d+)\.gamma_([12])")
_SCALE = re.compile(r"(blocks\.\d+)\.ls([12])\.gamma")
_GATED = re.compile(r"(blocks\..+\.mlp)\.fc1\.(weight|bias)")
_QUERY_BIAS = re.compile(r"(blocks\.\d+\.attn)\.q_bias")


class TimmFormat(Format):
    """timm's format: the canonical names.  Older models of timm also had ``pre_logits.fc``."""

    name = "timm"
    title = "timm"
    mark = r"^(patch_embed\.proj\.weight|blocks\.\d+\.norm1\.weight)$"
    convention = ModelFacts(eps=1e-6, gelu="none", mean=HALF[0], std=HALF[1])

    def recognise(self, names: Collection[str]) -> bool:
        """Return True for timm's names without DeiT III's gammas."""
        return super().recognise(names) and not any(map(_GAMMA.fullmatch, names))

    def to_canonical(self, state: State) -> Canonical:
        """Rename DeiT III's gammas, fuse the biases of q and v, and take the two halves of a gated MLP apart."""
        out = {_GAMMA.sub(r"\1.ls\2.gamma", name): value for name, value in state.items()}
        if "rope.freqs" in out:
            out["position.freqs"] = out.pop("rope.freqs")
        for match in filter(None, map(_GATED.fullmatch, state)):
            back = state.get(f"{match[1]}.fc2.weight")
            if back is not None and back.ndim == 2 and len(state[match[0]]) == 2 * back.shape[1]:
                halves = out.pop(match[0]).chunk(2)
                out |= {f"{match[1]}.fc1_{half}.{match[2]}": rows for half, rows in zip("gx", halves, strict=True)}
        for match in filter(None, map(_QUERY_BIAS.fullmatch, state)):
            if f"{match[1]}.v_bias" in state:
                query, value = out.pop(match[0]), out.pop(f"{match[1]}.v_bias")
                out[f"{match[1]}.qkv.bias"] = torch.cat([query, torch.zeros_like(query), value])
        return Canonical(out)

    def _from_canonical(self, state: State, heads: int) -> dict[str, Tensor]:
        return dict(state)


class DeiTFormat(TimmFormat):
    """The checkpoints of DeiT and DeiT III: timm's names; layer scales of DeiT III are ``gamma_1``, ``gamma_2``.

    EVA, DINOv3 and timm's other rotary models use these names too; only a config beside the file distinguishes them.

    Reference: arXiv:2012.12877, arXiv:2204.07118.
    """

    name = "deit"
    title = "DeiT"
    convention = ModelFacts(eps=1e-6, gelu="none", mean=IMAGENET[0], std=IMAGENET[1])

    def recognise(self, names: Collection[str]) -> bool:
        """Return True for timm's names, with or without DeiT III's gammas."""
        return Format.recognise(self, names)

    def _from_canonical(self, state: State, heads: int) -> dict[str, Tensor]:
        if parallel := [name for name in state if ".attns." in name or ".ffns." in name]:
            raise WeightsError(f"{self.title} has no tensor for {some(parallel)}; use another format")
        return {_SCALE.sub(r"\1.gamma_\2", name): value for name, value in state.items()}

    def facts(self, state: State) -> tuple[ModelFacts, ModelFacts]:
        """Return that prefix tokens have no rows of positions in DeiT III, which has layer scales, and else do."""
        return ModelFacts(prefix_rows="none" if any(map(_GAMMA.fullmatch, state)) else "own"), self.convention


# -- torchvision and Hugging Face -------------------------------------------------------------------------------------

_NEEDS = ("cls_token", "pos_embed", "patch_embed.proj.bias", "blocks.0.norm1.bias", "norm.bias")
_FIXED = ModelFacts(prefix_rows="own", pool="cls", norm="layernorm", position=Encoding())


class TorchvisionFormat(Format):
    """``torchvision.models.VisionTransformer``."""

    name = "torchvision"
    title = "torchvision"
    mark = r"^encoder\.(pos_embedding$|layers\.encoder_layer_)"
    fixed = ModelFacts(gelu="none").or_else(_FIXED)
    convention = ModelFacts(eps=1e-6, mean=IMAGENET[0], std=IMAGENET[1])
    needs = (*_NEEDS, "blocks.0.attn.qkv.bias")
    square = True
    table = (
        ("cls_token", "class_token"),
        ("pos_embed", "encoder.pos_embedding"),
        ("patch_embed.proj.{p}", "conv_proj.{p}"),
        ("blocks.{i}.norm1.{p}", "encoder.layers.encoder_layer_{i}.ln_1.{p}"),
        ("blocks.{i}.attn.qkv.{p}", "encoder.layers.encoder_layer_{i}.self_attention.in_proj_{p}"),
        ("blocks.{i}.attn.proj.{p}", "encoder.layers.encoder_layer_{i}.self_attention.out_proj.{p}"),
        ("blocks.{i}.norm2.{p}", "encoder.layers.encoder_layer_{i}.ln_2.{p}"),
        ("blocks.{i}.mlp.fc1.{p}", "encoder.layers.encoder_layer_{i}.mlp.0.{p}"),
        ("blocks.{i}.mlp.fc2.{p}", "encoder.layers.encoder_layer_{i}.mlp.3.{p}"),
        ("norm.{p}", "encoder.ln.{p}"),
        ("pre_logits.fc.{p}", "heads.pre_logits.{p}"),
        ("head.{p}", "heads.head.{p}"),
    )
    # Before version 0.12.
    further = (
        ("blocks.{i}.mlp.fc1.{p}", "encoder.layers.encoder_layer_{i}.mlp.linear_1.{p}"),
        ("blocks.{i}.mlp.fc2.{p}", "encoder.layers.encoder_layer_{i}.mlp.linear_2.{p}"),
    )


_HUGGING_FACE: Table = (
    ("cls_token", "embeddings.cls_token"),
    ("dist_token", "embeddings.distillation_token"),
    ("pos_embed", "embeddings.position_embeddings"),
    ("patch_embed.proj.{p}", "embeddings.patch_embeddings.projection.{p}"),
    ("norm.{p}", "layernorm.{p}"),
    ("pre_logits.fc.{p}", "pooler.dense.{p}"),
)
_ON_DISK: Table = (
    ("blocks.{i}.norm1.{p}", "encoder.layer.{i}.layernorm_before.{p}"),
    ("blocks.{i}.attn.q.{p}", "encoder.layer.{i}.attention.attention.query.{p}"),
    ("blocks.{i}.attn.k.{p}", "encoder.layer.{i}.attention.attention.key.{p}"),
    ("blocks.{i}.attn.v.{p}", "encoder.layer.{i}.attention.attention.value.{p}"),
    ("blocks.{i}.attn.proj.{p}", "encoder.layer.{i}.attention.output.dense.{p}"),
    ("blocks.{i}.norm2.{p}", "encoder.layer.{i}.layernorm_after.{p}"),
    ("blocks.{i}.mlp.fc1.{p}", "encoder.layer.{i}.intermediate.dense.{p}"),
    ("blocks.{i}.mlp.fc2.{p}", "encoder.layer.{i}.output.dense.{p}"),
)
_IN_MEMORY: Table = (
    ("blocks.{i}.norm1.{p}", "layers.{i}.layernorm_before.{p}"),
    ("blocks.{i}.attn.q.{p}", "layers.{i}.attention.q_proj.{p}"),
    ("blocks.{i}.attn.k.{p}", "layers.{i}.attention.k_proj.{p}"),
    ("blocks.{i}.attn.v.{p}", "layers.{i}.attention.v_proj.{p}"),
    ("blocks.{i}.attn.proj.{p}", "layers.{i}.attention.o_proj.{p}"),
    ("blocks.{i}.norm2.{p}", "layers.{i}.layernorm_after.{p}"),
    ("blocks.{i}.mlp.fc1.{p}", "layers.{i}.mlp.fc1.{p}"),
    ("blocks.{i}.mlp.fc2.{p}", "layers.{i}.mlp.fc2.{p}"),
)
_CLASSIFIERS: Table = (
    ("head.{p}", "classifier.{p}"),
    ("head.{p}", "cls_classifier.{p}"),
    ("head_dist.{p}", "distillation_classifier.{p}"),
)


class HuggingFaceFormat(Format):
    """Transformers' ViT and DeiT, as ``save_pretrained`` writes them; both spellings are read.

    Since version 5 its modules are named differently in memory than on disk; ``hf-memory`` is the other spelling.
    """

    name = "hf"
    title = "Hugging Face"
    mark = r"embeddings\.patch_embeddings\.projection\.weight$"
    fixed = _FIXED
    convention = ModelFacts(eps=1e-12, gelu="none", mean=HALF[0], std=HALF[1])
    needs = _NEEDS
    table = (*_HUGGING_FACE, *_ON_DISK)
    further = _IN_MEMORY

    def to_canonical(self, state: State) -> Canonical:
        """Rename the tensors, fuse qkv, and drop those that a classifier does not use."""
        bare = {re.sub(r"^(vit|deit)\.", "", name): value for name, value in state.items()}
        has_classifier = any("classifier." in name for name in bare)
        # Classifiers read neither.
        unread = ("embeddings.mask_token", "pooler.") if has_classifier else ("embeddings.mask_token",)
        body = {name: value for name, value in bare.items() if not name.startswith(unread)}
        canonical, unknown = _read((*self.table, *self.further, *_CLASSIFIERS), body)
        return Canonical(canonical, unknown, tuple(name for name in bare if name not in body))

    def _from_canonical(self, state: State, heads: int) -> dict[str, Tensor]:
        classifier = "cls_classifier" if "head_dist.weight" in state else "classifier"
        prefix = ""  # a body without a head has none
        if "head.weight" in state:
            prefix = "deit." if "dist_token" in state else "vit."
            if "pre_logits.fc.weight" in state:
                raise WeightsError(
                    f"{self.title}'s classifiers have no pre-logits; drop them and the head that reads them (--head "
                    "drop --pre-logits drop)"
                )
        body = tuple((ours, prefix + theirs) for ours, theirs in self.table)
        classifiers = (("head.{p}", classifier + ".{p}"), ("head_dist.{p}", "distillation_classifier.{p}"))
        return _written((*body, *classifiers), _split(state, *_QKV), self.title)

    def facts(self, state: State) -> tuple[ModelFacts, ModelFacts]:
        """Return ImageNet's mean and standard deviation for distilled models."""
        # DeiT was trained with ImageNet's normalisation; no file states the one of transformers' own class.
        distilled = any(name.endswith("distillation_token") for name in state)
        pixels = ModelFacts(mean=IMAGENET[0], std=IMAGENET[1]) if distilled else ModelFacts()
        return self.fixed, pixels.or_else(self.convention)


class HuggingFaceMemoryFormat(HuggingFaceFormat):
    """Transformers' ViT and DeiT under their module names since version 5, as ``state_dict()`` returns them."""

    name = "hf-memory"
    title = "Hugging Face, in memory"
    mark = r"layers\.0\.attention\.q_proj\.weight$"
    table = (*_HUGGING_FACE, *_IN_MEMORY)
    further = _ON_DISK


# -- Google -----------------------------------------------------------------------------------------------------------


def _attention(theirs: str, ours: str) -> Table:
    parts = (("q", "query"), ("k", "key"), ("v", "value"), ("proj", "out"))
    return tuple((f"{ours}.{part}.{{p}}", f"{theirs}/{name}/{{kernel}}") for part, name in parts)


def _block(attention: int, norm2: int, mlp: int) -> Table:
    """Return the names of a block; flax numbers parts in order of creation, which differs between the code bases."""
    ours, theirs = "blocks.{i}", "Transformer/encoderblock_{i}"
    return (
        (f"{ours}.norm1.{{p}}", f"{theirs}/LayerNorm_0/{{scale}}"),
        *_attention(f"{theirs}/MultiHeadDotProductAttention_{attention}", f"{ours}.attn"),
        (f"{ours}.norm2.{{p}}", f"{theirs}/LayerNorm_{norm2}/{{scale}}"),
        (f"{ours}.mlp.fc1.{{p}}", f"{theirs}/MlpBlock_{mlp}/Dense_0/{{kernel}}"),
        (f"{ours}.mlp.fc2.{{p}}", f"{theirs}/MlpBlock_{mlp}/Dense_1/{{kernel}}"),
    )


_UNIT, _STAGE = "block{i1}/unit{u1}", "patch_embed.backbone.stages.{i}.blocks.{u}"
_VIT_JAX: Table = (
    ("cls_token", "cls"),
    ("pos_embed", "Transformer/posembed_input/pos_embedding"),
    ("patch_embed.proj.{p}", "embedding/{kernel}"),
    *_block(1, 2, 3),
    ("norm.{p}", "Transformer/encoder_norm/{scale}"),
    ("pre_logits.fc.{p}", "pre_logits/{kernel}"),
    ("head.{p}", "head/{kernel}"),
    ("patch_embed.backbone.stem.conv.{p}", "conv_root/{kernel}"),
    ("patch_embed.backbone.stem.norm.{p}", "gn_root/{scale}"),
    (f"{_STAGE}.downsample.conv.{{p}}", f"{_UNIT}/conv_proj/{{kernel}}"),
    (f"{_STAGE}.downsample.norm.{{p}}", f"{_UNIT}/gn_proj/{{scale}}"),
    *((f"{_STAGE}.conv{layer}.{{p}}", f"{_UNIT}/conv{layer}/{{kernel}}") for layer in (1, 2, 3)),
    *((f"{_STAGE}.norm{layer}.{{p}}", f"{_UNIT}/gn{layer}/{{scale}}") for layer in (1, 2, 3)),
    ("attn_pool.latent", "MAPHead_0/probe"),
    *_attention("MAPHead_0/MultiHeadDotProductAttention_0", "attn_pool"),
    ("attn_pool.norm.{p}", "MAPHead_0/LayerNorm_0/{scale}"),
    ("attn_pool.mlp.fc1.{p}", "MAPHead_0/MlpBlock_0/Dense_0/{kernel}"),
    ("attn_pool.mlp.fc2.{p}", "MAPHead_0/MlpBlock_0/Dense_1/{kernel}"),
)
_BIG_VISION: Table = (("pos_embed", "pos_embedding"), *_block(0, 1, 0))
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
    convention = ModelFacts(eps=1e-6, gelu="tanh", mean=HALF[0], std=HALF[1])
    table = _VIT_JAX
    further = _BIG_VISION
    needs = ("pos_embed", "patch_embed.proj.bias", "blocks.0.norm1.bias", "blocks.0.attn.qkv.bias", "norm.bias")

    def to_canonical(self, state: State) -> Canonical:
        """Rename and transpose the weights, and fuse qkv."""
        inside, outside = _model_of(state)
        translated = {name: _from_flax(name, value) for name, value in inside.items()}
        canonical, unknown = _read((*self.table, *self.further), translated)
        canonical = _joined(canonical, *_POOLING)
        if not any(".stages." in name for name in canonical):  # timm has no module "stem" then
            canonical = {name.replace(_STEM, _STEM_ALONE): value for name, value in canonical.items()}
        positions = canonical.get("pos_embed")
        if positions is not None and positions.ndim == 2:
            canonical["pos_embed"] = positions[None]
        return Canonical(canonical, unknown, outside)

    def _from_canonical(self, state: State, heads: int) -> dict[str, Tensor]:
        out = _split(_split(state, *_QKV), *_POOLING)
        if "patch_embed.backbone.conv.weight" in out:
            out = {name.replace(_STEM_ALONE, _STEM): value for name, value in out.items()}
        renamed = _written(self.table, out, self.title)
        return {name: _to_flax(name, value, heads) for name, value in renamed.items()}

    def facts(self, state: State) -> tuple[ModelFacts, ModelFacts]:
        """Return heads and rows of prefix tokens, and that big_vision's files without positions use computed ones."""
        inside, _ = _model_of(state)
        kernel = next(
            (value for name, value in inside.items() if re.search(r"encoderblock_.*query/kernel", name)), None
        )
        known = ModelFacts(
            heads=int(kernel.shape[-2]) if kernel is not None and kernel.ndim == 3 else None,
            prefix_rows="none" if "pos_embedding" in inside else "own",
            pool="cls" if "cls" in inside else None,
            norm="layernorm",
        )
        learned = any(name.endswith("pos_embedding") for name in inside)
        big_vision = any("MlpBlock_0/" in name and name.startswith("Transformer/") for name in inside)
        computed = Encoding(type="sincos2d", options={"convention": "big_vision"}) if big_vision else None
        return known, ModelFacts(position=Encoding() if learned else computed).or_else(self.convention)


def _model_of(state: State) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the tensors of the model, with the blocks that big_vision stacks on axis 0 apart, and the other names."""
    root = next((root for root in _ROOTS if f"{root}embedding/kernel" in state), "")
    out: dict[str, Tensor] = {}
    for name, value in state.items():
        inside = name.removeprefix(root)
        if inside.startswith(_STACKED):
            rest = inside.removeprefix(_STACKED)
            out |= {f"Transformer/encoderblock_{i}/{rest}": layer.clone() for i, layer in enumerate(value)}
        elif name.startswith(root):
            out[inside] = value
    return out, tuple(name for name in state if not name.startswith(root))


def _from_flax(name: str, value: Tensor) -> Tensor:
    """Return a tensor of flax in torch's layout.

    Raises:
        WeightsError: if it has an unexpected shape.
    """
    layer, kind = name.split("/")[-2:] if "/" in name else ("", name)
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


def _to_flax(name: str, value: Tensor, heads: int) -> Tensor:
    """Return a tensor in flax's layout; the inverse of :func:`_from_flax`."""
    layer, kind = name.split("/")[-2:] if "/" in name else ("", name)
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


FORMATS: Mapping[str, Format] = {
    form.name: form
    for form in (
        HuggingFaceMemoryFormat(),
        HuggingFaceFormat(),
        TorchvisionFormat(),
        GoogleFormat(),
        TimmFormat(),
        DeiTFormat(),
    )
}
"""Format by name, in the order in which they are tried."""


# -- what names show --------------------------------------------------------------------------------------------------


def depth_of(state: State) -> int | None:
    """Return the number of blocks in a canonical state; None if it has none."""
    blocks = [int(match[1]) for name in state if (match := re.match(r"blocks\.(\d+)\.", name))]
    return max(blocks) + 1 if blocks else None
