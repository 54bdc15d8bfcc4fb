"""Assertions of the contract tests; a failure names the component, its behaviour and the expected behaviour."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vitlab.errors import VitlabError


def expect(holds: bool, sentence: str) -> None:
    """Raise AssertionError with ``sentence`` unless ``holds``."""
    if not holds:
        raise AssertionError(sentence)


@contextmanager
def during(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """Re-raise exceptions of the block as AssertionErrors that start with ``what`` was being done."""
    try:
        yield
    except AssertionError:
        raise
    except kinds as error:
        raise AssertionError(f"{what}: {error}" if isinstance(error, VitlabError) else f"{what}: {error!r}") from error
