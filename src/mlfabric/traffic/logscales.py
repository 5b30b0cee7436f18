"""The Abry-Veitch logscale diagram: energy of the byte series by octave, and the Hurst exponent where one
exists.

H is given only where a straight line fits the diagram over several octaves. Strong periodicity bends the
diagram and makes any slope meaningless; then no H is given and the reason is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mlfabric.errors import FabricError

_WAVELET: Final = "db3"  # three vanishing moments: blind to trends up to the second order
_LEAST_OCTAVES: Final = 4
_LEAST_COEFFICIENTS: Final = 8
# Chi-square of a good fit is near its degrees of freedom; beyond this the line is refused.
_MOST_CHI_SQUARE_PER_DEGREE: Final = 4.0


@dataclass(frozen=True)
class Logscale:
    """Octave j covers bins of 2^j; `log2_energy` is corrected for the bias of the logarithm."""

    bin_s: float
    octaves: NDArray[np.int64]
    log2_energy: NDArray[np.float64]
    deviation: NDArray[np.float64]
    hurst: float | None
    fitted: tuple[int, int] | None  # first and last octave of the line
    why_not: str | None


def logscale(
    series: NDArray[np.int64] | NDArray[np.float64], bin_s: float, periodic: bool = False
) -> Logscale:
    """The diagram of a series of bytes per bin. `periodic`: a rhythm was found, so H would mean nothing."""
    try:
        import pywt  # type: ignore[import-untyped]
    except ImportError:
        raise FabricError("the logscale diagram needs PyWavelets; install mlfabric[traffic]") from None
    values = np.asarray(series, np.float64)
    levels = max(0, int(math.log2(max(len(values), 1) / _LEAST_COEFFICIENTS)))
    octaves, energy, count = [], [], []
    approximation = values
    for octave in range(1, levels + 1):
        approximation, detail = pywt.dwt(approximation, _WAVELET, mode="periodization")
        # Coefficients whose support wraps around the end mix the two ends of the series.
        inner = detail[3:-3]
        if len(inner) < _LEAST_COEFFICIENTS:
            break
        octaves.append(octave)
        energy.append(float(np.mean(inner**2)))
        count.append(len(inner))
    number = np.array(count, np.float64)
    with np.errstate(divide="ignore"):
        # E[log2 of a chi-square mean] falls short of log2 of the energy by about 1 / (n ln 2).
        level = np.log2(np.array(energy)) + 1 / (number * math.log(2)) if count else np.zeros(0)
    deviation = np.sqrt(2 / number) / math.log(2) if count else np.zeros(0)
    hurst, fitted, reason = _fit(np.array(octaves, np.int64), level, deviation)
    if periodic:
        hurst, reason = None, "the traffic is periodic, so a Hurst exponent would mean nothing"
    return Logscale(bin_s, np.array(octaves, np.int64), level, deviation, hurst, fitted, reason)


def _fit(
    octaves: NDArray[np.int64], level: NDArray[np.float64], deviation: NDArray[np.float64]
) -> tuple[float | None, tuple[int, int] | None, str | None]:
    """The longest good line that reaches the coarsest octave."""
    if not np.isfinite(level).all():
        return None, None, "some octaves carry no energy at all"
    for first in range(len(octaves) - _LEAST_OCTAVES + 1):
        x, y, weight = octaves[first:], level[first:], 1 / deviation[first:] ** 2
        slope, offset = _weighted_line(x.astype(np.float64), y, weight)
        misfit = float((weight * (y - slope * x - offset) ** 2).sum())
        if misfit <= _MOST_CHI_SQUARE_PER_DEGREE * (len(x) - 2):
            hurst = (slope + 1) / 2
            if not 0 < hurst < 1:
                return None, None, f"the slope gives H = {hurst:.2f}, outside (0, 1)"
            return hurst, (int(x[0]), int(x[-1])), None
    return None, None, "no straight line fits four octaves or more"


def _weighted_line(
    x: NDArray[np.float64], y: NDArray[np.float64], weight: NDArray[np.float64]
) -> tuple[float, float]:
    total = weight.sum()
    x_mean, y_mean = (weight * x).sum() / total, (weight * y).sum() / total
    slope = float((weight * (x - x_mean) * (y - y_mean)).sum() / (weight * (x - x_mean) ** 2).sum())
    return slope, float(y_mean - slope * x_mean)
