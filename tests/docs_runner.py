"""Runner of the instructions on the pages of docs/: ``python docs_runner.py FOLDER PAGE...``.

Block after block of each page, in a folder of its own: a block with a title is written to the file it names, commands
are run, studies are validated, Python is executed.  Each is a fork of this process, which has imported torch and
validated a study once, so that nothing of one reaches the next and none pays for that.  A page may use a file of
another page, to which it links as [`FILE`](PAGE.md), and a workflow's commands are run in a new git repository, which
has the files of the page alone.  Three things differ from what a reader does: a study
is trained in small (one seed, a few steps, no tracker), only the tutorial's report is drawn, for pictures know nothing
of components, and ``pip install -e`` lays a package down without pip.

Prints one JSON object per block that could not be done as it is shown.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import traceback
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import click
import yaml

ROOT = Path(__file__).resolve().parents[1]
SMALL = {"seeds": 1, "train.epochs": 1, "train.evaluations": 1, "data.fraction": 0.05}
APART = {"run.executor": "inline", "run.tracker": "none"}
ONLY_READ = {"ui", "sync", "check", "ab"}  #: vitlab commands that serve, need a server, or train for long
DRAWN = "tutorial.md"  #: the page whose reports are drawn
ELSEWHERE = {"git", "python", "sbatch"}  #: programs whose lines are not run
WARM = [
    "torch._dynamo",
    "pandas",
    "pyarrow.parquet",
    "scipy.optimize",
    "scipy.stats",
    "statsmodels.stats.multitest",
    "matplotlib.backends.backend_agg",
    "jinja2",
    "rich.table",
    "pytest",
    "vitlab.lab",
    "vitlab.runner.execution",
    "vitlab.testing",
]  #: imports that most commands need
BASE = """
study: shown
base:
  data: {type: digits}
  model: {type: vit, patch_size: 2, dim: 32, depth: 2, heads: 4}
  train: {epochs: 1}
"""


@dataclass
class Block:
    """A fenced block: its place, language, target file and text."""

    line: int
    language: str
    title: str
    text: str


@dataclass
class Reader:
    """State of a reader who follows a page."""

    home: Path  #: the initial folder, which has the files of the repository
    here: Path
    imports: list[str] = field(default_factory=list)  #: where packages were installed
    environment: dict[str, str] = field(default_factory=dict)
    trained: frozenset[str] = frozenset()  #: studies that the page trains in full, and so need no smaller trial
    template: bool = False  #: whether the files are as written by vitlab new, which is tested elsewhere
    drawn: bool = True  #: whether a run renders its report


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page, indented ones too."""
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r'(?ms)^( *)```(\w*)(?: title="([^"]+)")?\n(.*?)^ *```$', text):
        indent, language, title, inside = match.groups()
        line = text.count("\n", 0, match.start()) + 1
        yield Block(line, language, title or "", re.sub(rf"(?m)^{indent}", "", inside))


def follow(page: Path, home: Path) -> Iterator[tuple[Block, str]]:
    """Follow a page block by block; yield the failing blocks with their reasons."""
    (home / "vitlab-runs").mkdir(parents=True)
    for name in ("pipelines", "plugins", "docker", "constraints.txt", "pyproject.toml", "Makefile"):
        (home / name).symlink_to(ROOT / name)
    text = page.read_text(encoding="utf-8")
    for name, other in re.findall(r"\[`([\w.]+)`\]\((\w+\.md)\)", text):
        for block in blocks(page.with_name(other)):
            if block.title == name:
                (home / name).write_text(block.text, encoding="utf-8")
    trained = re.findall(r"(?m)^vitlab run (?!.*--smoke)(\S+)", text)
    reader = Reader(home, home, trained=frozenset(trained), drawn=page.name == DRAWN)
    for block in blocks(page):
        try:
            _do(block, reader)
        except Exception as error:
            yield block, f"{error}" if isinstance(error, Failed) else traceback.format_exc()


class Failed(Exception):
    """A block that does not work."""


def _do(block: Block, reader: Reader) -> None:
    if block.title:
        file = reader.here / block.title
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(block.text, encoding="utf-8")
        reader.template = False
    match block.language:
        case "sh":
            for line in block.text.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words:
                    _command(words, reader)
        case "yaml":
            _study(block, reader)
        case "toml":
            tomllib.loads(block.text)
        case "python" if not block.title:
            _apart(lambda: exec(compile(block.text, "<page>", "exec"), {"__name__": "__main__"}), reader)
        case "python":
            compile(block.text, block.title, "exec")
        case "text":
            pass
        case "json":
            json.loads(block.text)
        case other:
            raise Failed(f"nobody knows how to try a block of '{other}'")


