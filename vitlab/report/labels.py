"""Labels of arms in figures and narrow tables: without shared parts, wrapped, and unique."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

MAX_LINES = 4  #: most lines of a label; a longer one is cut in its middle


def name_parts(name: str) -> tuple[str, ...]:
    """Split an arm's name at its commas, except within brackets."""
    parts, depth, current = [], 0, ""
    for char in " ".join(name.split()):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth <= 0:
            parts.append(current.strip())
            current = ""
        else:
            current += char
    return tuple(part for part in (*parts, current.strip()) if part)


def shared_parts(names: Sequence[str]) -> tuple[str, ...]:
    """Return the parts that several names have in common, in the order of the first; none for a single name."""
    if len(names) < 2:
        return ()
    common = set.intersection(*(set(name_parts(name)) for name in names))
    return tuple(part for part in name_parts(names[0]) if part in common)


def short_labels(names: Sequence[str]) -> dict[str, str]:
    """Return each name on one line, without the parts that all names share."""
    shared = shared_parts(names)
    labels = {}
    for name in names:
        line = " ".join(name.split())
        labels[name] = ", ".join(part for part in name_parts(name) if part not in shared) or line if shared else line
    return _unique(labels)


def wrapped_labels(names: Sequence[str], width: int) -> dict[str, str]:
    """Return :func:`short_labels` in lines of at most ``width`` characters, broken behind commas where possible."""
    return _unique({name: _wrapped(label, width) for name, label in short_labels(names).items()})


def wrapped_line(text: str, width: int) -> str:
    """Return a text in lines of at most ``width`` characters."""
    return _wrapped(" ".join(text.split()), width)


def _wrapped(label: str, width: int) -> str:
    lines: list[str] = []
    *parts, last = name_parts(label) or (label,)
    for part in (*(f"{part}," for part in parts), last):
        if lines and len(lines[-1]) + 1 + len(part) <= width:
            lines[-1] += f" {part}"
        else:
            lines += textwrap.wrap(part, width)
    if len(lines) > MAX_LINES:
        half = MAX_LINES // 2
        lines = [*lines[: half - 1], f"{lines[half - 1][: width - 3]}...", *lines[half - MAX_LINES :]]
    return "\n".join(lines)


def _unique(labels: Mapping[str, str]) -> dict[str, str]:
    """Append a number to labels that occur more than once."""
    counts: dict[str, int] = {}
    for label in labels.values():
        counts[label] = counts.get(label, 0) + 1
    return {
        name: f"{label} #{index}" if counts[label] > 1 else label
        for index, (name, label) in enumerate(labels.items(), 1)
    }
