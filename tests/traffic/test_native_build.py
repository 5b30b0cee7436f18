"""The helper's build: once, in private, and remembered where it fails."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mlfabric.traffic import native

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MLFABRIC_NO_NATIVE", raising=False)
    return tmp_path / "mlfabric"


def load() -> object:
    """As a new process would."""
    return native._load.__wrapped__()


@needs_compiler
def test_it_is_built_once_where_no_one_else_can_write(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load() is not None
    (built,) = cache.iterdir()
    assert (cache.stat().st_mode | built.stat().st_mode) & 0o022 == 0
    monkeypatch.setenv("CC", "/nonexistent/compiler")
    assert load() is not None


@needs_compiler
def test_what_others_could_have_written_is_not_loaded(cache: Path) -> None:
    assert load() is not None
    (built,) = cache.iterdir()
    built.chmod(0o666)
    assert load() is None
    built.chmod(0o600)
    cache.chmod(0o777)
    assert load() is None


def test_a_failed_build_is_remembered(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = tmp_path / "calls"
    compiler = tmp_path / "cc"
    compiler.write_text(f"#!/bin/sh\necho called >> {calls}\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    assert load() is None
    assert load() is None
    assert calls.read_text() == "called\n"
