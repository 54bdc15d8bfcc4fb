"""The ``config.json`` and ``preprocessor_config.json`` of Hugging Face's hub, as timm and transformers write them.

Every key is in one of these tables: it is mapped to a fact, has no effect on what the model computes, is shown by the
tensors, or must have one value; any other value is refused by key and value.  Keys in no table are refused if they are
arguments of the model, and listed in a note otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from vitlab.errors import WeightsError
from vitlab.geometry import Pair
from vitlab.weights.from_timm import names_timm, pretrained_config
from vitlab.weights.known import Encoding, ModelFacts, plain, some
from vitlab.weights.names import State, depth_of, patch_of, tensor_size


def key_set(text: str) -> frozenset[str]:
    """Return the keys in a text that separates them by white space."""
    return frozenset(text.split())


class ConfigFacts(NamedTuple):
    """The facts that the files beside the weights state, and a sentence for each file that was not read whole."""

    facts: ModelFacts
    notes: tuple[str, ...] = ()


def read_config(config: Mapping[str, Any], preprocessor: Mapping[str, Any], state: State, where: str) -> ConfigFacts:
    """Return the facts that the files beside a Vision Transformer's weights state.

    Args:
        config: as transformers or timm write it; may be empty.
        preprocessor: as transformers writes it; may be empty.
        state: canonical tensors, to detect a file that belongs to other weights.
        where: the config's name in errors.

    Raises:
        WeightsError: if it describes other weights, or an unsupported model.
    """
    try:
        pixels = _preprocessor(preprocessor, where)
        if names_timm(config):
            pretrained = pretrained_config(config)
            model = ConfigFacts(_data_facts(config, pretrained), _note_on_crops(pretrained, where))
        elif "model_type" in config:
            model = _transformers(config, state, where)
        else:
            names = f"its keys are {some(config)}"
            note = f"{where} names neither a timm architecture nor a model_type, and was not read: {names}"
            model = ConfigFacts(ModelFacts(), (note,) if config else ())
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        raise WeightsError(
            f"{where}, or preprocessor_config.json beside it, is malformed; download both again"
        ) from None
    return ConfigFacts(pixels.facts.or_else(model.facts), (*model.notes, *pixels.notes))


def read_image_config(config: Mapping[str, Any], preprocessor: Mapping[str, Any], where: str) -> ModelFacts:
    """Return the facts on images and classes that the files beside a convolutional network's weights state.

    Raises:
        WeightsError: if they are malformed.
    """
    try:
        size = pretrained_config(config).get("input_size")
        facts = _data_facts(config, pretrained_config(config)).model_copy(
            update={"image": _pair(size[1:]) if size else None}
        )
        return _preprocessor(preprocessor, where).facts.or_else(facts)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        raise WeightsError(
            f"{where}, or preprocessor_config.json beside it, is malformed; download both again"
        ) from None


# -- timm -------------------------------------------------------------------------------------------------------------


def _data_facts(config: Mapping[str, Any], pretrained: Mapping[str, Any]) -> ModelFacts:
    """Return mean, standard deviation and class names from timm's config."""
    labels = config.get("label_names") or pretrained.get("label_names")
    return ModelFacts(
        mean=_numbers(pretrained.get("mean")),
        std=_numbers(pretrained.get("std")),
        labels=tuple(map(str, labels)) if isinstance(labels, list | tuple) else None,
    )


# -- transformers -----------------------------------------------------------------------------------------------------

_ACTIVATIONS: Mapping[str, Literal["none", "tanh"]] = {
    "gelu": "none",
    "gelu_python": "none",
    "gelu_new": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "gelu_tanh": "tanh",
}

_MODEL_TYPES: Mapping[str, float] = {"vit": 1e-12, "deit": 1e-12, "vit_msn": 1e-6}
"""Supported models of transformers, and the default of their ``layer_norm_eps``."""

