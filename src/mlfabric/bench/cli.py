"""`mlfabric bench ...`: one command per benchmark, each in a module of its own."""

from __future__ import annotations

import typer

from mlfabric.bench.capture import bench_capture

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Measure this machine: us and our peers.",
)
app.command("capture")(bench_capture)


@app.callback()
def _root() -> None:
    """Keeps `bench` a group while it has one command."""
