"""The ``config.json`` and ``preprocessor_config.json`` of Hugging Face's hub, as timm and transformers write them.

A key of transformers is mapped to a fact, has no effect on what the model computes, is shown by the tensors, or must
have one value.  Keys in none of the tables are listed in a note.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from vitlab.errors import WeightsError
from vitlab.geometry import Pair
from vitlab.weights.facts import Encoding, ModelFacts, some
from vitlab.weights.files import Json, WeightFile
from vitlab.weights.formats import State, depth_of


def key_set(text: str) -> frozenset[str]:
    """Return the keys in a text that separates them by white space."""
    return frozenset(text.split())


Config = tuple[ModelFacts, list[str]]
"""The facts that a file beside the weights states, and a sentence for each of its parts that was not read."""


def read_config(contents: WeightFile, state: State) -> Config:
    """Return the facts that the files beside weights state, and notes.

    Args:
        contents: the weights with their config, as transformers or timm write it, and preprocessor; both may be empty.
        state: canonical tensors, to detect a file that belongs to other weights.

    Raises:
        WeightsError: if it describes other weights, or an unsupported model.
    """
    config, where = contents.config, str(contents.file.with_name("config.json"))
    try:
        pixels, unread = _preprocessor(contents.preprocessor, where)
        if names_timm(config):
            facts, notes = _timm(config, where)
        elif "model_type" in config:
            facts, notes = _transformers(config, state, where)
        else:
            sentence = f"{where} names neither a timm architecture nor a model_type, and was not read: its keys are"
            facts, notes = ModelFacts(), [f"{sentence} {some(config)}"] if config else []
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        raise WeightsError(
            f"{where}, or preprocessor_config.json beside it, is malformed; download both again"
        ) from None
    return pixels.or_else(facts), [*notes, *unread]


# -- timm -------------------------------------------------------------------------------------------------------------


def names_timm(config: Json) -> bool:
    """Return whether a ``config.json`` names an architecture of timm."""
    return "pretrained_cfg" in config or "architecture" in config


def pretrained_config(config: Json) -> Json:
    """Return timm's ``pretrained_cfg``; in old files it is the whole file."""
    pretrained: Json = config.get("pretrained_cfg", config) or {}
    return pretrained


def _timm(config: Json, where: str) -> Config:
    """Return size, normalisation and classes; timm itself builds the model from the other keys."""
    pretrained = pretrained_config(config)
    labels, size = config.get("label_names") or pretrained.get("label_names"), pretrained.get("input_size")
    facts = ModelFacts(
        image=_pair(size[1:]) if size else None,
        mean=_numbers(pretrained.get("mean")),
        std=_numbers(pretrained.get("std")),
        labels=tuple(map(str, labels)) if isinstance(labels, list | tuple) else None,
    )
    # How the authors prepare pictures for evaluation, which the options of the data decide here.
    crop = pretrained.get("test_crop_pct") or pretrained.get("crop_pct")
    given = {"crop_pct": crop, "interpolation": pretrained.get("interpolation")}
    options = [f"data.{name}: {value}" for name, value in given.items() if value is not None]
    if options and pretrained.get("crop_mode") == "squash":
        options.append("data.fit: squash")
    sentence = f"{where}: the authors' evaluation of pictures is {', '.join(options)}; it is not applied unless set"
    return facts, [sentence] if options else []


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

_KEYS = key_set(
    """
    model_type hidden_size num_hidden_layers num_attention_heads intermediate_size hidden_act layer_norm_eps image_size
    patch_size num_channels qkv_bias pooler_act pooler_output_size id2label label2id num_labels hidden_dropout_prob
    attention_probs_dropout_prob initializer_range encoder_stride pruned_heads

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

_PREPROCESSOR_KEYS = key_set(
    """
    image_mean image_std do_normalize do_rescale rescale_factor do_flip_channel_order offset do_resize size resample
    do_center_crop crop_size crop_pct do_convert_rgb do_pad pad_size do_reduce_labels do_thumbnail default_to_square
    image_processor_type feature_extractor_type processor_class _processor_class _valid_processor_keys data_format
    input_data_format device disable_grouping return_tensors image_seq_length size_divisor
    """
)


def _transformers(config: Json, state: State, where: str) -> Config:
    kind, act, pooler = config["model_type"], config.get("hidden_act", "gelu"), config.get("pooler_act", "tanh")
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
    if "pre_logits.fc.weight" in state and pooler != "tanh":
        raise WeightsError(f"{where}: pooler_act is {pooler}, and vitlab supports tanh alone; use other weights")
    if act not in _ACTIVATIONS:
        raise WeightsError(f"{where}: hidden_act is {act}; supported: {', '.join(_ACTIVATIONS)}. Use other weights.")
    # A config of other weights states heads and norms that no tensor contradicts.
    norm = state.get("blocks.0.norm1.weight")
    for key, size in (("hidden_size", None if norm is None else len(norm)), ("num_hidden_layers", depth_of(state))):
        if None not in (config.get(key), size) and config[key] != size:
            raise WeightsError(
                f"{where} says {key} {config[key]}, and the tensors beside it have {size}; use the config.json of "
                "these weights"
            )
    labels = [str(label) for _, label in sorted(config.get("id2label", {}).items(), key=lambda item: int(item[0]))]
    has_names = any(label != f"LABEL_{index}" for index, label in enumerate(labels))
    facts = ModelFacts(
        heads=config.get("num_attention_heads", 12),
        image=_pair(config.get("image_size", 224)),
        eps=config.get("layer_norm_eps", _MODEL_TYPES[kind]),
        gelu=_ACTIVATIONS[act],
        position=Encoding(),
        labels=tuple(labels) if has_names else None,
    )
    return facts, _note_on_unread(config.keys() - _KEYS, where)


def _preprocessor(preprocessor: Json, where: str) -> Config:
    """Return the mean and standard deviation of pixels in [0, 1] that result from a preprocessor's steps."""
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
    return ModelFacts(mean=mean, std=std), _note_on_unread(preprocessor.keys() - _PREPROCESSOR_KEYS, where)


def _note_on_unread(keys: Iterable[str], where: str) -> list[str]:
    return [f"{where}: unknown keys were not read: {some(sorted(keys))}"] if keys else []


def _pair(value: Any) -> Pair | None:
    if value is None:
        return None
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


def _numbers(values: Any) -> tuple[float, ...] | None:
    if values is None:
        return None
    return (float(values),) if isinstance(values, int | float) else tuple(map(float, values))
