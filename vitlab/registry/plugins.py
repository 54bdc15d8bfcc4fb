"""Plugins: installed distributions that offer components, and single files of components that this process has run.

Distributions are read from their metadata, without importing them; one is imported when a study names a component of
it.  Their components are entry points in the groups ``vitlab.<slot>``; their requirements are those of their metadata.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, EntryPoint, PackageNotFoundError, distribution, entry_points
from pathlib import Path

from packaging.utils import canonicalize_name

from vitlab.registry.slot_modules import Origin

HOST = "vitlab"
UNKNOWN = "unknown"


@dataclass(frozen=True)
class PluginFile:
    """A file of components as it was when it was run."""

    path: Path
    origin: Origin
    text: bytes


files: dict[str, PluginFile] = {}
"""Module to file, of all files that this process has run, earlier versions of edited files included."""


def module_of(origin: Origin) -> str:
    """Return the module name under which a file of components is run."""
    return f"vitlab_file_{Path(origin.source).stem}_{origin.version}"


def points(slot: str) -> tuple[EntryPoint, ...]:
    """Return the entry points of a slot."""
    return _installed().get(f"{HOST}.{slot}", ())


def source(point: EntryPoint) -> str:
    """Return the name of the distribution of an entry point."""
    return _field(point, "Name")


def version(point: EntryPoint) -> str:
    """Return the version of the distribution of an entry point."""
    return _field(point, "Version")


def _field(point: EntryPoint, key: str) -> str:
    return _metadata(point.dist, key) if point.dist else UNKNOWN


@cache
def _metadata(dist: Distribution, key: str) -> str:
    try:
        return dist.metadata[key] or UNKNOWN
    except Exception:  # an interrupted installation leaves missing or unreadable metadata
        return UNKNOWN


def packages() -> frozenset[str]:
    """Return the top-level packages of the components of installed distributions."""
    return frozenset(point.module.partition(".")[0] for points in _installed().values() for point in points)


def refusal(point: EntryPoint) -> str | None:
    """Return why a distribution cannot be used with this vitlab, or None if it can."""
    return _refusal(point.dist) if point.dist else None


def unmet(text: str) -> str | None:
    """Return why a requirement such as ``acme-vit>=0.3,<1`` is not met here, or None if it is."""
    from packaging.requirements import InvalidRequirement, Requirement  # slow to import, and rarely needed

    try:
        requirement = Requirement(text)
    except InvalidRequirement:
        requirement = None
    if requirement is None or requirement.url or requirement.extras or requirement.marker:
        return f"'{text}' is not a requirement: write a name, or a name and its versions, such as acme-vit>=0.3,<1"
    quoted = f"'{text}'" if requirement.specifier else text
    try:
        dist = distribution(requirement.name)
    except PackageNotFoundError:
        own = "pip install -e FOLDER if it is your own"
        return f"this study needs {text}, which is not installed: pip install {quoted}, or {own}"
    if not requirement.specifier.contains(dist.version, prereleases=True):
        return f"this study needs {text}, and {dist.version} is installed: pip install {quoted}"
    return _refusal(dist)


def _refusal(dist: Distribution) -> str | None:
    from packaging.requirements import InvalidRequirement, Requirement

    from vitlab._version import __version__

    for text in dist.requires or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:
            continue  # a malformed requirement is the package manager's concern
        # pip checks requirements when it installs; vitlab may have been upgraded since.
        is_ours = canonicalize_name(requirement.name) == HOST
        is_ours &= requirement.marker is None or requirement.marker.evaluate({"extra": ""})  # not of an extra
        if is_ours and not requirement.specifier.contains(__version__, prereleases=True):
            need = text.partition(";")[0].strip()
            return f"{dist.name} {dist.version} needs {need}, and this is {__version__}: upgrade one of the two"
    return None


@cache
def _installed() -> dict[str, tuple[EntryPoint, ...]]:
    """Return entry points by group, read from disk once, without vitlab's own."""
    every = entry_points()  # reads the metadata of every distribution of the environment
    return {
        group: tuple(point for point in every.select(group=group) if source(point) != HOST)
        for group in every.groups
        if group.startswith(f"{HOST}.")
    }
