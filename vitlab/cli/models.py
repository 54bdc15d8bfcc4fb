"""``vitlab explain``, what trained models look at, and ``vitlab export``, their files for other programs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from vitlab.cli import print_json, say, wants_json
from vitlab.cli.completion import complete_arm, complete_study
from vitlab.cli.options import FOLDER, PATH, loading_plugin_option, out_option, study_argument
from vitlab.errors import UserError, VitlabError, collecting_mistakes, list_some
from vitlab.store.files import MAX_NAME, to_safe_name
from vitlab.store.folders import TrialFolder

if TYPE_CHECKING:
    from vitlab.models.trained import InputSpec
    from vitlab.planning.values import Planned


@click.command()
@click.argument("study", metavar="STUDY|TRIAL", type=PATH, shell_complete=complete_study)
@click.option(
    "--image",
    "images",
    multiple=True,
    default=["test:0"],
    help="A picture, or test:17 for an image of the trial's own test split by its id in vitlab.predictions, from 0, or "
    "val:17 of its validation split. May be given several times.",
)
@click.option(
    "--to",
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
@click.option(
    "--seed",
    "seeds",
    type=int,
    multiple=True,
    help="Seed of the study. May be given several times.  [default: the first]",
)
@click.option(
    "--target",
    metavar="CLASS",
    help="Class whose logit is attributed to patches, by name or index.  [default: the most probable one]",
)
@click.option(
    "--scale",
    type=click.Choice(["shared", "own"]),
    default="shared",
    help="Scale of colours and axes: one for all models of an image, by kind of map, or an own one for each map.",
    show_default=True,
)
@loading_plugin_option
@out_option
def explain_command(
    study: Path,
    images: tuple[str, ...],
    to: Path,
    arms: tuple[str, ...],
    seeds: tuple[int, ...],
    target: str | None,
    scale: str,
    out: Path,
) -> None:
    """Show what the models of a study attend to in an image, what speaks for a class, and what they predict.

    STUDY is a study that has been run (its file, name or folder; see --arm and --seed), and TRIAL the folder of a
    trial. Prints each prediction, and the address of a page with all models beside each other; the folder of the page
    has every picture as a file, and the numbers behind them.
    """
    say(f"reading {study}")  # importing PyTorch takes seconds
    from vitlab.driver.explanations import Picture, iterate_explanations, read_image, write_comparison_page
    from vitlab.explaining.one_image import Explanation, common_scales, write_explanation, write_side_by_side

    mistakes, models = list[str](), list[TrainedModel]()
    shown: dict[str, str | Picture] = {}
    for image in images:
        with collecting_mistakes(mistakes):
            shown[image] = read_image(image)
    title, question, trial = study.name, "", TrialFolder(study)
    if is_trial := trial.spec.is_file():
        title = f"trial {study.resolve().parent.name[:12]}"
        models.append(TrainedModel(title, "model", trial))
        if arms or seeds:
            mistakes.append(f"--arm and --seed choose trials of a study, and {study} is one trial; leave them out")
    else:
        with collecting_mistakes(mistakes):
            title, question, models = _find_models(study, out, arms, seeds, mistakes)

    to /= to_safe_name(title.replace(" ", "-"))
    explanations: dict[str, dict[str, Explanation]] = {image: {} for image in shown}  #: by image and model
    reasons, no_attention = dict[str, str](), dict[str, str]()
    for name, _, folder in models:
        try:
            explained = iterate_explanations(
                folder, name if is_trial else f"study {title}, arm {name}", list(shown.values()), target
            )
            if mistakes:  # the models are only searched for more of them
                continue
            for image in shown:
                say(f"explaining {name}, {image}")
                explanations[image][name] = each = next(explained)
                if each.no_attention:
                    no_attention[name] = each.no_attention
        except VitlabError as error:
            reasons[name] = str(error)
    if mistakes or not any(explanations.values()) or (reasons and arms):
        models_by_line = defaultdict[str, list[str]](list)
        for name, reason in reasons.items():
            for line in reason.splitlines():
                models_by_line[line].append(name)
        texts = (
            f"{'every model' if len(names) == len(models) > 1 else '; '.join(names)}: {line}"
            for line, names in models_by_line.items()
        )
        # A seed that the study lacks is one mistake, however many arms there are.
        raise UserError(*dict.fromkeys(mistakes), *texts)
    for name, reason in reasons.items():
        say(f"{name} is not explained: {reason}")
    for name, reason in no_attention.items():
        say(f"{name} has no map of attention: {reason}")
    rows, maps, files = list[dict[str, Any]](), list[dict[str, Any]](), list[Path]()
    folders = name_folders(explanations)
    for image, by_model in explanations.items():
        say(f"drawing {image}")
        of_image = to / folders[image]
        scales = {} if scale == "own" else common_scales(by_model.values())
        for name, place, _ in models:
            if name not in by_model:
                continue
            each = by_model[name] = write_explanation(by_model[name], of_image / place, scales)
            predicted, share = each.prediction_and_probability
            if each.chance_if_close is not None:
                say(f"{name}, {image}: {each.sentence}")
            model_and_image = {"model": name, "image": image}
            answer = {"true": each.subject.class_name, "predicted": predicted, "probability": share}
            rows.append(model_and_image | answer)
            maps += [{**model_and_image, "map": key, **one.numbers} for key, one in each.maps.items()]
            files += each.files
        files += write_side_by_side(by_model, title if is_trial else f"study {title}", of_image)
    earlier_folders = {str(file.parent.relative_to(to)) for file in to.rglob("*.csv") if file not in files}
    if earlier := list_some(sorted(earlier_folders)):
        say(f"{to} has files of earlier calls, too, which its index.html does not show: {earlier}")
    page = to / "index.html"
    write_comparison_page(page, title, question, explanations, reasons, earlier)
    if wants_json():
        print_json(
            {
                "page": page,
                "predictions": rows,
                "maps": maps,
                "files": files,
                "not_explained": reasons,
                "no_attention": no_attention,
            }
        )
    else:
        click.echo(f"{_format_predictions(rows)}{page}")


class TrainedModel(NamedTuple):
    """A trained model to explain."""

    name: str  #: such as "baseline, seed 0"
    place: str  #: name of the folder of its pictures
    folder: TrialFolder


def _find_models(
    study: Path, out: Path, arms: Sequence[str], seeds: Sequence[int | None], mistakes: list[str]
) -> tuple[str, str, list[TrainedModel]]:
    """Return the name and the question of a study, and the models of some of its arms, or of all that run.

    They are of the first seed if no seed is named, and a baseline comes before the arms that are compared with it.  If
    there is none of them, the baseline's is returned, so that other mistakes are found by it.
    """
    from vitlab.report.api import open_study

    if study.is_file() and study.suffix not in (".yaml", ".yml"):
        raise UserError(f"{study}: name a study, such as one whose init_from is a file of weights, or a trial's folder")
    if folders_of_trial := [str(file.parent) for file in study.glob("*/spec.json")]:
        raise UserError(f"{study}: name a version of the trial's code: {list_some(folders_of_trial)}")
    plan, store = open_study(study, out=out)
    names = [arm.name for arm in plan.arms]
    rank = {arm.name: (names.index(arm.baseline or arm.name), arm.baseline is not None) for arm in plan.arms}
    trials: list[Planned] = []
    for name in dict.fromkeys(arms) or [arm.name for arm in plan.arms if not arm.skip]:
        for seed in seeds or [None]:
            with collecting_mistakes(mistakes):
                trials.append(plan.find(name, seed))
    trials.sort(key=lambda each: rank[each.arm])
    folders = name_folders(names)
    models = [
        TrainedModel(f"{each.arm}, seed {each.seed}", f"{folders[each.arm]}-s{each.seed}", store.folder(each.trial))
        for each in trials or [plan.find()]
    ]
    return plan.study, plan.question, models


def _format_predictions(rows: Sequence[Mapping[str, Any]]) -> str:
    from vitlab.explaining.pictures import percent
    from vitlab.report.formats import parts_to_text
    from vitlab.report.phrasing import Columns

    column = Columns(rows)
    texts = [column.text_column(title) for title in ("model", "image", "true", "predicted")]
    share = column("probability", lambda row: "" if row["probability"] is None else percent(row["probability"]), rank=1)
    return parts_to_text([*texts, share])


def name_folders(names: Iterable[str]) -> dict[str, str]:
    """Return a folder's name for each name: words joined by hyphens, and a number where two would be alike."""
    folders: dict[str, str] = {}
    for name in names:
        short = re.sub(r"[^\w=]+", "-", name)[-MAX_NAME:].strip("-")
        # Disks that ignore case have one folder for names that differ in case alone.
        alike = sum(each.casefold().partition(".")[0] == short.casefold() for each in folders.values())
        folders[name] = f"{short}.{alike}" if alike else short
    return folders


