"""A commit of the user's repository as code that runs: a git worktree, and subprocesses that import it.

By default a revision shares the installed packages, apart from those that were installed from a folder of the
repository, such as by ``pip install -e .``: pip builds these anew from the worktree into a folder that precedes all
others on ``PYTHONPATH``.  A built package has the entry points of its revision, whatever its layout and its build
backend, and vitlab itself can be one.  With ``install``, a revision has a virtual environment of its own.
"""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import distributions
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

from filelock import FileLock

from vitlab.errors import Interrupted, TrialFailed, UserError, VitlabError, one_line
from vitlab.planning.study_folder import GIT, git_output

IMPORT_CHECK = """
import pathlib, sys
from importlib.util import find_spec
site = pathlib.Path(sys.argv[1])
for name in (path.stem for path in site.iterdir() if (path / "__init__.py").is_file() or path.suffix == ".py"):
    origin = find_spec(name).origin
    if not pathlib.Path(origin).is_relative_to(site):
        print(f"{origin} is imported instead of {site / name}; add --install .", file=sys.stderr)
        sys.exit(2)
"""  #: a program that checks that packages are imported from a folder: some editable installations precede PYTHONPATH
HOOK_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_PREFIX", "GIT_COMMON_DIR")
"""Variables by which git tells its hooks where the user's worktree is: in another one, git would write that index."""


def _subprocess_environment() -> dict[str, str]:
    """Return the variables of a subprocess, in which Python imports nothing from the current folder."""
    return {name: value for name, value in os.environ.items() if name not in HOOK_VARIABLES} | {"PYTHONSAFEPATH": "1"}


