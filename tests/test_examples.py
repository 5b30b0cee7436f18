"""The examples run and print what they promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_the_first_script_fits_its_line() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "first.py")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    numbers = [float(number) for number in re.findall(r"-?\d+\.\d*", done.stdout)]
    assert abs(numbers[0] - 3) < 0.05
    assert abs(numbers[1] + 1) < 0.05


def test_the_readme_shows_the_first_script_as_it_is() -> None:
    script = (ROOT / "examples" / "first.py").read_text()
    shown = (ROOT / "README.md").read_text()
    body = [line.split("  # [")[0] for line in script.split('"""\n', 1)[1].splitlines() if line.strip()]
    assert len(body) < 20
    for line in body:
        assert line in shown, line


def test_the_matrix_is_found_again() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "matrix_factorisation.py")],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) < 0.2


@pytest.mark.parametrize("name", ["async_fashion_mnist", "local_language_model", "matrix_factorisation"])
def test_examples_are_short(name: str) -> None:
    assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) < 100
