"""Safe reading of YAML, with the line and column of every value for error messages.

Differences from YAML 1.1, to match users' expectations: ``1e-3`` is a number, ``010`` is ten, ``12:30`` and
``2024-01-01`` are text, a key is always a name, and a repeated key is an error.  Values that a study does not need are
refused: tagged dates, sets and binary data, infinities, and unprintable characters.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from operator import eq
from pathlib import Path as FilePath
from typing import Any

import yaml

from vitlab.errors import Path, Problem, SpecError, closest, is_about_key, lookalike_note
from vitlab.spec.tree import NewTree, Tree, value_at

LARGEST_FILE = 1_000_000  #: largest size in bytes
MOST_NODES = 100_000  #: largest number of values with aliases expanded, as a limit on nested aliases
DEEPEST = 50  #: largest depth of nesting
TOO_DEEP = "nested too deeply; a study file is a page or two"
PATH_IN_QUOTES = "in double quotes a backslash begins an escape such as \\n; put the text in single quotes: 'C:\\data'"

MAPPING = "# from a mapping in Python"
"""First line of a file that :func:`vitlab.run` writes; problems of it are placed by path."""

TAG = "tag:yaml.org,2002:"

Place = tuple[int, int]
"""Line and column, counted from 1."""

Entries = dict[str, tuple[yaml.Node, yaml.Node]]
"""Name to key and value of each entry of a mapping."""


class _Loader(yaml.SafeLoader):
    """SafeLoader with the numbers described above, of which only nodes are used."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in pairs if tag not in (f"{TAG}int", f"{TAG}float", f"{TAG}timestamp")]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _kind_of_number, _pattern in (
    ("int", r"[-+]?(?:\d[\d_]*|0x[\da-fA-F_]+)"),
    (
        "float",
        r"[-+]?(?:\d[\d_]*\.[\d_]*|\.\d[\d_]*|\d[\d_]*(?=[eE]))(?:[eE][-+]?\d+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
    ),
):
    _Loader.add_implicit_resolver(f"{TAG}{_kind_of_number}", re.compile(rf"^(?:{_pattern})$"), list("-+.0123456789"))


@dataclass(frozen=True)
class Document:
    """A YAML document: its plain values, and the line and column of each."""

    file: str
    data: NewTree
    places: Mapping[Path, tuple[Place, Place]] = field(repr=False)
    """Path to the places of its key, or of an item of a list, and of its value; equal for mappings and lists."""
    lines: tuple[str, ...] = field(default=(), repr=False)
    written: Tree = field(default_factory=dict, repr=False)
    """``data`` of the file, without the changes of the command line."""
    changes: Mapping[Path, str] = field(default_factory=dict)
    """Path of a value that the command line has set, to the option that set it."""
    repeated: tuple[Problem, ...] = ()  #: keys that are given twice; ``data`` has the last value

    @property
    def is_mapping(self) -> bool:
        """Whether the file holds a mapping of Python, so that nobody has seen it and no message may name it."""
        return MAPPING in self.lines[:1]

    def problem(self, path: Path, message: str, by_change: bool = False) -> Problem:
        """Return a problem at ``path``, or at its closest parent in the document.

        The place is the value's, or the key's if the message quotes the key or the value is no single one.  The place
        of a value that the command line has set is its option, and that of a problem ``by_change`` the closest one.
        """
        here: Path = ()
        for part in path:
            if (*here, part) not in self.places:
                break
            here = (*here, part)
        found = value_at(self.data, here)
        if here != path and isinstance(found, Mapping | list):  # of a key that is missing
            found = None
        is_new = value_at(self.data, path) != value_at(self.written, path)
        near = [each for each in self.changes if path[: len(each)] == each or (is_new and each[: len(path)] == path)]
        if near or (by_change and self.changes):
            change = max(near or self.changes, key=lambda each: sum(map(eq, each, path)))
            return Problem(self.changes[change], 0, 0, message, path=path, value=found)
        if self.is_mapping:
            place = ".".join(map(str, here))
            return Problem(place, 0, 0, message.removeprefix(f"{place}: "), path=path, value=found)
        key, value = self.places[here]
        # What is written in one line from the key on, where look-alike letters and ${...} are found.
        entry = re.split(r"[,}\]]|\s#", _line(self.lines, key[0])[key[1] - 1 :])[0] if here else ""
        hint = lookalike_note("".join(map(str, path)) + entry) + _interpolation_hint(entry)
        line, column = key if is_about_key(here, message) else value
        if hint and message[-1] not in ".?":
            message += "."
        return Problem(self.file, line, column, message + hint, _line(self.lines, line), path, found)

    def with_sound_data(self, data: NewTree, written: Mapping[Path, Path]) -> Document:
        """Return the document with the sound part of its data.

        Args:
            data: the sound part.
            written: path in ``data`` to the path in the document, for misspelt keys.
        """
        places = dict(self.places)
        for new, old in written.items():
            places |= {(*new, *path[len(old) :]): at for path, at in places.items() if path[: len(old)] == old}
        return replace(self, data=data, places=places)


