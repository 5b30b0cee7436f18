"""Commands whose options are the fields of a record, read without a command-line library.

Loading such a library takes longer than reading a capture of a million packets, so commands that must answer
at once declare a frozen dataclass and take it as their only argument. A record that several commands need is
a base class of theirs: its options, their help and their meaning are written once. Knows text, whole numbers,
numbers, paths, flags and lists of them; every mistake is one sentence (`FabricError`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Final

from mlfabric.errors import FabricError

_KINDS: Final = {int: "a whole number", float: "a number"}
_HELP_WIDTH: Final = 100


def option(
    default: Any,
    words: str,
    *,
    name: str = "",
    short: str = "",
    kind: type | None = None,
    several: bool = False,
) -> Any:
    """A field given as `--name VALUE`. The default's type tells the kind unless that is given; a flag is a
    field whose default is False. `several` may be repeated, and makes the field a tuple."""
    found = kind or (str if default is None else type(default))
    about = {"words": words, "name": name, "short": short, "kind": found, "several": several}
    return field(default=() if several and default is None else default, metadata={"option": about})


def required(words: str, *, name: str = "", short: str = "", kind: type = str) -> Any:
    """A field that must be given as `--name VALUE`."""
    about = {"words": words, "name": name, "short": short, "kind": kind, "several": False}
    return field(metadata={"option": about})


def argument(words: str, *, kind: type = str, several: bool = False) -> Any:
    """A field given by its place; `several`, which must be the last one, takes all that are left."""
    return field(metadata={"argument": {"words": words, "kind": kind, "several": several}})


@dataclass(frozen=True)
class Command:
    """A name, the record it reads and what then happens; its help is that function's first line."""

    record: type
    act: Callable[[Any], None]

    @property
    def name(self) -> str:
        return self.act.__name__

    @property
    def words(self) -> str:
        return (self.act.__doc__ or "").strip()

    def options(self) -> dict[str, Field[Any]]:
        """Fields by the words that name them on the command line."""
        found: dict[str, Field[Any]] = {}
        for each in self._given_by("option"):
            about = each.metadata["option"]
            found["--" + _name(each)] = each
            if about["kind"] is bool:
                found["--no-" + _name(each)] = each
            if about["short"]:
                found[about["short"]] = each
        return found

    def places(self) -> list[Field[Any]]:
        return list(self._given_by("argument"))

    def _given_by(self, way: str) -> Iterator[Field[Any]]:
        """The record's own fields first, then those it shares with others."""
        own = inspect.get_annotations(self.record)
        found = [each for each in fields(self.record) if way in each.metadata]
        return iter(sorted(found, key=lambda each: each.name not in own))

    def read(self, words: Sequence[str]) -> Any:
        """The record these words stand for."""
        given, placed = self._split(words)
        places = self.places()
        for place in places:
            about = place.metadata["argument"]
            if not placed:
                more = "at least one " if about["several"] else ""
                raise FabricError(f"{self.name} needs {more}{_shown(place)}: {about['words']}")
            taken, placed = (placed, []) if about["several"] else (placed[:1], placed[1:])
            values = tuple(_value(about["kind"], _shown(place), word) for word in taken)
            given[place.name] = values if about["several"] else values[0]
        if placed:
            raise FabricError(f"{self.name} does not know what to do with {placed[0]!r}")
        for each in self._given_by("option"):
            if each.default is MISSING and each.name not in given:
                raise FabricError(f"{self.name} needs --{_name(each)}: {each.metadata['option']['words']}")
        return self.record(**given)

    def _split(self, words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        """Values of the options, and the words that belong to none."""
        options, given, placed = self.options(), dict[str, Any](), list[str]()
        rest = iter(words)
        for word in rest:
            if word == "--":
                placed.extend(rest)
            elif not word.startswith("-") or word == "-":
                placed.append(word)
            else:
                name, joined, value = word.partition("=")
                if name not in options:
                    raise FabricError(f"{self.name} has no option {name}{_nearest(name, options)}")
                found = options[name]
                about = found.metadata["option"]
                if about["kind"] is bool:
                    if joined:
                        raise FabricError(f"{name} takes no value")
                    given[found.name] = not name.startswith("--no-") or name == "--" + _name(found)
                    continue
                text = value if joined else next(rest, None)
                if text is None:
                    raise FabricError(f"{name} needs a value: {about['words']}")
                read = _value(about["kind"], name, text)
                given[found.name] = (*given.get(found.name, ()), read) if about["several"] else read
        return given, placed

    def help(self, called: str) -> str:
        places = self.places()
        shown = [_shown(each) + ("..." if each.metadata["argument"]["several"] else "") for each in places]
        lines = [f"Usage: {called} {' '.join([*shown, '[OPTIONS]'])}", "", self.words, ""]
        rows = [(name, each.metadata["argument"]["words"]) for name, each in zip(shown, places, strict=True)]
        lines += [*_table(rows), "", "Options"]
        rows = []
        for each in self._given_by("option"):
            about = each.metadata["option"]
            value = (
                "" if about["kind"] is bool else " " + _KINDS.get(about["kind"], "text").split()[-1].upper()
            )
            names = ", ".join(filter(None, (about["short"], "--" + _name(each))))
            rows.append((names + value, about["words"] + _default(each)))
        return "\n".join([*lines, *_table([*rows, ("--help", "show this and end")])]) + "\n"


class CommandGroup:
    """Several commands under one word."""

    def __init__(
        self,
        called: str,
        words: str,
        commands: Sequence[Command],
        more: Callable[[], Sequence[Command]] = tuple,
    ) -> None:
        """`more` gives commands that are loaded only when one of them is asked for, or all are listed."""
        self.called = called
        self.words = words
        self._commands = {each.name: each for each in commands}
        self._more = more

    def _all(self) -> dict[str, Command]:
        return {**self._commands, **{each.name: each for each in self._more()}}

    def __call__(self, words: Sequence[str]) -> None:
        """Does what the words ask for."""
        if not words or words[0] in ("--help", "-h"):
            sys.stdout.write(self.help())
            return
        command = self._commands.get(words[0]) or self._all().get(words[0])
        if command is None:
            raise FabricError(f"{self.called} has no command {words[0]!r}{_nearest(words[0], self._all())}")
        asked = list(words[1:])
        before_names = asked[: asked.index("--")] if "--" in asked else asked
        if "--help" in before_names or "-h" in before_names:
            sys.stdout.write(command.help(f"{self.called} {command.name}"))
            return
        command.act(command.read(asked))

    def help(self) -> str:
        rows = [(name, each.words.split("\n")[0]) for name, each in self._all().items()]
        lines = [f"Usage: {self.called} COMMAND ...", "", self.words, "", "Commands", *_table(rows)]
        return "\n".join([*lines, "", f"{self.called} COMMAND --help tells more."]) + "\n"


def _shown(place: Field[Any]) -> str:
    """How help and errors call an argument: the fields of several are plurals."""
    name = place.name.upper()
    return name.removesuffix("S") if place.metadata["argument"]["several"] else name


def _name(each: Field[Any]) -> str:
    return each.metadata["option"]["name"] or each.name.replace("_", "-")


def _value(kind: type, name: str, text: str) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise FabricError(f"{name} takes {_KINDS.get(kind, 'a value')}, not {text!r}") from None


def _default(each: Field[Any]) -> str:
    about = each.metadata["option"]
    if each.default is MISSING:
        return " (required)"
    if about["kind"] is bool or each.default in (None, ()):
        return ""
    return f" (default {each.default})"


def _nearest(name: str, known: Iterator[str] | dict[str, Any]) -> str:
    import difflib

    close = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {close[0]}?" if close else ""


def _table(rows: Sequence[tuple[str, str]]) -> list[str]:
    import textwrap

    width = min(32, max((len(left) for left, _ in rows), default=0))
    lines = []
    for left, right in rows:
        folded = textwrap.wrap(right, _HELP_WIDTH - width - 4) or [""]
        first = f"  {left:<{width}}  {folded[0]}"
        lines += [first, *(" " * (width + 4) + more for more in folded[1:])]
    return lines
