"""How grants are taken back: numbers given up at the servers, groups that failed, updates sent again."""

from __future__ import annotations

from dataclasses import dataclass, field

from mlfabric.messages import (
    DropUpdate,
    LeaveOut,
    LeftOut,
    OfferAgain,
    SettleSlot,
    SlotLate,
    SlotWithdrawn,
    WithdrawSlot,
)
from mlfabric.roles.actions import Action, Note, Send
from mlfabric.roles.entries import Entries


@dataclass(slots=True)
class _Withdrawal:
    """A number that is being given up, and what follows once all shards have answered."""

    update: str | None  # of a single update; a group's members are offered again by themselves
    why: str
    asked: set[int]
    ask: set[int]  # have not answered yet
    drop: bool  # tell the worker that it is dropped
    refused: set[int] = field(default_factory=set)


class Withdrawing:
    def __init__(self, entries: Entries) -> None:
        self._entries = entries
        self._withdrawals: dict[tuple[int, int], _Withdrawal] = {}  # by number and shard

    def void(self, update: str, why: str) -> list[Action]:
        """Take back a grant: give up its direct slots, leave it out of groups."""
        granted = self._entries.granted.pop(update)
        actions: list[Action] = []
        direct = {part.shard for part in granted.parts.values() if part.group is None}
        self._entries.leaving.update({(shard, update): granted.number for shard in direct})
        if direct:
            actions += self._ask_withdrawal(granted.number, None, why, direct, drop=False)
        for part in granted.parts.values():
            gathering = self._entries.groups.get(part.group or "")
            if gathering is not None:
                gathering.members.discard(update)
                self._entries.leaving[part.shard, update] = gathering.slot
                actions.append(
                    Send(gathering.aggregator, "aggregator", LeaveOut(gathering.group, update, why))
                )
        return actions

    def _ask_withdrawal(
        self, number: int, update: str | None, why: str, shards: set[int], drop: bool
    ) -> list[Action]:
        withdrawal = _Withdrawal(update, why, set(shards), set(shards), drop)
        for index in shards:
            earlier = self._withdrawals.get((number, index))
            if earlier is not None:  # what it still waits for is settled with this one
                withdrawal.asked |= earlier.asked
                withdrawal.ask |= earlier.ask
                withdrawal.refused |= earlier.refused - shards
        for index in withdrawal.ask:
            self._withdrawals[number, index] = withdrawal
        return [
            Send(self._entries.shards[index].range.leader, f"server.{index}", WithdrawSlot(number, why))
            for index in sorted(shards)
        ]

    def withdrawn(self, answer: SlotWithdrawn, now: float) -> list[Action]:
        withdrawal = self._withdrawals.pop((answer.number, answer.shard), None)
        if withdrawal is None:
            return []
        withdrawal.ask.discard(answer.shard)
        if not answer.withdrawn:
            withdrawal.refused.add(answer.shard)
        if not answer.waiting:
            gone = [
                k
                for k, slot in self._entries.leaving.items()
                if k[0] == answer.shard and slot == answer.number
            ]
            for key in gone:
                del self._entries.leaving[key]
            self._entries.plan_soon(now)
        if withdrawal.ask:
            return []
        update = withdrawal.update
        dropped = not withdrawal.refused
        final = withdrawal.drop and dropped
        # An update is dropped everywhere or nowhere; one that was offered again leaves where it can.
        actions: list[Action] = [
            Send(
                book.range.leader,
                f"server.{index}",
                SettleSlot(
                    answer.number,
                    dropped=dropped if withdrawal.drop else index not in withdrawal.refused,
                    final=final,
                ),
            )
            for index, book in sorted(self._entries.shards.items())
            if index in withdrawal.asked
        ]
        if not withdrawal.drop or update is None:
            return actions
        if not dropped:
            parts = ", ".join(str(index) for index in sorted(withdrawal.refused))
            return [*actions, Note("kept", f"late, but shards {parts} have it already", (update,))]
        granted = self._entries.granted.pop(update, None)
        if granted is not None:
            self._entries.counts["dropped_late"] += 1
            actions += [
                Note("dropped", withdrawal.why, (update,)),
                Send(granted.worker, "worker", DropUpdate(update, withdrawal.why, late=True)),
            ]
        return actions

    def slot_late(self, message: SlotLate) -> list[Action]:
        asked = [w for (number, _), w in self._withdrawals.items() if number == message.number]
        if any(message.shard in withdrawal.asked for withdrawal in asked):
            return []
        under_way = next((withdrawal for withdrawal in asked if withdrawal.drop), None)
        if under_way is not None:  # an update is dropped everywhere or nowhere
            under_way.asked.add(message.shard)
            under_way.ask.add(message.shard)
            self._withdrawals[message.number, message.shard] = under_way
            range_ = self._entries.shards[message.shard].range
            return [
                Send(range_.leader, f"server.{message.shard}", WithdrawSlot(message.number, under_way.why))
            ]
        for granted in self._entries.granted.values():
            part = granted.parts.get(message.shard)
            if part is None or part.slot != message.number:
                continue
            if part.group is not None:
                return self.fail_group(part.group, f"group {part.group} silent {message.silent_s:.1f} s")
            why = f"overtaken, host {granted.worker} silent {message.silent_s:.1f} s"
            shards = set(granted.parts)
            return self._ask_withdrawal(message.number, granted.offer.update, why, shards, drop=True)
        # Nobody is behind it any more: clear the way.
        return self._ask_withdrawal(message.number, None, "nothing will come", {message.shard}, drop=False)

    def fail_group(self, name: str, why: str) -> list[Action]:
        gathering = self._entries.groups.pop(name, None)
        if gathering is None:
            return []
        self._entries.leaving.update(
            {(gathering.shard, update): gathering.slot for update in gathering.members}
        )
        actions = self._ask_withdrawal(gathering.slot, None, why, {gathering.shard}, drop=False)
        for update in sorted(gathering.members):
            actions += self._send_again(update, name, gathering.shard, why)
        return actions

    def _send_again(self, update: str, group: str, shard: int, why: str) -> list[Action]:
        granted = self._entries.granted.get(update)
        if granted is None or shard not in granted.parts or granted.parts[shard].group != group:
            return []
        self._entries.finish_part(granted, shard)
        return [Send(granted.worker, "worker", OfferAgain(update, (shard,), why))]

    def left_out(self, message: LeftOut, now: float) -> list[Action]:
        for update in message.updates:
            if self._entries.leaving.pop((message.shard, update), None) is not None:
                self._entries.plan_soon(now)
        gathering = self._entries.groups.get(message.group)
        if gathering is not None and gathering.members <= set(message.updates):
            return self.fail_group(message.group, message.reason)
        return [
            action
            for update in message.updates
            for action in self._send_again(update, message.group, message.shard, message.reason)
        ]

    def is_asked(self, number: int) -> bool:
        """Whether servers have yet to say if they can do without this number."""
        return any(asked == number for asked, _ in self._withdrawals)

    def is_dropping(self) -> bool:
        """Whether servers have yet to say if they can do without an update that is to be dropped."""
        return any(withdrawal.drop for withdrawal in self._withdrawals.values())

    def lead_moved(self, shard: int, now: float) -> list[Action]:
        """The new leader knows nothing of what was being taken back there: that has no way to it any more."""
        epoch = self._entries.shards[shard].range.epoch
        actions: list[Action] = []
        for number, index in [key for key in self._withdrawals if key[1] == shard]:
            actions += self.withdrawn(SlotWithdrawn(index, epoch, number, withdrawn=True), now)
        self._entries.leaving = {key: slot for key, slot in self._entries.leaving.items() if key[0] != shard}
        return actions

    def leader_lost(self, shard: int) -> None:
        """Nothing granted reaches the old leader; workers offer again once they know the new one."""
        for name, gathering in list(self._entries.groups.items()):
            if gathering.shard == shard:
                del self._entries.groups[name]
        for granted in list(self._entries.granted.values()):
            if shard in granted.parts:
                self._entries.finish_part(granted, shard)
        self._withdrawals = {key: w for key, w in self._withdrawals.items() if shard not in w.ask}
        self._entries.leaving = {key: slot for key, slot in self._entries.leaving.items() if key[0] != shard}
