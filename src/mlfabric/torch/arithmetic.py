"""How tensors are combined: by NumPy, or by torch for the types that NumPy lacks or is slow at.

These are floats of 16 bits: combined as float32 and rounded once, to the same bits as without torch
(`collective.halves`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from mlfabric.collective.arithmetic import register_combiner
from mlfabric.collective.exchange import Combine
from mlfabric.errors import FabricError
from mlfabric.numerics import Vector

# Below so many elements torch adds on the calling thread alone: the engine must not start a pool of its own.
_SERIAL_ELEMENTS = 32768

_TORCH: dict[str, torch.dtype] = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_FUNCTIONS: dict[str, Any] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}


def register_types() -> None:
    """Have torch combine its types, in whatever process it is loaded."""
    for name, dtype in _TORCH.items():
        register_combiner(name, partial(_torch_combine, dtype))


def _torch_combine(dtype: torch.dtype, combine: str, size: int) -> Combine:
    function = _FUNCTIONS.get(combine)
    if function is None:
        raise FabricError(f"{combine} works on whole numbers, not on {str(dtype).removeprefix('torch.')}")
    average = combine == "avg"

    def run(parts: list[memoryview], own: int, out: memoryview, last: bool) -> None:
        arrays = [torch.frombuffer(part, dtype=dtype) for part in parts]
        total = torch.frombuffer(out, dtype=dtype)
        for start in range(0, len(total), _SERIAL_ELEMENTS):
            stop = start + _SERIAL_ELEMENTS
            wide = arrays[0][start:stop].float()
            for array in arrays[1:]:
                function(wide, array[start:stop], out=wide)
            if average and last:
                wide /= size
            total[start:stop] = wide

    return run


def convert(source: Vector, into: Vector) -> None:
    """Copy numbers of one type into an array of another; NumPy is far slower at making float16."""
    numbers, place = torch.from_numpy(source), torch.from_numpy(into)
    for start in range(0, len(place), _SERIAL_ELEMENTS):
        place[start : start + _SERIAL_ELEMENTS] = numbers[start : start + _SERIAL_ELEMENTS]
