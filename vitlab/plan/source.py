"""Modules as text: where each stands, what it imports, and a digest of what it does.

Nothing is imported to find this out.  A module counts as its syntax tree without docstrings, so that a changed comment
changes nothing and a changed line of code does; one that is compiled counts by its bytes, and one that has no file, a
notebook, as something that no other process will ever see again.

Imports are followed from text to text (:func:`followed`).  What is installed from an index is not read: it counts as
``name==version``.

What a text says is kept in the user's cache folder, under the text's own digest, so that a command need not parse the
same fifty modules again: it can be out of date no more than a text can have two digests.  Within a process files are
looked at again after every :func:`refresh`, and read again where they have changed.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import os
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path
from types import ModuleType

from vitlab.imports import INSTALLED, Stamp, last_import, stamp_of
from vitlab.registry import BUILT_IN, plugin_files
from vitlab.store.memo import Memo

MOST = 2_000  #: texts that are remembered, the latest
PACKAGE = "__init__.py"
SESSION = uuid.uuid4().hex
"""Stands for code that cannot be read: whatever a notebook registers is trained anew in every session."""
PINNED = frozenset(
    {
        *("torch", "torchvision", "numpy", "PIL", "mlflow", "pydantic", "click", "pandas", "pyarrow", "rich"),
        *("packaging", "yaml", "safetensors", "matplotlib", "jinja2", "markupsafe", "scipy", "statsmodels", "sklearn"),
    }
)
"""Packages of the distributions that vitlab itself requires.  Results record their versions; no digest covers them."""


@dataclass(frozen=True)
class Source:
    """What the text of a module says."""

    digest: str  #: of what it does; empty for a module that is not there
    imports: tuple[tuple[str, str], ...] = ()  #: module, and the name taken from it or nothing
    passed_on: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Name to where it comes from, for a package that does nothing but pass names on; else nothing."""


Reader = Callable[[str], Source]
"""Tells what a module says: :func:`read`, :func:`loaded` or :func:`expected`."""


def refresh() -> None:
    """Look at every file anew from here on."""
    for known in (file_of, read, loaded, requirement_of):
        known.cache_clear()


@cache
def read(module: str) -> Source:
    """Return what the file of a module says now."""
    text = plugin_files.text_of(module)
    if text is not None:
        return _source(text, "", "")
    file = file_of(module)
    if file is None:
        return Source(SESSION if module in sys.modules and not _has_path(module) else "")
    stamp = stamp_of(file)
    return Source("") if stamp is None else _read(module, file, stamp)


@cache
def loaded(module: str) -> Source:
    """Return what a module does in this process, which its file may no longer say.

    A module that this process has not imported is what its file says.  The digest of one whose file has changed before
    anybody read it is not known, and equal to no other.
    """
    last = last_import(module)
    file = file_of(module)
    if module not in sys.modules or last is None or file is None or plugin_files.text_of(module) is not None:
        return read(module)
    if last.stamp == stamp_of(file):
        return read(module)
    return _texts.get((module, file, last.stamp), Source(f"unknown {SESSION}"))


def expected(module: str) -> Source:
    """Return what a worker that is started now will run.

    Of vitlab that is what this process runs, for workers are forked from one that began with it, and an edit of vitlab
    does not disturb a study that is running.  Other modules are imported by every worker anew.
    """
    return loaded(module) if _top(module) == BUILT_IN else read(module)


def remember() -> None:
    """Keep what was read, where that is possible."""
    if _unkept:
        _memory().keep()
        _unkept.clear()


def followed(module: str, reader: Reader) -> Iterator[str]:
    """Yield what the code of a module further consists of.

    Of modules of vitlab that is every module of vitlab they import.  Of other modules it is everything they import, but
    for the standard library and the packages that vitlab itself requires: modules, which are to be read as text, and
    requirements such as ``timm==1.0.20``.  Packages above a module are part of it, where they do more than pass names
    on.
    """
    for place in reader(module).imports:
        yield from _targets(module, place, reader)
    if _top(module) != BUILT_IN:
        yield from (above for above in _packages_above(module) if not reader(above).passed_on)


def standing(module: str, importer: str) -> str:
    """Return how a module counts for one that imports it: its name, ``name==version``, or nothing.

    Modules of the importer's own package count as text wherever they are, and others unless they are installed from an
    index.
    """
    top = _top(module)
    if top in (BUILT_IN, _top(importer)):
        return module
    return "" if _top(importer) == BUILT_IN else requirement_of(module)


