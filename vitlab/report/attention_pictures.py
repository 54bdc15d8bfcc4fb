"""Attention-rollout pictures that ``vitlab explain`` stored in the folders of trials."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitlab.plan.values import Plan
from vitlab.store.folders import Store

MAX_EMBEDDED = 12  #: pictures embedded in a page; report.json lists all


def rollouts(plan: Plan, store: Store) -> list[dict[str, Any]]:
    """Return every rollout of each arm's first seed as a row.

    Columns: ``arm, seed, image`` (index in the test split), ``of`` (the token) and ``file`` (below the output folder).
    """
    first = {planned.arm: planned for planned in reversed(plan.trials)}
    rows = []
    for arm in (arm.name for arm in plan.arms if arm.name in first):
        planned = first[arm]
        folder = store.trial(planned.trial.key, planned.trial.code).path
        for image, file in sorted(_rollout_files(folder)):
            rows.append(
                {
                    "arm": arm,
                    "seed": planned.seed,
                    "image": image,
                    "of": file.stem.removeprefix("rollout_"),
                    "file": file.relative_to(store.root).as_posix(),
                }
            )
    return rows


def pictures(rows: Sequence[Mapping[str, Any]], root: Path) -> Iterator[tuple[str, str, str]]:
    """Yield data URL, alternative text and caption of the first :func:`rollouts`."""
    for row in rows[:MAX_EMBEDDED]:
        try:
            data = (root / row["file"]).read_bytes()
        except OSError:
            continue  # deleted since; the page omits it
        subject = f"{row['arm']}, seed {row['seed']}, test image {row['image']}"
        description = "the image, attention of the " + ("patches" if row["of"] == "mean" else f"{row['of']} token")
        description += " rolled out over all blocks, the image seen through it, and the most probable classes"
        yield (
            f"data:image/png;base64,{base64.b64encode(data).decode()}",
            f"{subject}: {description}",
            f"{subject}: {description}.",
        )


def _rollout_files(folder: Path) -> Iterator[tuple[int, Path]]:
    for file in folder.glob("explain/test-*/rollout_*.png"):
        if number := re.fullmatch(r"test-(\d+)", file.parent.name):
            yield int(number[1]), file
