"""Modules as source text: the file, the imports and a digest of the code of each.

No module is imported for this.  The digest is of the syntax tree without docstrings, so that comments do not change it
and code does.  A compiled module is digested by its bytes; a module without a file, such as a notebook, gets a digest
that no other process has.

Imports are followed from text to text (:func:`direct_dependencies`).  A distribution installed from an index is not
read: it counts as ``name==version``.

Within a process, files are checked again after every :func:`clear_caches`, and read again if they have changed.
"""

import ast
import hashlib
import importlib.util
import json
import os
import re
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import Distribution, PackageNotFoundError, distribution, distributions
from pathlib import Path

from vitlab.imports import INSTALLED, Stamp, file_stamp, last_imports
from vitlab.registry import BUILT_IN, plugins
from vitlab.registry.file_loader import DOCUMENTED

PACKAGE = "__init__.py"
SESSION = uuid.uuid4().hex
"""Digest of code without a file: components registered in a notebook are trained anew in every session."""
PINNED = frozenset(
    {
        *("torch", "torchvision", "numpy", "PIL", "mlflow", "pydantic", "click", "pandas", "pyarrow", "rich"),
        *("packaging", "yaml", "safetensors", "matplotlib", "jinja2", "markupsafe", "scipy", "sklearn", "filelock"),
    }
)
"""Packages that vitlab itself requires.  Results record their versions; no digest covers them."""


@dataclass(frozen=True)
class ModuleSource:
    """The digest and the imports of a module's source text."""

    digest: str  #: digest of the code; empty for a missing module
    imports: tuple[tuple[str, str], ...] = ()  #: module, and the name imported from it or ``""``
    passed_on: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Name to its module and name there, for a module that only re-exports names, if lazily; otherwise empty."""


Reader = Callable[[str], ModuleSource]
"""Returns the source of a module: :func:`read_current_source`, :func:`read_source_as_imported` or
:func:`read_source_for_new_worker`."""


def clear_caches() -> None:
    """Clear the caches, so that every file is checked again."""
    for cached in (file_of, read_current_source, read_source_as_imported, name_or_requirement):
        cached.cache_clear()


@cache
def read_current_source(module: str) -> ModuleSource:
    """Return the source in a module's file as it is now."""
    if module in plugins.files:
        return _analyse_source(plugins.files[module].text, "", is_package=False)
    file = file_of(module)
    if file is None:
        return ModuleSource(SESSION if _is_imported_module(module) else "")
    stamp = file_stamp(file)
    if stamp is None:
        return ModuleSource("")
    if (module, file, stamp) not in _texts:
        text, is_package = file.read_bytes(), file.name == PACKAGE
        package = module if is_package else module.rpartition(".")[0]
        _texts[module, file, stamp] = (
            _analyse_source(text, package, is_package) if file.suffix == ".py" else ModuleSource(_digest(text))
        )
    return _texts[module, file, stamp]


@cache
def read_source_as_imported(module: str) -> ModuleSource:
    """Return the source of a module as imported by this process, from which its file may have changed since.

    For a module that is not imported, this is the source in its file.  A module whose file changed before it was read
    gets a digest that equals no other.
    """
    last, file = last_imports.get(module), file_of(module)
    if module not in sys.modules or module in plugins.files or last is None or file is None:
        return read_current_source(module)
    if last.stamp == file_stamp(file):
        return read_current_source(module)
    return _texts.get((module, file, last.stamp), ModuleSource(f"unknown {SESSION}"))


def read_source_for_new_worker(module: str) -> ModuleSource:
    """Return the source of a module that a worker started now will run.

    Workers are forked from a process with this process's vitlab, so that editing vitlab does not disturb a running
    study.  Other modules are imported anew by every worker.
    """
    return read_source_as_imported(module) if _top_level_name(module) == BUILT_IN else read_current_source(module)


def direct_dependencies(module: str, reader: Reader) -> list[str]:
    """Return the direct dependencies of a module.

    For modules of vitlab, these are the modules of vitlab that they import.  For other modules, these are all imports
    except the standard library and vitlab's own requirements: modules, which are read as text, and requirements such
    as ``timm==1.0.20``.  The packages that contain a module are dependencies, too, unless they only re-export names.
    """
    targets = [target for place in reader(module).imports for target in _dependencies_of_import(module, place, reader)]
    if _top_level_name(module) != BUILT_IN:
        packages = (module[: dot.start()] for dot in re.finditer(r"\.", module))
        targets += [above for above in packages if file_of(above) and not reader(above).passed_on]
    return targets


