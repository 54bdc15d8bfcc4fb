"""YAML read safely, with the place of every value, so that a mistake can be pointed at.

Two departures from YAML 1.1, both because every user means them: ``1e-3`` is a number, and a key given twice is an
error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

import yaml

from vitlab.errors import Path, Problem, SpecError

LARGEST_FILE = 1_000_000  #: bytes; a study file is a page or two
MOST_NODES = 100_000  #: values after aliases are followed, so that nested aliases cannot explode


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads ``1e-3`` as the number it plainly is (YAML 1.1 wants ``1.0e-3``)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(?:\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)


@dataclass(frozen=True)
class Document:
    """A YAML document: its plain values, and where each of them stands."""

    file: str
    data: dict[str, Any]
    places: dict[Path, tuple[int, int]] = field(repr=False)

    def problem(self, path: Path, message: str) -> Problem:
        """A problem at ``path``, or at the closest place above it that the document holds."""
        here: Path = ()
        for part in path:
            if (*here, part) not in self.places:
                break
            here = (*here, part)
        line, column = self.places[here]
        return Problem(self.file, line, column, message)


def read_document(file: FilePath | str) -> Document:
    """Read a YAML file whose top level is a mapping.

    Raises:
        SpecError: if it is not there, is no file, is too large, is not YAML, or says one thing twice.
    """
    name = str(file)
    return parse_document(_read_text(FilePath(file), name), name)


def parse_document(text: str, name: str) -> Document:
    """As :func:`read_document`, from text; ``name`` stands for the file in error messages."""

    def refuse(message: str, line: int = 0, column: int = 0) -> SpecError:
        return SpecError([Problem(name, line, column, message)])

    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            raise refuse("the file is empty; a study begins with 'study: NAME'")
        places: dict[Path, tuple[int, int]] = {}
        problems: list[Problem] = []
        for count, (path, node, twice) in enumerate(_walk(root, (), root, frozenset())):
            line, column = node.start_mark.line + 1, node.start_mark.column + 1
            if count > MOST_NODES:
                raise refuse(f"more than {MOST_NODES:,} values; a study file is a page or two", line, column)
            if twice:
                first = places[path][0]
                problems.append(Problem(name, line, column, f"key '{path[-1]}' is given twice, first in line {first}"))
            else:
                places[path] = (line, column)
        if problems:
            raise SpecError(problems)
        data = _unshared(loader.construct_document(root))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = (mark.line + 1, mark.column + 1) if mark else (0, 0)
        raise refuse(f"not YAML: {error.problem or error.context}", *at) from None
    except (yaml.YAMLError, ValueError) as error:
        raise refuse(f"not YAML: {error}") from None
    except RecursionError:
        raise refuse("nested too deeply; a study file is a page or two") from None
    finally:
        loader.dispose()
    if not isinstance(data, dict):
        raise refuse(f"a study is a mapping that begins with 'study: NAME'; found {_kind(data)}", 1, 1)
    return Document(name, data, places)


def _read_text(file: FilePath, name: str) -> str:
    try:
        if file.is_dir():
            raise SpecError([Problem(name, 0, 0, "is a folder; name a study file, such as ablation.yaml")])
        if file.exists() and not file.is_file():
            raise SpecError([Problem(name, 0, 0, "is not a regular file")])
        if (size := file.stat().st_size) > LARGEST_FILE:
            raise SpecError([Problem(name, 0, 0, f"has {size:,} bytes; a study file has at most {LARGEST_FILE:,}")])
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SpecError([Problem(name, 0, 0, "no such file")]) from None
    except UnicodeDecodeError as error:
        raise SpecError([Problem(name, 0, 0, f"not YAML: byte {error.start} is not UTF-8 text")]) from None
    except OSError as error:
        raise SpecError([Problem(name, 0, 0, f"cannot be read: {error.strerror}")]) from None


def _walk(
    node: yaml.Node, path: Path, place: yaml.Node, above: frozenset[int]
) -> Iterator[tuple[Path, yaml.Node, bool]]:
    """Every value with its path and the node to point at: its key, or the item itself in a list.

    The flag marks a key that its mapping has given before.
    """
    if id(node) in above:
        raise yaml.MarkedYAMLError(problem="an alias that contains itself", problem_mark=node.start_mark)
    yield path, place, False
    above = above | {id(node)}
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _walk(item, (*path, index), item, above)
    elif isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.MarkedYAMLError(problem="a key must be a single name", problem_mark=key.start_mark)
            here = (*path, str(key.value))
            if key.value in seen:
                yield here, key, True
            else:
                seen.add(key.value)
                yield from _walk(value, here, key, above)


def _unshared(value: Any) -> Any:
    """A copy in which no two places share one object, as an anchor and its aliases do."""
    if isinstance(value, dict):
        return {key: _unshared(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_unshared(item) for item in value]
    return value


def _kind(value: Any) -> str:
    return "a list" if isinstance(value, list) else f"{value!r:.60}"
