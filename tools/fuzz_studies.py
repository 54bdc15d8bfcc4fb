"""A fuzzer of study files: the shipped pipelines, mutated as trees and as text.

    python tools/fuzz_studies.py --mutants 100000 --seed 7 --processes 4

Every mutant is read, planned and printed as ``vitlab plan`` does.  It must end in a plan or in a UserError with at
least one sentence: no other exception, no hang, no write outside its folder, no process and no connection.
Mutant ``i`` of a seed is always the same; ``--only SEED:I`` runs it alone and shows the traceback.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parent))

from mutations import mutate_text, mutate_tree

PIPELINES = sorted(
    file
    for file in (Path(__file__).parents[1] / "pipelines").rglob("*.yaml")
    if "." not in file.stem  # no baselines
)
SOURCES = [(re.sub(r"(?m)^#.*\n", "", text), yaml.safe_load(text)) for text in map(Path.read_text, PIPELINES)]
LIMIT_S = 60  #: CPU time of a mutant
WRITES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate", "shutil.rmtree"}
SPAWNS = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "socket.connect"}


class Hang(BaseException):
    """A mutant that exceeds its CPU time."""


@dataclass(frozen=True)
class Finding:
    """A mutant that does not end as required."""

    mutant: str
    what: str
    text: str

    def __str__(self) -> str:
        return f"--only {self.mutant}\n{self.what}"


class Guard:
    """An audit hook that records writes outside of a folder, processes and connections."""

    def __init__(self) -> None:
        self.folder = ""
        self.broken: list[str] = []
        self._installed = False

    @contextmanager
    def watching(self, folder: Path) -> Iterator[list[str]]:
        if not self._installed:
            sys.addaudithook(self._hook)
            self._installed = True
        self.folder, self.broken = str(folder.resolve()), []
        try:
            yield self.broken
        finally:
            self.folder = ""

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.folder:
            return
        if event == "open":
            path, mode, flags = arguments
            writes = (isinstance(mode, str) and bool(set(mode) & set("wax+"))) or bool(
                isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            )
            if writes and isinstance(path, str | bytes):
                self._check(event, path)
        elif event in WRITES:
            for path in arguments:
                if isinstance(path, str | bytes):
                    self._check(event, path)
        elif event in SPAWNS:
            self.broken.append(f"{event} {arguments!r:.200}")

    def _check(self, event: str, path: str | bytes) -> None:
        where = os.path.realpath(os.fsdecode(path))
        if where != os.devnull and not where.startswith(self.folder + os.sep):
            self.broken.append(f"{event} {where}")


GUARD = Guard()


def mutant(seed: int, index: int) -> tuple[bytes, dict[str, Any]]:
    """Return the content of a mutated study file, and what ``--set`` changes in it."""
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


def examine(seed: int, index: int, folder: Path) -> tuple[str, Finding | None]:
    """Run one mutant.

    Args:
        seed: of all mutants.
        index: of this one.
        folder: the only place where anything may be written.

    Returns:
        ``plan`` or ``refused``, and what was wrong.
    """
    from vitlab.errors import SpecError, UserError

    content, changes = mutant(seed, index)
    file = folder / "mutant.yaml"
    file.write_bytes(content)
    name = f"{seed}:{index}"
    before = sorted(os.listdir(folder))

    def wrong(what: str) -> tuple[str, Finding]:
        return "wrong", Finding(name, what, content.decode("utf-8", "replace"))

    def stop(*_: object) -> None:
        raise Hang

    signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
    try:
        with GUARD.watching(folder) as violations:
            try:
                _plan(file, changes, folder)
                ending = "plan"
            except SpecError as error:
                ending = "refused"
                if not error.problems or not all(problem.message.strip() for problem in error.problems):
                    return wrong("a SpecError that says nothing")
            except UserError as error:
                ending = "refused"
                if not str(error).strip():
                    return wrong("a UserError that says nothing")
    except Hang:
        return wrong(f"more than {LIMIT_S} s of CPU time")
    except Exception:
        return wrong(traceback.format_exc())
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    if violations:
        return wrong("\n".join(violations))
    if sorted(os.listdir(folder)) != before:
        return wrong(f"written: {sorted(os.listdir(folder))}")
    return ending, None


def _plan(file: Path, changes: dict[str, Any], folder: Path) -> None:
    """Do what ``vitlab plan`` and the start of ``vitlab run`` do with a study file."""
    from vitlab import lab
    from vitlab.data.prepare import DataSource
    from vitlab.plan import Plan

    _, plan = lab.plan_study(file, changes=changes, out=folder / "out")
    if len(plan.trials) < 50:
        text = json.dumps(plan.to_json())
        assert json.dumps(Plan.from_json(json.loads(text)).to_json()) == text
    for data in {json.dumps(trial.spec.plain()["data"], sort_keys=True) for _, trial in _distinct(plan)}:
        DataSource(json.loads(data)).missing()


def _distinct(plan: Any) -> list[tuple[str, Any]]:
    trials = {planned.arm: planned.trial for planned in (*plan.trials, *plan.pending)}
    return list(trials.items())


def shard(task: tuple[int, int, int]) -> tuple[Counter[str], list[Finding]]:
    """Run the mutants from ``start`` to ``stop`` in this process."""
    seed, start, stop = task
    counts: Counter[str] = Counter()
    findings = []
    with tempfile.TemporaryDirectory(prefix="fuzz-studies-") as name:
        before = os.getcwd()
        os.chdir(name)
        try:
            for index in range(start, stop):
                ending, finding = examine(seed, index, Path(name))
                counts[ending] += 1
                if finding is not None:
                    findings.append(finding)
        finally:
            os.chdir(before)
    return counts, findings


def prepare() -> None:
    """Import what planning imports, so that only mutants write and spend time."""
    sys.dont_write_bytecode = True
    from vitlab import lab

    for file in PIPELINES:
        try:
            lab.plan_study(file)
        except Exception as error:
            print(f"{file}: {error}", file=sys.stderr)


def main() -> int:
    """Run the fuzzer as a command; return 1 if a mutant does not end as required."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="first mutant")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--only", metavar="SEED:I", help="run one mutant and print it")
    options = parser.parse_args()
    prepare()
    if options.only:
        seed, index = map(int, options.only.split(":"))
        content, changes = mutant(seed, index)
        print(content.decode("utf-8", "replace"), changes, sep="\n")
        counts, findings = shard((seed, index, index + 1))
        print(counts, *findings, sep="\n")
        return 1 if findings else 0
    size = 500
    stop = options.start + options.mutants
    tasks = [(options.seed, start, min(start + size, stop)) for start in range(options.start, stop, size)]
    total: Counter[str] = Counter()
    failed = 0
    tally: Counter[str] = Counter()  # how often each kind of finding was made; the first of each is printed
    with multiprocessing.get_context("fork").Pool(options.processes) as pool:
        for counts, findings in pool.imap(shard, tasks):
            total += counts
            for finding in findings:
                failed += 1
                if (kind := finding.what.strip().splitlines()[-1]) not in tally:
                    print(finding, flush=True)
                tally[kind] += 1
            print(f"{sum(total.values()):,} of {options.mutants:,}: {dict(total)}", file=sys.stderr, flush=True)
    print(f"{sum(total.values()):,} mutants of seed {options.seed}: {failed} findings; {dict(total)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