def dependency_name(module: str, importer: str) -> str:
    """Return how a module counts as a dependency of its importer: its name, ``name==version``, or ``""``.

    Modules of the importer's own package are read as text wherever they are, and others unless they are installed from
    an index.
    """
    top = _top_level_name(module)
    if top in (BUILT_IN, _top_level_name(importer)):
        return module
    return "" if _top_level_name(importer) == BUILT_IN else name_or_requirement(module)


def defining_module(module: str, name: str, reader: Reader) -> str:
    """Return the module that defines the name in ``from module import name``, through re-exporting packages."""
    visited: set[tuple[str, str]] = set()
    while (module, name) not in visited:  # packages may pass one name to each other
        visited.add((module, name))
        file = file_of(module)
        if name in ("", "*") or file is None:
            break
        passed_on = reader(module).passed_on.get(name, (module, name))
        if passed_on == (module, name) and file.name == PACKAGE and file_of(f"{module}.{name}"):
            return f"{module}.{name}"  # a submodule, not a name
        module, name = passed_on
    return module


@cache
def file_of(module: str) -> Path | None:
    """Return the file of a module, or None if there is no such module or it has no file."""
    imported = sys.modules.get(module)
    if imported is not None:
        file = getattr(imported, "__file__", None)
        return Path(file) if isinstance(file, str) else None
    parent, _, name = module.rpartition(".")
    above = file_of(parent) if parent else None
    if above is not None:
        # Searched here, because importlib.util.find_spec would import the parent package.
        endings = (f"/{PACKAGE}", ".py", *EXTENSION_SUFFIXES)
        candidates = [Path(f"{above.parent / name}{ending}") for ending in endings if above.name == PACKAGE]
        return next(filter(Path.is_file, candidates), None)
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, AttributeError, ValueError):
        return None
    return Path(spec.origin) if spec and spec.origin and spec.has_location else None


@cache
def name_or_requirement(module: str) -> str:
    """Return the module's name if it is read as text, ``name==version`` if it is installed, or ``""``.

    ``""`` stands for the standard library, vitlab's own requirements and missing modules.  A distribution installed
    from a folder or a repository is read as text, because its version does not identify its code.
    """
    top = _top_level_name(module)
    if top in PINNED:
        return ""
    file = file_of(top) or file_of(module)
    if file is None:
        return module if _is_imported_module(module) and top not in sys.stdlib_module_names else ""
    # Outside of site-packages lies code under development, whose version says nothing.
    site = next((above for above in file.parents if above.name in INSTALLED), None)
    if site is None:
        is_own = top not in sys.stdlib_module_names or not file.is_relative_to(Path(os.__file__).parent)
        return module if is_own else ""
    installed = _distribution_of(file.relative_to(site).as_posix(), top, site)
    if installed is None or _is_installed_from_source(installed):
        return module
    requirement = f"{installed.name}=={installed.version}"
    tops[requirement] = top  # by which mixed_versions_message finds what was imported
    return requirement


_texts: dict[tuple[str, Path, Stamp], ModuleSource] = {}  # sources read in this process
tops: dict[str, str] = {}  #: requirement to the imported top-level package


def _dependencies_of_import(module: str, place: tuple[str, str], reader: Reader) -> Iterator[str]:
    """Yield the dependency of a module on an import, which packages may re-export from one another."""
    base, name = place
    if _top_level_name(module) == BUILT_IN and _top_level_name(base) != BUILT_IN:
        return  # before files are looked up, which takes time in every worker
    if name and file_of(base) is None:  # a namespace package
        base, name = f"{base}.{name}", ""
    dependency = dependency_name(base, module)
    if dependency and dependency != base:
        yield dependency
    elif dependency:
        target = defining_module(base, name, reader)
        if _top_level_name(target) != _top_level_name(base):
            target = dependency_name(target, module)
        if target and ("==" in target or file_of(target) or target in sys.modules):
            yield target


def _top_level_name(module: str) -> str:
    return module.partition(".")[0]


