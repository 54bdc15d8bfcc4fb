"""Guests: the installed distributions that offer components, known without importing any of them.

What they offer stands in their entry points, group ``vitlab.<slot>``; what they need in their metadata.  The variable
``VITLAB_DISABLE_PLUGINS`` keeps them out: ``1`` all of them, ``acme-vit,other-vit`` those.  ``--no-plugin`` adds to it,
so that worker processes keep out the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import Distribution, EntryPoint, PackageNotFoundError, distribution, entry_points

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from vitlab.errors import UserError, nearest

VARIABLE = "VITLAB_DISABLE_PLUGINS"
ALL = frozenset({"1", "true", "yes", "on", "all"})
NONE = frozenset({"", "0", "false", "no", "off"})

HOST = "vitlab"
UNKNOWN = "unknown"


def points(slot: str) -> tuple[EntryPoint, ...]:
    """What distributions offer for a slot, without those that are kept out."""
    return tuple(point for point in offered(slot) if not is_disabled(source(point)))


def offered(slot: str) -> tuple[EntryPoint, ...]:
    """What distributions offer for a slot, those that are kept out included."""
    return _installed().get(f"{HOST}.{slot}", ())


def source(point: EntryPoint) -> str:
    """The name of the distribution that an entry point is of."""
    return _said(point, "Name")


def version(point: EntryPoint) -> str:
    """The version of the distribution that an entry point is of."""
    return _said(point, "Version")


def _said(point: EntryPoint, key: str) -> str:
    return _metadata(point.dist, key) if point.dist else UNKNOWN


@cache
def _metadata(found: Distribution, key: str) -> str:
    try:
        return found.metadata[key] or UNKNOWN
    except Exception:  # metadata that is not there or cannot be read, as half an installation leaves it behind
        return UNKNOWN


def names() -> list[str]:
    """The distributions that offer anything at all, those that are kept out included."""
    return sorted(_known())


def packages() -> frozenset[str]:
    """Return the top-level packages in which the components of installed distributions stand."""
    return frozenset(point.module.partition(".")[0] for found in _installed().values() for point in found)


def disabled() -> str:
    """What is kept out at present, as :data:`VARIABLE` says it."""
    return os.environ.get(VARIABLE, "")


def is_disabled(name: str) -> bool:
    """Whether a distribution is kept out; never true of vitlab itself, or of a file."""
    text = disabled().strip().lower()
    if text in NONE or name not in _known():
        return False
    return text in ALL or canonicalize_name(name) in {canonicalize_name(part.strip()) for part in text.split(",")}


def disable(wanted: Iterable[str]) -> None:
    """Keep these distributions out, in this process and in those it starts.

    Raises:
        UserError: for one that is not installed, or offers nothing.
    """
    known = {canonicalize_name(name): name for name in names()}
    for name in wanted:
        if canonicalize_name(name) not in known:
            there = ", ".join(known.values()) or "none"
            raise UserError(f"no plugin called '{name}'.{nearest(name, known.values())} Installed: {there}.")
        text = disabled().strip().lower()
        if text not in ALL:
            os.environ[VARIABLE] = name if text in NONE else f"{text},{name}"


def refusal(point: EntryPoint) -> str | None:
    """Why a distribution cannot be used with this vitlab, in one sentence; None if it can."""
    return _refusal(point.dist) if point.dist else None


def unmet(text: str) -> str | None:
    """What is missing here of a requirement such as ``acme-vit>=0.3,<1``, in one sentence; None if nothing is."""
    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        requirement = None
    if requirement is None or requirement.url or requirement.extras or requirement.marker:
        return f"'{text}' is no requirement: write a name, or a name and its versions, such as acme-vit>=0.3,<1"
    shown = f"'{text}'" if requirement.specifier else text
    try:
        found = distribution(requirement.name)
    except PackageNotFoundError:
        return f"this study needs {text}: pip install {shown}"
    if is_disabled(found.name):
        return f"this study needs {text}, which is kept out by --no-plugin or {VARIABLE}"
    if not requirement.specifier.contains(found.version, prereleases=True):
        return f"this study needs {text}, and {found.version} is installed: pip install {shown}"
    return _refusal(found)


def _refusal(found: Distribution) -> str | None:
    from vitlab._version import __version__

    for text in found.requires or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue  # not ours to judge
        ours = canonicalize_name(requirement.name) == HOST
        if not ours or (requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})):
            continue
        if not requirement.specifier.contains(__version__, prereleases=True):
            needed = text.partition(";")[0].strip()
            return f"{found.name} {found.version} needs {needed}, and this is {__version__}: upgrade one of the two"
    return None


@cache
def _installed() -> dict[str, tuple[EntryPoint, ...]]:
    """Entry points by group, read from disk once, without those of this distribution."""
    return {group: tuple(found) for group, found in _groups()}


@cache
def _known() -> frozenset[str]:
    return frozenset(source(point) for found in _installed().values() for point in found)


def _groups() -> Iterator[tuple[str, list[EntryPoint]]]:
    every = entry_points()
    for group in every.groups:
        if group.startswith(f"{HOST}."):
            yield group, [point for point in every.select(group=group) if source(point) != HOST]
