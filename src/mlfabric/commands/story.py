"""`mlfabric story`: one update's life in order, each decision with its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from mlfabric.commands.output import console, print_json
from mlfabric.errors import FabricError
from mlfabric.eventlog import read_log
from mlfabric.story import tell_story, updates_in

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def story(
    update: Annotated[str, typer.Argument(help="the update's id, for example w0#12")] = "",
    log: Annotated[Path, typer.Option("--log", help="the event log of a run")] = Path("run.jsonl"),
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Tell one update's life from an event log, in order, each decision with its reason."""
    records = read_log(log)
    if not update:
        known = list(updates_in(records))
        some = ", ".join(known[:8]) + (f" and {len(known) - 8} more" if len(known) > 8 else "")
        raise FabricError(f"which update? {log} tells of {some or 'none'}")
    chapters = tell_story(records, update)
    if as_json:
        print_json(chapters)
        return
    table = Table(title=f"The story of {update}", title_justify="left", box=None, pad_edge=False)
    table.add_column("after", justify="right")
    table.add_column("where")
    table.add_column("what")
    for chapter in chapters:
        place = f"{chapter.node} {chapter.role}" if chapter.role != chapter.node else chapter.node
        table.add_row(f"{chapter.since_s * 1000:.1f} ms", place, chapter.text)
    console().print(table)
