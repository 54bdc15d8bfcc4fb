"""Weights that torchvision publishes, by its own name for them: fetched once into torch's cache, then opened as a file.

The name says which file: a published one never changes, and its address holds the beginning of its digest, which every
file is compared with that is opened, however it came into the cache.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch

from vitlab.data.torchvision_import import torchvision
from vitlab.errors import WeightsError, nearest
from vitlab.weights.known import ModelFacts
from vitlab.weights.opening import Opened, open_model


def open_pretrained(name: str) -> Opened:
    """The model of published weights, with what torchvision says of its images and classes.

    Args:
        name: as ``torchvision.models.get_weight`` takes it: ``RegNet_Y_16GF_Weights.IMAGENET1K_V2``.

    Raises:
        WeightsError: if there are none of this name, they cannot be fetched, are not those that were published, or are
            of a network not known here.
    """
    weights = _published(name)
    file = Path(torch.hub.get_dir()) / "checkpoints" / Path(urlparse(weights.url).path).name
    if not file.is_file():
        try:
            weights.get_state_dict(progress=False, check_hash=True, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError) as error:
            raise WeightsError(f"{name} could not be fetched; put {weights.url} at {file} by hand: {error}") from None
    sees = weights.transforms()
    side = sees.crop_size[0]
    said = ModelFacts(
        image=(side, side), mean=tuple(sees.mean), std=tuple(sees.std), labels=tuple(weights.meta["categories"])
    )
    beginning = digest_of(name)
    return open_model(file, said=said, digests=None if beginning is None else {file.name: beginning})


def digest_of(name: str) -> str | None:
    """Return how the SHA-256 of published weights begins, as their address says; None if it does not say.

    Raises:
        WeightsError: if there are none of this name.
    """
    found = _DIGEST.search(Path(urlparse(_published(name).url).path).name)
    return found[1] if found else None


# -- how it is done ---------------------------------------------------------------------------------------------------

_DIGEST = re.compile(r"-([0-9a-f]{8,64})\.")
"""In the name of a file that torch.hub knows how to check."""


def _published(name: str) -> Any:
    models: Any = torchvision("torchvision.models")
    try:
        return models.get_weight(name)
    except (ValueError, AttributeError, KeyError):
        known = [str(each) for model in models.list_models(module=models) for each in models.get_model_weights(model)]
        raise WeightsError(f"torchvision publishes no weights called '{name}'.{nearest(name, known)}") from None
