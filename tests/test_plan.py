"""Planning: the algebra, names, merging, rules, baselines, keys and code digests."""

import itertools
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from vitlab.errors import SpecError
from vitlab.lab import plan_study
from vitlab.plan import Plan
from vitlab.plan.design import drafts, short_names, text
from vitlab.plan.key import RUNNER, closure, code_digest, key_of
from vitlab.plan.rules import RuleFault, holds, parse
from vitlab.spec.design import Node

BASE: dict[str, Any] = {
    "data": {"type": "digits"},
    "model": {"type": "vit", "patch_size": 2, "dim": 8, "depth": 2, "heads": 2, "position": "learned"},
    "train": {"steps": 2, "batch_size": 8},
}


def plan(tmp_path: Path, **study: Any) -> Plan:
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump({"study": "s", "base": BASE, **study}, sort_keys=False))
    return plan_study(file)[1]


def names(found: Plan) -> list[str]:
    return [arm.name for arm in found.arms]


# -- the algebra ------------------------------------------------------------------------------------------------------


def values(node: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(draft.values) for draft in drafts(Node.model_validate(node))]


def test_one_at_a_time_is_the_base_and_each_alternative_alone() -> None:
    found = values({"one_at_a_time": {"a": [1, 2, 3], "b": [4, 5]}})
    assert found == [{}, {"a": 1}, {"a": 2}, {"a": 3}, {"b": 4}, {"b": 5}]


def test_leave_one_out_in_each_direction() -> None:
    of = {"a": 0, "b": 0, "c": 0}
    remove = values({"leave_one_out": {"of": of}})
    assert remove == [{}, {"a": 0}, {"b": 0}, {"c": 0}]
    add = values({"leave_one_out": {"of": of, "direction": "add"}})
    assert add == [of, {"b": 0, "c": 0}, {"a": 0, "c": 0}, {"a": 0, "b": 0}]
    both = values({"leave_one_out": {"of": of, "direction": "both"}})
    assert both == remove + add and len(both) == 2 + 2 * 3


def test_grid_is_the_product_of_levels_or_of_nodes() -> None:
    levels = {"a": [1, 2], "b": [3, 4, 5]}
    product = [{"a": a, "b": b} for a, b in itertools.product(*levels.values())]
    assert values({"grid": levels}) == product
    nodes = [{"grid": {"a": [1, 2]}}, {"zip": {"b": [3, 4, 5]}}]
    assert values({"grid": nodes}) == product


def test_zip_moves_together_and_union_concatenates_and_arms_are_by_hand() -> None:
    rows = {"zip": {"a": [1, 2], "b": [3, 4], "labels": ["x", "y"]}}
    assert values(rows) == [{"a": 1, "b": 3}, {"a": 2, "b": 4}]
    by_hand = {"arms": {"plain": None, "big": {"a": 9}}}
    assert values({"union": [rows, by_hand]}) == [{"a": 1, "b": 3}, {"a": 2, "b": 4}, {}, {"a": 9}]
    assert [draft.label for draft in drafts(Node.model_validate(by_hand))] == ["plain", "big"]


def test_sample_draws_without_replacement_by_its_own_seed() -> None:
    over = {"grid": {"a": list(range(10)), "b": list(range(10))}}
    first, again, other = (values({"sample": {"n": 20, "seed": seed, "over": over}}) for seed in (1, 1, 2))
    assert first == again != other
    assert len({tuple(draft.items()) for draft in first}) == 20


def test_nodes_nest() -> None:
    node = {"grid": [{"union": [{"arms": {"x": {"a": 1}}}, {"grid": {"a": [2, 3]}}]}, {"one_at_a_time": {"b": [7]}}]}
    assert values(node) == [{"a": a, **b} for a in (1, 2, 3) for b in ({}, {"b": 7})]


def test_a_path_stands_in_one_part_of_a_grid(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"both set 'model\.dim'"):
        plan(tmp_path, design={"grid": [{"grid": {"model.dim": [8]}}, {"grid": {"model.dim": [16]}}]})


# -- names, merging, baselines ----------------------------------------------------------------------------------------


def test_a_grid_without_end_is_refused_at_its_place(tmp_path: Path) -> None:
    levels = {f"train.optimizer.a{index}": list(range(10)) for index in range(7)}
    with pytest.raises(SpecError, match=r":\d+:\d+: a grid of 10,000,000 arms; a design has at most 1,000,000"):
        plan(tmp_path, design={"grid": levels})


