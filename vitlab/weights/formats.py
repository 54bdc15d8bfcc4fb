"""The formats of timm, DeiT, torchvision and Hugging Face, which differ in names only, not in layouts.

Each table is tested against models of the library itself.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal

import torch
from torch import Tensor

from vitlab.errors import WeightsError
from vitlab.weights.known import HALF, IMAGENET, ORIGINAL_VIT, Encoding, ModelFacts, some
from vitlab.weights.names import PARALLEL, Canonical, Format, KeyEntry, KeyMap, State, fuse_qkv, pair, split_qkv

_BLOCK = re.compile(r"blocks\.\d+\.norm1\.weight")
_GAMMA = re.compile(r"(blocks\.\d+)\.gamma_([12])")
_SCALE = re.compile(r"(blocks\.\d+)\.ls([12])\.gamma")
_QUERY_BIAS = re.compile(r"(blocks\.\d+\.attn)\.q_bias")

_NO_OTHER = Encoding(type="none")


class TimmFormat(Format):
    """timm's format: the canonical names.  ``pre_logits.fc``, which older versions of timm had, is accepted."""

    name = "timm"
    title = "timm"
    convention = ModelFacts(eps=1e-6, gelu="none", pre_logits="tanh", mean=HALF[0], std=HALF[1])
    fixed = frozenset({"pre_logits"})

    def recognise(self, names: Collection[str]) -> bool:
        """Return True for timm's names without DeiT III's gammas."""
        return _is_timm(names) and not any(_GAMMA.fullmatch(name) for name in names)

    def to_canonical(self, state: State) -> Canonical:
        """Fuse the biases of q and v where the file has them apart."""
        return Canonical(_fuse_qv_bias(state))

    def _from_canonical(self, state: State, heads: int) -> dict[str, Tensor]:
        return dict(state)


class DeiTFormat(Format):
    """The checkpoints of DeiT and DeiT III: timm's names; layer scales of DeiT III are ``gamma_1``, ``gamma_2``.

    EVA, DINOv3 and timm's other rotary models use these names too; only a config beside the file distinguishes them.

    Reference: arXiv:2012.12877, arXiv:2204.07118.
    """

    name = "deit"
    title = "DeiT"
    convention = ModelFacts(eps=1e-6, gelu="none", pre_logits="tanh", mean=IMAGENET[0], std=IMAGENET[1])
    fixed = frozenset({"pre_logits", "prefix_rows"})

    def recognise(self, names: Collection[str]) -> bool:
        """Return True for timm's names, with or without DeiT III's gammas."""
        return _is_timm(names)

    def to_canonical(self, state: State) -> Canonical:
        """Rename DeiT III's gammas and fuse the biases of q and v."""
        return Canonical(_fuse_qv_bias({_GAMMA.sub(r"\1.ls\2.gamma", name): x for name, x in state.items()}))

    def _from_canonical(self, state: State, heads: int) -> dict[str, Tensor]:
        if parallel := [name for name in state if PARALLEL.match(name)]:
            raise WeightsError(f"{self.title} has no tensor for {some(parallel)}; use another format")
        return {_SCALE.sub(r"\1.gamma_\2", name): value for name, value in state.items()}

    def infer_facts(self, state: State) -> ModelFacts:
        """Return the fact ``prefix_rows``: ``none`` for DeiT III, which has layer scales ``gamma_1``; else ``own``."""
        third = any(_GAMMA.fullmatch(name) for name in state)
        return ModelFacts(prefix_rows="none" if third else "own")


_TORCHVISION = [
    KeyEntry("class_token", "cls_token"),
    KeyEntry("encoder.pos_embedding", "pos_embed"),
    *pair("conv_proj.{p}", "patch_embed.proj.{p}"),
    *pair("encoder.layers.encoder_layer_{i}.ln_1.{p}", "blocks.{i}.norm1.{p}"),
    *pair("encoder.layers.encoder_layer_{i}.self_attention.in_proj_{p}", "blocks.{i}.attn.qkv.{p}"),
    *pair("encoder.layers.encoder_layer_{i}.self_attention.out_proj.{p}", "blocks.{i}.attn.proj.{p}"),
    *pair("encoder.layers.encoder_layer_{i}.ln_2.{p}", "blocks.{i}.norm2.{p}"),
    *pair("encoder.layers.encoder_layer_{i}.mlp.0.{p}", "blocks.{i}.mlp.fc1.{p}"),
    *pair("encoder.layers.encoder_layer_{i}.mlp.3.{p}", "blocks.{i}.mlp.fc2.{p}"),
    *pair("encoder.ln.{p}", "norm.{p}"),
    *pair("heads.pre_logits.{p}", "pre_logits.fc.{p}"),
    *pair("heads.head.{p}", "head.{p}"),
    # Names before torchvision 0.12: read, never written.
    *pair("encoder.layers.encoder_layer_{i}.mlp.linear_1.{p}", "blocks.{i}.mlp.fc1.{p}"),
    *pair("encoder.layers.encoder_layer_{i}.mlp.linear_2.{p}", "blocks.{i}.mlp.fc2.{p}"),
]


