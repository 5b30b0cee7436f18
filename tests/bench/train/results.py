"""Run results to judge, without a run."""

from __future__ import annotations

from typing import Any

from mlfabric.bench.train.judging import RunResult
from mlfabric.bench.train.settings import RunSettings, StepSize


def some_settings(contender: str = "gloo", seed: int = 1, **more: Any) -> RunSettings:
    return RunSettings(contender, "calm", seed, StepSize(0.02, 0.9), **more)


def some_result(settings: RunSettings, curve: list[tuple[float, float]], **more: Any) -> RunResult:
    found: dict[str, Any] = {
        "settings": settings,
        "seconds": 100.0,
        "ended_early": False,
        "curve": curve,
        "steps": 200,
        "updates": 200,
        "dropped": 0,
        "delays": {0: 200},
        "overran_share": 0.0,
        "gradient_s": 0.01,
        "compute_s": 0.3,
        "exchange_s": 0.2,
        "cpu_share": 0.5,
        "link_bytes": {"w0.up": 300, "w0.down": 100, "w1.up": 100, "w1.down": 300},
        "steps_by_rank": [100, 100],
    }
    return RunResult(**{**found, **more})


def rising(at_s: float, to: float = 0.9) -> list[tuple[float, float]]:
    """Accuracy 0.5 until a moment, then the other, looked at every second."""
    return [(float(second), to if second >= at_s else 0.5) for second in range(100)]
