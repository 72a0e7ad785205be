"""Replaces ``<!-- generate: NAME -->`` in a page by Markdown that is made from the code."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import tomllib
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[2]
_MARK = re.compile(r"^<!-- generate: ([a-z-]+) -->$", re.MULTILINE)


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", _replace)
    return {"parallel_read_safe": True}


def _replace(app: Sphinx, docname: str, source: list[str]) -> None:
    source[0] = _MARK.sub(lambda mark: MAKERS[mark[1]](), source[0])


@cache
def commands() -> str:
    """The help of every command, as Markdown."""
    import click
    import typer

    from commlayer.cli import build

    lines: list[str] = []

    def add(command: Any, path: str, context: Any) -> None:
        lines.append(f"## {path}")
        lines.extend(("", inspect.cleandoc(command.help or ""), ""))
        lines.extend(("```text", *_usage(command, context), "```", ""))
        lines.extend(_parameters(command))

    app = typer.main.get_command(build())
    top = click.Context(app, info_name="commlayer")
    for name in app.list_commands(top):  # type: ignore[attr-defined]
        command = app.get_command(top, name)  # type: ignore[attr-defined]
        context = click.Context(command, info_name=name, parent=top)
        add(command, f"commlayer {name}", context)
        for inner in command.list_commands(context) if hasattr(command, "commands") else ():
            each = command.get_command(context, inner)
            path = f"commlayer {name} {inner}"
            add(each, path, click.Context(each, info_name=inner, parent=context))
    return "\n".join(lines)


def _usage(command: Any, context: Any) -> Iterator[str]:
    pieces = " ".join(command.collect_usage_pieces(context))
    yield f"{context.command_path} {pieces}".rstrip()


def _parameters(command: Any) -> Iterator[str]:
    shown = [p for p in command.params if p.name != "help" and not getattr(p, "hidden", False)]
    if not shown:
        return
    yield "| argument or option | default | meaning |"
    yield "|---|---|---|"
    for parameter in shown:
        names = [*parameter.opts, *parameter.secondary_opts]
        if parameter.param_type_name == "argument":
            names = [parameter.metavar or parameter.name.upper()]
        told = "required" if parameter.required else _default(parameter.default)
        text = " ".join((getattr(parameter, "help", None) or "").split()).replace("|", "\\|")
        shown_as = ", ".join(f"`{name}`" for name in names).replace("|", "\\|")
        yield f"| {shown_as} | {told} | {text} |"
    yield ""


def _default(value: Any) -> str:
    if isinstance(value, Enum):
        value = value.value
    plain = isinstance(value, (int, float, str)) and not isinstance(value, bool)
    return f"`{value}`" if plain and value != "" else ""


def semantics() -> str:
    """Every fact with its values, weakest first, and what the backends declare."""
    from commlayer.registry import default_registry
    from commlayer.semantics import OperationSemantics, Semantics, meaning

    loaded = {
        name: default_registry().load(name).backend.semantics for name in default_registry().names()
    }
    import torch

    lines = [
        f"Some facts depend on the build of torch; declared is with torch {torch.__version__}.",
        "",
    ]
    for title, struct, prefix in (
        ("Of one kind of operation (`p2p`, `collective`)", OperationSemantics, "p2p."),
        ("Of the transport", Semantics, ""),
    ):
        lines += [f"## {title}", ""]
        hints = typing.get_type_hints(struct)
        for name in struct.__struct_fields__:
            if name in ("p2p", "collective"):
                continue
            kind, default = hints[name], getattr(struct(), name)
            lines += [f"### {name}", ""]
            lines += [meaning(struct, name).replace("``", "`"), ""]
            if _is_enum(kind):
                for member in kind.__members__:
                    weakest = " (weakest, default)" if kind[member] is default else ""
                    said = kind[member].description.replace("``", "`")
                    lines.append(f"- `{member}`{weakest}: {said}")
            else:
                lines.append(f"Default: `{default!r}`.")
            declared = ", ".join(
                f"{backend} `{_short(getattr(facts.p2p if prefix else facts, name))}`"
                for backend, facts in loaded.items()
            )
            where = " for `p2p`" if prefix else ""
            lines += ["", f"Declared{where} by: {declared}.", ""]
    return "\n".join(lines)


def _is_enum(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Enum)


def _short(value: Any) -> str:
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, tuple) and len(value) > 4:
        return f"{len(value)} names"
    return repr(value)


def hooks() -> str:
    """Every hook with its signature and contract."""
    from commlayer.hooks import Hooks

    lines = []
    for hook, function in vars(Hooks).items():
        if not hook.startswith("commlayer_"):
            continue
        options = getattr(function, "commlayer_spec", {}) or {}
        signature = inspect.signature(function)
        parameters = ", ".join(
            f"{name}: {parameter.annotation}"
            for name, parameter in signature.parameters.items()
            if name != "self"
        )
        calls = (
            "The first result that is not `None` wins."
            if options.get("firstresult")
            else "Every implementation is called."
        )
        lines += [
            f"## {hook}", "", "```text", f"{hook}({parameters}) -> {signature.return_annotation}",
            "```", "", str(inspect.getdoc(function)).replace("``", "`"), "", calls, "",
        ]  # fmt: skip
    return "\n".join(lines)


@cache
def contracts() -> str:
    """What the tool that checks the direction of imports says of this tree."""
    plugins = (ROOT / "plugins").iterdir()
    code = "from importlinter.cli import lint_imports_command as run; run()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--no-cache"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [ROOT, *plugins]))},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if "Contracts:" not in done.stdout:
        raise RuntimeError(f"import-linter failed: {done.stdout}{done.stderr}")
    lines = done.stdout.splitlines()
    told = next(number for number, line in enumerate(lines) if line.startswith("Analyzed"))
    return "\n".join(["```text", *(line for line in lines[told:] if line.strip()), "```"])


@cache
def layers() -> str:
    """The layers of the import contract, with how many imports go from each to those below."""
    import grimp

    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    order = [
        [f"commlayer.{name.strip()}" for name in layer.split(":")]
        for layer in contract["contracts"][0]["layers"]
    ]
    graph = grimp.build_graph("commlayer", exclude_type_checking_imports=False, cache_dir=None)
    level = {name: number for number, layer in enumerate(order) for name in layer}

    def owner(module: str) -> str | None:
        while module and module not in level:
            module = module.rpartition(".")[0]
        return module or None

    edges: dict[tuple[str, str], int] = {}
    for importer in graph.modules:
        source = owner(importer)
        for imported in graph.find_modules_directly_imported_by(importer):
            target = owner(imported)
            if source and target and source != target:
                edges[source, target] = edges.get((source, target), 0) + 1
    lines = ["```{layers}", ":caption: Layers of the contract; a number counts imports."]
    for layer in order:
        told = []
        for name in layer:
            used = sorted(
                (level[t], t.removeprefix("commlayer."), n)
                for (s, t), n in edges.items()
                if s == name
            )
            told.append(
                f"{name.removeprefix('commlayer.')} -> "
                + ", ".join(f"{target} {count}" for _, target, count in used)
            )
        lines.append(" | ".join(told))
    return "\n".join([*lines, "```"])


def changelog() -> str:
    """The changelog without its title."""
    return (ROOT / "CHANGELOG.md").read_text().partition("\n")[2]


MAKERS: dict[str, Callable[[], str]] = {
    "changelog": changelog,
    "commands": commands,
    "contracts": contracts,
    "hooks": hooks,
    "layers": layers,
    "semantics": semantics,
}