@click.command()
@study_argument
@click.option("--arm", required=True, shell_complete=complete_arm, help="Arm whose model is exported.")
@click.option("--seed", type=int, help="Seed of the study.  [default: the first]")
@click.option("--format", "form", type=click.Choice(["onnx", "torch"]), default="onnx")
@click.option(
    "--to",
    "target",
    type=FOLDER,
    default=Path("exported"),
    help="Folder for the files, one folder for each study, arm and seed.",
)
@loading_plugin_option
@out_option
def export_command(study: Path, arm: str, seed: int | None, form: Any, target: Path, out: Path) -> None:
    """Write the model of an arm of STUDY, which was run before, for use without vitlab, and a card beside it.

    The file takes pixels in [0, 1], as float32 of shape (B, C, H, W) in batches of any size, and returns logits. Its
    outputs are compared with the model's before it is kept. The card, README.md, says what the study compared, with
    which seeds, and the verdict. 'hf upload ORG/NAME FOLDER' (of huggingface_hub) sends its folder to the Hugging Face
    hub.
    """
    from vitlab.report.api import open_study

    if str(target).startswith("hub:"):
        raise UserError(
            f"--to {target}: vitlab uploads nothing; name a folder, which 'hf upload ORG/NAME FOLDER' sends"
        )
    plan, store = open_study(study, out=out)
    planned = plan.find(arm, seed)
    name = f"study {plan.study}@{plan.version[:8]}, arm {planned.arm}, seed {planned.seed}"
    say(f"importing PyTorch, to export {name}")
    from vitlab.report import render
    from vitlab.runner.models import load_model
    from vitlab.weights.export import SUFFIX, export_and_verify

    model, transform = load_model(store.folder(planned.trial))
    sees = transform.input_spec
    folders = name_folders(other.name for other in plan.arms)
    folder = target / to_safe_name(plan.study) / f"{folders[arm]}-s{planned.seed}"
    file = folder / f"model{SUFFIX[form]}"
    difference = export_and_verify(model, sees.info, sees.mean, sees.std, file, form)
    text = model_card(name, sees, file, difference, str(render(plan, store, "md")))
    (folder / "README.md").write_text(text, encoding="utf-8")
    for path in (file, folder / "README.md"):
        click.echo(str(path))


def model_card(name: str, input_spec: InputSpec, file: Path, difference: float, report: str) -> str:
    """Return the model card in Markdown; ``difference`` is relative to the largest logit."""
    from vitlab.report.formats import escape_markdown

    info = input_spec.info
    shape = ", ".join(map(str, (info.channels, *info.image)))
    others = [f"`{other.name}` is of an earlier export.\n" for other in file.parent.glob("model.*") if other != file]
    return f"""---
tags: [image-classification, vitlab]
---

`{file.name}` holds one model, {escape_markdown(name)}; the verdict below is about the means of arms over seeds.
It takes pixels in [0, 1], float32, (batch, {shape}), and returns logits (batch, {info.classes}); the normalisation is
inside. On random pixels its logits differ from the trained model's by at most {difference:.1e} of the largest.
{"".join(others)}
Classes: {escape_markdown(", ".join(info.labels)) or info.classes}

{report}"""
