"""The Vision Transformers of transformers: names of their tensors, and what their ``config.json`` says.

A family is a table of names and what its configs leave to a default.  The tables are tested against transformers'
models.  A file whose config is not beside it is opened if it is a ViT or a DeiT; the tensors of the other families do
not show what they compute.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch

from vitlab.components.base import Gelu
from vitlab.errors import WeightsError, list_some
from vitlab.geometry import Pair
from vitlab.models.contract import NewState, State
from vitlab.weights.architecture import CLIP, HALF, IMAGENET, Architecture, Encoding, ModelFacts, count_blocks
from vitlab.weights.files import Json
from vitlab.weights.formats import (
    NEEDS,
    POOLING,
    QKV,
    Canonical,
    Format,
    Table,
    TimmFormat,
    dinov3_rotation,
    fold_class_position_into_token,
    join_qkv,
    parse_table,
    rename_from_canonical,
    rename_to_canonical,
    split_qkv,
    stack_relative_tables,
)
from vitlab.weights.transfer import to_native_rotation

_EMBEDDINGS = parse_table("""
cls_token            embeddings.cls_token
dist_token           embeddings.distillation_token
pos_embed            embeddings.position_embeddings
patch_embed.proj.{p} embeddings.patch_embeddings.projection.{p}
norm.{p}             layernorm.{p}
pre_logits.fc.{p}    pooler.dense.{p}
""")
_VIT = (
    *_EMBEDDINGS,
    *parse_table("""
blocks.{i}.norm1.{p}     encoder.layer.{i}.layernorm_before.{p}
blocks.{i}.norm2.{p}     encoder.layer.{i}.layernorm_after.{p}
blocks.{i}.attn.q.{p}    encoder.layer.{i}.attention.attention.query.{p}
blocks.{i}.attn.k.{p}    encoder.layer.{i}.attention.attention.key.{p}
blocks.{i}.attn.v.{p}    encoder.layer.{i}.attention.attention.value.{p}
blocks.{i}.attn.proj.{p} encoder.layer.{i}.attention.output.dense.{p}
blocks.{i}.mlp.fc1.{p}   encoder.layer.{i}.intermediate.dense.{p}
blocks.{i}.mlp.fc2.{p}   encoder.layer.{i}.output.dense.{p}
"""),
)
_IN_MEMORY = parse_table("""
blocks.{i}.norm1.{p}     layers.{i}.layernorm_before.{p}
blocks.{i}.norm2.{p}     layers.{i}.layernorm_after.{p}
blocks.{i}.attn.q.{p}    layers.{i}.attention.q_proj.{p}
blocks.{i}.attn.k.{p}    layers.{i}.attention.k_proj.{p}
blocks.{i}.attn.v.{p}    layers.{i}.attention.v_proj.{p}
blocks.{i}.attn.proj.{p} layers.{i}.attention.o_proj.{p}
blocks.{i}.mlp.fc1.{p}   layers.{i}.mlp.fc1.{p}
blocks.{i}.mlp.fc2.{p}   layers.{i}.mlp.fc2.{p}
""")
_CLASSIFIERS = parse_table("""
head.{p}      classifier.{p}
head.{p}      cls_classifier.{p}
head_dist.{p} distillation_classifier.{p}
head.{p}      visual_projection.{p}
""")
_RELATIVE = "relative_position_bias.relative_position_bias_table"
_BEIT = (
    *_VIT,
    *parse_table("""
blocks.{i}.ls1.gamma encoder.layer.{i}.lambda_1
blocks.{i}.ls2.gamma encoder.layer.{i}.lambda_2
fc_norm.{p}          pooler.layernorm.{p}
"""),
    ("blocks.{i}.attn.relative_position_bias_table", f"encoder.layer.{{i}}.attention.attention.{_RELATIVE}"),
    ("rel_pos_bias.relative_position_bias_table", f"encoder.{_RELATIVE}"),
)
_DINOV2 = (
    *_EMBEDDINGS,
    *parse_table("""
