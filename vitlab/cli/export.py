"""``vitlab export``: write a trained model as ONNX or for ``torch.export``, with a card of its study."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vitlab.cli import say
from vitlab.cli.completion import complete_arm
from vitlab.cli.options import FOLDER, out_option, study_argument
from vitlab.errors import UserError
from vitlab.store.files import folder_name

if TYPE_CHECKING:
    from vitlab.training.artifacts import InputSpec


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

    if repository := target.as_posix().partition("hub:")[2]:
        raise UserError(
            f"--to {target}: vitlab uploads nothing. Export to a folder, and type 'hf upload {repository} FOLDER' with "
            "the folder of the files that are printed; 'pip install huggingface_hub' brings hf, and 'hf auth login' "
            "asks for your token"
        )
    plan, store = open_study(study, out=out)
    trial = plan.find(arm, seed)
    say("importing PyTorch")
    from vitlab.report import render
    from vitlab.runner.models import load_model
    from vitlab.weights.export import SUFFIX, export

    model, transform = load_model(store.folder(trial))
    sees = transform.input_spec
    folder = target / folder_name(plan.study) / folder_name(f"{arm}-s{seed}")
    file = folder / f"model{SUFFIX[form]}"
    difference = export(model, sees.info, sees.mean, sees.std, file, form)
    name = f"study {plan.study}, arm {arm}, seed {seed}"
    text = card(name, sees, file.name, difference, str(render(plan, store, "md")))
    (folder / "README.md").write_text(text, encoding="utf-8")
    for path in (file, folder / "README.md"):
        click.echo(str(path))


def card(name: str, sees: InputSpec, file: str, difference: float, report: str) -> str:
    """Return the model card in Markdown.

    Args:
        name: study, arm and seed of the model.
        sees: the input of the model.
        file: name of the exported file.
        difference: largest difference of the file's logits from the model's, relative to the largest logit.
        report: of the study, in Markdown.
    """
    from vitlab.report.formats import markdown

    info = sees.info
    shape = ", ".join(map(str, (info.channels, *info.image)))
    return f"""---
tags: [image-classification, vitlab]
---

`{file}` holds one model, {markdown(name)}; the verdict below is about the means of arms over seeds.
It takes pixels in [0, 1], float32, (batch, {shape}), and returns logits (batch, {info.classes}); the normalisation is
inside. On random pixels its logits differ from the trained model's by at most {difference:.1e} of the largest.

Classes: {markdown(", ".join(info.labels)) or info.classes}

{report}"""
