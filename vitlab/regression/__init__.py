"""The gate: whether a change of the code has made a study's trials worse.

Three tiers, the cheapest first: what must be equal is compared exactly (``facts``), every arm must learn at all
(``traces``), and what differs by chance is tested (``judge``).
"""

from __future__ import annotations

from typing import Literal, get_args

Tier = Literal["exact", "learning", "statistical"]
TIERS: tuple[Tier, ...] = get_args(Tier)
