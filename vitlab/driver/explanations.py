"""Explanations of trials that have ended: a trained model and an image of its own test split, as pictures and numbers.

They are made from the kept weights, after the training and apart from it: a trial that was trained long ago can be
explained today, and a change in what is drawn retrains nothing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitlab.errors import UserError, VitlabError
from vitlab.plan.values import Plan
from vitlab.store.folders import Busy, Store, TrialFolder, read_json

if TYPE_CHECKING:
    from torch import Tensor


def examine_arms(plan: Plan, store: Store, images: Sequence[int]) -> list[str]:
    """Explain images for the first seed of every arm that has ended, where that has not been done.

    Args:
        images: numbers in the test split.

    Returns:
        a sentence for every arm that could not be explained; a study does not fail by it.
    """
    first = {planned.arm: planned.trial for planned in reversed(plan.trials)}
    sentences = []
    for arm in (arm.name for arm in plan.arms if arm.name in first):
        folder = store.trial(first[arm].key, first[arm].code)
        missing = [index for index in images if not _place(folder, index).exists()]
        if not missing or not folder.done():
            continue
        try:
            with folder.lease():
                examine(folder, missing)
        except Busy:
            sentences.append(f"{arm} is not explained: another process is writing its trial; run again to explain it")
        except (VitlabError, NotImplementedError) as error:
            sentences.append(f"{arm} is not explained: {error}")
    return sentences


def examine(folder: TrialFolder, images: Sequence[int]) -> None:
    """Write the explanations of some test images into the folder of a trial, each whole or not at all.

    The caller holds the trial's lease.

    Raises:
        UserError: if the trial's model has no attention, or its test split no such image.
        WeightsError: if the trial kept no weights.
    """
    from vitlab.explain.one_image import Subject, explain
    from vitlab.models.vit import ViT
    from vitlab.runner.models import load_model

    model, transform = load_model(folder)
    if not isinstance(model, ViT):
        raise UserError(f"only a ViT has attention to explain; this is a {type(model).__name__}")
    spec = read_json(folder.spec)
    # Arms and studies name trials, not the other way round: the same pictures may belong to several.
    trial = f"trial {folder.path.parent.name[:12]}, seed {spec['seeds']['init']}"
    for index, (pixels_CHW, label) in zip(images, test_examples(spec, images), strict=True):
        place = _place(folder, index)
        unfinished = folder.path / f".explain.{os.getpid()}"
        shutil.rmtree(unfinished, ignore_errors=True)
        x_BCHW = transform(pixels_CHW)
        image_HWC = transform.seen(x_BCHW)[0].permute(1, 2, 0)
        subject = Subject(trial, f"test image {index}", label)
        explain(model, x_BCHW, image_HWC, transform.sight.info.labels, unfinished, subject)
        place.parent.mkdir(exist_ok=True)
        os.replace(unfinished, place)
        folder.emit("artifact", path=str(place.relative_to(folder.path)))


def test_examples(trial: Mapping[str, Any], images: Sequence[int]) -> list[tuple[Tensor, str | None]]:
    """Return images of a trial's own test split by their numbers, each uint8 (C, H, W), with its true label.

    The label is None where labels are of pixels.

    Args:
        trial: as the ``spec.json`` of its folder says it.
        images: numbers, from 0.

    Raises:
        UserError: if the split has no such image.
    """
    import torch

    from vitlab.data.prepare import prepare
    from vitlab.registry import slot

    prepared = prepare(slot("dataset").resolve(trial["spec"]["data"]), trial["seeds"])
    subset, names = prepared.test, prepared.info.labels
    for index in images:
        if index >= len(subset):
            raise UserError(f"there is no test image {index}: the split has {len(subset)}, counted from 0")
    position_N = torch.tensor(list(images))
    y_N = subset.y_N[position_N]
    labels = [None] * len(y_N) if y_N.ndim > 1 else [names[y] if names else str(y) for y in y_N.tolist()]
    return list(zip(subset.at(position_N), labels, strict=True))


def _place(folder: TrialFolder, index: int) -> Path:
    return folder.path / "explain" / f"test-{index}"
