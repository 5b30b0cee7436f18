"""The training's own rhythm: does the traffic repeat, how exactly, and what does one round carry.

A period is the smallest lag at which the byte series resembles itself nearly as well as at its best lag.
Rounds are then followed one by one: each begins with the first packet after the quietest phase, so jitter
and drift do not add up. Refuses to see a period where fewer than three rounds fit, where a round holds but
a few packets, or where the resemblance is weak.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlfabric.traffic.envelopes import byte_series
from mlfabric.traffic.trace import NS_PER_S, Trace, pieces

_BINS: Final = 1 << 15
_COARSER: Final = (1, 4, 16)
_LEAST_RESEMBLANCE: Final = 0.3
_NEARLY: Final = 0.85
_LEAST_ROUNDS: Final = 3
_LEAST_PACKETS: Final = 16
# Bins with less than this share of the fullest one's bytes are pauses.
_TRICKLE: Final = 0.05
# Senders on a full link take turns packet by packet; that is the link's beat, not the training's.
_LEAST_PER_ROUND: Final = 8


@dataclass(frozen=True)
class Rhythm:
    """Rounds of a periodic trace. `begins_ns` has one entry more than there are whole rounds."""

    period_s: float
    jitter_s: float  # standard deviation of the rounds' lengths
    resemblance: float  # autocorrelation at the period
    begins_ns: NDArray[np.int64]
    bytes: NDArray[np.int64]  # per round
    on_share: float  # share of time in which something was under way, at a hundredth of a period

    @property
    def rounds(self) -> int:
        return len(self.bytes)

    @property
    def observation_ns(self) -> int:
        return int(self.begins_ns[-1] - self.begins_ns[0])


def find_rhythm(trace: Trace) -> Rhythm | None:
    """The rhythm of a trace, or None where it has none."""
    if len(trace) < _LEAST_PACKETS or trace.span_ns < 1000:
        return None
    bin_ns = max(1, trace.span_ns // _BINS)
    series = byte_series(trace, bin_ns)
    lag = _best_lag(series)
    if lag is None:
        return None
    lag_bins, resemblance = lag
    begins = _follow(trace, series, bin_ns, lag_bins)
    if len(begins) < _LEAST_ROUNDS + 1:
        return None
    lengths = np.diff(begins)
    if lengths.std() > 0.25 * lengths.mean():
        return None
    edges = np.searchsorted(trace.time_ns, begins)
    if edges[-1] - edges[0] < _LEAST_PER_ROUND * len(lengths):
        return None
    sizes = np.diff(trace.running(edges))
    return Rhythm(
        float(lengths.mean()) / NS_PER_S,
        float(lengths.std()) / NS_PER_S,
        resemblance,
        begins,
        sizes,
        _on_share(trace, begins),
    )


def _best_lag(series: NDArray[np.int64]) -> tuple[int, float] | None:
    """The lag in bins and the resemblance there. Jitter hides a rhythm from bins finer than itself, so
    coarser ones are tried too, and win where they see it clearly better."""
    best: tuple[int, float] | None = None
    for factor in _COARSER:
        whole = len(series) // factor * factor
        found = _likely_lag(series[:whole].reshape(-1, factor).sum(axis=1))
        if found is not None and (best is None or found[1] > best[1] + 0.1):
            best = found[0] * factor, found[1]
    return best


def _likely_lag(sizes: NDArray[np.int64]) -> tuple[int, float] | None:
    series = sizes - sizes.mean()
    count = len(series)
    spectrum = np.fft.rfft(series, 2 * count)
    raw = np.fft.irfft(spectrum * spectrum.conj(), 2 * count)[:count]
    if raw[0] <= 0:
        return None
    # Each lag sees fewer terms than the one before; past the middle too few to trust.
    usable = count // 2
    resemblance = raw[:usable] / raw[0] * (count / (count - np.arange(usable)))
    resemblance = np.convolve(resemblance, np.ones(3) / 3, "same")
    below = np.flatnonzero(resemblance < _LEAST_RESEMBLANCE / 2)
    if not len(below):
        return None
    start = int(below[0])  # past the first fall: what lies before is one burst resembling itself
    inner = resemblance[start:usable]
    if len(inner) < 3:
        return None
    peaks = np.flatnonzero((inner[1:-1] >= inner[:-2]) & (inner[1:-1] > inner[2:])) + 1
    peaks = peaks[inner[peaks] >= _LEAST_RESEMBLANCE]
    if not len(peaks):
        return None
    best = inner[peaks].max()
    chosen = int(peaks[inner[peaks] >= _NEARLY * best][0])
    return start + chosen, float(inner[chosen])


def _follow(trace: Trace, series: NDArray[np.int64], bin_ns: int, lag_bins: int) -> NDArray[np.int64]:
    """Where rounds begin: the first packet after each quietest phase."""
    times, lag_ns = trace.time_ns, lag_bins * bin_ns
    slots = 256
    if lag_bins >= 2 * slots:
        phase = np.arange(len(series)) % lag_bins * slots // lag_bins
        load = np.bincount(phase, weights=series, minlength=slots).astype(np.float64)
    else:
        load = np.zeros(slots)
        for part, sizes in zip(pieces(times), pieces(trace.size), strict=True):
            phase = (part - times[0]) % lag_ns * slots // lag_ns
            load += np.bincount(phase, weights=sizes, minlength=slots)
    quiet_at, quiet_slots = _quietest_run(load)
    margin = max(lag_ns * quiet_slots // (2 * slots), lag_ns // (4 * slots))
    target = int(times[0]) + (quiet_at + quiet_slots) * lag_ns // slots - margin
    # A capture that starts with a round starts with a whole one; one that starts inside a round does not.
    if times[0] - (target + margin - lag_ns) <= 2 * lag_ns // slots:
        target -= lag_ns
    begins: list[int] = []
    loaded = np.flatnonzero(series > _TRICKLE * series.max())  # heartbeats in a pause begin no round
    while True:
        place = int(np.searchsorted(loaded, (target - int(times[0])) // bin_ns))
        if place >= len(loaded):
            break
        index = int(np.searchsorted(times, max(target, int(times[0]) + int(loaded[place]) * bin_ns)))
        if index >= len(times):
            break
        begin = int(times[index])
        begins.append(begin)
        target = begin + lag_ns - margin
    return np.array(begins, np.int64)


def _quietest_run(load: NDArray[np.float64]) -> tuple[int, int]:
    """Start and length of the longest run of phases (around the circle) that carry next to nothing."""
    quiet = load <= 0.02 * load.max()
    if not quiet.any():
        return int(load.argmin()), 1
    doubled = np.concatenate([quiet, quiet])
    best_at, best_length, run = 0, 0, 0
    for position, is_quiet in enumerate(doubled):
        run = run + 1 if is_quiet else 0
        if run > best_length:
            best_at, best_length = position - run + 1, run
    return best_at % len(quiet), min(best_length, len(quiet))


def _on_share(trace: Trace, begins: NDArray[np.int64]) -> float:
    length = int(begins[-1] - begins[0])
    slot = max(1, int(np.diff(begins).mean()) // 100)
    edges = np.searchsorted(trace.time_ns, np.arange(begins[0], begins[-1] + slot, slot))
    return min(1.0, int(np.count_nonzero(np.diff(edges))) * slot / length)
