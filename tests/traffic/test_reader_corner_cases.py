"""What real captures contain: each file here is small, legal or damaged in one way, and has one right
answer."""

from __future__ import annotations

import gzip
import lzma
import os
import struct
import threading
from pathlib import Path

import numpy as np
import pytest

from mlfabric.errors import FabricError
from mlfabric.traffic.capture.headers import Wanted
from mlfabric.traffic.capture.reader import ReadOptions
from mlfabric.traffic.flows import Selection
from mlfabric.traffic.reading import read
from mlfabric.traffic.trace import Trace
from tests.traffic import capture_bytes as made
from tests.traffic.conftest import ReadBytes


def is_right(trace: Trace, packets: int = 10) -> None:
    """Ten packets of 1514 bytes, a tenth of a second apart."""
    assert len(trace) == packets
    assert trace.total_bytes == packets * 1514
    assert trace.time_ns.tolist() == [index * 100_000_000 for index in range(packets)]


def said(trace: Trace, *words: str) -> bool:
    return any(all(word in sentence for word in words) for sentence in trace.origin.warnings)


def labels(trace: Trace) -> list[str]:
    assert trace.flows is not None
    return [trace.flows.label(number) for number in range(len(trace.flows))]


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("magic", [0xA1B2C3D4, 0xA1B23C4D, 0xA1B2CD34])
def test_every_magic_in_either_byte_order(read_bytes: ReadBytes, order: str, magic: int) -> None:
    trace = read_bytes(made.pcap(made.plain(), order, magic))
    is_right(trace)
    assert trace.origin_ns == made.EPOCH_S * 10**9
    assert labels(trace) == ["10.0.0.1:40000 > 10.0.0.9:5001 tcp"]


def test_frame_check_bits_in_the_link_type_are_masked(read_bytes: ReadBytes) -> None:
    trace = read_bytes(made.pcap(made.plain(), link=0x5000_0000 | 1))
    is_right(trace)
    assert trace.origin.links == ("Ethernet",)


@pytest.mark.parametrize("snaplen", [0, 10, 0xFFFFFFFF])
def test_the_header_snaplen_bounds_nothing(read_bytes: ReadBytes, snaplen: int) -> None:
    is_right(read_bytes(made.pcap(made.plain(), snaplen=snaplen)))


@pytest.mark.parametrize("claimed", [0, 50])
def test_an_original_length_below_the_captured_one_is_corrected(read_bytes: ReadBytes, claimed: int) -> None:
    packets = [made.Packet(each.time_ns, each.data, claimed) for each in made.plain()]
    trace = read_bytes(made.pcap(packets))
    assert len(trace) == 10
    assert trace.total_bytes == 960
    assert said(trace, "10 records claim fewer bytes than they hold")


@pytest.mark.parametrize("cut", [1, 50, 100, 105])
def test_a_cut_last_record_costs_only_itself(read_bytes: ReadBytes, cut: int) -> None:
    content = made.pcap(made.plain())
    trace = read_bytes(content[:-cut])
    is_right(trace, 9)
    assert trace.origin.damaged
    assert said(trace, "cut short at byte 1,032")


def test_a_corrupt_length_is_passed_over_and_named(read_bytes: ReadBytes) -> None:
    packets = made.plain()
    content = bytearray(made.pcap(packets))
    at = 24 + 4 * 112
    content[at + 8 : at + 12] = struct.pack("<I", 0x7FFFFFFF)
    trace = read_bytes(bytes(content))
    assert len(trace) == 9
    assert trace.total_bytes == 9 * 1514
    assert trace.origin.damaged
    assert said(trace, "record at byte 472 is damaged", "passed over up to byte 584")


def test_a_corrupt_length_with_nothing_good_after_it(read_bytes: ReadBytes) -> None:
    content = made.pcap(made.plain(5)) + struct.pack("<IIII", 1, 2, 0x7FFFFFFF, 3) + b"\xff" * 300
    trace = read_bytes(content)
    is_right(trace, 5)
    assert said(trace, "record at byte 584 is damaged and no good one follows")