reg_token                embeddings.register_tokens
blocks.{i}.norm1.{p}     encoder.layer.{i}.norm1.{p}
blocks.{i}.norm2.{p}     encoder.layer.{i}.norm2.{p}
blocks.{i}.attn.q.{p}    encoder.layer.{i}.attention.attention.query.{p}
blocks.{i}.attn.k.{p}    encoder.layer.{i}.attention.attention.key.{p}
blocks.{i}.attn.v.{p}    encoder.layer.{i}.attention.attention.value.{p}
blocks.{i}.attn.proj.{p} encoder.layer.{i}.attention.output.dense.{p}
blocks.{i}.mlp.fc1.{p}   encoder.layer.{i}.mlp.fc1.{p}
blocks.{i}.mlp.fc2.{p}   encoder.layer.{i}.mlp.fc2.{p}
blocks.{i}.ls1.gamma     encoder.layer.{i}.layer_scale1.lambda1
blocks.{i}.ls2.gamma     encoder.layer.{i}.layer_scale2.lambda1
blocks.{i}.mlp.fc1.{p}   encoder.layer.{i}.mlp.weights_in.{p}
blocks.{i}.mlp.fc2.{p}   encoder.layer.{i}.mlp.weights_out.{p}
"""),
)
_DINOV3 = parse_table("""
cls_token                embeddings.cls_token
reg_token                embeddings.register_tokens
patch_embed.proj.{p}     embeddings.patch_embeddings.{p}
blocks.{i}.norm1.{p}     layer.{i}.norm1.{p}
blocks.{i}.norm2.{p}     layer.{i}.norm2.{p}
blocks.{i}.attn.q.{p}    layer.{i}.attention.q_proj.{p}
blocks.{i}.attn.k.{p}    layer.{i}.attention.k_proj.{p}
blocks.{i}.attn.v.{p}    layer.{i}.attention.v_proj.{p}
blocks.{i}.attn.proj.{p} layer.{i}.attention.o_proj.{p}
blocks.{i}.mlp.fc1.{p}   layer.{i}.mlp.up_proj.{p}
blocks.{i}.mlp.fc2.{p}   layer.{i}.mlp.down_proj.{p}
blocks.{i}.ls1.gamma     layer.{i}.layer_scale1.lambda1
blocks.{i}.ls2.gamma     layer.{i}.layer_scale2.lambda1
norm.{p}                 norm.{p}
""")
_DINOV3_GATED = (
    *(pair for pair in _DINOV3 if ".mlp." not in pair[0]),
    *parse_table("""
blocks.{i}.mlp.fc1_g.{p} layer.{i}.mlp.gate_proj.{p}
blocks.{i}.mlp.fc1_x.{p} layer.{i}.mlp.up_proj.{p}
blocks.{i}.mlp.fc2.{p}   layer.{i}.mlp.down_proj.{p}
"""),
)
_CLIP = parse_table("""
cls_token                embeddings.class_embedding
pos_embed                embeddings.position_embedding.weight
patch_embed.proj.{p}     embeddings.patch_embedding.{p}
norm_pre.{p}             pre_layrnorm.{p}
blocks.{i}.norm1.{p}     encoder.layers.{i}.layer_norm1.{p}
blocks.{i}.norm2.{p}     encoder.layers.{i}.layer_norm2.{p}
blocks.{i}.attn.q.{p}    encoder.layers.{i}.self_attn.q_proj.{p}
blocks.{i}.attn.k.{p}    encoder.layers.{i}.self_attn.k_proj.{p}
blocks.{i}.attn.v.{p}    encoder.layers.{i}.self_attn.v_proj.{p}
blocks.{i}.attn.proj.{p} encoder.layers.{i}.self_attn.out_proj.{p}
blocks.{i}.mlp.fc1.{p}   encoder.layers.{i}.mlp.fc1.{p}
blocks.{i}.mlp.fc2.{p}   encoder.layers.{i}.mlp.fc2.{p}
norm.{p}                 post_layernorm.{p}
""")
_SIGLIP = (
    *_CLIP,
    *parse_table("""
