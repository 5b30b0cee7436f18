"""Where each key of a TOML text stands, for error messages that name a line.

`tomllib` gives values without positions. This walks a text that `tomllib` has accepted and notes the line of
every key and array element; it checks nothing.
"""

from __future__ import annotations

import re
from typing import Final

KeyPath = tuple[str | int, ...]

_SPACE: Final = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_BLANK: Final = re.compile(r"[ \t]*")
_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_\-]+")
_BARE_VALUE: Final = re.compile(r"[^,\]}\n#]*")
_STRING: Final = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}' r"|'''.*?'{3,5}" r'|"(?:[^"\\\n]|\\.)*"' r"|'[^'\n]*'", re.DOTALL
)


def key_lines(text: str) -> dict[KeyPath, int]:
    """The line of every key: ("hosts", 0, "rate") of the first [[hosts]] table, say."""
    return _Walk(text).lines


class _Walk:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._lines_seen = 1
        self._counted_to = 0
        self._tables: dict[KeyPath, int] = {}  # index of the last table of each array of tables
        self.lines: dict[KeyPath, int] = {}
        table: KeyPath = ()
        self._skip(_SPACE)
        while self._at < len(text):
            if text[self._at] == "[":
                table = self._header()
            else:
                self._pair(table)
            self._skip(_SPACE)

    def _skip(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self._at)
        assert match is not None, "the text is not the TOML that was accepted"
        self._at = match.end()
        return match.group()

    def _ahead(self) -> str:
        return self._text[self._at : self._at + 1]

    def _note(self, path: KeyPath, at: int) -> None:
        self._lines_seen += self._text.count("\n", self._counted_to, at)
        self._counted_to = at
        self.lines.setdefault(path, self._lines_seen)

    def _header(self) -> KeyPath:
        start = self._at
        many = self._text.startswith("[[", start)
        self._at += 2 if many else 1
        path: KeyPath = ()
        keys = self._dotted()
        for depth, key in enumerate(keys, start=1):
            path = (*path, key)
            if many and depth == len(keys):
                self._note(path, start)
                self._tables[path] = self._tables.get(path, -1) + 1
            if path in self._tables:
                path = (*path, self._tables[path])
            self._note(path, start)
        self._at += 2 if many else 1
        return path

    def _dotted(self) -> list[str]:
        keys = []
        while True:
            self._skip(_BLANK)
            quoted = self._ahead() in ('"', "'")
            keys.append(self._skip(_STRING)[1:-1] if quoted else self._skip(_BARE_KEY))
            self._skip(_BLANK)
            if self._ahead() != ".":
                return keys
            self._at += 1

    def _pair(self, table: KeyPath) -> None:
        start, path = self._at, table
        for key in self._dotted():
            path = (*path, key)
            self._note(path, start)
        self._at += 1  # the equals sign
        self._skip(_BLANK)
        self._value(path)

    def _value(self, path: KeyPath) -> None:
        opening = self._ahead()
        if opening in ('"', "'"):
            self._skip(_STRING)
        elif opening in ("[", "{"):
            self._at += 1
            self._skip(_SPACE)
            index = 0
            while self._ahead() not in ("]", "}"):
                if opening == "[":
                    self._note((*path, index), self._at)
                    self._value((*path, index))
                    index += 1
                else:
                    self._pair(path)
                self._skip(_SPACE)
                if self._ahead() == ",":
                    self._at += 1
                    self._skip(_SPACE)
            self._at += 1
        else:
            self._skip(_BARE_VALUE)
