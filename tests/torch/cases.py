"""Random collective calls: what every rank brings, the call for any backend, and what must come out."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

FLOATS = ("float32", "float64", "float16", "bfloat16")
WHOLE = ("int8", "uint8", "int32", "int64")
GLOO_TYPES = (*FLOATS, *WHOLE, "bool")
OUR_TYPES = (*GLOO_TYPES, "int16", "complex64", "complex128")
SHAPES = ((), (1,), (0,), (7,), (3, 5), (2, 0, 3), (40, 33), (300, 301))
LAYOUTS = ("plain", "transposed", "strided")


@dataclass
class Case:
    """One call; the same object on all ranks of its group, drawn from the same seed."""

    name: str
    size: int
    seed: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    root: int
    combine: str
    layout: str
    how: str  # wait, async or future

    def tensor(self, rank: int, which: int = 0, shape: tuple[int, ...] | None = None) -> Any:
        """What a rank holds, drawn from the seed, so that every rank knows what all have."""
        draw = torch.Generator().manual_seed(hash_of(self.seed, rank, which))
        wanted = self.shape if shape is None else shape
        if self.dtype.is_floating_point or self.dtype.is_complex:
            kind = torch.complex128 if self.dtype.is_complex else torch.float64
            return torch.randn(wanted, generator=draw, dtype=kind).to(self.dtype)
        top = 2 if self.combine == "product" or self.dtype is torch.bool else 9
        return torch.randint(0, top + 1, wanted, generator=draw).to(self.dtype)

    def laid_out(self, tensor: Any) -> Any:
        """The same elements in memory that may be neither contiguous nor dense."""
        if self.layout == "transposed" and tensor.dim() > 1:
            return tensor.transpose(0, -1).contiguous().transpose(0, -1)
        if self.layout == "strided" and tensor.dim():
            wide = torch.zeros((*tensor.shape, 2), dtype=tensor.dtype)
            wide[..., 0] = tensor
            return wide[..., 0]
        return tensor

    def __str__(self) -> str:
        return (
            f"{self.name} of {self.shape} {self.dtype} in a group of {self.size}, root {self.root}, "
            f"{self.combine}, {self.layout}, {self.how}, seed {self.seed}"
        )


def hash_of(*parts: Any) -> int:
    return random.Random(repr(parts)).getrandbits(63)


def draw_case(seed: str, size: int, names: tuple[str, ...], types: tuple[str, ...]) -> Case:
    draw = random.Random(seed)
    name = draw.choice(names)
    kind = draw.choice(types)
    combine = "sum"
    if name in REDUCING:
        choices = ["sum", "product", "min", "max"]
        if kind in FLOATS:
            choices = ["sum", "avg", "product", "min", "max"]
        elif kind in WHOLE:
            choices += ["band", "bor", "bxor"]
        elif kind == "bool":
            choices = ["min", "max", "band", "bor", "bxor"]
        elif kind.startswith("complex"):
            choices = ["sum"]
        combine = draw.choice(choices)
    return Case(
        name,
        size,
        seed,
        getattr(torch, kind),
        draw.choice(SHAPES),
        draw.randrange(size),
        combine,
        draw.choice(LAYOUTS),
        draw.choice(("wait", "async", "future")),
    )


def reduce_op(case: Case) -> Any:
    return getattr(dist.ReduceOp, case.combine.upper())


def finish(case: Case, call: Callable[..., Any], *arguments: Any, **options: Any) -> None:
    """Make a call the way the case says and wait for its end."""
    if case.how == "wait":
        call(*arguments, **options)
        return
    work = call(*arguments, async_op=True, **options)
    if case.how == "async":
        work.wait()
        assert work.is_completed()
    else:
        work.get_future().wait()
        assert work.is_completed()


# --- each operation: the call, as (results of this rank), and what they must be --------------------------


def all_reduce(case: Case, me: int, group: Any, laid: Any) -> list[Any]:
    tensor = laid(case.tensor(me))
    finish(case, dist.all_reduce, tensor, op=reduce_op(case), group=group)
    return [tensor]


def all_reduce_wanted(case: Case, me: int) -> list[Any]:
    return [reduced(case, [case.tensor(rank) for rank in range(case.size)])]


def reduced(case: Case, parts: list[Any]) -> Any:
    total = parts[0].clone()
    wide = total.double() if case.dtype in (torch.float16, torch.bfloat16) else total
    for part in parts[1:]:
        other = part.to(wide.dtype)
        match case.combine:
            case "sum" | "avg":
                wide = wide + other
            case "product":
                wide = wide * other
            case "min":
                wide = torch.minimum(wide, other)
            case "max":
                wide = torch.maximum(wide, other)
            case "band":
                wide = wide & other
            case "bor":
                wide = wide | other
            case "bxor":
                wide = wide ^ other
    return (wide / case.size if case.combine == "avg" else wide).to(case.dtype)


def broadcast(case: Case, me: int, group: Any, laid: Any) -> list[Any]:
    tensor = laid(case.tensor(me))
    finish(case, dist.broadcast, tensor, group=group, group_src=case.root)
    return [tensor]


def broadcast_wanted(case: Case, me: int) -> list[Any]:
    return [case.tensor(case.root)]


def reduce(case: Case, me: int, group: Any, laid: Any) -> list[Any]:
    tensor = laid(case.tensor(me))
    finish(case, dist.reduce, tensor, op=reduce_op(case), group=group, group_dst=case.root)
    return [tensor] if me == case.root else []


def reduce_wanted(case: Case, me: int) -> list[Any]:
    return all_reduce_wanted(case, me) if me == case.root else []


def all_gather(case: Case, me: int, group: Any, laid: Any) -> list[Any]:
    places = [laid(torch.zeros(case.shape, dtype=case.dtype)) for _ in range(case.size)]
    finish(case, dist.all_gather, places, laid(case.tensor(me)), group=group)
    return places


def all_gather_wanted(case: Case, me: int) -> list[Any]:
    return [case.tensor(rank) for rank in range(case.size)]


def all_gather_single(case: Case, me: int, group: Any, laid: Any) -> list[Any]:
    place = torch.zeros((case.size, *case.shape), dtype=case.dtype)
    flat = place.view(case.size * case.shape[0], *case.shape[1:]) if case.shape else place
    finish(case, dist.all_gather_single, flat, case.tensor(me), group=group)
    return list(place)


def gather(case: Case, me: int, group: Any, laid: Any) -> list[Any]:
    places = None
    if me == case.root:
        places = [laid(torch.zeros(case.shape, dtype=case.dtype)) for _ in range(case.size)]
    finish(case, dist.gather, laid(case.tensor(me)), places, group=group, group_dst=case.root)
    return places or []


def gather_wanted(case: Case, me: int) -> list[Any]:
    return all_gather_wanted(case, me) if me == case.root else []


def scatter(case: Case, me: int, group: Any, laid: Any) -> list[Any]:
    parts = None
    if me == case.root:
        parts = [laid(case.tensor(me, which)) for which in range(case.size)]
    place = laid(torch.zeros(case.shape, dtype=case.dtype))
    finish(case, dist.scatter, place, parts, group=group, group_src=case.root)
    return [place]


def scatter_wanted(case: Case, me: int) -> list[Any]:
    return [case.tensor(case.root, me)]


def reduce_scatter(case: Case, me: int, group: Any, laid: Any) -> list[Any]:
    parts = [laid(case.tensor(me, which)) for which in range(case.size)]
    place = laid(torch.zeros(case.shape, dtype=case.dtype))
    finish(case, dist.reduce_scatter, place, parts, op=reduce_op(case), group=group)
    return [place]


def reduce_scatter_wanted(case: Case, me: int) -> list[Any]:
    return [reduced(case, [case.tensor(rank, me) for rank in range(case.size)])]


def reduce_scatter_single(case: Case, me: int, group: Any, laid: Any) -> list[Any]:
    parts = torch.stack([case.tensor(me, which) for which in range(case.size)])
    if case.shape:
        parts = parts.view(case.size * case.shape[0], *case.shape[1:])
    place = torch.zeros(case.shape, dtype=case.dtype)
    finish(case, dist.reduce_scatter_single, place, parts, op=reduce_op(case), group=group)
    return [place]


def splits(case: Case) -> list[list[int]]:
    """Rows from each rank to each, some of them none."""
    draw = random.Random(case.seed)
    return [[draw.choice((0, 1, 3, 20)) for _ in range(case.size)] for _ in range(case.size)]


def all_to_all_single(case: Case, me: int, group: Any, laid: Any) -> list[Any]:
    rows = splits(case)
    wide = case.shape[1:]
    there, back = rows[me], [rows[rank][me] for rank in range(case.size)]
    mine = laid(torch.cat([case.tensor(me, to, (count, *wide)) for to, count in enumerate(there)]))
    place = laid(torch.zeros((sum(back), *wide), dtype=case.dtype))
    finish(case, dist.all_to_all_single, place, mine, back, there, group=group)
    return list(place.split(back))


def all_to_all_single_wanted(case: Case, me: int) -> list[Any]:
    rows = splits(case)
    return [case.tensor(rank, me, (rows[rank][me], *case.shape[1:])) for rank in range(case.size)]


def all_to_all_even(case: Case, me: int, group: Any, laid: Any) -> list[Any]:
    mine = laid(torch.stack([case.tensor(me, to) for to in range(case.size)]))
    place = laid(torch.zeros((case.size, *case.shape), dtype=case.dtype))
    finish(case, dist.all_to_all_single, place, mine, group=group)
    return list(place)


def all_to_all_even_wanted(case: Case, me: int) -> list[Any]:
    return [case.tensor(rank, me) for rank in range(case.size)]


def barrier(case: Case, me: int, group: Any, laid: Any) -> list[Any]:
    finish(case, dist.barrier, group=group)
    return []


def all_reduce_coalesced(case: Case, me: int, group: Any, laid: Any) -> list[Any]:
    tensors = [laid(case.tensor(me, which)) for which in range(3)]
    with dist.distributed_c10d._coalescing_manager(group):
        for tensor in tensors:
            dist.all_reduce(tensor, op=reduce_op(case), group=group)
    return tensors


def all_reduce_coalesced_wanted(case: Case, me: int) -> list[Any]:
    return [reduced(case, [case.tensor(rank, which) for rank in range(case.size)]) for which in range(3)]


def sparse(case: Case, me: int, group: Any, laid: Any) -> list[Any]:
    tensor = sparse_of(case, me)
    dist.all_reduce(tensor, group=group)
    return [tensor.to_dense()]


def sparse_of(case: Case, rank: int) -> Any:
    draw = torch.Generator().manual_seed(hash_of(case.seed, rank))
    count = int(torch.randint(0, 6, (), generator=draw))
    indices = torch.randint(0, 5, (2, count), generator=draw)
    values = torch.randn((count, 3), generator=draw, dtype=torch.float64)
    return torch.sparse_coo_tensor(indices, values, (5, 5, 3), check_invariants=True)


def sparse_wanted(case: Case, me: int) -> list[Any]:
    return [sum(sparse_of(case, rank).to_dense() for rank in range(case.size))]


def objects(case: Case, me: int, group: Any, laid: Any) -> list[Any]:
    everybody: list[Any] = [None] * case.size
    dist.all_gather_object(everybody, {"rank": me, "text": "x" * me}, group=group)
    assert everybody == [{"rank": rank, "text": "x" * rank} for rank in range(case.size)]
    some = [f"from {me}"]
    dist.broadcast_object_list(some, group=group, group_src=case.root)
    assert some == [f"from {case.root}"]
    place: list[Any] = [None]
    given = [("for", rank) for rank in range(case.size)] if me == case.root else None
    dist.scatter_object_list(place, given, group=group, group_src=case.root)
    assert place == [("for", me)]
    gathered: list[Any] | None = [None] * case.size if me == case.root else None
    dist.gather_object(me, gathered, group=group, group_dst=case.root)
    assert gathered is None or gathered == list(range(case.size))
    return []


def messages(case: Case, me: int, group: Any, laid: Any) -> list[Any]:
    """Everybody sends to the next rank: two tags, received in the other order, a batch, and to any source."""
    if case.size == 1:
        return []
    after, before = (me + 1) % case.size, (me - 1) % case.size
    ranks = dist.get_process_group_ranks(group)
    sends = [dist.isend(laid(case.tensor(me, tag)), group=group, group_dst=after, tag=tag) for tag in (0, 1)]
    places = [laid(torch.zeros(case.shape, dtype=case.dtype)) for _ in range(4)]
    for tag in (1, 0):
        dist.recv(places[tag], group=group, group_src=before, tag=tag)
    for work in sends:
        work.wait()
    batch = [
        dist.P2POp(dist.isend, laid(case.tensor(me, 2)), ranks[after], group),
        dist.P2POp(dist.irecv, places[2], ranks[before], group),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    last = dist.isend(laid(case.tensor(me, 3)), group=group, group_dst=after, tag=7)
    assert dist.recv(places[3], group=group, tag=7) == ranks[before]
    last.wait()
    return places


def messages_wanted(case: Case, me: int) -> list[Any]:
    return [case.tensor((me - 1) % case.size, tag) for tag in range(4)] if case.size > 1 else []


def uneven(case: Case) -> list[tuple[int, ...]]:
    """A shape for each rank."""
    draw = random.Random(case.seed)
    return [(draw.choice((0, 1, 5, 70)), 3) for _ in range(case.size)]


def all_gather_uneven(case: Case, me: int, group: Any, laid: Any) -> list[Any]:
    shapes = uneven(case)
    places = [laid(torch.zeros(shape, dtype=case.dtype)) for shape in shapes]
    finish(case, dist.all_gather, places, laid(case.tensor(me, 0, shapes[me])), group=group)
    return places


def all_gather_uneven_wanted(case: Case, me: int) -> list[Any]:
    return [case.tensor(rank, 0, shape) for rank, shape in enumerate(uneven(case))]


def reduce_scatter_uneven(case: Case, me: int, group: Any, laid: Any) -> list[Any]:
    shapes = uneven(case)
    parts = [laid(case.tensor(me, which, shape)) for which, shape in enumerate(shapes)]
    place = laid(torch.zeros(shapes[me], dtype=case.dtype))
    finish(case, dist.reduce_scatter, place, parts, op=reduce_op(case), group=group)
    return [place]


def reduce_scatter_uneven_wanted(case: Case, me: int) -> list[Any]:
    return [reduced(case, [case.tensor(rank, me, uneven(case)[me]) for rank in range(case.size)])]


def all_to_all_list(case: Case, me: int, group: Any, laid: Any) -> list[Any]:
    rows = splits(case)
    parts = [laid(case.tensor(me, to, (count, 2))) for to, count in enumerate(rows[me])]
    places = [laid(torch.zeros((rows[rank][me], 2), dtype=case.dtype)) for rank in range(case.size)]
    finish(case, dist.all_to_all, places, parts, group=group)
    return places


def all_to_all_list_wanted(case: Case, me: int) -> list[Any]:
    return [case.tensor(rank, me, (splits(case)[rank][me], 2)) for rank in range(case.size)]


def singles_coalesced(case: Case, me: int, group: Any, laid: Any) -> list[Any]:
    """Several gathers as one call, then several reduce-scatters as one."""
    places = [torch.zeros((case.size, 4 + which), dtype=case.dtype) for which in range(3)]
    with dist.distributed_c10d._coalescing_manager(group):
        for which, place in enumerate(places):
            mine = case.tensor(me, which, (4 + which,))
            dist.all_gather_single(place.view(-1), mine, group=group)
    sums = [torch.zeros(2 + which, dtype=case.dtype) for which in range(2)]
    with dist.distributed_c10d._coalescing_manager(group, async_ops=True) as calls:
        for which, total in enumerate(sums):
            parts = torch.cat([case.tensor(me, 10 + to, (2 + which,)) for to in range(case.size)])
            dist.reduce_scatter_single(total, parts, op=reduce_op(case), group=group)
    calls.wait()
    return [*places, *sums]


def singles_coalesced_wanted(case: Case, me: int) -> list[Any]:
    ranks = range(case.size)
    gathered = [torch.stack([case.tensor(rank, which, (4 + which,)) for rank in ranks]) for which in range(3)]
    sums = [reduced(case, [case.tensor(rank, 10 + me, (2 + which,)) for rank in ranks]) for which in range(2)]
    return [*gathered, *sums]


def all_gather_lists(case: Case, me: int, group: Any, laid: Any) -> list[Any]:
    """The older coalesced form: every rank's list of tensors."""
    inputs = [laid(case.tensor(me, which, (3, which))) for which in range(3)]
    places = [
        [laid(torch.zeros((3, which), dtype=case.dtype)) for which in range(3)] for _ in range(case.size)
    ]
    group.allgather_coalesced(places, inputs).wait()
    return [place for row in places for place in row]


