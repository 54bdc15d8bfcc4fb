"""Tests of planning: algebra, names, merging, rules, baselines, keys and code digests."""

import importlib
import itertools
import json
import sys
import textwrap
import types
from collections.abc import Iterator
from dataclasses import replace
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import pytest
import yaml

from vitlab.data.prepare import prepare
from vitlab.errors import SpecError
from vitlab.geometry import DataInfo, Work, image_identity
from vitlab.identity import source
from vitlab.identity.code import clear_caches, transitive_digests, trial_code_digest, trial_module_digests
from vitlab.identity.trial import hash_of
from vitlab.lab import plan_study
from vitlab.planning.engine_choice import choose_engine, speed_digest
from vitlab.planning.registration import (
    altered_arms,
    newly_compared_arms,
    no_longer_compared_arms,
    with_first_registration,
)
from vitlab.planning.rules import RuleFault, is_met, parse_rule
from vitlab.planning.sources import may_share_images
from vitlab.planning.values import EngineBenchmark, Plan, Trial
from vitlab.spec import Choice
from vitlab.spec.design import Node, expand_design, format_value, short_names

BASE: dict[str, Any] = {
    "data": {"type": "digits"},
    "model": {"type": "vit", "patch_size": 2, "dim": 8, "depth": 2, "heads": 2, "position": "learned"},
    "train": {"steps": 2, "batch_size": 8},
}


def plan(tmp_path: Path, **study: Any) -> Plan:
    file = tmp_path / "study.yaml"
    file.write_text(yaml.safe_dump({"study": "s", "base": BASE, **study}, sort_keys=False))
    return plan_study(file)[1]


def names(actual: Plan) -> list[str]:
    return [arm.name for arm in actual.arms]


# -- algebra ----------------------------------------------------------------------------------------------------------


def values(node: dict[str, Any]) -> list[dict[str, Any]]:
    return [dict(changes.values) for changes in expand_design(Node.model_validate(node))]


def test_one_at_a_time_is_base_and_single_alternatives() -> None:
    design_values = values({"one_at_a_time": {"a": [1, 2, 3], "b": [4, 5]}})
    assert design_values == [{}, {"a": 1}, {"a": 2}, {"a": 3}, {"b": 4}, {"b": 5}]


def test_leave_one_out_in_each_direction() -> None:
    of = {"a": 0, "b": 0, "c": 0}
    remove = values({"leave_one_out": {"of": of}})
    assert remove == [{}, {"a": 0}, {"b": 0}, {"c": 0}]
    add = values({"leave_one_out": {"of": of, "direction": "add"}})
    assert add == [of, {"b": 0, "c": 0}, {"a": 0, "c": 0}, {"a": 0, "b": 0}]
    both = values({"leave_one_out": {"of": of, "direction": "both"}})
    assert both == remove + add and len(both) == 2 + 2 * 3


def test_part_of_leave_one_out_may_have_several_changes(tmp_path: Path) -> None:
    norms = {"model.norm": "rmsnorm", "model.final_norm": "rmsnorm"}
    arms = expand_design(
        Node.model_validate({"leave_one_out": {"of": {"norms": norms, "model.dim": 8}, "direction": "both"}})
    )
    assert [(arm.label, dict(arm.values)) for arm in arms] == [
        ("", {}),
        ("without norms", norms),
        ("without dim", {"model.dim": 8}),
        ("bare", {**norms, "model.dim": 8}),
        ("bare + norms", {"model.dim": 8}),
        ("bare + dim", norms),
    ]
    assert arms[1].places["model.norm"] == ("design", "leave_one_out", "of", "norms", "model.norm")
    assert arms[3].places["model.dim"] == ("design", "leave_one_out", "of", "model.dim")
    shared = {"norms": norms, "model.norm": "none"}
    plan(tmp_path, design={"leave_one_out": {"of": shared}})
    with pytest.raises(SpecError, match=r"two parts both set 'model\.norm'"):
        plan(tmp_path, design={"leave_one_out": {"of": shared, "direction": "both"}})


def test_grid_is_product_of_levels_or_nodes() -> None:
    levels = {"a": [1, 2], "b": [3, 4, 5]}
    product = [{"a": a, "b": b} for a, b in itertools.product(*levels.values())]
    assert values({"grid": levels}) == product
    nodes = [{"grid": {"a": [1, 2]}}, {"zip": {"b": [3, 4, 5]}}]
    assert values({"grid": nodes}) == product


def test_zip_pairs_union_concatenates_and_arms_are_explicit() -> None:
    rows = {"zip": {"a": [1, 2], "b": [3, 4], "labels": ["x", "y"]}}
    assert values(rows) == [{"a": 1, "b": 3}, {"a": 2, "b": 4}]
    cli_only_option = {"arms": {"plain": None, "big": {"a": 9}}}
    assert values({"union": [rows, cli_only_option]}) == [{"a": 1, "b": 3}, {"a": 2, "b": 4}, {}, {"a": 9}]
    assert [changes.label for changes in expand_design(Node.model_validate(cli_only_option))] == ["plain", "big"]


