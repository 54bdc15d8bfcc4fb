"""``vitlab plugins``: who is a guest here, where from, and whether what they offer works."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import Distribution, EntryPoint

import click

from vitlab import registry
from vitlab.cli.options import json_option
from vitlab.errors import BrokenComponent, ClashError, VitlabError
from vitlab.registry import plugins


@dataclass(frozen=True)
class Offer:
    """A component that a distribution offers."""

    slot: str
    name: str
    plugin: str
    version: str
    origin: str  #: where the distribution was installed from, or into
    health: str  #: works, kept out (by the user), refused (it needs another vitlab), broken
    reason: str  #: one sentence, where it does not work
    detail: str  #: the lines below the sentence: the frames of the plugin

    @property
    def broken(self) -> bool:
        return self.health in ("broken", "refused")


@click.command()
@click.option(
    "--strict", is_flag=True, help="Exit with 3 if a plugin does not load; stderr shows its lines that failed."
)
@json_option
def command(strict: bool, as_json: bool) -> None:
    """List what installed plugins offer, loading each to see whether it works."""
    found = list(offers())
    if as_json:
        click.echo(json.dumps([asdict(offer) for offer in found], indent=1))
    else:
        _tell(found)
    broken = [offer for offer in found if offer.broken]
    if broken and strict:
        for offer in broken:
            click.echo(f"\n{offer.reason}\n{offer.detail}".rstrip(), err=True)
        count = len({offer.plugin for offer in broken})
        raise VitlabError(f"{count} plugin{'s do' if count > 1 else ' does'} not load")


def offers() -> Iterator[Offer]:
    """What every installed distribution offers, slot by slot; imports those that are not kept out."""
    for slot in registry.SLOT_MODULES:
        for point in sorted(plugins.offered(slot), key=lambda point: (plugins.source(point), point.name)):
            health, text = _health(slot, point)
            reason, _, detail = text.partition("\n")
            who, version = plugins.source(point), plugins.version(point)
            yield Offer(slot, point.name, who, version, _origin(point.dist), health, reason, detail)


def _health(slot: str, point: EntryPoint) -> tuple[str, str]:
    name = plugins.source(point)
    if plugins.is_disabled(name):
        return "kept out", ""
    if reason := plugins.refusal(point):
        return "refused", reason
    others = {entry.origin.source for entry in registry.listing(slot) if entry.name == point.name} - {name}
    try:
        # What a guest prints while it is imported is no part of the list.
        with contextlib.redirect_stdout(sys.stderr):
            room = registry.slot(slot)
            room.options(room.find(f"{name}:{point.name}")[0])
    except (BrokenComponent, ClashError) as error:
        return "broken", str(error)
    if others:
        return "works", f"{' and '.join(sorted(others))} has one of that name: write {name}:{point.name}"
    return "works", ""


def _tell(found: list[Offer]) -> None:
    if not found:
        click.echo("no plugins are installed")
    for plugin in sorted({offer.plugin for offer in found}):
        mine = [offer for offer in found if offer.plugin == plugin]
        click.echo(f"{plugin} {mine[0].version}   {mine[0].origin}")
        for offer in mine:
            said = f"{offer.health}: {offer.reason}" if offer.reason else offer.health
            click.echo(f"  {offer.slot:12} {offer.name:20} {said}")


def _origin(found: Distribution | None) -> str:
    """The folder or address a distribution was installed from where that was recorded, else where it lies."""
    if found is None:
        return "unknown"
    recorded = found.read_text("direct_url.json")
    if recorded is None:
        return str(found.locate_file(""))
    try:
        return str(json.loads(recorded)["url"])
    except (ValueError, KeyError, TypeError):
        return str(found.locate_file(""))
