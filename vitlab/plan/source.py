"""Modules as text: where each stands, what it imports, and a digest of what it does.

Nothing is imported to find this out.  A module counts as its syntax tree without docstrings, so that a changed comment
changes nothing and a changed line of code does; one that is compiled counts by its bytes, and one that has no file, a
notebook, as something that no other process will ever see again.

What a text says is kept in the user's cache folder, under the text's own digest, so that a command need not parse the
same fifty modules again: it can be out of date no more than a text can have two digests.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import sys
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from vitlab.plan.memo import Memo

MOST = 2_000  #: texts that are remembered, the latest
PACKAGE = "__init__.py"
SESSION = uuid.uuid4().hex
"""Stands for code that cannot be read: whatever a notebook registers is trained anew in every session."""


@dataclass(frozen=True)
class Source:
    """What the text of a module says."""

    digest: str  #: of what it does; empty for a module that is not there
    imports: tuple[tuple[str, str], ...] = ()  #: module, and the name taken from it or nothing
    passed_on: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Name to where it comes from, for a package that does nothing but pass names on; else nothing."""


@cache
def read(module: str) -> Source:
    """What a module says; read once a process."""
    file = file_of(module)
    if file is None:
        return Source(SESSION if module in sys.modules and not _has_path(module) else "")
    text = file.read_bytes()
    if file.suffix != ".py":
        return Source(_digest(text))
    package = module if file.name == PACKAGE else module.rpartition(".")[0]
    known, mark = _memory().entries, f"{_reader()} {package} {file.name == PACKAGE} {_digest(text)}"
    if mark not in known:
        known[mark] = asdict(_parsed(text, package, file.name == PACKAGE))
        _unkept.append(mark)
    said = known[mark]
    imports, passed_on = map(tuple, said["imports"]), said["passed_on"].items()
    return Source(said["digest"], tuple(imports), {name: tuple(place) for name, place in passed_on})


def remember() -> None:
    """Keep what was read, where that is possible."""
    if _unkept:
        _memory().keep()
        _unkept.clear()


def home(module: str, name: str) -> str:
    """The module that ``from module import name`` really depends on."""
    file = file_of(module)
    if not name or file is None or file.name != PACKAGE:
        return module
    if file_of(f"{module}.{name}"):
        return f"{module}.{name}"
    passed_on = read(module).passed_on.get(name)
    return home(*passed_on) if passed_on else module


@cache
def file_of(module: str) -> Path | None:
    """The file of a module, or None for what is no module or has none."""
    loaded = sys.modules.get(module)
    if loaded is not None:
        try:
            source = inspect.getsourcefile(loaded) or inspect.getfile(loaded)
        except TypeError:
            return None
        return Path(source)
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


# -- how it is done ---------------------------------------------------------------------------------------------------


_unkept: list[str] = []  # texts that were read and are not in the file


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
    tree = ast.parse(text)
    imports = tuple(dict.fromkeys(_imports(tree, package)))
    passed_on = _passed_on(tree) if passes_on else {}
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
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            yield from ((base, alias.name) for alias in node.names)


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


def _passed_on(tree: ast.Module) -> dict[str, tuple[str, str]]:
    names: dict[str, tuple[str, str]] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and not node.level:
            names |= {alias.asname or alias.name: (node.module or "", alias.name) for alias in node.names}
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
