"""What is known of a model beside its tensors: what a file, its neighbours or its format say, and shapes do not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from vitlab.errors import WeightsError
from vitlab.spec.choice import Frozen

Side = Annotated[int, Field(gt=0)]

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and standard deviation that torchvision and DeiT normalise with."""
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
"""Those of Google's checkpoints, and of timm's Vision Transformers."""

SHOWN = 5  #: names in a sentence


class Known(Frozen):
    """Facts about a model; None where nobody says."""

    heads: Side | None = None
    image: tuple[Side, Side] | None = None  #: pixels, height and width
    grid: tuple[Side, Side] | None = None  #: patches, rows and columns
    prefix_rows: Literal["own", "none"] | None = None  #: whether tokens before the patches have rows of positions
    pool: Literal["cls", "gap", "map"] | None = None
    eps: Annotated[float, Field(gt=0)] | None = None  #: of the norms
    gelu: Literal["none", "tanh"] | None = None  #: the approximation the MLPs compute
    mean: tuple[float, ...] | None = None  #: per channel, of pixels in [0, 1]
    std: tuple[float, ...] | None = None
    labels: tuple[str, ...] | None = None  #: names of the classes

    def or_else(self, other: Known) -> Known:
        """These facts, and where they are silent, those of ``other``."""
        return Known(**{**other.model_dump(exclude_none=True), **self.model_dump(exclude_none=True)})

    def agreeing(self, said: Known, who: str) -> Known:
        """These facts and what a caller has said beside them.

        Raises:
            WeightsError: if the two contradict each other.
        """
        for name in ("heads", "image", "grid"):
            mine, theirs = getattr(self, name), getattr(said, name)
            if None not in (mine, theirs) and mine != theirs:
                raise WeightsError(f"{who} says {name} {_plain(mine)}, and {_plain(theirs)} was asked for")
        return said.or_else(self)


def beside(config: Mapping[str, Any], preprocessor: Mapping[str, Any], dim: int | None, who: str) -> Known:
    """What the ``config.json`` and ``preprocessor_config.json`` of Hugging Face's hub say, in either library's words.

    Args:
        config: as transformers or timm write it.
        preprocessor: as transformers writes it; may be empty.
        dim: width of the tensors, to notice a file that belongs to something else.
        who: name of the file in errors.

    Raises:
        WeightsError: if it describes another model, or one that is not known here.
    """
    try:
        return _beside(config, preprocessor, dim, who)
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        raise WeightsError(f"{who} is not what transformers or timm write") from None


def some(names: Iterable[str]) -> str:
    """The first of ``names``, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return ", ".join(listed[:SHOWN]) + more


# -- how it is done ---------------------------------------------------------------------------------------------------


def _beside(config: Mapping[str, Any], preprocessor: Mapping[str, Any], dim: int | None, who: str) -> Known:
    if "pretrained_cfg" in config or "architecture" in config:
        return _timm(config, dim, who)
    if config.get("model_type") not in ("vit", "deit"):
        return Known()
    if dim is not None and config.get("hidden_size", dim) != dim:
        raise WeightsError(f"{who} says hidden_size {config['hidden_size']}, and the tensors beside it are {dim} wide")
    labels = [str(label) for _, label in sorted(config.get("id2label", {}).items(), key=lambda item: int(item[0]))]
    named = any(label != f"LABEL_{index}" for index, label in enumerate(labels))
    return Known(
        heads=config.get("num_attention_heads"),
        image=_pair(config.get("image_size")),
        eps=config.get("layer_norm_eps"),
        gelu=_one(config.get("hidden_act"), _ACTIVATIONS, f"{who}: hidden_act"),
        mean=_numbers(preprocessor.get("image_mean")),
        std=_numbers(preprocessor.get("image_std")),
        labels=tuple(labels) if named else None,
    )


_ACTIVATIONS: Mapping[str, Literal["none", "tanh"]] = {
    "gelu": "none",
    "gelu_new": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "gelu_tanh": "tanh",
}
_POOLS: Mapping[str, Literal["cls", "gap", "map"]] = {"token": "cls", "avg": "gap", "map": "map"}


def _timm(config: Mapping[str, Any], dim: int | None, who: str) -> Known:
    pretrained = config.get("pretrained_cfg") or {}
    given = config.get("model_args") or {}
    if dim is not None and config.get("num_features", dim) != dim:
        raise WeightsError(
            f"{who} says num_features {config['num_features']}, and the tensors beside it are {dim} wide"
        )
    size = pretrained.get("input_size")
    no_rows = given.get("no_embed_class")
    return Known(
        heads=given.get("num_heads"),
        image=_pair(given.get("img_size")) or (_pair(size[1:]) if size else None),
        prefix_rows=None if no_rows is None else "none" if no_rows else "own",
        pool=_one(given.get("global_pool", config.get("global_pool")), _POOLS, f"{who}: global_pool"),
        gelu=_one(given.get("act_layer"), _ACTIVATIONS, f"{who}: act_layer"),
        mean=_numbers(pretrained.get("mean")),
        std=_numbers(pretrained.get("std")),
        labels=tuple(config["label_names"]) if config.get("label_names") else None,
    )


def _one(value: str | None, known: Mapping[str, Any], what: str) -> Any:
    if value is None:
        return None
    if value not in known:
        raise WeightsError(f"{what} is {value}; known here: {', '.join(known)}")
    return known[value]


def _pair(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


def _numbers(values: Any) -> tuple[float, ...] | None:
    return None if values is None else tuple(map(float, values))


def _plain(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