_MODEL_KEYS = key_set(
    """
    model_type hidden_size num_hidden_layers num_attention_heads intermediate_size hidden_act layer_norm_eps image_size
    patch_size num_channels qkv_bias pooler_act pooler_output_size id2label label2id num_labels hidden_dropout_prob
    attention_probs_dropout_prob initializer_range encoder_stride
    """
)
_COMMON_KEYS = key_set(
    """
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
"""Keys of every config of transformers; they do not affect what these models compute."""


def _transformers(config: Mapping[str, Any], state: State, where: str) -> ConfigFacts:
    kind = config["model_type"]
    if kind not in _MODEL_TYPES:
        raise WeightsError(
            f"{where} says model_type {kind}; supported models of transformers: {', '.join(_MODEL_TYPES)}. Use other "
            "weights."
        )
    if config.get("pruned_heads"):
        raise WeightsError(
            f"{where}: pruned_heads is {config['pruned_heads']}, and vitlab does not support pruned models; use other "
            "weights"
        )
    pooler = config.get("pooler_act", "tanh")
    if "pre_logits.fc.weight" in state and pooler != "tanh":
        raise WeightsError(f"{where}: pooler_act is {pooler}, and vitlab supports tanh alone; use other weights")
    for key, actual in (
        ("hidden_size", tensor_size(state, "blocks.0.norm1.weight", 0)),
        ("num_hidden_layers", depth_of(state)),
        ("intermediate_size", tensor_size(state, "blocks.0.mlp.fc1.weight", 0)),
        ("num_channels", tensor_size(state, "patch_embed.proj.weight", 1)),
    ):
        _require_equal(where, key, config.get(key), actual)
    _require_equal(where, "patch_size", _pair(config.get("patch_size")), patch_of(state))
    labels = [str(label) for _, label in sorted(config.get("id2label", {}).items(), key=lambda item: int(item[0]))]
    has_names = any(label != f"LABEL_{index}" for index, label in enumerate(labels))
    facts = ModelFacts(
        heads=config.get("num_attention_heads", 12),
        image=_pair(config.get("image_size", 224)),
        norm="layernorm",
        eps=config.get("layer_norm_eps", _MODEL_TYPES[kind]),
        gelu=_look_up(config.get("hidden_act", "gelu"), _ACTIVATIONS, where, "hidden_act"),
        blocks="pre_norm",
        position=Encoding(type="none"),
        pre_logits="tanh",
        labels=tuple(labels) if has_names else None,
    )
    known_keys = _MODEL_KEYS | _COMMON_KEYS | {"pruned_heads"}
    return ConfigFacts(facts, _note_on_unread([key for key in config if key not in known_keys], where))


_PREPROCESSOR_KEYS = key_set(
    """
    image_mean image_std do_normalize do_rescale rescale_factor do_flip_channel_order offset do_resize size resample
    do_center_crop crop_size crop_pct do_convert_rgb do_pad pad_size do_reduce_labels do_thumbnail default_to_square
    image_processor_type feature_extractor_type processor_class _processor_class _valid_processor_keys data_format
    input_data_format device disable_grouping return_tensors image_seq_length size_divisor
    """
)


def _preprocessor(preprocessor: Mapping[str, Any], where: str) -> ConfigFacts:
    """Return the mean and standard deviation of pixels in [0, 1] that result from a preprocessor's steps."""
    if not preprocessor:
        return ConfigFacts(ModelFacts())
    where = where.replace("config.json", "preprocessor_config.json")
    for key in ("do_flip_channel_order", "offset"):
        if preprocessor.get(key):
            raise WeightsError(
                f"{where}: {key} is {preprocessor[key]}; vitlab supports RGB images without an offset. Use other "
                "weights."
            )
    mean, std = _numbers(preprocessor.get("image_mean")), _numbers(preprocessor.get("image_std"))
    if preprocessor.get("do_normalize") is False:
        mean, std = (0.0,), (1.0,)
    factor = preprocessor.get("rescale_factor", 1 / 255) if preprocessor.get("do_rescale", True) else 1.0
    scale = 255 * float(factor)  # from pixels in [0, 1] to the scale of mean and deviation
    if scale <= 0:
        raise WeightsError(f"{where}: rescale_factor is {factor}; it must be positive")
    if mean is not None and std is not None and abs(scale - 1) > 1e-6:
        mean, std = tuple(value / scale for value in mean), tuple(value / scale for value in std)
    unread = [key for key in preprocessor if key not in _PREPROCESSOR_KEYS]
    return ConfigFacts(ModelFacts(mean=mean, std=std), _note_on_unread(unread, where))


def _look_up(value: Any, table: Mapping[str, Any], where: str, key: str) -> Any:
    if value not in table:
        raise WeightsError(f"{where}: {key} is {value}; supported: {', '.join(table)}. Use other weights.")
    return table[value]


def _require_equal(where: str, key: str, value: Any, actual: Any) -> None:
    """Raise WeightsError if a size in the config differs from that of the tensors."""
    if value is None or actual is None or value == actual:
        return
    raise WeightsError(
        f"{where} says {key} {plain(value)}, and the tensors beside it have {plain(actual)}; use the config.json of "
        "these weights"
    )


def _note_on_unread(keys: list[str], where: str) -> tuple[str, ...]:
    return (f"{where}: unknown keys were not read: {some(keys)}",) if keys else ()


def _pair(value: Any) -> Pair | None:
    if value is None:
        return None
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


def _numbers(values: Any) -> tuple[float, ...] | None:
    if values is None:
        return None
    return (float(values),) if isinstance(values, int | float) else tuple(map(float, values))


def _note_on_crops(pretrained: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Return a sentence on how the authors prepare pictures for evaluation, which the data's options decide here."""
    options = [
        f"data.{name}: {pretrained[key]}"
        for name, key in (("crop_pct", "test_crop_pct"), ("crop_pct", "crop_pct"), ("interpolation", "interpolation"))
        if pretrained.get(key) is not None and not (key == "crop_pct" and pretrained.get("test_crop_pct"))
    ]
    fit = ["data.fit: squash"] if pretrained.get("crop_mode") == "squash" else []
    if not options:
        return ()
    return (
        f"{where}: the authors' evaluation of pictures is {', '.join([*options, *fit])}; it is not applied unless set",
    )
