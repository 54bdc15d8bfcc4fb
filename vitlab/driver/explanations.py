"""Explanations of trained models: pictures of what they attend to.

They are computed from the kept weights, independently of training: old trials can be explained at any time, and
changes to the pictures require no retraining.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitlab.data.pixels import IGNORED, VOID
from vitlab.data.prepare import prepare
from vitlab.errors import UserError, VitlabError, format_count
from vitlab.explaining import pictures
from vitlab.explaining.one_image import Explanation, Head, Label, Subject, draw, explain
from vitlab.models.vit import ViT
from vitlab.planning.values import Plan
from vitlab.registry import slot
from vitlab.report.page import fill_template, png_address
from vitlab.runner.models import load_vit
from vitlab.spec import Choice
from vitlab.store.files import read_json, write_bytes
from vitlab.store.folders import Store, TrialFolder
from vitlab.store.locks import Busy
from vitlab.training.artifacts import Transform

Say = Callable[[str], None]


def draw_arms(plan: Plan, store: Store, images: Sequence[int], say: Say = lambda sentence: None) -> list[str]:
    """Explain images for the first seed of every arm whose trial has ended, unless already explained.

    Args:
        plan: the study.
        store: the store of its trials.
        images: indices in the test split.
        say: called with a sentence before each arm.

    Returns:
        A sentence for every arm that could not be explained; this does not fail the study.
    """
    sentences = []
    for arm, planned in plan.first_trials.items():
        folder = store.folder(planned.trial)
        missing = [index for index in images if not _place(folder, index).exists()]
        if not missing or not folder.done():
            continue
        try:
            with folder.lease():
                say(f"drawing what {arm} attends to in {format_count(len(missing), 'test image')}")
                if objective := objective_without_labels(read_json(folder.spec)):
                    say(f"{arm} is explained without predictions: objective '{objective}' trains none")
                draw_images(folder, missing)
        except Busy:
            sentences.append(f"{arm} is not explained: another process is writing its trial; run again to explain it")
        except (VitlabError, NotImplementedError) as error:
            sentences.append(f"{arm} is not explained: {error}")
    return sentences


def draw_images(folder: TrialFolder, images: Sequence[int]) -> None:
    """Write explanations of test images to a trial's folder, each atomically.

    The caller holds the trial's lease.

    Raises:
        UserError: if the trial's model has no attention, or the test split has no such image.
        WeightsError: if the trial kept no weights.
    """
    model, transform = load_vit(folder)
    spec = read_json(folder.spec)
    # The subject names no arm or study, because the same trial may belong to several.
    trial = f"trial {folder.path.parent.name[:12]}, seed {spec['seeds']['init']}"
    for index, (pixels_CHW, label) in zip(images, test_examples(spec, images), strict=True):
        place = _place(folder, index)
        temporary = folder.path / f".explain.{os.getpid()}"
        shutil.rmtree(temporary, ignore_errors=True)
        subject = Subject(trial, f"test image {index}", label)
        try:
            draw(explain_image(model, transform, spec, pixels_CHW, subject), temporary)
            place.parent.mkdir(exist_ok=True)
            os.replace(temporary, place)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        folder.emit("artifact", path=str(place.relative_to(folder.path)))


def explain_image(
    model: ViT,
    transform: Transform,
    trial: Mapping[str, Any],
    picture: Any,
    subject: Subject,
    target: int | None = None,
) -> Explanation:
    """Return the explanation of one image by :func:`~vitlab.explaining.one_image.explain`.

    Args:
        model: a trained ViT.
        transform: from images to its input.
        trial: the content of the trial's ``spec.json``.
        picture: an image, as the transform takes it.
        subject: the model and the image, as its pictures name them.
        target: the class whose logit is attributed to patches; by default the most probable one.
    """
    info, x_BCHW = transform.input_spec.info, transform(picture)
    image_HWC = transform.denormalize(x_BCHW)[0].permute(1, 2, 0)
    head: Head = "multilabel" if info.task == "multilabel" else "trained"
    if objective_without_labels(trial):
        head = "untrained"
    return explain(model, x_BCHW, image_HWC, info.labels, subject, head=head, target=target)


def write_page(
    page: Path,
    title: str,
    question: str,
    explanations: Mapping[str, Mapping[str, Explanation]],
    reasons: Mapping[str, str],
) -> None:
    """Write a page of models beside each other, for each of some images, in the style of reports.

    Its template calls the functions of :mod:`vitlab.explaining.pictures`.

    Args:
        page: the file, in the folder above all files of the explanations, to which it links.
        title: name of the study or the trial.
        question: of the study; empty for a trial.
        explanations: image, as it was named, to its explanations by name of the model.
        reasons: name to the reason of every model that is not explained.
    """
    values = {
        "title": title,
        "question": question,
        "explanations": explanations,
        "reasons": reasons,
        "pictures": pictures,
        "address": _address,
        "link": lambda file: quote(file.relative_to(page.parent).as_posix()),
    }
    write_bytes(page, fill_template("explained.html.j2", values).encode())


def _address(picture: Image.Image) -> str:
    with io.BytesIO() as file:
        picture.save(file, format="png")
        return png_address(file.getvalue())


def objective_without_labels(trial: Mapping[str, Any]) -> str | None:
    """Return the name of a trial's objective if it does not train predictions on labels; None if it does.

    Args:
        trial: the content of the trial's ``spec.json``.
    """
    choice = Choice.of(trial["spec"]["train"]["objective"])
    component: Any = slot("objective").find(choice.type)[0]
    return None if component.labels else choice.type


def test_examples(trial: Mapping[str, Any], images: Sequence[int]) -> list[tuple[Tensor, Label]]:
    """Return images of a trial's own test split by index, each uint8 (C, H, W), with the truth.

    Args:
        trial: the content of the trial's ``spec.json``.
        images: indices, from 0.

    Raises:
        UserError: if the split has no such image.
    """
    prepared = prepare(slot("dataset").resolve(trial["spec"]["data"]), trial["seeds"])
    subset, names = prepared.test, prepared.info.labels
    if beyond := [str(index) for index in images if index >= len(subset)]:
        raise UserError(f"there is no test image {', '.join(beyond)}: the split has {len(subset)}, counted from 0")
    position_N = torch.tensor(list(images))
    y_N = subset.y_N[position_N]
    truth: list[Label] = [_truth(y, names) for y in y_N]
    return list(zip(subset.at(position_N), truth, strict=True))


def _truth(y: Tensor, names: Sequence[str]) -> Label:
    if y.ndim == 1:
        return ", ".join(names[index] if names else str(index) for index in y.nonzero()[:, 0].tolist()) or "none"
    if y.ndim:
        label_HW: NDArray[np.int64] = y.long().where(y != VOID, IGNORED).numpy()
        return label_HW
    return names[int(y)] if names else str(int(y))


def _place(folder: TrialFolder, index: int) -> Path:
    return folder.path / "explain" / f"test-{index}"