@pytest.mark.parametrize(("order", "magic"), [("<", 0xA1B2C3D4), (">", 0xA1B23C4D)])
def test_two_files_run_together(read_bytes: ReadBytes, order: str, magic: int) -> None:
    packets = made.plain()
    trace = read_bytes(made.pcap(packets[:4]) + made.pcap(packets[4:], order, magic))
    is_right(trace)
    assert said(trace, "a second capture file begins at byte 472")
    assert not trace.origin.damaged


def test_a_file_of_zero_bytes_is_refused_in_one_sentence(read_bytes: ReadBytes) -> None:
    with pytest.raises(FabricError, match="is empty"):
        read_bytes(b"")


def test_a_header_alone_holds_no_packets(read_bytes: ReadBytes) -> None:
    trace = read_bytes(made.pcap([]))
    assert len(trace) == 0
    with pytest.raises(FabricError, match="no packet to analyse"):
        trace.needs_packets()


def test_a_cut_header_and_a_foreign_file_are_refused(read_bytes: ReadBytes) -> None:
    with pytest.raises(FabricError, match="header is cut short"):
        read_bytes(made.pcap([])[:20])
    with pytest.raises(FabricError, match="is not a capture: it starts with 68 65 6c 6c"):
        read_bytes(b"hello, world, this is text")


def test_backward_stamps_are_counted_and_sorted(read_bytes: ReadBytes) -> None:
    packets = made.plain()
    packets[3], packets[4] = packets[4], packets[3]
    trace = read_bytes(made.pcap(packets))
    is_right(trace)
    assert trace.origin.facts["backward time steps"] == 1
    assert said(trace, "1 time stamps go backwards", "100,000.000 us")


def test_microseconds_beyond_a_second_carry(read_bytes: ReadBytes) -> None:
    head = made.pcap([])
    data = made.frame()
    records = b"".join(
        struct.pack("<IIII", made.EPOCH_S - 1, 1_000_000 + index * 100_000, 96, 1514) + data
        for index in range(10)
    )
    trace = read_bytes(head + records)
    is_right(trace)
    assert trace.origin_ns == made.EPOCH_S * 10**9


def pcapng(*blocks: bytes, order: str = "<") -> bytes:
    return made.section(order) + b"".join(blocks)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize(("resolution", "units"), [(None, 10**6), (9, 10**9), (3, 10**3), (0x80 | 20, 2**20)])
def test_pcapng_resolutions(read_bytes: ReadBytes, order: str, resolution: int | None, units: int) -> None:
    stamps = made.stamps(units)
    packets = [made.enhanced(stamp, made.frame(), order=order) for stamp in stamps]
    trace = read_bytes(pcapng(made.interface(resolution=resolution, order=order), *packets, order=order))
    assert len(trace) == 10
    assert trace.total_bytes == 15140
    exact = [(stamp - stamps[0]) * 10**9 / units for stamp in stamps]
    assert np.abs(trace.time_ns - exact).max() <= 1


def test_pcapng_picoseconds(read_bytes: ReadBytes) -> None:
    # 64 bits of picoseconds last 213 days, so such files count from an offset.
    packets = [made.enhanced(stamp + 600, made.frame()) for stamp in made.stamps(10**12, 1000)]
    trace = read_bytes(pcapng(made.interface(resolution=12, offset_s=made.EPOCH_S), *packets))
    is_right(trace)
    assert trace.origin_ns == (made.EPOCH_S + 1000) * 10**9 + 1


def test_pcapng_interfaces_with_different_clocks(read_bytes: ReadBytes) -> None:
    coarse, fine = made.stamps(10**6), made.stamps(10**9)
    packets = [
        made.enhanced(coarse[index], made.frame(), number=0)
        if index % 2
        else made.enhanced(fine[index], made.frame(), number=1)
        for index in range(10)
    ]
    content = pcapng(made.interface(), made.interface(resolution=9), *packets)
    is_right(read_bytes(content))
    one = read_bytes(content, interface=1)
    assert one.time_ns.tolist() == [index * 200_000_000 for index in range(5)]


