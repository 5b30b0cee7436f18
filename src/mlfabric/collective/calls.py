"""Collective calls as data: what is asked for and on which memory, so that whoever runs the group, in this
process or in another one beside it, can make the operation of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlfabric.collective import movements, operations
from mlfabric.collective.arithmetic import combine_for
from mlfabric.collective.operations import Operation

# Makes the place for another rank's bytes, once it is known how many they are.
Room = Callable[[int, int], memoryview]


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of the caller's memory, and what the operation does with it."""

    view: memoryview
    read: bool
    written: bool
    rank: int = -1  # whose it is, where blocks belong to ranks


def reads(view: memoryview, rank: int = -1) -> Block:
    return Block(view, True, False, rank)


def writes(view: memoryview, rank: int = -1) -> Block:
    # A part of it may stay as it is, where a call fails or a message is shorter.
    return Block(view, False, True, rank)


def changes(view: memoryview, rank: int = -1) -> Block:
    return Block(view, True, True, rank)


@dataclass(frozen=True, slots=True)
class Call:
    """One rank's call of a collective operation."""

    operation: str
    dtype: str = ""
    itemsize: int = 1
    combine: str = ""
    root: int = -1
    blocks: tuple[Block, ...] = ()
    counts: tuple[int, ...] = ()  # elements, where the call is refused
    mistake: str = ""  # why it can't be carried out: it takes its turn all the same
    room: Room | None = None
    follows: bool = False  # one of many alike: it may begin before all have come to it


# The operation that gathers as many bytes as each rank has.
GATHER_ANY = "sparse all_reduce"


def make_operation(call: Call, rank: int, size: int) -> Operation:
    """What this rank of a group of so many has to do; FabricError where it can't be done."""
    if call.mistake:
        return operations.refused(
            call.operation, call.dtype, call.combine, call.root, call.counts, call.mistake
        )
    views = [block.view for block in call.blocks]
    by_rank = {block.rank: block.view for block in call.blocks if block.rank >= 0}
    itemsize, dtype, root = call.itemsize, call.dtype, call.root
    match call.operation:
        case "all_reduce":
            add = combine_for(call.combine, dtype, size)
            return operations.all_reduce(
                rank, size, views[0], itemsize, dtype, call.combine, add, follows=call.follows
            )
        case "reduce":
            add = combine_for(call.combine, dtype, size)
            return operations.reduce(rank, size, root, views[0], itemsize, dtype, call.combine, add)
        case "reduce_scatter":
            add = combine_for(call.combine, dtype, size)
            return operations.reduce_scatter(
                rank, size, views[:-1], views[-1], itemsize, dtype, call.combine, add
            )
        case "broadcast":
            return movements.broadcast(rank, size, root, views[0], itemsize, dtype)
        case "all_gather":
            own = by_rank.pop(rank)
            return movements.all_gather(rank, size, own, by_rank, itemsize, dtype)
        case "gather":
            return movements.gather(rank, size, root, views[0], by_rank, itemsize, dtype)
        case "scatter":
            return movements.scatter(rank, size, root, views[0], by_rank, itemsize, dtype)
        case "all_to_all":
            return movements.all_to_all(rank, size, views[:size], views[size:], itemsize, dtype)
        case "barrier":
            return movements.barrier()
    assert call.operation == GATHER_ANY, call.operation
    assert call.room is not None
    return movements.all_gather_any(rank, size, views[0], call.room, GATHER_ANY, dtype)