REQUIRED = ("cls_token", "pos_embed", "patch_embed.proj.bias", "blocks.0.norm1.bias", "norm.bias")
"""Canonical names that every model of torchvision and Hugging Face has."""


class TorchvisionFormat(Format):
    """``torchvision.models.VisionTransformer``."""

    name = "torchvision"
    title = "torchvision"
    convention = ModelFacts(
        eps=1e-6, gelu="none", prefix_rows="own", position=_NO_OTHER, mean=IMAGENET[0], std=IMAGENET[1]
    ).or_else(ORIGINAL_VIT)
    fixed = frozenset({"gelu", "prefix_rows", "pool", "norm", "blocks", "position", "pre_logits"})
    needs_rows = True
    square = True
    needs = (*REQUIRED, "blocks.0.attn.qkv.bias")
    _names = KeyMap(_TORCHVISION)

    def recognise(self, names: Collection[str]) -> bool:
        """Return True for the names of torchvision's encoder."""
        return "encoder.pos_embedding" in names or any(
            name.startswith("encoder.layers.encoder_layer_") for name in names
        )

    def to_canonical(self, state: State) -> Canonical:
        """Rename torchvision's tensors to canonical names."""
        return self._names.to_canonical(state)

    def _from_canonical(self, state: State, heads: int) -> dict[str, Tensor]:
        return self._names.from_canonical(state, heads, "torchvision")


def _hugging_face(spelling: Literal["disk", "memory"]) -> list[KeyEntry]:
    """Return the table of transformers' names in one spelling, without the prefix ``vit.`` or ``deit.``."""
    if spelling == "disk":
        block, query, out, mlp = (
            "encoder.layer.{i}",
            "attention.attention.{part}",
            "attention.output.dense",
            (
                "intermediate.dense",
                "output.dense",
            ),
        )
        parts = {"q": "query", "k": "key", "v": "value"}
    else:
        block, query, out, mlp = "layers.{i}", "attention.{part}_proj", "attention.o_proj", ("mlp.fc1", "mlp.fc2")
        parts = {"q": "q", "k": "k", "v": "v"}
    return [
        KeyEntry("embeddings.cls_token", "cls_token"),
        KeyEntry("embeddings.distillation_token", "dist_token"),
        KeyEntry("embeddings.position_embeddings", "pos_embed"),
        *pair("embeddings.patch_embeddings.projection.{p}", "patch_embed.proj.{p}"),
        *pair(f"{block}.layernorm_before.{{p}}", "blocks.{i}.norm1.{p}"),
        *(
            entry
            for ours, theirs in parts.items()
            for entry in pair(f"{block}.{query.replace('{part}', theirs)}.{{p}}", f"blocks.{{i}}.attn.{ours}.{{p}}")
        ),
        *pair(f"{block}.{out}.{{p}}", "blocks.{i}.attn.proj.{p}"),
        *pair(f"{block}.layernorm_after.{{p}}", "blocks.{i}.norm2.{p}"),
        *pair(f"{block}.{mlp[0]}.{{p}}", "blocks.{i}.mlp.fc1.{p}"),
        *pair(f"{block}.{mlp[1]}.{{p}}", "blocks.{i}.mlp.fc2.{p}"),
        *pair("layernorm.{p}", "norm.{p}"),
        *pair("pooler.dense.{p}", "pre_logits.fc.{p}"),
    ]


_CLASSIFIERS = {
    "head": ("cls_classifier", "classifier"),
    "head_dist": ("distillation_classifier",),
}


