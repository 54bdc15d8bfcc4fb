"""Weights that torchvision publishes, by its own name for them: fetched once into torch's cache, then opened as a file.

The name says which file: a published one never changes, and its address holds the beginning of its digest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import torch

from vitlab.data.torchvision_import import torchvision
from vitlab.errors import WeightsError, nearest
from vitlab.models.weights.known import Known
from vitlab.models.weights.opening import Opened, open_model


def open_pretrained(name: str) -> Opened:
    """The model of published weights, with what torchvision says of its images and classes.

    Args:
        name: as ``torchvision.models.get_weight`` takes it: ``RegNet_Y_16GF_Weights.IMAGENET1K_V2``.

    Raises:
        WeightsError: if there are none of this name, they cannot be fetched, or are of a network not known here.
    """
    models: Any = torchvision("torchvision.models")
    try:
        weights = models.get_weight(name)
    except (ValueError, AttributeError, KeyError):
        known = [str(each) for model in models.list_models(module=models) for each in models.get_model_weights(model)]
        raise WeightsError(f"torchvision publishes no weights called '{name}'.{nearest(name, known)}") from None
    file = Path(torch.hub.get_dir()) / "checkpoints" / Path(urlparse(weights.url).path).name
    if not file.is_file():
        try:
            weights.get_state_dict(progress=False, check_hash=True, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError) as error:
            raise WeightsError(f"{name} could not be fetched; put {weights.url} at {file} by hand: {error}") from None
    sees = weights.transforms()
    side = sees.crop_size[0]
    said = Known(
        image=(side, side), mean=tuple(sees.mean), std=tuple(sees.std), labels=tuple(weights.meta["categories"])
    )
    return open_model(file, said=said)