def all_gather_lists_wanted(case: Case, me: int) -> list[Any]:
    return [case.tensor(rank, which, (3, which)) for rank in range(case.size) for which in range(3)]


def in_a_batch(case: Case, me: int, group: Any, laid: Any) -> list[Any]:
    """Different calls between the two ends of a coalescing manager that is given a device."""
    total, copy = laid(case.tensor(me)), laid(case.tensor(me, 1))
    opts = dist.AllreduceOptions()
    opts.reduceOp = reduce_op(case)
    root = dist.BroadcastOptions()
    root.rootRank = case.root
    group._start_coalescing(torch.device("cpu"))
    group.allreduce([total], opts)
    group.broadcast([copy], root)
    group._end_coalescing(torch.device("cpu")).wait()
    return [total, copy]


def in_a_batch_wanted(case: Case, me: int) -> list[Any]:
    return [*all_reduce_wanted(case, me), case.tensor(case.root, 1)]


# Calls that Gloo does not offer, or not in this form.
OURS = (
    "objects",
    "all_gather_uneven",
    "reduce_scatter_uneven",
    "all_to_all_list",
    "singles_coalesced",
    "all_gather_lists",
    "in_a_batch",
)
REDUCING = (
    "all_reduce",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "all_reduce_coalesced",
    "reduce_scatter_uneven",
    "singles_coalesced",
    "in_a_batch",
)
CALLS: dict[str, tuple[Any, Any]] = {
    "all_reduce": (all_reduce, all_reduce_wanted),
    "all_reduce_coalesced": (all_reduce_coalesced, all_reduce_coalesced_wanted),
    "broadcast": (broadcast, broadcast_wanted),
    "reduce": (reduce, reduce_wanted),
    "all_gather": (all_gather, all_gather_wanted),
    "all_gather_single": (all_gather_single, all_gather_wanted),
    "gather": (gather, gather_wanted),
    "scatter": (scatter, scatter_wanted),
    "reduce_scatter": (reduce_scatter, reduce_scatter_wanted),
    "reduce_scatter_single": (reduce_scatter_single, reduce_scatter_wanted),
    "all_to_all_single": (all_to_all_single, all_to_all_single_wanted),
    "all_to_all_even": (all_to_all_even, all_to_all_even_wanted),
    "barrier": (barrier, lambda case, me: []),
    "sparse": (sparse, sparse_wanted),
    "objects": (objects, lambda case, me: []),
    "messages": (messages, messages_wanted),
    "all_gather_uneven": (all_gather_uneven, all_gather_uneven_wanted),
    "reduce_scatter_uneven": (reduce_scatter_uneven, reduce_scatter_uneven_wanted),
    "all_to_all_list": (all_to_all_list, all_to_all_list_wanted),
    "singles_coalesced": (singles_coalesced, singles_coalesced_wanted),
    "all_gather_lists": (all_gather_lists, all_gather_lists_wanted),
    "in_a_batch": (in_a_batch, in_a_batch_wanted),
}


