"""Explanations of trained models: pictures of what they attend to, and of what speaks for a class.

They are computed from the kept weights, independently of training: old trials can be explained at any time, and
changes to the pictures require no retraining.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image
from torch import Tensor

from vitlab.data.datasets.pictures import Decoding, PictureSet, naming_picture
from vitlab.data.pixels import IGNORED, VOID
from vitlab.data.prepare import prepare
from vitlab.errors import (
    UserError,
    VitlabError,
    WeightsError,
    closest,
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
from vitlab.spec.mistakes import value_in_words
from vitlab.store.files import read_json, temporary_path, write_bytes, write_json
from vitlab.store.folders import OUT, Store, TrialFolder
from vitlab.store.locks import Busy

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
                say(f"drawing maps of {arm} for {format_count(len(missing), 'test image')}")
                write_explanations_to_trial(folder, planned.trial.seeds["init"], missing)
            continue
        except Busy:
            reasons[arm] = "another process is writing its trial; run again to explain it"
        except VitlabError as error:
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
    explanations = iterate_explanations(folder, name, [f"test:{index}" for index in indices])
    for index, explanation in zip(indices, explanations, strict=True):
        place = folder.path / "explain" / f"test-{index}"
        temporary = temporary_path(folder.path / "explain")
        try:
            write_side_by_side({"": write_explanation(explanation, temporary)}, name, temporary)
            place.parent.mkdir(exist_ok=True)
            os.replace(temporary, place)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        folder.emit("artifact", path=str(place.relative_to(folder.path)))


@check_arguments(unchecked=["image"])
def explain(
    path: str | Path | Mapping[str, Any],
    image: int | str | Path | Image.Image = 0,
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
        image: a test image by its ``id`` in :func:`predictions`, as ``3`` or ``test:3``; one of the validation split,
            as ``val:3``; a picture's file; or a picture of Pillow, such as ``PIL.Image.fromarray(array)``.
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
    example = read_image(f"test:{image}" if isinstance(image, int | Integral) else image)
    name = f"study {plan.study}, arm {planned.arm}, seed {planned.seed}"
    return next(iterate_explanations(store.folder(planned.trial), name, [example], target))


class Picture(NamedTuple):
    """A picture to explain, upright and in colour."""

    name: str
    pixels: Image.Image


def read_image(image: str | Path | Image.Image) -> str | Picture:
    """Return the name of an image of a split, ``test:N`` or ``val:N``, or read a picture.

    Raises:
        UserError: if there is none.
    """
    to_rgb = Decoding(size=(1, 1)).to_upright_rgb
    if isinstance(image, Image.Image):
        with naming_picture("image", "name an image file"):
            return Picture("picture", to_rgb(image.copy()))
    if not isinstance(image, str | Path):
        raise UserError(
            "vitlab.explain: image must be an index, an image of the data, as val:3, a file, or a picture of Pillow, "
            f"such as PIL.Image.fromarray(array); found {value_in_words(image)}"
        )
    name = str(image)
    if re.fullmatch(r"(test|val):-?\d+", name):
        return name
    path = Path(name)
    if not path.is_file():
        near = closest(path.name, [file.name for file in path.parent.glob("*")])
        hint = f" Did you mean '{path.with_name(near)}'?" if near else ""
        problem = "this is a folder." if path.is_dir() else f"no such file.{hint}"
        raise UserError(f"image {name}: {problem} Name an image file, or an image of the data, as test:3 or val:3")
    remedy = "name an image file, as PIL.Image.fromarray(array).save('a.png') writes it of an array"
    with naming_picture(name, remedy), Image.open(path) as picture:
        return Picture(name, to_rgb(picture))


def iterate_explanations(
    folder: TrialFolder, name: str, images: Sequence[str | Picture], target: str | int | None = None
) -> Iterator[Explanation]:
    """Return explanations of images by the trained model of a trial; each is computed when it is asked for.

    Args:
        folder: of the trial.
        name: of the model, in captions.
        images: names of images of the trial's data, as ``test:3``, and pictures.
        target: the class whose logit is attributed to patches, by name or index; by default the most probable one.

    Raises:
        UserError: at once, with every mistake.
        WeightsError: if the trial kept no weights.
    """
    if not folder.weights_file.is_file():
        result = folder.result()
        unkept = "it kept no weights (run.keep); train it anew in another folder: --set run.keep=last --out FOLDER"
        reason = f"it diverged: {result.failure}" if result and result.failure else unkept
        raise WeightsError(reason if result else UNTRAINED)
    model, transform = load_model(folder)
    trial, info, mistakes = read_json(folder.spec), transform.input_spec.info, list[str]()
    objective: Any = slot("objective").get(Choice.parse(trial["spec"]["train"]["objective"]).type)
    head: Head = "multilabel" if info.task == "multilabel" else "trained"
    if not objective.labels:
        head = "untrained"
    examples = list[tuple[Tensor, Subject]]()
    for image in images:
        with collecting_mistakes(mistakes):
            pixels, subject = (
                load_split_image(trial, image, name)
                if isinstance(image, str)
                else (fit_as_data(image.pixels, trial["spec"]["data"]), Subject(name, image.name))
            )
            examples.append((transform(pixels), subject))
    with collecting_mistakes(mistakes):
        label = None if target is None else find_class(str(target), info)
    if mistakes:
        raise UserError(*mistakes)
    return (
        one_image.explain(
            model,
            x_BCHW,
            transform.denormalize(x_BCHW)[0].permute(1, 2, 0),
            info.labels,
            subject,
            head=head,
            target=label,
        )
        for x_BCHW, subject in examples
    )


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
    earlier: str,
) -> None:
    """Write a page of models beside each other, for each of some images, in the style of reports.

    Its template calls the functions of :mod:`vitlab.explaining.pictures`, and reads the constants of
    :mod:`vitlab.explaining.one_image`.

    Args:
        page: the file, which contains all pictures.
        title: name of the study or the trial.
        question: of the study; empty for a trial.
        explanations: image, as it was named, to its explanations by name of the model.
        reasons: name to the reason of every model that is not explained.
        earlier: folders beside the page with files of earlier calls; empty if there are none.
    """
    values = {
        "title": title,
        "question": question,
        "explanations": explanations,
        "reasons": reasons,
        "earlier": earlier,
        "pictures": pictures,
        "one_image": one_image,
        "png_address": png_address,
    }
    write_bytes(page, fill_template("explained.html.j2", values).encode())


def load_split_image(trial_json: Mapping[str, Any], image: str, model: str) -> tuple[Tensor, Subject]:
    """Return an image of a trial's own data, uint8 (C, H, W), and the subject of its explanation, with the truth.

    Args:
        trial_json: the content of the trial's ``spec.json``.
        image: split and index in the official split, as ``test:3``.
        model: name of the model, in captions.

    Raises:
        UserError: if the split has no such image.
    """
    prepared = prepare(slot("dataset").resolve_choice(trial_json["spec"]["data"]), trial_json["seeds"])
    split, index = image.split(":")
    subset, names, title = getattr(prepared, split), prepared.info.labels, f"{split} image {index}"
    position_N = (subset.id_N == int(index)).nonzero()[:, 0]
    if not len(position_N):
        raise UserError(
            f"there is no {title}: the split has {len(subset)}, with ids {list_some(map(str, subset.id_N.tolist()))}"
        )
    image_CHW, y = subset.at(position_N)[0], subset.y_N[position_N][0]
    if y.ndim == 2:
        return image_CHW, Subject(model, title, label_HW=y.long().where(y != VOID, IGNORED).numpy())
    classes = y.nonzero()[:, 0].tolist() if y.ndim else [int(y)]
    truth = ", ".join(names[index] if names else str(index) for index in classes) or "none"
    return image_CHW, Subject(model, title, truth)
