"""Explanations of trained models: pictures of what they attend to, and of what speaks for a class.

They are computed from the kept weights, independently of training: old trials can be explained at any time, and
changes to the pictures require no retraining.
"""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitlab.data.datasets.pictures import Decoding, PictureSet, naming_picture
from vitlab.data.pixels import IGNORED, VOID
from vitlab.data.prepare import prepare
from vitlab.errors import (
    UserError,
    VitlabError,
    WeightsError,
    collecting_mistakes,
    format_count,
    list_some,
    nearest,
)
from vitlab.explaining import one_image, pictures
from vitlab.explaining.one_image import Explanation, Head, Subject, write_explanation, write_side_by_side
from vitlab.geometry import DataInfo
from vitlab.planning.values import Plan
from vitlab.registry import slot
from vitlab.registry.options import check_arguments
from vitlab.report.api import open_study
from vitlab.report.page import fill_template, png_address
from vitlab.report.sections.explained import reasons_file
from vitlab.runner.models import load_model
from vitlab.spec import Choice
from vitlab.store.files import read_json, temporary_path, write_bytes, write_json
from vitlab.store.folders import OUT, Store, TrialFolder
from vitlab.store.locks import Busy

Truth = tuple[str | None, NDArray[np.int64] | None]
"""The true class of an image, or of each of its pixels, (H, W)."""

UNTRAINED = (
    "this version of the study has not trained it; type vitlab run FILE, or explain a version that has, NAME@VERSION, "
    "which 'vitlab studies' lists"
)


def write_arm_explanations(plan: Plan, store: Store, indices: Sequence[int], say: Callable[[str], object]) -> None:
    """Explain images for the first seed of every arm whose trial has ended, unless already explained.

    The reasons why arms are not explained are stored in the study's folder, for the report.

    Args:
        plan: the study.
        store: the store of its trials.
        indices: indices in the test split.
        say: called with a sentence before each arm, and on an arm that cannot be explained, which fails no study.
    """
    reasons = {}
    for arm, planned in plan.first_trials.items():
        folder = store.folder(planned.trial)
        missing = [index for index in indices if not (folder.path / "explain" / f"test-{index}").exists()]
        if not missing:
            continue
        if not folder.done():
            reasons[arm] = f"the trial of its first seed is {folder.state()}"
            continue
        try:
            with folder.lease():
                say(f"drawing what {arm} attends to in {format_count(len(missing), 'test image')}")
                write_explanations_to_trial(folder, planned.trial.seeds["init"], missing)
            continue
        except Busy:
            reasons[arm] = "another process is writing its trial; run again to explain it"
        except (VitlabError, NotImplementedError) as error:
            reasons[arm] = str(error)
        say(f"{arm} is not explained: {reasons[arm]}")
    write_json(reasons_file(plan, store), reasons)


def write_explanations_to_trial(folder: TrialFolder, seed: int, indices: Sequence[int]) -> None:
    """Write explanations of test images to a trial's folder, each atomically.

    The caller holds the trial's lease.

    Raises:
        UserError: if the test split has no such image, or there is nothing to draw of the model.
        WeightsError: if the trial kept no weights.
    """
    # The caption names no arm or study, because the same trial may belong to several.
    name = f"trial {folder.path.parent.name[:12]}, seed {seed}"
    for index, explanation in zip(indices, iterate_explanations(folder, name, indices), strict=True):
        place = folder.path / "explain" / f"test-{index}"
        temporary = temporary_path(folder.path / "explain")
        try:
            write_side_by_side({"": write_explanation(explanation, temporary)}, name, temporary)
            place.parent.mkdir(exist_ok=True)
            os.replace(temporary, place)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        folder.emit("artifact", path=str(place.relative_to(folder.path)))


@check_arguments()
def explain(
    path: str | Path | Mapping[str, Any],
    image: int | str | Path = 0,
    *,
    arm: str | None = None,
    seed: int | None = None,
    target: str | int | None = None,
    out: str | Path = OUT,
) -> Explanation:
    """Return what a trained model attends to in an image, what speaks for a class, and what it predicts, as arrays.

    ``.maps["rollout_class"].values_YX`` and ``.maps["attribution"].values_YX`` have a number for each patch, and
    ``.overlay("attribution")`` is a picture, which a notebook shows.  There are also ``.heads``, ``.distance_LH``,
    ``.norms`` and ``.similarity_YXYX``, and ``.predictions``, the columns of a frame.

    Args:
        path: the study.
        image: index in the test split, as ``3`` or ``test:3``, or a picture's file.
        arm: of the study, by default its baseline.
        seed: of the study, by default the first.
        target: the class whose logit is attributed to patches, by name or index; by default the most probable one.
        out: the output folder.

    Raises:
        UserError: if there is no such trial, image or class, or nothing to draw of its model.
        WeightsError: if it kept no weights.
    """
    plan, store = open_study(path, out=out)
    planned = plan.find(arm, seed)
    example = image if isinstance(image, int) else read_image(image)
    name = f"study {plan.study}, arm {planned.arm}, seed {planned.seed}"
    return next(iterate_explanations(store.folder(planned.trial), name, [example], target))


class Picture(NamedTuple):
    """A picture to explain, upright and in colour."""

    name: str
    pixels: Image.Image


