"""Choice of an engine, and the grouping of trials into batches that are trained together.

One kernel call for all trials saves time if a call does little work: measured on a CPU, 16 seeds of a ViT with 17
tokens of width 32 take 0.7 of the time of training them one after another at batch size 64, and 0.5 at 16; at width 64
and batch size 128 there is no gain.  By engine ``batch_last`` (:mod:`vitlab.engines.batch_last`), in batches of 128,
seeds of a ViT of 5 tokens take 0.3 at 3 channels of a head, 0.5 at 8 and 0.7 at 16.  Relative to ``vmap``, 8 or 16
seeds by ``batch_last`` take 0.83 to 0.96 of the time up to 37 tokens with 8 channels or 50 with 4, 0.75 with rotary
positions, and 0.98 to 1.17 at 50 and 65 tokens with 8 channels.
"""

import heapq
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from vitlab.geometry import Work
from vitlab.identity.trial import Trial, hash_of
from vitlab.planning.values import EngineBenchmark, Planned
from vitlab.registry import slot
from vitlab.spec import Choice
from vitlab.spec.tree import NewTree
from vitlab.spec.trial import LENGTHS, TrialSpec

MAX_TOGETHER = 16  #: in a batch of trials: more gain nothing, and losing a worker costs more
BATCH_COST = 2  #: of a batch of trials, in further trials: 16 seeds of the tutorial take 0.9 of two batches of 8
MAX_VALUES = 1 << 16
"""Largest number of values between two layers, for a whole batch, at which ``vmap`` is faster than the loop."""

MAX_GPU_VALUES = 1 << 22
"""The same on a GPU.  On an H100, 16 trials of 1.6 million values were 6 to 8 times as fast by ``vmap`` as by the
loop, and 6 to 14 times by ``compiled_vmap``; the limit follows from the 5 us of a launch, and was not measured."""

MIN_COMPILED_STEPS = 1 << 11
"""Steps from which compiling pays on a GPU: there it took 23 to 44 s, and saved 12 to 22 ms a step."""

MAX_PRODUCTS = 11_000
"""Largest number of query-key products, per image and head, at which ``batch_last`` is faster than ``vmap``."""

FREE = ("optimizer", "schedule", "clip_grad", "layer_decay", "mix")
"""Keys of ``train`` that may differ within a batch of trials: each trial has its own optimizer."""

AUGMENT = ("augment",)
"""Keys of ``data`` that may differ within a batch of trials."""

RULES = ("auto", "measured")
"""Values of ``run.engine`` that choose an engine by the rule of :func:`choose_engine`."""

Works = Callable[[Trial], Work | None]
"""Returns the work of a trial's model for one image; None if the model does not declare it."""

Group = tuple[str, list[Planned]]
"""An engine and the trials that it trains."""


class EngineChoice(NamedTuple):
    """The engine of a trial, and the reason for it, with its figures behind a colon; empty if named or measured."""

    engine: str
    reason: str


def choose_engine(
    trial: Trial, requested: str, works: Works, probes: Mapping[str, EngineBenchmark] = {}, device: str = "cpu"
) -> EngineChoice:
    """Return the engine of a trial: ``vmap`` or ``batch_last`` for one to train with others, even if there are none.

    The rule, which is defined here alone:

    1. A name in ``run.engine`` is used as given, but for rule 2.
    2. A trial that starts from another trial, learns from a teacher, averages its weights, scales its loss (fp16), or
       has an objective that is not vectorised over trials, is trained by itself, by ``loop`` (see rule 4).
    3. ``measured`` uses the result of the benchmark of the trial's shape; without a result, rule 4 applies.
    4. ``auto`` is ``loop`` if a whole batch has more than :data:`MAX_VALUES` values between two layers
       (:data:`MAX_GPU_VALUES` on CUDA), or if the model does not declare its work; otherwise rule 5 or 6 applies.
       On CUDA it is ``compiled`` instead of ``loop`` from :data:`MIN_COMPILED_STEPS` steps on, except in fp64, which
       is not compiled, and if the length is in epochs, whose steps a plan does not know.
    5. On CUDA, the engine is ``compiled_vmap`` under the same conditions, and ``vmap`` otherwise.
    6. On a CPU, it is ``batch_last`` in fp32, tf32 and fp64 if the objective is the default one and a head forms at
       most :data:`MAX_PRODUCTS` query-key products, and ``vmap`` if there are more or the model does not declare them.

    A worker falls back from ``batch_last`` and ``compiled_vmap`` to ``vmap``, and from that and ``compiled`` to
    ``loop``, where a training is not supported (:func:`vitlab.engines.engine_or_fallback`), and writes the reason to
    the journal.

    The engine therefore depends on the trial, ``run.engine``, plan.json and the type of device, such as ``cuda``,
    and not on added seeds.  Nothing else is chosen: the number of threads is ``run.threads``, and the kernel of
    ``attention: auto`` follows a rule of its own and is recorded with every result.
    """
    train = trial.spec.train
    if requested not in RULES and (is_stackable(trial) or is_one_at_a_time_engine(requested)):
        return EngineChoice(requested, "")
    steps = train.steps or (train.images or 0) // train.batch_size
    compiles = device == "cuda" and steps >= MIN_COMPILED_STEPS and train.precision != "fp64"
    alone = "compiled" if compiles and requested in RULES else "loop"
    if not is_stackable(trial):
        return EngineChoice(alone, "ema, fp16, a teacher, a source trial or the objective keeps trials apart")
    if requested == "measured" and (probe := probes.get(speed_digest(trial))) is not None:
        return EngineChoice(probe.engine, "")
    work = works(trial)
    if work is None:
        return EngineChoice(alone, "the model does not tell its work, by which trials are grouped")
    values, most = work.values * train.batch_size, MAX_GPU_VALUES if device == "cuda" else MAX_VALUES
    size = f"a batch has {values:,} values between two layers"
    if values > most:
        return EngineChoice(
            alone, f"too large to gain from training trials together: {size}, and the limit is {most:,}"
        )
    if compiles:
        return EngineChoice(
            "compiled_vmap", f"small trials, trained together and compiled: {size}, and {steps:,} steps"
        )
    is_supervised = _objective_class(trial) is slot("objective").get("vitlab:supervised")
    precise = device == "cpu" and train.precision in ("fp32", "tf32", "fp64") and is_supervised
    if precise and work.products is not None and work.products <= MAX_PRODUCTS:
        return EngineChoice(
            "batch_last", f"small trials, trained together: {size}, and a head has {work.products:,} products"
        )
    return EngineChoice("vmap", f"small trials, trained together: {size}")