def read_document(file: FilePath | str) -> Document:
    """Read a YAML file whose top level is a mapping.

    Raises:
        SpecError: if it does not exist, is not a file, is too large, or is not YAML.
    """
    path, name = FilePath(file), str(file)
    refuse = partial(_error_at, name, ())
    try:
        if path.exists() and not path.is_file():
            raise refuse("is not a regular file")
        if (size := path.stat().st_size) > LARGEST_FILE:
            raise refuse(f"has {size:,} bytes; a study file has at most {LARGEST_FILE:,}")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        # Equal folders and suffixes would make any two names similar.
        beside = {each.stem: each for each in path.parent.glob("*.y*ml")}
        close = closest(path.stem, beside)
        near = f" Did you mean '{beside[close]}'?" if close is not None else ""
        raise refuse(f"no such file.{near}".removesuffix(".")) from None
    except UnicodeDecodeError as error:
        before = error.object[: error.start].split(b"\n")
        byte = error.object[error.start]
        message = f"byte 0x{byte:02x} is not UTF-8 text; save the file as UTF-8"
        raise refuse(message, len(before), len(before[-1].decode()) + 1) from None
    except OSError as error:
        raise refuse(f"cannot be read: {error.strerror}") from None
    return parse_document(text, name)


def parse_document(text: str, name: str) -> Document:
    """Parse a YAML text whose top level is a mapping, see :func:`read_document`.

    Args:
        text: the text of the document.
        name: name of the file in error messages.

    Raises:
        SpecError: if it is too large, or is not YAML.
    """
    # Lines as YAML counts them; str.splitlines has other separators.
    lines = tuple(re.split(r"\r\n|[\n\r\x85\u2028\u2029]", text))

    refuse = partial(_error_at, name, lines)
    reader = _Reader()
    try:
        root = yaml.compose(text, Loader=_Loader)
        if root is None:
            raise refuse("the file is empty; a study begins with 'study: NAME'")
        data = reader.read(root)
    except yaml.MarkedYAMLError as error:
        if unclosed := _find_unclosed(text, error):
            raise refuse(*unclosed) from None
        mark = error.problem_mark or error.context_mark
        line, column = (mark.line + 1, mark.column + 1) if mark else (0, 0)
        message = _explain_error(lines, error, line)
        if named := re.match(r"line (\d+) ", message):
            line = int(named[1])
            column = len(_line(lines, line)) - len(_line(lines, line).lstrip(" ")) + 1
        raise refuse(message, line, column) from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position].split("\n")
        what = f"not YAML: a character that cannot be printed, U+{ord(text[error.position]):04X}"
        raise refuse(what, len(before), len(before[-1]) + 1) from None
    except (yaml.YAMLError, ValueError) as error:
        raise refuse(f"not YAML: {error}") from None
    except RecursionError:
        raise refuse(TOO_DEEP) from None
    repeated = tuple(
        Problem(name, *place, f"key '{path[-1]}' is given twice, first in line {first}", _line(lines, place[0]), path)
        for path, place, first in reader.repeated
    )
    if not isinstance(data, dict):
        kind = "a list" if isinstance(data, list) else f"{data!r:.60}"
        raise refuse(f"a study is a mapping that begins with 'study: NAME'; found {kind}", 1, 1)
    return Document(name, data, reader.places, lines, written=data, repeated=repeated)


def read_value(text: str) -> Any:
    """Parse one value of a study from YAML, such as the VALUE of ``--set PATH=VALUE``.

    Raises:
        ValueError: if it is not a value, with the reason.
    """
    try:
        document = parse_document(f"value: {text}\n" if text.strip() else "value:\n", "")
        if document.repeated:
            raise SpecError(document.repeated)
    except SpecError as error:
        raise ValueError(error.problems[0].message) from None
    return document.data["value"]


def _error_at(name: str, lines: tuple[str, ...], message: str, line: int = 0, column: int = 0) -> SpecError:
    return SpecError([Problem(name, line, column, message, _line(lines, line))])


