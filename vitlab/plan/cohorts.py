"""Engines: which trials are trained together as a cohort, their weights stacked, and whether that pays.

One kernel call for all of them saves time where the work of a call is small: measured on a CPU, 16 seeds of a ViT of 17
tokens of width 32 take 0.7 of the time they take one after another in batches of 64, and 0.5 in batches of 16; at width
64 and batches of 128 nothing is gained.  With the batch innermost (:mod:`vitlab.models.innermost`), in batches of 128,
those of a ViT of 5 tokens take 0.3 at 3 channels of a head, 0.5 at 8 and 0.7 at 16; of 10 tokens and 8 channels 0.5, of
17 and 4 channels 0.6: 0.5 to 0.8 of what ``vmap`` takes.  At 17 tokens and 8 channels the two are alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

from vitlab.geometry import Work
from vitlab.plan.key import key_of
from vitlab.plan.trial import Trial
from vitlab.plan.values import EngineBenchmark, Planned
from vitlab.spec.run import Engine
from vitlab.spec.trial import LENGTHS

MOST = 16  #: members of a cohort: more gain nothing, and a death costs more
LARGEST = 1 << 16
"""Numbers between two layers, of a whole batch, up to which a cohort pays."""

NARROW = 1200
"""Products of queries and keys, of an image and head, up to which a cohort does better with the batch innermost."""

FREE = ("optimizer", "schedule", "clip_grad", "layer_decay", "mix")
"""What may differ in ``train`` from member to member: each has an optimizer of its own."""

AUGMENT = ("augment",)
"""What may differ in ``data``."""

Works = Callable[[Trial], Work | None]
"""How much a trial's model computes of one image; None where it does not say."""


def engine_of(trial: Trial, chosen: Engine, works: Works, probes: Mapping[str, EngineBenchmark] = {}) -> str:
    """``vmap`` or ``stack`` for a trial that belongs in a cohort, be it the only member; else ``loop``.

    This is the written rule, and the only place where it stands:

    1. What starts from another trial, learns from a teacher or averages its weights is trained by the loop.
    2. ``run.engine`` ``loop``, ``vmap`` and ``stack`` are what they say.
    3. ``measured`` is what the probe of the trial's shape has found; where there is none, 4 holds.
    4. ``auto`` is ``loop`` where the numbers that a whole batch hands from layer to layer are more than
       :data:`LARGEST`, or the model does not tell; else what 5 says of a cohort.
    5. A cohort is trained by ``stack`` in fp32 and fp64 where a head forms at most :data:`NARROW` products of queries
       and keys, and by ``vmap`` where they are more or the model does not tell.

    Where a worker finds that ``stack`` does not know a part, or itself on a GPU, it takes ``vmap``; where the model
    cannot be stacked, the loop; and the journal says why.

    So it is a function of the trial, of ``run.engine`` and of what plan.json holds; neither the seeds that were added
    nor the machine change it.  Nothing else is chosen: threads are ``run.threads``, nothing is compiled, and the kernel
    of ``attention: auto`` follows a rule of its own, which is recorded with every result.
    """
    if chosen == "loop" or not stackable(trial):
        return "loop"
    if chosen in ("vmap", "stack"):
        return chosen
    if chosen == "measured" and (probe := probes.get(shape(trial))) is not None:
        return probe.engine
    work = works(trial)
    if work is None or work.values * trial.spec["train"]["batch_size"] > LARGEST:
        return "loop"
    return stacking(trial, work)


def stacking(trial: Trial, work: Work | None) -> Literal["vmap", "stack"]:
    """The engine that a trial would have in a cohort: the last line of :func:`engine_of`."""
    wide = trial.spec["train"].get("precision", "fp32") in ("fp32", "fp64")
    return "stack" if wide and work is not None and work.products is not None and work.products <= NARROW else "vmap"


def stackable(trial: Trial) -> bool:
    """Whether a trial could be a member of a cohort, as far as its spec says."""
    return not (trial.needs or trial.spec.get("distill") or trial.spec["train"].get("ema"))


def shape(trial: Trial) -> str:
    """A digest of what decides how fast a trial trains: its spec without seeds, lengths, rates and augmentations.

    Of these it has whether images are cut out of pictures in files, which then are decoded for every batch.
    """
    beside = (*FREE, *LENGTHS, "evaluations")
    data = _without(trial.spec["data"], AUGMENT)
    if any(change.get("of") == "picture" for change in trial.spec["data"].get("augment", ())):
        data["of"] = "picture"
    spec = {**trial.spec, "train": _without(trial.spec["train"], beside), "data": data}
    return key_of(spec)[:32]


def unprobed(trials: Iterable[Planned], probes: Mapping[str, EngineBenchmark]) -> dict[str, list[Planned]]:
    """Shape to its trials, of those that could be stacked and of which nobody has measured whether that pays."""
    found: dict[str, list[Planned]] = {}
    for planned in trials:
        if stackable(planned.trial) and (known := shape(planned.trial)) not in probes:
            found.setdefault(known, []).append(planned)
    return found


def stack_key(trial: Trial) -> str:
    """Equal for trials that can be trained together: equal but for their seeds and for what no shape depends on.

    Validation and test images are the same, as a cohort is evaluated together.
    """
    spec = {**trial.spec, "train": _without(trial.spec["train"], FREE), "data": _without(trial.spec["data"], AUGMENT)}
    return json.dumps([spec, trial.seeds["split"], trial.data, trial.code], sort_keys=True)


def grouped(
    todo: Sequence[Planned], places: int, chosen: Engine, works: Works, probes: Mapping[str, EngineBenchmark] = {}
) -> list[tuple[str, list[Planned]]]:
    """The trials in the groups they are trained in, each with its engine, in the order of the first of each.

    Args:
        todo: what is to be trained.
        places: how many groups can be trained at a time; no place stays empty while another has several trials.
        chosen: ``run.engine``.
        works: see :data:`Works`.
        probes: see :func:`engine_of`.
    """
    groups: list[tuple[str, list[Planned]]] = []
    stacks: dict[str, list[Planned]] = {}
    for planned in todo:
        engine = engine_of(planned.trial, chosen, works, probes)
        if engine == "loop":
            groups.append((engine, [planned]))
            continue
        key = stack_key(planned.trial)
        if key not in stacks:
            stacks[key] = []
            groups.append((engine, stacks[key]))
        stacks[key].append(planned)
    return [(engine, part) for engine, group in groups for part in _parts(group, places)]


def _without(tree: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: value for name, value in tree.items() if name not in names}


def _parts(group: list[Planned], places: int) -> list[list[Planned]]:
    """A group in as few parts of at most :data:`MOST` as fill the places, as equal as they go."""
    count = max(-(-len(group) // MOST), min(places, -(-len(group) // 2)))
    cuts = [index * len(group) // count for index in range(count + 1)]
    return [group[begin:end] for begin, end in pairwise(cuts)]
