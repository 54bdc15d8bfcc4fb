"""The parts of a trial that need labels, where its objective reads none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vitlab.errors import Path
from vitlab.spec.trial import TEST_SET_OPTIONS


def parts_with_labels(plain: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    """Yield the parts of a trial that need labels, which its objective does not read."""
    name = plain["train"]["objective"]["type"]
    if plain.get("distill"):
        yield ("distill",), f"objective '{name}' learns without labels and without a teacher; remove distill"
    if plain["train"].get("mix"):
        yield ("train", "mix"), f"objective '{name}' learns without labels, which train.mix mixes; remove it"
    for option in TEST_SET_OPTIONS:
        if plain["data"].get(option):
            yield ("data", option), f"objective '{name}' trains no predictions to test on further images; remove it"
    source = plain.get("init_from") or {}
    if source.get("head") == "fitted":
        message = f"objective '{name}' trains no head; fit it in a trial that starts from this one"
        yield ("init_from", "head"), message
    if source.get("freeze") == "body":
        yield ("init_from", "freeze"), f"objective '{name}' trains the body alone; remove freeze"
