"""Cohorts: which trials are trained together, their weights stacked, and whether that pays.

One kernel call for all of them saves time where the work of a call is small: measured on a CPU, 16 seeds of a ViT of 17
tokens of width 32 take 0.7 of the time they take one after another in batches of 64, and 0.5 in batches of 16; at width
64 and batches of 128 nothing is gained.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from vitlab.plan.values import Planned, Trial
from vitlab.spec.run import Engine

MOST = 16  #: members of a cohort: more gain nothing, and a death costs more
LARGEST = 1 << 16
"""Numbers between two layers, of a whole batch, up to which a cohort pays."""

FREE = ("optimizer", "schedule", "clip_grad", "layer_decay", "mix")
"""What may differ in ``train`` from member to member: each has an optimizer of its own."""

Values = Callable[[Trial], int | None]
"""How many numbers of one image a trial's model hands from layer to layer; None where it does not say."""


def engine_of(trial: Trial, chosen: Engine, values: Values) -> str:
    """``vmap`` for a trial that belongs in a cohort, be it the only member; else ``loop``.

    A function of the trial and of ``run.engine`` alone: neither the seeds that were added nor the machine change it.
    """
    if chosen == "loop" or trial.needs or trial.spec.get("distill") or trial.spec["train"].get("ema"):
        return "loop"
    if chosen == "vmap":
        return "vmap"
    found = values(trial)
    return "vmap" if found is not None and found * trial.spec["train"]["batch_size"] <= LARGEST else "loop"


def stack_key(trial: Trial) -> str:
    """Equal for trials that can be trained together: equal but for their seeds and for what no shape depends on.

    Validation and test images are the same, as a cohort is evaluated together.
    """
    spec: dict[str, Any] = dict(trial.spec)
    spec["train"] = {name: value for name, value in trial.spec["train"].items() if name not in FREE}
    spec["data"] = {name: value for name, value in trial.spec["data"].items() if name != "augment"}
    return json.dumps([spec, trial.seeds["split"], trial.data, trial.code], sort_keys=True)


def grouped(todo: Sequence[Planned], places: int, chosen: Engine, values: Values) -> list[tuple[str, list[Planned]]]:
    """The trials in the groups they are trained in, each with its engine, in the order of the first of each.

    Args:
        todo: what is to be trained.
        places: how many groups can be trained at a time; no place stays empty while another has several trials.
        chosen: ``run.engine``.
        values: see :data:`Values`.
    """
    groups: list[tuple[str, list[Planned]]] = []
    stacks: dict[str, list[Planned]] = {}
    for planned in todo:
        engine = engine_of(planned.trial, chosen, values)
        if engine == "loop":
            groups.append((engine, [planned]))
            continue
        key = stack_key(planned.trial)
        if key not in stacks:
            stacks[key] = []
            groups.append((engine, stacks[key]))
        stacks[key].append(planned)
    return [(engine, part) for engine, group in groups for part in _parts(group, places)]


def _parts(group: list[Planned], places: int) -> list[list[Planned]]:
    """A group in as few parts of at most :data:`MOST` as fill the places, as equal as they go."""
    count = max(-(-len(group) // MOST), min(places, -(-len(group) // 2)))
    cuts = [index * len(group) // count for index in range(count + 1)]
    return [group[begin:end] for begin, end in pairwise(cuts)]
