"""The same seed gives the same trace of rates, stragglers and faults, in the lab as everywhere."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from mlfabric.lab import inside
from mlfabric.lab.timeline import happenings
from mlfabric.scenario import FaultEvent, RateChange, dump, parse

DYNAMIC = """
name = "dynamic"
seed = 7
duration = "20s"
[network]
rate = "100mbit"
[[hosts]]
name = "w"
count = 4
[[jobs]]
compute = "200ms"
[[traces]]
every = "5s"
choose = [1, 0.5, 0.25, 0.125]
[[traces]]
hosts = ["w1"]
steps = [{ at = "3s", up = "7mbit" }, { at = "12s", rate = "9mbit" }]
[[stragglers]]
probability = 0.3
delay = [2, 5]
[[faults]]
at = "4s"
do = "kill"
host = "w2"
lasts = "3s"
[[faults]]
at = "6s"
do = "cut"
between = ["w0", "w3"]
direction = "out"
[[background]]
source = "w0"
target = "w1"
rate = "10mbit"
"""


def test_lab_plays_exactly_the_scenarios_rate_changes_and_faults() -> None:
    scenario = parse(DYNAMIC)
    within = [h for h in islice(happenings(scenario), 200) if h.at_s < scenario.duration]
    assert [h for h in within if isinstance(h, RateChange)] == scenario.rate_changes()
    assert [h for h in within if isinstance(h, FaultEvent)] == scenario.fault_events()
    assert [h.at_s for h in within] == sorted(h.at_s for h in within)


def test_trace_goes_on_past_the_duration_by_the_same_rule() -> None:
    scenario = parse(DYNAMIC)
    longer = parse(DYNAMIC.replace('duration = "20s"', 'duration = "60s"'))
    rates = [h for h in islice(happenings(scenario), 400) if isinstance(h, RateChange) and h.at_s < 60]
    assert rates == longer.rate_changes()


def test_another_seed_gives_another_trace() -> None:
    assert parse(DYNAMIC).rate_changes() != parse(DYNAMIC.replace("seed = 7", "seed = 8")).rate_changes()


def test_scenario_without_trace_ends() -> None:
    text = 'hosts = [{ name = "w" }]\nfaults = [{ at = "90s", do = "pause", host = "w", lasts = "1s" }]'
    assert [event.do for event in happenings(parse(text)) if isinstance(event, FaultEvent)] == [
        "pause",
        "resume",
    ]


def test_what_lasts_is_undone_in_time() -> None:
    events = parse(DYNAMIC).fault_events()
    assert [(event.at_s, event.do) for event in events] == [(4.0, "kill"), (6.0, "cut"), (7.0, "restart")]


def test_written_scenario_reads_back_the_same() -> None:
    scenario = parse(DYNAMIC)
    assert parse(dump(scenario)) == scenario


def test_program_inside_learns_its_stragglers_from_the_scenario(tmp_path: Path) -> None:
    file = tmp_path / "scenario.toml"
    file.write_text(DYNAMIC)
    here = inside({"MLFABRIC_SCENARIO": str(file), "MLFABRIC_HOST": "w1"})
    scenario = parse(DYNAMIC)
    delays = [here.straggler_delay_s(step) for step in range(50)]
    assert delays == [scenario.straggler_delay("w1", step) * 0.2 for step in range(50)]
    assert any(delays)


def test_program_outside_a_lab_never_straggles() -> None:
    assert inside({}).straggle(3) == 0.0
