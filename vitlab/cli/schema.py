"""``vitlab schema``: the JSON Schema of study files, for editors."""

from __future__ import annotations

import json

import click


@click.command()
def command() -> None:
    """Print the JSON Schema of study files, with the options of every installed component, plugins included."""
    from vitlab.registry.json_schema import study_schema

    click.echo(json.dumps(study_schema(), indent=1))
