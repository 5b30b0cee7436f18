"""The command `mlfabric`: parses words, calls the library, prints. No logic of its own.

Each command is a module of its own and is imported only when called. Every error a user can cause ends as one
sentence on standard error and exit code 2.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from mlfabric.errors import FabricError

# Where each command or group of commands lives: module and the name of its typer application
# or command group.
COMMANDS: dict[str, tuple[str, str]] = {
    "bench": ("mlfabric.bench.cli", "app"),
    "certs": ("mlfabric.commands.certs", "app"),
    "demo": ("mlfabric.commands.demo", "app"),
    "doctor": ("mlfabric.commands.operate", "doctor_app"),
    "drain": ("mlfabric.commands.operate", "drain_app"),
    "limit": ("mlfabric.commands.operate", "limit_app"),
    "lab": ("mlfabric.lab.cli", "app"),
    "node": ("mlfabric.commands.members", "node_app"),
    "plan": ("mlfabric.commands.plan", "app"),
    "scheduler": ("mlfabric.commands.members", "scheduler_app"),
    "sim": ("mlfabric.commands.sim", "app"),
    "status": ("mlfabric.commands.operate", "status_app"),
    "story": ("mlfabric.commands.story", "app"),
    "traffic": ("mlfabric.traffic.cli", "group"),
}


def main() -> None:
    """The entry point: runs the command line and turns errors into one sentence and an exit code."""
    try:
        _run(sys.argv[1:])
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


def _run(words: Sequence[str]) -> None:
    if words[:1] == ["traffic"]:
        # NumPy's algebra library starts a thread per core and lets them spin; nothing here would use them.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        from mlfabric.traffic.cli import group

        # Reading a capture takes less time than loading the library that the other commands need.
        group(words[1:])
        return
    from mlfabric.commands.root import app

    app()