def test_pcapng_interfaces_with_different_link_types(read_bytes: ReadBytes) -> None:
    raw = (made.ipv4() + made.tcp() + bytes(200))[:96]
    packets = [
        made.enhanced(stamp, made.frame() if index % 2 else raw, number=index % 2)
        for index, stamp in enumerate(made.stamps(10**6))
    ]
    trace = read_bytes(pcapng(made.interface(link=101), made.interface(), *packets))
    is_right(trace)
    assert labels(trace) == ["10.0.0.1:40000 > 10.0.0.9:5001 tcp"]


def test_pcapng_time_offset_is_added(read_bytes: ReadBytes) -> None:
    packets = [made.enhanced(stamp, made.frame()) for stamp in made.stamps(10**6, 5)]
    trace = read_bytes(pcapng(made.interface(offset_s=made.EPOCH_S), *packets))
    is_right(trace)
    assert trace.origin_ns == (made.EPOCH_S + 5) * 10**9


def test_pcapng_sections_in_two_byte_orders(read_bytes: ReadBytes) -> None:
    stamps = made.stamps(10**6)
    little = pcapng(made.interface(), *(made.enhanced(stamp, made.frame()) for stamp in stamps[:5]))
    big = pcapng(
        made.interface(order=">"),
        *(made.enhanced(stamp, made.frame(), order=">") for stamp in stamps[5:]),
        order=">",
    )
    is_right(read_bytes(little + big))


def test_simple_packets_are_counted_apart(read_bytes: ReadBytes) -> None:
    packets = [made.enhanced(stamp, made.frame()) for stamp in made.stamps(10**6)]
    trace = read_bytes(
        pcapng(made.interface(), made.simple(made.frame()), *packets, made.simple(made.frame()))
    )
    is_right(trace)
    assert said(trace, "2 packets (3,028 bytes) carry no time stamp")


def test_obsolete_packet_blocks_are_read(read_bytes: ReadBytes) -> None:
    is_right(
        read_bytes(pcapng(made.interface(), *(made.old_packet(s, made.frame()) for s in made.stamps(10**6))))
    )


def test_unknown_blocks_and_options_are_skipped(read_bytes: ReadBytes) -> None:
    trailing = made.option(1, b"a comment") + made.option(0, b"")
    packets = [made.enhanced(stamp, made.frame(), options=trailing) for stamp in made.stamps(10**6)]
    custom = made.block(0x00000BAD, struct.pack("<I", 4711) + b"whatever")
    unheard = made.block(0x7ABCDEF0, b"x" * 40)
    is_right(read_bytes(pcapng(made.interface(), custom, *packets[:5], unheard, *packets[5:])))


def test_truncated_and_damaged_pcapng_keep_what_is_good(read_bytes: ReadBytes) -> None:
    content = pcapng(made.interface(), *(made.enhanced(s, made.frame()) for s in made.stamps(10**6)))
    trace = read_bytes(content[:-30])
    is_right(trace, 9)
    assert said(trace, "cut short at byte")
    size = len(made.enhanced(0, made.frame()))
    broken = bytearray(content)
    broken[-2 * size + 4 : -2 * size + 8] = struct.pack("<I", 7)
    trace = read_bytes(bytes(broken))
    is_right(trace, 8)
    assert trace.origin.damaged
    assert said(trace, "damaged", f"{len(content) - 2 * size:,}")


@pytest.mark.parametrize("tags", [(0x8100,), (0x88A8, 0x8100), (0x9100, 0x8100)])
def test_vlan_tags_are_walked(read_bytes: ReadBytes, tags: tuple[int, ...]) -> None:
    data = made.mac() + b"".join(struct.pack(">HH", tag, 5) for tag in tags)
    data += struct.pack(">H", 0x0800) + made.ipv4() + made.tcp()
    trace = read_bytes(made.pcap(made.each_with((data + bytes(99))[:96])))
    is_right(trace)
    assert labels(trace) == ["10.0.0.1:40000 > 10.0.0.9:5001 tcp"]


