"""Tests of weight files in use: the command line, explanations, and trials that start from them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from job_helpers import run_trial
from torch import Tensor, nn

from vitlab.cli import cli
from vitlab.data.prepare import data_info
from vitlab.data.torchvision_import import torchvision
from vitlab.errors import TrialFailed, VitlabError
from vitlab.identity.code import modules_of_spec, trial_code_digest
from vitlab.planning.resolve import Resolver
from vitlab.planning.values import Trial
from vitlab.runner.job import Settings
from vitlab.runner.models import load_model
from vitlab.spec import STREAMS, TrialSpec
from vitlab.store.folders import TrialFolder
from vitlab.weights.architecture import ModelFacts
from vitlab.weights.conversion import convert_weights_file
from vitlab.weights.opening import open_model

torchvision("torchvision.models")
timm = pytest.importorskip("timm")
from timm.models.deit import VisionTransformerDistilled  # noqa: E402
from timm.models.vision_transformer import VisionTransformer  # noqa: E402

SMALL = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 5}


def vit(**options: Any) -> nn.Module:
    kind = VisionTransformerDistilled if options.pop("distilled", False) else VisionTransformer
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = kind(**{**SMALL, **options})
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    return model.eval()


def saved(model: nn.Module, file: Path) -> Path:
    torch.save(model.state_dict(), file)
    return file


def vitlab(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def refused(*arguments: object) -> str:
    result = vitlab(*arguments)
    assert isinstance(result.exception, VitlabError), result.output
    assert result.exception.exit_code == 2
    sentence = str(result.exception)
    assert "\n" not in sentence
    return sentence


# -- command line -----------------------------------------------------------------------------------------------------


def test_inspect_describes_file(tmp_path: Path) -> None:
    model = vit(distilled=True)
    file = saved(model, tmp_path / "a.pth")
    text = vitlab("weights", "inspect", file, "--heads", 2).stdout
    for line in (
        "format             timm (torch, float32)",
        f"parameters         {sum(p.numel() for p in model.parameters()):,}",
        "grid               4x4 (images of 16x16)",
        "prefix             class, distillation",
        "head               distilled",
    ):
        assert line in text.splitlines()
    report = json.loads(vitlab("weights", "inspect", file, "--heads", 2, "--json").stdout)
    assert (report["dim"], report["depth"], report["heads"], report["classes"]) == (16, 2, 2, 5)
    assert "missing" not in report


def test_inspect_lists_mismatches(tmp_path: Path) -> None:
    torch.save({"model": {**vit().state_dict(), "extra": torch.zeros(1)}, "epoch": 1}, tmp_path / "a.pth")
    report = json.loads(vitlab("weights", "inspect", tmp_path / "a.pth", "--heads", 2, "--json").stdout)
    assert report["unknown"] == ["extra"] and report["left_out"] == ["epoch"] and "'model'" in report["opened"]


def test_convert_to_other_resolution(tmp_path: Path) -> None:
    source, target = saved(vit(), tmp_path / "a.pth"), tmp_path / "new" / "b.safetensors"
    options = ("--from", "timm", "--to", "hf", "--image", "8x24", "--resample", "google", "--heads", 2)
    done = vitlab("weights", "convert", source, target, *options)
    assert done.exit_code == 0 and done.stdout.splitlines() == [str(target)]
    assert "eps 1e-06" in done.stderr, "Hugging Face's norms have another eps by default"
    output = vitlab("weights", "inspect", target).stdout
    assert "hf (safetensors, float32)" in output and "2x6 (images of 8x24)" in output


def test_mistakes_are_one_sentence_with_exit_code_2(tmp_path: Path) -> None:
    source, target = saved(vit(), tmp_path / "a.pth"), tmp_path / "b.pth"
    convert_to = ("weights", "convert", source, target, "--heads", 2, "--to")
    assert "image height 18 is not a multiple of patch_size 4" in refused(*convert_to, "timm", "--image", "18")
    for wrong, why in (
        (("tim",), "is not one of 'timm'"),
        (("timm", "--resample", "bilinear"), "is not one of 'timm'"),
        (("timm", "--image", "3y4"), "'3y4' is no size; write HxW"),
    ):
        done = vitlab(*convert_to, *wrong)
        assert done.exit_code == 2 and why in done.output
    assert "a file in the format google needs .npz" in refused(*convert_to, "google")
    assert "is the file to be converted" in refused("weights", "convert", source, source, "--to", "timm")
    assert "no such file" in refused("weights", "inspect", tmp_path / "nothing.pth")
    (tmp_path / "noise.npz").write_bytes(np.random.default_rng(0).bytes(2000))
    assert "noise.npz" in refused("weights", "inspect", tmp_path / "noise.npz")
    assert not target.exists()


# -- trials that start from a file ------------------------------------------------------------------------------------

DATA = {"type": "synthetic", "image_size": 24, "train_images": 40, "test_images": 10, "num_classes": 3, "channels": 3}
MODEL = {"type": "vit", "patch_size": 4, "dim": 16, "depth": 2, "heads": 2}


def start(tmp_path: Path, file: Path, *, steps: int = 0, model: dict[str, Any] = {}, **how: Any) -> TrialFolder:
    train = {"steps": steps, "batch_size": 8, "evaluations": 1, "optimizer": {"type": "adamw", "lr": 0.01}}
    train |= {"schedule": "constant", "loss": "cross_entropy"}
    spec = {"data": DATA, "model": {**MODEL, **model}, "train": train}
    spec["init_from"] = {"checkpoint": str(file), **how}
    folder = TrialFolder(tmp_path / f"trial{len(list(tmp_path.iterdir()))}" / "code")
    resolved = TrialSpec.model_validate(spec)
    planned = Trial(
        resolved, dict.fromkeys(STREAMS, 0), (), None, key="k", code=trial_code_digest(modules_of_spec(resolved))
    )
    result = run_trial(planned, folder, Settings())
    assert result is not None and result.status == "done"
    return folder


def canonical(folder: TrialFolder) -> dict[str, Tensor]:
    model, _ = load_model(folder)
    return model.to_canonical(model.state_dict())


@pytest.mark.parametrize(
    ("form", "attention"), [("timm", "per_head"), ("hf", "auto"), ("torchvision", "split"), ("google", "auto")]
)
def test_trial_starts_from_file_with_other_grid_and_classes(form: str, attention: str, tmp_path: Path) -> None:
    theirs = vit()
    source = saved(theirs, tmp_path / "a.pth")
    file = tmp_path / ("b.npz" if form == "google" else "b.safetensors")
    convert_weights_file(source, file, form, facts=ModelFacts(heads=2))
    state = canonical(start(tmp_path, file, model={"attention": attention}, resample="timm"))
    theirs.set_input_size((24, 24))
    for name, value in theirs.state_dict().items():
        if not name.startswith("head."):
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-6, msg=name)
    assert state["head.weight"].shape == (3, 16)


def test_journal_records_differences_of_function(tmp_path: Path) -> None:
    file = saved(vit(), tmp_path / "a.pth")
    eps = {"type": "layernorm", "eps": 1e-3}
    model = {"norm": eps, "final_norm": eps, "blocks": {"1": {"mlp": {"type": "gelu", "approximate": "tanh"}}}}
    folder = start(tmp_path, file, model=model)
    note = folder.events()[0][0].body["note"]
    theirs = "and in the model that the weights were trained in it is"
    for sentence in (
        f"; of the weights it starts from: norm.eps is 0.001, {theirs} 1e-06",
        f"; of the weights it starts from: final_norm.eps is 0.001, {theirs} 1e-06",
        f"mlp.approximate of block 1 is tanh, {theirs} none",
    ):
        assert sentence in note
    assert "trained in it is" not in str(start(tmp_path, file).events()[0][0].body.get("note"))


def test_checkpoint_of_timm_with_averaged_weights_opens_at_the_last_ones(tmp_path: Path) -> None:
    last, average = vit(), vit()
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.mul_(2)
    optimizer = torch.optim.SGD(last.parameters(), 0.1)
    saver = timm.utils.CheckpointSaver(
        last,
        optimizer,
        args=argparse.Namespace(model="vit"),
        model_ema=timm.utils.ModelEmaV3(average),
        checkpoint_dir=str(tmp_path),
        recovery_dir=str(tmp_path),
    )
    saver.save_checkpoint(0)
    file = tmp_path / "checkpoint-0.pth.tar"
    key = "the tensors are under the key 'state_dict'"
    averages = (
        "; the averaged weights under 'state_dict_ema' were not read: save them as a file of their own to use them"
    )
    assert f"opened             {key}{averages}\n" in vitlab("weights", "inspect", file, "--heads", 2).stdout
    folder = start(tmp_path, file)
    assert f"; of the weights it starts from: {key}{averages}" in folder.events()[0][0].body["note"]
    assert torch.equal(canonical(folder)["blocks.0.norm1.weight"], last.state_dict()["blocks.0.norm1.weight"])

    saver = timm.utils.CheckpointSaver(last, optimizer, checkpoint_dir=str(tmp_path), recovery_dir=str(tmp_path))
    saver.save_checkpoint(1)
    text = vitlab("weights", "inspect", tmp_path / "checkpoint-1.pth.tar", "--heads", 2).stdout
    assert f"opened             {key}\n" in text


def test_training_continues_from_loaded_weights(tmp_path: Path) -> None:
    file = saved(vit(), tmp_path / "a.pth")
    before, after = canonical(start(tmp_path, file)), canonical(start(tmp_path, file, steps=3, freeze="body"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"head.weight", "head.bias"}


def test_position_rows_are_moved_without_changing_the_function(tmp_path: Path) -> None:
    own, none = vit(reg_tokens=2), vit(reg_tokens=2, no_embed_class=True)
    for theirs, rows in ((own, "none"), (none, "own")):
        file = saved(theirs, tmp_path / f"{rows}.pth")
        convert_weights_file(file, tmp_path / f"{rows}.safetensors", "timm", facts=ModelFacts(heads=2))
        position = {"type": "learned", "prefix_rows": rows}
        model, _ = load_model(
            start(tmp_path, tmp_path / f"{rows}.safetensors", model={"registers": 2, "position": position})
        )
        theirs.set_input_size((24, 24))
        x_BCHW = torch.randn(2, 3, 24, 24)
        with torch.no_grad():
            torch.testing.assert_close(
                model.forward_features(x_BCHW),
                theirs.forward_features(x_BCHW),
                rtol=0,
                atol=1e-5,  # type: ignore[operator]
            )


def test_tokens_of_one_model_are_refused_or_converted(tmp_path: Path) -> None:
    file = saved(vit(), tmp_path / "a.pth")
    distilled = {"prefix": ["class", "distillation"], "registers": 1, "head": "distilled"}
    with pytest.raises(TrialFailed, match=r"tokens: convert to leave out each of dist_token, reg_token"):
        start(tmp_path, file, model=distilled)
    state = canonical(start(tmp_path, file, model=distilled, tokens="convert"))
    theirs = vit()
    theirs.set_input_size((24, 24))
    expected = theirs.state_dict()
    assert torch.equal(state["cls_token"], expected["cls_token"])
    torch.testing.assert_close(state["pos_embed"][:, 3:], expected["pos_embed"][:, 1:], rtol=0, atol=1e-6)
    assert torch.equal(state["pos_embed"][:, 0], expected["pos_embed"][:, 0])
    assert state["dist_token"].shape == state["reg_token"].shape == (1, 1, 16)

    mean = {"prefix": [], "head": {"type": "linear", "pool": "gap"}}
    with pytest.raises(TrialFailed, match=r"\(class\) than this model \(none\)"):
        start(tmp_path, file, model=mean)
    state = canonical(start(tmp_path, file, model=mean, tokens="convert"))
    assert "cls_token" not in state
    torch.testing.assert_close(state["pos_embed"], expected["pos_embed"][:, 1:], rtol=0, atol=1e-6)


def test_unfitting_weights_are_refused(tmp_path: Path) -> None:
    file = saved(vit(), tmp_path / "a.pth")
    with pytest.raises(TrialFailed, match=r"ls1\.gamma, .* are missing"):
        start(tmp_path, file, model={"layer_scale": 0.1})
    with pytest.raises(TrialFailed, match=r"head\.fc\.weight, head\.fc\.bias are of another shape"):
        start(tmp_path, file, head="keep")
    convert_weights_file(file, tmp_path / "b.safetensors", "timm", facts=ModelFacts(heads=2))
    with pytest.raises(TrialFailed, match="the file says heads 2, and 4 was given"):
        start(tmp_path, tmp_path / "b.safetensors", model={"heads": 4})


def test_code_of_trial_with_weight_file_includes_reader(tmp_path: Path) -> None:
    spec: dict[str, Any] = {
        "data": DATA,
        "model": MODEL,
        "train": {"steps": 1, "optimizer": "adamw", "schedule": "cosine", "loss": "cross_entropy"},
    }
    by_file = {**spec, "init_from": {"checkpoint": "a.pth"}}
    without, nothing = (TrialSpec.model_validate({**spec, **rest}) for rest in ({}, {"init_from": None}))
    assert (
        trial_code_digest(modules_of_spec(TrialSpec.model_validate(by_file)))
        != trial_code_digest(modules_of_spec(without))
        == trial_code_digest(modules_of_spec(nothing))
    )
    by_file["init_from"] = {"checkpoint": str(saved(vit(), tmp_path / "a.pth"))}
    planned = Resolver(data_info).resolve_trial(by_file)
    assert trial_code_digest(planned.modules) == trial_code_digest(modules_of_spec(planned.spec)), (
        "the plan and the worker agree"
    )


# -- export of trial weights ------------------------------------------------------------------------------------------


def test_trial_weights_are_exported_to_other_formats(tmp_path: Path) -> None:
    folder = start(tmp_path, saved(vit(), tmp_path / "a.pth"), steps=2, model={"attention": "per_head"})
    mine, _ = load_model(folder)
    _, notes = convert_weights_file(folder.weights_file, tmp_path / "b.pth", "timm")
    assert [note.partition("(")[0] for note in notes] == ["timm.create_model"]
    theirs = vit(img_size=24, num_classes=3)
    theirs.load_state_dict(torch.load(tmp_path / "b.pth"), strict=True)
    x_BCHW = torch.randn(2, 3, 24, 24)
    with torch.no_grad():
        torch.testing.assert_close(theirs(x_BCHW), mine(x_BCHW).logits, rtol=0, atol=1e-5)
    output = vitlab("weights", "inspect", folder.weights_file).stdout
    assert "vitlab (safetensors, float32)" in output and "6x6 (images of 24x24)" in output
    model = open_model(folder.weights_file)
    with torch.no_grad():
        assert torch.equal(model.model(x_BCHW).logits, mine(x_BCHW).logits)
    again = canonical(start(tmp_path, folder.weights_file, head="keep"))
    assert all(torch.equal(again[name], value) for name, value in mine.to_canonical(mine.state_dict()).items())
    folder.spec.unlink()
    assert "spec.json does not exist or is damaged" in refused("weights", "inspect", folder.weights_file)


def test_unsupported_model_is_not_exported(tmp_path: Path) -> None:
    file = saved(vit(pos_embed="none", img_size=24), tmp_path / "a.pth")
    convert_weights_file(file, tmp_path / "b.safetensors", "timm", facts=ModelFacts(heads=2, image=(24, 24)))
    folder = start(tmp_path, tmp_path / "b.safetensors", model={"position": "rope2d"})
    sentence = refused("weights", "convert", folder.weights_file, tmp_path / "c.pth", "--to", "torchvision")
    assert "the format torchvision requires pos_embed" in sentence


@pytest.mark.parametrize(
    ("base", "sentence"),
    [
        ("init_from: {checkpoint: a.pth}", "these weights have dim 16, and this model has dim 32; set model.dim: 16"),
        (
            "init_from: {trial: {model: {type: vit, patch_size: 4, dim: 16, depth: 2, heads: 2}}}",
            "dim 16, and this model has dim",
        ),
        ("distill: {kind: hard, teacher: {checkpoint: a.pth, heads: 2, size: 16}}", "the teacher has 5 classes and"),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_training(
    base: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(vit(in_chans=1), Path("a.pth"))
    data, train = "{type: digits, size: 16}", "{steps: 1}"
    model = "{type: vit, patch_size: 4, dim: 32, depth: 2, heads: 2}"
    Path("a.yaml").write_text(f"""
study: a
base:
  data: {data}
  model: {model}
  train: {train}
  {base.replace("trial: {", f"trial: {{data: {data}, train: {train}, ")}
design: {{one_at_a_time: {{model.position: [none]}}}}
""")
    with mock.patch("vitlab.runner.models.check_weights_of_role", side_effect=AssertionError):
        assert vitlab("plan", "--cost", "a.yaml").exit_code == 0, "it needs no weights"
    result = vitlab("validate", "--build", "a.yaml")
    assert result.exception.exit_code == 2 and sentence in str(result.exception), result.output  # type: ignore[union-attr]
    key = "init_from" if base.startswith("init_from") else "teacher"
    line, column = 7, (3 if key == "init_from" else 25)
    assert f"a.yaml:{line}:{column}: in the {key} of arm 'baseline'" in str(result.exception)
