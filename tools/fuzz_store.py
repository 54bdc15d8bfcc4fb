"""A fuzzer of stored files: a finished study whose files are cut, flipped, retyped, emptied or replaced by folders.

    python tools/fuzz_store.py --inputs 10000 --seed 7

Every mutant is read by the commands that read a store.  Each must answer or end in an error with a sentence: no other
exception, no hang, no write outside the folder.  A run must then complete the study, with the results it had.
Mutant ``i`` of a seed is always the same; ``--only SEED:I`` runs it alone and shows the traceback.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import yaml

sys.path.insert(0, str(Path(__file__).parent))

from fuzzing import Examine, main, outcome, quiet
from mutations import mutate_bytes, mutate_tree

STUDY = {
    "study": "tiny",
    "question": "Does the position matter?",
    "base": {
        "data": {"type": "synthetic", "image_size": 8, "train_images": 64, "test_images": 16, "num_classes": 2},
        "model": {"type": "vit", "patch_size": 4, "dim": 8, "depth": 1, "heads": 2, "position": "sinusoidal"},
        "train": {"steps": 2, "batch_size": 16, "evaluations": 2},
    },
    "design": {"one_at_a_time": {"model.position": ["none"]}},
    "seeds": 2,
    "run": {"executor": "inline", "tracker": "none", "keep": "last"},
}

READERS: tuple[tuple[str, ...], ...] = (
    ("report", "tiny"),
    ("report", "tiny", "--format", "csv"),
    ("report", "tiny", "--format", "json"),
    ("report", "tiny", "--format", "md"),
    ("status", "tiny"),
    ("status", "tiny", "--json"),
    ("logs", "tiny", "--arm", "baseline", "--seed", "0"),
    ("plan", "STUDY"),
    ("gc",),
    ("results",),
    ("predictions",),
    ("load",),
    ("sync",),
)


def build(root: Path) -> Path:
    """Train the study in ``root/out``.  Returns its file."""
    from vitlab import lab

    file = root / "tiny.yaml"
    file.write_text(yaml.safe_dump(STUDY))
    answer = lab.run(file, out=root / "out")
    assert answer.trained == 4, answer.failed
    trial = answer.plan.trials[0].trial
    answer.store.trial(trial.key, trial.code).emit("start", attempt=2)
    (root / "out" / "studies" / "tiny" / "tracked-offsets.json").write_text('{"place": {}}')
    return file


def stored(out: Path) -> list[Path]:
    """Return every file of a store, in a fixed order."""
    return sorted(path.relative_to(out) for path in out.rglob("*") if path.is_file())


def mutate(rng: Random, out: Path) -> list[str]:
    """Damage one to three files of a store.  Returns what was done."""
    done = []
    files = stored(out)
    likely = [file for file in files if file.suffix in (".json", ".jsonl", ".yaml")]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        name = rng.choice(likely if rng.random() < 0.8 else files)
        file = out / name
        if not file.is_file():
            continue
        kind = rng.randrange(10)
        if kind < 5 and name.suffix == ".json":
            try:
                whole = json.loads(file.read_bytes())
            except (ValueError, RecursionError):  # it was damaged before
                continue
            tree = mutate_tree(rng, whole, changes=rng.choice((1, 1, 2)))
            file.write_bytes(json.dumps(tree).encode("utf-8", "surrogatepass"))
            done.append(f"{name}: tree")
        elif kind < 5 and name.suffix == ".jsonl":
            lines = (out.parent / "whole" / name).read_text(encoding="utf-8").splitlines()
            at = rng.randrange(len(lines))
            lines[at] = json.dumps(mutate_tree(rng, json.loads(lines[at])))
            file.write_text("\n".join(lines) + "\n")
            done.append(f"{name}: line {at}")
        elif kind == 5:
            file.unlink()
            file.mkdir()
            done.append(f"{name}: folder")
        elif kind == 6:
            file.write_bytes(
                rng.choice((b"", b"\0" * 64, b"\xff\xfe\xfa", b"null", b"[]", b"{}", b'"x"', b"7", b"[" * 9999))
            )
            done.append(f"{name}: replaced")
        elif kind == 7:
            file.unlink()
            done.append(f"{name}: deleted")
        else:
            file.write_bytes(mutate_bytes(rng, file.read_bytes()))
            done.append(f"{name}: bytes")
    return done


class Bench:
    """A finished study, and a copy of it that is damaged."""

    def __init__(self, root: Path) -> None:
        os.environ["XDG_CACHE_HOME"] = str(root / "cache")
        self.root = root
        self.file = build(root)
        self.whole = root / "whole"
        (root / "out").rename(self.whole)
        self.out = root / "out"
        self.key = next((self.whole / "trials").iterdir()).name
        from vitlab.store.folders import TrialFolder

        self.results = {
            path.relative_to(self.whole): repr(TrialFolder(path).result())
            for path in (self.whole / "trials").glob("*/*")
        }
        self.entries = {path.relative_to(self.whole): path.is_dir() for path in sorted(self.whole.rglob("*"))}
        self.copies: dict[Path, tuple[int, int, int]] = {}

    def restore(self) -> None:
        """Make the copy whole again: remove what is new, and copy what has changed."""
        from vitlab.store import files

        self.out.mkdir(exist_ok=True)
        for path in sorted(self.out.rglob("*"), reverse=True):
            if self.entries.get(path.relative_to(self.out)) != path.is_dir():
                files.remove(path)
        for name, is_folder in self.entries.items():
            path = self.out / name
            if is_folder:
                path.mkdir(exist_ok=True)
            elif not path.exists() or self.copies[name] != _state(path):
                shutil.copy2(self.whole / name, path)
                self.copies[name] = _state(path)
        files._damaged.clear()
        files._reported.clear()

    def call(self, words: Sequence[str]) -> None:
        """Run a command in this process."""
        from vitlab import cli
        from vitlab.report import api

        if words == ("results",):
            api.results("tiny", out=self.out)._repr_html_()
        elif words == ("predictions",):
            api.predictions("tiny", out=self.out)
        elif words == ("load",):
            api.load("tiny", out=self.out)
        else:
            places = {"KEY": self.key[:12], "STUDY": str(self.file)}
            arguments = [places.get(word, word) for word in words]
            where = [str(self.out)] if words[0] == "sync" else ["--out", str(self.out)]
            cli.cli.main([*arguments, *where], standalone_mode=False)

    def train(self, schedule: Any) -> None:
        """Stand in for :meth:`vitlab.driver.scheduler.Schedule.run_jobs`: write what the trials had written."""
        from vitlab.store.files import write_bytes, write_json
        from vitlab.store.folders import TrialFolder

        for path, planned in schedule._planned.items():
            folder = TrialFolder(path)
            before = TrialFolder(self.whole / folder.path.relative_to(self.out.resolve()))
            with folder.lease():
                folder.prepare_for_attempt()
                write_json(folder.spec, planned.trial.to_json())
                folder.emit("start", attempt=2)
                for file in (before.weights_file, before.predictions):
                    write_bytes(folder.path / file.name, file.read_bytes())
                result = before.result()
                assert result is not None
                folder.write_result(result)

    def run(self) -> None:
        """Run the study, and require that it is complete."""
        from vitlab import lab
        from vitlab.driver.scheduler import Schedule
        from vitlab.store.folders import TrialFolder

        # A separate process checks whether a folder is a git repository.
        git = mock.patch("vitlab.planning.study_folder.git_output", lambda *_: "")
        with git, mock.patch.object(Schedule, "run_jobs", lambda schedule: self.train(schedule)):
            answer = lab.run(self.file, out=self.out, retry_failed=True)
        assert answer.failed == 0, answer
        stored_results = {name: repr(TrialFolder(self.out / name).result()) for name in self.results}
        assert {name for name, result in stored_results.items() if result == "None"} == set()

    def examine(self, seed: str, index: int, arguments: int = 2) -> tuple[str, str]:
        """Run one mutant, and return its ending and what is wrong."""
        rng = Random(f"{seed}:{index}")
        self.restore()
        done = mutate(rng, self.out)
        commands: list[tuple[str, ...]] = rng.sample(READERS, arguments)
        if rng.random() < 0.05:
            commands += [("run",), ("report", "tiny", "--format", "json")]
        endings = []
        for words in commands:
            with quiet(), _pictures(drawn=index % 20 == 0):
                ending, what = outcome(self.run if words == ("run",) else partial(self.call, words), self.out)
            if words == ("run",) and ending != "done":
                what = what or "the study cannot be completed"
            if what:
                return "wrong", f"{done} {' '.join(words)}\n{what}"
            endings.append(ending)
        return ("refused" if "refused" in endings else "done"), ""


def _pictures(*, drawn: bool) -> AbstractContextManager[Any]:
    """Draw the pictures of reports, or leave them out: they take most of the time."""
    from vitlab import report

    return nullcontext() if drawn else mock.patch.object(report.Report, "figures", lambda _: {})


def _state(file: Path) -> tuple[int, int, int]:
    """Return what changes when a file is replaced or written to."""
    status = file.lstat()
    return status.st_mtime_ns, status.st_size, status.st_ino


@contextmanager
def bench() -> Iterator[Examine]:
    """Build the study in a temporary folder; logs go nowhere."""
    before = os.environ.get("XDG_CACHE_HOME")
    logging.disable(logging.WARNING)
    try:
        with tempfile.TemporaryDirectory(prefix="fuzz-store-") as name:
            instance = Bench(Path(name).resolve())
            instance.restore()
            for words in READERS:  # imports, caches
                with quiet():
                    instance.call(words)
            with _pictures(drawn=False):
                instance.run()
            yield instance.examine
    finally:
        logging.disable(logging.NOTSET)
        os.environ.pop("XDG_CACHE_HOME", None)
        if before is not None:
            os.environ["XDG_CACHE_HOME"] = before


if __name__ == "__main__":
    sys.exit(main(bench, __doc__))
