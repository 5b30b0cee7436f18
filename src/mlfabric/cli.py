"""The command `mlfabric`: parses words, calls the library, prints. No logic of its own.

Each group of commands lives beside what it commands (`mlfabric.traffic.cli`, `mlfabric.lab.cli`, ...) and is
imported only when called, so that `mlfabric --help` stays quick. Every error a user can cause ends as one
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

# Where each group of commands lives and what `mlfabric --help` says of it.
GROUPS: dict[str, tuple[str, str]] = {
    "bench": ("mlfabric.bench.cli", "Measure this machine: us and our peers."),
    "traffic": ("mlfabric.traffic.cli", "Burstiness of captures, bursts, extrapolation to several jobs."),
}


class _LazyGroup(PlainGroup):
    """A command group that imports its sub-groups only when one of them is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *sorted(GROUPS)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in GROUPS:
            return super().get_command(ctx, cmd_name)
        module, _ = GROUPS[cmd_name]
        return typer.main.get_command(importlib.import_module(module).app)


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