def test_sample_draws_without_replacement_by_own_seed() -> None:
    over = {"grid": {"a": list(range(10)), "b": list(range(10))}}
    first, again, other = (values({"sample": {"n": 20, "seed": seed, "over": over}}) for seed in (1, 1, 2))
    assert first == again != other
    assert len({tuple(changes.items()) for changes in first}) == 20


def test_nodes_can_be_nested() -> None:
    node = {"grid": [{"union": [{"arms": {"x": {"a": 1}}}, {"grid": {"a": [2, 3]}}]}, {"one_at_a_time": {"b": [7]}}]}
    assert values(node) == [{"a": a, **b} for a in (1, 2, 3) for b in ({}, {"b": 7})]


def test_path_may_occur_in_one_grid_part_only(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"both set 'model\.dim'"):
        plan(tmp_path, design={"grid": [{"grid": {"model.dim": [8]}}, {"grid": {"model.dim": [16]}}]})


TENS = {f"train.optimizer.a{index}": list(range(10)) for index in range(7)}


@pytest.mark.parametrize(
    ("design", "message"),
    [
        ({"grid": TENS}, "a grid of 10,000,000 arms; a design has at most 1,000,000"),
        ({"sample": {"n": 3, "over": {"union": [{"grid": TENS}] * 2}}}, "a grid of 10,000,000 arms"),
    ],
)
def test_unbounded_design_is_refused_with_place(tmp_path: Path, design: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=rf":\d+:\d+: {message}"):
        plan(tmp_path, design=design)


def test_union_is_refused_at_the_part_that_exceeds_the_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("vitlab.spec.design.MAX_TRIALS", 250)
    with pytest.raises(SpecError, match=r":\d+:\d+: a union of 300 arms; a design has at most 250"):
        plan(tmp_path, design={"union": [{"grid": dict(list(TENS.items())[:2])}] * 100})


