"""Engines, which compute the steps and evaluations of several trainings together, and the choice of one."""

from __future__ import annotations

from vitlab.engines.base import Engine, Loop
from vitlab.engines.batch_last import BatchLast
from vitlab.engines.compiled import Compiled
from vitlab.engines.vmap import Vmap
from vitlab.training.loop import Training

ENGINES: dict[str, type[Engine]] = {engine.name: engine for engine in (Loop, Compiled, Vmap, BatchLast)}


def supported_engine(name: str, training: Training) -> tuple[type[Engine], str]:
    """Return the named engine, or the first of its fallbacks that supports the training, and a note on the reasons."""
    engine, reasons = ENGINES[name], []
    while reason := engine.incompatibility(training):
        reasons.append(reason)
        engine = ENGINES[engine.fallback]
    return engine, f"trained by engine {engine.name}: {'; '.join(reasons)}" if reasons else ""
