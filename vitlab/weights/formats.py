"""The formats of timm, DeiT, torchvision and Hugging Face: names alone, for all four hold PyTorch's layouts.

Each table was read off models of the library itself, and is tested against them.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal

import torch
from torch import Tensor

from vitlab.errors import WeightsError
from vitlab.weights.known import HALF, IMAGENET, Encoding, ModelFacts
from vitlab.weights.names import Canonical, Entry, Format, KeyMap, State, apart, joined, pair

_BLOCK = re.compile(r"blocks\.\d+\.norm1\.weight")
_GAMMA = re.compile(r"(blocks\.\d+)\.gamma_([12])")
_SCALE = re.compile(r"(blocks\.\d+)\.ls([12])\.gamma")
_QUERY_BIAS = re.compile(r"(blocks\.\d+\.attn)\.q_bias")

_NO_OTHER = Encoding(type="none")


class Timm(Format):
    """The canonical names themselves.  ``pre_logits.fc``, which timm once had, is kept."""

    name = "timm"
    title = "timm"
    convention = ModelFacts(eps=1e-6, gelu="none", pre_logits="tanh", mean=HALF[0], std=HALF[1])
    fixed = frozenset({"pre_logits"})

    def recognise(self, names: Collection[str]) -> bool:
        return _is_timm(names) and not any(_GAMMA.fullmatch(name) for name in names)

    def to_canonical(self, state: State) -> Canonical:
        return Canonical(_with_one_bias(state))

    def _written(self, state: State, heads: int) -> dict[str, Tensor]:
        return dict(state)


class DeiT(Format):
    """The checkpoints of DeiT and DeiT III: timm's names, but that the third calls layer scales ``gamma_1``, ``_2``.

    So do EVA, DINOv3 and timm's other rotary models, which only a config beside the file tells apart.

    Reference: arXiv:2012.12877, arXiv:2204.07118.
    """

    name = "deit"
    title = "DeiT"
    convention = ModelFacts(eps=1e-6, gelu="none", pre_logits="tanh", mean=IMAGENET[0], std=IMAGENET[1])
    fixed = frozenset({"pre_logits", "prefix_rows"})

    def recognise(self, names: Collection[str]) -> bool:
        return _is_timm(names)

    def to_canonical(self, state: State) -> Canonical:
        return Canonical(_with_one_bias({_GAMMA.sub(r"\1.ls\2.gamma", name): x for name, x in state.items()}))

    def _written(self, state: State, heads: int) -> dict[str, Tensor]:
        return {_SCALE.sub(r"\1.gamma_\2", name): value for name, value in state.items()}

    def shown(self, state: State) -> ModelFacts:
        third = any(_GAMMA.fullmatch(name) for name in state)
        return ModelFacts(prefix_rows="none" if third else "own")


_TORCHVISION = [
    Entry("class_token", "cls_token"),
    Entry("encoder.pos_embedding", "pos_embed"),
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
    # Before torchvision 0.12; read, never written.
    *pair("encoder.layers.encoder_layer_{i}.mlp.linear_1.{p}", "blocks.{i}.mlp.fc1.{p}"),
    *pair("encoder.layers.encoder_layer_{i}.mlp.linear_2.{p}", "blocks.{i}.mlp.fc2.{p}"),
]


NEEDED = ("cls_token", "pos_embed", "patch_embed.proj.bias", "blocks.0.norm1.bias", "norm.bias")
"""What the models of torchvision and Hugging Face always have."""


class Torchvision(Format):
    """``torchvision.models.VisionTransformer``."""

    name = "torchvision"
    title = "torchvision"
    convention = ModelFacts(
        eps=1e-6,
        gelu="none",
        prefix_rows="own",
        pool="cls",
        norm="layernorm",
        blocks="pre_norm",
        position=_NO_OTHER,
        pre_logits="tanh",
        mean=IMAGENET[0],
        std=IMAGENET[1],
    )
    fixed = frozenset({"gelu", "prefix_rows", "pool", "norm", "blocks", "position", "pre_logits"})
    needs_rows = True
    square = True
    needs = (*NEEDED, "blocks.0.attn.qkv.bias")
    _names = KeyMap(_TORCHVISION)

    def recognise(self, names: Collection[str]) -> bool:
        return "encoder.pos_embedding" in names or any(
            name.startswith("encoder.layers.encoder_layer_") for name in names
        )

    def to_canonical(self, state: State) -> Canonical:
        return self._names.forth(state)

    def _written(self, state: State, heads: int) -> dict[str, Tensor]:
        return self._names.back(state, heads, "torchvision")


def _hugging_face(spelling: Literal["disk", "memory"]) -> list[Entry]:
    """The part of the names after ``vit.`` or ``deit.``."""
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
        Entry("embeddings.cls_token", "cls_token"),
        Entry("embeddings.distillation_token", "dist_token"),
        Entry("embeddings.position_embeddings", "pos_embed"),
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


class HuggingFace(Format):
    """Transformers' ViT and DeiT, as ``save_pretrained`` writes them; both spellings are read.

    Since version 5 its modules are named differently in memory than on disk; ``hf-memory`` is the other spelling.
    """

    name = "hf"
    title = "Hugging Face"
    convention = ModelFacts(
        eps=1e-12,
        gelu="none",
        prefix_rows="own",
        pool="cls",
        norm="layernorm",
        blocks="pre_norm",
        position=_NO_OTHER,
        pre_logits="tanh",
        mean=HALF[0],
        std=HALF[1],
    )
    fixed = frozenset({"prefix_rows", "pool", "norm", "blocks", "position"})
    needs_rows = True
    needs = NEEDED
    spelling: Literal["disk", "memory"] = "disk"
    _reads = KeyMap([*_hugging_face("disk"), *_hugging_face("memory")[5:]])

    def __init__(self) -> None:
        self._writes = KeyMap(_hugging_face(self.spelling))

    def recognise(self, names: Collection[str]) -> bool:
        return any(name.endswith("embeddings.patch_embeddings.projection.weight") for name in names)

    def to_canonical(self, state: State) -> Canonical:
        body, dropped = {}, []
        heads: dict[str, Tensor] = {}
        classified = any(name.rpartition(".")[0].endswith("classifier") for name in state)
        for name, value in state.items():
            layer, _, kind = name.rpartition(".")
            ours = next((ours for ours, theirs in _CLASSIFIERS.items() if layer in theirs), None)
            bare = name.removeprefix("vit.").removeprefix("deit.")
            if ours:
                heads[f"{ours}.{kind}"] = value
            elif bare == "embeddings.mask_token" or (classified and bare.startswith("pooler.")):
                dropped.append(name)  # its classifiers read neither
            else:
                body[bare] = value
        found = self._reads.forth(body)
        return Canonical({**joined(found.state), **heads}, found.unknown, tuple(dropped))

    def _written(self, state: State, heads: int) -> dict[str, Tensor]:
        classified = "head.weight" in state
        if classified and "pre_logits.fc.weight" in state:
            raise WeightsError(
                f"{self.title}'s classifiers have no pre-logits; drop them, and the head that reads them"
            )
        prefix = ("deit." if "dist_token" in state else "vit.") if classified else ""
        body, out = {}, {}
        for name, value in apart(state).items():
            layer, _, kind = name.rpartition(".")
            if layer == "head":
                out[f"{'cls_classifier' if 'head_dist.weight' in state else 'classifier'}.{kind}"] = value
            elif layer == "head_dist":
                out[f"distillation_classifier.{kind}"] = value
            else:
                body[name] = value
        written = self._writes.back(body, heads, self.title)
        return {**{prefix + name: value for name, value in written.items()}, **out}

    def shown(self, state: State) -> ModelFacts:
        # Facebook's DeiT is normalised as it was trained; what transformers' own class would do is in no file.
        distilled = any(name.endswith("distillation_token") for name in state)
        return ModelFacts(mean=IMAGENET[0], std=IMAGENET[1]) if distilled else ModelFacts()


class HuggingFaceMemory(HuggingFace):
    """Transformers' ViT and DeiT by the names of their modules since version 5, as ``state_dict()`` gives them."""

    name = "hf-memory"
    title = "Hugging Face, in memory"
    spelling = "memory"

    def recognise(self, names: Collection[str]) -> bool:
        return super().recognise(names) and any(name.endswith("layers.0.attention.q_proj.weight") for name in names)


def _is_timm(names: Collection[str]) -> bool:
    return "patch_embed.proj.weight" in names or any(_BLOCK.fullmatch(name) for name in names)


def _with_one_bias(state: State) -> dict[str, Tensor]:
    """Join the biases of queries and values, which EVA keeps apart; its keys have none, that is, one of zero."""
    out = dict(state)
    for name in state:
        if (found := _QUERY_BIAS.fullmatch(name)) and f"{found[1]}.v_bias" in state:
            query, value = out.pop(name), out.pop(f"{found[1]}.v_bias")
            out[f"{found[1]}.qkv.bias"] = torch.cat([query, torch.zeros_like(query), value])
    return out