def test_what_varies_beside_a_labelled_part_is_in_the_name(tmp_path: Path) -> None:
    parts = {"leave_one_out": {"of": {"model.position": "none", "train.clip_grad": 1.0}}}
    found = plan(tmp_path, design={"grid": [parts, {"one_at_a_time": {"model.dim": [16]}}]})
    assert names(found) == [
        "baseline",
        "dim=16",
        "without position",
        "without position, dim=16",
        "without clip_grad",
        "without clip_grad, dim=16",
    ]
    byhand = {"arms": {"plain": {"model.position": "none"}}}
    labels = {"zip": {"model.dim": [16], "train.batch_size": [4], "labels": ["wide"]}}
    found = plan(
        tmp_path,
        design={
            "union": [{"grid": {"model.depth": [2]}}, {"grid": [byhand, labels, {"grid": {"model.depth": [1, 3]}}]}]
        },
    )
    assert names(found) == ["depth=2", "plain, wide, depth=1", "plain, wide, depth=3"]


def test_names_say_what_differs() -> None:
    assert text({"type": "rope2d", "theta": 50}) == "rope2d(theta=50)"
    assert text(1e-3) == "0.001" and text("none") == "none" and text([1, "a"]) == "[1, a]"
    short = short_names(["model.dim", "model.head.pool", "data.pool", "model.position.type"])
    assert list(short.values()) == ["dim", "head.pool", "data.pool", "position"]


def test_equal_arms_merge_under_the_first_name(tmp_path: Path) -> None:
    found = plan(tmp_path, design={"one_at_a_time": {"model.position": ["learned", "none", {"type": "none"}]}})
    assert names(found) == ["baseline", "position=none"]
    assert found.arm("baseline").aliases == ("position=learned",)
    assert any("position=learned" in note for note in found.notes)


def test_options_written_out_or_left_to_their_default_are_one_arm(tmp_path: Path) -> None:
    arms = {"a": {"model.mlp": {"type": "gelu"}}, "b": {"model.mlp": {"type": "gelu", "ratio": 4.0}}, "c": {}}
    assert names(plan(tmp_path, design={"arms": arms})) == ["a"]


def test_a_new_type_replaces_its_slot_and_shortest_paths_apply_first(tmp_path: Path) -> None:
    arms = {
        "a": None,
        "b": {"train.optimizer.lr": 0.5, "train.optimizer": "sgd"},
        "c": {"train.optimizer.type": "sgd"},
    }
    found = plan(tmp_path, design={"arms": arms}, analysis={"compare": "none"})
    optimizers = {item.arm: item.trial.spec["train"]["optimizer"] for item in found.trials}
    assert optimizers["a"]["type"] == "adamw"
    assert optimizers["b"]["type"] == optimizers["c"]["type"] == "sgd"
    assert optimizers["b"]["lr"] == 0.5 != optimizers["c"]["lr"]


def test_a_new_length_replaces_the_old_one(tmp_path: Path) -> None:
    found = plan(tmp_path, design={"one_at_a_time": {"train.images": [64]}})
    trains = {item.arm: item.trial.spec["train"] for item in found.trials}
    assert trains["images=64"]["images"] == 64 and "steps" not in trains["images=64"]


def test_the_baseline_is_the_arm_that_equals_the_base(tmp_path: Path) -> None:
    found = plan(tmp_path, design={"grid": {"model.position": ["none", "learned"], "model.depth": [1, 2]}})
    baselines = {arm.name: arm.baseline for arm in found.arms}
    assert baselines.pop("position=learned, depth=2") is None
    assert set(baselines.values()) == {"position=learned, depth=2"}


def test_compare_to_finds_each_arms_own_counterpart(tmp_path: Path) -> None:
    found = plan(
        tmp_path,
        design={"grid": {"model.position": ["none", "learned"], "model.depth": [1, 3]}},
        analysis={"compare": {"to": {"model.position": "none"}}},
    )
    assert {arm.name: arm.baseline for arm in found.arms} == {
        "position=none, depth=1": None,
        "position=none, depth=3": None,
        "position=learned, depth=1": "position=none, depth=1",
        "position=learned, depth=3": "position=none, depth=3",
    }


def test_what_is_added_is_compared_with_the_bare_recipe(tmp_path: Path) -> None:
    of = {"model.position": "none", "model.mlp.ratio": 1.0, "model.depth": 1}
    found = plan(tmp_path, design={"leave_one_out": {"of": of, "direction": "both"}})
    baselines = {arm.name: arm.baseline for arm in found.arms}
    assert baselines["bare + position"] == "bare" and baselines["without position"] == "baseline"


