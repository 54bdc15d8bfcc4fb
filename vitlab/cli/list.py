"""``vitlab list [SLOT|studies|weights]``: list components without importing them, studies, or timm's weights."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click

from vitlab import registry
from vitlab.cli import print_json
from vitlab.cli.completion import STUDIES, complete_slot
from vitlab.cli.options import json_option, plugin_option
from vitlab.errors import UserError
from vitlab.plan import packaged


@click.command()
@click.argument("slot", metavar="[SLOT|studies|weights]", required=False, shell_complete=complete_slot)
@click.argument("pattern", required=False)
@plugin_option
@json_option
def command(slot: str | None, pattern: str | None, plugins: tuple[Path, ...], as_json: bool) -> None:
    """List the components of SLOT, or all slots with theirs, or the studies that come with vitlab.

    `vitlab list weights [PATTERN]` lists the weights that timm names and init_from takes as timm: NAME; PATTERN is a
    part of a name, in which * and ? stand for others.
    """
    if pattern is not None and slot != "weights":
        raise click.UsageError("PATTERN belongs to 'vitlab list weights' alone; remove it")
    for plugin in plugins:
        registry.load_file(plugin)
    if slot in STUDIES:
        show_studies(as_json)
        return
    if slot == "weights":
        show_weights(pattern or "", as_json)
        return
    if slot or as_json:
        show_components([slot] if slot else [*registry.SLOT_MODULES], as_json)
        return
    for name in registry.SLOT_MODULES:
        _print(f"{name:12} ", ", ".join(entry.name for entry in registry.listing(name)))
    _print(f"{STUDIES[0]:12} ", ", ".join(packaged.packaged_studies()))


def show_components(slots: Sequence[str], as_json: bool) -> None:
    """Print the components of slots, each with its origin and the first line of its documentation."""
    entries = [entry for slot in slots for entry in registry.listing(slot)]
    if as_json:
        print_json([{**vars(entry), "origin": str(entry.origin)} for entry in entries])
        return
    clashes = Counter(entry.name for entry in entries)
    for entry in entries:
        label = f"{entry.origin.source}:{entry.name}" if clashes[entry.name] > 1 else entry.name
        _print(f"{label:20} {entry.origin!s:20} ", entry.summary or entry.target)


def show_weights(pattern: str, as_json: bool) -> None:
    """Print timm's weights for Vision Transformers: name, pixels of an image, classes and licence."""
    from vitlab.weights import named_weights

    rows = named_weights(pattern)
    if as_json:
        print_json([row._asdict() for row in rows])
        return
    if not rows:
        raise UserError(f"timm has no weights of Vision Transformers called '{pattern}'; PATTERN is a part of a name")
    width = max(len(row.name) for row in rows)
    for row in rows:
        classes = f"{row.classes:,} classes" if row.classes else "no head"
        click.echo(f"{row.name:{width}}  {row.image} pixels  {classes:14}  {row.license or 'licence not stated'}")


def show_studies(as_json: bool) -> None:
    """Print the packaged studies: name, question, cost, and the data set, which may have to be given."""
    from vitlab.spec import read_document

    rows = []
    for name, file in packaged.packaged_studies().items():
        data = read_document(file).data
        choice = data["base"]["data"]
        rows.append(
            {
                "name": name,
                "question": data["question"],
                "cost": packaged.header(file).get("Cost", "").partition("  ")[0],
                "data": choice if isinstance(choice, str) else choice["type"],
                "file": str(file),
            }
        )
    if as_json:
        print_json(rows)
        return
    for row in rows:
        click.echo(f"{row['name']}  ({row['data']})")
        for line in (row["question"], row["cost"]):
            _print("    ", line)


def _print(head: str, text: str) -> None:
    """Print a text behind a head; on a terminal, break lines between words and indent them below the text."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    indent = " " * (len(head) if len(head) < width // 2 else 4)
    lines = textwrap.fill(
        text, width, initial_indent=head, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    click.echo(lines)