@dataclass(frozen=True)
class Revision:
    """Code that subprocesses import; by default the code that is installed here."""

    name: str  #: as messages call it
    plugins: Sequence[Path] = ()  #: its files of components
    python: str = sys.executable
    environment: Mapping[str, str] = field(default_factory=_subprocess_environment)

    def run_python(self, *words: str, folder: Path | None = None) -> str:
        """Run Python with these words and return what it prints; its messages are shown.

        The subprocess is in a session of its own, so that Ctrl-C reaches it once, through this process: a run then
        writes its checkpoints.  It fails with an error of the same exit code.
        """
        with subprocess.Popen(
            [self.python, *words],
            cwd=folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate()
            except BaseException:
                process.terminate()
                process.wait()
                raise
        if process.returncode:
            kinds = {error.exit_code: error for error in (VitlabError, UserError, Interrupted)}
            error = kinds.get(process.returncode, TrialFailed)
            raise error(f"{self.name}: '{' '.join(words[1:3])}' fails there, with exit code {process.returncode}")
        return output


def find_repository() -> Path:
    """Return the git repository that the current folder is in; outside of one, raise UserError."""
    root = git_output(Path(), "rev-parse", "--show-toplevel")
    if not root:
        raise UserError("this folder is in no git repository that git reads; 'git status' says why")
    return Path(root).resolve()


def resolve_commit(name: str) -> str:
    """Return the hash of a commit, given by any of its names; an unknown one raises UserError."""
    commit = git_output(find_repository(), "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    if not commit:
        raise UserError(
            "this repository has no commit yet; run 'git add' with your files, then 'git commit'"
            if not git_output(Path(), "rev-parse", "HEAD")
            else f"no commit '{name}' is here; get a branch by 'git fetch origin BRANCH', and in a shallow clone older "
            "commits by 'git fetch --unshallow' (actions/checkout: fetch-depth: 0)"
        )
    return commit


def uncommitted_files(excluded: Path) -> list[str]:
    """Return the tracked files, other than one, that differ from the checked-out commit."""
    root = find_repository()  # first, as outside of a repository git prints its help
    names = _run_git("diff", "--no-ext-diff", "--name-only", "-z", "HEAD").split("\0")
    return [name for name in names if name and root / name != excluded.resolve()]


def resolve_revisions(revisions: str) -> list[tuple[str, str]]:
    """Return name and hash of two commits, such as ``main..HEAD``."""
    base, dots, head = revisions.partition("..")
    if not dots or head.startswith("."):
        raise UserError(f"{revisions}: write BASE..HEAD, such as main..HEAD")
    names = base or "HEAD", head or "HEAD"
    return [(f"{name} ({commit[:7]})", commit) for name in names if (commit := resolve_commit(name))]


@contextmanager
def checkout(
    commit: str, name: str, out: Path, plugins: Sequence[Path] = (), install: str | None = None
) -> Iterator[Revision]:
    """Make a worktree and an environment of a commit, which last as long as the block.

    Args:
        commit: its hash.
        name: how messages call it.
        out: folder in which the worktree is made, as workers of clusters see it.
        plugins: files of components; of a file in the repository, the worktree's copy is used.
        install: words for ``pip install`` in the worktree, which fill an environment of its own; by default the
            installed packages are shared.

    Raises:
        UserError: if it cannot be made, or other code would be imported in its place.
    """
    root, folder = find_repository(), out.resolve() / "revisions"
    packages = _installed_package_folders(root)
    if install is None and not packages and not any(plugin.resolve().is_relative_to(root) for plugin in plugins):
        raise UserError(
            f"nothing of {root} is installed, so its revisions would run the same code; run 'pip install -e .' for a "
            "package, or name a file of components by --plugin"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for lock in (lock for lock in folder.glob("*/lock") if not lock.parent.is_symlink()):
        # Nobody holds the lock of a process that was killed; Timeout is an OSError, too.
        with suppress(OSError, UserError), FileLock(lock, timeout=0):
            shutil.rmtree(lock.parent, ignore_errors=True)
            _run_git("worktree", "remove", "--force", str(lock.parent / "tree"))
    with tempfile.TemporaryDirectory(prefix=f"{commit[:12]}-", dir=folder) as scratch, FileLock(Path(scratch) / "lock"):
        tree, site, environment = (Path(scratch) / part for part in ("tree", "site", "environment"))

        def moved(path: str | Path) -> Path:
            path = Path(path).resolve()
            return tree / path.relative_to(root) if path.is_relative_to(root) else path

        _run_git("worktree", "add", "--detach", str(tree), commit)
        try:
            if missing := ", ".join(str(plugin) for plugin in plugins if not moved(plugin).exists()):
                raise UserError(
                    f"{name} has no {missing}; commit it, then take commits that have it (of 'vitlab check': accept "
                    "the baseline again)"
                )
            before = [str(moved(part)) for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
            variables = {**_subprocess_environment(), "PYTHONPATH": os.pathsep.join([str(site), *before])}
            revision = Revision(name, [moved(plugin) for plugin in plugins], environment=variables)
            if install is not None:
                venv.create(environment, with_pip=True)
                python = environment / ("Scripts" if os.name == "nt" else "bin") / "python"
                revision = replace(revision, python=str(python))
                revision.run_python("-m", "pip", "install", "--quiet", *shlex.split(install), folder=tree)
            elif packages:
                pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site))
                revision.run_python(*pip, *(str(moved(package)) for package in packages))
                revision.run_python("-c", IMPORT_CHECK, str(site))
            yield revision
        finally:
            _run_git("worktree", "remove", "--force", str(tree))


def _installed_package_folders(root: Path) -> list[Path]:
    """Return the folders of a repository from which packages are installed here."""
    folders = set()
    for installed in distributions():
        origin = json.loads(installed.read_text("direct_url.json") or "{}")
        if "dir_info" in origin and origin["url"].startswith("file:"):  # and no wheel that lies in the repository
            folders.add(Path(url2pathname(urlsplit(origin["url"]).path)).resolve())
    return sorted(folder for folder in folders if folder.is_relative_to(root))


def _run_git(*words: str) -> str:
    """Return the output of a git command, without hooks; raise its message as a UserError."""
    process = subprocess.run([*GIT, *words], capture_output=True, text=True, check=False, env=_subprocess_environment())
    if process.returncode:
        raise UserError(f"'git {shlex.join(words[:2])}' fails: {one_line(process.stderr)}")
    return process.stdout
