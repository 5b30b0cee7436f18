"""Burstiness of traffic: captures in, exact figures at every time scale out. Knows nothing of training.

    from mlfabric.traffic import analyze, read
    result = analyze(read("run.pcap"))
    result.scale(5_000_000).peak_to_mean

What stands here is the public interface; modules are imported when a name is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlfabric.traffic.analysis import Analysis, AnalysisOptions, analyze
    from mlfabric.traffic.arrivals import Arrivals, fluid, instant
    from mlfabric.traffic.backlogs import Backlog, Stretch, backlog, backlog_curve, least_rate
    from mlfabric.traffic.bursts import Bursts, find_bursts
    from mlfabric.traffic.capture.reader import ReadOptions
    from mlfabric.traffic.comparison import Comparison, compare
    from mlfabric.traffic.control import ControlResult, schedules, simulate
    from mlfabric.traffic.cycles import Cycle, make_cycle
    from mlfabric.traffic.dispersion import Spread, spread
    from mlfabric.traffic.envelopes import Peak, byte_series, envelope, envelope_by_bins
    from mlfabric.traffic.extrapolation import Extrapolation, Link, extrapolate
    from mlfabric.traffic.flows import Flow, FlowTable, Selection
    from mlfabric.traffic.gaps import GapStatistics, gap_statistics
    from mlfabric.traffic.logscales import Logscale, logscale
    from mlfabric.traffic.reading import read
    from mlfabric.traffic.rhythm import Rhythm, find_rhythm
    from mlfabric.traffic.synth import SynthOptions, synthesize
    from mlfabric.traffic.trace import Origin, Trace
    from mlfabric.traffic.verdicts import PortVerdict, orchestration

# No name here is also a module's: importing a module sets its name on the package.
_HOME = {
    "analysis": ("Analysis", "AnalysisOptions", "analyze"),
    "arrivals": ("Arrivals", "fluid", "instant"),
    "backlogs": ("Backlog", "Stretch", "backlog", "backlog_curve", "least_rate"),
    "bursts": ("Bursts", "find_bursts"),
    "capture.reader": ("ReadOptions",),
    "comparison": ("Comparison", "compare"),
    "control": ("ControlResult", "schedules", "simulate"),
    "cycles": ("Cycle", "make_cycle"),
    "dispersion": ("Spread", "spread"),
    "envelopes": ("Peak", "byte_series", "envelope", "envelope_by_bins"),
    "extrapolation": ("Extrapolation", "Link", "extrapolate"),
    "flows": ("Flow", "FlowTable", "Selection"),
    "gaps": ("GapStatistics", "gap_statistics"),
    "logscales": ("Logscale", "logscale"),
    "verdicts": ("PortVerdict", "orchestration"),
    "reading": ("read",),
    "rhythm": ("Rhythm", "find_rhythm"),
    "synth": ("SynthOptions", "synthesize"),
    "trace": ("Origin", "Trace"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "read", "ReadOptions", "Trace", "Origin", "Selection", "Flow", "FlowTable",
    "analyze", "Analysis", "AnalysisOptions",
    "envelope", "envelope_by_bins", "byte_series", "Peak", "instant", "fluid", "Arrivals",
    "backlog", "backlog_curve", "least_rate", "Backlog", "Stretch",
    "spread", "Spread", "find_bursts", "Bursts", "gap_statistics", "GapStatistics",
    "find_rhythm", "Rhythm", "logscale", "Logscale",
    "orchestration", "PortVerdict",
    "make_cycle", "Cycle", "extrapolate", "Extrapolation", "Link", "schedules", "simulate", "ControlResult",
    "synthesize", "SynthOptions", "compare", "Comparison",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'mlfabric.traffic' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"mlfabric.traffic.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value