def test_unbounded_trials_are_refused(tmp_path: Path) -> None:
    two = {"one_at_a_time": {"model.position": ["none"]}}
    with pytest.raises(SpecError, match="2 arms of 500,001 seeds each; a study has at most 1,000,000 trials"):
        plan(tmp_path, design=two, seeds=500_001)
    knobs = {f"train.optimizer.{name}": [0.1 * k for k in range(1, 9)] for name in ("lr", "weight_decay")}
    with pytest.raises(SpecError, match="64 combinations make 12,800,000 trainings; a tuning has at most 1,000,000"):
        plan(tmp_path, design=two, tune={"knobs": knobs, "seeds": 100_000})


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"epochs": 1e300}, r"base\.train\.epochs must be less than or equal to 1000000000.*; found 1e\+300"),
        ({"steps": 10**30}, r"base\.train\.steps must be less than or equal to 1000000000"),
        ({"images": 10**30}, r"base\.train\.images must be less than or equal to 1000000000000"),
        ({"steps": 2, "evaluations": 10**12}, r"base\.train\.evaluations must be less than or equal to 1000000"),
    ],
)
def test_unbounded_training_is_refused(tmp_path: Path, train: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        plan(tmp_path, base={**BASE, "train": train})


# -- names, merging, baselines ----------------------------------------------------------------------------------------


def test_variation_beside_label_is_in_arm_name(tmp_path: Path) -> None:
    parts = {"leave_one_out": {"of": {"model.position": "none", "train.clip_grad": 1.0}}}
    study_plan = plan(tmp_path, design={"grid": [parts, {"one_at_a_time": {"model.dim": [16]}}]})
    assert names(study_plan) == [
        "baseline",
        "dim=16",
        "without position",
        "without position, dim=16",
        "without clip_grad",
        "without clip_grad, dim=16",
    ]
    byhand = {"arms": {"plain": {"model.position": "none"}}}
    labels = {"zip": {"model.dim": [16], "train.batch_size": [4], "labels": ["wide"]}}
    study_plan = plan(
        tmp_path,
        design={
            "union": [{"grid": {"model.depth": [2]}}, {"grid": [byhand, labels, {"grid": {"model.depth": [1, 3]}}]}]
        },
    )
    assert names(study_plan) == ["depth=2", "plain, wide, depth=1", "plain, wide, depth=3"]


@pytest.mark.parametrize(
    ("design", "expected"),
    [
        (
            {"grid": {"model.position": ["none", {"type": "rope2d", "theta": 50}], "model.depth": [1, 2]}},
            [
                "position=none, depth=1",
                "position=none, depth=2",
                "position=rope2d(theta=50), depth=1",
                "position=rope2d(theta=50), depth=2",
            ],
        ),
        (
            {"zip": {"model.position": ["learned", ["learned", "rope2d"]], "model.norm": ["layernorm", "rmsnorm"]}},
            ["learned, layernorm", "learned+rope2d, rmsnorm"],
        ),
        ({"one_at_a_time": {"model.position": ["rope2d"]}}, ["baseline", "position=rope2d"]),
        # The position of two models is rope2d: alone, the word would name two arms.
        (
            {
                "union": [
                    {"grid": {"model.position": ["rope2d", "learned"], "model.depth": [1]}},
                    {"grid": {"distill.teacher.trial.model.position": ["rope2d"], "model.depth": [1]}},
                ]
            },
            [
                "model.position=rope2d, depth=1",
                "model.position=learned, depth=1",
                "trial.model.position=rope2d, depth=1",
            ],
        ),
    ],
)
def test_components_of_several_values_are_named_without_path(
    design: dict[str, Any], expected: list[str], tmp_path: Path
) -> None:
    base = BASE
    if "union" in design:
        teacher = {"trial": {"model": {"type": "vit", "size": "pico", "patch_size": 4}, "train": BASE["train"]}}
        base = {**BASE, "distill": {"teacher": teacher}}
    arms = names(plan(tmp_path, base=base, design=design, analysis={"compare": "none"}))
    assert arms == expected


def test_arms_that_a_further_level_renames_stay_registered(tmp_path: Path) -> None:
    def grid(*positions: str) -> Plan:
        return plan(tmp_path, design={"grid": {"model.position": [*positions], "model.depth": [2, 1]}})

    first = with_first_registration(grid("learned", "rope2d"), None, lambda trial: False)
    later = with_first_registration(grid("learned", "rope2d", "none"), first, lambda trial: True)
    assert names(first)[3] == "rope2d, depth=1" and names(later)[3] == "position=rope2d, depth=1"
    assert newly_compared_arms(later) == {"position=none, depth=2", "position=none, depth=1"}
    assert no_longer_compared_arms(later) == altered_arms(later) == []


def test_renamed_arm_keeps_what_was_known_and_takes_no_registered_name(tmp_path: Path) -> None:
    def arms(**values: str) -> Plan:
        base = {"baseline": {}, **{name: {"model.position": value} for name, value in values.items()}}
        return plan(tmp_path, design={"arms": base}, seeds=1)

    first = with_first_registration(arms(a="rope2d", b="none"), None, lambda trial: True)
    assert first.registered is not None and first.registered.known.comparisons == ("a", "b")
    renamed = with_first_registration(arms(new="rope2d", b="none"), first, lambda trial: True)
    assert renamed.registered is not None and renamed.registered.known.comparisons == ("new", "b")
    swapped = with_first_registration(arms(a="none"), first, lambda trial: True)
    assert swapped.registered is not None and swapped.registered.family == (("a", "baseline"), ("b", "baseline"))
    assert altered_arms(swapped) == ["a"]


def test_arm_names_have_the_differences() -> None:
    assert format_value({"type": "rope2d", "theta": 50}) == "rope2d(theta=50)"
    assert format_value(1e-3) == "0.001" and format_value("none") == "none" and format_value([1, "a"]) == "[1, a]"
    short = short_names(["model.dim", "model.head.pool", "data.pool", "model.position.type"])
    assert list(short.values()) == ["dim", "head.pool", "data.pool", "position"]


def test_equal_arms_merge_under_first_name(tmp_path: Path) -> None:
    study_plan = plan(tmp_path, design={"one_at_a_time": {"model.position": ["learned", "none", {"type": "none"}]}})
    assert names(study_plan) == ["baseline", "position=none"]
    assert study_plan.arm("baseline").aliases == ("position=learned",)
    assert any("position=learned" in note for note in study_plan.notes)


def test_explicit_defaults_give_same_arm(tmp_path: Path) -> None:
    arms = {"a": {"model.mlp": {"type": "gelu"}}, "b": {"model.mlp": {"type": "gelu", "ratio": 4.0}}, "c": {}}
    assert names(plan(tmp_path, design={"arms": arms}, analysis={"compare": "none"})) == ["a"]


def test_new_type_replaces_slot_and_shortest_paths_apply_first(tmp_path: Path) -> None:
    arms = {
        "a": None,
        "b": {"train.optimizer.lr": 0.5, "train.optimizer": "sgd"},
        "c": {"train.optimizer.type": "sgd"},
        "d": {"train.optimizer.lr": 0.25, "train.optimizer.type": "sgd"},
    }
    study_plan = plan(tmp_path, design={"arms": arms}, analysis={"compare": "none"})
    optimizers = {item.arm: item.trial.spec.plain()["train"]["optimizer"] for item in study_plan.trials}
    assert optimizers["a"]["type"] == "adamw"
    assert optimizers["b"]["type"] == optimizers["c"]["type"] == "sgd"
    assert optimizers["b"]["lr"] == 0.5 != optimizers["c"]["lr"]
    assert optimizers["d"] == optimizers["b"] | {"lr": 0.25}


def test_tuned_option_of_arm_with_other_type_is_tried(tmp_path: Path) -> None:
    study_plan = plan(
        tmp_path,
        design={"one_at_a_time": {"train.optimizer.type": ["sgd"]}},
        tune={"knobs": {"train.optimizer.lr": [0.1, 0.2]}, "per": "arm", "seeds": 1},
    )
    tried = [
        [item.trial.spec.plain()["train"]["optimizer"]["lr"] for rival in tuning.rivals for item in rival.trials]
        for tuning in study_plan.tuning
    ]
    assert tried == [[0.1, 0.2], [0.1, 0.2]]


def test_new_length_replaces_old_one(tmp_path: Path) -> None:
    study_plan = plan(tmp_path, design={"one_at_a_time": {"train.images": [64]}})
    trains = {item.arm: item.trial.spec.plain()["train"] for item in study_plan.trials}
    assert trains["images=64"]["images"] == 64 and "steps" not in trains["images=64"]


def test_baseline_is_arm_equal_to_base(tmp_path: Path) -> None:
    study_plan = plan(tmp_path, design={"grid": {"model.position": ["none", "learned"], "model.depth": [1, 2]}})
    baselines = {arm.name: arm.baseline for arm in study_plan.arms}
    assert baselines.pop("position=learned, depth=2") is None
    assert study_plan.find().arm == study_plan.find(seed=0).arm == "position=learned, depth=2"
    assert set(baselines.values()) == {"position=learned, depth=2"}


def test_compare_to_finds_counterpart_of_each_arm(tmp_path: Path) -> None:
    study_plan = plan(
        tmp_path,
        design={"grid": {"model.position": ["none", "learned"], "model.depth": [1, 3]}},
        analysis={"compare": {"to": {"model.position": "none"}}},
    )
    assert {arm.name: arm.baseline for arm in study_plan.arms} == {
        "position=none, depth=1": None,
        "position=none, depth=3": None,
        "position=learned, depth=1": "position=none, depth=1",
        "position=learned, depth=3": "position=none, depth=3",
    }


def test_additions_are_compared_with_bare_recipe(tmp_path: Path) -> None:
    of = {"model.position": "none", "model.mlp.ratio": 1.0, "model.depth": 1}
    study_plan = plan(tmp_path, design={"leave_one_out": {"of": of, "direction": "both"}})
    baselines = {arm.name: arm.baseline for arm in study_plan.arms}
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
    assert is_met(parse_rule(rule), trial) is met


@pytest.mark.parametrize(
    "rule", ["__import__('os')", "model.dim()", "[x for x in model]", "model['dim']", "lambda: 1", "1 if 2 else 3",
             "2 ** 9999", "f'{model}'", "x := 1", "", "a b", "'a' " * 200],
)  # fmt: skip
def test_invalid_rules_are_refused(rule: str) -> None:
    with pytest.raises(RuleFault):
        parse_rule(rule)


def test_rule_skips_arm_with_reason(tmp_path: Path) -> None:
    study_plan = plan(
        tmp_path,
        design={"one_at_a_time": {"model.depth": [1, 3]}},
        where=[{"require": "model.depth < 3", "because": "too slow here"}],
    )
    assert study_plan.arm("depth=3").skip == "too slow here"
    assert {item.arm for item in study_plan.trials} == {"baseline", "depth=1"}


def test_incompatible_parts_skip_arm_with_reason(tmp_path: Path) -> None:
    design = {"one_at_a_time": {"model.prefix": [[]], "model.position": ["none"]}}
    study_plan = plan(tmp_path, design=design)
    skipped = [arm for arm in study_plan.arms if arm.skip]
    assert len(skipped) == 1 and "class" in skipped[0].skip


# -- identity ---------------------------------------------------------------------------------------------------------


def keys(actual: Plan) -> set[str]:
    return {item.trial.key for item in actual.trials}


def test_plan_survives_json(tmp_path: Path) -> None:
    study_plan = plan(tmp_path, design={"one_at_a_time": {"model.position": ["none"]}}, question="why?")
    assert Plan.from_json(study_plan.to_json()) == study_plan


def test_key_depends_on_seeds_and_values_but_not_names(tmp_path: Path) -> None:
    few = plan(tmp_path, seeds=2)
    more = plan(tmp_path, seeds=3, question="another")
    assert len(keys(few)) == 2 and keys(few) < keys(more)
    arms = plan(tmp_path, seeds=2, design={"arms": {"whatever": {}}}, analysis={"compare": "none"})
    assert keys(arms) == keys(few)
    assert not keys(plan(tmp_path, base={**BASE, "train": {"steps": 3, "batch_size": 8}})) & keys(few)


def test_key_ignores_settings_without_effect_on_numbers(tmp_path: Path) -> None:
    here = plan(tmp_path, run={"workers": 1, "threads": 1, "keep": "none"})
    there = plan(tmp_path, run={"workers": 2, "executor": "inline", "keep": "last"})
    assert keys(here) == keys(there)


def test_key_is_hash_of_canonical_json() -> None:
    assert hash_of({"b": 1, "a": [1.5, None]}) == hash_of({"a": [1.5, None], "b": 1})
    assert len(hash_of({})) == 64
    with pytest.raises(ValueError, match="JSON compliant"):
        hash_of({"a": float("nan")})


@pytest.fixture
def reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make modules of ``tmp_path`` readable, with empty caches before and after."""
    monkeypatch.syspath_prepend(tmp_path)
    forget()
    yield
    forget()


def forget() -> None:
    importlib.invalidate_caches()
    source._texts.clear()
    clear_caches()


def digest() -> str:
    """Return the current code digest of ``guest.block``."""
    forget()
    return trial_code_digest(frozenset({"guest.block"}))


@pytest.mark.usefixtures("reading")
def test_code_digest_depends_on_syntax_only(tmp_path: Path) -> None:
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
    first = digest()
    (package / "block.py").write_text(block.replace('"""A block."""', '"""Another text."""  # and a comment'))
    (package / "unrelated.py").write_text("x = 2\n")
    assert digest() == first, "a comment, a docstring or a module it does not import changed the digest"
    (package / "helper.py").write_text("factor = 3\n")
    changed = digest()
    assert changed != first, "a module imported inside a function was not followed"
    (package / "block.py").write_text(block.replace("factor * x", "x * factor"))
    assert digest() != changed


@pytest.mark.usefixtures("reading")
def test_code_digest_follows_reexports(tmp_path: Path) -> None:
    package = tmp_path / "guest"
    (package / "parts").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    passing = '"""Parts."""\nfrom guest.parts.one import ONE as ONE\nfrom guest.parts.two import TWO as TWO\n'
    (package / "parts" / "__init__.py").write_text(passing)
    (package / "parts" / "one.py").write_text("ONE = 1\n")
    (package / "parts" / "two.py").write_text("TWO = 2\n")
    (package / "block.py").write_text("from guest.parts import ONE\n")
    first = digest()
    (package / "parts" / "two.py").write_text("TWO = 3\n")
    assert digest() == first, "a neighbour of what it imports changed the digest"
    (package / "parts" / "one.py").write_text("ONE = 3\n")
    changed = digest()
    assert changed != first
    (package / "parts" / "__init__.py").write_text(passing + "ONE += 1\n")
    assert digest() != changed, "a package that does more than passing names on was not read"


@pytest.mark.usefixtures("reading")
def test_modules_are_read_without_import(tmp_path: Path) -> None:
    package = tmp_path / "guest"
    (package / "parts").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    for name in ("block", "a", "b", "c", "d", "parts/__init__"):
        (package / f"{name}.py").write_text(f"raise RuntimeError('imported')  # {name}\n")
    (package / "block.py").write_text(
        textwrap.dedent("""
            from typing import TYPE_CHECKING
            import nowhere.to_be_found
            if TYPE_CHECKING:
                from guest import a
            else:
                from guest import b
            if not TYPE_CHECKING:
                from .c import C
            def f(x):
                try:
                    from guest.parts import d
                except ImportError:
                    from . import d
                match x:
                    case 1:
                        import guest.parts
        """)
    )
    modules = set(transitive_digests({"guest.block"}))
    assert modules == {f"guest{name}" for name in ("", ".block", ".b", ".c", ".d", ".parts")}
    assert not [module for module in sys.modules if module.partition(".")[0] == "guest"]


@pytest.mark.usefixtures("reading")
def test_unparsable_code_is_digested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled modules count by their bytes; notebook code cannot be read and never counts as known."""
    package = tmp_path / "guest"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "block.py").write_text("from guest import fast\n")
    compiled = package / f"fast{EXTENSION_SUFFIXES[0]}"
    compiled.write_bytes(b"one")
    first = digest()
    compiled.write_bytes(b"two")
    assert digest() != first
    monkeypatch.setitem(sys.modules, "guest.block", types.ModuleType("guest.block"))  # it has no file
    here = digest()
    monkeypatch.setattr(source, "SESSION", "that of another process")
    assert digest() != here