class _Reader:
    """Reader of the nodes of a document, which records the place of every value.

    An alias is read anew wherever it is used, so that no two values share an object.
    """

    def __init__(self) -> None:
        self.places: dict[Path, tuple[Place, Place]] = {}
        self.repeated: list[tuple[Path, Place, int]] = []  #: path and place of a key, and the line of the first one
        self._entries: dict[yaml.Node, Entries] = {}

    def read(self, node: yaml.Node, path: Path = (), key: yaml.Node | None = None) -> Any:
        """Return the plain value of a node, which has a key if it is in a mapping."""
        key = key or node
        if len(path) > DEEPEST:  # of an alias that contains itself; others are counted when they are composed
            raise _not_allowed(key, TOO_DEEP)
        if len(self.places) > MOST_NODES:
            raise _not_allowed(key, f"more than {MOST_NODES:,} values; a study file is a page or two")
        # An alias has the place of what it repeats, which is before its key.
        is_single = isinstance(node, yaml.ScalarNode) and node.start_mark.index >= key.start_mark.index
        self.places[path] = _node_place(key), _node_place(node if is_single else key)
        if isinstance(node, yaml.ScalarNode):
            return _scalar_value(node)
        if node.tag not in (f"{TAG}seq", f"{TAG}map"):
            raise _tag_not_allowed(node)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, (*path, index)) for index, item in enumerate(node.value)]
        return {
            name: self.read(value, (*path, name), at) for name, (at, value) in self.mapping_entries(node, path).items()
        }

    def mapping_entries(self, node: yaml.Node, path: Path = ()) -> Entries:
        """Return the entries of a mapping by name; those of ``<<: *alias`` come before its own, which replace them."""
        if node in self._entries:
            return self._entries[node]
        if not isinstance(node, yaml.MappingNode):
            raise _not_allowed(node, "'<<' takes a mapping or a list of mappings, such as *alias")
        self._entries[node] = {}  # an alias that contains itself adds nothing
        first: dict[str, Place] = {}
        own: Entries = {}
        merged: Entries = {}
        for key, value in node.value:
            name, place = _require_key_name(key), _node_place(key)
            if name in first:
                self.repeated.append(((*path, name), place, first[name][0]))
            first.setdefault(name, place)
            if key.tag != f"{TAG}merge":
                own[name] = key, value
                continue
            for source in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                merged = {**self.mapping_entries(source), **merged}  # of several, the first one counts
        self._entries[node] = {**merged, **own}
        return self._entries[node]


class _NotAllowed(yaml.MarkedYAMLError):
    """Valid YAML that is not allowed in a study."""


def _not_allowed(node: yaml.Node, sentence: str) -> _NotAllowed:
    return _NotAllowed(problem=sentence, problem_mark=node.start_mark)


def _tag_not_allowed(node: yaml.Node) -> _NotAllowed:
    return _not_allowed(node, f"the tag {node.tag.replace(TAG, '!!'):.60} is not allowed in a study; leave it out")


def _require_key_name(key: yaml.Node) -> str:
    """Return the name that a key is."""
    if not isinstance(key, yaml.ScalarNode):
        raise _not_allowed(key, "a key must be a single name, such as seeds")
    _check_printable(key)
    if key.tag == f"{TAG}bool":
        raise _not_allowed(key, f"YAML reads the key '{key.value}' as a boolean; put it in quotes")
    if key.tag == f"{TAG}null":
        raise _not_allowed(key, "a key without a name")
    if not key.tag.startswith(TAG):
        raise _tag_not_allowed(key)
    return str(key.value)


def _scalar_value(node: yaml.ScalarNode) -> Any:
    """Return the value of a node that is neither a list nor a mapping."""
    _check_printable(node)
    match node.tag.removeprefix(TAG):
        case "null":
            return None
        case "str":
            return node.value
        case "bool":
            if node.value.lower() not in _Loader.bool_values:
                raise _not_allowed(node, f"'{node.value:.40}' is neither true nor false")
            return _Loader.bool_values[node.value.lower()]
        case "int":
            return _parse_number(node, lambda text: int(text, 16 if "0x" in text else 10))
        case "float":
            return _parse_number(node, lambda text: float(re.sub(r"\.(?=inf|nan)", "", text)))
    raise _tag_not_allowed(node)


def _parse_number(node: yaml.ScalarNode, parse: Callable[[str], int | float]) -> int | float:
    try:
        value = parse(node.value.replace("_", "").lower())
        if math.isfinite(value):
            return value
    except ValueError:
        raise _not_allowed(node, f"'{node.value:.40}' is not a number") from None
    except OverflowError:  # a whole number beyond the range of floats
        pass
    raise _not_allowed(node, f"'{node.value:.40}' is not finite; a finite number is allowed")