def _distribution_of(file: str, top: str, site: Path) -> Distribution | None:
    """Return the distribution that installed a file, which is given by its path in ``RECORD``."""

    def has(candidate: Distribution) -> bool:
        listed = candidate.read_text("RECORD")
        return listed is None or f"\n{file}," in f"\n{listed}"

    try:
        same_name = distribution(top)
    except PackageNotFoundError:
        same_name = None
    if same_name is not None and has(same_name):
        return same_name
    # Slow where much is installed, so only where the names differ.
    others = (candidate for candidate in distributions(path=[str(site)]) if candidate.read_text("RECORD"))
    return next(filter(has, others), None)


def _is_installed_from_source(installed: Distribution) -> bool:
    """Return whether a distribution was installed from a folder or a repository."""
    try:
        origin = json.loads(installed.read_text("direct_url.json") or "{}")
    except ValueError:
        return False
    return isinstance(origin, dict) and ("dir_info" in origin or "vcs_info" in origin)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _analyse_source(text: bytes, package: str, is_package: bool) -> ModuleSource:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return ModuleSource(_digest(text))  # the error is reported when the module is imported
    words: list[str] = []
    running: list[ast.AST] = []
    _dump_ast_noting_imports(tree, words.append, running.append)
    # What only type checkers import does not run, unless the module hands it out by __getattr__.
    lazy = [] if is_package else _type_checking_imports_if_lazy(tree)
    nodes = [*running, *(node for statement in lazy for node in ast.walk(statement))]
    imports = tuple(dict.fromkeys(place for node in nodes for place in _imported_names(node, package)))
    passed_on = _reexports_if_nothing_else(tree.body if is_package else lazy, package)
    return ModuleSource(_digest("\n".join(words).encode()), imports, passed_on)


def _dump_ast_noting_imports(
    node: ast.AST, write: Callable[[str], None], note: Callable[[ast.AST], None] | None
) -> None:
    """Write a syntax tree without docstrings word by word, and note the imports among the statements that can run.

    It takes half as long as ``ast.dump`` and a search for imports: planning and the fork server read a hundred modules.
    """
    kind = node.__class__
    write(kind.__name__)
    if note is not None and kind in (ast.Import, ast.ImportFrom):
        note(node)
    for name in kind._fields:
        value = getattr(node, name, None)
        if value.__class__ is list:
            inner = note
            if name == "body" and isinstance(node, ast.If) and _is_type_checking(node.test):
                inner = None
            elif name == "body" and isinstance(node, DOCUMENTED):
                value = value[ast.get_docstring(node, clean=False) is not None :]  # comments are in no tree
            write("[")
            for item in value:
                if isinstance(item, ast.AST):
                    _dump_ast_noting_imports(item, write, inner)
                else:
                    write(repr(item))
            write("]")
        elif not isinstance(value, ast.AST):
            write(repr(value))
        elif name != "ctx":  # whether a name is read or set follows from its place
            _dump_ast_noting_imports(value, write, note)


def _is_imported_module(module: str) -> bool:
    """Return whether a module is imported and is not a package, such as a namespace package without a file."""
    return module in sys.modules and not hasattr(sys.modules[module], "__path__")


def _type_checking_imports_if_lazy(tree: ast.Module) -> list[ast.stmt]:
    """Return the imports for type checkers in a module that imports these names when they are first read."""
    if not any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body):
        return []
    return [
        statement
        for node in tree.body
        if isinstance(node, ast.If) and _is_type_checking(node.test)
        for statement in node.body
    ]


def _imported_names(node: ast.AST, package: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Import):
        yield from ((alias.name, "") for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = _absolute_module(node, package)
        yield from ((base, alias.name) for alias in node.names)


def _absolute_module(node: ast.ImportFrom, package: str) -> str:
    """Return the module that names are imported from."""
    if not node.level:
        return node.module or ""
    above = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*above, node.module] if node.module else above)


def _is_type_checking(test: ast.expr) -> bool:
    return (test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", "")) == "TYPE_CHECKING"


def _reexports_if_nothing_else(body: Iterable[ast.stmt], package: str) -> dict[str, tuple[str, str]]:
    names: dict[str, tuple[str, str]] = {}
    for node in body:
        if isinstance(node, ast.ImportFrom):
            base = _absolute_module(node, package)
            names |= {alias.asname or alias.name: (base, alias.name) for alias in node.names}
        elif not _is_docstring_or_all(node):
            return {}
    return names


def _is_docstring_or_all(node: ast.stmt) -> bool:
    """Return whether a statement is a docstring or ``__all__``."""
    if isinstance(node, ast.Assign):
        return [ast.unparse(target) for target in node.targets] == ["__all__"]
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