def test_ipv6_cut_at_96_bytes_counts_whole(read_bytes: ReadBytes) -> None:
    data = (made.ethernet(made.ipv6() + made.tcp(), 0x86DD) + bytes(99))[:96]
    for layer, expected in (("l2", 1514), ("ip", 1500), ("payload", 1440), ("wire", 1538)):
        trace = read_bytes(made.pcap(made.each_with(data)), layer=layer)
        assert trace.total_bytes == 10 * expected
        assert labels(trace) == ["[fd00::1]:40000 > [fd00::9]:5001 tcp"]


def test_ipv6_extension_headers_and_fragments(read_bytes: ReadBytes) -> None:
    hop = struct.pack(">BBHI", 60, 0, 0, 0)
    options = struct.pack(">BBHI", 44, 0, 0, 0)
    first = struct.pack(">BBHI", 6, 0, 1, 9)
    later = struct.pack(">BBHI", 6, 0, 8 << 3, 9)
    whole = made.ethernet(made.ipv6(0) + hop + options + first + made.tcp(), 0x86DD)
    piece = made.ethernet(made.ipv6(0) + hop + options + later + bytes(20), 0x86DD)
    trace = read_bytes(made.pcap(made.each_with(whole)[:5] + made.each_with(piece)[5:]))
    is_right(trace)
    assert labels(trace) == ["[fd00::1]:40000 > [fd00::9]:5001 tcp", "fd00::1 > fd00::9 tcp"]
    assert trace.origin.facts["later fragments (no ports)"] == 5


def test_later_ipv4_fragments_have_no_ports_but_count(read_bytes: ReadBytes) -> None:
    first = made.ethernet(made.ipv4(17, fragment=0x2000) + made.udp(1000, 2000) + bytes(40))
    later = made.ethernet(made.ipv4(17, fragment=185) + b"\xde\xad\xbe\xef" + bytes(44))
    trace = read_bytes(made.pcap(made.each_with(first)[:5] + made.each_with(later)[5:]))
    is_right(trace)
    assert labels(trace) == ["10.0.0.1:1000 > 10.0.0.9:2000 udp", "10.0.0.1 > 10.0.0.9 udp"]


def test_roce_flows_are_keyed_by_queue_pair(read_bytes: ReadBytes) -> None:
    def roce(queue_pair: int, opcode: int) -> bytes:
        transport = struct.pack(">BBHII", opcode, 0, 0xFFFF, queue_pair, 1)
        return made.ethernet(made.ipv4(17) + made.udp(49152, 4791) + transport + bytes(40))

    packets = made.each_with(roce(0x11, 0x0A))[:4] + made.each_with(roce(0x12, 0x0A))[4:7]
    packets += made.each_with(roce(0x11, 0x11))[7:9] + made.each_with(roce(0x11, 0x81))[9:]
    trace = read_bytes(made.pcap(packets))
    is_right(trace)
    assert labels(trace) == [
        "10.0.0.1:49152 > 10.0.0.9:4791 roce qp 0x11",
        "10.0.0.1:49152 > 10.0.0.9:4791 roce qp 0x12",
    ]
    facts = trace.origin.facts
    assert (facts["RoCE data packets"], facts["RoCE acknowledgements"]) == (7, 2)
    assert facts["RoCE congestion notifications"] == 1


def cooked(direction: int, version: int, index: int = 3) -> bytes:
    network = made.ipv4(total=1498) + made.tcp()
    if version == 1:
        header = struct.pack(">HHH8sH", direction, 1, 6, bytes(8), 0x0800)
    else:
        header = struct.pack(">HHIHBB8s", 0x0800, 0, index, 1, direction, 6, bytes(8))
    return (header + network + bytes(99))[:96]