def test_runner_and_engines_are_part_of_code_of_every_trial() -> None:
    modules = trial_module_digests(frozenset(), source.read_source_for_new_worker)
    assert {"vitlab.runner.execution", "vitlab.training.loop", "vitlab.noise", "vitlab.data.prepare"} <= set(modules)
    engines = {f"vitlab.engines.{name}" for name in ("vmap", "compiled", "batch_last", "batch_last_kernels")}
    assert engines <= set(modules), "each may have computed the trial"
    strangers = {"vitlab.lab", "vitlab.report", "vitlab.trackers.mlflow", "vitlab.cli", "vitlab.models.convnet"}
    strangers |= {
        "vitlab.planning.expand",
        "vitlab.planning.match",
        "vitlab.planning.values",
        "vitlab.spec.study",
        "vitlab.spec.run",
    }
    assert not strangers & set(modules), "a change there would retrain everything"
    assert trial_code_digest(frozenset({"vitlab.models.convnet"})) != trial_code_digest(frozenset())


# -- prerequisites ----------------------------------------------------------------------------------------------------


def fine_tuning(seed: object = "same") -> dict[str, Any]:
    before = {**BASE, "train": {"steps": 5, "batch_size": 8}}
    return {**BASE, "init_from": {"trial": before, "seed": seed}}


