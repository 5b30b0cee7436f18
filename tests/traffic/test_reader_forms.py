"""The three forms of the record walk and the two forms of header decoding give equal results."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mlfabric.traffic import native
from mlfabric.traffic.capture import buffer as buffer_module
from mlfabric.traffic.capture import walk as walk_module
from mlfabric.traffic.capture.headers import LAYERS, Layer
from mlfabric.traffic.capture.reader import ReadOptions, read_packets
from mlfabric.traffic.capture.writer import Endpoints, write_pcap
from tests.traffic import capture_bytes as made


def both_forms(paths: list[Path], monkeypatch: pytest.MonkeyPatch, **options: object) -> list[object]:
    """(times, sizes, flows, table, facts, warnings) from NumPy alone and from the helper."""
    results: list[object] = []
    for switch in ("1", "0"):
        monkeypatch.setenv("MLFABRIC_NO_NATIVE", switch)
        trace = read_packets(paths, ReadOptions(**options))  # type: ignore[arg-type]
        table = trace.flows
        assert table is not None
        assert trace.flow is not None
        results.append(
            (
                trace.time_ns.tolist(), trace.size.tolist(), trace.flow.tolist(), table.keys.tolist(),
                table.packets.tolist(), table.bytes.tolist(), table.first_ns.tolist(), table.last_ns.tolist(),
                trace.origin,
            )
        )  # fmt: skip
    return results


headers = st.one_of(
    st.binary(min_size=0, max_size=120),
    st.tuples(
        st.sampled_from([0x0800, 0x86DD, 0x8100, 0x88A8, 0x0806]), st.binary(min_size=0, max_size=100)
    ).map(lambda pair: made.ethernet(pair[1], pair[0])),
    st.tuples(st.sampled_from([6, 17, 1, 132]), st.integers(0, 0xFFFF), st.integers(0, 60)).map(
        lambda parts: made.ethernet(made.ipv4(parts[0], parts[1]) + made.tcp(4791, 4791) + bytes(40))[
            : 34 + parts[2]
        ]
    ),
    st.tuples(st.sampled_from([0, 6, 17, 43, 44, 51, 60, 135]), st.binary(min_size=0, max_size=80)).map(
        lambda parts: made.ethernet(made.ipv6(parts[0]) + parts[1], 0x86DD)
    ),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(headers, st.integers(0, 70_000)), min_size=1, max_size=40),
    st.sampled_from([1, 0, 101, 113, 276, 147]),
    st.sampled_from(LAYERS),
)
def test_decoding_is_the_same_in_both_forms(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    frames: list[tuple[bytes, int]],
    link: int,
    layer: Layer,
) -> None:
    if native.library() is None and not native.switched_off():
        pytest.skip("no C compiler here, so there is no compiled helper to compare with")
    packets = [made.Packet(10**15 + index, data, length) for index, (data, length) in enumerate(frames)]
    path = tmp_path / "random.pcap"
    path.write_bytes(made.pcap(packets, magic=0xA1B23C4D, link=link))
    plain, compiled = both_forms([path], monkeypatch, layer=layer)
    assert plain == compiled


common = st.tuples(st.sampled_from([6, 17]), st.integers(1, 4), st.sampled_from([80, 4791, 5001])).map(
    lambda parts: made.ethernet(made.ipv4(parts[0], last=parts[1]) + made.tcp(40000, parts[2]) + bytes(40))
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(common | common | headers, min_size=1, max_size=60), st.sampled_from(LAYERS))
def test_common_frames_among_others_are_the_same_in_both_forms_over_many_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, frames: list[bytes], layer: Layer
) -> None:
    if native.library() is None and not native.switched_off():
        pytest.skip("no C compiler here, so there is no compiled helper to compare with")
    monkeypatch.setattr(buffer_module, "WINDOW_BYTES", 1024)
    packets = [made.Packet(10**15 + index, data, 1514) for index, data in enumerate(frames)]
    path = tmp_path / "common.pcap"
    path.write_bytes(made.pcap(packets, magic=0xA1B23C4D))
    plain, compiled = both_forms([path], monkeypatch, layer=layer)
    assert plain == compiled


def large(count: int, generator: np.random.Generator, snaplen: int = 96) -> bytes:
    """A capture long enough for many lanes, with odd record lengths, as bytes."""
    parts = [made.pcap([])]
    body = (made.ethernet(made.ipv4() + made.tcp()) + bytes(1500))[:1514]
    for index in range(count):
        cut = int(generator.choice([snaplen, snaplen, snaplen, 66, 78, 60]))
        second, micro = divmod(index * 37, 1_000_000)
        parts.append(struct.pack("<IIII", made.EPOCH_S + second, micro, cut, 1514) + body[:cut])
    return b"".join(parts)


def test_lanes_agree_with_the_walk_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "large.pcap"
    path.write_bytes(large(20_000, np.random.default_rng(1)))
    lanes: list[int] = []
    original = walk_module._advance_all

    def counted(starts: NDArray[np.int64], *rest: Any) -> NDArray[np.int64]:
        lanes.append(len(starts))
        return original(starts, *rest)

    monkeypatch.setattr(walk_module, "_advance_all", counted)
    plain, compiled = both_forms([path], monkeypatch)
    assert plain == compiled
    assert sum(lanes) > 100


def test_a_capture_carried_inside_a_capture_misleads_no_lane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Payloads that are themselves plausible records: guessed starts are wrong, the result is not.
    inner = b"".join(struct.pack("<IIII", made.EPOCH_S, 5, 32, 64) + bytes(32) for _ in range(30))
    parts = [made.pcap([])]
    for index in range(4000):
        data = made.frame(60) + inner[: 200 + 17 * (index % 40)]
        parts.append(struct.pack("<IIII", made.EPOCH_S, index, len(data), len(data)) + data)
    path = tmp_path / "nested.pcap"
    path.write_bytes(b"".join(parts))
    plain, compiled = both_forms([path], monkeypatch)
    assert plain == compiled
    assert len(plain[0]) == 4000  # type: ignore[index]


@pytest.mark.parametrize("window", [1 << 12, 1 << 17])
def test_small_windows_give_the_same_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: int
) -> None:
    path = tmp_path / "large.pcap"
    path.write_bytes(large(3_000, np.random.default_rng(2), 1514) + b"\x01\x02")
    expected = both_forms([path], monkeypatch)[0]
    original = buffer_module.SlidingBuffer.__init__

    def narrow(self: buffer_module.SlidingBuffer, source: object) -> None:
        original(self, source, window)  # type: ignore[arg-type]

    monkeypatch.setattr(buffer_module.SlidingBuffer, "__init__", narrow)
    plain, compiled = both_forms([path], monkeypatch)
    assert plain == compiled == expected


def test_large_pcapng_is_the_same_in_both_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(3)
    blocks = [made.section(), made.interface(resolution=9)]
    for index in range(20_000):
        cut = int(generator.choice([96, 96, 66, 60]))
        blocks.append(made.enhanced(made.EPOCH_S * 10**9 + index * 977, made.frame(cut)))
    path = tmp_path / "large.pcapng"
    path.write_bytes(b"".join(blocks))
    plain, compiled = both_forms([path], monkeypatch)
    assert plain == compiled
    assert len(plain[0]) == 20_000  # type: ignore[index]


def test_many_flows_grow_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 70_000
    flows = [Endpoints(f"10.{k >> 16}.{k >> 8 & 255}.{k & 255}", "10.9.9.9", 1, 2) for k in range(count)]
    path = tmp_path / "flows.pcap"
    numbers = np.arange(count)
    write_pcap(path, 10**18 + numbers * 1000, np.full(count, 100), numbers, flows)
    plain, compiled = both_forms([path], monkeypatch)
    assert plain == compiled
    assert plain[2] == list(range(count))  # type: ignore[index]


def test_without_a_compiler_numpy_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MLFABRIC_NO_NATIVE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", str(tmp_path / "no-such-compiler"))
    native._load.cache_clear()
    try:
        assert native.library() is None
        path = tmp_path / "c.pcap"
        path.write_bytes(made.pcap(made.plain()))
        assert len(read_packets([path], ReadOptions())) == 10
    finally:
        native._load.cache_clear()


def test_the_helper_is_built_once_into_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MLFABRIC_NO_NATIVE", raising=False)
    if native.library() is None:
        pytest.skip("no C compiler here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native._load.cache_clear()
    try:
        assert native.library() is not None
        built = list((tmp_path / "mlfabric").iterdir())
        assert [path.suffix for path in built] == [".so"]
        stamp = built[0].stat().st_mtime_ns
        native._load.cache_clear()
        assert native.library() is not None
        assert built[0].stat().st_mtime_ns == stamp
    finally:
        native._load.cache_clear()


@pytest.mark.parametrize("disorder", [0, 3, 5000])
@pytest.mark.parametrize("width", [None, np.uint16, np.uint32])
def test_sorting_nearby_is_a_stable_sort_or_gives_up_whole(disorder: int, width: Any) -> None:
    library = native.library()
    if library is None:
        pytest.skip("no C compiler here")
    generator = np.random.default_rng(disorder)
    times = np.sort(generator.integers(0, 3000, 4000)) - generator.integers(0, disorder + 1, 4000)
    size, flow = np.arange(4000, dtype=np.uint32), None if width is None else np.arange(4000).astype(width)
    expected = np.argsort(times, kind="stable")
    ordered = times.copy()
    done = native.sort_nearby(library, ordered, size, flow)
    assert done == (disorder < 5000)
    assert ordered.tolist() == times[size].tolist()
    assert flow is None or flow.tolist() == size.tolist()
    if done:
        assert size.tolist() == expected.tolist()
