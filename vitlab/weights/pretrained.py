"""Weights that torchvision publishes, by their names: downloaded once into torch's cache, then opened as a file.

Published files never change, and their addresses contain the beginning of their digests.  Every file is compared with
it before it is opened, even one from the cache.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch

from vitlab.data.torchvision_import import torchvision
from vitlab.errors import WeightsError, nearest
from vitlab.weights.known import ModelFacts
from vitlab.weights.opening import OpenedModel, open_model


def open_pretrained(name: str, planned: str | None = None) -> OpenedModel:
    """Return the model of published weights, with torchvision's facts on its images and classes.

    Args:
        name: as ``torchvision.models.get_weight`` takes it: ``RegNet_Y_16GF_Weights.IMAGENET1K_V2``.
        planned: the beginning of their SHA-256 in the plan, as :func:`digest_of` returned it there.

    Raises:
        WeightsError: if there are none of this name, they cannot be downloaded, differ from the published or
            planned ones, or are those of an unsupported network.
    """
    weights = _published_weights(name)
    digest = digest_of(name)
    if planned is not None and digest != planned:
        raise WeightsError(
            f"{name}: the torchvision here publishes other weights (SHA-256 {digest}...) than the plan names "
            f"({planned}...). Install the version of torchvision that the study was planned with, or plan it again."
        )
    file = Path(torch.hub.get_dir()) / "checkpoints" / Path(urlparse(weights.url).path).name
    if not file.is_file():
        try:
            weights.get_state_dict(progress=False, check_hash=True, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError) as error:
            raise WeightsError(f"{name} could not be fetched; put {weights.url} at {file} by hand: {error}") from None
    sees = weights.transforms()
    side = sees.crop_size[0]
    facts = ModelFacts(
        image=(side, side), mean=tuple(sees.mean), std=tuple(sees.std), labels=tuple(weights.meta["categories"])
    )
    return open_model(file, facts=facts, digests=None if digest is None else {file.name: digest})


def digest_of(name: str) -> str | None:
    """Return the beginning of the SHA-256 of published weights from their address; None if it has none.

    Raises:
        WeightsError: if there are none of this name.
    """
    match = _DIGEST.search(Path(urlparse(_published_weights(name).url).path).name)
    return match[1] if match else None


_DIGEST = re.compile(r"-([0-9a-f]{8,64})\.")
"""The beginning of a digest in a file name, in torch.hub's convention."""


@cache
def _published_weights(name: str) -> Any:
    models: Any = torchvision("torchvision.models")
    try:
        return models.get_weight(name)
    except (ValueError, AttributeError, KeyError):
        names = [str(each) for model in models.list_models(module=models) for each in models.get_model_weights(model)]
        raise WeightsError(f"torchvision publishes no weights called '{name}'.{nearest(name, names)}") from None
