"""What the traffic tests share: both forms of the reader, and a place to write captures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from mlfabric.traffic import native
from mlfabric.traffic.capture.reader import ReadOptions
from mlfabric.traffic.reading import read
from mlfabric.traffic.trace import Trace

ReadBytes = Callable[..., Trace]


@pytest.fixture(params=["numpy", "native"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test once with NumPy alone and once with the compiled helper, where that can be built."""
    if request.param == "numpy":
        monkeypatch.setenv("MLFABRIC_NO_NATIVE", "1")
    else:
        monkeypatch.delenv("MLFABRIC_NO_NATIVE", raising=False)
        if native.library() is None:
            pytest.skip("no C compiler here, so there is no compiled helper to test")
    return str(request.param)


@pytest.fixture
def read_bytes(tmp_path: Path, form: str) -> ReadBytes:
    """Reads bytes as if they were a file."""

    def reading(content: bytes, name: str = "capture.pcap", **options: object) -> Trace:
        path = tmp_path / name
        path.write_bytes(content)
        return read(path, ReadOptions(**options))  # type: ignore[arg-type]

    return reading
