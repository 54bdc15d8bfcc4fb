"""Markdown tables of simulated rates."""

from __future__ import annotations

import math
from collections.abc import Sequence

ALPHA = 0.05


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [heads, ["---"] + ["--:"] * (len(heads) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def percent(share: float) -> str:
    """Format a share as a percentage without its sign; a dash for NaN."""
    return "-" if math.isnan(share) else f"{100 * share:.1f}"


def standard_error(studies: int) -> float:
    """Return the standard error of a rate of 5 %."""
    return math.sqrt(ALPHA * (1 - ALPHA) / studies)
