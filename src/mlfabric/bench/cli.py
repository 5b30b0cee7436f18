"""`mlfabric bench ...`: one command per benchmark, each in a module of its own."""

from __future__ import annotations

import typer

from mlfabric.bench import allreduce, kills, plan, transfer
from mlfabric.bench.capture import bench_capture
from mlfabric.bench.train.command import command as train

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Measure this package's parts, beside their peers where there are any.",
)
app.command("allreduce")(allreduce.command)
app.command("kills")(kills.command)
app.command("push")(transfer.push)
app.command("pull")(transfer.pull)
app.command("plan")(plan.command)
app.command("train")(train)
app.command("capture")(bench_capture)
