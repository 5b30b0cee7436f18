"""Hypothesis strategies for our records, made from their type hints."""

from __future__ import annotations

import functools
import types
import typing
from typing import Any

import msgspec
from hypothesis import strategies as st

numbers = st.integers(-(2**63), 2**63 - 1)
# Infinite and undefined numbers never belong on the wire, and undefined ones equal nothing.
reals = st.floats(allow_nan=False, allow_infinity=False)


@functools.cache
def records(kind: Any) -> st.SearchStrategy[Any]:
    """Instances of a struct, a union of structs, or of whatever its fields are made of."""
    plain: dict[Any, st.SearchStrategy[Any]] = {
        int: numbers,
        float: reals,
        bool: st.booleans(),
        str: st.text(max_size=12),
        bytes: st.binary(max_size=40),
        type(None): st.none(),
    }
    if kind in plain:
        return plain[kind]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return st.one_of([records(each) for each in arguments])
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(records(arguments[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*(records(each) for each in arguments))
    if origin is dict:
        return st.dictionaries(*(records(each) for each in arguments), max_size=3)
    assert issubclass(kind, msgspec.Struct), f"no strategy for {kind}"
    fields = typing.get_type_hints(kind)
    return st.builds(kind, **{name: records(fields[name]) for name in kind.__struct_fields__})