attn_pool.latent      head.probe
attn_pool.qkv.{p}     head.attention.in_proj_{p}
attn_pool.proj.{p}    head.attention.out_proj.{p}
attn_pool.norm.{p}    head.layernorm.{p}
attn_pool.mlp.fc1.{p} head.mlp.fc1.{p}
attn_pool.mlp.fc2.{p} head.mlp.fc2.{p}
"""),
)
_AIMV2 = parse_table("""
pos_embed                embeddings.position_embedding.weight
patch_embed.proj.{p}     embeddings.patch_embed.{p}
patch_embed.norm.{p}     embeddings.rms_norm.{p}
blocks.{i}.norm1.{p}     encoder.layers.{i}.rms_norm1.{p}
blocks.{i}.norm2.{p}     encoder.layers.{i}.rms_norm2.{p}
blocks.{i}.attn.q.{p}    encoder.layers.{i}.attention.q_proj.{p}
blocks.{i}.attn.k.{p}    encoder.layers.{i}.attention.k_proj.{p}
blocks.{i}.attn.v.{p}    encoder.layers.{i}.attention.v_proj.{p}
blocks.{i}.attn.proj.{p} encoder.layers.{i}.attention.out_proj.{p}
blocks.{i}.mlp.fc1_g.{p} encoder.layers.{i}.ffn.gate_proj.{p}
blocks.{i}.mlp.fc1_x.{p} encoder.layers.{i}.ffn.up_proj.{p}
blocks.{i}.mlp.fc2.{p}   encoder.layers.{i}.ffn.down_proj.{p}
norm.{p}                 rms_norm.{p}
""")


class Family(NamedTuple):
    """A family of transformers' models, and the defaults of its configs."""

    table: Table  #: names without the prefix of the body
    eps: float = 1e-12
    act: str = "gelu"
    heads: int = 12
    pixels: ModelFacts = HALF  #: their normalisation
    classifier: str | None = "cls"  #: the pooling that a classifier reads; None if it reads what no head of vitlab does
    unread: tuple[str, ...] = ()  #: prefixes of tensors that a classifier does not read
    foreign: tuple[str, ...] = ()  #: prefixes of tensors that no model of vitlab reads
    pool: str | None = "cls"  #: the pooling without a classifier


FAMILIES: Mapping[str, Family] = {
    "vit": Family(_VIT, unread=("pooler.",)),
    "deit": Family(_VIT, unread=("pooler.",)),
    "vit_msn": Family(_VIT, eps=1e-6),
    "vit_mae": Family(_VIT, pixels=IMAGENET),
    "ijepa": Family(_VIT, pixels=IMAGENET, classifier="gap", unread=("pooler.",), pool=None),
    "beit": Family(_BEIT),
    "data2vec-vision": Family(_BEIT),
    **dict.fromkeys(
        ("dinov2", "dinov2_with_registers"),
        Family(_DINOV2, 1e-6, pixels=IMAGENET, classifier=None, foreign=("classifier.",)),
    ),
    "dinov3_vit": Family(_DINOV3, 1e-5, heads=6, pixels=IMAGENET),
    "clip": Family(_CLIP, 1e-5, "quick_gelu", pixels=CLIP, classifier="gap", unread=("post_layernorm.",)),
    "siglip": Family(_SIGLIP, 1e-6, "gelu_pytorch_tanh", classifier="gap", unread=("head.",), pool=None),
    # Its attention pooling has no MLP; the projection reads it.
    "aimv2": Family(_AIMV2, 1e-5, "silu", heads=8, pixels=CLIP, foreign=("head.", "visual_projection."), pool=None),
}
"""Family by ``model_type``; a vision tower alone is a ``NAME_vision_model``."""

_ROOT = re.compile(r"^(vit|deit|beit|data2vec_vision|dinov2|dinov2_with_registers|ijepa|vision_model|model)\.")
_OTHER_PARTS = re.compile(
    r"(text_model|text_projection|logit_|decoder\.|lm_head|embeddings\.mask_token)|.*(position_ids|relative_position_index)$"
)
"""Tensors that are no part of a vision model, or that only its pretraining reads."""


