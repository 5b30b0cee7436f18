"""In which order what arrives is applied, and what a plan costs by that.

A position is a place in the order of application, so an update that stands before others and arrives after
them holds them up at the server. Positions follow predicted completion as far as deadlines allow; where a
deadline wants it otherwise, those behind count from when they can be applied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from itertools import accumulate
from typing import NamedTuple

from mlfabric.plan.forest import Cargo, Node, last_position, members_of


class Arrival(NamedTuple):
    """What arrives at the servers as one: an update, or a sum. Members by deadline."""

    members: Sequence[int]
    finish_s: float
    last_position: int  # that its last member may have
    node: int  # its place in the layout


def find_arrivals(
    nodes: Sequence[Node], finishes_s: Mapping[int, float], deadlines: Sequence[int]
) -> list[Arrival]:
    """Nodes as the servers see them; completions are by update."""
    messages = []
    for k, node in enumerate(nodes):
        members = members_of(node)
        if len(members) > 1:
            members = tuple(sorted(members, key=lambda i: (deadlines[i], i)))
        messages.append(Arrival(members, finishes_s[members[0]], last_position(members, deadlines), k))
    return messages


def number_arrivals(messages: Sequence[Arrival]) -> list[Arrival]:
    """In the order of application: by predicted completion, except where a deadline wants one earlier.

    From the back, each place goes to the message that completes last among those whose deadline allows it.
    So no two neighbours stand against their completions unless the other way round one would be too late; and
    if any order meets all deadlines this one does: a message that may be last can always be put last. Where
    none may be last any more, as one was overtaken, it is the one that is too late by the least.
    """
    waiting = sorted(range(len(messages)), key=lambda k: (messages[k].last_position, k))
    eligible: list[tuple[float, int]] = []
    reverse: list[Arrival] = []
    position = sum([len(message.members) for message in messages]) - 1
    while position >= 0:
        while waiting and (not eligible or messages[waiting[-1]].last_position >= position):
            k = waiting.pop()
            heappush(eligible, (-messages[k].finish_s, -k))
        message = messages[-heappop(eligible)[1]]
        reverse.append(message)
        position -= len(message.members)
    return reverse[::-1]


def applied_s(order: Sequence[Arrival]) -> list[float]:
    """When each message of an order can be applied: with the last arrival up to and including it."""
    return list(accumulate((arrival.finish_s for arrival in order), max))


def hold_others_up(order: Sequence[Arrival]) -> list[bool]:
    """By message of an order: does it stand before one that arrives earlier?"""
    behind = list(accumulate((arrival.finish_s for arrival in reversed(order)), min))[::-1]
    return [arrival.finish_s > earliest for arrival, earliest in zip(order, behind, strict=True)]


def plan_cost(nodes: Sequence[Node], finishes_s: Mapping[int, float], cargo: Cargo, now_s: float) -> float:
    """Seconds from now until updates are applied: the last of them, or their mean."""
    if cargo.last_counts:
        return max(finishes_s.values()) - now_s  # whatever the order, the last to arrive is the last to count
    total, count = sum(finishes_s.values()), len(finishes_s)
    if cargo.may_be_late():
        order = number_arrivals(find_arrivals(nodes, finishes_s, cargo.deadlines))
        waits = zip(order, applied_s(order), strict=True)
        total += sum([len(arrival.members) * (at_s - arrival.finish_s) for arrival, at_s in waits])
    return total / count - now_s
