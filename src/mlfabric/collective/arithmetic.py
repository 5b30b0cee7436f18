"""How arrays are combined, given as bytes: by NumPy, for its number types and bfloat16.

Floats of 16 bits are combined as float32 and rounded once. The PyTorch part registers its own for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from mlfabric.collective.exchange import Combine
from mlfabric.collective.halves import WAYS, combine_halves
from mlfabric.errors import FabricError

_UFUNCS: Final[Mapping[str, Callable[..., Any]]] = {
    "sum": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}

# Who combines a type in the place of NumPy.
Combiner = Callable[[str, int], Combine]  # (reduction, ranks in the group)
_registered: dict[str, Combiner] = {}


def register_combiner(dtype: str, combiner: Combiner) -> None:
    _registered[dtype] = combiner


def combine_for(combine: str, dtype: str, size: int) -> Combine:
    """The function that reduces parts of this type; FabricError if there is none."""
    if dtype in _registered:
        return _registered[dtype](combine, size)
    if dtype in WAYS:
        return _halves(combine, dtype, size)
    try:
        kind = np.dtype(dtype)
    except TypeError:
        kind = np.dtype(object)
    if kind.kind not in "biufc":
        raise FabricError(f"{combine} of {dtype} is not supported")
    return numpy_combine(combine, dtype, size)


def _halves(combine: str, dtype: str, size: int) -> Combine:
    ufunc = _UFUNCS.get("sum" if combine == "avg" else combine)
    if ufunc is None or combine in ("band", "bor", "bxor"):
        raise FabricError(f"{combine} works on whole numbers, not on {dtype}")

    def run(parts: list[memoryview], own: int, out: memoryview, last: bool) -> None:
        combine_halves(dtype, ufunc, parts, out, size if combine == "avg" and last else 1)

    return run


def numpy_combine(combine: str, dtype: str, size: int) -> Combine:
    """The function that reduces parts of this type; `avg` is a sum divided by the size of the group."""
    kind = np.dtype(dtype)
    ufunc = _UFUNCS.get("sum" if combine == "avg" else combine)
    if ufunc is None:
        raise FabricError(f"unknown reduction {combine!r}; known are {', '.join([*_UFUNCS, 'avg'])}")
    if combine in ("band", "bor", "bxor") and kind.kind not in "iub":
        raise FabricError(f"{combine} works on whole numbers, not on {dtype}")
    if combine in ("min", "max") and kind.kind == "c":
        raise FabricError(f"{combine} needs an order, which {dtype} has not")
    if combine == "avg" and kind.kind in "iub":
        raise FabricError(f"avg needs a fraction, which {dtype} can't hold")
    average = combine == "avg"

    def run(parts: list[memoryview], own: int, out: memoryview, last: bool) -> None:
        total = np.frombuffer(out, kind)
        with np.errstate(all="ignore"):  # what overflows is the caller's matter, and in every rank's result
            fold(ufunc, [np.frombuffer(part, kind) for part in parts], own, total)
            if average and last:
                np.divide(total, size, out=total)

    return run


def fold(ufunc: Callable[..., Any], arrays: list[Any], own: int, total: Any) -> None:
    """Combine from the left into `total`, without a copy: what is used up holds the sum so far."""
    if len(arrays) == 1:
        total[...] = arrays[0]
        return
    sofar = arrays[0]
    scratch = arrays[1] if own == 0 else sofar
    for array in arrays[1:-1]:
        sofar = ufunc(sofar, array, out=scratch)
    ufunc(sofar, arrays[-1], out=total)
