"""``vitlab export``: write a trained model as ONNX or for ``torch.export``, with a card of its study."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitlab.cli.completion import complete_arm
from vitlab.cli.options import out_option, study_argument
from vitlab.store.files import folder_name

if TYPE_CHECKING:
    from vitlab.plan.values import Plan
    from vitlab.report import Report
    from vitlab.training.artifacts import InputSpec


@click.command()
@study_argument
@click.option("--arm", required=True, shell_complete=complete_arm, help="Arm whose model is exported.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the study.")
@click.option("--format", "form", type=click.Choice(["onnx", "torch"]), default="onnx", show_default=True)
@click.option(
    "--to",
    "target",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("exported"),
    show_default=True,
    help="Folder for the files, one folder for each study, arm and seed.",
)
@out_option
def command(study: Path, arm: str, seed: int, form: Any, target: Path, out: Path) -> None:
    """Write the model of an arm of STUDY, which was run before, for use without vitlab, and a card beside it.

    The file takes pixels in [0, 1], as float32 of shape (B, C, H, W) in batches of any size, and returns logits. Its
    outputs are compared with the model's before it is kept. The card, README.md, says what the study compared, with
    which seeds, and the verdict.
    """
    from vitlab.report.api import open_study

    plan, store = open_study(study, out=out)
    trial = plan.find(arm, seed)
    click.echo("importing PyTorch", err=True)
    from vitlab.report import collect
    from vitlab.runner.models import load_model
    from vitlab.weights.export import SUFFIX, export

    model, transform = load_model(store.trial(trial.key, trial.code))
    sees = transform.input_spec
    folder = target / folder_name(plan.study) / folder_name(f"{arm}, seed {seed}")
    file = folder / f"model{SUFFIX[form]}"
    difference = export(model, sees.info, sees.mean, sees.std, file, form)
    count = sum(parameter.numel() for parameter in model.parameters())
    text = card(collect(plan, store).report, plan, f"{arm}, seed {seed}", sees, file.name, count, difference)
    (folder / "README.md").write_text(text, encoding="utf-8")
    for written in (file, folder / "README.md"):
        click.echo(str(written))


def card(report: Report, plan: Plan, name: str, sees: InputSpec, file: str, parameters: int, difference: float) -> str:
    """Return the model card in Markdown.

    Args:
        report: of the study.
        plan: of the study.
        name: arm and seed of the model.
        sees: the input of the model.
        file: name of the exported file.
        parameters: their number.
        difference: largest difference of the file's logits from the model's, relative to the largest logit.
    """
    from vitlab.report.escaping import markdown

    info, (height, width) = sees.info, sees.info.image
    classes = f"{info.classes} classes" + (f": {', '.join(info.labels)}" if info.labels else "")
    arms = [arm.name for arm in plan.arms if not arm.skip]
    seeds = sorted({trial.seed for trial in plan.trials})
    lines = [
        "---",
        "tags: [image-classification, vitlab]",
        "---",
        "",
        f"# {markdown(report.study)}: {markdown(name)}",
        "",
        f"- `{file}`: pixels in [0, 1], float32, (batch, {info.channels}, {height}, {width}), to logits (batch, "
        f"{info.classes}); the normalisation is inside",
        f"- {markdown(classes)}",
        f"- {parameters:,} parameters",
        f"- its logits on random pixels differ from the trained model's by at most {difference:.1e} of the largest",
        "",
        "## What was compared",
        "",
        *([markdown(report.question), ""] if report.question else []),
        f"- arms: {markdown(', '.join(arms))}",
        f"- seeds: {', '.join(map(str, seeds))}",
        f"- metric: {markdown(report.analysis.metric)}",
        "",
        "## Verdict",
        "",
        *([markdown(report.overview), ""] if report.overview else []),
        *(f"- {markdown(sentence)}" for sentence in report.answers),
        "",
        "This is one model of one seed; the verdict is about the means of the arms.",
    ]
    if report.notes:
        lines += ["", "## Notes", "", *(f"- {markdown(note)}" for note in report.notes)]
    if report.provenance:
        lines += ["", "## How it was made", "", *(f"- {head}: {markdown(text)}" for head, text in report.provenance)]
    return "\n".join(lines) + "\n"