@pytest.mark.parametrize(("version", "link"), [(1, 113), (2, 276)])
def test_cooked_captures(read_bytes: ReadBytes, version: int, link: int) -> None:
    trace = read_bytes(made.pcap(made.each_with(cooked(0, version)), link=link))
    is_right(trace)
    assert labels(trace) == ["10.0.0.1:40000 > 10.0.0.9:5001 tcp"]
    header = 16 if version == 1 else 20
    wire = read_bytes(made.pcap(made.each_with(cooked(0, version)), link=link), layer="wire")
    assert wire.total_bytes == 10 * (1514 - header + 14 + 24)


def test_cooked_direction_and_interface_prevent_double_counting(read_bytes: ReadBytes) -> None:
    twice = []
    for packet in made.plain():
        twice.append(made.Packet(packet.time_ns, cooked(4, 2, 3), 1514))
        twice.append(made.Packet(packet.time_ns, cooked(0, 2, 4), 1514))
    content = made.pcap(twice, link=276)
    both = read_bytes(content)
    assert len(both) == 20
    assert said(both, "several interfaces")
    is_right(read_bytes(content, packet_direction=Wanted(direction="out")))
    is_right(read_bytes(content, packet_direction=Wanted(direction="in")))
    is_right(read_bytes(content, packet_direction=Wanted(interface=4)))


@pytest.mark.parametrize("link", [101, 12, 14, 228])
def test_raw_ip(read_bytes: ReadBytes, link: int) -> None:
    data = (made.ipv4() + made.tcp() + bytes(99))[:96]
    trace = read_bytes(made.pcap(made.each_with(data), link=link))
    is_right(trace)
    assert labels(trace) == ["10.0.0.1:40000 > 10.0.0.9:5001 tcp"]


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("link", [0, 108])
def test_loopback_in_either_byte_order(read_bytes: ReadBytes, order: str, link: int) -> None:
    data = (struct.pack(order + "I", 2) + made.ipv4() + made.tcp() + bytes(99))[:96]
    trace = read_bytes(made.pcap(made.each_with(data), link=link))
    is_right(trace)
    assert labels(trace) == ["10.0.0.1:40000 > 10.0.0.9:5001 tcp"]


def test_an_unknown_link_type_still_counts(read_bytes: ReadBytes) -> None:
    trace = read_bytes(made.pcap(made.plain(), link=147))
    is_right(trace)
    assert said(trace, "link type 147 is not decoded")


def test_super_frames_are_flagged(read_bytes: ReadBytes) -> None:
    data = (made.ethernet(made.ipv4(total=0) + made.tcp()) + bytes(99))[:96]
    trace = read_bytes(made.pcap(made.each_with(data, 65_226)), layer="ip")
    assert trace.total_bytes == 10 * (65_226 - 14)
    assert trace.origin.facts["frames whose IP length is 0"] == 10
    assert said(trace, "10 frames exceed an MTU of 1500", "65,226")
    jumbo = read_bytes(made.pcap(made.each_with(made.frame(), 9014)), mtu=9000)
    assert not jumbo.origin.warnings


@pytest.mark.parametrize("ending", ["gz", "xz", "zst", "bz2"])
def test_compressed_captures(read_bytes: ReadBytes, ending: str) -> None:
    content = made.pcap(made.plain())
    if ending == "gz":
        packed = gzip.compress(content)
    elif ending == "xz":
        packed = lzma.compress(content)
    elif ending == "bz2":
        packed = __import__("bz2").compress(content)
    else:
        packed = pytest.importorskip("zstandard").ZstdCompressor().compress(content)
    is_right(read_bytes(packed, f"anything.{ending}"))


def test_a_cut_gzip_file_gives_what_it_holds(read_bytes: ReadBytes) -> None:
    content = made.pcap(made.plain())
    packed = gzip.compress(content, 0)
    trace = read_bytes(packed[:-150])
    assert 0 < len(trace) < 10
    assert trace.origin.damaged
    assert said(trace, "breaks off")


