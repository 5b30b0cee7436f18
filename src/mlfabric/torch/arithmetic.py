"""How tensors are combined: by NumPy, or by torch for the types that NumPy lacks or is slow at."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from mlfabric.collective.arithmetic import register_combiner
from mlfabric.collective.exchange import Combine
from mlfabric.errors import FabricError

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
            piece = total[start:stop]
            _fold(function, [array[start:stop] for array in arrays], own, piece)
            if average and last:
                torch.div(piece, size, out=piece)

    return run


def _fold(function: Any, arrays: list[torch.Tensor], own: int, total: torch.Tensor) -> None:
    """Combine from the left into `total`; what is used up holds the sum so far."""
    if len(arrays) == 1:
        total.copy_(arrays[0])
        return
    sofar = arrays[0]
    scratch = arrays[1] if own == 0 else sofar
    for array in arrays[1:-1]:
        sofar = function(sofar, array, out=scratch)
    function(sofar, arrays[-1], out=total)
