"""Tensors as bytes: what goes straight over the wire, and what needs a contiguous copy first."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mlfabric.torch.errors import CollectiveError

# Types whose layout torch does not promise; all others are plain bytes.
_OPAQUE = ("q", "bits")


def dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def check(tensor: object, sparse: bool = False) -> str:
    """Why a tensor can't be used; empty if it can."""
    if not isinstance(tensor, torch.Tensor):
        return f"a {type(tensor).__name__} is not a tensor"
    if tensor.device.type != "cpu":
        return f"a tensor on {tensor.device} can't be moved by mlfabric, which works on CPU tensors"
    if tensor.layout is not torch.strided and not (sparse and tensor.layout is torch.sparse_coo):
        return f"a tensor of layout {str(tensor.layout).removeprefix('torch.')} can't be used here"
    if dtype_name(tensor).startswith(_OPAQUE):
        return f"tensors of {dtype_name(tensor)} can't be sent"
    return ""


def view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor."""
    # A tensor of one element counts as contiguous whatever its strides; view() would keep them.
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    data: memoryview = flat.view(torch.uint8).numpy().data
    return data


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its memory is its elements in order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a copy whose memory is its elements in order."""
    if is_plain(tensor):
        return tensor.detach()
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


class Outputs:
    """Tensors to be filled: in place where their memory allows, else copied to them at the end."""

    def __init__(self) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def inout(self, tensor: torch.Tensor) -> torch.Tensor:
        """What to work on in the place of a tensor that is read and written."""
        if is_plain(tensor):
            return tensor.detach()
        staged = plain(tensor)
        self._copies.append((tensor, staged))
        return staged

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """What to work on in the place of a tensor that is only written."""
        if is_plain(tensor):
            return tensor.detach()
        staged = torch.empty(tensor.shape, dtype=tensor.dtype)
        self._copies.append((tensor, staged))
        return staged

    def packed(self, tensors: Sequence[torch.Tensor], filled: bool) -> torch.Tensor:
        """Several tensors as one flat array; `filled` with what they hold."""
        flat = torch.empty(sum(each.numel() for each in tensors), dtype=tensors[0].dtype)
        at = 0
        for each in tensors:
            part = flat[at : at + each.numel()]
            if filled:
                part.copy_(each.detach().reshape(-1))
            self._copies.append((each, part.view(each.shape)))
            at += each.numel()
        return flat

    @property
    def pending(self) -> bool:
        return bool(self._copies)

    def finish(self) -> None:
        with torch.no_grad():
            for tensor, staged in self._copies:
                tensor.copy_(staged)


def same(tensors: Sequence[torch.Tensor], what: str) -> str:
    """Why tensors that should be of one type are not; empty if they are."""
    kinds = sorted({dtype_name(each) for each in tensors})
    return f"{what} are of different types: {', '.join(kinds)}" if len(kinds) > 1 else ""


def require(*reasons: str) -> None:
    for reason in reasons:
        if reason:
            raise CollectiveError(reason)
