"""When which link changes and which fault strikes, drawn from a scenario: pure, the same for every run.

The simulator reads the same `rate_changes` and `fault_events`. Past the scenario's duration the lab goes on
by the same rule and seed, because a training run may last longer than the file foresaw.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from mlfabric.scenario import FaultEvent, RateChange, Scenario, Seconds

Happening = RateChange | FaultEvent

# A trace is drawn in blocks; no run reaches the end of this many.
_MAX_BLOCKS = 10_000


def happenings(scenario: Scenario) -> Iterator[Happening]:
    """All that happens, by time; rates before faults at the same time. Never ends while a trace goes on."""
    faults = scenario.fault_events()
    block = max(float(scenario.duration), 1.0)
    redrawn = any(trace.every is not None for trace in scenario.traces)
    steps_end = max((float(s.at) for t in scenario.traces for s in t.steps), default=0.0)
    last = max([steps_end, *(fault.at_s for fault in faults)])
    for number in range(_MAX_BLOCKS):
        begin, end = number * block, (number + 1) * block
        if not redrawn and begin > last:
            return
        longer = msgspec.structs.replace(scenario, duration=Seconds(end))
        both: list[Happening] = [c for c in longer.rate_changes() if begin <= c.at_s < end]
        both += [fault for fault in faults if begin <= fault.at_s < end]
        yield from sorted(both, key=lambda happening: happening.at_s)