def test_trial_may_start_from_another(tmp_path: Path) -> None:
    study_plan = plan(tmp_path, base=fine_tuning(), seeds=2, design={"one_at_a_time": {"model.drop_path": [0.1]}})
    assert len(study_plan.trials) == 4 and len(study_plan.prerequisites) == 2, "one for each seed, shared by the arms"
    prerequisites = {f"{trial.key}/{trial.code}": trial for trial in study_plan.prerequisites}
    for item in study_plan.trials:
        (dependency,) = item.trial.needs.values()
        assert prerequisites[dependency].seeds == item.trial.seeds
    source = study_plan.trials[0].trial.spec.init_from
    assert source is not None and source.trial == study_plan.prerequisites[0].spec
    assert Plan.from_json(study_plan.to_json()) == study_plan
    alone = plan(tmp_path, base={**BASE, "train": {"steps": 5, "batch_size": 8}}, seeds=2)
    assert {trial.key for trial in study_plan.prerequisites} == keys(alone), "named by its spec, it is the same trial"
    assert len(plan(tmp_path, base=fine_tuning(seed=7), seeds=2).prerequisites) == 1


def test_start_trial_is_part_of_key(tmp_path: Path) -> None:
    first = plan(tmp_path, base=fine_tuning(), seeds=1)
    other = fine_tuning()
    other["init_from"]["trial"]["train"]["steps"] = 6
    assert keys(first) != keys(plan(tmp_path, base=other, seeds=1)) and keys(first) != keys(plan(tmp_path, seeds=1))
    weights = tmp_path / "weights.safetensors"
    weights.write_bytes(b"one")
    by_file = {**BASE, "init_from": {"checkpoint": str(weights)}}
    before = keys(plan(tmp_path, base=by_file, seeds=1))
    (tmp_path / "moved.safetensors").write_bytes(b"one")
    other_base = {**BASE, "init_from": {"checkpoint": str(tmp_path / "moved.safetensors")}}
    assert keys(plan(tmp_path, base=other_base, seeds=1)) == before, "a checkpoint counts by its content, not its path"
    weights.write_bytes(b"another")
    assert keys(plan(tmp_path, base=by_file, seeds=1)) != before


