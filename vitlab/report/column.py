"""Column: a column of a table as text, for every format to lay out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Column:
    """A column of a table as text.  If space is short, columns of the highest ``rank`` are dropped first."""

    title: str
    cells: tuple[str, ...]
    rank: int = 0
    right: bool = True
