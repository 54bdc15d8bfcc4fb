"""Weights on Hugging Face's hub: their names in timm, their files on this machine, and the JSON beside them.

A key of transformers' ``config.json`` is mapped to a fact, has no effect on what the model computes, is shown by the
tensors, or must have one value.  Keys in none of the tables are listed in a note.
"""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from vitlab.errors import WeightsError, first_sentence, list_some, nearest
from vitlab.identity.trial import DESCRIPTIONS, NAMES_ON_THE_HUB
from vitlab.models.contract import State
from vitlab.weights.architecture import ModelFacts
from vitlab.weights.files import Json, WeightFile
from vitlab.weights.from_timm import import_timm, names_timm_architecture, pretrained_config
from vitlab.weights.hugging_face import as_pair, note_on_unread, read_config_facts, split_keys

TIMEOUT_S = 10.0  #: after which the hub counts as out of reach
MODULES = ("vision_transformer", "vision_transformer_hybrid", "deit", "eva", "beit")
"""Modules of timm whose models vitlab's ViT may compute."""


class Named(NamedTuple):
    """Weights that timm knows by a name."""

    name: str
    repository: str | None  #: on the hub; None if timm takes them from elsewhere
    image: int  #: pixels per side
    classes: int  #: 0 for weights without a head
    license: str | None


def list_timm_weights(pattern: str) -> list[Named]:
    """Return the weights in timm's own tables whose names hold a pattern, in which ``*`` and ``?`` stand for others."""
    timm = import_timm()
    names = timm.list_models(f"*{pattern}*", module=MODULES, pretrained=True)
    configs = {name: timm.get_pretrained_cfg(name) for name in names}
    return [
        Named(name, config.hf_hub_id, config.input_size[-1], config.num_classes, config.license)
        for name, config in configs.items()
    ]


def timm_weights_repository(name: str) -> str:
    """Return the repository on the hub from which timm takes the weights of a name."""
    timm = import_timm()
    names = [each for each in timm.list_pretrained() if each.startswith(f"{name.partition('.')[0]}.")]
    if name not in names:
        hint = nearest(name, timm.list_pretrained())
        others = f" It has {', '.join(names)}." if names else ""
        raise WeightsError(f"timm {timm.__version__} has no weights called '{name}'.{others or hint}")
    config = timm.get_pretrained_cfg(name)
    if not config.hf_hub_id or config.hf_hub_filename:
        raise WeightsError(
            f"timm takes {name} from {config.hf_hub_id or config.url}, where no config.json of timm describes it; "
            "download the file and write checkpoint: FILE"
        )
    return str(config.hf_hub_id)


@cache
def fetch(repository: str) -> Path:
    """Return the file of weights of a repository on the hub, in huggingface_hub's cache; its configs are beside it.

    The repository is ``ORG/NAME``, or ``ORG/NAME@REVISION``; the folder is named by the revision.  Without a network,
    the newest revision in the cache is used.

    Raises:
        WeightsError: if it cannot be fetched, or holds no such file.
    """
    try:
        from huggingface_hub import _CACHED_NO_EXIST, constants, get_session, hf_hub_download, try_to_load_from_cache
        from huggingface_hub.errors import EntryNotFoundError, HFValidationError, RemoteEntryNotFoundError
    except ImportError:
        raise WeightsError("the hub is read by huggingface_hub: pip install 'vitlab[interop]'") from None
    name, _, revision = repository.partition("@")
    silence = ""
    try:  # once, because the library asks for half a minute before it says that there is no network
        if not constants.HF_HUB_OFFLINE:
            get_session().head(constants.ENDPOINT, timeout=TIMEOUT_S)
    except Exception as error:  # of the library of HTTP, which depends on the version
        silence = f"{constants.ENDPOINT} does not answer ({first_sentence(error)}), and it is not in the cache"

    def file(path: str, revision: str | None) -> Path | None:
        try:
            return Path(hf_hub_download(name, path, revision=revision, local_files_only=bool(silence)))
        except HFValidationError as error:
            raise WeightsError(f"{repository} is no name of a repository: {first_sentence(error)}") from None
        except (EntryNotFoundError, OSError, ValueError) as error:
            entry = try_to_load_from_cache(name, path, revision=revision)
            if entry is _CACHED_NO_EXIST or isinstance(error, RemoteEntryNotFoundError):
                return None  # the repository has no such file
            raise WeightsError(
                f"{repository} cannot be fetched from the hub: {silence or first_sentence(error)}"
            ) from None

    weights = file(NAMES_ON_THE_HUB[0], revision or None) or file(NAMES_ON_THE_HUB[1], revision or None)
    if weights is None:
        raise WeightsError(f"{repository} on the hub has neither of {' and '.join(NAMES_ON_THE_HUB)}; name another one")
    for description in DESCRIPTIONS:
        file(description, weights.parent.name)
    return weights


