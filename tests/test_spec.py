"""Tests of valid and invalid study files; files that are no studies are in test_bad_input."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from vitlab.errors import SpecError
from vitlab.lab import plan_study
from vitlab.spec import Choice, read_study
from vitlab.spec.mistakes import HOW
from vitlab.spec.yaml import parse_document, read_value

GOOD = """\
study: small
base:
  data: {type: digits}
  model: {type: vit, patch_size: 2, dim: 8, depth: 1, heads: 2}
  train: {steps: 2, batch_size: 8}
"""


def problems(tmp_path: Path, text: str) -> list[str]:
    """Return every problem of a study file, as shown to the user, without the folder."""
    file = tmp_path / "study.yaml"
    file.write_text(text)
    with pytest.raises(SpecError) as caught:
        plan_study(file)
    assert not any("\n" in str(problem) for problem in caught.value.problems)
    return [str(problem).replace(f"{tmp_path}/", "") for problem in caught.value.problems]


def only(actual: list[str]) -> str:
    assert len(actual) == 1, actual
    return actual[0]


@pytest.mark.parametrize(
    ("line", "instead", "place", "words"),
    [
        ("  train: {steps: 2, batch_size: 8}", "  train: {steps: 2, batch_sise: 8}", "5:21", ["batch_sise", "'batch_size'"]),
        ("study: small", "study: small\nrnu: {}", "2:1", ["unknown key 'rnu'", "Did you mean 'run'?"]),
        ("heads: 2}", "heads: 2, postion: none}", "4:65", ["vit", "'postion'", "Did you mean 'position'?"]),
        ("heads: 2}", "heads: 2, position: lerned}", "4:75", ["no position called 'lerned'", "'learned'"]),
        ("heads: 2}", "heads: 2, position: no}", "4:75", ["false", "name", "none"]),
        ("heads: 2}", "heads: two}", "4:62", ["heads must be a whole number; found 'two'"]),
        ("heads: 2}", "heads: 0}", "4:62", ["heads", "greater", "0"]),
        ("heads: 2}", "heads: 3}", "4:62", ["dim 8", "heads 3", "1, 2, 4, 8"]),
        ("patch_size: 2", "patch_size: 3", "4:34", ["8", "patch_size 3", "1, 2, 4, 8"]),
        ("{type: digits}", "{type: digts}", "3:16", ["no dataset called 'digts'", "'digits'"]),
        ("{type: digits}", "{tpye: digits}", "3:3", ["type"]),
        ("steps: 2", "steps: 2, epochs: 1", "5:3", ["exactly one", "epochs and steps"]),
        ("steps: 2", "steps: 2, steps: 3", "5:21", ["'steps'", "twice", "line 5"]),
        ("steps: 2", "steps: 2, optimizer: {type: adamw, lr: -1}", "5:50", ["lr", "greater"]),
        ("study: small", "study: small\ncheck: {margin_sd: 0}", "2:20", ["margin_sd", "greater than 0"]),
        ("study: small", "study: small\nmatch: {quantity: params}", "2:1", ["match.knob", "missing"]),
        ("study: small", "study: small\nmatch: {quantity: parms, knob: model.dim}", "2:19", ["'parms'", "'params'", "train_macs"]),
        ("study: small", "study: small\nmatch: {quantity: params, knbo: model.dim, knob: model.dim}", "2:27", ["'knbo'", "'knob'"]),
        ("study: small", "study: small\nmatch: {quantity: params, knob: model.dmi}", "2:33", ["'model.dmi'", "'model.dim'"]),
        ("study: small", "study: small\nmatch: {quantity: params, knob: train.steps}", "2:33", ["train.steps", "params"]),
        ("study: small", "study: small\nmatch: {quantity: train_macs, knob: train.epochs}", "2:37", ["train.epochs", "train.steps"]),
        ("study: small", "study: small\nmatch: {quantity: macs, knob: model.dim, tolerance: 0}", "2:53", ["tolerance", "greater"]),
        ("study: small", "study: small\ntune: {}", "2:1", ["tune.knobs", "missing"]),
        ("study: small", "study: small\ntune: {knobs: {}}", "2:8", ["tune.knobs", "at least 1"]),
        ("study: small", "study: small\ntune: {knobs: {train.optimizer.lr: []}}", "2:16", ["train.optimizer.lr", "at least 1"]),
        ("study: small", "study: small\ntune: {knobs: {train.optimizer.lr: [1, 1.0]}}", "2:8", ["train.optimizer.lr", "twice"]),
        ("study: small", "study: small\ntune: {knobs: {train.optimizer.lrr: [1, 2]}}", "2:16", ["'lrr'", "'lr'"]),
        ("study: small", "study: small\ntune: {knobs: {train.optimizer.lr: [0.1, -1]}}", "2:42", ["lr", "greater"]),
        ("study: small", "study: small\ntune: {knobs: {train.optimizer.lr: [1]}, select: test/accuracy}", "2:50", ["test"]),
        ("study: small", "study: small\ntune: {knobs: {train.optimizer.lr: [1]}, select: val/loss}", "2:50", ["val/loss is min", "max"]),
        ("study: small", "study: small\ntune: {knobs: {train.optimizer.lr: [1]}, per: trial}", "2:47", ["'trial'", "arm, study"]),
        ("study: small", "study: small\ntune: {knobs: {train.optimizer.lr: [1], train.optimizer: [sgd]}}", "2:41", ["both be tuned"]),
        ("study: small", "study: a/../b", "1:8", ["study", "letters, digits, '.', '_' or '-'"]),
        ("study: small", "study: small\nseeds: {count: 2, vary: [innit]}", "2:26", ["innit", "'init'"]),
        ("study: small", "study: small\nseeds: [1, 1]", "2:1", ["twice"]),
        ("study: small", "study: small\nseeds: 0", "2:8", ["greater than or equal to 1", "0"]),
        ("study: small", "study: small\nanalysis: {metric: accuracy}", "2:20", ["no trial reports accuracy.", "'val/accuracy'"]),
        ("study: small", "study: small\nanalysis: {compare: basline}", "2:21", ["'basline'", "'baseline'"]),
        ("study: small", "study: small\nanalysis: {compare: {to: {}}}", "2:22", ["at least 1"]),
        ("study: small", "study: small\ndesign: {}", "2:1", ["exactly one of", "empty design"]),
        ("study: small", "study: small\ndesign: {one_at_a_time: {}}", "2:10", ["one_at_a_time"]),
        ("study: small", "study: small\ndesign: {grid: {model.dim: []}}", "2:17", ["model.dim"]),
        ("study: small", "study: small\ndesign: {one_at_a_time: {model.dmi: [4]}}", "2:26", ["'dmi'", "'dim'"]),
        ("study: small", "study: small\ndesign: {one_at_a_time: {modle.dim: [4]}}", "2:26", ["'modle'", "'model'"]),
        ("study: small", "study: small\ndesign: {one_at_a_time: {model.heads: [4, 5]}}", "2:43", ["heads 5"]),
        ("study: small", "study: small\ndesign: {grid: {model.dim: [16, 32]}}", "2:1", ["no arm of the design equals the base"]),
        ("study: small", "study: small\ndesign: {arms: {wide: {model.dim: 16}}}", "2:1", ["no arm", "baseline: {}", "compare: none"]),
        ("study: small", "study: small\ndesign: {sample: {n: 1, over: {zip: {model.dim: [16]}}}}", "2:1", ["no arm of the"]),
        ("study: small", "study: small\ndesign: {one_at_a_time: {model.dim: [8]}}", "2:1", ["every arm of the design equals the base"]),
        ("study: small", "study: small\ndesign: {zip: {model.dim: [8]}}", "2:1", ["every arm of the design equals the base"]),
        ("study: small", "study: small\nanalysis: {compare: {to: {model.dim: 16}}}\ndesign: {grid: {model.dim: [16]}}", "3:1", ["analysis.compare"]),
        ("study: small", "study: small\ndesign: {zip: {model.dim: [4, 8], model.depth: [1]}}", "2:10", ["2 of model.dim", "1 of"]),
        ("study: small", "study: small\nwhere: [{require: 'model.dim %', because: x}]", "2:19", ["not an expression"]),
        ("study: small", "study: small\nwhere: [{require: 'open(1)', because: x}]", "2:19", ["open(1)", "is not allowed"]),
        ("study: small", "study: small\nwhere: [{require: 'model.dmi > 1', because: x}]", "2:19", ["'dmi'", "'dim'"]),
        ("study: small", "study: small\nwhere: [{require: model.dim > 8, else: error, because: x}]", "2:9", ["breaks", "x"]),
        ("study: small", "study: small\nplugins: {require: [no-such-package]}", "2:21", ["pip install no-such-package"]),
        ("study: small", "study: small\nplugins: {require: [mine.py]}", "2:21", ["--plugin PATH/mine.py"]),
    ],
)  # fmt: skip
def test_one_mistake_gives_one_sentence(tmp_path: Path, line: str, instead: str, place: str, words: list[str]) -> None:
    assert line in GOOD
    problem = only(problems(tmp_path, GOOD.replace(line, instead)))
    assert problem.startswith(f"study.yaml:{place}: "), problem
    for word in words:
        assert word in problem, problem


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    text = GOOD.replace("heads: 2", "heads: 2, drp: 1").replace("steps: 2", "steps: 2, batchsize: 3") + "seeds: none\n"
    lines = [problem.split(":")[1] for problem in problems(tmp_path, text)]
    assert lines == ["4", "5", "6"]


def test_merged_mappings_are_read_like_written_ones() -> None:
    text = "a: &a {x: 1, y: 1}\nb: &b {<<: *a, y: 2}\nc: {z: 3, <<: [{x: 0}, *b]}\nd: *b\n"
    document = parse_document(text, "s.yaml")
    assert document.data["c"] == {"x": 0, "y": 2, "z": 3} and document.data["d"] == {"x": 1, "y": 2}
    assert str(document.problem(("c", "y"), "wrong")) == "s.yaml:2:19: wrong"


def test_alias_is_a_copy() -> None:
    data = parse_document("a: &a {x: 1}\nb: *a\n", "x").data
    data["a"]["x"] = 2
    assert data["b"] == {"x": 1}


def test_numbers_are_parsed_as_written() -> None:
    data = parse_document("{a: 1e-3, b: -2E5, c: 1.0e-3, d: '1e-3', e: 1e, f: 5e3}", "x").data
    assert data == {"a": 1e-3, "b": -2e5, "c": 1e-3, "d": "1e-3", "e": "1e", "f": 5e3}


def test_choice_is_name_or_mapping() -> None:
    assert Choice.parse("rope2d") == Choice.parse({"type": "rope2d"}) == Choice("rope2d")
    assert Choice.parse({"type": "rope2d", "theta": 50}).plain() == {"type": "rope2d", "theta": 50}
    for wrong in (False, 3, None, {"theta": 50}, {"type": None}):
        with pytest.raises(ValueError, match="component"):
            Choice.parse(wrong)


def test_seeds_set_configured_streams(tmp_path: Path) -> None:
    file = tmp_path / "study.yaml"
    file.write_text(GOOD + "seeds: {count: 3, vary: [init, order]}\n")
    study, _, problems_found = read_study(file, changes={})
    assert not problems_found and study is not None
    assert study.seeds.values == (0, 1, 2)
    streams = study.seeds.stream_seeds(2)
    assert {name for name, seed in streams.items() if seed == 2} == {"init", "order"}
    file.write_text(GOOD)
    study, _, _ = read_study(file, changes={})
    assert (
        study is not None and study.seeds.stream_seeds(5)["split"] == 0 and study.seeds.stream_seeds(5)["dropout"] == 5
    )


# -- words of other trainers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        (
            "program: train.py\nmethod: grid\nmetric: {goal: maximize}\n",
            ["docs/pages/coming/sweeps.md", "is analysis.metric"],
        ),
        (
            "defaults: [model: vit]\ntrainer: {max_epochs: 2}\n",
            ["docs/pages/coming/sweeps.md", "'vitlab show base.train'"],
        ),
        ("data_dir: /data\nepochs: 3\n", ["docs/pages/coming/timm.md", "The path of 'epochs' is base.train.epochs."]),
    ],
)
def test_files_of_other_programs_are_answered_with_their_page(tmp_path: Path, text: str, sentences: list[str]) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(text)
    with pytest.raises(SpecError) as raised:
        plan_study(file)
    for sentence in ["'vitlab new study' writes one", *sentences]:
        assert sentence in str(raised.value)
    assert all((Path(__file__).parents[1] / page).is_file() for page in re.findall(r"docs/\S+\.md", str(raised.value)))


def test_words_of_other_trainers_name_what_can_be_written(tmp_path: Path) -> None:
    base = {
        "data": {"type": "digits"},
        "model": {"type": "vit", "patch_size": 2, "size": "pico"},
        "train": {"steps": 1},
    }
    file = tmp_path / "s.yaml"
    file.write_text(yaml.safe_dump({"study": "s", "base": base, "analysis": {"compare": "none"}, "seeds": 1}))
    written = {
        (path, value)
        for how in HOW.values()
        for path, value in re.findall(r"\b((?:train|model|run|data)(?:\.\w+)*): (\{.*?\}+|\[.*?\]|[\w.]+)", how)
    }
    assert len(written) > 25
    for path, value in written - {("run.device", "cuda"), ("data", "{type: image_folder, root: ...}")}:
        change = {path if path.startswith("run.") else f"base.{path}": read_value(re.sub(r"\bN\b", "2", value))}
        change |= {"base.model.patch_size": 2} if path == "model" else {}
        assert plan_study(file, changes=change)[1].arms, path


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"seed": 1}, "unknown key 'seed'. Did you mean 'seeds'?"),
        (
            {"base.data": {"type": "digits", "image_size": 224}},
            "'image_size'. Write data.size: 224, or data.image_size",
        ),
        ({"base.model.image_size": 224}, "'image_size'. Write data.size: 224, or data.image_size if the data set has"),
        ({"base.data": {"type": "synthetic", "img_size": 8}}, "'img_size'. Did you mean 'image_size'? Options:"),
        ({"base.model.drop_rate": 0.1}, "'drop_rate'. Write drop as an option of model.head; "),
        ({"base.model.attention": {"type": "auto", "drop_rate": 0.1}}, "'drop_rate'. Did you mean 'drop'? Options:"),
        (
            {"base.model.batch_size": 4},
            "'batch_size'. Did you mean 'patch_size'? The path of 'batch_size' is base.train.",
        ),
        ({"run.partition": "gpu"}, "'partition'. Write run.executor: {type: slurm, minutes: 60, sbatch: {partition: "),
        ({"analysis.baseline": "none"}, "'baseline'. Write compare: baseline, or compare: {to: {PATH: VALUE}}."),
        ({"analysis.correction": "holm"}, "allowed: bonferroni, none. Write bonferroni; step-down methods and false"),
        (
            {"base.train.precision": "amp"},
            "found 'amp'; allowed: fp32, tf32, bf16, fp16, fp64. Write train.precision: ",
        ),
        ({"base.train.warmup_epochs": 5}, "Write train.schedule: {type: cosine, warmup: 0.05, final: 0.01}"),
        ({"base.train.accum_iter": 4}, "Write run.micro_batch_size: N to save memory"),
        ({"base.train.model_ema": True}, "Write train.ema: {decay: 0.9999}"),
        ({"base.train.use_ema": True}, "Save the averaged weights of a checkpoint as a file of their own"),
        ({"base.model": "deit_small_patch16_224"}, "Write model: {type: vit, size: S, patch_size: 16}"),
        ({"base.model": "google/vit-base-patch16-224-in21k"}, "Write model: {type: vit, size: B, patch_size: 16}"),
        ({"base.model": "vit_base_patch14_reg4_dinov2.lvd142m"}, "size: B, patch_size: 14}"),
        ({"base.model": "vit_b_16"}, "size: B, patch_size: 16}"),
        ({"seeds": "1-5"}, "found '1-5'; write their number, such as 5, or a list, such as [1, 2, 3, 4, 5]"),
        ({"seeds": 3.0}, "found 3.0; write their number, such as 5"),
        ({"base.train.loss": {"type": "cross_entropy", "class_weights": [1, -2]}}, "class_weights.1 must be greater"),
        ({"base.train.loss": {"type": "cross_entropy", "class_weights": ["a"]}}, "class_weights.0 must be a number"),
        ({"design": {"one_at_a_time": {"train.lr": [1]}}}, "weight_decay: 0.05}, or train.optimizer.lr as a path."),
        ({"seeds": None}, "seeds: found nothing; write their number, such as 5"),
        (
            {"analysis": {"compare": "learned"}},
            "found 'learned'; allowed: baseline, none, {to: {PATH: value}} such as {to: {model.position: learned}}.",
        ),
        ({"base.data.channels": True}, "found a boolean"),
        ({"base.model.position": ["none", "none"]}, "position 'none' is in the list twice; remove one"),
        ({"base.model.position": [["none", "none"], "learned"]}, "position 'none' is in the list twice; remove one"),
        ({"base.model.position": [None]}, "found nothing; where nothing is meant, write none"),
        ({"base.model.dim": 2**63}, "dim must be less than or equal to 100000"),
        ({"run.threads": 99_999_999_999}, "run.threads must be less than or equal to 4096"),
    ],
)
def test_sentence_says_what_to_type(change: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    base = {"data": {"type": "digits"}, "model": {"type": "vit", "patch_size": 2}, "train": {"steps": 1}}
    file.write_text(yaml.safe_dump({"study": "s", "base": base, "analysis": {"compare": "none"}, "seeds": 1}))
    with pytest.raises(SpecError) as caught:
        plan_study(file, changes=change)
    (problem,) = caught.value.problems
    assert sentence in problem.message


@pytest.mark.parametrize(
    ("change", "name", "sentence"),
    [
        ({"base.model": {"type": "ViT", "patch_size": 2, "position": "learnt"}}, "ViT", "no position called 'learnt'."),
        (
            {"base.train.optimizer": {"type": "AdamW", "fused": True}},
            "AdamW",
            "optimizer 'adamw' has no option 'fused'.",
        ),
    ],
)
def test_options_of_unknown_component_are_checked_by_the_suggested_one(
    change: dict[str, Any], name: str, sentence: str, tmp_path: Path
) -> None:
    file = tmp_path / "s.yaml"
    base = {"data": {"type": "digits"}, "model": {"type": "vit", "patch_size": 2}, "train": {"steps": 1}}
    file.write_text(yaml.safe_dump({"study": "s", "base": base, "analysis": {"compare": "none"}, "seeds": 1}))
    with pytest.raises(SpecError) as caught:
        plan_study(file, changes=change)
    assert len(caught.value.problems) == 2
    assert f" called '{name}'. Did you mean" in str(caught.value) and sentence in str(caught.value)
