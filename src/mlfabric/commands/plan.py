"""`mlfabric plan`: the plan for a written-down situation, as a table and a small chart in the terminal."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from mlfabric import scenario as scenarios
from mlfabric.commands.output import console, print_json
from mlfabric.errors import FabricError, ScenarioError
from mlfabric.plan.jobs import plan_jobs, take_turns
from mlfabric.plan.planner import plan_updates
from mlfabric.plan.values import JobState, Offer, Plan, Shard
from mlfabric.scenario import JobSpec, Scenario
from mlfabric.units import format_rate, format_size, format_time, goodput, parse_size, wire_rate

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
MOST_CHART_COLUMNS = 80


@app.command()
def plan(
    scenario: Annotated[str, typer.Argument(help="a scenario file (TOML), or the name of a shipped one")],
    explain: Annotated[bool, typer.Option("--explain", help="give each entry's reason and a chart")] = False,
    job: Annotated[str, typer.Option("--job", help="which job of the scenario")] = "",
    policy: Annotated[str, typer.Option("--policy", help="order by another policy")] = "",
    chunk: Annotated[str, typer.Option("--chunk", help="let sums pass on in chunks this large: 1MB")] = "",
    levels: Annotated[int, typer.Option("--levels", min=1, max=3, help="levels of sums in sums")] = 1,
    together: Annotated[
        str, typer.Option("--together", help="plan all jobs of the scenario: interleave, or weights")
    ] = "",
    advise: Annotated[bool, typer.Option("--advise", help="say which mode of training to use")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Show what the planner would do with the updates that wait in a scenario."""
    written = scenarios.load(scenarios.find(scenario))
    if advise:
        from mlfabric.sim.resizing import with_a_job

        written = with_a_job(written)
        _advise(written, written.job(job or None), as_json)
        return
    spec = written.job(job or None)
    network = written.planned_network()
    situations = []
    for each in written.jobs if together else [spec]:
        state, offers = situation(written, each, policy)
        state = replace(state, chunk_bytes=_parse_chunk(chunk), levels=levels)
        situations.append((state, offers))
    if together:
        plans = plan_jobs(network, (), situations, 0.0, together)
    else:
        plans = {state.name: plan_updates(network, (), state, offers, 0.0)}
    if as_json:
        print_json({name: asdict(plans[name]) for name in sorted(plans)} if together else plans[state.name])
        return
    if together == "interleave":
        for number, turn in enumerate(take_turns(network, situations, 0.0), start=1):
            console().print(f"Turn {number} on what they share: job {turn.job}, {turn.reason}.")
    for state, offers in situations:
        _print_plan(plans[state.name], state, offers, explain)


def _parse_chunk(chunk: str) -> int | None:
    if not chunk:
        return None
    try:
        size = parse_size(chunk)
    except ValueError as error:
        raise FabricError(f"--chunk: {error}") from None
    if size < 1:
        raise FabricError(f"--chunk: {chunk} has no bytes; write it like 1MB")
    return size


def situation(written: Scenario, spec: JobSpec, policy: str = "") -> tuple[JobState, list[Offer]]:
    """The planner's input that a scenario describes; without offers in it, every worker has one."""
    places = written.places(spec)
    size = written.size_bytes(spec)
    workers = len(places.workers)
    if not places.servers:
        raise ScenarioError(f"job {spec.name} has no server; give 'servers' at least one host")
    now = written.situation.version
    described = [o for o in written.offers if o.job is None or o.job == spec.name]
    offers = [
        Offer(f"{o.worker}#{i}", o.worker, o.worker, int(o.size or size), o.version, o.norm, i, job=spec.name)
        for i, o in enumerate(described)
    ] or [  # how far they would move the model nobody has said, so no replica has to wait for them
        Offer(f"{w}#0", w, w, size, now, 0.0, i, job=spec.name) for i, w in enumerate(places.workers)
    ]
    bound = spec.max_delay
    if bound == "auto":
        bound = 2 * workers * spec.in_flight
    replicas = places.replicas or (None,)
    shards = tuple(
        Shard(i, server, replicas[i % len(replicas)], 1 / len(places.servers), written.situation.pending_norm)
        for i, server in enumerate(places.servers)
    )
    state = JobState(
        name=spec.name,
        placed_version=now,
        max_delay=bound if isinstance(bound, int) else None,
        concurrency=max(workers * spec.in_flight, 1),
        shards=shards,
        aggregators=places.aggregators,
        policy=policy or spec.policy,
        weight=spec.weight,
        max_rate_bytes_per_s=None if spec.max_rate is None else goodput(float(spec.max_rate)),
        divergence=spec.divergence,
    )
    return state, offers


