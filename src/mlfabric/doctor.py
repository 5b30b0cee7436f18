"""What about a host costs speed, judged from facts that `runtime.host` gathers. Nothing is changed.

Each finding says what was found, what to set, and what that gains; gains that
were not measured are computed from what is said with them.
"""

from __future__ import annotations

import msgspec

from mlfabric.units import format_rate, format_size, format_time

AFTER_IDLE_KEY = "net.ipv4.tcp_slow_start_after_idle"
AVAILABLE_KEY = "net.ipv4.tcp_available_congestion_control"
ALLOWED_KEY = "net.ipv4.tcp_allowed_congestion_control"
RECEIVE_KEY, SEND_KEY = "net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem"
SYSCTLS = (AFTER_IDLE_KEY, AVAILABLE_KEY, ALLOWED_KEY, RECEIVE_KEY, SEND_KEY)
# What TCP's own buffers should reach where the path is not known: 1 Gb/s over 20 ms, doubled.
BUFFER_BYTES = 5_000_000
# Header bytes of a segment, and what Ethernet adds to it.
HEADER_BYTES, ETHERNET_BYTES = 52, 14
# Measured by `bench allreduce` on 8 hosts at 200 Mb/s, 16 MB, without racks and with two at 4:1.
AFTER_IDLE = "an all-reduce after idle seconds took 1.01 to 1.04, not 1.02 to 1.09 times its bound (measured)"
# Measured on 8 hosts at 200 Mb/s, 16 MB per all-reduce (`runtime.pacing`).
BY_CUBIC = "an all-reduce by cubic took 1.02 times its bound, by bbr 1.13 (measured); others are not tried"
FILES_PER_MEMBER, FILES_OTHERWISE = 8, 100
CLOCK_S = 0.1
FAST_BPS = 10e9


class Interface(msgspec.Struct, frozen=True):
    name: str
    speed_bps: float | None  # None: the driver does not say
    mtu: int


class Facts(msgspec.Struct, frozen=True):
    """A host as it is; None: it could not be found out."""

    sysctls: dict[str, str]
    congestion: str | None  # the control that sockets for bulk data get here, asking for cubic
    interfaces: tuple[Interface, ...]  # that are up, but for loopback
    route: str | None  # the interface by which the scheduler is reached
    round_trip_s: float | None
    clock_offset_s: float | None
    clock_uncertainty_s: float | None
    members: int | None
    open_files: int
    cores: int


class Finding(msgspec.Struct, frozen=True):
    what: str
    found: str
    good: bool
    advice: str = ""
    gain: str = ""


def examine(facts: Facts) -> list[Finding]:
    """All findings, in a fixed order."""
    found = [
        _idle(facts),
        _congestion(facts),
        *_buffers(facts),
        *_interface(facts),
        _clock(facts),
        _files(facts),
        _cores(facts.cores),
    ]
    return [finding for finding in found if finding is not None]


def _idle(facts: Facts) -> Finding | None:
    setting = facts.sysctls.get(AFTER_IDLE_KEY)
    if setting is None:
        return None
    exempt = facts.congestion == "bbr"
    good = setting == "0" or exempt
    found = "off" if setting == "0" else "on: TCP forgets a link's rate while a step computes"
    return Finding(
        "slow start after idle",
        "on, which does not concern bbr" if exempt else found,
        good,
        "" if good else f"sysctl -w {AFTER_IDLE_KEY}=0",
        "" if good else AFTER_IDLE,
    )


def _congestion(facts: Facts) -> Finding | None:
    used = facts.congestion
    if used is None:
        return None
    good = used == "cubic"
    advice = ""
    if not good:
        allowed = facts.sysctls.get(ALLOWED_KEY, used)
        here = "cubic" in facts.sysctls.get(AVAILABLE_KEY, "").split()
        advice = f'sysctl -w {ALLOWED_KEY}="{allowed} cubic"'
        advice = advice if here else f"modprobe tcp_cubic; {advice}"
    return Finding("congestion control", used, good, advice, "" if good else BY_CUBIC)