def is_one_at_a_time_engine(engine: str) -> bool:
    """Return whether an engine trains one trial at a time."""
    if engine in ("loop", "compiled", "vmap", "batch_last", "compiled_vmap"):  # known without importing torch
        return engine in ("loop", "compiled")
    component: Any = slot("engine").get(engine)
    return bool(component.one_at_a_time)


def is_stackable(trial: Trial) -> bool:
    """Return True if a trial's spec allows it to be trained together with others."""
    single = trial.needs or trial.spec.distill or trial.spec.train.ema or trial.spec.train.precision == "fp16"
    return not single and _objective_class(trial).vmap_safe


def _objective_class(trial: Trial) -> Any:
    """Return the class of a trial's objective."""
    return slot("objective").get(trial.spec.train.objective.type)


def speed_digest(trial: Trial) -> str:
    """Return a digest of the parts of a spec that decide training speed.

    These are all but seeds, lengths, rates and augmentations.  Whether images are crops of files, which are then
    decoded for every batch, is part of the digest.
    """
    beside = (*FREE, *LENGTHS, "evaluations")
    spec = _spec_without_train_keys(trial.spec, beside)
    if any(
        Choice.parse(change).options.get("of") == "picture" for change in trial.spec.data.options.get("augment", ())
    ):
        spec["data"]["of"] = "picture"
    return hash_of(spec)[:32]


def unbenchmarked_trials_by_shape(
    trials: Iterable[Planned], probes: Mapping[str, EngineBenchmark]
) -> dict[str, list[Planned]]:
    """Return the stackable trials whose shape has no benchmark, by shape."""
    by_shape: dict[str, list[Planned]] = {}
    for planned in trials:
        if is_stackable(planned.trial) and (trial_shape := speed_digest(planned.trial)) not in probes:
            by_shape.setdefault(trial_shape, []).append(planned)
    return by_shape


def joint_training_key(trial: Trial) -> str:
    """Return a key that is equal for trials that can be trained together.

    Such trials differ in seeds and in :data:`FREE` and :data:`AUGMENT` alone.  They share their validation and test
    images, because they are evaluated together.
    """
    spec = _spec_without_train_keys(trial.spec, FREE)
    return json.dumps([spec, trial.seeds["split"], trial.data, trial.code], sort_keys=True)


def group_trials(
    todo: Sequence[Planned],
    places: int,
    requested: str,
    works: Works,
    probes: Mapping[str, EngineBenchmark] = {},
    device: str = "cpu",
) -> list[Group]:
    """Group trials that are trained together; return each group with its engine, ordered by its first trial.

    Args:
        todo: trials to train.
        places: number of groups that can run at a time; groups are split as far as that ends the last one earlier.
        requested: ``run.engine``.
        works: see :data:`Works`.
        probes: benchmarks by shape, see :func:`choose_engine`.
        device: type of the device, ``cpu`` or ``cuda``.
    """
    by_key: dict[object, Group] = {}
    for planned in todo:
        engine = choose_engine(planned.trial, requested, works, probes, device).engine
        key = id(planned) if is_one_at_a_time_engine(engine) else joint_training_key(planned.trial)
        by_key.setdefault(key, (engine, []))[1].append(planned)
    groups = by_key.values()
    few = _split_evenly(groups, 1)
    rest = len(few) % places  # batches of the last round; each is split to fill its share of the places
    whole, last = few[: len(few) - rest], few[len(few) - rest :]
    mixed = whole + _split_evenly(last, -(-places // max(1, rest)))
    return min(
        (few, mixed, _split_evenly(groups, places)),
        key=lambda groups: _estimate_makespan([len(group) for _, group in groups], places),
    )


def _estimate_makespan(sizes: Iterable[int], places: int) -> int:
    """Return how long batches take that start in order, each where a place is free, in the time of a further trial."""
    free_at = [0] * places
    for size in sizes:
        heapq.heapreplace(free_at, free_at[0] + BATCH_COST + size)
    return max(free_at)


def _spec_without_train_keys(spec: TrialSpec, keys: Sequence[str]) -> NewTree:
    """Return a spec in plain values without these keys of ``train``, and those of :data:`AUGMENT`."""
    tree = spec.plain()
    for part, names in (("train", keys), ("data", AUGMENT)):
        tree[part] = {name: value for name, value in tree[part].items() if name not in names}
    return tree


def _split_evenly(groups: Iterable[Group], least: int) -> list[Group]:
    """Split each group into ``least`` nearly equal parts, or more, of at most :data:`MAX_TOGETHER` trials.

    There are fewer if a part would else have less than two trials.
    """
    parts = []
    for engine, group in groups:
        count = min(max(least, -(-len(group) // MAX_TOGETHER)), -(-len(group) // 2))
        cuts = [index * len(group) // count for index in range(count + 1)]
        parts += [(engine, group[begin:end]) for begin, end in pairwise(cuts)]
    return parts
