"""Engines, which compute the steps and evaluations of several trainings together, and the choice of one."""

from vitlab.engines.base import Engine, engine
from vitlab.training.loop import Training

__all__ = ["Engine", "engine", "engine_or_fallback"]


def engine_or_fallback(name: str, training: Training) -> tuple[str, type[Engine], str]:
    """Return the named engine, or the first of its fallbacks that supports the training.

    Returns:
        The name, the class, and a note on the reasons for a fallback.
    """
    reasons = []
    while reason := (engine_type := engine.get(name)).incompatibility(training):
        reasons.append(reason)
        name = engine_type.fallback
    return name, engine_type, f"trained by engine {name}: {'; '.join(reasons)}" if reasons else ""