def _check_printable(node: yaml.ScalarNode) -> None:
    """Refuse unprintable characters, which would reach terminals, reports and file names."""
    if node.style == '"' and re.match(r"[A-Za-z]:[\n\t]", node.value):
        raise _not_allowed(node, PATH_IN_QUOTES)
    for character in node.value:
        if unicodedata.category(character) in ("Cc", "Cs") and character not in "\n\t":
            raise _not_allowed(node, f"a character that cannot be printed, U+{ord(character):04X}; remove it")


def _node_place(node: yaml.Node) -> Place:
    return node.start_mark.line + 1, node.start_mark.column + 1


def _line(lines: tuple[str, ...], number: int) -> str:
    """Return a line of the text by its number, counted from 1; empty if there is none."""
    return lines[number - 1] if 0 < number <= len(lines) else ""


def _find_unclosed(text: str, error: yaml.MarkedYAMLError) -> tuple[str, int, int] | None:
    """Return the message on a bracket or a quote that is not closed, its line and its column; None if all are."""
    start, stop = error.context_mark, error.problem_mark
    is_open = re.search("flow (mapping|sequence)|a quoted", str(error.context))
    if start is None or stop is None or not is_open or text[stop.index - 1 :].startswith("${"):
        return None
    comma = "" if "quoted" in is_open[0] else ", or write the comma that is missing there"
    where = f"line {stop.line + 1}, column {stop.column + 1}"
    sentence = f"{text[start.index]!r} opens here and is not closed before {where}; close it{comma}"
    return sentence, start.line + 1, start.column + 1


def _explain_error(lines: tuple[str, ...], error: yaml.MarkedYAMLError, number: int) -> str:
    """Return the message for a text that is not YAML; for common mistakes, it says what to type.

    Args:
        lines: the lines of the text.
        error: the mistake.
        number: number of its line.
    """
    problem, mark, start = error.problem or "", error.problem_mark, error.context_mark
    if isinstance(error, _NotAllowed):
        return problem
    if "escape" in problem:
        return PATH_IN_QUOTES
    here, before = _line(lines, number), _line(lines, number - 1)
    for at, line in ((number, here), (number - 1, before)):
        if "\t" in line[: _indent_width(line)]:
            return f"line {at} is indented with a tab; YAML needs spaces"
        if hint := _interpolation_hint(line) or lookalike_note(line):
            return f"not YAML.{hint}"
    column = mark.column if mark else 0
    if match := re.search(r"found '([]}])'", problem):
        return f"'{match[1]}' closes nothing; remove it"
    if "<stream end>" in problem:
        return "the file ends inside '{' or '['; close it"
    last = here[:column].rstrip()[-1:]
    if "expected <block end>" in problem and last and last in "'\"]}":
        return f"the value ends before this, with {last}; remove the rest, or put all of the value in other quotes"
    if mark and re.search("alias|block scalar|cannot start any token|sequence entries", f"{error.context} {problem}"):
        begin = start or mark
        first = _line(lines, begin.line + 1)[begin.column]
        return "a tab stands here; write a space" if first == "\t" else f"a text that begins with {first} needs quotes"
    if problem in ("could not find expected ':'", "mapping values are not allowed here"):
        at = start.line + 1 if start else number - 1
        if not re.search(r":(\s|$)|^\s*$", _line(lines, at)):
            return (
                f"line {at} has no 'key: value'; write a colon and a space after the key, or indent a text that goes on"
            )
    if "expected <block end>" in problem and start is not None and column <= _indent_width(here):
        kind = "keys" if "mapping" in str(error.context) else "items"
        if column == start.column:
            return f"line {number} has no '- ', which begins each item from line {start.line + 1} on; add or remove it"
        return (
            f"wrong indentation: it begins in column {column + 1}, and the {kind} from line {start.line + 1} on "
            f"begin in column {start.column + 1}; indent all {kind} of one level alike, with spaces"
        )
    if "mapping values are not allowed" in problem:
        if re.search(r":\s", here[:column]):
            return "a text that contains ': ' needs quotes; write key: 'text'"
        if _indent_width(here) > _indent_width(before):
            return (
                f"wrong indentation: it is indented deeper than line {number - 1}, which has a value already; indent "
                "all keys of one level alike, with spaces"
            )
    return f"not YAML: {', '.join(filter(None, (error.context, problem)))}"


def _indent_width(line: str) -> int:
    return len(line) - len(line.lstrip())


def _interpolation_hint(text: str) -> str:
    return " A study file has no interpolation ('${...}'); use --set PATH=VALUE." if "${" in text else ""
