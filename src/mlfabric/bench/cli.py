"""`mlfabric bench`: one command per benchmark, each in its own module."""

from __future__ import annotations

import typer

from mlfabric.bench import plan

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Measure the library's own parts.")
app.command("plan")(plan.command)


@app.callback()
def _group() -> None:
    pass