class HuggingFaceFormat(Format):
    """A family of transformers, as ``save_pretrained`` writes it.

    Since version 5 the modules of ViT and DeiT are named differently in memory than on disk; both spellings are read.
    """

    name = "hf"
    title = "Hugging Face"
    mark = r"(embeddings\.patch_embeddings\.projection|layers\.0\.attention\.q_proj)\.weight$"

    def __init__(self, kind: str = "vit") -> None:
        self.kind, self.family = kind, FAMILIES[kind]
        self.convention = ModelFacts(eps=self.family.eps, gelu="none").with_defaults(self.family.pixels)
        self.needs = ("blocks.0.ls1.gamma", "norm.bias") if kind == "dinov3_vit" else NEEDS

    def _name_table(self, gated: bool) -> Table:
        if self.kind == "dinov3_vit" and gated:
            return _DINOV3_GATED
        return self.family.table

    def to_canonical(self, state: State) -> Canonical:
        """Rename the tensors, fuse qkv, and drop those that a classifier does not use."""
        bare = {_ROOT.sub("", name): value for name, value in state.items() if value.numel()}  # 0 registers are none
        family, has_classifier = self.family, any("classifier." in name for name in bare)
        unread = (*family.foreign, *(family.unread if has_classifier else ()))
        body = {n: v for n, v in bare.items() if not n.startswith(unread) and not _OTHER_PARTS.match(n)}
        table = self._name_table(any(".gate_proj." in name for name in body))
        canonical, unknown = rename_to_canonical((*table, *_IN_MEMORY, *_CLASSIFIERS), body)
        if "head.weight" in canonical:  # CLIP's projection has no bias
            canonical.setdefault("head.bias", canonical["head.weight"].new_zeros(len(canonical["head.weight"])))
        for name in ("cls_token", "pos_embed"):
            if name in canonical and canonical[name].ndim < 3:
                canonical[name] = canonical[name].reshape(1, -1, canonical[name].shape[-1])
        canonical = join_qkv(split_qkv(canonical, "attn_pool", "qkv"), *POOLING)
        if "reg_token" in canonical and "pos_embed" in canonical:
            canonical |= fold_class_position_into_token(canonical)
        halves = TimmFormat().to_canonical(stack_relative_tables(canonical)).state
        return Canonical(halves, unknown, tuple(name for name in bare if name not in body))

    def _from_canonical(self, state: State, heads: int) -> NewState:
        prefix = ""  # a body without a head has none
        if "head.weight" in state:
            if self.kind == "dinov3_vit":
                raise WeightsError(f"{self.title}'s DINOv3 has no classifier; drop it (--head drop)")
            prefix = "deit." if "dist_token" in state else "vit."
            if "pre_logits.fc.weight" in state:
                raise WeightsError(
                    f"{self.title}'s classifiers have no pre-logits; drop them with the head that reads them (--head "
                    "drop)"
                )
        table = self._name_table("blocks.0.mlp.fc1_g.weight" in state)
        if self.kind == "dinov3_vit":
            state = to_native_rotation(state, dinov3_rotation(100.0), heads, back=True)
        classifier = "cls_classifier" if "head_dist.weight" in state else "classifier"
        classifiers = (("head.{p}", classifier + ".{p}"), ("head_dist.{p}", "distillation_classifier.{p}"))
        body = tuple((ours, prefix + theirs) for ours, theirs in table)
        out = rename_from_canonical((*body, *classifiers), split_qkv(state, *QKV), f"{self.title}'s {self.kind}")
        if self.kind == "dinov3_vit":
            out["embeddings.mask_token"] = torch.zeros_like(state["cls_token"])
        return out

    def infer_facts_and_defaults(self, state: State) -> tuple[ModelFacts, ModelFacts]:
        """Return pooling, norms and rows of prefix tokens, and ImageNet's mean and deviation for distilled models."""
        # DeiT was trained with ImageNet's normalisation; no file states the one of transformers' own class.
        distilled = any(name.endswith("distillation_token") for name in state)
        usual = IMAGENET.with_defaults(self.convention) if distilled else self.convention
        pool: Any = self.family.classifier if any("classifier." in name for name in state) else self.family.pool
        if any("pooler.layernorm." in name for name in state):
            pool = "gap"
        rows: Any = "none" if any(name.endswith("register_tokens") for name in state) else "own"
        norm = "rmsnorm" if self.kind == "aimv2" else "layernorm"
        return ModelFacts(pool=pool, prefix_rows=rows, norm=norm, position=Encoding()), usual