def test_mistakes_in_start_trial_have_a_place(tmp_path: Path) -> None:
    wrong = fine_tuning()
    wrong["init_from"]["trial"] = {**BASE, "model": {**BASE["model"], "heads": 3}}
    with pytest.raises(SpecError, match="heads 3"):
        plan(tmp_path, base=wrong)
    with pytest.raises(SpecError, match="no such file"):
        plan(tmp_path, base={**BASE, "init_from": {"checkpoint": "nowhere.pth"}})
    with pytest.raises(SpecError, match="exactly one"):
        plan(tmp_path, base={**BASE, "init_from": {}})


def test_pretraining_excludes_validation_images_of_trial(tmp_path: Path) -> None:
    vary = {"count": 2, "vary": ["init", "split"]}
    study_plan = plan(tmp_path, base=fine_tuning(seed=7), seeds=vary)
    bodies = {f"{trial.key}/{trial.code}": trial for trial in study_plan.prerequisites}
    for item in study_plan.trials:
        body = bodies[item.trial.needs["init_from"]]
        assert (body.seeds["init"], body.seeds["split"]) == (7, item.seed)


OTHER: dict[str, Any] = {**BASE, "data": {"type": "synthetic", "image_size": 8, "num_classes": 10}}
HELD_OUT = {"type": "digits", "validation": 0.4}


