"""16-bit floats by NumPy, which lacks one type and is slow at the other: widened, combined, and rounded once.

The bits are those that PyTorch makes (`torch.arithmetic`), which is faster and takes over where it is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numpy as np

# Few enough elements to stay in a processor's cache while they are widened.
_PIECE = 16384


def widen_bfloat16(halves: Any) -> Any:
    """float32 of bfloat16, whose bits are its upper half."""
    return (halves.astype(np.uint32) << 16).view(np.float32)


def narrow_bfloat16(floats: Any) -> Any:
    """bfloat16 of float32, to the nearest, ties to even."""
    bits = floats.view(np.uint32)
    rounded = ((bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16).astype(np.uint16)
    undefined = np.isnan(floats)
    if undefined.any():
        rounded[undefined] = 0x7FC0
    return rounded


@cache
def _every_float16() -> Any:
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


def widen_float16(halves: Any) -> Any:
    """float32 of float16: looked up, which takes half as long as NumPy's own way."""
    return np.take(_every_float16(), halves, mode="clip")


def narrow_float16(floats: Any) -> Any:
    return floats.astype(np.float16).view(np.uint16)


WAYS: Final = {"bfloat16": (widen_bfloat16, narrow_bfloat16), "float16": (widen_float16, narrow_float16)}


def combine_halves(
    dtype: str, function: Callable[..., Any], parts: list[memoryview], out: memoryview, divide_by: int
) -> None:
    """Combine from the left in float32, and round the result."""
    widen, narrow = WAYS[dtype]
    arrays = [np.frombuffer(part, np.uint16) for part in parts]
    total = np.frombuffer(out, np.uint16)
    with np.errstate(all="ignore"):
        for start in range(0, len(total), _PIECE):
            stop = start + _PIECE
            wide = widen(arrays[0][start:stop])
            for array in arrays[1:]:
                function(wide, widen(array[start:stop]), out=wide)
            if divide_by > 1:
                wide /= np.float32(divide_by)
            total[start:stop] = narrow(wide)