# -- config.json ------------------------------------------------------------------------------------------------------

_ACTIVATIONS: Mapping[str, Gelu] = {
    "gelu": "none",
    "gelu_python": "none",
    "gelu_pytorch_tanh": "tanh",
    "gelu_new": "tanh",
    "gelu_tanh": "tanh",
    "quick_gelu": "sigmoid",
}


def split_keys(text: str) -> frozenset[str]:
    """Return the keys in a text that separates them by white space."""
    return frozenset(text.split())


KEYS = split_keys(
    """
    model_type hidden_size num_hidden_layers num_attention_heads intermediate_size hidden_act layer_norm_eps image_size
    patch_size num_channels qkv_bias pooler_act pooler_output_size id2label label2id num_labels hidden_dropout_prob
    attention_probs_dropout_prob initializer_range encoder_stride pruned_heads

    attention_dropout add_fpn apply_layernorm auxiliary_channels auxiliary_concat_input auxiliary_loss_weight
    auxiliary_num_convs drop_path_rate decoder_hidden_size decoder_intermediate_size decoder_num_attention_heads
    decoder_num_hidden_layers initializer_factor is_native key_bias layer_scale_init_value layerscale_value
    logit_scale_init_value mask_ratio max_logit_scale mlp_bias mlp_ratio norm_pix_loss num_register_tokens out_features
    out_indices out_indices _out_features _out_indices pool_scales pos_embed_jitter pos_embed_rescale pos_embed_shift
    proj_bias projection_dim query_bias reshape_hidden_states rms_norm_eps rope_theta semantic_loss_ignore_index
    stage_names text_config use_absolute_position_embeddings use_auxiliary_head use_gated_mlp use_head use_mask_token
    use_mean_pooling use_relative_position_bias use_shared_relative_position_bias use_swiglu_ffn value_bias
    vision_config vision_use_head vision_config_dict text_config_dict vocab_size

    _name_or_path architectures dtype torch_dtype transformers_version problem_type return_dict output_attentions
    output_hidden_states is_encoder_decoder is_decoder cross_attention_hidden_size add_cross_attention
    tie_encoder_decoder chunk_size_feed_forward torchscript use_bfloat16 use_cache tf_legacy_loss tie_word_embeddings
    tokenizer_class prefix bos_token_id pad_token_id eos_token_id sep_token_id decoder_start_token_id max_length
    min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p
    repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids
    num_return_sequences output_scores return_dict_in_generate forced_bos_token_id forced_eos_token_id
    remove_invalid_values exponential_decay_length_penalty suppress_tokens begin_suppress_tokens task_specific_params
    finetuning_task gradient_checkpointing attn_implementation _attn_implementation _attn_implementation_autoset
    """
)
"""Keys of these models, then keys of every model of transformers, which do not affect what these compute."""


def detect_family(config: Json, where: str) -> str:
    """Return the key of :data:`FAMILIES` that a ``config.json`` names; empty if it names no model of transformers."""
    kind = str(config.get("model_type", "")).removesuffix("_vision_model")
    if kind and kind not in FAMILIES:
        raise WeightsError(
            f"{where} says model_type {config['model_type']}; supported models of transformers: {', '.join(FAMILIES)}. "
            "Use other weights."
        )
    return kind


