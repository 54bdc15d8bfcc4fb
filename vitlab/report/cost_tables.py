"""Tables of a report about size and cost: power laws over size, Pareto fronts, and measured speeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from vitlab.errors import count
from vitlab.report.costs import COST_COLUMNS, SPEEDS
from vitlab.report.phrasing import DASH, MINUS, Column, Row, percent
from vitlab.spec import Analysis


def scaling_columns(rows: Sequence[Row], analysis: Analysis) -> list[Column]:
    """Return the table of power laws of the error or the loss over size."""
    if not rows:
        return []
    names = {"params": "parameters", "macs": "MACs", "images": "images seen"}

    def exponent(row: Row) -> str:
        return f"{row['exponent']:.3f}".replace("-", MINUS)

    def bracket(row: Row) -> str:
        if row["exponent_low"] is None:
            return DASH
        return f"[{row['exponent_low']:.3f}, {row['exponent_high']:.3f}]".replace("-", MINUS)

    def r2(row: Row) -> str:
        return DASH if row["r2"] is None else f"{row['r2']:.3f}"

    table = [
        Column("over", tuple(names[row["size"]] for row in rows), right=False),
        Column("arms with", tuple(row["series"] for row in rows), right=False),
        Column("sizes", tuple(str(len(row["arms"])) for row in rows), rank=1),
        Column("exponent", tuple(map(exponent, rows))),
        Column(f"{percent(1 - analysis.alpha)} interval", tuple(map(bracket, rows))),
        Column("R\N{SUPERSCRIPT TWO}", tuple(map(r2, rows)), rank=2),
    ]
    return table if any(row["series"] for row in rows) else [table[0], *table[2:]]


def front_columns(
    fronts: Mapping[str, Mapping[str, bool]], rows: Sequence[Row], shares: Mapping[str, Mapping[str, float]] = {}
) -> list[Column]:
    """Return the table of Pareto fronts in cost and result.

    An arm whose mean lacks seeds that diverged or failed is marked.

    Args:
        fronts: see :func:`vitlab.report.tradeoff.fronts`.
        rows: of the arms.
        shares: see :func:`vitlab.report.tradeoff.front_shares`.
    """
    names = {"params": "parameters", "macs": "MACs", **COST_COLUMNS}
    failures = {row["arm"]: row["diverged"] + row["failed"] for row in rows}
    labels = {
        arm: f"{arm} ({count(count_broken, 'broken seed')})" if count_broken else arm
        for arm, count_broken in failures.items()
    }
    return (
        [
            Column("cheapest for what they reach, by", tuple(names[cost] for cost in fronts), right=False),
            Column(
                "arms",
                tuple("; ".join(labels[arm] for arm, on in on_front.items() if on) for on_front in fronts.values()),
                right=False,
            ),
            Column(
                "how often on the front", tuple(_shares_on_front(shares.get(cost, {})) for cost in fronts), right=False
            ),
        ][: 3 if shares else 2]
        if fronts
        else []
    )


def _shares_on_front(shares: Mapping[str, float]) -> str:
    """Return the arms that are on a front at least once in twenty draws, the surest first."""
    often = sorted((arm for arm in shares if shares[arm] >= 0.05), key=lambda arm: -shares[arm])
    return "; ".join(f"{arm} {100 * shares[arm]:.0f} %" for arm in often) or DASH


def cost_columns(rows: Sequence[Row]) -> list[Column]:
    """Return the table of costs measured for each arm alone."""
    if not rows:
        return []

    def spread(name: str) -> tuple[str, ...]:
        return tuple(f"{row[f'{name}_q1']:,.0f} to {row[f'{name}_q3']:,.0f}" for row in rows)

    table = [Column("arm", tuple(row["arm"] for row in rows), right=False)]
    for name, what in SPEEDS.items():
        table.append(Column(what, tuple(f"{row[name]:,.0f}" for row in rows)))
        table.append(Column("quartiles", spread(name), rank=1))
    return [*table, Column("memory", tuple(f"{row['peak_bytes'] / (1 << 20):,.0f} MiB" for row in rows))]


def cost_caption(rows: Sequence[Row]) -> str:
    """Return the caption of :func:`cost_columns`: the measurement conditions."""
    if not rows:
        return ""
    first = rows[0]
    return (
        f"Each arm alone, arms in turns, medians of {count(first['rounds'], 'round')}; training by the loop, with its "
        f"data; memory of the whole process, or on a GPU of its allocator. {first['device']}, {first['processor']}, "
        f"{count(first['threads'], 'thread')}, load {first['load']:.1f}; measured {first['measured'][:16]} UTC."
    )
