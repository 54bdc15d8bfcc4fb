"""``vitlab plugins``: list installed plugins, their origin, and whether their components load."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import Distribution, EntryPoint

import click

from vitlab import registry
from vitlab.cli import print_json, say, wants_json
from vitlab.errors import BrokenComponent, ClashError
from vitlab.registry import plugins


@dataclass(frozen=True)
class Offer:
    """A component offered by a distribution."""

    slot: str
    name: str
    plugin: str
    version: str
    origin: str  #: where the distribution was installed from, or into
    health: str  #: works, refused (it needs another vitlab), broken
    reason: str  #: one sentence, where it does not work
    detail: str  #: the lines below the sentence: the frames of the plugin


@click.command()
@click.option(
    "--strict", is_flag=True, help="Exit with 3 if a plugin does not load; stderr shows its lines that failed."
)
def plugins_command(strict: bool) -> None:
    """List what installed plugins offer, loading each to see whether it works."""
    offered = list(offers())
    failing = [offer for offer in offered if offer.health != "works"]
    rows = [asdict(offer) for offer in offered]
    if not wants_json():
        _print(offered)
    elif not (failing and strict):
        print_json(rows)
    if failing and strict:
        for offer in failing:
            say(f"\n{offer.reason}\n{offer.detail}".rstrip())
        count = len({offer.plugin for offer in failing})
        error = BrokenComponent(f"{count} plugin{'s do' if count > 1 else ' does'} not load")
        error.result = rows
        raise error


def offers() -> Iterator[Offer]:
    """Yield the components of every installed distribution, slot by slot, importing them."""
    for slot in registry.SLOT_MODULES:
        for point in sorted(plugins.points(slot), key=lambda point: (plugins.source(point), point.name)):
            health, text = _health(slot, point)
            reason, _, detail = text.partition("\n")
            who, version = plugins.source(point), plugins.version(point)
            yield Offer(slot, point.name, who, version, _origin(point.dist), health, reason, detail)


def _health(slot: str, point: EntryPoint) -> tuple[str, str]:
    name = plugins.source(point)
    if reason := plugins.refusal(point.dist):
        return "refused", reason
    others = {entry.origin.source for entry in registry.listing(slot) if entry.name == point.name} - {name}
    try:
        # Output of a plugin while it is imported must not mix with the list.
        with contextlib.redirect_stdout(sys.stderr):
            component_slot = registry.slot(slot)
            component_slot.options(component_slot.find(f"{name}:{point.name}")[0])
    except (BrokenComponent, ClashError) as error:
        return "broken", str(error)
    if others:
        return "works", f"{' and '.join(sorted(others))} has one of that name: write {name}:{point.name}"
    return "works", ""


def _print(offered: list[Offer]) -> None:
    if not offered:
        click.echo("no plugins are installed")
    for plugin in sorted({offer.plugin for offer in offered}):
        own = [offer for offer in offered if offer.plugin == plugin]
        click.echo(f"{plugin} {own[0].version}   {own[0].origin}")
        for offer in own:
            detail = f"{offer.health}: {offer.reason}" if offer.reason else offer.health
            click.echo(f"  {offer.slot:12} {offer.name:20} {detail}")


def _origin(dist: Distribution | None) -> str:
    """Return the recorded folder or address a distribution was installed from, or else its location."""
    if dist is None:
        return "unknown"
    try:
        return str(json.loads(dist.read_text("direct_url.json") or "")["url"])
    except (ValueError, KeyError, TypeError):
        return str(dist.locate_file(""))