def test_lz4_is_named_not_supported(read_bytes: ReadBytes) -> None:
    with pytest.raises(FabricError, match="lz4"):
        read_bytes(b"\x04\x22\x4d\x18" + bytes(100))


def test_a_pipe_reads_like_a_file(tmp_path: Path, form: str) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    content = gzip.compress(made.pcap(made.plain()))
    writer = threading.Thread(target=lambda: path.write_bytes(content))
    writer.start()
    trace = read(path)
    writer.join()
    is_right(trace)


def test_several_files_merge_by_time(tmp_path: Path, form: str) -> None:
    packets = made.plain()
    one, two = tmp_path / "one.pcap", tmp_path / "two.pcapng"
    one.write_bytes(made.pcap(packets[1::2]))
    stamps = made.stamps(10**6)
    two.write_bytes(pcapng(made.interface(), *(made.enhanced(s, made.frame()) for s in stamps[0::2])))
    trace = read([one, two])
    is_right(trace)
    assert trace.origin.format == "pcap+pcapng"
    assert [each.split(" and ")[0] for each in trace.origin.warnings] == ["these captures overlap in time"]


def test_frames_that_are_not_ip_count(read_bytes: ReadBytes) -> None:
    trace = read_bytes(made.pcap(made.each_with(made.ethernet(bytes(50), 0x0806), 64)))
    assert trace.total_bytes == 640
    assert labels(trace) == ["not-ip 0x0806"]
    assert len(read_bytes(made.pcap(made.each_with(made.ethernet(bytes(50), 0x0806), 64)), layer="ip")) == 0


def test_selection_by_host_port_net_and_direction(read_bytes: ReadBytes) -> None:
    there = made.each_with((made.ethernet(made.ipv4() + made.tcp()) + bytes(99))[:96])
    back = made.each_with((made.ethernet(made.ipv4(17, last=2) + made.udp(7, 53)) + bytes(99))[:96])
    content = made.pcap(there[:6] + back[6:])

    def count(**fields: object) -> int:
        return len(read_bytes(content, selection=Selection(**fields)))  # type: ignore[arg-type]

    assert count(hosts=("10.0.0.1",)) == 6
    assert count(hosts=("10.0.0.9",)) == 10
    assert count(hosts=("10.0.0.9",), direction="out") == 0
    assert count(hosts=("10.0.0.9",), direction="in") == 10
    assert count(nets=("10.0.0.2/31",)) == 4
    assert count(ports=(53,)) == 4
    assert count(protocol="tcp") == 6
    with pytest.raises(FabricError, match="not a protocol"):
        count(protocol="quic")
    with pytest.raises(FabricError, match="write an address"):
        count(hosts=("ten",))


def test_csv_times_are_integers_not_floats(read_bytes: ReadBytes) -> None:
    rows = "time_s,bytes,flow\n1700000000.000000001,100,a\n"
    rows += "1700000000.000000003,200,b\n1700000000.1,5000000000,a\n"
    trace = read_bytes(rows.encode(), "table.csv")
    assert trace.time_ns.tolist() == [0, 2, 99_999_999]
    assert trace.total_bytes == 5_000_000_300
    assert labels(trace) == ["a", "b"]
    with pytest.raises(FabricError, match=r"line 2: 'soon' is not a time"):
        read_bytes(b"time_s,bytes\nsoon,1\n", "table.csv")
    with pytest.raises(FabricError, match="it needs time_s"):
        read_bytes(b"when,bytes\n1,1\n", "table.csv")


def test_parquet_times(tmp_path: Path, form: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    from decimal import Decimal

    times = [Decimal("1700000000.000000001"), Decimal("1700000000.000000003")]
    path = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.table({"time_s": times, "bytes": [1, 2], "flow": ["x", "y"]}), path)
    trace = read(path)
    assert trace.time_ns.tolist() == [0, 2]
    assert labels(trace) == ["x", "y"]
    with pytest.raises(FabricError, match="--layer does not apply"):
        read(path, ReadOptions(layer="ip"))
