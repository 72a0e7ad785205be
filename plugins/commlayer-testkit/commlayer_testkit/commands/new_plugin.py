"""``commlayer new-plugin NAME``: the repository of a new backend."""

from __future__ import annotations

from pathlib import Path

import typer


def register(app: typer.Typer) -> None:
    app.command()(new_plugin)


def new_plugin(
    name: str = typer.Argument(help="Name of the backend, such as my_fabric."),
    into: Path = typer.Option(Path(), help="Folder in which the repository is made."),
) -> None:
    """Write the repository of a new backend plugin.

    Package, facts, tests, CI and README, over a toy transport that passes the
    conformance kit as it is: replace the transport, then the facts.
    """
    from commlayer_testkit.scaffold import render

    folder = render(name, into)
    typer.echo(f"{folder}")
    typer.echo(f"Next: cd {folder}; pip install -e '.[test]'; pytest")