def _study(block: Block, reader: Reader) -> None:
    """Validate a complete study as it is, or a part within a minimal study."""
    content = yaml.safe_load(block.text)
    if block.title.startswith(".github/"):
        return _workflow(content, reader)
    if block.title in reader.trained:
        return
    if "study" not in content:
        content = _over(yaml.safe_load(BASE), content)
    file = reader.here / f".shown-{block.line}.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    _vitlab(["validate", file.name], reader)


def _workflow(content: dict, reader: Reader) -> None:
    """Run the commands of a workflow in a new repository with the files of the page, whose results are not committed."""
    fresh = reader.home / "repository"
    fresh.mkdir()
    for file in reader.home.iterdir():
        if file.is_file() and not file.is_symlink() and (not file.name.startswith(".") or file.name == ".gitignore"):
            shutil.copy(file, fresh)
    git = ["git", "-C", str(fresh)]
    subprocess.run([*git, "init", "-q"], check=True)
    at_fresh = replace(reader, here=fresh)
    for job in content["jobs"].values():
        for step in job["steps"]:
            if "pip" in (given := step.get("with", {})).get("cache", "") and "cache-dependency-path" not in given:
                raise Failed("setup-python looks for requirements.txt or pyproject.toml to cache by, and ends without")
            if "run" in step:
                _command(shlex.split(step["run"]), at_fresh)
    subprocess.run([*git, "add", "-A"], check=True)
    listed = subprocess.run([*git, "ls-files"], check=True, capture_output=True, text=True).stdout.split()
    if results := [file for file in listed if file.startswith("vitlab-runs")]:
        raise Failed(f"git add -A adds results: {results[0]}")
    if not (fresh / "vitlab-runs").is_dir():
        raise Failed("no command of the workflow wrote results")


def _over(below: dict, above: dict) -> dict:
    merged = dict(below)
    for name, value in above.items():
        replaced = not (isinstance(value, dict) and isinstance(merged.get(name), dict)) or "type" in value
        merged[name] = value if replaced else _over(merged[name], value)
    return merged


def _command(words: list[str], reader: Reader) -> None:
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    match words:
        case ["cd", folder]:
            reader.here = (reader.here / folder).resolve()
            if not reader.here.is_dir():
                raise Failed(f"there is no folder {folder}")
        case ["export", setting]:
            name, _, value = setting.partition("=")
            reader.environment[name] = value
        case ["vitlab", *rest]:
            _vitlab(rest, reader)
        case ["pytest"] if reader.template:
            pass
        case ["pytest", *rest]:
            _apart(lambda: _pytest(rest), reader)
        case ["pip", "install", *rest]:
            _install(rest, reader)
        case ["make", *rest]:
            targets = re.findall(r"(?m)^([\w-]+):", (ROOT / "Makefile").read_text())
            if unknown := [word for word in rest if "=" not in word and word not in targets]:
                raise Failed(f"make knows no {', '.join(unknown)}")
        case ["docker", *rest]:
            for option, value in pairwise(rest):
                if option in ("-f", "--file") and not (ROOT / value).is_file():
                    raise Failed(f"there is no file {value}")
        case [program, *_] if program in ELSEWHERE or (program.startswith("docker/") and (ROOT / program).is_file()):
            pass
        case _:
            raise Failed(f"nobody knows how to try '{shlex.join(words)}'")


