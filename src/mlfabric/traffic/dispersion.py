"""How window contents spread when the window's start is uniform in time: percentiles, IDC, CV.

W(x), the bytes in [x, x + tau], changes only at the 2n points t_i and t_i - tau; the sweep over them is
exact. x runs over the starts whose window lies inside the trace. Percentiles are found by digits, highest
first, so nothing as long as the sweep is ever sorted. The compiled form gives equal percentiles and the
same moments to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from mlfabric.traffic import native
from mlfabric.traffic.trace import Trace

_BITS: Final = native.HISTOGRAM_BITS
_PIECE: Final = 1 << 16  # packets whose columns stay in the processor's cache
DEFAULT_QUANTILES: Final = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class Spread:
    """Statistics of W(x) for x uniform in time, at one window length."""

    quantile_bytes: tuple[int, ...]  # in the order asked for
    mean_bytes: float
    mean_packets: float
    idc: float | None  # variance to mean of packet counts
    idc_bytes: float | None  # variance to mean of bytes
    cv: float | None  # standard deviation to mean of bytes


def spread(
    trace: Trace,
    tau_ns: int,
    quantiles: Sequence[float] = DEFAULT_QUANTILES,
    most_bytes: int | None = None,
) -> Spread | None:
    """None where no window of this length lies inside the trace. `most_bytes`, a bound on what a window holds
    (the envelope), saves a pass."""
    if not len(trace) or tau_ns > trace.span_ns:
        return None
    if tau_ns == trace.span_ns:
        total, packets = trace.total_bytes, len(trace)
        return Spread((total,) * len(quantiles), total, packets, 0.0, 0.0, 0.0)
    library = native.library()
    sweep: _Sweep
    if library is not None and trace.size.dtype == np.uint32:
        sweep = _CompiledSweep(trace, tau_ns, library)
    else:
        sweep = _NumpySweep(trace, tau_ns)
    return _summarised(sweep, trace.span_ns - tau_ns, most_bytes or trace.total_bytes, quantiles)


class _Sweep:
    """Time spent at each value of W, by digits; and integrals of W, W^2, N, N^2."""

    def histogram(
        self, prefixes: NDArray[np.int64], shift: int, with_moments: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.float64] | None]:
        raise NotImplementedError


class _CompiledSweep(_Sweep):
    def __init__(self, trace: Trace, tau_ns: int, library: Any) -> None:
        self._columns = np.ascontiguousarray(trace.time_ns), np.ascontiguousarray(trace.size)
        self._tau_ns, self._library = tau_ns, library

    def histogram(
        self, prefixes: NDArray[np.int64], shift: int, with_moments: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.float64] | None]:
        return native.window_sweep(self._library, *self._columns, self._tau_ns, prefixes, shift, with_moments)


class _NumpySweep(_Sweep):
    def __init__(self, trace: Trace, tau_ns: int) -> None:
        self._trace, self._tau_ns = trace, tau_ns

    def histogram(
        self, prefixes: NDArray[np.int64], shift: int, with_moments: bool
    ) -> tuple[NDArray[np.int64], NDArray[np.float64] | None]:
        table = np.zeros((len(prefixes), 1 << _BITS), np.int64)
        moments = np.zeros(4) if with_moments else None
        for lasting, held, packets in window_contents(self._trace, self._tau_ns, with_moments):
            top = held >> shift
            for row, prefix in enumerate(prefixes):
                mine = (top >> _BITS) == prefix
                digits, times = (top, lasting) if mine.all() else (top[mine], lasting[mine])
                counted = np.bincount(digits & ((1 << _BITS) - 1), weights=times, minlength=1 << _BITS)
                table[row] += counted.astype(np.int64)
            if moments is not None:
                time, size, count = (part.astype(np.float64) for part in (lasting, held, packets))
                by_size, by_count = time * size, time * count
                moments += (by_size.sum(), by_size @ size, by_count.sum(), by_count @ count)
        return table, moments


def window_contents(
    trace: Trace, tau_ns: int, with_packets: bool = True
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]]:
    """(how long, bytes, packets) of every stretch of window starts over which the content is constant; some
    last no time at all. Packets are all zero where they are not asked for."""
    times = trace.time_ns
    first, finish = int(times[0]), int(times[-1]) - tau_ns
    count = int(np.searchsorted(times, finish, side="right"))
    position = first
    for start in range(0, max(count, 1), _PIECE):
        until = finish if start + _PIECE >= count else int(times[start + _PIECE])
        low_from, low_to = np.searchsorted(times, [position, until], side="right")
        high_from, high_to = np.searchsorted(times, [position + tau_ns, until + tau_ns], side="right")
        leaving, entering = times[low_from:low_to], times[high_from:high_to] - tau_ns
        changes = np.concatenate([leaving, entering])
        order = np.argsort(changes, kind="stable")  # two sorted runs: one merge
        step = np.concatenate(
            [-trace.size[low_from:low_to].astype(np.int64), trace.size[high_from:high_to]], dtype=np.int64
        )
        held_before = trace.running.one(int(high_from)) - trace.running.one(int(low_from))
        held = _summed_up(held_before, step.take(order))
        lasting = np.diff(changes.take(order), prepend=position, append=until)
        if with_packets:
            packets = _summed_up(int(high_from - low_from), np.where(order < len(leaving), -1, 1))
        else:
            packets = np.zeros(1, np.int64)
        yield lasting, held, packets
        position = until
        if position >= finish:
            return


def _summed_up(before: int, steps: NDArray[np.int64]) -> NDArray[np.int64]:
    """What there is before, and after each step."""
    result = np.empty(len(steps) + 1, np.int64)
    result[0] = before
    np.cumsum(steps, out=result[1:])
    result[1:] += before
    return result


def _summarised(sweep: _Sweep, length: int, most_bytes: int, quantiles: Sequence[float]) -> Spread:
    shift = max(0, int(most_bytes).bit_length() - _BITS)  # the first pass looks at the highest digits
    prefixes = np.zeros(1, np.int64)
    table, moments = sweep.histogram(prefixes, shift, True)
    assert moments is not None
    targets = [max(1, math.ceil(quantile * length)) for quantile in quantiles]
    values, remaining = _descend(table, [0] * len(targets), prefixes, targets)
    while shift > 0:
        step = min(_BITS, shift)
        shift -= step
        prefixes = np.unique(np.array(values, np.int64))
        # A last step of fewer bits still reads _BITS digits: the prefix then overlaps what is known.
        shown = prefixes >> (_BITS - step)
        table, _ = sweep.histogram(np.unique(shown), shift, False)
        values, remaining = _descend_partial(table, values, np.unique(shown), remaining, step)
    mean, mean_square, packets, packets_square = moments / length
    return Spread(
        tuple(values),
        float(mean),
        float(packets),
        _ratio(packets_square - packets**2, packets),
        _ratio(mean_square - mean**2, mean),
        None if mean <= 0 else math.sqrt(max(0.0, mean_square - mean**2)) / float(mean),
    )


def _descend(
    table: NDArray[np.int64], rows: list[int], prefixes: NDArray[np.int64], targets: list[int]
) -> tuple[list[int], list[int]]:
    """The digit at which each target amount of time is reached, and what is left of it there."""
    values, remaining = [], []
    for row, target in zip(rows, targets, strict=True):
        reached = np.cumsum(table[row])
        digit = int(np.searchsorted(reached, target))
        values.append(int(prefixes[row]) << _BITS | digit)
        remaining.append(target - (int(reached[digit - 1]) if digit else 0))
    return values, remaining


def _descend_partial(
    table: NDArray[np.int64], values: list[int], shown: NDArray[np.int64], remaining: list[int], step: int
) -> tuple[list[int], list[int]]:
    found, left = [], []
    for value, target in zip(values, remaining, strict=True):
        row = int(np.searchsorted(shown, value >> (_BITS - step)))
        low = (value & ((1 << (_BITS - step)) - 1)) << step
        reached = np.cumsum(table[row, low : low + (1 << step)])
        digit = int(np.searchsorted(reached, target))
        found.append(value << step | digit)
        left.append(target - (int(reached[digit - 1]) if digit else 0))
    return found, left


def _ratio(variance: float, mean: float) -> float | None:
    return None if mean <= 0 else max(0.0, float(variance)) / float(mean)
