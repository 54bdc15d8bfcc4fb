"""The ``config.json`` and ``preprocessor_config.json`` of Hugging Face's hub, as timm and transformers write them.

A key of transformers is mapped to a fact, has no effect on what the model computes, is shown by the tensors, or must
have one value.  Keys in none of the tables are listed in a note.
"""

from __future__ import annotations

from typing import Any

from vitlab.errors import WeightsError
from vitlab.weights.facts import ModelFacts, some
from vitlab.weights.files import Json, WeightFile
from vitlab.weights.formats import State
from vitlab.weights.hugging_face import config_facts, key_set, note_on_unread, pair_of

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
            facts, notes = config_facts(config, state, where)
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
        image=pair_of(size[1:]) if size else None,
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


# -- preprocessor_config.json ------------------------------------------------------------------------------------------

_PREPROCESSOR_KEYS = key_set(
    """
    image_mean image_std do_normalize do_rescale rescale_factor do_flip_channel_order offset do_resize size resample
    do_center_crop crop_size crop_pct do_convert_rgb do_pad pad_size do_reduce_labels do_thumbnail default_to_square
    image_processor_type feature_extractor_type processor_class _processor_class _valid_processor_keys data_format
    input_data_format device disable_grouping return_tensors image_seq_length size_divisor
    """
)


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
    return ModelFacts(mean=mean, std=std), note_on_unread(preprocessor.keys() - _PREPROCESSOR_KEYS, where)


def _numbers(values: Any) -> tuple[float, ...] | None:
    if values is None:
        return None
    return (float(values),) if isinstance(values, int | float) else tuple(map(float, values))