# -- config.json ------------------------------------------------------------------------------------------------------

Config = tuple[ModelFacts, list[str]]
"""The facts that a file beside the weights states, and a sentence for each of its parts that was not read."""


def read_facts_of_configs(contents: WeightFile, state: State) -> Config:
    """Return the facts that the files beside weights state, as transformers or timm write them, and notes.

    The canonical tensors show a file that belongs to other weights, which is refused, as is an unsupported model.
    """
    config, where = contents.config, str(contents.file.with_name("config.json"))
    try:
        pixels, unread = _facts_of_preprocessor(contents.preprocessor, where)
        if names_timm_architecture(config):
            facts, notes = _facts_of_timm_config(config, where)
        elif "model_type" in config:
            facts, notes = read_config_facts(config, state, where)
        else:
            sentence = f"{where} names neither a timm architecture nor a model_type, and was not read: its keys are"
            facts, notes = ModelFacts(), [f"{sentence} {list_some(config)}"] if config else []
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        raise WeightsError(
            f"{where}, or preprocessor_config.json beside it, is malformed; download both again"
        ) from None
    return pixels.with_defaults(facts), [*notes, *unread]


def _facts_of_timm_config(config: Json, where: str) -> Config:
    """Return size, normalisation and classes; timm itself builds the model from the other keys."""
    pretrained = pretrained_config(config)
    labels, size = config.get("label_names") or pretrained.get("label_names"), pretrained.get("input_size")
    facts = ModelFacts(
        image=as_pair(size[1:]) if size else None,
        mean=_as_numbers(pretrained.get("mean")),
        std=_as_numbers(pretrained.get("std")),
        labels=tuple(map(str, labels)) if isinstance(labels, list | tuple) else None,
    )
    # How the authors prepare pictures for evaluation, which the options of the data decide here.
    crop = pretrained.get("test_crop_pct") or pretrained.get("crop_pct")
    settings = {"crop_pct": crop, "interpolation": pretrained.get("interpolation")}
    options = [f"data.{name}: {value}" for name, value in settings.items() if value is not None]
    if options and pretrained.get("crop_mode") == "squash":
        options.append("data.fit: squash")
    sentence = f"{where}: the authors' evaluation of pictures is {', '.join(options)}; it is not applied unless set"
    return facts, [sentence] if options else []


# -- preprocessor_config.json ------------------------------------------------------------------------------------------

_PREPROCESSOR_KEYS = split_keys(
    """
    image_mean image_std do_normalize do_rescale rescale_factor do_flip_channel_order offset do_resize size resample
    do_center_crop crop_size crop_pct do_convert_rgb do_pad pad_size do_reduce_labels do_thumbnail default_to_square
    image_processor_type feature_extractor_type processor_class _processor_class _valid_processor_keys data_format
    input_data_format device disable_grouping return_tensors image_seq_length size_divisor
    """
)


def _facts_of_preprocessor(preprocessor: Json, where: str) -> Config:
    """Return the mean and standard deviation of pixels in [0, 1] that result from a preprocessor's steps."""
    where = where.replace("config.json", "preprocessor_config.json")
    for key in ("do_flip_channel_order", "offset"):
        if preprocessor.get(key):
            raise WeightsError(
                f"{where}: {key} is {preprocessor[key]}; vitlab supports RGB images without an offset. Use other "
                "weights."
            )
    mean, std = _as_numbers(preprocessor.get("image_mean")), _as_numbers(preprocessor.get("image_std"))
    if preprocessor.get("do_normalize") is False:
        mean, std = (0.0,), (1.0,)
    factor = preprocessor.get("rescale_factor", 1 / 255) if preprocessor.get("do_rescale", True) else 1.0
    scale = 255 * float(factor)  # from pixels in [0, 1] to the scale of mean and deviation
    if scale <= 0:
        raise WeightsError(f"{where}: rescale_factor is {factor}; it must be positive")
    if mean is not None and std is not None and abs(scale - 1) > 1e-6:
        mean, std = tuple(value / scale for value in mean), tuple(value / scale for value in std)
    return ModelFacts(mean=mean, std=std), note_on_unread(preprocessor.keys() - _PREPROCESSOR_KEYS, where)


def _as_numbers(values: Any) -> tuple[float, ...] | None:
    if values is None:
        return None
    return (float(values),) if isinstance(values, int | float) else tuple(map(float, values))
