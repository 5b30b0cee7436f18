"""The group of all commands: lists them, and imports one only when it is called."""

from __future__ import annotations

import importlib
from typing import Annotated, Any

import typer

from mlfabric import __version__
from mlfabric.cli import COMMANDS
from mlfabric.cli_plain import PlainGroup
from mlfabric.option_records import CommandGroup


class _LazyGroup(PlainGroup):
    """A command group that imports its commands only when one of them is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name]
        found = getattr(importlib.import_module(module), name)
        command = typer.main.get_command(_shell(found) if isinstance(found, CommandGroup) else found)
        command.name = cmd_name
        return command


def _shell(group: CommandGroup) -> typer.Typer:
    """A command that hands all its words to the group."""
    shell = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    anything = {"ignore_unknown_options": True, "allow_extra_args": True}

    @shell.command(help=group.words, context_settings=anything, add_help_option=False)
    def run(context: typer.Context) -> None:
        group(context.args)

    return shell


app = typer.Typer(
    cls=_LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Order, aggregate, replicate and pace every transfer of a training job, and see its traffic.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mlfabric {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass
