"""Captures of one run from several hosts: clocks brought together, packets seen twice counted once."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from mlfabric.errors import FabricError
from mlfabric.traffic import ReadOptions, analyze, read
from tests.traffic import capture_bytes as made

START_NS = 1_700_000_000 * 10**9


@dataclass(frozen=True)
class Host:
    """Where a capture is taken, and what its clock shows."""

    number: int
    offset_ns: int = 0
    drift: float = 0.0

    def shows(self, true_ns: int) -> int:
        return START_NS + true_ns + self.offset_ns + round(self.drift * true_ns)


def frame(source: int, target: int, identity: int) -> bytes:
    network = struct.pack(
        ">BBHHHBBH4s4s",
        0x45,
        0,
        1500,
        identity,
        0x4000,
        64,
        6,
        0,
        bytes([10, 0, 0, source]),
        bytes([10, 0, 0, target]),
    )
    transport = struct.pack(">HHIIBBHHH", 4000, 5000, identity * 1448, 7, 0x50, 0x10, 0xFFFF, 0, 0)
    return made.ethernet(network + transport) + bytes(30)


def captures(
    folder: Path, hosts: list[Host], ways: list[tuple[int, int]], count: int = 400, seed: int = 3
) -> tuple[list[Path], int]:
    """One file per host with what it sends and receives; least delay 20 us, and the packets there are."""
    generator = np.random.default_rng(seed)
    seen: dict[int, list[made.Packet]] = {host.number: [] for host in hosts}
    for identity in range(count):
        for source, target in ways:
            sent = identity * 5_000_000 + int(generator.integers(0, 2_000_000))
            came = sent + 20_000 + int(generator.exponential(30_000))
            data = frame(source, target, identity)
            for host in hosts:
                if host.number in (source, target):
                    at = sent if host.number == source else came
                    seen[host.number].append(made.Packet(host.shows(at), data, 1514))
    paths = []
    for host in hosts:
        path = folder / f"host{host.number}.pcap"
        path.write_bytes(
            made.pcap(sorted(seen[host.number], key=lambda each: each.time_ns), magic=0xA1B23C4D)
        )
        paths.append(path)
    return paths, count * len(ways)


def test_clocks_come_together_to_within_the_stated_error(tmp_path: Path, form: str) -> None:
    hosts = [Host(1), Host(2, 1_234_567_891, 20e-6), Host(3, -77_000_000)]
    ways = [(1, 2), (2, 1), (2, 3), (3, 2)]
    paths, packets = captures(tmp_path, hosts, ways)
    trace = read(paths, ReadOptions(align=True))
    assert len(trace) == packets  # every packet was seen twice and counts once
    assert 0 < trace.origin.clock_error_ns < 60_000
    true = read(captures(tmp_path, [Host(1), Host(2), Host(3)], ways)[0], ReadOptions(align=True))
    error = np.abs((trace.time_ns + trace.origin_ns) - (true.time_ns + true.origin_ns))
    assert error.max() <= trace.origin.clock_error_ns + true.origin.clock_error_ns
    sentences = " ".join(trace.origin.warnings)
    assert "-1,234,5" in sentences
    assert "drifting by -20" in sentences
    assert any("finer than the captures' clocks" in each for each in analyze(trace).warnings)


def test_packets_of_one_direction_give_an_offset_with_a_doubt(tmp_path: Path) -> None:
    paths, packets = captures(tmp_path, [Host(1), Host(2, 5_000_000)], [(1, 2)])
    trace = read(paths, ReadOptions(align=True))
    assert len(trace) == packets
    assert "one way" in " ".join(trace.origin.warnings)


def test_strangers_keep_their_clocks_and_a_sentence_says_so(tmp_path: Path) -> None:
    first, _ = captures(tmp_path, [Host(1)], [(1, 2)])
    (tmp_path / "other").mkdir()
    other, _ = captures(tmp_path / "other", [Host(8)], [(8, 9)])
    trace = read([*first, *other], ReadOptions(align=True))
    assert len(trace) == 800
    assert "shares too few packets" in " ".join(trace.origin.warnings)


def test_overlapping_captures_that_were_not_aligned_are_pointed_out(tmp_path: Path) -> None:
    paths, packets = captures(tmp_path, [Host(1), Host(2)], [(1, 2), (2, 1)])
    trace = read(paths)
    assert len(trace) == 2 * packets
    assert "--align" in " ".join(trace.origin.warnings)
    parts = [tmp_path / "early.pcap", tmp_path / "late.pcap"]
    for path, shift in zip(parts, (0, 10**10), strict=True):
        path.write_bytes(made.pcap([made.Packet(START_NS + shift, made.frame(), 1514)]))
    assert not read(parts).origin.warnings


def test_standard_input_can_not_be_aligned(tmp_path: Path) -> None:
    paths, _ = captures(tmp_path, [Host(1)], [(1, 2)])
    with pytest.raises(FabricError, match="standard input"):
        read([*paths, "-"], ReadOptions(align=True))