# -- rules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "met"),
    [
        ("model.dim % model.heads == 0", True),
        ("model.dim // 3 < 2 + 1 * 2", True),
        ("not (model.patch_size == 2 and model.position == 'learned')", False),
        ("model.position in ['none', 'learned']", True),
        ("0 < model.depth <= 1", False),
        ("-model.depth == -2 or train.batch_size / 2 == 3", True),
    ],
)
def test_rules_are_expressions(rule: str, met: bool) -> None:
    trial = {**BASE, "model": {**BASE["model"], "position": {"type": "learned"}}}
    assert holds(parse(rule), trial) is met


@pytest.mark.parametrize(
    "rule", ["__import__('os')", "model.dim()", "[x for x in model]", "model['dim']", "lambda: 1", "1 if 2 else 3",
             "2 ** 9999", "f'{model}'", "x := 1", "", "a b", "'a' " * 200],
)  # fmt: skip
def test_what_is_no_rule_is_refused(rule: str) -> None:
    with pytest.raises(RuleFault):
        parse(rule)


def test_a_rule_skips_with_its_reason(tmp_path: Path) -> None:
    found = plan(
        tmp_path,
        design={"one_at_a_time": {"model.depth": [1, 3]}},
        where=[{"require": "model.depth < 3", "because": "too slow here"}],
    )
    assert found.arm("depth=3").skip == "too slow here"
    assert {item.arm for item in found.trials} == {"baseline", "depth=1"}


def test_parts_that_cannot_work_together_are_skipped_with_the_reason(tmp_path: Path) -> None:
    design = {"one_at_a_time": {"model.prefix": [[]], "model.position": ["none"]}}
    found = plan(tmp_path, design=design)
    skipped = [arm for arm in found.arms if arm.skip]
    assert len(skipped) == 1 and "class" in skipped[0].skip


# -- identity ---------------------------------------------------------------------------------------------------------


def keys(found: Plan) -> set[str]:
    return {item.trial.key for item in found.trials}


def test_a_plan_survives_json(tmp_path: Path) -> None:
    found = plan(tmp_path, design={"one_at_a_time": {"model.position": ["none"]}}, question="why?")
    assert Plan.from_json(found.to_json()) == found


def test_seeds_and_values_make_keys_and_names_do_not(tmp_path: Path) -> None:
    few = plan(tmp_path, seeds=2)
    more = plan(tmp_path, seeds=3, question="another")
    assert len(keys(few)) == 2 and keys(few) < keys(more)
    arms = plan(tmp_path, seeds=2, design={"arms": {"whatever": {}}})
    assert keys(arms) == keys(few)
    assert not keys(plan(tmp_path, base={**BASE, "train": {"steps": 3, "batch_size": 8}})) & keys(few)


def test_what_cannot_change_a_number_is_not_in_the_key(tmp_path: Path) -> None:
    here = plan(tmp_path, run={"workers": 1, "threads": 1, "keep": "none"})
    there = plan(tmp_path, run={"workers": 2, "executor": "inline", "keep": "last"})
    assert keys(here) == keys(there)


def test_key_is_a_hash_of_canonical_json() -> None:
    assert key_of({"b": 1, "a": [1.5, None]}) == key_of({"a": [1.5, None], "b": 1})
    assert len(key_of({})) == 64
    with pytest.raises(ValueError, match="JSON compliant"):
        key_of({"a": float("nan")})


def digest_of(folder: Path) -> str:
    """The code digest of ``guest.block`` under ``folder``, in a process of its own: modules are read once a process."""
    code = "from vitlab.plan.key import code_digest; print(code_digest(frozenset({'guest.block'})))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=folder,
        env={"PYTHONPATH": str(folder)},
    )
    return done.stdout.strip()


def test_code_counts_by_what_it_does(tmp_path: Path) -> None:
    package = tmp_path / "guest"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "unrelated.py").write_text("x = 1\n")
    (package / "helper.py").write_text("factor = 2\n")
    block = textwrap.dedent('''
        """A block."""
        def f(x):
            from guest.helper import factor
            return factor * x
    ''')
    (package / "block.py").write_text(block)
    first = digest_of(tmp_path)
    (package / "block.py").write_text(block.replace('"""A block."""', '"""Another text."""  # and a comment'))
    (package / "unrelated.py").write_text("x = 2\n")
    assert digest_of(tmp_path) == first, "a comment, a docstring or a module it does not import changed the digest"
    (package / "helper.py").write_text("factor = 3\n")
    changed = digest_of(tmp_path)
    assert changed != first, "a module imported inside a function was not followed"
    (package / "block.py").write_text(block.replace("factor * x", "x * factor"))
    assert digest_of(tmp_path) != changed


