"""``vitlab explain``, what trained models look at, and ``vitlab export``, their files for other programs."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitlab.cli import say
from vitlab.cli.completion import complete_arm, complete_study
from vitlab.cli.options import FOLDER, PATH, out_option, study_argument
from vitlab.errors import UserError, VitlabError
from vitlab.store.files import folder_name, read_json
from vitlab.store.folders import TrialFolder

if TYPE_CHECKING:
    from vitlab.planning.values import Plan
    from vitlab.training.artifacts import InputSpec


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
    trials: list[tuple[str, str, str, TrialFolder]] = []  # names in lines and under pictures, folder of pictures, trial
    if is_trial:
        name = f"trial {study.parent.name[:12]}"
        trials.append((name, name, folder_name(name), TrialFolder(study)))
    elif study.is_file() and study.suffix not in (".yaml", ".yml"):
        raise UserError(f"{study}: name a study, such as one whose init_from is a file of weights, or a trial's folder")
    else:
        from vitlab.report.api import open_study

        plan, store = open_study(study, out=out)
        heading = plan.study
        target /= folder_name(heading)
        for arm in arms or [arm.name for arm in plan.arms if not arm.skip]:
            name, folder = f"{arm}, seed {seed}", store.folder(plan.find(arm, seed))
            trials.append((name, f"study {heading}, arm {name}", arm_folder(plan, arm, seed), folder))

    from vitlab.driver.explanations import draw_image, objective_without_labels, test_examples
    from vitlab.explain.one_image import Explanation, Subject, compare, write_index
    from vitlab.runner.models import load_vit

    pictures = {image: _read_image(image) for image in images if not re.fullmatch(r"test:\d+", image)}
    folders = {image: target / image.replace(":", "-") for image in images}
    folders |= {image: target / _name_with_digest(Path(image).stem, image) for image in pictures}
    explained: dict[str, dict[str, Explanation]] = {image: {} for image in images}
    lines, reasons = list[str](), list[str]()
    for name, title, place, folder in trials:
        try:
            model, transform = load_vit(folder)
            spec = read_json(folder.spec)
            if objective := objective_without_labels(spec):
                say(f"{name} is explained without predictions: objective '{objective}' trains none")
            for image in images:
                say(f"drawing {name}, {image}")
                picture, caption, label = pictures.get(image), Path(image).name, None
                if picture is None:
                    index = image.partition(":")[2]
                    [(picture, label)] = test_examples(spec, [int(index)])
                    caption = f"test image {index}"
                subject = Subject(title, caption, label)
                explained[image][name] = draw_image(model, transform, spec, picture, subject, folders[image] / place)
                lines += map(str, explained[image][name].files)
        except VitlabError as error:
            if arms or is_trial:
                raise
            say(f"{name} is not explained: {error}")
            reasons.append(str(error))
    for image, explanations in explained.items():
        if not explanations:
            raise UserError(f"no arm of {study} can be explained: {'; '.join(dict.fromkeys(reasons))}")
        if len(explanations) > 1:
            say(f"drawing all models beside each other, {image}")
        lines += map(str, compare(explanations, heading, folders[image]))
    return [*lines, str(write_index(target, heading))]


def _read_image(image: str) -> Any:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(image) as picture:
            return picture.convert(picture.mode if picture.mode == "L" else "RGB")
    except UnidentifiedImageError:
        raise UserError(f"--image {image} is not a picture; give an image file, such as PNG or JPEG") from None
    except OSError as error:
        raise UserError(f"--image {image} cannot be read: {error.strerror or error}") from None


def _name_with_digest(name: str, source: str) -> str:
    """Return the name of a folder with a digest of its source, such as ``cat-1f0c2a9b`` of a file ``cat.jpg``."""
    return f"{folder_name(name)}-{hashlib.blake2b(source.encode(), digest_size=4).hexdigest()}"


def arm_folder(plan: Plan, arm: str, seed: int) -> str:
    """Return the name of the folder of an arm's pictures or exported files."""
    name = f"{arm}-s{seed}"
    # Disks that ignore case have one folder for names that differ in case alone.
    is_unique = sum(other.name.casefold() == arm.casefold() for other in plan.arms) == 1
    return folder_name(name) if is_unique else _name_with_digest(name, name)


@click.command()
@study_argument
@click.option("--arm", required=True, shell_complete=complete_arm, help="Arm whose model is exported.")
@click.option("--seed", type=int, default=0, help="Seed of the study.")
@click.option("--format", "form", type=click.Choice(["onnx", "torch"]), default="onnx")
@click.option(
    "--to",
    "target",
    type=FOLDER,
    default=Path("exported"),
    help="Folder for the files, one folder for each study, arm and seed.",
)
@out_option
def export_command(study: Path, arm: str, seed: int, form: Any, target: Path, out: Path) -> None:
    """Write the model of an arm of STUDY, which was run before, for use without vitlab, and a card beside it.

    The file takes pixels in [0, 1], as float32 of shape (B, C, H, W) in batches of any size, and returns logits. Its
    outputs are compared with the model's before it is kept. The card, README.md, says what the study compared, with
    which seeds, and the verdict. 'hf upload ORG/NAME FOLDER' (of huggingface_hub) sends its folder to the Hugging Face
    hub.
    """
    from vitlab.report.api import open_study

    if (address := target.as_posix()).startswith("hub:"):
        repository = address.removeprefix("hub:")
        raise UserError(
            f"--to {address}: vitlab uploads nothing. Export to a folder, and type 'hf upload {repository} FOLDER' "
            "with the folder of the files that are printed; 'pip install huggingface_hub' brings hf, and 'hf auth "
            "login' asks for your token"
        )
    plan, store = open_study(study, out=out)
    trial = plan.find(arm, seed)
    say("importing PyTorch")
    from vitlab.report import render
    from vitlab.runner.models import load_model
    from vitlab.weights.export import SUFFIX, export

    model, transform = load_model(store.folder(trial))
    sees = transform.input_spec
    folder = target / folder_name(plan.study) / arm_folder(plan, arm, seed)
    file = folder / f"model{SUFFIX[form]}"
    difference = export(model, sees.info, sees.mean, sees.std, file, form)
    name = f"study {plan.study}, arm {arm}, seed {seed}"
    text = model_card(name, sees, file.name, difference, str(render(plan, store, "md")))
    (folder / "README.md").write_text(text, encoding="utf-8")
    for path in (file, folder / "README.md"):
        click.echo(str(path))


def model_card(name: str, sees: InputSpec, file: str, difference: float, report: str) -> str:
    """Return the model card in Markdown; ``difference`` is relative to the largest logit."""
    from vitlab.report.formats import escape_markdown

    info = sees.info
    shape = ", ".join(map(str, (info.channels, *info.image)))
    return f"""---
tags: [image-classification, vitlab]
---

`{file}` holds one model, {escape_markdown(name)}; the verdict below is about the means of arms over seeds.
It takes pixels in [0, 1], float32, (batch, {shape}), and returns logits (batch, {info.classes}); the normalisation is
inside. On random pixels its logits differ from the trained model's by at most {difference:.1e} of the largest.

Classes: {escape_markdown(", ".join(info.labels)) or info.classes}

{report}"""
