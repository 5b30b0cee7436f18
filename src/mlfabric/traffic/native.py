"""The optional compiled helper: two C files, built on demand into the user's cache, loaded through ctypes.

Everything it does has a NumPy form that gives equal results; without a compiler, or with
MLFABRIC_NO_NATIVE=1, those are used. Building is quiet, done once per version of the source (a failure is
remembered too), and safe when processes race: each compiles to a name of its own and renames it into place.
"""

from __future__ import annotations

import ctypes
import os
import sys
import zlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from mlfabric.traffic.capture.frames import Frames
    from mlfabric.traffic.capture.pcap import PcapHeader
    from mlfabric.traffic.capture.walk import Chain
    from mlfabric.traffic.flows import FlowIndex

_FLAGS: Final = ("-O3", "-std=gnu99", "-ffp-contract=off", "-fPIC", "-shared", "-w")
_SOURCES: Final = ("native_types.h", "native_reading.c", "native_metrics.c")
HISTOGRAM_BITS: Final = 14
_SWAPPED_ORDER: Final = ">" if sys.byteorder == "little" else "<"


def switched_off() -> bool:
    return os.environ.get("MLFABRIC_NO_NATIVE", "") not in ("", "0")


def library() -> ctypes.CDLL | None:
    """The loaded helper, or None: the caller then uses NumPy."""
    return None if switched_off() else _load()


def cache_directory() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "mlfabric"


@cache
def _load() -> ctypes.CDLL | None:
    try:
        sources = {name: Path(__file__).with_name(name).read_bytes() for name in _SOURCES}
        made_of = b"".join(sources.values()) + repr((_FLAGS, os.uname().machine)).encode()
        tag = f"{zlib.crc32(made_of):08x}{zlib.adler32(made_of):08x}"
        built = cache_directory() / f"native-{tag}.so"
        if not _ours(built):
            _build(sources, built)
        return _declared(ctypes.CDLL(str(built)))
    except (OSError, RuntimeError, AttributeError):
        return None


def _ours(built: Path) -> bool:
    """Loading code is trusting it: only a file that no one but this user (or root) can have written counts,
    in a directory of the same kind."""
    for path in (built, built.parent):
        try:
            status = path.lstat()
        except FileNotFoundError:
            return False
        if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o022:
            raise RuntimeError(f"{path} may have been written by someone else")
    return True


def _build(sources: dict[str, bytes], built: Path) -> None:
    import subprocess
    import tempfile

    built.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    failed = built.with_suffix(".failed")
    if failed.exists():
        raise RuntimeError("the helper did not compile here before")
    with tempfile.TemporaryDirectory(dir=built.parent) as scratch:
        for name, source in sources.items():
            (Path(scratch) / name).write_bytes(source)
        product = Path(scratch) / "native.so"
        code = [str(Path(scratch) / name) for name in sources if name.endswith(".c")]
        command = [os.environ.get("CC", "cc"), *_FLAGS, "-o", str(product), *code]
        try:
            subprocess.run(command, check=True, timeout=60, stdin=subprocess.DEVNULL, capture_output=True)
        except subprocess.SubprocessError as error:
            failed.touch()
            raise RuntimeError("the helper does not compile here") from error
        product.chmod(0o600)
        os.replace(product, built)


def _declared(loaded: ctypes.CDLL) -> ctypes.CDLL:
    whole, small, pointer = ctypes.c_int64, ctypes.c_int, ctypes.c_void_p
    loaded.chain_walk.restype = whole
    loaded.chain_walk.argtypes = [pointer, whole, whole, small, *[whole] * 5, pointer, whole, pointer]
    loaded.pcap_records.restype = whole
    loaded.pcap_records.argtypes = [
        pointer,
        whole,
        whole,
        small,
        *[whole] * 3,
        *[pointer] * 4,
        whole,
        pointer,
    ]
    loaded.decode_frames.restype = whole
    loaded.decode_frames.argtypes = [
        *[pointer] * 5, ctypes.c_uint32, pointer, whole, whole, small, whole, small, pointer, pointer, whole,
        pointer, whole, *[pointer] * 8,
    ]  # fmt: skip
    loaded.fill_slots.restype = None
    loaded.fill_slots.argtypes = [pointer, whole, pointer, whole]
    loaded.window_sweep.restype = None
    loaded.window_sweep.argtypes = [pointer, pointer, whole, whole, pointer, small, pointer, small, pointer]
    loaded.window_maximum.restype = whole
    loaded.window_maximum.argtypes = [pointer, whole, whole, *[pointer] * 3, whole, *[pointer] * 2]
    loaded.binned_maxima.restype = None
    loaded.binned_maxima.argtypes = [pointer, pointer, whole, whole, *[pointer] * 3]
    loaded.gap_classes.restype = None
    loaded.gap_classes.argtypes = [pointer, whole, small, pointer]
    loaded.busiest_stretches.restype = None
    loaded.busiest_stretches.argtypes = [
        pointer, whole, *[pointer] * 4, whole, whole, pointer, pointer, whole, whole, *[pointer] * 3,
    ]  # fmt: skip
    loaded.sort_nearby.restype = small
    loaded.sort_nearby.argtypes = [pointer, pointer, pointer, small, whole]
    number = ctypes.c_double
    loaded.drop_tail.restype = None
    loaded.drop_tail.argtypes = [pointer, pointer, whole, number, number, number, whole, whole, pointer]
    return loaded


