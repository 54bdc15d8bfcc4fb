"""Engines, which compute the steps and evaluations of several trainings together, and the choice of one."""

from __future__ import annotations

from vitlab.engines.base import Engine, engine
from vitlab.training.loop import Training

__all__ = ["Engine", "engine", "supported_engine"]


def supported_engine(name: str, training: Training) -> tuple[str, type[Engine], str]:
    """Return the named engine, or the first of its fallbacks that supports the training.

    Returns:
        The name, the class, and a note on the reasons for a fallback.
    """
    reasons = []
    while reason := engine.get(name).incompatibility(training):
        reasons.append(reason)
        name = engine.get(name).fallback
    return name, engine.get(name), f"trained by engine {name}: {'; '.join(reasons)}" if reasons else ""