def _advise(written: Scenario, spec: JobSpec, as_json: bool) -> None:
    from mlfabric.sim.advice import advise

    advice = advise(written, spec)
    if as_json:
        print_json(advice)
        return
    out = console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    left = ("mode", "an update is", "how")
    for column in ("mode", "updates/s", "worth/s", "an update is", "delay", "p99", "sent each", "how"):
        table.add_column(column, justify="left" if column in left else "right")
    for each in advice.predictions:
        table.add_row(
            each.mode,
            f"{each.updates_per_s:.3g}",
            f"{each.worth_per_s:.3g}",
            "1 gradient" if each.local_steps == 1 else f"{each.local_steps} local steps",
            f"{each.delay_mean:.1f}",
            f"{each.delay_p99:.0f}",
            format_size(each.bytes_per_update),
            each.about,
            style="bold" if each.mode == advice.use else "",
        )
    out.print(table)
    out.print(f"Use {advice.use}: {advice.reason}.")


@dataclass(frozen=True, slots=True)
class _Bar:
    label: str
    start_s: float
    finish_s: float
    style: str


def _print_plan(planned: Plan, state: JobState, offers: list[Offer], explain: bool) -> None:
    out = console()
    bound = "no delay bound" if state.max_delay is None else f"delay bound {state.max_delay}"
    last = max((placed.finish_s for placed in planned.placed), default=0.0)
    out.print(
        f"Job {state.name}: {len(offers)} updates wait, version {state.placed_version}, {bound}, "
        f"policy {state.policy}. {len(planned.placed)} placed, {len(planned.drops)} dropped, "
        f"{len(planned.groups)} groups; all there in {format_time(last)}."
    )
    sizes = {offer.update: offer.size_bytes for offer in offers}
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("place", "update", "size", "way", "rate", "start", "there", "delay", "weight"):
        table.add_column(column, justify="left" if column in ("update", "way") else "right")
    for placed in planned.placed:
        first = min(placed.parts, key=lambda part: part.start_s)
        ways = ", ".join(
            f"via {part.target} to {state.shards[part.shard].server}" if part.group else f"to {part.target}"
            for part in placed.parts
        )
        row = [
            str(placed.position),
            placed.update,
            format_size(sizes[placed.update]),
            ways,
            "local" if first.rate_bytes_per_s > 1e11 else format_rate(wire_rate(first.rate_bytes_per_s)),
            format_time(first.start_s),
            format_time(placed.finish_s),
            str(placed.delay_updates),
            f"{placed.weight:.3g}",
        ]
        table.add_row(*row)
    for drop in planned.drops:
        row = ["-", drop.update, format_size(sizes[drop.update]), "dropped", "", "", "", "", ""]
        table.add_row(*row, style="red")
    out.print(table)
    if not explain:
        return
    reasons = Table(box=None, pad_edge=False, header_style="bold")
    reasons.add_column("what")
    reasons.add_column("why")
    for placed in planned.placed:
        reasons.add_row(placed.update, placed.reason)
    for drop in planned.drops:
        reasons.add_row(drop.update, f"dropped: {drop.reason}", style="red")
    for group in planned.groups:
        reasons.add_row(f"sum at {group.aggregator}", f"{', '.join(group.members)}: {group.reason}")
    for message in planned.replication:
        reasons.add_row(
            f"{message.server} to replica {message.replica}",
            f"at {format_time(message.start_s)}, {format_size(message.size_bytes)}: {message.reason}",
        )
    for held in planned.held:
        reasons.add_row(held.step, f"held until {format_time(held.until_s)}: {held.reason}", style="yellow")
    out.print()
    out.print(reasons)
    out.print()
    out.print(_chart(planned, state, last, out.width))


def _chart(planned: Plan, state: JobState, last_s: float, screen_columns: int) -> Text:
    """When each transfer runs: direct ones and members of groups, then the sums."""
    bars = [
        _Bar(
            f"{placed.update} -> {part.target}",
            part.start_s,
            part.finish_s,
            "cyan" if part.group else "green",
        )
        for placed in planned.placed
        for part in placed.parts
    ]
    bars += [
        _Bar(f"sum at {g.aggregator} -> {state.shards[g.shard].server}", g.start_s, g.finish_s, "yellow")
        for g in planned.groups
    ]
    width = max((len(bar.label) for bar in bars), default=0)
    columns = max(min(screen_columns - width - 4, MOST_CHART_COLUMNS), 10)
    text = Text(no_wrap=True)
    for bar in bars:
        begin = round(bar.start_s / last_s * columns) if last_s else 0
        end = max(round(bar.finish_s / last_s * columns), begin + 1) if last_s else 1
        text.append(f"{bar.label:<{width}} |")
        text.append(" " * begin + "█" * (end - begin), style=bar.style)
        text.append(" " * (columns - end) + "|\n")
    scale = f"0{format_time(last_s):>{columns - 1}}"
    text.append(" " * (width + 2) + scale + "\n")
    text.append(" " * (width + 2) + "green: direct, cyan: to an aggregator, yellow: the sum\n", style="dim")
    return text
