"""Regression gate and comparison of two commits: detect whether a code change has made a study's trials worse.

Four tiers: an exact comparison of what must be equal (``facts``), a check that every arm learns (``traces``), a
statistical test of what differs by chance (``decide``), and time and memory beside the baseline's commit (``cost``).
A commit of the user's repository runs in subprocesses, from a worktree (``checkout``).
"""

from typing import Literal, get_args

Tier = Literal["exact", "learning", "statistical", "cost"]
TIERS: tuple[Tier, ...] = get_args(Tier)