def _swapped(order: str) -> int:
    return int(order == _SWAPPED_ORDER)


def walk(
    loaded: ctypes.CDLL, data: NDArray[np.uint8], start: int, end: int, chain: Chain
) -> tuple[NDArray[np.int64], int, bool]:
    """What `capture.walk.walk_python` returns, field by field."""
    room = (end - start) // max(chain.base, chain.least) + 1
    offsets = np.empty(room, np.int64)
    stop = np.zeros(2, np.int64)
    count = loaded.chain_walk(
        data.ctypes.data, start, end, _swapped(chain.order), chain.field, chain.base, chain.least, chain.most,
        chain.multiple, offsets.ctypes.data, room, stop.ctypes.data,
    )  # fmt: skip
    return offsets[:count].copy(), int(stop[0]), bool(stop[1])


def pcap_records(
    loaded: ctypes.CDLL, data: NDArray[np.uint8], start: int, end: int, header: PcapHeader
) -> tuple[Any, Any, Any, Any, int, bool]:
    """Offsets of the frames, times, captured and original lengths; where they end; whether that is damage."""
    room = (end - start) // header.record_bytes + 1
    offset, time_ns = np.empty(room, np.int64), np.empty(room, np.int64)
    captured, length = np.empty(room, np.uint32), np.empty(room, np.uint32)
    stop = np.zeros(2, np.int64)
    count = loaded.pcap_records(
        data.ctypes.data, start, end, _swapped(header.order), header.record_bytes, header.most_captured,
        header.fraction_ns, offset.ctypes.data, time_ns.ctypes.data, captured.ctypes.data, length.ctypes.data,
        room, stop.ctypes.data,
    )  # fmt: skip
    return offset[:count], time_ns[:count], captured[:count], length[:count], int(stop[0]), bool(stop[1])


def decode_frames(
    loaded: ctypes.CDLL,
    frames: Frames,
    index: FlowIndex,
    layer: int,
    interface: int | None,
    direction: int,
    statistics: NDArray[np.int64],
    seen: NDArray[np.int64],
) -> tuple[NDArray[np.int32], NDArray[np.uint32]]:
    """Flow number and layer size of each frame; totals are added to `index`."""
    count = len(frames)
    flow, size = np.empty(count, np.int32), np.empty(count, np.uint32)
    link = frames.link if isinstance(frames.link, int) else 0
    links = None if isinstance(frames.link, int) else np.ascontiguousarray(frames.link).ctypes.data
    columns = [
        np.ascontiguousarray(column)
        for column in (frames.offset, frames.captured, frames.length, frames.time_ns)
    ]
    known = np.array([index.count], np.int64)
    done = 0
    while True:
        done = loaded.decode_frames(
            frames.data.ctypes.data, *(column.ctypes.data for column in columns), link, links, done, count,
            layer, -1 if interface is None else interface, direction, index.keys.ctypes.data,
            known.ctypes.data, len(index.keys), index.slots.ctypes.data, len(index.slots), flow.ctypes.data,
            size.ctypes.data, index.packets.ctypes.data, index.bytes.ctypes.data,
            index.first_ns.ctypes.data, index.last_ns.ctypes.data, statistics.ctypes.data, seen.ctypes.data,
        )  # fmt: skip
        index.count = int(known[0])
        if done == count:
            return flow, size
        index.grow()
        loaded.fill_slots(index.keys.ctypes.data, index.count, index.slots.ctypes.data, len(index.slots))


def window_sweep(
    loaded: ctypes.CDLL,
    time_ns: NDArray[np.int64],
    size: NDArray[np.uint32],
    tau_ns: int,
    prefixes: NDArray[np.int64],
    shift: int,
    with_moments: bool,
) -> tuple[NDArray[np.int64], NDArray[np.float64] | None]:
    """Time spent at each value, and the four integrals where asked for."""
    histogram = np.zeros((len(prefixes), 1 << HISTOGRAM_BITS), np.int64)
    moments = np.zeros(4) if with_moments else None
    loaded.window_sweep(
        time_ns.ctypes.data, size.ctypes.data, len(time_ns), tau_ns,
        None if moments is None else moments.ctypes.data, len(prefixes), prefixes.ctypes.data, shift,
        histogram.ctypes.data,
    )  # fmt: skip
    return histogram, moments


