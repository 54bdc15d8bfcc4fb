"""Tests of weights that timm names or the hub holds, on files of the cache's form, and of export."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from vitlab.cli import cli
from vitlab.data.torchvision_import import torchvision
from vitlab.errors import SpecError, WeightsError
from vitlab.lab import plan_study
from vitlab.weights.hub import fetch, list_timm_weights, timm_weights_repository
from vitlab.weights.opening import fetch_by_name, open_model

torchvision("torchvision.models")
timm = pytest.importorskip("timm")
from timm.models._hub import save_config_for_hf  # noqa: E402

REVISION = "0123456789abcdef0123456789abcdef01234567"
NAME = "vit_tiny_patch16_224.augreg_in21k"
SIZES = {"embed_dim": 16, "depth": 1, "num_heads": 2, "img_size": 8, "patch_size": 4, "num_classes": 0}
STUDY = """\
study: start
seeds: 1
base:
  data: {type: synthetic, image_size: 8, num_channels: 3, num_classes: 3, train_images: 32, test_images: 16}
  model: {type: vit, dim: 16, depth: 1, heads: 2, patch_size: 4}
  train: {steps: 2, batch_size: 8}
  init_from: {SOURCE}
run: {tracker: none}
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the hub's cache without a network, with a model of timm as the hub has it."""
    from huggingface_hub import constants

    fetch.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "hub" / f"models--timm--{NAME}"
    snapshot = folder / "snapshots" / REVISION
    for made in (snapshot, folder / "refs", folder / "blobs", folder / ".no_exist" / REVISION):
        made.mkdir(parents=True)
    (folder / "refs" / "main").write_text(REVISION)
    (folder / ".no_exist" / REVISION / "preprocessor_config.json").touch()
    model = timm.create_model("vit_tiny_patch16_224", **SIZES)
    save_config_for_hf(model, str(snapshot / "config.json"), model_args=SIZES)
    from safetensors.torch import save_file

    save_file(model.state_dict(), folder / "blobs" / "abc")
    (snapshot / "model.safetensors").symlink_to(folder / "blobs" / "abc")
    yield snapshot
    fetch.cache_clear()


def planned(folder: Path, source: str) -> Any:
    folder.mkdir(exist_ok=True)
    (folder / "start.yaml").write_text(STUDY.replace("SOURCE", source))
    _, plan = plan_study(folder / "start.yaml", out=folder / "out")
    return plan


def test_names_of_timm_and_hub_become_file_revision_and_digest(cache: Path, tmp_path: Path) -> None:
    file = cache / "model.safetensors"
    keys = set()
    for source in (f"timm: {NAME}", f"hub: timm/{NAME}", f"hub: timm/{NAME}@{REVISION}", f"checkpoint: {file}"):
        (trial,) = (planned_trial.trial for planned_trial in planned(tmp_path / "a", source).trials)
        assert trial.spec.init_from.checkpoint == str(file) and REVISION in str(file)
        assert trial.files["init_from"] == {
            name: hashlib.sha256((cache / name).read_bytes()).hexdigest()
            for name in ("model.safetensors", "config.json")
        }
        keys.add(trial.key)
    assert len(keys) == 1
    assert timm_weights_repository(NAME) == f"timm/{NAME}" and fetch_by_name("timm", NAME) == file
    assert open_model(file, head="new").info.image == (8, 8)


def test_mistakes_in_names_are_all_reported_at_once(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"has no weights called 'vit_tiny_patch16_224.augreg_in22k'. It has vit_tiny"):
        planned(tmp_path / "a", "timm: vit_tiny_patch16_224.augreg_in22k")
    with pytest.raises(SpecError, match=r"org/none cannot be fetched from the hub"):
        planned(tmp_path / "b", "hub: org/none")
    with pytest.raises(SpecError, match=r"a--b/c is no name of a repository: Cannot have"):
        planned(tmp_path / "b", "hub: a--b/c")
    with pytest.raises(SpecError, match="exactly one of checkpoint, trial, pretrained, timm, hub"):
        planned(tmp_path / "c", f"timm: {NAME}, hub: a/b")
    with pytest.raises(SpecError) as both:
        planned(tmp_path / "d", "timm: vit_tiny_patch16_224.nothing}\n  distill: {teacher: {hub: org/none}")
    assert len(both.value.problems) == 2
    (cache / "model.safetensors").unlink()
    fetch.cache_clear()
    with pytest.raises(WeightsError, match="cannot be fetched"):
        fetch(f"timm/{NAME}")


