"""A worker's committed updates that are not known to be at the replica, and who waits for that."""

from __future__ import annotations

from collections.abc import Mapping

from mlfabric.messages import DurableWanted, ShardRange, UpdateApplied, Version
from mlfabric.roles.actions import Action, Note, ResolveDurable, ResolveUpdate, Send


class Durability:
    def __init__(self, shards: Mapping[int, ShardRange]) -> None:
        self._shards = shards  # the worker's: as it knows them
        self._undurable: dict[str, dict[int, Version]] = {}  # update -> version per shard
        self._waits: dict[str, set[int]] = {}
        self._lost: set[str] = set()  # of these: at one shard, and another may lose them too

    def committed(self, update: str, acks: Mapping[int, UpdateApplied]) -> None:
        pending = {
            index: ack.version
            for index, ack in acks.items()
            if ack.durable is not None and ack.version > ack.durable
        }
        if pending:
            self._undurable[update] = pending

    def updates(self) -> tuple[str, ...]:
        return tuple(self._undurable)

    def of_shard(self, shard: int) -> list[str]:
        return [update for update, shards in self._undurable.items() if shard in shards]

    def advance(self, shard: int, durable: Version) -> None:
        """The replica of this shard holds everything up to here."""
        for update in self.of_shard(shard):
            if self._undurable[update][shard] <= durable and update not in self._waits:
                del self._undurable[update][shard]
                if not self._undurable[update]:
                    del self._undurable[update]

    def want(self, update: str) -> list[Action]:
        shards = self._undurable.get(update)
        if not shards:
            if all(shard.replica is None for shard in self._shards.values()):
                return [
                    ResolveDurable(update, "this job has no replica; publish with divergence= to get one")
                ]
            return [ResolveDurable(update)]
        self._waits[update] = set(shards)
        return [
            Send(self._shards[index].leader, f"server.{index}", DurableWanted(update, index))
            for index in shards
        ]

    def reached(self, update: str, shard: int) -> list[Action]:
        held = self._undurable.get(update)
        if held is not None:
            held.pop(shard, None)
            if not held:
                del self._undurable[update]
        waiting = self._waits.get(update)
        if waiting is None:
            return []
        waiting.discard(shard)
        if waiting:
            return []
        del self._waits[update]
        return [ResolveDurable(update)]

    def is_lost(self, update: str) -> bool:
        """Whether a shard has lost it already."""
        return update in self._lost

    def lose(self, update: str, shard: int) -> list[Action]:
        """A fail-over went back to a replica that did not have it. The worker is told once, the log of every
        shard that lost it."""
        reason = f"committed, but not in the replica that took over shard {shard}"
        actions: list[Action] = [Note("lost", reason, (update,), loud=True, shards=(shard,))]
        if not self.is_lost(update):
            actions.append(ResolveUpdate(update, True, reason=reason, lost=True))
        self._lost.add(update)
        del self._undurable[update][shard]
        if not self._undurable[update]:
            del self._undurable[update]
        self._lost &= self._undurable.keys()
        if self._waits.pop(update, None) is not None:
            actions.append(ResolveDurable(update, f"update {update} was lost: {reason}"))
        return actions
