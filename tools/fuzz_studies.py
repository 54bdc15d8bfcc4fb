"""A fuzzer of study files: the shipped pipelines, mutated as trees and as text, and every value of one of them.

    python tools/fuzz_studies.py --inputs 100000 --seed 7 --processes 4
    python tools/fuzz_studies.py --seed every --inputs 5000

Every input is read, planned and printed as ``vitlab plan`` does.  With the seed ``every``, input ``i`` puts one wild
value at one place of the study in :data:`WHOLE`.
"""

from __future__ import annotations

import copy
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent))

from fuzzing import Examine, main, outcome
from mutations import NUMBERS, TEXTS, mutate_text, mutate_tree, places, replaced

PIPELINES = sorted(
    file
    for file in (Path(__file__).parents[1] / "pipelines").rglob("*.yaml")
    if "." not in file.stem  # no baselines
)
SOURCES = [(re.sub(r"(?m)^#.*\n", "", text), yaml.safe_load(text)) for text in map(Path.read_text, PIPELINES)]
WHOLE = max((tree for _, tree in SOURCES), key=lambda tree: len(places(tree)))  #: the study with most values
VALUES = (*NUMBERS, *TEXTS, None, True, False, [], {}, [[]], [None], {"type": "none"}, {"a": 1}, ["none", "none"])


def mutant(seed: str, index: int) -> tuple[bytes, dict[str, Any]]:
    """Return the content of a mutated study file, and what ``--set`` changes in it."""
    if seed == "every":
        place, number = divmod(index, len(VALUES))
        path = places(WHOLE)[place % len(places(WHOLE))]
        tree = replaced(copy.deepcopy(WHOLE), path, copy.deepcopy(VALUES[number]))
        return json.dumps(tree, ensure_ascii=False).encode("utf-8", "surrogatepass"), {}
    rng = Random(f"{seed}:{index}")
    text, tree = SOURCES[rng.randrange(len(SOURCES))]
    changes: dict[str, Any] = {}
    if rng.random() < 0.65:
        tree = mutate_tree(rng, tree, changes=rng.choice((1, 1, 2, 4)))
        text = json.dumps(tree, indent=1, ensure_ascii=False)  # which is YAML as well
        if rng.random() < 0.3:
            text = _with_alias(rng, str(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=1000)))
    else:
        text = mutate_text(rng, text, changes=rng.choice((1, 1, 2, 4)))
    if rng.random() < 0.1:
        for _ in range(rng.randint(1, 2)):
            path = rng.choice(
                (
                    "model.dim",
                    "seeds",
                    "seed",
                    "study",
                    "run.executor",
                    "train.steps",
                    "data.root",
                    "model.x.y",
                    "analysis.margin",
                    "design.grid",
                    "a",
                    "model.position.type",
                )
            )
            changes[path] = mutate_tree(rng, rng.choice((8, "none", ["a", 1], {"type": "vit"}, None)), changes=1)
    return text.encode("utf-8", "surrogatepass"), changes


def _with_alias(rng: Random, text: str) -> str:
    """Put an anchor on one value and its alias in place of another."""
    values = list(re.finditer(r"(?m)(?<=: )\S+$", text))
    if len(values) < 2:
        return text
    first, second = sorted(rng.sample(values, 2), key=lambda match: match.start())
    return f"{text[: first.start()]}&x {text[first.start() : second.start()]}*x{text[second.end() :]}"


def examine(seed: str, index: int, folder: Path) -> tuple[str, str]:
    """Run one mutant, and return its ending and what is wrong."""
    content, changes = mutant(seed, index)
    file = folder / "mutant.yaml"
    file.write_bytes(content)
    before = sorted(os.listdir(folder))
    ending, what = outcome(partial(_plan, file, changes, folder), folder)
    if not what and sorted(os.listdir(folder)) != before:
        ending, what = "wrong", f"written: {sorted(os.listdir(folder))}"
    return ending, f"{content.decode('utf-8', 'replace')}\n{changes}\n{what}" if what else ""


def _plan(file: Path, changes: dict[str, Any], folder: Path) -> None:
    """Do what ``vitlab plan`` and the start of ``vitlab run`` do with a study file."""
    from vitlab import lab
    from vitlab.data.prepare import DataSource
    from vitlab.planning.values import Plan

    _, plan = lab.plan_study(file, changes=changes, out=folder / "out")
    if len(plan.trials) < 50:
        text = json.dumps(plan.to_json())
        assert json.dumps(Plan.from_json(json.loads(text)).to_json()) == text
    for data in {json.dumps(trial.spec.plain()["data"], sort_keys=True) for _, trial in _distinct(plan)}:
        DataSource(json.loads(data)).missing()


def _distinct(plan: Any) -> list[tuple[str, Any]]:
    trials = {planned.arm: planned.trial for planned in (*plan.trials, *plan.pending)}
    return list(trials.items())


@cache
def _import_all() -> None:
    """Import what planning imports."""
    sys.dont_write_bytecode = True
    from vitlab import lab

    for file in PIPELINES:
        try:
            lab.plan_study(file)
        except Exception as error:
            print(f"{file}: {error}", file=sys.stderr)


@contextmanager
def prepared() -> Iterator[Examine]:
    """Enter a folder, after importing what planning imports: only inputs are to write and spend time."""
    _import_all()
    before = os.getcwd()
    with tempfile.TemporaryDirectory(prefix="fuzz-studies-") as name:
        os.chdir(name)
        try:
            yield partial(examine, folder=Path(name))
        finally:
            os.chdir(before)


if __name__ == "__main__":
    sys.exit(main(prepared, __doc__))
