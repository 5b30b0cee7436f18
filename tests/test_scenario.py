"""The scenario format: what a file unrolls to, and that every error names file, line and key."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlfabric import scenario as scenarios
from mlfabric.errors import ScenarioError
from mlfabric.scenario import Scenario, load, parse, uniform
from mlfabric.units import goodput

HOST = '[[hosts]]\nname = "a"\n'


def complaint(text: str) -> str:
    with pytest.raises(ScenarioError) as caught:
        parse(text, "net.toml")
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


# --- unrolling ----------------------------------------------------------------------------------------------


def test_counted_hosts_are_numbered_from_first() -> None:
    scenario = parse('[[hosts]]\nname = "w"\ncount = 3\nfirst = 5\n[[hosts]]\nname = "s"\n')
    assert scenario.host_names() == ["w5", "w6", "w7", "s"]


def test_a_link_rate_comes_from_the_nearest_place_that_states_one() -> None:
    scenario = parse(
        '[network]\nrate = "1gbit"\nqueue = "10kB"\n'
        '[[hosts]]\nname = "a"\n'
        '[[hosts]]\nname = "b"\nrate = "200mbit"\ndown = "50mbit"\nqueue = "1kB"\ndelay = "5ms"\n'
    )
    a, b = scenario.host_links()
    assert (a.up_bps, a.down_bps, a.queue_bytes, a.delay_s) == (1e9, 1e9, 10_000, 0.0)
    assert (b.up_bps, b.down_bps, b.queue_bytes, b.delay_s) == (200e6, 50e6, 1_000, 0.005)


def racked(deal: str, hosts: int = 5) -> list[str | None]:
    scenario = parse(
        f'[[hosts]]\nname = "w"\ncount = {hosts}\nrack = "r*"\ndeal = "{deal}"\n'
        '[[racks]]\nname = "r"\ncount = 2\nrate = "1gbit"\n'
    )
    return [link.rack for link in scenario.host_links()]


def test_hosts_are_dealt_over_racks_in_blocks_or_in_turn() -> None:
    assert racked("blocks") == ["r0", "r0", "r0", "r1", "r1"]
    assert racked("round-robin") == ["r0", "r1", "r0", "r1", "r0"]


@given(st.integers(1, 40), st.sampled_from(["blocks", "round-robin"]))
def test_racks_differ_by_one_host_at_most(hosts: int, deal: str) -> None:
    dealt = racked(deal, hosts)
    assert abs(dealt.count("r0") - dealt.count("r1")) <= 1
    if deal == "blocks":
        assert dealt == sorted(dealt, key=str)


def test_a_rack_uplink_follows_from_its_hosts_by_oversubscription() -> None:
    scenario = parse(
        '[[hosts]]\nname = "w"\ncount = 8\nup = "1gbit"\ndown = "2gbit"\nrack = ["r0", "r1"]\n'
        '[[racks]]\nname = "r0"\noversubscription = 4\n'
        '[[racks]]\nname = "r1"\nrate = "10gbit"\ndown = "3gbit"\n'
    )
    by_share, by_rate = scenario.rack_links()
    assert (by_share.up_bps, by_share.down_bps) == (1e9, 2e9)
    assert (by_rate.up_bps, by_rate.down_bps) == (10e9, 3e9)


def test_the_planned_network_counts_payload_bytes() -> None:
    scenario = parse(
        '[[hosts]]\nname = "a"\nrate = "800mbit"\nrack = "r"\n[[racks]]\nname = "r"\nrate = "80mbit"\n'
    )
    network = scenario.planned_network()
    assert network.hosts["a"].up_bytes_per_s == goodput(800e6)
    assert network.racks["r"].down_bytes_per_s == goodput(80e6)
    assert network.hosts["a"].rack == "r"


def test_a_job_has_its_places_size_and_compute_time() -> None:
    scenario = parse(
        '[[hosts]]\nname = "w"\ncount = 3\nrate = "1gbit"\n[[hosts]]\nname = "slow"\nrate = "10mbit"\n'
        '[[jobs]]\nname = "one"\nworkers = ["w*"]\nreplicas = ["slow"]\nsize = "10MB"\n'
        "compute_transfers = 2\n"
        '[[jobs]]\nname = "two"\nmodel = "resnet50"\nworkers = ["w1", "w2"]\nscheduler = "slow"\n'
        'compute = "5ms"\n'
    )
    one, two = scenario.job("one"), scenario.job("two")
    assert scenario.places(one).workers == ("w0", "w1", "w2")
    assert scenario.places(one).servers == ("w0",)
    assert scenario.places(one).replicas == ("slow",)
    assert scenario.places(one).scheduler == "w0"
    assert scenario.places(two).scheduler == "slow"
    assert scenario.places(two).aggregators == ("w0", "w1", "w2", "slow")
    assert scenario.size_bytes(one) == 10_000_000
    assert scenario.size_bytes(two) == 4 * 25_557_032
    assert scenario.compute_s(one) == pytest.approx(2 * 10e6 / goodput(1e9))
    assert scenario.compute_s(two) == 0.005
    with pytest.raises(ScenarioError, match="three"):
        scenario.job("three")


# --- chance -------------------------------------------------------------------------------------------------

DRAWN = """
seed = 7
duration = "30s"
[[hosts]]
name = "w"
count = {count}
[[traces]]
every = "5s"
choose = [1.0, 0.5, 0.25]
directions = "{directions}"
[[stragglers]]
probability = 0.4
delay = [2, 5]
"""


def drawn(count: int = 4, directions: str = "separately", seed: int = 7) -> Scenario:
    scenario = parse(DRAWN.format(count=count, directions=directions))
    return msgspec.structs.replace(scenario, seed=seed)


def test_equal_files_give_equal_traces_and_another_seed_another() -> None:
    assert drawn().rate_changes() == drawn().rate_changes()
    assert drawn().rate_changes() != drawn(seed=8).rate_changes()


def test_a_host_draws_the_same_whoever_else_is_there() -> None:
    alone = [change for change in drawn(1).rate_changes() if change.host == "w0"]
    among = [change for change in drawn(9).rate_changes() if change.host == "w0"]
    assert alone == among
    assert [drawn(1).straggler_delay("w0", step) for step in range(50)] == [
        drawn(9).straggler_delay("w0", step) for step in range(50)
    ]


def test_a_trace_is_redrawn_from_its_shares_in_time_order() -> None:
    changes = drawn().rate_changes()
    assert len(changes) == 4 * 6
    assert changes == sorted(changes, key=lambda change: (change.at_s, change.host))
    assert {change.up_bps for change in changes} == {1e9, 0.5e9, 0.25e9}
    assert any(change.up_bps != change.down_bps for change in changes)
    assert all(change.up_bps == change.down_bps for change in drawn(directions="together").rate_changes())


def test_written_steps_change_only_what_they_name() -> None:
    scenario = parse(HOST + '[[traces]]\nsteps = [{at = "2s", up = "5mbit"}, {at = "1s", rate = "8mbit"}]\n')
    assert [(c.at_s, c.up_bps, c.down_bps) for c in scenario.rate_changes()] == [
        (1.0, 8e6, 8e6),
        (2.0, 5e6, 8e6),
    ]


def test_straggling_does_not_depend_on_the_order_of_asking() -> None:
    scenario = drawn()
    steps = list(range(200))
    forward = {step: scenario.straggler_delay("w1", step) for step in steps}
    random.Random(1).shuffle(steps)
    assert {step: scenario.straggler_delay("w1", step) for step in steps} == forward
    hit = [delay for delay in forward.values() if delay]
    assert all(2 <= delay <= 5 for delay in hit)
    assert 50 < len(hit) < 110  # 0.4 of 200, four standard deviations either way


@given(st.integers(), st.text(), st.integers())
def test_a_uniform_number_follows_from_seed_and_key_alone(seed: int, key: str, index: int) -> None:
    value = uniform(seed, key, index)
    assert 0 <= value < 1
    assert value == uniform(seed, key, index)
    assert value != uniform(seed, key, index + 1)


# --- errors -------------------------------------------------------------------------------------------------

# (what is wrong, the text, the line, what the sentence must say beside it)
FAULTY = [
    ("unknown key", HOST + 'rte = "1gbit"\n', 3, ["'rte'", "hosts[0]", "did you mean 'rate'?"]),
    ("unknown key unlike any", HOST + "zzz = 1\n", 3, ["'zzz'", "known are name, count"]),
    ("unknown table", HOST + "[colour]\n", 3, ["'colour'"]),
    ("negative rate", HOST + 'rate = "-1mbit"\n', 3, ["hosts.0.rate", "negative"]),
    ("rate without sense", HOST + 'rate = "fast"\n', 3, ["hosts.0.rate", "'fast'", "200mbit"]),
    ("boolean rate", HOST + "rate = true\n", 3, ["hosts.0.rate"]),
    ("zero rate", HOST + "rate = 0\n", 3, ["rate", "zero"]),
    ("zero network rate", '[network]\nrate = "0mbit"\n' + HOST, 2, ["rate", "zero"]),
    ("wrong type", '[[hosts]]\nname = "a"\ncount = "many"\n', 3, ["hosts.0.count", "int", "str"]),
    ("missing name", "[[hosts]]\ncount = 3\n", 1, ["hosts.0", "`name`"]),
    ("no hosts", "seed = 3\n", 1, ["`hosts`"]),
    ("empty hosts", "seed = 3\nhosts = []\n", 2, ["at least one host"]),
    ("count of zero", HOST + "count = 0\n", 3, ["count", "at least 1"]),
    ("same host twice", HOST + '[[hosts]]\nname = "a"\n', 4, ["host a", "twice"]),
    ("overlapping counts", '[[hosts]]\nname = "w"\ncount = 3\n[[hosts]]\nname = "w2"\n', 5, ["w2", "twice"]),
    ("same rack twice", HOST + '[[racks]]\nname = "r"\n[[racks]]\nname = "r"\n', 6, ["rack r", "twice"]),
    ("rack named as host", HOST + '[[racks]]\nname = "a"\n', 4, ["a", "rack", "host"]),
    ("unknown rack", HOST + 'rack = "r7"\n[[racks]]\nname = "r0"\n', 3, ["'r7'", "r0"]),
    ("oversubscription", HOST + '[[racks]]\nname = "r"\noversubscription = 0\n', 5, ["oversubscription"]),
    ("rack rate", HOST + '[[racks]]\nname = "r"\nup = 0\n', 5, ["up of rack r", "zero"]),
    ("same job twice", HOST + '[[jobs]]\nname = "j"\n[[jobs]]\nname = "j"\n', 6, ["job j", "twice"]),
    ("unknown worker", HOST + '[[jobs]]\nworkers = ["a", "b1"]\n', 4, ["'b1'"]),
    ("unknown aggregator", HOST + '[[jobs]]\naggregators = ["nobody"]\n', 4, ["'nobody'"]),
    ("no workers", HOST + "[[jobs]]\nworkers = []\n", 4, ["no workers"]),
    ("unknown scheduler", HOST + '[[jobs]]\nscheduler = "q"\n', 4, ["'q'"]),
    ("unknown model", HOST + '[[jobs]]\nmodel = "alexnet"\n', 4, ["'alexnet'", "resnet50"]),
    ("unknown mode", HOST + '[[jobs]]\nmode = "asink"\n', 4, ["jobs.0.mode", "'asink'"]),
    ("negative bound", HOST + "[[jobs]]\nmax_delay = -1\n", 4, ["max_delay"]),
    ("negative divergence", HOST + "[[jobs]]\ndivergence = -0.1\n", 4, ["divergence"]),
    ("weight of zero", HOST + "[[jobs]]\nweight = 0\n", 4, ["weight"]),
    ("none in flight", HOST + "[[jobs]]\nin_flight = 0\n", 4, ["in_flight"]),
    ("negative jitter", HOST + "[[jobs]]\ncompute_jitter = -1\n", 4, ["compute_jitter"]),
    ("momentum of one", HOST + "[[jobs]]\nmomentum = 1.0\n", 4, ["momentum"]),
    ("half a trace", HOST + '[[traces]]\nhosts = ["a"]\n', 3, ["every", "steps"]),
    ("trace of nobody", HOST + '[[traces]]\nhosts = ["b"]\nevery = "1s"\nchoose = [1]\n', 4, ["'b'"]),
    ("every of zero", HOST + '[[traces]]\nevery = "0s"\nchoose = [1]\n', 4, ["every"]),
    ("share of zero", HOST + '[[traces]]\nevery = "1s"\nchoose = [1, 0]\n', 5, ["0"]),
    ("straggling too often", HOST + "[[stragglers]]\nprobability = 1.5\ndelay = [1, 2]\n", 4, ["1.5"]),
    ("range upside down", HOST + "[[stragglers]]\nprobability = 0.5\ndelay = [3, 2]\n", 5, ["delay"]),
    ("range of one", HOST + "[[stragglers]]\nprobability = 0.5\ndelay = [3]\n", 5, ["stragglers.0.delay"]),
    ("fault of nobody", HOST + '[[faults]]\nat = "1s"\ndo = "kill"\n', 3, ["host", "between"]),
    ("fault of a stranger", HOST + '[[faults]]\nat = "1s"\ndo = "kill"\nhost = "b"\n', 6, ["'b'"]),
    ("unknown fault", HOST + '[[faults]]\nat = "1s"\ndo = "burn"\nhost = "a"\n', 5, ["faults.0.do", "burn"]),
    (
        "kill between",
        HOST + '[[faults]]\nat = "1s"\ndo = "kill"\nbetween = ["a", "a"]\n',
        6,
        ["between", "cut and heal"],
    ),
    ("stream to nobody", HOST + '[[background]]\nsource = "a"\ntarget = "b"\nrate = 1\n', 5, ["'b'"]),
    ("offer of a stranger", HOST + '[[offers]]\nworker = "b"\nversion = 0\n', 4, ["'b'"]),
    ("offer of the future", HOST + '[[offers]]\nworker = "a"\nversion = 3\n', 5, ["version 3"]),
    ("offer of no job", HOST + '[[offers]]\nworker = "a"\nversion = 0\njob = "x"\n', 6, ["'x'"]),
    ("negative time", 'duration = "-1s"\n' + HOST, 1, ["duration", "negative"]),
    ("bad TOML", HOST + "rate = \n", 3, ["not valid TOML"]),
]


@pytest.mark.parametrize(("text", "line", "words"), [f[1:] for f in FAULTY], ids=[f[0] for f in FAULTY])
def test_an_error_names_file_line_and_key(text: str, line: int, words: list[str]) -> None:
    sentence = complaint(text)
    assert sentence.startswith(f"net.toml:{line}: ")
    for word in words:
        assert word in sentence


@pytest.mark.parametrize(("text", "line", "words"), [f[1:] for f in FAULTY], ids=[f[0] for f in FAULTY])
def test_lines_stay_right_below_comments_and_multi_line_strings(
    text: str, line: int, words: list[str]
) -> None:
    before = '# rate = "-1mbit"\nname = """\n[[hosts]]\nrate = 3\n"""  # [[hosts]]\n\n'
    assert complaint(before + text).startswith(f"net.toml:{line + 6 if 'hosts`' not in words[0] else 1}: ")


def test_lines_are_right_inside_inline_tables_and_multi_line_arrays() -> None:
    text = (
        "hosts = [\n"  # 1
        '  {name = "a"},  # rate = "x"\n'
        '  {name = "b ] } #", rate = "1gbit"},\n'
        "\n"
        '  {name = "c", rate = "slow"},\n'  # 5
        "]\n"
    )
    assert complaint(text).startswith("net.toml:5: hosts.2.rate: ")
    steps = 'steps = [\n  {at = "1s"},\n  {at = "2s", rate = 5},\n  {at = "3x"}]\n'
    assert complaint(HOST + "[[traces]]\n" + steps).startswith("net.toml:7: traces.0.steps.2.at: ")


def test_lines_are_right_for_dotted_and_quoted_keys_and_nested_tables() -> None:
    assert complaint('seed = 1\nnetwork.rate = "x"\n' + HOST).startswith("net.toml:2: network.rate: ")
    assert complaint(HOST + "'rate' = \"x\"\n").startswith("net.toml:3: hosts.0.rate: ")
    nested = '[[traces]]\n[[traces.steps]]\nat = "1s"\n[[traces.steps]]\nat = "2s"\nrate = "x"\n'
    assert complaint(HOST + nested).startswith("net.toml:8: traces.0.steps.1.rate: ")


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"missing\.toml: No such file"):
        load(tmp_path / "missing.toml")
    with pytest.raises(ScenarioError, match="directory"):
        load(tmp_path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ScenarioError, match=r"binary\.toml is not a text file"):
        load(binary)
    faulty = tmp_path / "faulty.toml"
    faulty.write_text(HOST + "rate = -1\n")
    with pytest.raises(ScenarioError, match=r"faulty\.toml:3: hosts\.0\.rate"):
        load(faulty)


# --- the document -------------------------------------------------------------------------------------------

DOCUMENT = Path(__file__).parents[1] / "docs" / "scenarios.md"
SPECS = {
    "the file": scenarios.Scenario,
    "[network]": scenarios.NetworkSpec,
    "[[hosts]]": scenarios.HostSpec,
    "[[racks]]": scenarios.RackSpec,
    "[[jobs]]": scenarios.JobSpec,
    "[[traces]]": scenarios.TraceSpec,
    "steps": scenarios.RateStep,
    "[[stragglers]]": scenarios.StragglerSpec,
    "[[faults]]": scenarios.FaultSpec,
    "[[background]]": scenarios.BackgroundSpec,
    "[[offers]]": scenarios.OfferSpec,
    "[situation]": scenarios.SituationSpec,
}


def sections() -> dict[str, str]:
    """The document's sections by what stands in the first pair of backquotes of their heading."""
    found = {}
    for part in DOCUMENT.read_text(encoding="utf-8").split("\n## ")[1:]:
        heading, _, body = part.partition("\n")
        found[heading.split("`")[1] if "`" in heading else heading.lower()] = body
    return found


@pytest.mark.parametrize("heading", SPECS)
def test_the_document_explains_every_key_and_no_other(heading: str) -> None:
    rows = [line for line in sections()[heading].splitlines() if line.startswith("| `")]
    explained = [row.split("`")[1] for row in rows]
    assert sorted(explained) == sorted(SPECS[heading].__struct_fields__)


def test_every_spec_of_the_format_has_its_section() -> None:
    specs = {
        spec
        for spec in vars(scenarios).values()
        if isinstance(spec, type)
        and issubclass(spec, msgspec.Struct)
        and spec.__module__ == scenarios.__name__
    }
    assert specs == set(SPECS.values())


def test_the_examples_of_the_document_are_valid() -> None:
    blocks = DOCUMENT.read_text(encoding="utf-8").split("```toml\n")[1:]
    assert blocks
    for block in blocks:
        parse(block.partition("```")[0], "docs/scenarios.md")
