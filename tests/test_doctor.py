"""The doctor: what it says of a host follows from its facts, and looking changes nothing."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

import mlfabric as mf
from mlfabric.commands.root import app
from mlfabric.doctor import Facts, Finding, Interface, examine
from mlfabric.runtime.host import gather

GOOD = Facts(
    sysctls={
        "net.ipv4.tcp_slow_start_after_idle": "0",
        "net.ipv4.tcp_available_congestion_control": "reno bbr cubic",
        "net.ipv4.tcp_allowed_congestion_control": "reno cubic",
        "net.ipv4.tcp_rmem": "4096 131072 67108864",
        "net.ipv4.tcp_wmem": "4096 16384 67108864",
    },
    congestion="cubic",
    interfaces=(Interface("eth0", 10e9, 9000),),
    route="eth0",
    round_trip_s=0.001,
    clock_offset_s=0.01,
    clock_uncertainty_s=0.001,
    members=8,
    open_files=4096,
    cores=8,
)


def changed(**facts: Any) -> list[Finding]:
    return [finding for finding in examine(msgspec.structs.replace(GOOD, **facts)) if not finding.good]


def test_a_host_without_faults_gets_no_advice() -> None:
    assert not changed()
    assert not any(finding.advice for finding in examine(GOOD))


def sysctl(**values: str) -> dict[str, str]:
    return {**GOOD.sysctls, **{f"net.ipv4.{key}": value for key, value in values.items()}}


@pytest.mark.parametrize(
    ("facts", "what", "advice"),
    [
        ({"sysctls": sysctl(tcp_slow_start_after_idle="1")}, "slow start after idle", "after_idle=0"),
        (
            {"congestion": "bbr", "sysctls": sysctl(tcp_allowed_congestion_control="reno bbr")},
            "congestion control",
            'allowed_congestion_control="reno bbr cubic"',
        ),
        ({"sysctls": sysctl(tcp_rmem="4096 131072 1000000")}, "receive buffers", '"4096 131072 3145728"'),
        ({"sysctls": sysctl(tcp_wmem="4096 16384 1000000")}, "send buffers", '"4096 16384 3145728"'),
        ({"interfaces": (Interface("eth0", 10e9, 1500),)}, "MTU", "mtu 9000"),
        ({"interfaces": (Interface("eth0", 1e9, 1500), Interface("ib0", 1e11, 1500))}, "interface", "ib0"),
        ({"clock_offset_s": -2.0}, "clock", "chrony"),
        ({"open_files": 100}, "open files", "ulimit -n 164"),
        ({"cores": 1}, "cores", "two cores"),
    ],
)
def test_what_costs_speed_is_named_with_what_to_set_and_what_it_gains(
    facts: dict[str, Any], what: str, advice: str
) -> None:
    finding = next(finding for finding in changed(**facts) if finding.what == what)
    assert advice in finding.advice
    assert finding.gain


def test_what_could_not_be_found_out_is_not_judged() -> None:
    bare = msgspec.structs.replace(
        GOOD,
        sysctls={},
        congestion=None,
        interfaces=(),
        route=None,
        clock_offset_s=None,
        round_trip_s=None,
        members=None,
    )
    assert {finding.what for finding in examine(bare)} == {"interface", "open files", "cores"}


def test_a_control_that_the_kernel_lacks_has_to_be_loaded_first() -> None:
    without = sysctl(tcp_available_congestion_control="reno", tcp_allowed_congestion_control="reno")
    finding = next(f for f in changed(congestion="reno", sysctls=without) if f.what == "congestion control")
    assert finding.advice.startswith("modprobe tcp_cubic; sysctl")


def test_slow_start_after_idle_matters_by_what_our_sockets_use_not_by_the_systems_default() -> None:
    idle = sysctl(tcp_slow_start_after_idle="1")
    assert any(f.what == "slow start after idle" for f in changed(sysctls=idle, congestion="cubic"))
    assert not any(f.what == "slow start after idle" for f in changed(sysctls=idle, congestion="bbr"))


def test_jumbo_frames_gain_what_the_headers_cost() -> None:
    finding = next(f for f in changed(interfaces=(Interface("eth0", 10e9, 1500),)) if f.what == "MTU")
    assert finding.gain.startswith("3.8% more payload")  # 8948 of 9014 bytes against 1448 of 1514


def test_this_host_can_be_examined() -> None:
    facts = gather(("127.0.0.1", 1))
    assert facts.route == "lo"
    assert facts.cores >= 1
    assert examine(facts)


def test_the_command_prints_for_people_and_for_programs() -> None:
    plain = CliRunner().invoke(app, ["doctor"])
    assert plain.exit_code == 0, plain.output
    assert "cores" in plain.output
    with mf.join("127.0.0.1:0", name="w0", job="j", scheduler=True) as fabric:
        told = CliRunner().invoke(app, ["doctor", "--at", fabric.address, "--json"])
        assert told.exit_code == 0, told.output
        findings = {finding["what"]: finding for finding in json.loads(told.output)}
        assert findings["clock"]["good"]
        assert findings["interface"]["found"] == "loopback"
