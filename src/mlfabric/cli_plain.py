"""Commands whose parameters are words and numbers, turned into values without a validation library.

Typer loads one for every parameter, even for text and for --help; that takes longer than many a command does.
Anything but text, whole numbers, numbers, flags, paths and lists of them is left to Typer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, cast

import typer
from typer.core import TyperCommand, TyperGroup

_KINDS: Final[dict[Any, type]] = {
    str: str, int: int, float: float, bool: bool, Path: Path, list[str]: str, list[int]: int,
}  # fmt: skip
_NAMES: Final = {int: "whole number", float: "number"}


class _Plain:
    """Turns the words of one parameter into plain values."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        several = param.multiple or param.nargs == -1
        if value is None:
            return () if several else None
        try:
            return [self._kind(each) for each in value] if several else self._kind(value)
        except ValueError:
            name = _NAMES.get(self._kind, self._kind.__name__)
            raise typer.BadParameter(f"{value!r} is not a {name}", ctx=ctx, param=param) from None


def _made_plain(parameters: Any) -> Any:
    for parameter in parameters:
        descriptor = getattr(parameter, "type_descriptor", None)
        kind = _KINDS.get(getattr(descriptor, "annotation", None))
        if kind is not None:
            cast(Any, parameter)._runtime_param = _Plain(kind)
    return parameters


class PlainCommand(TyperCommand):
    def get_params(self, ctx: Any) -> Any:
        return _made_plain(super().get_params(ctx))


class PlainGroup(TyperGroup):
    def get_params(self, ctx: Any) -> Any:
        return _made_plain(super().get_params(ctx))