def gloo_offers(case: Case) -> bool:
    """Whether Gloo takes the call: it knows fewer types, and crashes on some empty or scalar tensors."""
    if str(case.dtype).removeprefix("torch.") not in GLOO_TYPES or case.name in OURS:
        return False
    if not case.shape and case.name.startswith(("reduce_scatter", "all_gather_single")):
        return False
    return 0 not in case.shape


def by_gloo(case: Case, me: int, group: Any) -> list[Any]:
    """The same call on Gloo, in the plainest way, which it offers for all of them."""
    results: list[Any] = CALLS[case.name][0](replace(case, how="wait"), me, group, lambda tensor: tensor)
    return results


def difference(case: Case, got: list[Any], wanted: list[Any], whose: str) -> str:
    """What is wrong with results; empty if they agree, up to rounding where something was added."""
    if len(got) != len(wanted):
        return f"{case}: {len(got)} results, {whose} has {len(wanted)}"
    exact = case.name not in (*REDUCING, "sparse") or case.combine not in ("sum", "avg", "product")
    exact = exact or not (case.dtype.is_floating_point or case.dtype.is_complex)
    size = max(case.size, 2)
    rounding = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 2e-6, torch.complex64: 2e-6}
    relative = rounding.get(case.dtype, 1e-12) * size
    for index, (mine, other) in enumerate(zip(got, wanted, strict=True)):
        same = torch.equal(mine, other.view(mine.shape))
        if not exact:
            same = torch.allclose(mine, other.view(mine.shape), rtol=relative, atol=relative, equal_nan=True)
        if not same:
            return f"{case}: result {index} differs from {whose}:\n{mine}\n{other}"
    return ""
