"""What is expected of a component, and when: a failure names the component, what it did, and what is expected."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vitlab.errors import VitlabError


def expect(holds: bool, sentence: str) -> None:
    """Raise AssertionError with the sentence, unless it holds."""
    if not holds:
        raise AssertionError(sentence)


@contextmanager
def during(what: str, *kinds: type[Exception]) -> Iterator[None]:
    """What the block raises becomes a failed expectation that says when it happened."""
    try:
        yield
    except AssertionError:
        raise
    except kinds as error:
        raise AssertionError(f"{what}: {error}" if isinstance(error, VitlabError) else f"{what}: {error!r}") from error
