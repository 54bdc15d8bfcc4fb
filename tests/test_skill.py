"""Tests of the skill text: what it shows can be written, and it lists what is installed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from test_cli import call

from vitlab import registry
from vitlab.cli.show import study_schema
from vitlab.comparison import MEANINGS
from vitlab.driver.planning import plan_study

BASE = """
study: shown
base:
  data: {type: digits, augment: []}
  model: {type: vit, patch_size: 2, dim: 32, depth: 2, heads: 4, position: learned, drop_path: 0.1}
  train: {epochs: 1, ema: {decay: 0.9}, optimizer: {type: adamw, lr: 1.0e-3}}
"""


@pytest.fixture(scope="module")
def skill() -> str:
    code, text, err = call("skill")
    assert code == 0, err
    return text


def test_head_is_that_of_a_skill(skill: str) -> None:
    _, head, body = skill.split("---\n", 2)
    assert yaml.safe_load(head).keys() == {"name", "description"} and body.startswith("\n# vitlab\n")


def test_every_study_and_design_that_is_shown_can_be_planned(skill: str, tmp_path: Path) -> None:
    blocks = re.findall(r"(?ms)^```yaml\n(.*?)^```$", skill)
    assert len(blocks) == 8
    for block in blocks:
        content = yaml.safe_load(block)
        (tmp_path / "shown.yaml").write_text(
            yaml.safe_dump(
                content if "study" in content else {**yaml.safe_load(BASE), **content, "analysis": {"compare": "none"}}
            )
        )
        _, plan = plan_study(tmp_path / "shown.yaml")
        assert len(plan.arms) > 1


@pytest.mark.slow
def test_rules_that_are_shown_can_be_written(skill: str, tmp_path: Path) -> None:
    """Snippets in the text: rules, matching, tuning, seeds, comparisons."""
    snippets = [
        yaml.safe_load(text)
        for text in re.findall(r"`((?:where|match|tune|seeds): [^`]+)`", skill.replace("\n  ", " "))
    ]
    assert len(snippets) >= 4
    for snippet in snippets:
        design = {"one_at_a_time": {"model.position": ["none"]}}
        (tmp_path / "shown.yaml").write_text(yaml.safe_dump({**yaml.safe_load(BASE), "design": design, **snippet}))
        plan_study(tmp_path / "shown.yaml")


def test_every_component_key_and_verdict_is_listed(skill: str) -> None:
    sections = dict(re.findall(r"(?ms)^### ([^\n]+)\n(.*?)(?=^##|\Z)", skill))
    for slot in set(registry.SLOT_MODULES) - {"section", "engine"}:
        names = set(re.findall(r"(?m)^- `([\w:-]+)`", sections[slot]))
        assert names == set(registry.slot(slot).names()), slot
    parts = study_schema()["$defs"]
    for title, part in {
        "`base.train`": "TrainSpec",
        "`analysis`": "Analysis",
        "`run`": "RunSpec",
        "`match`": "Match",
    }.items():
        assert set(re.findall(r"(?m)^- (\w+): ", sections[title])) == parts[part]["properties"].keys(), title
    assert all(f"- `{word}`: " in skill for word in MEANINGS)
    for words in ("test/", "drop a seed", "until a difference is significant"):
        assert words in skill.partition("## Verdicts")[0], words