def window_maximum(
    loaded: ctypes.CDLL,
    time_ns: NDArray[np.int64],
    sums: tuple[NDArray[Any] | None, ...],
    largest: int,
    tau_ns: int,
) -> tuple[int, int]:
    """Most bytes in any closed window that starts with a packet, and the first such packet. `sums`: running
    bytes in full, or the sizes and their sums at every 64th packet; no packet exceeds `largest`."""
    where = np.zeros(1, np.int64)
    reach = np.empty(len(time_ns) // 64 + 1, np.int64)
    best = loaded.window_maximum(
        time_ns.ctypes.data, len(time_ns), tau_ns, *_addresses(sums), largest, reach.ctypes.data,
        where.ctypes.data,
    )  # fmt: skip
    return int(best), int(where[0])


def _addresses(columns: Sequence[NDArray[Any] | None]) -> list[int | None]:
    return [None if column is None else column.ctypes.data for column in columns]


def binned_maxima(
    loaded: ctypes.CDLL, time_ns: NDArray[np.int64], size: NDArray[np.uint32], taus_ns: Sequence[int]
) -> list[int]:
    """The fullest aligned bin of each length; all lengths are multiples of the first."""
    taus, most = np.array(taus_ns, np.int64), np.empty(len(taus_ns), np.int64)
    room = np.empty((len(taus_ns), 4), np.int64)
    loaded.binned_maxima(
        time_ns.ctypes.data, size.ctypes.data, len(time_ns), len(taus), taus.ctypes.data, room.ctypes.data,
        most.ctypes.data,
    )  # fmt: skip
    return [int(each) for each in most]


def gap_classes(
    loaded: ctypes.CDLL, time_ns: NDArray[np.int64], shift: int, counts: NDArray[np.int64]
) -> None:
    """Counts the gaps of each class: their float form without its lowest bits."""
    loaded.gap_classes(time_ns.ctypes.data, len(time_ns), shift, counts.ctypes.data)


def busiest_stretches(
    loaded: ctypes.CDLL,
    time_ns: NDArray[np.int64],
    sums: tuple[NDArray[Any] | None, ...],
    rates: NDArray[np.float64],
    first: NDArray[np.int64],
    fine: Sequence[NDArray[np.int64]],
    together: int,
    coarse: Sequence[NDArray[np.int64]],
) -> NDArray[np.int64]:
    """First and last packet of the busiest stretch at each rate (bytes per nanosecond). `fine` and `coarse`:
    first and last time, bytes before and after, of every block."""
    blocks, outer = len(first), len(coarse[0])
    marks = np.empty(outer + blocks, np.uint8)
    found = np.zeros((len(rates), 2), np.int64)
    loaded.busiest_stretches(
        time_ns.ctypes.data, len(time_ns), *_addresses(sums), rates.ctypes.data, len(rates), blocks,
        first.ctypes.data, (ctypes.c_void_p * 4)(*_addresses(fine)), outer, together,
        (ctypes.c_void_p * 4)(*_addresses(coarse)), marks.ctypes.data, found.ctypes.data,
    )  # fmt: skip
    return found


def drop_tail(
    loaded: ctypes.CDLL,
    time_ns: NDArray[np.int64],
    size: NDArray[np.int64],
    rate: float,
    room: float,
    mark: float,
    from_ns: int,
    until_ns: int,
) -> tuple[float, float, float, float]:
    """Arrived and lost bytes, the largest queue, and the time it was above the mark."""
    times, sizes = np.ascontiguousarray(time_ns), np.ascontiguousarray(size, np.int64)
    out = np.zeros(4)
    loaded.drop_tail(
        times.ctypes.data, sizes.ctypes.data, len(times), rate, room, mark, from_ns, until_ns, out.ctypes.data
    )
    arrived, lost, most, above = out.tolist()
    return arrived, lost, most, above


def sort_nearby(
    loaded: ctypes.CDLL, time_ns: NDArray[np.int64], size: NDArray[np.uint32], flow: NDArray[Any] | None
) -> bool:
    """Sorts by time in place, stably, where packets are near their place; False where that would take long,
    with the columns still in step."""
    width = 0 if flow is None else flow.dtype.itemsize
    address = None if flow is None else flow.ctypes.data
    return bool(loaded.sort_nearby(time_ns.ctypes.data, size.ctypes.data, address, width, len(time_ns)))
