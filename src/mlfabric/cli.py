"""The command `mlfabric`: parses words, calls the library, prints. No logic of its own.

Each command is a module of its own and is imported only when called. Every error a user can cause ends as one
sentence on standard error and exit code 2.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import typer

from mlfabric.cli_plain import PlainGroup
from mlfabric.errors import FabricError

# Where each command or group of commands lives: module and the name of its typer application.
COMMANDS: dict[str, tuple[str, str]] = {
    "bench": ("mlfabric.bench.cli", "app"),
    "certs": ("mlfabric.commands.certs", "app"),
    "demo": ("mlfabric.commands.demo", "app"),
    "doctor": ("mlfabric.commands.operate", "doctor_app"),
    "drain": ("mlfabric.commands.operate", "drain_app"),
    "lab": ("mlfabric.lab.cli", "app"),
    "node": ("mlfabric.commands.members", "node_app"),
    "plan": ("mlfabric.commands.plan", "app"),
    "scheduler": ("mlfabric.commands.members", "scheduler_app"),
    "sim": ("mlfabric.commands.sim", "app"),
    "status": ("mlfabric.commands.operate", "status_app"),
    "story": ("mlfabric.commands.story", "app"),
    "traffic": ("mlfabric.traffic.cli", "app"),
}


class _LazyGroup(PlainGroup):
    """A command group that imports its commands only when one of them is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module, name = COMMANDS[cmd_name]
        command = typer.main.get_command(getattr(importlib.import_module(module), name))
        command.name = cmd_name
        return command


app = typer.Typer(
    cls=_LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Order, aggregate, replicate and pace every transfer of a training job, and see its traffic.",
)


@app.callback()
def _root() -> None:
    pass


def main() -> None:
    """The entry point: runs the command line and turns errors into one sentence and an exit code."""
    try:
        app()
    except FabricError as error:
        sys.stderr.write(f"mlfabric: {error}\n")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.stderr.write("mlfabric: stopped\n")
        sys.exit(130)
    except BrokenPipeError:
        # The reader of our output went away (`| head`); nothing is wrong.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
