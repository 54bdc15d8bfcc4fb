"""Identity: the key of a trial, and the digest of the code it would run.

The **key** is a 256-bit hash of the canonical JSON of everything that makes a trial what it is: the resolved spec with
all defaults, the seeds, the origins of its components and the identity of its data.

The **code digest** saves everybody from bumping a version by hand.  It covers the module of every component of the
trial, the module that runs trials, and every module of vitlab or of the component's own package that these import,
followed in the text of the modules.  A package that only passes names on counts as the modules these names come from,
so that one component does not depend on its neighbours.  Each module counts as its syntax tree without docstrings, so
that a changed comment changes nothing and a changed line of code does.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from vitlab.slots import Resolved, slot
from vitlab.spec.trial import SLOTS_OF_A_TRIAL, SOURCES

RUNNER = "vitlab.trial"
"""The module that runs trials, whatever they are made of."""
READER = "vitlab.models.weights"
"""The package that reads files of weights."""
DISTILLATION = "vitlab.training.distillation"
"""The module of learning from a teacher."""
PROBE = "vitlab.training.probe"
"""The module of heads in closed form."""
MIXING = "vitlab.training.mix"
"""The module of training on mixed images."""
AVERAGING = "vitlab.training.ema"
"""The module of averages of weights."""


def key_of(identity: Mapping[str, Any]) -> str:
    """Hash of the canonical JSON of ``identity``: sorted keys, no white space."""
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


def code_of(spec: Mapping[str, Any], needs: Mapping[str, str] = {}) -> str:
    """The code digest of a trial, from its resolved spec and the ``key/code`` of the trials it starts from.

    What a trial starts from is part of what it runs: a change of code there makes this one another result too.
    """
    return code_of_modules(modules_of(components(spec)) | modules_beside(spec), needs)


def modules_beside(spec: Mapping[str, Any]) -> frozenset[str]:
    """The modules that a trial needs beside those of its components; of trials that do without, they are no part."""
    train = spec.get("train") or {}
    asked = {DISTILLATION: spec.get("distill"), MIXING: train.get("mix"), AVERAGING: train.get("ema")}
    found = {module for module, how in asked.items() if how is not None}
    if (spec.get("init_from") or {}).get("head") == "fitted":
        found.add(PROBE)
    for path in SOURCES.values():
        source: Any = spec
        for part in path:
            source = source.get(part) or {}
        if source.get("checkpoint") is not None or source.get("pretrained") is not None:
            found.add(READER)
    return frozenset(found)


def code_of_modules(modules: frozenset[str], needs: Mapping[str, str] = {}) -> str:
    """As :func:`code_of`, where the modules of the trial's components are known."""
    own = code_digest(modules)
    return key_of({"own": own, **needs})[:32] if needs else own


def modules_of(choices: Iterable[Resolved]) -> frozenset[str]:
    """The modules in which the components of these choices stand, nested ones included."""
    return frozenset(part.component.__module__ for choice in choices for part in choice.parts())


def components(spec: Mapping[str, Any]) -> Iterator[Resolved]:
    """The resolved choices of a trial, one for each slot a trial has."""
    for path, name in SLOTS_OF_A_TRIAL.items():
        value: Any = spec
        for part in path:
            value = value[part]
        yield slot(name).resolve(value)


@cache
def code_digest(modules: frozenset[str]) -> str:
    """Digest of the given modules, of the runner, and of all they import; 128 bits in hex."""
    digest = hashlib.blake2b(digest_size=16)
    for module, tree in sorted(_closure({RUNNER, *modules}).items()):
        digest.update(f"{module}\n{tree}\n".encode())
    return digest.hexdigest()


def _closure(modules: Iterable[str]) -> dict[str, str]:
    """Module name to the dump of its syntax tree, for the modules and everything of their packages they import."""
    found: dict[str, str] = {}
    waiting = sorted(modules)
    while waiting:
        module = waiting.pop()
        if module in found:
            continue
        dump, imports = _read(module)
        found[module] = dump
        packages = {"vitlab", module.partition(".")[0]}
        waiting += [name for name in imports if name.partition(".")[0] in packages and name not in found]
    return found


@cache
def _read(module: str) -> tuple[str, tuple[str, ...]]:
    """The syntax tree of a module without its docstrings, and the modules it imports."""
    file = _file(module)
    if file is None:
        return "", ()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    imports = tuple(dict.fromkeys(_imports(tree, package)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                node.body = node.body[1:]
    return ast.dump(tree), imports


def _imports(tree: ast.AST, package: str) -> Iterator[str]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                yield _home(base, alias.name)
        yield from _imports(node, package)


def _home(module: str, name: str) -> str:
    """The module that ``from module import name`` really depends on."""
    submodule = f"{module}.{name}"
    if _file(submodule):
        return submodule
    home = _passed_on(module).get(name)
    return _home(*home) if home else module


@cache
def _passed_on(module: str) -> dict[str, tuple[str, str]]:
    """Name to where it comes from, for a package that does nothing but pass names on; else nothing."""
    file = _file(module)
    if file is None or file.name != "__init__.py":
        return {}
    names: dict[str, tuple[str, str]] = {}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
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


@cache
def _file(module: str) -> Path | None:
    """The source file of a module, or None for what is not a module or has no Python source."""
    loaded = sys.modules.get(module)
    if loaded is not None:
        try:
            source = inspect.getsourcefile(loaded)
        except TypeError:
            return None
        return Path(source) if source else None
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, AttributeError, ValueError):
        return None
    return Path(spec.origin) if spec and spec.origin and spec.origin.endswith(".py") else None