def _buffers(facts: Facts) -> list[Finding]:
    speed = next((i.speed_bps for i in facts.interfaces if i.name == facts.route), None)
    needed = BUFFER_BYTES
    why = "1 Gb/s over 20 ms"
    if speed and facts.round_trip_s:
        needed = max(int(2 * speed / 8 * facts.round_trip_s), 1_000_000)
        why = f"{format_rate(speed)} over {format_time(facts.round_trip_s)}"
    findings = []
    for key, name in ((RECEIVE_KEY, "receive buffers"), (SEND_KEY, "send buffers")):
        limits = facts.sysctls.get(key, "").split()
        if len(limits) != 3:
            continue
        largest = int(limits[2])
        good = largest >= needed
        rounded = -(-needed // 2**20) * 2**20
        advice = gain = ""
        if not good:
            advice = f'sysctl -w {key}="{limits[0]} {limits[1]} {rounded}"'
            gain = f"{why} needs {format_size(needed)}; with less, about {largest / needed:.0%} of the rate"
        findings.append(Finding(name, f"up to {format_size(largest)}", good, advice, gain))
    return findings


def _interface(facts: Facts) -> list[Finding]:
    used = next((i for i in facts.interfaces if i.name == facts.route), None)
    if used is None:
        found = "loopback" if facts.route == "lo" else "not known; give --at to see which one is used"
        return [Finding("interface", found, good=True)]
    speed = format_rate(used.speed_bps) if used.speed_bps else "unknown speed"
    faster = [i for i in facts.interfaces if i.speed_bps and used.speed_bps and i.speed_bps > used.speed_bps]
    best = max(faster, key=lambda i: (i.speed_bps or 0, i.name), default=None)
    findings = [
        Finding(
            "interface",
            f"{used.name}, {speed}: the route to the scheduler",
            best is None,
            "" if best is None else f"{best.name} is up too: give the scheduler's address on its network",
            "" if best is None else f"{(best.speed_bps or 0) / (used.speed_bps or 1):.1f} times the rate",
        )
    ]
    small = used.mtu < 9000 and (used.speed_bps or 0) >= FAST_BPS
    gain = _payload_share(9000) / _payload_share(used.mtu) - 1
    findings.append(
        Finding(
            "MTU",
            str(used.mtu),
            not small,
            f"ip link set {used.name} mtu 9000, on all hosts and switches" if small else "",
            f"{gain:.1%} more payload on the wire, and fewer packets to handle" if small else "",
        )
    )
    return findings


def _payload_share(mtu: int) -> float:
    return (mtu - HEADER_BYTES) / (mtu + ETHERNET_BYTES)


def _clock(facts: Facts) -> Finding | None:
    offset, uncertainty = facts.clock_offset_s, facts.clock_uncertainty_s
    if offset is None or uncertainty is None:
        return None
    good = abs(offset) <= CLOCK_S + uncertainty
    return Finding(
        "clock",
        f"{offset:+.3f} s from the scheduler's, give or take {uncertainty:.3f} s",
        good,
        "" if good else "run a time service, for example chrony",
        "" if good else "logs and captures of several hosts fit together; speed is not concerned",
    )


def _files(facts: Facts) -> Finding:
    members = facts.members or 100
    needed = FILES_OTHERWISE + FILES_PER_MEMBER * members
    good = facts.open_files >= needed
    return Finding(
        "open files",
        f"{facts.open_files} allowed",
        good,
        "" if good else f"ulimit -n {needed}",
        "" if good else f"{members} members need about {needed}; beyond the limit peers are refused",
    )


def _cores(cores: int) -> Finding:
    good = cores > 1
    return Finding(
        "cores",
        str(cores),
        good,
        "" if good else "give the process two cores",
        "" if good else "the engine's thread and the training thread then need not take turns",
    )