@pytest.mark.parametrize(
    ("base", "sentence"),
    [
        (
            {**BASE, "data": HELD_OUT, "init_from": {"trial": BASE}},
            "the pretraining's data.validation is 0.2, and here it is 0.4",
        ),
        (
            {**BASE, "data": HELD_OUT, "init_from": {"trial": {**OTHER, "init_from": {"trial": BASE}}}},
            "the pretraining's pretraining's data.validation is 0.2, and here it is 0.4",
        ),
        (
            {
                **BASE,
                "data": HELD_OUT,
                "init_from": {"trial": {**OTHER, "distill": {"teacher": {"trial": BASE}}}},
            },
            "the pretraining's teacher's data.validation is 0.2, and here it is 0.4",
        ),
    ],
    ids=["body", "body-of-body", "teacher-of-body"],
)
def test_weights_of_other_validation_split_are_refused(base: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as caught:
        plan(tmp_path, base=base)
    assert len(caught.value.problems) == 1 and sentence in str(caught.value)


@pytest.mark.parametrize(
    "data", [{"validation": 0.2}, {"fraction": 0.5}, {"per_class": 5}, {"classes": [0, 1]}, {"size": 16}]
)
def test_pretraining_may_differ_in_split_independent_options(data: dict[str, Any], tmp_path: Path) -> None:
    """Checked with the images: no training image of the pretraining is a validation image here."""
    before = {**BASE, "data": {"type": "digits", **data}}
    study_plan = plan(tmp_path, base={**BASE, "init_from": {"trial": before}}, seeds={"count": 2, "vary": ["split"]})
    bodies = {f"{trial.key}/{trial.code}": trial for trial in study_plan.prerequisites}
    for item in study_plan.trials:
        body = bodies[item.trial.needs["init_from"]]
        training_part, validation_part = (prepare(one.spec.data, one.seeds) for one in (body, item.trial))
        assert not set(training_part.train.id_N.tolist()) & set(validation_part.val.id_N.tolist())


def test_indirect_pretraining_has_split_of_trial(tmp_path: Path) -> None:
    """For any trials between them, and for any named seed."""
    between = {**OTHER, "init_from": {"trial": BASE, "seed": 7}}
    base = {**BASE, "init_from": {"trial": between, "seed": 7}}
    study_plan = plan(tmp_path, base=base, seeds={"count": 2, "vary": ["init", "split"]})
    by_name = {f"{trial.key}/{trial.code}": trial for trial in study_plan.prerequisites}
    for item in study_plan.trials:
        first = by_name[by_name[item.trial.needs["init_from"]].needs["init_from"]]
        assert (first.seeds["init"], first.seeds["split"]) == (7, item.seed)


def test_trial_weight_file_has_known_split(tmp_path: Path) -> None:
    source_trial = plan(tmp_path, base=BASE, seeds=1).trials[0].trial
    after = plan(tmp_path, base={**OTHER, "init_from": {"trial": BASE}}, seeds=1)
    (dependency,) = after.trials[0].trial.needs.values()
    for name, trial in ((dependency, source_trial), ("after/code", after.trials[0].trial)):
        folder = tmp_path / "trials" / name
        folder.mkdir(parents=True)
        (folder / "spec.json").write_text(json.dumps(trial.to_json()))
        (folder / "weights.safetensors").write_bytes(b"")

    def notes(name: str, **data: Any) -> list[str]:
        source = {"checkpoint": str(tmp_path / "trials" / name / "weights.safetensors")}
        base = {**BASE, "data": {"type": "digits", **data}, "init_from": source}
        return [note for note in plan(tmp_path, base=base, seeds=1).notes if "seen in pretraining" in note]

    assert notes(dependency) == notes("after/code") == []
    for name in (dependency, "after/code"):  # the trial itself, and one that took its weights
        (note,) = notes(name, validation=0.4)
        assert "another split of digits (data.validation is 0.2, and here it is 0.4)" in note
    (tmp_path / "trials" / dependency / "spec.json").write_text("[1]")
    assert notes(dependency, validation=0.4) == [], "no spec of a trial"


# -- engines ----------------------------------------------------------------------------------------------------------


def engines(actual: Plan) -> dict[str, str]:
    return {arm.name: arm.engine for arm in actual.arms}


def test_plan_names_engine_of_arm(tmp_path: Path) -> None:
    arms = {
        "base": {},
        "averaged": {"train.ema": {"decay": 0.9}},
        "large": {"train.batch_size": 100_000},
        "skipped": {"model.heads": 4},
        "biased": {"model.position": "alibi2d"},
        "normalised": {"model.attention": {"type": "auto", "qk_norm": "layernorm"}},
        "narrow": {"train.precision": "bf16"},
    }
    study: dict[str, Any] = {
        "design": {"arms": arms},
        "where": [{"require": "model.heads == 2", "because": "as said"}],
    }
    study_plan = plan(tmp_path, **study)
    loops = {"averaged": "loop", "large": "loop", "skipped": ""}
    supported = {"base": "batch_last", "biased": "batch_last"}
    assert engines(study_plan) == {**supported, **loops, "normalised": "vmap", "narrow": "vmap"}
    assert engines(plan(tmp_path, **study, run={"engine": "vmap"}))["large"] == "vmap"
    assert set(engines(plan(tmp_path, **study, run={"engine": "loop"})).values()) == {"loop", ""}


def test_benchmark_overrides_engine_rule(tmp_path: Path) -> None:
    study_plan = plan(tmp_path, design={"one_at_a_time": {"train.optimizer.lr": [1e-4], "model.depth": [1]}}, seeds=2)
    base, faster, shallow = (study_plan.find(arm.name, 0).trial for arm in study_plan.arms)
    assert (
        speed_digest(base)
        == speed_digest(study_plan.find("baseline", 1).trial)
        == speed_digest(faster)
        != speed_digest(shallow)
    )
    longer = plan(tmp_path, base={**BASE, "train": {"epochs": 3, "batch_size": 8, "schedule": "constant"}})
    assert speed_digest(longer.find("baseline", 0).trial) == speed_digest(base), (
        "lengths and rates do not decide how fast a step is"
    )
    probes = {speed_digest(base): EngineBenchmark("loop", 2, {"loop": 3.0, "vmap": 2.0}, {})}

    def little(_: Trial) -> Work:
        return Work(1)

    assert {choose_engine(one, "measured", little, probes).engine for one in (base, faster)} == {"loop"}
    assert choose_engine(shallow, "measured", little, probes).engine == "vmap", (
        "by the rule, where nothing was measured"
    )
    assert choose_engine(base, "auto", little, probes).engine == "vmap"


def test_further_test_images_do_not_hide_another_split() -> None:
    mine, theirs = (Choice("cifar10", {"validation": share}) for share in (0.1, 0.2))
    info = DataInfo(image=(8, 8), channels=1, classes=2, identity="cifar10:a")
    plain, further = info.content, replace(info, test_sets="0123456789abcdef" * 2).content
    assert may_share_images(mine, further, theirs, plain) and may_share_images(mine, None, theirs, further)
    assert not may_share_images(mine, further, theirs, f"cifar10:c+{'0' * 32}")
    assert not may_share_images(mine, plain, Choice("cifar100"), plain)


def test_identity_of_images_is_without_further_ones() -> None:
    assert image_identity("folder:a+" + "0123456789abcdef" * 2) == image_identity("folder:a") == "folder:a"
    assert image_identity("mylab:1.0+local") == "mylab:1.0+local"


def test_teacher_is_not_tested_on_the_further_images_of_its_student(tmp_path: Path) -> None:
    teacher = {"model": BASE["model"], "train": {"steps": 1}}
    base = {
        "data": {"type": "digits", "corrupted": ["fog"]},
        "model": BASE["model"],
        "train": {"steps": 1},
        "distill": {"teacher": {"trial": teacher}},
    }
    study_plan = plan(tmp_path, base=base, seeds=1)
    assert study_plan.trials[0].trial.spec.data.options["corrupted"] is not None
    assert study_plan.prerequisites[0].spec.data.options.get("corrupted") is None


# -- notes and refusals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("train", "share"),
    [
        ({"steps": 200, "ema": {"decay": 0.99996, "warmup": 0}}, 99),
        ({"steps": 200, "ema": {"decay": 0.99, "warmup": 0}}, 13),  # 0.99 ** 200 = 0.134
        ({"steps": 300, "ema": {"decay": 0.99, "warmup": 0}}, 0),  # 0.049
        ({"steps": 200, "ema": {"decay": 0.99996}}, 0),
        ({"epochs": 2, "ema": {"decay": 0.99, "warmup": 0}}, 15),  # 2 epochs of 1,149 images: 190 steps of 12
    ],
)
def test_average_of_initial_weights_is_noted(train: dict[str, Any], share: int, tmp_path: Path) -> None:
    """The weights before the first step have the share decay ** steps of an average without a warm-up."""
    batch = {"batch_size": 8 if "steps" in train else 12}
    base = {**BASE, "train": {**train, **batch}}
    notes = [note for note in plan(tmp_path, base=base, seeds=1).notes if "initial weights" in note]
    assert len(notes) == bool(share)
    if share:
        assert f"still holds {share} % of the initial weights ('baseline')" in notes[0]


