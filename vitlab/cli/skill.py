"""``vitlab skill``: instructions for agents, with the keys and components that are installed."""

from __future__ import annotations

from collections.abc import Collection

import click

from vitlab.cli.new import templates
from vitlab.cli.show import Schema, shown_default, shown_type


@click.command()
def command() -> list[str]:
    """Print a SKILL.md for agents: how to state a question, price it, run it and read its verdict.

    It lists every key of a study file and every installed component with its options.
    """
    from vitlab.cli.schema import study_schema
    from vitlab.comparison import MEANINGS
    from vitlab.plan.packaged import packaged_study

    parts = study_schema()["$defs"]
    slots = {
        name.removeprefix("slot."): [form for form in part["anyOf"] if form.get("type") == "object"]
        for name, part in parts.items()
        if name.startswith("slot.")
    }
    template = templates().get_template("skill.md.j2")
    return template.render(
        example=packaged_study("quickstart").read_text(encoding="utf-8").partition("\nstudy: ")[2],
        parts=parts,
        slots=slots,
        verdicts=MEANINGS,
        option=_option,
    ).splitlines()


def _option(name: str, field: Schema, required: Collection[str]) -> str:
    """Return ``name: type = default`` of an option."""
    kind, default = shown_type(field).replace("slot.", "component of "), field.get("default")
    value = "" if default in (None, "", [], {}) else f" = {shown_default(default)}"
    return f"{name}: {kind}{' (required)' if name in required else value}"
