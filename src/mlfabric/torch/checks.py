"""What is wrong with the tensors of a call: each function answers with a sentence, empty if all is well."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mlfabric.torch import memory

Tensors = Sequence[torch.Tensor]


def one(held: Sequence[Any]) -> str:
    return "" if len(held) == 1 else f"one tensor (or list) is expected, not {len(held)}"


def counted(held: Sequence[Any], count: int, what: str) -> str:
    return "" if len(held) == count else f"{len(held)} {what} are given, {count} are needed"


def pairs(outputs: Tensors, inputs: Tensors, count: int, scatter: bool) -> str:
    """What is wrong with pairs of a tensor of all ranks and a tensor of one."""
    every = [*outputs, *inputs]
    reasons = [counted(outputs, len(inputs), "outputs")] + [memory.check(each) for each in every]
    if any(reasons) or not every:
        return next(filter(None, reasons), "there is no tensor")
    if memory.same(every, "inputs and outputs"):
        return memory.same(every, "inputs and outputs")
    for output, mine in zip(outputs, inputs, strict=True):
        small, large = (output, mine) if scatter else (mine, output)
        if large.numel() != small.numel() * count:
            names = ("input", "output") if scatter else ("output", "input")
            return (
                f"the {names[0]} has {large.numel()} elements, not {count} times the "
                f"{small.numel()} of the {names[1]}"
            )
    return ""


def splits(tensor: torch.Tensor, splits: Sequence[int], count: int, what: str) -> str:
    rows = tensor.shape[0] if tensor.dim() else 0
    if not splits:
        if rows % count:
            return f"the {what} has {rows} rows, which {count} ranks can't share evenly"
        return ""
    if len(splits) != count:
        return f"{len(splits)} splits of the {what} are given for {count} ranks"
    if min(splits) < 0 or sum(splits) != rows:
        return f"the splits of the {what} add up to {sum(splits)}, it has {rows} rows"
    return ""


def cut(tensor: torch.Tensor, splits: Sequence[int], count: int) -> list[torch.Tensor]:
    return list(tensor.split(list(splits) or [tensor.shape[0] // count] * count))
