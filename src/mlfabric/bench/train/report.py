"""Results for people and programs: a table in Markdown, and one JSON document."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from mlfabric import scenario as scenarios
from mlfabric.bench.train.entries import ENTRIES, find_entry
from mlfabric.bench.train.judging import Pair, Row, RunResult, Spread, pair, summarise
from mlfabric.bench.train.settings import Ceilings, ceilings, fit
from mlfabric.sim.results import simulate
from mlfabric.units import format_time


class Report(msgspec.Struct, frozen=True):
    rows: list[Row]
    pairs: list[Pair]  # our soonest of each class against the others of it
    ceilings: dict[str, Ceilings]  # by scenario, at the first seed
    simulated: dict[str, dict[str, float]] = {}  # updates a second, by scenario and contender, same seeds
    virtual: bool = False  # all of it is simulated


def make_report(runs: Sequence[RunResult], predict: bool = True) -> Report:
    """With `predict` the simulator is asked as well."""
    rows = summarise(runs)
    found = {}
    for run in runs:
        if run.settings.scenario not in found:
            written = scenarios.load(scenarios.find(run.settings.scenario))
            found[run.settings.scenario] = ceilings(fit(written, run.settings), run.settings.limit_s)
    virtual = any(run.simulated for run in runs)
    return Report(
        rows, _pairs(runs, rows), found, _simulate(runs) if predict and not virtual else {}, virtual
    )


def _simulate(runs: Sequence[RunResult]) -> dict[str, dict[str, float]]:
    """What the simulator says of the same scenarios, seeds and stretches of time: a check of either."""
    values: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        policy = find_entry(run.settings.contender).policy
        if policy and run.seconds > 0:
            fitted = fit(scenarios.load(scenarios.find(run.settings.scenario)), run.settings)
            (result,) = simulate(
                msgspec.structs.replace(fitted, duration=scenarios.Seconds(run.seconds)), policy
            )
            here = values.setdefault(run.settings.scenario, {})
            here.setdefault(run.settings.contender, []).append(result.updates_per_s)
    return {
        scenario: {name: statistics.median(rates) for name, rates in each.items()}
        for scenario, each in values.items()
    }


def _pairs(runs: Sequence[RunResult], rows: Sequence[Row]) -> list[Pair]:
    found = []
    for scenario in dict.fromkeys(row.scenario for row in rows):
        for kind in dict.fromkeys(entry.kind for entry in ENTRIES.values()):
            mine = [r for r in rows if r.scenario == scenario and find_entry(r.contender).kind == kind]
            for written in mine[0].to_target if mine else ():
                ours = [row for row in mine if find_entry(row.contender).ours]
                if not ours:
                    continue
                best = min(ours, key=lambda row: row.to_target[written].median)
                for row in mine:
                    if not find_entry(row.contender).ours:
                        made = pair(runs, scenario, best.contender, row.contender, float(written))
                        if made is not None:
                            found.append(made)
    return found


def markdown(report: Report) -> str:
    lines: list[str] = []
    for scenario in dict.fromkeys(row.scenario for row in report.rows):
        ceiling = report.ceilings[scenario]
        lines += [
            f"## {scenario}{', simulated with real gradients' if report.virtual else ''}",
            "",
            f"A step computes {format_time(ceiling.compute_s)}. Gradients a second that the links allow: "
            f"{ceiling.ring_per_s:.1f} by a ring, {ceiling.servers_per_s:.1f} by one push and one pull each; "
            f"the workers compute {ceiling.compute_per_s:.1f} a second if they never wait.",
            "",
        ]
        rows = [row for row in report.rows if row.scenario == scenario]
        targets = list(rows[0].to_target)
        header = [
            "contender",
            "class",
            *(f"to {target}" for target in targets),
            "samples/s",
            "updates/s",
            "simulated",
        ]
        header += [
            "delay mean, p99, max",
            "dropped",
            "MB per update",
            "busiest link",
            "exchange",
            "CPU",
            "overran",
            "seeds",
        ]
        lines += ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
        for row in rows:
            simulated = report.simulated.get(scenario, {}).get(row.contender)
            lines.append("| " + " | ".join(_cells(row, targets, simulated)) + " |")
        refused = [(row.contender, seed, why) for row in rows for seed, why in row.refused.items()]
        lines += [""]
        lines += [f"- not valid: {name}, seed {seed}: {'; '.join(why)}" for name, seed, why in refused]
        lines += [
            f"- {row.contender}, seed {seed}: diverged after {format_time(at)}"
            for row in rows
            for seed, at in row.diverged.items()
        ]
        lines += [
            f"- {made.ours} is at {made.target:g} {'at least ' if made.at_least else ''}{made.median:.2f} "
            f"times as soon as {made.other} ({', '.join(f'{t:.2f}' for t in made.times)})"
            for made in report.pairs
            if made.scenario == scenario
        ]
        lines += [""]
    return "\n".join(lines)


def _cells(row: Row, targets: Sequence[str], simulated: float | None) -> list[str]:
    return [
        row.contender,
        find_entry(row.contender).kind,
        *(_seconds(row.to_target[target], row.limit_s, bool(row.diverged)) for target in targets),
        _number(row.samples_per_s),
        _number(row.updates_per_s),
        f"{simulated:.3g}" if simulated is not None else "-",
        f"{row.delay_mean:.1f}, {row.delay_p99}, {row.delay_max}",
        f"{row.dropped_share:.1%}",
        f"{row.bytes_per_update / 1e6:.1f}",
        f"{row.busiest_link} {row.busiest_share:.0%}" if row.busiest_link else "-",
        format_time(row.exchange_s),
        f"{row.cpu_share:.0%}",
        f"{row.overran_share:.1%}",
        ", ".join(str(seed) for seed in row.seeds) or "none valid",
    ]


def _seconds(spread: Spread, limit_s: float, diverged: bool) -> str:
    def one(value: float) -> str:
        if math.isinf(value) and diverged:
            return "never"
        return f"> {format_time(limit_s)}" if math.isinf(value) else format_time(value)

    if spread.least == spread.most:
        return one(spread.median)
    return f"{one(spread.median)} [{one(spread.least)}..{one(spread.most)}]"


def _number(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    if spread.least == spread.most:
        return f"{spread.median:.3g}"
    return f"{spread.median:.3g} [{spread.least:.3g}..{spread.most:.3g}]"


def as_json(report: Report, runs: Sequence[RunResult]) -> Any:
    """Infinity has no place in JSON: a time that was not reached is null there."""

    def plain(value: Any) -> Any:
        if isinstance(value, float) and math.isinf(value):
            return None
        if isinstance(value, dict):
            return {key: plain(each) for key, each in value.items()}
        return [plain(each) for each in value] if isinstance(value, list) else value

    return plain(msgspec.to_builtins({"report": report, "runs": list(runs)}, str_keys=True))


def write_report(report: Report, runs: Sequence[RunResult], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.md").write_text(markdown(report) + "\n")
    (folder / "results.json").write_bytes(
        msgspec.json.format(msgspec.json.encode(as_json(report, runs)), indent=1) + b"\n"
    )