def home(module: str, name: str, reader: Reader) -> str:
    """Return the module that ``from module import name`` really depends on."""
    file = file_of(module)
    if name in ("", "*") or file is None or file.name != PACKAGE:
        return module
    if file_of(f"{module}.{name}"):
        return f"{module}.{name}"
    passed_on = reader(module).passed_on.get(name, (module, name))
    return module if passed_on == (module, name) else home(*passed_on, reader)


def edited(modules: Iterable[str]) -> str:
    """Return a sentence about a module whose file says something else than this process runs, or nothing."""
    for module in modules:
        if "==" not in module and loaded(module).digest != expected(module).digest:
            return (
                f"{file_of(module)} was edited after this process had imported it; start the process anew (in a "
                "notebook, restart the kernel, or reload the module) and run again"
            )
    return ""


def mixed(modules: Iterable[str]) -> str:
    """Return a sentence about code of two versions in this process, or nothing.

    A module that says ``from b import f`` has the old ``f`` after ``b`` alone is reloaded, and a distribution that was
    upgraded goes on as the version that was imported.
    """
    for module in modules:
        if "==" in module:
            top = _tops.get(module, "")
            last, file = last_import(top), file_of(top)
            if top in sys.modules and last is not None and file is not None and last.stamp != stamp_of(file):
                return (
                    f"{module} was installed after this process had imported {top}; start the process anew (in a "
                    "notebook, restart the kernel) and run again"
                )
            continue
        mine = last_import(module)
        if mine is None or module not in sys.modules:
            continue
        for base, name in loaded(module).imports:
            other = last_import(base)
            if other is None or not other.reloaded or other.number <= mine.number or not name:
                continue
            if not isinstance(getattr(sys.modules.get(base), name, None), ModuleType):
                return (
                    f"{file_of(module)} has {name} of {base} from before that was reloaded; reload this file, too, or "
                    "start the process anew (in a notebook, restart the kernel), and run again"
                )
    return ""


@cache
def file_of(module: str) -> Path | None:
    """Return the file of a module, or None for what is no module or has none."""
    there = sys.modules.get(module)
    if there is not None:
        file = getattr(there, "__file__", None)
        return Path(file) if isinstance(file, str) else None
    parent, _, name = module.rpartition(".")
    above = file_of(parent) if parent else None
    if above is not None:
        # As the import system would find it, which would import the parent to look.
        endings = (f"/{PACKAGE}", ".py", *EXTENSION_SUFFIXES)
        candidates = [Path(f"{above.parent / name}{ending}") for ending in endings if above.name == PACKAGE]
        return next(filter(Path.is_file, candidates), None)
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, AttributeError, ValueError):
        return None
    return Path(spec.origin) if spec and spec.origin and spec.has_location else None


@cache
def requirement_of(module: str) -> str:
    """Return the module's name if it is to be read, ``name==version`` if it is installed, or nothing.

    Nothing stands for the standard library, for the packages that vitlab requires, and for what is not there.  What was
    installed from a folder or a repository is to be read, for its version says little about its code.
    """
    top = _top(module)
    if top in PINNED:
        return ""
    file = file_of(top) or file_of(module)
    if file is None:
        known = module in sys.modules and not _has_path(module) and top not in sys.stdlib_module_names
        return module if known else ""
    site = next((above for above in file.parents if above.name in INSTALLED), None)
    if site is None:
        is_own = top not in sys.stdlib_module_names or not file.is_relative_to(Path(os.__file__).parent)
        return module if is_own else ""
    found = _distribution_of(file.relative_to(site).as_posix(), top, site)
    if found is None or _is_of_a_folder(found):
        return module
    requirement = f"{found.name}=={found.version}"
    _tops[requirement] = top
    return requirement


# -- how it is done ---------------------------------------------------------------------------------------------------


_unkept: list[str] = []  # texts that were read and are not in the file
_texts: dict[tuple[str, Path, Stamp], Source] = {}  # what was read in this process
_tops: dict[str, str] = {}  # requirement to the package by which it was met


def _read(module: str, file: Path, stamp: Stamp) -> Source:
    """Return what a file says, which is read unless it was before."""
    known = _texts.get((module, file, stamp))
    if known is None:
        text = file.read_bytes()
        is_package = file.name == PACKAGE
        package = module if is_package else module.rpartition(".")[0]
        known = _source(text, package, file.name) if file.suffix == ".py" else Source(_digest(text))
        _texts[module, file, stamp] = known
    return known