class HuggingFaceFormat(Format):
    """Transformers' ViT and DeiT, as ``save_pretrained`` writes them; both spellings are read.

    Since version 5 its modules are named differently in memory than on disk; ``hf-memory`` is the other spelling.
    """

    name = "hf"
    title = "Hugging Face"
    convention = ModelFacts(
        eps=1e-12, gelu="none", prefix_rows="own", position=_NO_OTHER, mean=HALF[0], std=HALF[1]
    ).or_else(ORIGINAL_VIT)
    fixed = frozenset({"prefix_rows", "pool", "norm", "blocks", "position"})
    needs_rows = True
    needs = REQUIRED
    spelling: Literal["disk", "memory"] = "disk"
    _reads = KeyMap([*_hugging_face("disk"), *_hugging_face("memory")[5:]])

    def __init__(self) -> None:
        self._writes = KeyMap(_hugging_face(self.spelling))

    def recognise(self, names: Collection[str]) -> bool:
        """Return True for the patch projection's name in transformers."""
        return any(name.endswith("embeddings.patch_embeddings.projection.weight") for name in names)

    def to_canonical(self, state: State) -> Canonical:
        """Rename the tensors, fuse qkv, and drop those that a classifier does not use."""
        body, dropped = {}, []
        heads: dict[str, Tensor] = {}
        has_classifier = any(name.rpartition(".")[0].endswith("classifier") for name in state)
        for name, value in state.items():
            layer, _, kind = name.rpartition(".")
            ours = next((ours for ours, theirs in _CLASSIFIERS.items() if layer in theirs), None)
            bare = name.removeprefix("vit.").removeprefix("deit.")
            if ours:
                heads[f"{ours}.{kind}"] = value
            elif bare == "embeddings.mask_token" or (has_classifier and bare.startswith("pooler.")):
                dropped.append(name)  # its classifiers read neither
            else:
                body[bare] = value
        canonical = self._reads.to_canonical(body)
        return Canonical({**fuse_qkv(canonical.state), **heads}, canonical.unknown, tuple(dropped))

    def _from_canonical(self, state: State, heads: int) -> dict[str, Tensor]:
        has_classifier = "head.weight" in state
        if has_classifier and "pre_logits.fc.weight" in state:
            raise WeightsError(
                f"{self.title}'s classifiers have no pre-logits; drop them and the head that reads them (--head drop "
                "--pre-logits drop)"
            )
        prefix = ("deit." if "dist_token" in state else "vit.") if has_classifier else ""
        body, out = {}, {}
        for name, value in split_qkv(state).items():
            layer, _, kind = name.rpartition(".")
            if layer == "head":
                out[f"{'cls_classifier' if 'head_dist.weight' in state else 'classifier'}.{kind}"] = value
            elif layer == "head_dist":
                out[f"distillation_classifier.{kind}"] = value
            else:
                body[name] = value
        renamed = self._writes.from_canonical(body, heads, self.title)
        return {**{prefix + name: value for name, value in renamed.items()}, **out}

    def infer_facts(self, state: State) -> ModelFacts:
        """Return ImageNet's mean and standard deviation for distilled models, and no facts for others."""
        # DeiT was trained with ImageNet's normalisation; no file states that of transformers' own class.
        distilled = any(name.endswith("distillation_token") for name in state)
        return ModelFacts(mean=IMAGENET[0], std=IMAGENET[1]) if distilled else ModelFacts()


class HuggingFaceMemoryFormat(HuggingFaceFormat):
    """Transformers' ViT and DeiT under their module names since version 5, as ``state_dict()`` returns them."""

    name = "hf-memory"
    title = "Hugging Face, in memory"
    spelling = "memory"

    def recognise(self, names: Collection[str]) -> bool:
        """Return True for the names that transformers has in memory since version 5."""
        return super().recognise(names) and any(name.endswith("layers.0.attention.q_proj.weight") for name in names)


def _is_timm(names: Collection[str]) -> bool:
    return "patch_embed.proj.weight" in names or any(_BLOCK.fullmatch(name) for name in names)


def _fuse_qv_bias(state: State) -> dict[str, Tensor]:
    """Fuse EVA's separate biases of queries and values into one of ``qkv``; the keys' bias is zero."""
    out = dict(state)
    for name in state:
        if (match := _QUERY_BIAS.fullmatch(name)) and f"{match[1]}.v_bias" in state:
            query, value = out.pop(name), out.pop(f"{match[1]}.v_bias")
            out[f"{match[1]}.qkv.bias"] = torch.cat([query, torch.zeros_like(query), value])
    return out
