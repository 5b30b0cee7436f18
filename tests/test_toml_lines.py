"""Lines of keys, against a writer that remembers where it wrote each of them."""

from __future__ import annotations

import random
import tomllib
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from mlfabric.toml_lines import KeyPath, key_lines

SCALARS = [
    "3",
    "-1.5e3",
    "true",
    "1979-05-27 07:32:00",
    '"plain"',
    '"a # no comment, ] } = [[hosts]]"',
    r'"quote \" and backslash \\"',
    "'literal \\ '",
    '"""two\nlines = 3\n"""',
    '"""ends in a quote""""',
    "'''raw\n[[hosts]]\n'''",
]


class Writer:
    """Writes random TOML and notes the line of every key and element."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.text = ""
        self.lines: dict[KeyPath, int] = {}

    def note(self, path: KeyPath) -> None:
        self.lines.setdefault(path, self.text.count("\n") + 1)

    def gap(self) -> None:
        """Blank lines, comments, spaces: whatever may stand between statements."""
        self.text += self.draw.choice(["", "\n", "  ", "# key = 3\n", "\t# [[x]]\n\n"])

    def key(self, name: str) -> None:
        self.text += self.draw.choice([name, f'"{name}"', f"'{name}'"])
        self.text += self.draw.choice([" = ", "=", "\t=  "])

    def value(self, path: KeyPath, depth: int, inline: bool = False) -> None:
        kind = self.draw.choice(["scalar", "array", "table"] if depth else ["scalar"])
        if kind == "scalar":
            one_line = [scalar for scalar in SCALARS if "\n" not in scalar]
            self.text += self.draw.choice(one_line if inline else SCALARS)
        elif kind == "array":
            # Inside an inline table only arrays may break the line.
            self.text += "["
            for index in range(self.draw.randint(0, 3)):
                self.text += self.draw.choice(["", " ", "\n", "\n  # one ] more\n"])
                self.note((*path, index))
                self.value((*path, index), depth - 1, inline)
                self.text += self.draw.choice([",", " ,", ", # end\n"])
            self.text += self.draw.choice(["]", "\n]"])
        else:
            self.text += "{"
            for index in range(self.draw.randint(0, 3)):
                self.text += ", " if index else " "
                self.note((*path, f"k{index}"))
                self.key(f"k{index}")
                self.value((*path, f"k{index}"), depth - 1, inline=True)
            self.text += " }"

    def statements(self, table: KeyPath) -> None:
        for index in range(self.draw.randint(0, 3)):
            self.gap()
            self.note((*table, f"v{index}"))
            self.key(f"v{index}")
            self.value((*table, f"v{index}"), 2)
            self.text += self.draw.choice(["\n", "  # said\n"])
        if self.draw.random() < 0.3:
            self.gap()
            self.note((*table, "dotted"))
            self.note((*table, "dotted", "deep"))
            self.text += self.draw.choice(["dotted.deep = 1\n", 'dotted . "deep" = 1\n'])

    def document(self) -> Writer:
        self.statements(())
        for index in range(self.draw.randint(0, 3)):
            self.gap()
            self.note(("rows",))
            self.note(("rows", index))
            self.text += self.draw.choice(["[[rows]]\n", "[[ rows ]]  # row\n"])
            self.statements(("rows", index))
            for inner in range(self.draw.randint(0, 2)):
                self.gap()
                self.note(("rows", index, "inner"))
                self.note(("rows", index, "inner", inner))
                self.text += "[[rows.inner]]\n"
                self.statements(("rows", index, "inner", inner))
        self.gap()
        self.note(("last",))
        self.text += "[last]\n"
        self.statements(("last",))
        return self


def paths_of(value: Any, path: KeyPath = ()) -> set[KeyPath]:
    items: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    return {(*path, key) for key, _ in items}.union(*(paths_of(each, (*path, key)) for key, each in items))


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 10**9))
def test_every_key_is_found_on_the_line_it_was_written(seed: int) -> None:
    written = Writer(seed).document()
    assert paths_of(tomllib.loads(written.text)) == written.lines.keys()
    assert key_lines(written.text) == written.lines