def _source(text: bytes, package: str, file: str) -> Source:
    known, mark = _memory().entries, f"{_reader()} {package} {file == PACKAGE} {_digest(text)}"
    if mark not in known:
        known[mark] = asdict(_parsed(text, package, file == PACKAGE))
        _unkept.append(mark)
    said = known[mark]
    imports, passed_on = map(tuple, said["imports"]), said["passed_on"].items()
    return Source(said["digest"], tuple(imports), {name: tuple(place) for name, place in passed_on})


def _targets(module: str, place: tuple[str, str], reader: Reader) -> Iterator[str]:
    """Yield how an import of a module counts; it may be passed on from one package to another."""
    base, name = place
    if name and file_of(base) is None:  # a namespace package
        base, name = f"{base}.{name}", ""
    counted = standing(base, module)
    if counted and counted != base:
        yield counted
    elif counted:
        target = home(base, name, reader)
        if _top(target) != _top(base):
            target = standing(target, module)
        if target and ("==" in target or file_of(target) or target in sys.modules):
            yield target


def _packages_above(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts)) if file_of(".".join(parts[:count]))]


def _top(module: str) -> str:
    return module.partition(".")[0]


def _distribution_of(file: str, top: str, site: Path) -> Distribution | None:
    """Return the distribution that has installed a file, which is given as it stands in a list of installed files."""

    def has(found: Distribution) -> bool:
        listed = found.read_text("RECORD")
        return listed is None or f"\n{file}," in f"\n{listed}"

    try:
        named = distribution(top)
    except PackageNotFoundError:
        named = None
    if named is not None and has(named):
        return named
    # Slow where much is installed, so only where the names differ.
    return next((found for found in distributions(path=[str(site)]) if found.read_text("RECORD") and has(found)), None)


def _is_of_a_folder(found: Distribution) -> bool:
    """Whether a distribution was installed from a folder or a repository."""
    try:
        recorded = json.loads(found.read_text("direct_url.json") or "{}")
    except ValueError:
        return False
    return isinstance(recorded, dict) and ("dir_info" in recorded or "vcs_info" in recorded)


@cache
def _memory() -> Memo:
    """What texts say, by their digests and by who read them."""
    return Memo("code", MOST)


@cache
def _reader() -> str:
    """Who reads them: this module, by this Python."""
    return _digest(f"{sys.implementation.cache_tag} {_digest(Path(__file__).read_bytes())}".encode())[:8]


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _parsed(text: bytes, package: str, passes_on: bool) -> Source:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return Source(_digest(text))  # whoever imports it will hear of that
    imports = tuple(dict.fromkeys(_imports(tree, package)))
    passed_on = _passed_on(tree, package) if passes_on else {}
    for node in (tree, *_statements(tree.body)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = node.body[1:] if _is_text(node.body[:1]) else node.body
    return Source(_digest(ast.dump(tree).encode()), imports, passed_on)


def _has_path(module: str) -> bool:
    """Whether it is a namespace package: folders of modules, and no code."""
    return hasattr(sys.modules[module], "__path__")


def _imports(tree: ast.Module, package: str) -> Iterator[tuple[str, str]]:
    for node in _statements(tree.body):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, package)
            yield from ((base, alias.name) for alias in node.names)


def _base(node: ast.ImportFrom, package: str) -> str:
    """Return the module that names are imported from."""
    if not node.level:
        return node.module or ""
    above = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*above, node.module] if node.module else above)


def _statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Every statement that can run, those inside others included."""
    for node in body:
        yield node
        if not (isinstance(node, ast.If) and _for_type_checkers(node.test)):
            yield from _statements(getattr(node, "body", ()))
        for inner in ("orelse", "finalbody", "handlers", "cases"):
            yield from _statements(getattr(node, inner, ()))


def _for_type_checkers(test: ast.expr) -> bool:
    return (test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")) == "TYPE_CHECKING"


def _passed_on(tree: ast.Module, package: str) -> dict[str, tuple[str, str]]:
    names: dict[str, tuple[str, str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            base = _base(node, package)
            names |= {alias.asname or alias.name: (base, alias.name) for alias in node.names}
        elif not _says_nothing(node):
            return {}
    return names


def _says_nothing(node: ast.stmt) -> bool:
    """Whether it is a docstring or ``__all__``."""
    if isinstance(node, ast.Assign):
        return [ast.unparse(target) for target in node.targets] == ["__all__"]
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_text(body: list[ast.stmt]) -> bool:
    return any(isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str) for node in body)
