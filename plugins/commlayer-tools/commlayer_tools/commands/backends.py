"""``commlayer backends``: what is installed, what can run here, and why the rest cannot."""

from __future__ import annotations

import typer

from commlayer_tools.output import JSON, print_json, print_table


def register(app: typer.Typer) -> None:
    app.command()(backends)


def backends(json: bool = JSON) -> None:
    """List the installed backends and whether each can run here."""
    from commlayer.registry import default_registry

    entries = default_registry().survey()
    if json:
        print_json(
            [
                {
                    "name": entry.name,
                    "distribution": entry.distribution,
                    "version": entry.version,
                    "plugin_api": entry.plugin_api,
                    "priority": entry.priority,
                    "viable": entry.viable,
                    "reason": entry.reason,
                    "install": entry.install,
                }
                for entry in entries
            ]
        )
        return
    if not entries:
        typer.echo("No backend is installed. Install one: pip install commlayer-NAME")
        return
    print_table(
        ["name", "distribution", "viable", "priority", "reason, and what to do"],
        [
            (
                entry.name,
                f"{entry.distribution} {entry.version}".rstrip(),
                entry.viable,
                entry.priority,
                "\n".join(filter(None, [entry.reason, entry.install])),
            )
            for entry in entries
        ],
    )