def test_hub_without_a_network_is_asked_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library itself would wait for 1, 2, 4, 8 and 8 seconds between its tries."""
    import huggingface_hub

    asked = []

    class Session:
        def head(self, address: str, timeout: float) -> None:
            asked.append((address, timeout <= 10))
            raise RuntimeError("no such host. And more")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "get_session", Session)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"it waits {seconds} s"))
    with pytest.raises(WeightsError, match=r"org/none cannot be .* https://.* does not answer \(no such host\)"):
        fetch("org/none")
    assert fetch(f"timm/{NAME}") == cache / "model.safetensors"
    assert asked == [("https://huggingface.co", True)] * 2


def test_weights_of_timm_are_listed_offline() -> None:
    done = CliRunner().invoke(cli, ["list", "weights", "so400m*siglip_224*", "--json"])
    rows = json.loads(done.stdout)
    assert [row["name"] for row in rows] == timm.list_pretrained("vit_so400m_patch14_siglip_224*") and rows
    for row in rows:
        config = timm.get_pretrained_cfg(row["name"])
        assert (row["image"], row["classes"], row["repository"]) == (
            config.input_size[-1],
            config.num_classes,
            config.hf_hub_id,
        )
    assert len(list_timm_weights("")) > 300
    done = CliRunner().invoke(cli, ["list", "weights", "resnet50"])
    assert "called 'resnet50'" in str(done.exception)


def test_without_timm_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    done = CliRunner().invoke(cli, ["list", "weights"])
    assert isinstance(done.exception, WeightsError) and "pip install 'vitlab[interop]'" in str(done.exception)


@pytest.mark.slow
@pytest.mark.usefixtures("no_figures")
def test_inspect_prints_a_model_that_starts_from_the_weights(cache: Path, tmp_path: Path) -> None:
    import vitlab
    from vitlab.driver.session import Watch

    done = CliRunner().invoke(cli, ["weights", "inspect", f"timm:{NAME}", "--json"])
    model = json.loads(done.stdout)["model"]
    study = STUDY.replace("SOURCE", f"timm: {NAME}")
    study = study.replace("{type: vit, dim: 16, depth: 1, heads: 2, patch_size: 4}", model)
    (tmp_path / "start.yaml").write_text(study)
    answer = vitlab.run(tmp_path / "start.yaml", out=tmp_path / "out", watch=Watch())
    doc = json.loads((answer.store.study("start") / "report" / "report.json").read_text())
    (note,) = [note for note in doc["notes"] if note.startswith("Weights to start from (baseline):")]
    state = open_model(cache / "model.safetensors", head="new").model.state_dict()
    body = [name for name in state if not name.startswith("head.")]
    assert f"{len(body)} of {len(state)} tensors loaded" in note and "new: head" in note
    arguments = ["export", "start", "--arm", "baseline", "--out", tmp_path / "out", "--to", tmp_path / "to"]
    done = CliRunner().invoke(cli, [*map(str, arguments), "--format", "torch"])
    assert done.exit_code == 0, done.output
    file, card = map(Path, done.stdout.splitlines())
    assert file.name == "model.pt2" and "arm baseline, seed 0" in card.read_text() and note[:30] in card.read_text()
    assert "earlier export" not in card.read_text()
    file.rename(file.with_name("model.onnx"))
    assert CliRunner().invoke(cli, [*map(str, arguments), "--format", "torch"]).exit_code == 0
    assert "\n`model.onnx` is of an earlier export.\n" in card.read_text()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's exporter, which stops at a warning that is an error
def test_exported_file_computes_the_same_and_a_false_one_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vitlab.geometry import DataInfo
    from vitlab.registry import slot
    from vitlab.weights import export

    info = DataInfo(image=(8, 12), channels=3, classes=5)
    options = {"type": "vit", "dim": 16, "depth": 1, "heads": 2, "patch_size": 4, "position": ["learned", "rope2d"]}
    model = slot("model").build(options, info)
    model.initialise(0)
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
    file = tmp_path / "a.pt2"
    assert export.export_and_verify(model.eval(), info, mean, std, file, "torch") <= 1e-6
    x_BCHW = torch.rand(7, 3, 8, 12)
    with torch.no_grad():
        scaled = (x_BCHW - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
        torch.testing.assert_close(torch.export.load(file).module()(x_BCHW), model(scaled).logits, rtol=0, atol=1e-5)
    pytest.importorskip("onnxruntime")
    assert export.export_and_verify(model, info, mean, std, tmp_path / "a.onnx", "onnx") <= 1e-5
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.mul_(not name.startswith("head."))
    assert export.export_and_verify(model, info, mean, std, tmp_path / "zero.pt2", "torch") == 0
    model.initialise(0)  # 1.1 times logits of zero would be equal
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    monkeypatch.setattr(
        export, "_export_torch", lambda program, file: file.touch() or (lambda x: program.module()(x) * 1.1)
    )
    with pytest.raises(WeightsError, match="computes other logits than the model"):
        export.export_and_verify(model, info, mean, std, file, "torch")
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before, "an earlier file stays"
