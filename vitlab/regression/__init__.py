"""Regression gate: detect whether a code change has made a study's trials worse.

Three tiers, the cheapest first: an exact comparison of what must be equal (``facts``), a check that every arm learns
(``traces``), and a statistical test of what differs by chance (``decide``).
"""

from __future__ import annotations

from typing import Literal, get_args

Tier = Literal["exact", "learning", "statistical"]
TIERS: tuple[Tier, ...] = get_args(Tier)
