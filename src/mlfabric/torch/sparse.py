"""Sums of sparse tensors: everybody's indices and values go to all, who add them up in the same order."""

from __future__ import annotations

import torch

from mlfabric.collective.calls import GATHER_ANY, Call, reads
from mlfabric.torch.errors import CollectiveError
from mlfabric.torch.memory import dtype_name, view


class SparseSum:
    def __init__(self, tensor: torch.Tensor, rank: int, size: int) -> None:
        self._tensor = tensor
        self._rank = rank
        self._size = size
        mine = tensor.detach().coalesce()
        values = mine.values().contiguous()
        # Indices first, as bytes: how many there are follows from the length.
        self._packed = torch.cat(
            [
                mine.indices().contiguous().view(-1).view(torch.uint8),
                values.view(-1).view(torch.uint8),
            ]
        )
        self._parts: dict[int, torch.Tensor] = {rank: self._packed}
        self._entry_bytes = 8 * mine.sparse_dim() + values[:1].numel() * values.element_size()
        if not values.shape[0]:
            dense = torch.Size(mine.shape[mine.sparse_dim() :]).numel()
            self._entry_bytes = 8 * mine.sparse_dim() + dense * values.element_size()
        # What has to be the same everywhere, in the place of the type.
        self._kind = f"{dtype_name(tensor)} in {tuple(tensor.shape)} by {mine.sparse_dim()} indices"

    def call(self) -> Call:
        return Call(GATHER_ANY, self._kind, blocks=(reads(view(self._packed)),), room=self._room)

    def _room(self, rank: int, length: int) -> memoryview:
        self._parts[rank] = torch.empty(length, dtype=torch.uint8)
        return view(self._parts[rank])

    def finish(self) -> None:
        tensor = self._tensor
        total = None
        for rank in range(self._size):
            part = self._unpack(self._parts[rank])
            total = part if total is None else total + part
        assert total is not None
        with torch.no_grad():
            tensor.copy_(total.coalesce())

    def _unpack(self, packed: torch.Tensor) -> torch.Tensor:
        tensor = self._tensor
        entries, rest = divmod(packed.numel(), self._entry_bytes)
        if rest:
            raise CollectiveError("a rank sent a sparse tensor of another kind")
        dims = tensor.sparse_dim()
        cut = entries * dims * 8
        indices = packed[:cut].clone().view(torch.int64).view(dims, entries)
        values = packed[cut:].clone().view(tensor.dtype).view(entries, *tensor.shape[dims:])
        return torch.sparse_coo_tensor(indices, values, tensor.shape, is_coalesced=True)
