"""The command ``commlayer``, and ``python -m commlayer.cli``.

It has no command of its own.  A distribution names one in the entry-point group
``commlayer.commands``: a module with a function ``register(app: typer.Typer)`` that
adds it.  Commands import what is slow inside their function, so that
``commlayer --help`` stays quick.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

GROUP = "commlayer.commands"
"""Entry-point group of commands: command name to module."""

_AT = {
    "backends": "commlayer-tools",
    "bench": "commlayer-bench",
    "config": "commlayer-tools",
    "conformance": "commlayer-testkit",
    "demo": "commlayer-demo",
    "describe": "commlayer-tools",
    "doctor": "commlayer-tools",
    "new-plugin": "commlayer-testkit",
    "probe": "commlayer-testkit",
    "sim": "commlayer-testkit",
    "trace": "commlayer-tools",
}
"""The commands of this project, and the distributions that have them."""


def main() -> None:
    """Run the command line; ends by `SystemExit`.

    Exit codes: 0 done, 1 a `CommError` or a failed command, 2 wrong usage or a missing extra.
    """
    try:
        app = build()
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        print(
            f"commlayer: the command line needs {error.name}. "
            "Install it with: pip install 'commlayer[cli]'",
            file=sys.stderr,
        )
        raise SystemExit(2) from None

    from commlayer.errors import CommError

    try:
        app()
    except CommError as error:
        print(f"commlayer: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def build() -> typer.Typer:
    """The application with every command that is installed; others say what to install."""
    import typer

    app = typer.Typer(
        name="commlayer",
        help="Pipeline-parallel sends and token broadcasts that mean the same on every transport.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def _options(
        version: bool = typer.Option(
            False, "--version", help="Show the version and exit.", is_eager=True, callback=_version
        ),
    ) -> None:
        pass

    installed = set()
    for name, register in _installed():
        installed.add(name)
        register(app)
    for name in sorted(_AT.keys() - installed):
        _add_missing(app, name, _AT[name])
    app.registered_commands.sort(key=_name_of)
    return app


def _installed() -> Iterator[tuple[str, Callable[[typer.Typer], None]]]:
    """Every command and what adds it.  A broken one is told of and disturbs no other."""
    for point in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda p: p.name):
        try:
            yield point.name, point.load().register
        except Exception as error:
            origin = point.dist.name if point.dist is not None else point.value
            print(
                f"commlayer: command {point.name!r} of {origin} cannot be loaded: "
                f"{type(error).__name__}: {error}",
                file=sys.stderr,
            )


def _add_missing(app: typer.Typer, name: str, distribution: str) -> None:
    """A command that says what to install."""
    import typer

    @app.command(
        name,
        help=f"Not installed: pip install {distribution}",
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
        add_help_option=False,
    )
    def _missing() -> None:
        typer.echo(
            f"commlayer: {name!r} is not installed. Install it with: pip install {distribution}",
            err=True,
        )
        raise typer.Exit(2)


def _name_of(command: typer.models.CommandInfo) -> str:
    callback = command.callback
    return command.name or (callback.__name__ if callback is not None else "")


def _version(asked: bool) -> None:
    if not asked:
        return
    import typer

    from commlayer import __version__
    from commlayer.backend import PLUGIN_API

    typer.echo(f"commlayer {__version__}, plugin API {PLUGIN_API}")
    raise typer.Exit


if __name__ == "__main__":
    main()