def test_a_package_that_passes_names_on_is_seen_through(tmp_path: Path) -> None:
    package = tmp_path / "guest"
    (package / "parts").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    passing = '"""Parts."""\nfrom guest.parts.one import ONE as ONE\nfrom guest.parts.two import TWO as TWO\n'
    (package / "parts" / "__init__.py").write_text(passing)
    (package / "parts" / "one.py").write_text("ONE = 1\n")
    (package / "parts" / "two.py").write_text("TWO = 2\n")
    (package / "block.py").write_text("from guest.parts import ONE\n")
    first = digest_of(tmp_path)
    (package / "parts" / "two.py").write_text("TWO = 3\n")
    assert digest_of(tmp_path) == first, "a neighbour of what it imports changed the digest"
    (package / "parts" / "one.py").write_text("ONE = 3\n")
    changed = digest_of(tmp_path)
    assert changed != first
    (package / "parts" / "__init__.py").write_text(passing + "ONE += 1\n")
    assert digest_of(tmp_path) != changed, "a package that does more than passing names on was not read"


def test_the_runner_is_part_of_every_trials_code() -> None:
    found = closure({RUNNER})
    assert {"vitlab.trial", "vitlab.training.loop", "vitlab.noise", "vitlab.data.prepare"} <= set(found)
    strangers = {"vitlab.lab", "vitlab.report", "vitlab.trackers.mlflow", "vitlab.cli", "vitlab.models.vit"}
    strangers |= {"vitlab.plan.expand", "vitlab.plan.match", "vitlab.plan.values", "vitlab.spec.study", "vitlab.spec.run"}
    assert not strangers & set(found), "a change there would retrain everything"
    assert code_digest(frozenset({"vitlab.models.vit"})) != code_digest(frozenset())


# -- trials that need trials ------------------------------------------------------------------------------------------


def fine_tuning(seed: object = "same") -> dict[str, Any]:
    before = {**BASE, "train": {"steps": 5, "batch_size": 8}}
    return {**BASE, "init_from": {"trial": before, "seed": seed}}


def test_a_trial_may_start_from_another_one(tmp_path: Path) -> None:
    found = plan(tmp_path, base=fine_tuning(), seeds=2, design={"one_at_a_time": {"model.drop_path": [0.1]}})
    assert len(found.trials) == 4 and len(found.prerequisites) == 2, "one for each seed, shared by the arms"
    prerequisites = {f"{trial.key}/{trial.code}": trial for trial in found.prerequisites}
    for item in found.trials:
        (needed,) = item.trial.needs.values()
        assert prerequisites[needed].seeds == item.trial.seeds
    alone = plan(tmp_path, base={**BASE, "train": {"steps": 5, "batch_size": 8}}, seeds=2)
    assert {trial.key for trial in found.prerequisites} == keys(alone), "named by its spec, it is the same trial"
    assert len(plan(tmp_path, base=fine_tuning(seed=7), seeds=2).prerequisites) == 1


def test_what_it_starts_from_is_part_of_its_identity(tmp_path: Path) -> None:
    first = plan(tmp_path, base=fine_tuning(), seeds=1)
    other = fine_tuning()
    other["init_from"]["trial"]["train"]["steps"] = 6
    assert keys(first) != keys(plan(tmp_path, base=other, seeds=1)) and keys(first) != keys(plan(tmp_path, seeds=1))
    weights = tmp_path / "weights.safetensors"
    weights.write_bytes(b"one")
    by_file = {**BASE, "init_from": {"checkpoint": str(weights)}}
    before = keys(plan(tmp_path, base=by_file, seeds=1))
    (tmp_path / "moved.safetensors").write_bytes(b"one")
    moved = {**BASE, "init_from": {"checkpoint": str(tmp_path / "moved.safetensors")}}
    assert keys(plan(tmp_path, base=moved, seeds=1)) == before, "a checkpoint counts by its content, not its path"
    weights.write_bytes(b"another")
    assert keys(plan(tmp_path, base=by_file, seeds=1)) != before


def test_mistakes_in_what_it_starts_from_are_placed(tmp_path: Path) -> None:
    wrong = fine_tuning()
    wrong["init_from"]["trial"] = {**BASE, "model": {**BASE["model"], "heads": 3}}
    with pytest.raises(SpecError, match="heads 3"):
        plan(tmp_path, base=wrong)
    with pytest.raises(SpecError, match="no such file"):
        plan(tmp_path, base={**BASE, "init_from": {"checkpoint": "nowhere.pth"}})
    with pytest.raises(SpecError, match="exactly one"):
        plan(tmp_path, base={**BASE, "init_from": {}})