def test_note_of_an_optimizer_is_in_the_plan(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_optimizer")
    actual = plan(tmp_path, seeds=1, design={"one_at_a_time": {"train.optimizer": ["soap"]}})
    assert [note for note in actual.notes if note.startswith("optimizer 'soap': rounding chooses")]


@pytest.mark.parametrize(
    ("objective", "changes", "differs"),
    [
        ("mae", {"train.loss": ["bce"]}, "train.loss"),
        ("mae", {"model.head": [{"type": "linear", "pool": "gap"}]}, "model.head"),
        ("dino", {"model.head": ["mlp"]}, "model.head"),
        ("dino", {"model.head": [{"type": "linear", "pool": "gap"}]}, ""),
        ("mae", {"train.objective.mask_ratio": [0.5]}, ""),
    ],
)
def test_arms_that_train_the_same_are_refused(
    objective: str, changes: dict[str, Any], differs: str, tmp_path: Path
) -> None:
    base = {
        **BASE,
        "data": {"type": "digits", "augment": ["random_resized_crop"]},
        "train": {**BASE["train"], "objective": {"type": objective}},
    }
    study: dict[str, Any] = {"base": base, "seeds": 1, "analysis": {"metric": "val/loss"}}
    study["design"] = {"one_at_a_time": changes}
    if not differs:
        assert len(plan(tmp_path, **study).arms) == 2
        return
    with pytest.raises(SpecError) as caught:
        plan(tmp_path, **study)
    (problem,) = caught.value.problems
    assert f"train the same: they differ only in {differs}, which their objective never reads" in str(problem)


def test_kept_head_of_other_classes_is_refused(tmp_path: Path) -> None:
    def start(classes: list[int], head: str) -> Plan:
        before = {**BASE, "data": {"type": "digits", "classes": classes}}
        own = {**BASE, "data": {"type": "digits", "classes": [2, 3]}}
        return plan(tmp_path, base={**own, "init_from": {"trial": before, "head": head}}, seeds=1)

    start([2, 3], "keep")
    start([0, 1], "new")
    for classes in ([0, 1], [3, 2]):
        with pytest.raises(SpecError, match="head: keep keeps the outputs of other classes"):
            start(classes, "keep")
