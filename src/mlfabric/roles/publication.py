"""A worker's side of publishing: the first values of a model on their way to those who lead its shards."""

from __future__ import annotations

from mlfabric.events import PublishRequested
from mlfabric.messages import ArraySpec, InitialPart, PublishWanted, ShardRange
from mlfabric.roles.actions import Action, FreeBuffer, StartTransfer

# A part of the first model that came too early is tried again after this time.
AGAIN_S = 0.05


class Publication:
    def __init__(self, node: str) -> None:
        self._node = node
        self._request: PublishRequested | None = None
        self._parts: dict[str, StartTransfer] = {}  # the first values on their way, by transfer
        self._again: dict[str, float] = {}  # those that broke off, and when to try again

    def begin(self, request: PublishRequested) -> PublishWanted:
        self._request = request
        return _wanted(request)

    def wanted(self) -> PublishWanted | None:
        """What is still to be published."""
        return _wanted(self._request) if self._request is not None else None

    def is_of(self, arrays: tuple[ArraySpec, ...], parts: tuple[ArraySpec, ...]) -> bool:
        request = self._request
        return request is not None and (request.arrays, request.parts) == (arrays, parts)

    def send(self, shards: tuple[ShardRange, ...]) -> list[Action]:
        request = self._request
        if request is None:
            return []
        starts = [
            StartTransfer(
                transfer=f"{self._node}/initial/{shard.index}",
                node=shard.leader,
                role=f"server.{shard.index}",
                buffer=request.buffer,
                about=InitialPart(shard.index, request.version, request.state_vectors > 0),
                ranges=tuple(
                    (vector * request.elements + shard.start, shard.count)
                    for vector in range(1 + request.state_vectors)
                ),
            )
            for shard in shards
        ]
        self._parts = {start.transfer: start for start in starts}
        return list(starts)

    def failed(self, transfer: str, now: float) -> bool:
        """Whether this was a part of it. Its server has not heard yet that it is one: word and bytes take
        different ways."""
        if transfer not in self._parts:
            return False
        self._again[transfer] = now + AGAIN_S
        return True

    def send_again(self, now: float) -> list[Action]:
        due = [transfer for transfer, at in self._again.items() if now >= at]
        for transfer in due:
            del self._again[transfer]
        return [self._parts[transfer] for transfer in due]

    def deadlines(self) -> list[float]:
        return list(self._again.values())

    def end(self) -> list[Action]:
        request, self._request = self._request, None
        self._parts.clear()
        self._again.clear()
        return [FreeBuffer(request.buffer)] if request else []


def _wanted(request: PublishRequested) -> PublishWanted:
    return PublishWanted(
        request.arrays,
        request.rule,
        request.settings,
        request.elements,
        request.dtype,
        request.state_vectors,
        request.version,
        request.parts,
    )
