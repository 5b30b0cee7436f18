"""The examples of training without a barrier run with torchrun's variables and learn something."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.runtime.test_torchrun import free_port
from tests.torch.worlds import ROOT, Worlds

pytest.importorskip("torch", reason="needs torch: pip install 'mlfabric[torch]'")
pytest.importorskip("sklearn", reason="needs scikit-learn's digits: pip install 'mlfabric[demo]'")


def printed(worlds: Worlds, name: str, *arguments: str) -> str:
    script = str(ROOT / "examples" / f"{name}.py")
    answers = worlds.check("example", 2, port=free_port(), script=script, arguments=list(arguments))
    return str(answers[0])


def test_digits_are_learned_without_a_barrier(worlds: Worlds, tmp_path: Path) -> None:
    said = printed(worlds, "async_fashion_mnist", f"--data={tmp_path / 'none'}", "--epochs=0.3")
    assert float(re.findall(r"accuracy (\S+)", said)[0]) > 0.7


def test_a_language_is_learned_by_local_steps(worlds: Worlds) -> None:
    said = printed(worlds, "local_language_model", "--steps=24")
    assert float(re.findall(r"^loss (\S+)", said, re.MULTILINE)[0]) < 4.0