def read_config_facts(config: Json, state: State, where: str) -> tuple[ModelFacts, list[str]]:
    """Return the facts in a ``config.json`` of transformers, and a sentence for keys that were not read.

    The canonical tensors show a file that belongs to other weights, which is refused, as is an unsupported model.
    """
    kind = detect_family(config, where)
    family, own = FAMILIES[kind], {**config, **(config.get("vision_config") or {})}
    act, pooler = own.get("hidden_act", family.act), own.get("pooler_act", "tanh")
    if own.get("is_native"):
        raise WeightsError(f"{where}: is_native computes positions for any image size; use weights of one image size")
    if "pre_logits.fc.weight" in state and pooler != "tanh":
        raise WeightsError(f"{where}: pooler_act is {pooler}, and vitlab supports tanh alone; use other weights")
    gated = "blocks.0.mlp.fc1_g.weight" in state
    # The gate of DINOv2 is a SiLU whatever its config says.
    allowed = ("silu", act if kind.startswith("dinov2") else "silu") if gated else tuple(_ACTIVATIONS)
    if act not in allowed:
        raise WeightsError(
            f"{where}: hidden_act is {act}; supported: {', '.join(dict.fromkeys(allowed))}. Use other weights."
        )
    # A config of other weights states heads and norms that no tensor contradicts.
    norm = state.get("blocks.0.norm1.weight")
    for key, size in (("hidden_size", None if norm is None else len(norm)), ("num_hidden_layers", count_blocks(state))):
        if None not in (own.get(key), size) and own[key] != size:
            raise WeightsError(
                f"{where} says {key} {own[key]}, and the tensors beside it have {size}; use the config.json of these "
                "weights"
            )
    labels = [str(label) for _, label in sorted(config.get("id2label", {}).items(), key=lambda item: int(item[0]))]
    has_names = any(label != f"LABEL_{index}" for index, label in enumerate(labels))
    facts = ModelFacts(
        heads=own.get("num_attention_heads", family.heads),
        image=as_pair(own.get("image_size", 224)),
        eps=own.get("rms_norm_eps" if kind == "aimv2" else "layer_norm_eps", family.eps),
        gelu="none" if gated else _ACTIVATIONS[act],
        position=dinov3_rotation(float(own.get("rope_theta", 100.0))) if kind == "dinov3_vit" else Encoding(),
        labels=tuple(labels) if has_names else None,
    )
    return facts, note_on_unread(own.keys() - KEYS, where)


def make_transformers_configs(model: Architecture, kind: str) -> tuple[Json, Json]:
    """Return the ``config.json`` and ``preprocessor_config.json`` from which transformers builds a model."""
    g, block, info, facts = model.geometry, model.anatomy.blocks[0], model.info, model.facts()
    labels = info.labels or tuple(f"LABEL_{index}" for index in range(info.classes))
    teacher = "WithTeacher" if model.anatomy.head.type == "distilled" else ""
    classes = {"vit": "ViTForImageClassification", "deit": f"DeiTForImageClassification{teacher}"}
    gated, bias = block.mlp.type == "swiglu", bool(block.attention.options.get("qkv_bias", True))
    config: dict[str, Any] = {
        "architectures": [classes.get(kind, "DINOv3ViTModel")],
        "model_type": kind,
        "hidden_size": g.dim,
        "num_hidden_layers": g.depth,
        "num_attention_heads": g.heads,
        "intermediate_size": int(g.dim * block.mlp.options["ratio"]),
        "hidden_act": "silu" if gated else next(name for name, gelu in _ACTIVATIONS.items() if gelu == facts.gelu),
        "layer_norm_eps": facts.eps,
        "image_size": list(g.image),
        "patch_size": list(g.patch),
        "num_channels": g.channels,
    }
    if kind == "dinov3_vit":
        rotary = model.encoding_options["rope2d"]
        config |= {
            **dict.fromkeys(("query_bias", "key_bias", "value_bias"), bias),
            "proj_bias": block.attention.options.get("proj_bias", True),
            "mlp_bias": block.mlp.options.get("bias", True),
            "num_register_tokens": g.prefix.count("register"),
            "use_gated_mlp": gated,
            "rope_theta": rotary["theta"],
            "pos_embed_rescale": rotary.get("rescale"),
        }
    else:
        config |= {
            "qkv_bias": bias,
            "id2label": dict(enumerate(labels)),
            "label2id": {label: index for index, label in enumerate(labels)},
        }
    preprocessor = {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": g.image[0], "width": g.image[1]},
        "image_mean": model.mean,
        "image_std": model.std,
    }
    return config, preprocessor


def note_on_unread(keys: Iterable[str], where: str) -> list[str]:
    """Return a sentence on keys of a file that were not read; none if there are none."""
    return [f"{where}: unknown keys were not read: {list_some(sorted(keys))}"] if keys else []


def as_pair(value: Any) -> Pair | None:
    """Return height and width that a config states as one number or two."""
    if value is None:
        return None
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))
