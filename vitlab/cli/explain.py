"""``vitlab explain``: what trained models look at in an image."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitlab.cli import say
from vitlab.cli.completion import complete_arm, complete_study
from vitlab.cli.options import FOLDER, PATH, out_option
from vitlab.errors import UserError, VitlabError
from vitlab.store.files import folder_name, read_json

if TYPE_CHECKING:
    from vitlab.explain.one_image import Label
    from vitlab.models.vit import ViT
    from vitlab.planning.values import Plan
    from vitlab.store.folders import Store
    from vitlab.training.artifacts import Transform


@click.command()
@click.argument("study", metavar="STUDY|TRIAL", type=PATH, shell_complete=complete_study)
@click.option(
    "--image",
    "images",
    multiple=True,
    default=["test:0"],
    help="A picture, or test:17 for an image of the trial's own test split. May be given several times.",
)
@click.option(
    "--to",
    "target",
    type=FOLDER,
    default=Path("explained"),
    help="Folder for pictures and numbers, one folder each for study, image and arm.",
)
@click.option(
    "--arm",
    "arms",
    multiple=True,
    shell_complete=complete_arm,
    help="Arm of the study. May be given several times.  [default: all]",
)
@click.option("--seed", type=int, default=0, help="Seed of the study.")
@out_option
def explain_command(
    study: Path, images: tuple[str, ...], target: Path, arms: tuple[str, ...], seed: int, out: Path
) -> list[str]:
    """Write pictures of what the models of a study attend to in an image, and the numbers behind them.

    STUDY is a study that has been run (its file, name or folder; see --arm and --seed), and TRIAL the folder of a
    trial. Of a study, all arms are drawn beside each other as well. index.html shows all pictures of the folder.
    """
    say(f"reading {study}")  # importing PyTorch takes seconds
    heading, is_trial = study.name, any((study / name).is_file() for name in ("spec.json", "result.json"))
    if is_trial:
        models = iter([_open_trial(study)])
    elif study.is_file() and study.suffix not in (".yaml", ".yml"):
        raise UserError(f"{study}: name a study, such as one whose init_from is a file of weights, or a trial's folder")
    else:
        from vitlab.report.api import open_study

        plan, store = open_study(study, out=out)
        heading = plan.study
        target /= folder_name(heading)
        models = _open_arms(plan, store, arms, seed)

    from vitlab.driver.explanations import draw_image, objective_without_labels
    from vitlab.explain.one_image import Explanation, Subject, compare, write_index

    lines = list[str]()
    explained: dict[str, dict[str, Explanation]] = {image: {} for image in images}
    folders = {image: target / _folder_of(image) for image in images}
    for name, title, place, model, transform, trial in models:
        if objective := objective_without_labels(trial):
            say(f"{name} is explained without predictions: objective '{objective}' trains none")
        for image in images:
            say(f"drawing {name}, {image}")
            picture, caption, label = _image(image, trial)
            subject, folder = Subject(title, caption, label), folders[image] / place
            try:
                explanation = draw_image(model, transform, trial, picture, subject, folder)
            except UserError as error:
                if arms or is_trial:
                    raise
                say(f"{name} is not explained: {error}")
                break
            explained[image][name] = explanation
            lines += map(str, explanation.files)
    for image, explanations in explained.items():
        if not explanations:
            raise UserError(f"{study} has no arm with attention to explain; choose a study of a ViT")
        if len(explanations) > 1:
            say(f"drawing all models beside each other, {image}")
        lines += map(str, compare(explanations, heading, folders[image]))
    return [*lines, str(write_index(target, heading))]


def _folder_of(image: str) -> str:
    """Return the name of an image's folder: ``test-3``, or ``cat-1f0c2a9b`` for the file ``cat.jpg`` of some folder."""
    if image.startswith("test:"):
        return image.replace(":", "-")
    return f"{folder_name(Path(image).stem)}-{hashlib.blake2b(image.encode(), digest_size=4).hexdigest()}"


OpenedModel = tuple[str, str, str, "ViT", "Transform", dict[str, Any]]
"""Name, title, folder, model, transform from images to its input, and the content of the trial's spec.json."""


def _open_arms(plan: Plan, store: Store, arms: Sequence[str], seed: int) -> Iterator[OpenedModel]:
    """Yield the model of each arm with a seed; without ``arms``, those of all that can be explained.

    Raises:
        UserError: if the study has no such trial, or one of ``arms`` cannot be explained.
    """
    selected = arms or [arm.name for arm in plan.arms if not arm.skip]
    for arm, trial in [(arm, plan.find(arm, seed)) for arm in selected]:
        try:
            *_, model, transform, spec = _open_trial(store.folder(trial).path)
        except VitlabError as error:
            if arms:
                raise
            say(f"{arm} is not explained: {error}")
            continue
        name = f"{arm}, seed {seed}"
        yield name, f"study {plan.study}, arm {name}", folder_name(f"{arm}-s{seed}"), model, transform, spec


def _open_trial(path: Path) -> OpenedModel:
    from vitlab.runner.models import load_vit
    from vitlab.store.folders import TrialFolder

    folder = TrialFolder(path)
    name = f"trial {path.parent.name[:12]}"
    return name, name, folder_name(name), *load_vit(folder), read_json(folder.spec)


def _image(image: str, trial: dict[str, Any]) -> tuple[Any, str, Label]:
    """Return an image, how pictures name it, and its true label where that is known."""
    split, _, index = image.partition(":")
    if split == "test" and index.isdecimal():
        from vitlab.driver.explanations import test_examples

        [(pixels_CHW, label)] = test_examples(trial, [int(index)])
        return pixels_CHW, f"test image {index}", label
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(image) as picture:
            return picture.convert(picture.mode if picture.mode == "L" else "RGB"), Path(image).name, None
    except UnidentifiedImageError:
        raise UserError(f"--image {image} is not a picture; give an image file, such as PNG or JPEG") from None
    except OSError as error:
        raise UserError(f"--image {image} cannot be read: {error.strerror or error}") from None
