"""The command ``commlayer``.

One module per command.  A module of this package whose name has no leading
underscore and that defines ``register(app: typer.Typer)`` adds its command;
there is no list to keep.  Commands import what is slow inside their function,
so that ``commlayer --help`` stays quick.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer


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
    """The application with the commands of all modules of this package."""
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

    for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
        if not module.name.startswith("_"):
            register = getattr(
                importlib.import_module(f"{__name__}.{module.name}"), "register", None
            )
            if register is not None:
                register(app)
    return app


def _version(asked: bool) -> None:
    if not asked:
        return
    import importlib.metadata

    import typer

    from commlayer.backend import PLUGIN_API

    try:
        version = importlib.metadata.version("commlayer")
    except importlib.metadata.PackageNotFoundError:
        version = "(not installed)"
    typer.echo(f"commlayer {version}, plugin API {PLUGIN_API}")
    raise typer.Exit
