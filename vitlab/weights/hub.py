"""Weights that timm names or that Hugging Face's hub holds: their files on this machine, and the names of timm's."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from vitlab.errors import WeightsError, nearest
from vitlab.identity.trial import DESCRIPTIONS, NAMES_ON_THE_HUB
from vitlab.weights.from_timm import timm_module

MODULES = ("vision_transformer", "vision_transformer_hybrid", "deit", "eva", "beit")
"""Modules of timm whose models vitlab's ViT may compute."""


class Named(NamedTuple):
    """Weights that timm knows by a name."""

    name: str
    repository: str | None  #: on the hub; None if timm takes them from elsewhere
    image: int  #: pixels per side
    classes: int  #: 0 for weights without a head
    license: str | None


def named_weights(pattern: str = "") -> list[Named]:
    """Return the weights in timm's own tables whose names hold a pattern, without a network.

    Args:
        pattern: a part of a name, in which ``*`` and ``?`` stand for others.

    Raises:
        WeightsError: if timm is not installed.
    """
    timm = timm_module()
    names = timm.list_models(f"*{pattern}*", module=MODULES, pretrained=True)
    configs = {name: timm.get_pretrained_cfg(name) for name in names}
    return [
        Named(name, config.hf_hub_id, config.input_size[-1], config.num_classes, config.license)
        for name, config in configs.items()
    ]


def repository_of(name: str) -> str:
    """Return the repository on the hub from which timm takes the weights of a name.

    Raises:
        WeightsError: if timm is not installed, or has no such weights on the hub.
    """
    timm = timm_module()
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


def fetched(kind: Literal["timm", "hub"], name: str) -> Path:
    """Return the file of the weights that timm names, or of a repository on the hub; see :func:`fetch`.

    Raises:
        WeightsError: if there are none, or they cannot be fetched.
    """
    return fetch(repository_of(name) if kind == "timm" else name)


@cache
def fetch(repository: str) -> Path:
    """Return the file of weights of a repository on the hub, in huggingface_hub's cache; its configs are beside it.

    The folder is named by the revision.  Without a network, the newest revision in the cache is used.

    Args:
        repository: ``ORG/NAME``, or ``ORG/NAME@REVISION``.

    Raises:
        WeightsError: if it cannot be fetched, or holds no such file.
    """
    try:
        from huggingface_hub import _CACHED_NO_EXIST, hf_hub_download, try_to_load_from_cache
        from huggingface_hub.errors import (
            EntryNotFoundError,
            HfHubHTTPError,
            HFValidationError,
            RemoteEntryNotFoundError,
        )
    except ImportError:
        raise WeightsError("the hub is read by huggingface_hub: pip install 'vitlab[interop]'") from None
    name, _, revision = repository.partition("@")

    def file(path: str, revision: str | None) -> Path | None:
        try:
            return Path(hf_hub_download(name, path, revision=revision))
        except HFValidationError as error:
            raise WeightsError(f"{repository} is no name of a repository: {_first_line(error)}") from None
        except (EntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
            entry = try_to_load_from_cache(name, path, revision=revision)
            if entry is _CACHED_NO_EXIST or isinstance(error, RemoteEntryNotFoundError):
                return None  # the repository has no such file
            raise WeightsError(f"{repository} cannot be fetched from the hub: {_first_line(error)}") from None

    weights = file(NAMES_ON_THE_HUB[0], revision or None) or file(NAMES_ON_THE_HUB[1], revision or None)
    if weights is None:
        raise WeightsError(f"{repository} on the hub has neither of {' and '.join(NAMES_ON_THE_HUB)}; name another one")
    for description in DESCRIPTIONS:
        file(description, weights.parent.name)
    return weights


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split(". ")[0].split()) or type(error).__name__
