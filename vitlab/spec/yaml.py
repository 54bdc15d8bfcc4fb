"""Safe reading of YAML, with the line and column of every value for error messages.

Differences from YAML 1.1, to match users' expectations: ``1e-3`` is a number, ``010`` is ten, ``12:30`` and
``2024-01-01`` are text, a key is always a name, and a repeated key is an error.  Values that a study does not need are
refused: tagged dates, sets and binary data, infinities, and unprintable characters.
"""

from __future__ import annotations

import codecs
import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any

import yaml

from vitlab.errors import Path, Problem, SpecError, is_about_key, letters

LARGEST_FILE = 1_000_000  #: largest size in bytes
MOST_NODES = 100_000  #: largest number of values with aliases expanded, as a limit on nested aliases
DEEPEST = 50  #: largest depth of nesting

PATH_IN_QUOTES = "in double quotes a backslash begins an escape such as \\n; put the text in single quotes: 'C:\\data'"

_TAG = "tag:yaml.org,2002:"
_PLAIN = {"null", "bool", "int", "float", "str", "seq", "map"}
"""Types of values that a study may contain."""


class _Loader(yaml.SafeLoader):
    """SafeLoader for plain data only, with the numbers described above."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node, unless it is nested too deeply."""
        if self._depth > DEEPEST:
            sentence = "nested too deeply; a study file is a page or two"
            raise _NotAllowed(problem=sentence, problem_mark=self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        self._depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in known if tag not in (f"{_TAG}int", f"{_TAG}float", f"{_TAG}timestamp")]
    for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.yaml_constructors = {
    tag: construct
    for tag, construct in yaml.SafeLoader.yaml_constructors.items()
    if tag is not None and tag.removeprefix(_TAG) in _PLAIN
}
for _kind_of_number, _pattern in (
    ("int", r"[-+]?(?:\d[\d_]*|0x[\da-fA-F_]+)"),
    (
        "float",
        r"[-+]?(?:\d[\d_]*\.[\d_]*|\.\d[\d_]*|\d[\d_]*(?=[eE]))(?:[eE][-+]?\d+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    ),
):
    _Loader.add_implicit_resolver(f"{_TAG}{_kind_of_number}", re.compile(rf"^(?:{_pattern})$"), list("-+.0123456789"))


def _number(read: Callable[[str], Any]) -> Callable[[yaml.SafeLoader, yaml.ScalarNode], Any]:
    """Return a constructor of numbers whose errors have a line and a column."""

    def construct(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> Any:
        text = str(loader.construct_scalar(node))
        try:
            value = read(text.replace("_", "").lower())
        except ValueError:
            raise _fault(node, f"'{text:.40}' is not a number") from None
        try:
            finite = math.isfinite(value)
        except OverflowError:  # a whole number beyond the range of floats
            finite = False
        if not finite:
            raise _fault(node, f"'{text:.40}' is not finite; a finite number is allowed")
        return value

    return construct


def _refuse_tag(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    tag = node.tag.replace(_TAG, "!!")
    raise _fault(node, f"the tag {tag:.60} is not allowed in a study; leave it out")


def _boolean(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> bool:
    try:
        return loader.bool_values[str(loader.construct_scalar(node)).lower()]
    except KeyError:
        raise _fault(node, f"'{node.value:.40}' is neither true nor false") from None


_Loader.add_constructor(f"{_TAG}int", _number(lambda text: int(text, 16 if "0x" in text else 10)))
_Loader.add_constructor(f"{_TAG}float", _number(lambda text: float(re.sub(r"\.(?=inf|nan)", "", text))))
_Loader.add_constructor(f"{_TAG}bool", _boolean)
_Loader.add_constructor(None, _refuse_tag)


@dataclass(frozen=True)
class Document:
    """A YAML document: its plain values, and the line and column of each."""

    file: str
    data: dict[str, Any]
    places: dict[Path, tuple[int, int]] = field(repr=False)  #: of the key of a value in a mapping, of an item itself
    lines: tuple[str, ...] = field(default=(), repr=False)
    values: dict[Path, tuple[int, int]] = field(default_factory=dict, repr=False)  #: of the single values of mappings

    def problem(self, path: Path, message: str) -> Problem:
        """Return a problem at ``path``, or at its closest parent in the document.

        The place is that of the value, or that of its key if the message quotes the key or the value is no single one.
        """
        here: Path = ()
        for part in path:
            if (*here, part) not in self.places:
                break
            here = (*here, part)
        line, column = self.places[here]
        source = self.lines[line - 1] if 0 < line <= len(self.lines) else ""
        entry = re.split(r"[,}\]]|\s#", source[column - 1 :])[0] if here else ""
        hint = letters("".join(map(str, path)) + entry) + _interpolation(entry)
        if here in self.values and not is_about_key(here, message):
            line, column = self.values[here]
            source = self.lines[line - 1] if 0 < line <= len(self.lines) else ""
        if hint and message[-1] not in ".?":
            message += "."
        return Problem(self.file, line, column, message + hint, source)

    def with_sound(self, data: dict[str, Any], renamed: Mapping[Path, Path]) -> Document:
        """Return the document with the sound part of its data.

        Args:
            data: the sound part.
            renamed: path in ``data`` to the path in the document, for misspelt keys.
        """
        places, values = dict(self.places), dict(self.values)
        for new, old in renamed.items():
            for moved in (places, values):
                moved |= {(*new, *path[len(old) :]): at for path, at in moved.items() if path[: len(old)] == old}
        return replace(self, data=data, places=places, values=values)


def read_document(file: FilePath | str) -> Document:
    """Read a YAML file whose top level is a mapping.

    Raises:
        SpecError: if it does not exist, is not a file, is too large, is not YAML, or repeats a key.
    """
    name = str(file)
    return parse_document(_read_text(FilePath(file), name), name)


def parse_document(text: str, name: str) -> Document:
    """Parse a YAML text whose top level is a mapping, see :func:`read_document`.

    Args:
        text: the text of the document.
        name: name of the file in error messages.

    Raises:
        SpecError: if it is too large, is not YAML, or repeats a key.
    """
    # Lines as YAML counts them; str.splitlines has other separators.
    lines = tuple(re.split(r"\r\n|[\n\r\x85\u2028\u2029]", text))

    def refuse(message: str, line: int = 0, column: int = 0) -> SpecError:
        return SpecError([Problem(name, line, column, message, lines[line - 1] if 0 < line <= len(lines) else "")])

    loader = None
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            raise refuse("the file is empty; a study begins with 'study: NAME'")
        places: dict[Path, tuple[int, int]] = {}
        values: dict[Path, tuple[int, int]] = {}
        problems: list[Problem] = []
        for count, (path, node, value, is_repeated) in enumerate(_walk(root, (), root, frozenset())):
            line, column = node.start_mark.line + 1, node.start_mark.column + 1
            if count > MOST_NODES:
                raise refuse(f"more than {MOST_NODES:,} values; a study file is a page or two", line, column)
            if is_repeated:
                first = places[path][0]
                sentence = f"key '{path[-1]}' is given twice, first in line {first}"
                problems.append(Problem(name, line, column, sentence, lines[line - 1]))
            else:
                places[path] = (line, column)
                # An alias has the place of what it repeats, which is before its key.
                if (
                    node is not value
                    and isinstance(value, yaml.ScalarNode)
                    and node.end_mark.index < value.start_mark.index
                ):
                    values[path] = (value.start_mark.line + 1, value.start_mark.column + 1)
        if problems:
            raise SpecError(problems)
        data = _without_aliases(loader.construct_document(root))
    except _NotAllowed as error:
        assert error.problem_mark is not None
        raise refuse(str(error.problem), error.problem_mark.line + 1, error.problem_mark.column + 1) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = (mark.line + 1, mark.column + 1) if mark else (0, 0)
        is_escape = "escape" in (error.problem or "")
        message = PATH_IN_QUOTES if is_escape else _not_yaml(lines, at[0]) or _misplaced(lines, error)
        message = message or f"not YAML: {', '.join(filter(None, (error.context, error.problem)))}"
        raise refuse(message, *at) from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position].split("\n")
        what = f"not YAML: a character that cannot be printed, {_code(text[error.position])}"
        raise refuse(what, len(before), len(before[-1]) + 1) from None
    except (yaml.YAMLError, ValueError) as error:
        raise refuse(f"not YAML: {error}") from None
    finally:
        if loader is not None:
            loader.dispose()
    if not isinstance(data, dict):
        raise refuse(f"a study is a mapping that begins with 'study: NAME'; found {_kind(data)}", 1, 1)
    return Document(name, data, places, lines, values)


def read_value(text: str) -> Any:
    """Parse one value of a study from YAML, such as that of ``--set PATH=VALUE``.

    Raises:
        ValueError: if it is not a value, with the reason.
    """
    try:
        return parse_document(f"value: {text}\n" if text.strip() else "value:\n", "").data["value"]
    except SpecError as error:
        raise ValueError(error.problems[0].message) from None


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
        raise SpecError([_not_utf8(name, error)]) from None
    except OSError as error:
        raise SpecError([Problem(name, 0, 0, f"cannot be read: {error.strerror}")]) from None


def _not_utf8(name: str, error: UnicodeDecodeError) -> Problem:
    if error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return Problem(name, 1, 1, "the file is UTF-16, which Notepad calls Unicode; save it as UTF-8")
    before = error.object[: error.start].split(b"\n")
    message = f"byte 0x{error.object[error.start]:02x} is not UTF-8 text; save the file as UTF-8"
    return Problem(name, len(before), len(before[-1].decode()) + 1, message, before[-1].decode())


def _walk(
    node: yaml.Node, path: Path, place: yaml.Node, above: frozenset[int]
) -> Iterator[tuple[Path, yaml.Node, yaml.Node, bool]]:
    """Yield every value's path, its node for error messages, its own node, and whether its mapping repeats the key.

    The first node is the key of a value in a mapping, and the item itself in a list.
    """
    if id(node) in above:
        raise _fault(node, "an alias that contains itself; remove it")
    yield path, place, node, False
    above = above | {id(node)}
    if isinstance(node, yaml.ScalarNode):
        _printable(node)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _walk(item, (*path, index), item, above)
    elif isinstance(node, yaml.MappingNode):
        keys: set[str] = set()
        for key, value in node.value:
            _name(key)
            here = (*path, str(key.value))
            if key.value in keys:
                yield here, key, value, True
            else:
                keys.add(key.value)
                yield from _walk(value, here, key, above)


class _NotAllowed(yaml.MarkedYAMLError):
    """Valid YAML that is not allowed in a study."""


def _fault(node: yaml.Node, sentence: str) -> _NotAllowed:
    return _NotAllowed(problem=sentence, problem_mark=node.start_mark)


def _name(key: yaml.Node) -> None:
    """Check a key, and set its tag so that it is read as text."""
    if not isinstance(key, yaml.ScalarNode):
        raise _fault(key, "a key must be a single name, such as seeds")
    _printable(key)
    kind = key.tag.removeprefix(_TAG)
    if kind == "bool":
        raise _fault(key, f"YAML reads the key '{key.value}' as a boolean; put it in quotes")
    if kind == "null":
        raise _fault(key, "a key without a name")
    if kind in _PLAIN:
        key.tag = f"{_TAG}str"


def _printable(node: yaml.ScalarNode) -> None:
    """Refuse unprintable characters, which would reach terminals, reports and file names."""
    if node.style == '"' and re.match(r"[A-Za-z]:[\n\t]", node.value):
        raise _fault(node, PATH_IN_QUOTES)
    for character in node.value:
        if unicodedata.category(character) in ("Cc", "Cs") and character not in "\n\t":
            raise _fault(node, f"a character that cannot be printed, {_code(character)}; remove it")


def _code(character: str) -> str:
    return f"U+{ord(character):04X}"


def _without_aliases(value: Any) -> Any:
    """Return a copy of lists and mappings that repeats what an alias refers to, instead of sharing one object."""
    if isinstance(value, dict):
        return {key: _without_aliases(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_aliases(item) for item in value]
    return value


def _not_yaml(lines: tuple[str, ...], number: int) -> str:
    """Return a message for mistakes that YAML's own messages do not explain, such as tabs; empty for any other."""
    for at in (number, number - 1):
        line = lines[at - 1] if 0 < at <= len(lines) else ""
        indent = line[: len(line) - len(line.lstrip())]
        if "\t" in indent:
            return f"line {at} is indented with a tab; YAML needs spaces"
        if hint := _interpolation(line) or letters(line):
            return f"not YAML.{hint}"
    return ""


def _misplaced(lines: tuple[str, ...], error: yaml.MarkedYAMLError) -> str:
    """Return a message for wrong indentation, or for a text that needs quotes; empty for any other mistake."""
    mark, start = error.problem_mark, error.context_mark
    if mark is None or mark.line >= len(lines):
        return ""
    here, before = lines[mark.line], lines[mark.line - 1] if mark.line else ""
    if "expected <block end>" in (error.problem or "") and start is not None and not here[: mark.column].strip():
        kind = "items" if "sequence" in str(error.context) or "collection" in str(error.context) else "keys"
        return (
            f"wrong indentation: it begins in column {mark.column + 1}, and the {kind} from line {start.line + 1} on "
            f"begin in column {start.column + 1}; indent all {kind} of one level alike, with spaces"
        )
    if "mapping values are not allowed" in (error.problem or ""):
        if re.search(r":\s", here[: mark.column]):
            return "a text that contains ': ' needs quotes; write key: 'text'"
        if _indent(here) > _indent(before):
            return (
                f"wrong indentation: it is indented deeper than line {mark.line}, which has a value already; indent "
                "all keys of one level alike, with spaces"
            )
    return ""


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _interpolation(text: str) -> str:
    return " A study file has no interpolation ('${...}'); use --set PATH=VALUE." if "${" in text else ""


def _kind(value: Any) -> str:
    return "a list" if isinstance(value, list) else f"{value!r:.60}"
