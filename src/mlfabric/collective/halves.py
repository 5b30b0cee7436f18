"""bfloat16 by NumPy, which has no such type: numbers are widened, combined and rounded again, one by one.

The bits are those of PyTorch's own arithmetic, which is faster and takes over where it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

# Few enough elements to stay in a processor's cache while they are widened.
_PIECE = 16384


def widen(halves: Any) -> Any:
    """float32 of bfloat16, whose bits are its upper half."""
    return (halves.astype(np.uint32) << 16).view(np.float32)


def narrow(floats: Any) -> Any:
    """bfloat16 of float32, to the nearest, ties to even."""
    bits = floats.view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16).astype(np.uint16)
    undefined = np.isnan(floats)
    if undefined.any():
        rounded[undefined] = 0x7FC0
    return rounded


def combine_bfloat16(
    function: Callable[[Any, Any], Any], parts: list[memoryview], out: memoryview, divide_by: int
) -> None:
    """Combine from the left, rounding after every step."""
    arrays = [np.frombuffer(part, np.uint16) for part in parts]
    total = np.frombuffer(out, np.uint16)
    with np.errstate(all="ignore"):
        for start in range(0, len(total), _PIECE):
            stop = start + _PIECE
            sofar = arrays[0][start:stop]
            for array in arrays[1:]:
                sofar = narrow(function(widen(sofar), widen(array[start:stop])))
            if divide_by > 1:
                sofar = narrow(widen(sofar) / np.float32(divide_by))
            total[start:stop] = sofar