def _install(words: list[str], reader: Reader) -> None:
    """Lay out a package like an editable installation; vitlab itself is already installed."""
    for option, value in pairwise(words):
        if option == "-c" and not (reader.here / value).is_file():
            raise Failed(f"there is no file {value}")
        if option != "-e":
            continue
        folder = (reader.here / value.partition("[")[0]).resolve()
        if folder == reader.home:
            continue  # vitlab itself
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        extra = re.search(r"\[(\w+)\]", value)
        if extra and extra[1] not in project.get("optional-dependencies", {}):
            raise Failed(f"{project['name']} has no extra '{extra[1]}'")
        info = reader.home / "site" / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        info.mkdir(parents=True)
        needs = "".join(f"Requires-Dist: {requirement}\n" for requirement in project["dependencies"])
        (info / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n{needs}")
        groups = project.get("entry-points", {}).items()
        lines = [
            f"[{group}]\n" + "".join(f"{name} = {to}\n" for name, to in points.items()) for group, points in groups
        ]
        (info / "entry_points.txt").write_text("\n".join(lines))
        source = folder / "src" if (folder / "src").is_dir() else folder
        reader.imports += [str(info.parent), str(source)]


def _vitlab(words: list[str], reader: Reader) -> None:
    if words[0].startswith("-"):
        return _apart(lambda: _main(words), reader)
    from vitlab.planning.packaged import packaged_studies

    reader.template = reader.template or words[0] == "new"
    # The training of these is tested elsewhere.
    ours = [word for word in words if word.startswith("pipelines/") or word in packaged_studies()]
    if missing := [word for word in ours if "/" in word and not (ROOT / word).is_file()]:
        raise Failed(f"there is no file {missing[0]}")
    small = "--smoke" in words and not reader.trained.isdisjoint(words)
    if words[0] in ONLY_READ or (words[0] in ("run", "explain") and (ours or small)):
        return _apart(lambda: _parse(words), reader)
    if words[0] == "run":
        if "--smoke" not in words:
            _shorten([reader.here / word for word in words])
        words = [*words, *(part for path, value in APART.items() for part in ("--set", f"{path}={value}"))]
    draws = reader.drawn or words[0] not in ("run", "explain")
    return _apart(lambda: _main(words) if draws else _undrawn(words), reader)


def _shorten(files: list[Path]) -> None:
    """Make studies among the files small, so that later blocks refer to what was run."""
    for file in files:
        if file.suffix == ".yaml" and file.is_file():
            study = yaml.safe_load(file.read_text())
            for path, value in SMALL.items():
                *above, name = path.split(".")
                place = study
                for key in ["base", *above] if above else []:
                    if not isinstance(place.get(key), dict):
                        place[key] = {} if place.get(key) is None else {"type": place[key]}
                    place = place[key]
                place[name] = value
            file.write_text(yaml.safe_dump(study, sort_keys=False))


def _parse(words: list[str]) -> None:
    """Parse the words of a command: name, options and values."""
    from vitlab.cli import cli

    command = cli.get_command(click.Context(cli), words[0])
    assert command is not None, words
    try:
        command.make_context(words[0], words[1:])
    except click.ClickException as error:
        sys.exit(f"vitlab {shlex.join(words)}: {error.message}")


def _main(words: list[str]) -> None:
    from vitlab.cli import main

    sys.argv = ["vitlab", *words]
    main()


def _undrawn(words: list[str]) -> None:
    from matplotlib.figure import Figure

    from vitlab import report

    report.write = lambda *_: []  # of this fork alone
    if words[0] == "explain":
        Figure.savefig = lambda self, file, **_: Path(file).write_bytes(b"unpainted")
    _main(words)


def _pytest(words: list[str]) -> None:
    import pytest

    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-W", "error", *words]))


def _apart(work: Callable[[], None], reader: Reader) -> None:
    """Run a function in a fork, in the reader's folder and with the reader's packages."""
    output_file = reader.home / ".said"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with output_file.open("wb") as out:
                os.dup2(out.fileno(), 1)
                os.dup2(out.fileno(), 2)
            os.chdir(reader.here)
            os.environ.update(reader.environment)
            sys.path[:0] = [str(reader.here), *reader.imports]
            if reader.imports:
                sys.modules["vitlab.registry.plugins"]._read_entry_points.cache_clear()
            work()
            code = 0
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
            if isinstance(exit_.code, str):
                print(exit_.code)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if status:
        raise Failed(
            f"exit code {os.waitstatus_to_exitcode(status)}:\n{output_file.read_text(errors='replace')[-3000:]}"
        )


def main() -> None:
    """Follow the pages, after doing once what most commands begin with."""
    from vitlab.cli import cli
    from vitlab.data.torchvision_import import torchvision

    torchvision()  # timm and transformers import it, which may need a workaround
    for name in WARM:
        importlib.import_module(name)
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    (folder / "shown.yaml").write_text(BASE)
    with redirect_stdout(io.StringIO()):
        cli.main(["validate", str(folder / "shown.yaml")], standalone_mode=False)
    for page in map(Path, sys.argv[2:]):
        for block, reason in follow(page, folder / f"{page.parent.name}-{page.stem}"):
            print(
                json.dumps({"page": page.name, "line": block.line, "shown": block.text, "reason": reason}), flush=True
            )


if __name__ == "__main__":
    main()