def read_image(name: str | Path) -> int | Picture:
    """Return the index N of the test image ``test:N``, or read a picture.

    Raises:
        UserError: if there is none.
    """
    if test := re.fullmatch(r"test:(-?\d+)", str(name)):
        return int(test[1])
    path = Path(name)
    if not path.is_file():
        hint = nearest(path.name, os.listdir(path.parent) if path.parent.is_dir() else ())
        problem = "this is a folder." if path.is_dir() else f"no such file.{hint}"
        raise UserError(f"image {name}: {problem} Name an image file, or a test image by its index, as test:3")
    with naming_picture(name, "name an image file"), Image.open(path) as picture:
        return Picture(str(name), Decoding(size=(1, 1)).to_upright_rgb(picture))


def iterate_explanations(
    folder: TrialFolder, name: str, images: Sequence[int | Picture], target: str | int | None = None
) -> Iterator[Explanation]:
    """Return explanations of images by the trained model of a trial; each is computed when it is asked for.

    Args:
        folder: of the trial.
        name: of the model, in captions.
        images: indices in the test split, and pictures.
        target: the class whose logit is attributed to patches, by name or index; by default the most probable one.

    Raises:
        UserError: at once, with every mistake.
        WeightsError: if the trial kept no weights.
    """
    if not folder.weights_file.is_file():
        result = folder.result()
        reason = f"it diverged: {result.failure}" if result and result.failure else "it kept no weights (run.keep)"
        raise WeightsError(reason if result else UNTRAINED)
    model, transform = load_model(folder)
    trial, info, mistakes = read_json(folder.spec), transform.input_spec.info, list[str]()
    objective: Any = slot("objective").get(Choice.parse(trial["spec"]["train"]["objective"]).type)
    head: Head = "multilabel" if info.task == "multilabel" else "trained"
    if not objective.labels:
        head = "untrained"
    with collecting_mistakes(mistakes):
        tests = [image for image in images if isinstance(image, int)]
        examples = dict(zip(tests, load_test_images(trial, tests) if tests else (), strict=True))
    with collecting_mistakes(mistakes):
        label = None if target is None else find_class(str(target), info)
    if mistakes:
        raise UserError(*mistakes)

    def explain_one(image: int | Picture) -> Explanation:
        if isinstance(image, int):
            pixels_CHW, truth = examples[image]
            x_BCHW, subject = transform(pixels_CHW), Subject(name, f"test image {image}", *truth)
        else:
            pixels = fit_as_data(image.pixels, trial["spec"]["data"])
            x_BCHW, subject = transform(pixels), Subject(name, image.name)
        image_HWC = transform.denormalize(x_BCHW)[0].permute(1, 2, 0)
        return one_image.explain(model, x_BCHW, image_HWC, info.labels, subject, head=head, target=label)

    return map(explain_one, images)


def fit_as_data(picture: Image.Image, data: Mapping[str, Any]) -> Image.Image | Tensor:
    """Return a picture resized and cropped as the pictures of a data set; as it is if the set has no files of any."""
    dataset = slot("dataset").build(slot("dataset").resolve_choice(data))
    return dataset.decoding(picture) if isinstance(dataset, PictureSet) else picture


def find_class(target: str, info: DataInfo) -> int:
    """Return the index of a class that is given by its name or its index."""
    indices = [*map(str, range(info.classes))]
    for names in (info.labels, indices):
        if target in names:
            return names.index(target)
    names = [name for name in info.labels if name not in indices]  # a number is not near another one
    allowed = list_some([f"0 to {info.classes - 1}", *names], 20)
    raise UserError(f"target {target}: no such class; allowed: {allowed}.{nearest(target, names)}")


def write_comparison_page(
    page: Path,
    title: str,
    question: str,
    explanations: Mapping[str, Mapping[str, Explanation]],
    reasons: Mapping[str, str],
) -> None:
    """Write a page of models beside each other, for each of some images, in the style of reports.

    Its template calls the functions of :mod:`vitlab.explaining.pictures`, and reads the constants of
    :mod:`vitlab.explaining.one_image`.

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
        "one_image": one_image,
        "address": _png_data_url,
        "link": lambda file: quote(file.relative_to(page.parent).as_posix()),
    }
    write_bytes(page, fill_template("explained.html.j2", values).encode())


def _png_data_url(picture: Image.Image) -> str:
    with io.BytesIO() as file:
        picture.save(file, format="png")
        return png_address(file.getvalue())


def load_test_images(trial_json: Mapping[str, Any], indices: Sequence[int]) -> list[tuple[Tensor, Truth]]:
    """Return images of a trial's own test split by index, each uint8 (C, H, W), with the truth.

    Args:
        trial_json: the content of the trial's ``spec.json``.
        indices: indices, from 0.

    Raises:
        UserError: if the split has no such image.
    """
    prepared = prepare(slot("dataset").resolve_choice(trial_json["spec"]["data"]), trial_json["seeds"])
    subset, names = prepared.test, prepared.info.labels
    if beyond := [str(index) for index in indices if not 0 <= index < len(subset)]:
        raise UserError(f"there is no test image {', '.join(beyond)}: the split has {len(subset)}, counted from 0")
    position_N = torch.tensor(list(indices))
    y_N = subset.y_N[position_N]
    return [(image_CHW, _make_truth(y, names)) for image_CHW, y in zip(subset.at(position_N), y_N, strict=True)]


def _make_truth(y: Tensor, names: Sequence[str]) -> Truth:
    if y.ndim == 2:
        return None, y.long().where(y != VOID, IGNORED).numpy()
    classes = y.nonzero()[:, 0].tolist() if y.ndim else [int(y)]
    return ", ".join(names[index] if names else str(index) for index in classes) or "none", None
