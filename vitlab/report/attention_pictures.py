"""Pictures of what models look at, as explanations left them in the folders of trials."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitlab.plan.values import Plan
from vitlab.store.folders import Store

MOST = 12  #: pictures that stand in a page; all are named in report.json


def explained(plan: Plan, store: Store) -> list[dict[str, Any]]:
    """Every rollout of the first seed of every arm: ``arm, seed, image`` (its number in the test split), the token
    ``of`` which it is, and the ``file`` below the output folder.
    """
    first = {planned.arm: planned for planned in reversed(plan.trials)}
    found = []
    for arm in (arm.name for arm in plan.arms if arm.name in first):
        planned = first[arm]
        folder = store.trial(planned.trial.key, planned.trial.code).path
        for image, file in sorted(_rollouts(folder)):
            found.append(
                {
                    "arm": arm,
                    "seed": planned.seed,
                    "image": image,
                    "of": file.stem.removeprefix("rollout_"),
                    "file": file.relative_to(store.root).as_posix(),
                }
            )
    return found


def pictures(rows: Sequence[Mapping[str, Any]], root: Path) -> Iterator[tuple[str, str, str]]:
    """The first of :func:`explained` for a page: address that holds the picture itself, alternative text, caption."""
    for row in rows[:MOST]:
        try:
            data = (root / row["file"]).read_bytes()
        except OSError:
            continue  # gone since; a page does without
        said = f"{row['arm']}, seed {row['seed']}, test image {row['image']}"
        shown = "the image, attention of the " + ("patches" if row["of"] == "mean" else f"{row['of']} token")
        shown += " rolled out over all blocks, the image seen through it, and the most probable classes"
        yield f"data:image/png;base64,{base64.b64encode(data).decode()}", f"{said}: {shown}", f"{said}: {shown}."


def _rollouts(folder: Path) -> Iterator[tuple[int, Path]]:
    for file in folder.glob("explain/test-*/rollout_*.png"):
        if number := re.fullmatch(r"test-(\d+)", file.parent.name):
            yield int(number[1]), file
