"""Words of a command line become a record, and every mistake is one sentence."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from mlfabric.errors import FabricError
from mlfabric.option_records import Command, CommandGroup, argument, option, required


@dataclass(frozen=True, kw_only=True)
class Shared:
    files: tuple[str, ...] = argument("what to read", several=True)
    port: tuple[int, ...] = option(None, "ports", kind=int, several=True)
    layer: str = option("l2", "bytes")


@dataclass(frozen=True, kw_only=True)
class Words(Shared):
    line_rate: float = option(1.0, "rate")
    quick: bool = option(False, "hurry")
    out: Path | None = option(None, "where to", kind=Path)
    device: str = required("which", short="-i")


seen: list[Words] = []


def act(words: Words) -> None:
    """Does it."""
    seen.append(words)


command = Command(Words, act)
group = CommandGroup("tool part", "All of it.", [command])


def late(words: Words) -> None:
    """Comes later."""
    seen.append(words)


def test_options_stand_before_between_and_after_the_files() -> None:
    read = command.read(["--port", "1", "a", "--line-rate=2.5", "-", "-i", "x", "b", "--port=2", "--quick"])
    assert read == Words(files=("a", "-", "b"), port=(1, 2), line_rate=2.5, quick=True, device="x")
    assert command.read(["a", "--device", "y", "--quick", "--no-quick"]) == Words(files=("a",), device="y")


def test_words_after_two_dashes_are_files() -> None:
    assert command.read(["-i", "x", "--out", "o", "--", "--quick", "-z"]) == Words(
        files=("--quick", "-z"), device="x", out=Path("o")
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["-i", "x"], "act needs at least one FILE: what to read"),
        (["a"], "act needs --device: which"),
        (["a", "-i"], "-i needs a value: which"),
        (["a", "--devise", "x"], "act has no option --devise; did you mean --device?"),
        (["a", "--port", "http"], "--port takes a whole number, not 'http'"),
        (["a", "--line-rate", "fast"], "--line-rate takes a number, not 'fast'"),
        (["a", "--quick=yes"], "--quick takes no value"),
    ],
)
def test_a_mistake_is_one_sentence(words: list[str], sentence: str) -> None:
    with pytest.raises(FabricError) as caught:
        command.read(words)
    assert str(caught.value) == sentence


def test_a_group_runs_its_command_and_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    seen.clear()
    group(["act", "a", "-i", "x"])
    assert seen == [Words(files=("a",), device="x")]
    group([])
    assert "act  Does it." in capsys.readouterr().out
    group(["act", "a", "--help"])
    shown = capsys.readouterr().out
    assert "Usage: tool part act FILE... [OPTIONS]" in shown
    assert shown.index("--line-rate") < shown.index("--layer")  # its own options first
    assert "bytes (default l2)" in shown
    with pytest.raises(FabricError, match="tool part has no command 'acd'; did you mean act"):
        group(["acd"])


def test_commands_that_are_loaded_late_are_loaded_only_when_asked_for() -> None:
    loaded: list[int] = []

    def more() -> list[Command]:
        loaded.append(1)
        return [Command(Words, late)]

    both = CommandGroup("tool part", "All of it.", [command], more)
    seen.clear()
    both(["act", "a", "-i", "x"])
    assert not loaded
    both(["late", "b", "-i", "y"])
    assert seen[-1].files == ("b",)
    assert "Comes later." in both.help()
