"""The process group: torch's collective calls on CPU tensors, each as an operation of the fabric."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mlfabric.collective.calls import Block, Call, changes, reads, writes
from mlfabric.torch import checks, memory
from mlfabric.torch.calls import Calls, Tensors
from mlfabric.torch.errors import CollectiveError
from mlfabric.torch.memory import Outputs, dtype_name, plain, view
from mlfabric.torch.session import session_for
from mlfabric.torch.sparse import SparseSum
from mlfabric.torch.work import FabricWork

MAX_TAG = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Options:
    """What `init_process_group("mlfabric", pg_options=...)` takes; None: as the environment says.

    Groups that are made later use the engine of the first.
    """

    engine: str | None = None  # where this process's engine runs, see `mlfabric.join`
    pace: bool | None = None  # spread what collectives send over the time until it is needed


def create(options: Any, backend_options: Any) -> FabricProcessGroup:
    """What torch calls for a new group."""
    if not isinstance(backend_options, Options | None):
        raise CollectiveError("pg_options of backend mlfabric are mlfabric.torch.Options(...)")
    wishes = backend_options or Options()
    session, owned = session_for(
        options.store,
        options.group_rank,
        options.group_size,
        options.global_ranks_in_group,
        options.timeout,
        wishes.engine,
        wishes.pace,
    )
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    name = str(options.group_id) if options.global_ranks_in_group else "world"
    group = FabricProcessGroup(session, owned, name, ranks, options.group_rank, options.timeout)
    if not owned:
        group.form()
    else:
        try:
            group.barrier().wait()  # everybody is here, and has links to all
        except BaseException:
            group.shutdown()
            raise
    return group


def _call(operation: str, tensor: torch.Tensor, *blocks: Block, combine: str = "", root: int = -1) -> Call:
    return Call(operation, dtype_name(tensor), tensor.element_size(), combine, root, blocks)


class FabricProcessGroup(Calls):
    """All of torch's calls; outputs that are not contiguous are filled by a copy at the end."""

    # --- reductions -------------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: Any = None) -> FabricWork:
        opts = opts or dist.AllreduceOptions()
        if len(tensors) == 1 and getattr(tensors[0], "layout", None) is torch.sparse_coo:
            return self._sparse_sum(tensors[0], opts)
        if len(tensors) != 1:
            return self.allreduce_coalesced(tensors, opts)

        def prepare(outputs: Outputs) -> Call:
            memory.require(memory.check(tensors[0]))
            data = outputs.inout(tensors[0])
            return _call("all_reduce", data, changes(view(data)), combine=self._combine(opts, data))

        return self._collective("all_reduce", tensors, opts, prepare, tensors, reduce_op=opts.reduceOp)

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> FabricWork:
        opts = opts or dist.AllreduceCoalescedOptions()

        def prepare(outputs: Outputs) -> Call:
            memory.require(*(memory.check(each) for each in tensors), memory.same(tensors, "the tensors"))
            if not tensors:
                raise CollectiveError("there is no tensor to reduce")
            data = outputs.packed(tensors, filled=True)
            return _call("all_reduce", data, changes(view(data)), combine=self._combine(opts, data))

        return self._collective("all_reduce", tensors, opts, prepare, tensors, reduce_op=opts.reduceOp)

    def _sparse_sum(self, tensor: torch.Tensor, opts: Any) -> FabricWork:
        held: list[SparseSum] = []

        def prepare(outputs: Outputs) -> Call:
            memory.require(memory.check(tensor, sparse=True))
            if opts.reduceOp.op != dist.ReduceOp.RedOpType.SUM:
                raise CollectiveError("all_reduce of sparse tensors only works with ReduceOp.SUM")
            held.append(SparseSum(tensor, self._me, self._count))
            return held[0].call()

        return self._collective(
            "all_reduce",
            [tensor],
            opts,
            prepare,
            [tensor],
            reduce_op=opts.reduceOp,
            finish=lambda: held[0].finish(),
        )

    def reduce(self, tensors: Tensors, opts: Any) -> FabricWork:
        root = opts.rootRank

        def prepare(outputs: Outputs) -> Call:
            memory.require(checks.one(tensors), memory.check(tensors[0]))
            data = outputs.inout(tensors[0]) if root == self._me else plain(tensors[0])
            block = changes(view(data)) if root == self._me else reads(view(data))
            return _call("reduce", data, block, combine=self._combine(opts, data), root=root)

        return self._collective("reduce", tensors, opts, prepare, tensors, root, opts.reduceOp)

    def reduce_scatter(self, outputs_: Tensors, inputs: Sequence[Tensors], opts: Any = None) -> FabricWork:
        opts = opts or dist.ReduceScatterOptions()

        def prepare(outputs: Outputs) -> Call:
            memory.require(checks.one(outputs_), checks.one(inputs))
            output, parts = outputs_[0], list(inputs[0])
            memory.require(
                *(memory.check(each) for each in (output, *parts)),
                memory.same([output, *parts], "input and output"),
                checks.counted(parts, self._count, "inputs"),
            )
            if output.numel() != parts[self._me].numel():
                raise CollectiveError(
                    f"the output has room for {output.numel()} elements, its input has "
                    f"{parts[self._me].numel()}"
                )
            return self._reduce_scatter(outputs.place(output), [plain(each) for each in parts], opts)

        return self._collective("reduce_scatter", outputs_, opts, prepare, outputs_, reduce_op=opts.reduceOp)

    def _reduce_scatter(self, output: torch.Tensor, parts: list[torch.Tensor], opts: Any) -> Call:
        blocks = [*(reads(view(each)) for each in parts), writes(view(output))]
        return _call("reduce_scatter", output, *blocks, combine=self._combine(opts, output))

    def reduce_scatter_single(
        self, output: torch.Tensor, input_: torch.Tensor, opts: Any = None
    ) -> FabricWork:
        return self.reduce_scatter_single_coalesced([output], [input_], opts)

    def reduce_scatter_single_coalesced(
        self, outputs_: Tensors, inputs: Tensors, opts: Any = None
    ) -> FabricWork:
        opts = opts or dist.ReduceScatterOptions()

        def prepare(outputs: Outputs) -> Call:
            memory.require(checks.pairs(outputs_, inputs, self._count, scatter=True))
            if len(outputs_) == 1:
                cut = plain(inputs[0]).view(-1).chunk(self._count) if inputs[0].numel() else None
                parts = list(cut) if cut is not None else [plain(inputs[0]).view(-1)] * self._count
                return self._reduce_scatter(outputs.place(outputs_[0]), parts, opts)
            rows = [plain(each).view(self._count, -1) for each in inputs]
            parts = [torch.cat([each[rank] for each in rows]) for rank in range(self._count)]
            return self._reduce_scatter(outputs.packed(outputs_, filled=False), parts, opts)

        return self._collective("reduce_scatter", outputs_, opts, prepare, outputs_, reduce_op=opts.reduceOp)

    # --- movements --------------------------------------------------------------------------------------

    def broadcast(self, tensors: Tensors, opts: Any = None) -> FabricWork:
        opts = opts or dist.BroadcastOptions()
        root = opts.rootRank

        def prepare(outputs: Outputs) -> Call:
            memory.require(checks.one(tensors), memory.check(tensors[0]))
            data = plain(tensors[0]) if root == self._me else outputs.place(tensors[0])
            block = reads(view(data)) if root == self._me else writes(view(data))
            return _call("broadcast", data, block, root=root)

        return self._collective("broadcast", tensors, opts, prepare, tensors, root)

    def allgather(self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> FabricWork:
        def prepare(outputs: Outputs) -> Call:
            memory.require(checks.one(inputs), checks.one(output_lists))
            places = list(output_lists[0])
            memory.require(
                *(memory.check(each) for each in (inputs[0], *places)),
                memory.same([inputs[0], *places], "input and outputs"),
                checks.counted(places, self._count, "outputs"),
            )
            if places[self._me].numel() != inputs[0].numel():
                raise CollectiveError(
                    f"the output for our own rank has room for {places[self._me].numel()} elements, "
                    f"the input has {inputs[0].numel()}"
                )
            return self._all_gather(inputs[0], [outputs.place(each) for each in places])

        return self._collective("all_gather", inputs, opts, prepare, output_lists)

    def _all_gather(self, mine: torch.Tensor, places: Sequence[torch.Tensor]) -> Call:
        with torch.no_grad():
            places[self._me].view(-1).copy_(mine.detach().reshape(-1))
        blocks = [
            (reads if rank == self._me else writes)(view(each), rank) for rank, each in enumerate(places)
        ]
        return _call("all_gather", mine, *blocks)

    def allgather_coalesced(
        self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> FabricWork:
        """Each rank's list of tensors goes to all: `output_lists[rank][i]` is its i-th."""

        def prepare(outputs: Outputs) -> Call:
            rows = [list(each) for each in output_lists]
            every = [*inputs, *(tensor for row in rows for tensor in row)]
            memory.require(
                *(memory.check(each) for each in every),
                memory.same(every, "inputs and outputs"),
                checks.counted(rows, self._count, "lists of outputs"),
                *(checks.counted(row, len(inputs), "outputs in a list") for row in rows),
            )
            places = [outputs.packed(row, filled=False) for row in rows]
            flat = torch.cat([each.detach().reshape(-1) for each in inputs])
            if any(place.numel() != flat.numel() for place in places):
                raise CollectiveError("the lists of outputs differ in size from the inputs")
            return self._all_gather(flat, places)

        return self._collective("all_gather", inputs, opts, prepare, output_lists)

    def all_gather_single(self, output: torch.Tensor, input_: torch.Tensor, opts: Any = None) -> FabricWork:
        return self.all_gather_single_coalesced([output], [input_], opts)

    def all_gather_single_coalesced(self, outputs_: Tensors, inputs: Tensors, opts: Any = None) -> FabricWork:
        def prepare(outputs: Outputs) -> Call:
            memory.require(checks.pairs(outputs_, inputs, self._count, scatter=False))
            if len(outputs_) == 1:
                rows = outputs.place(outputs_[0]).view(self._count, inputs[0].numel())
                return self._all_gather(inputs[0], list(rows))
            flat = torch.cat([each.detach().reshape(-1) for each in inputs])
            places: list[list[torch.Tensor]] = [[] for _ in range(self._count)]
            for output, mine in zip(outputs_, inputs, strict=True):
                target = output.detach()
                if not memory.is_plain(output):
                    target = outputs.place(output)
                for rank, row in enumerate(target.view(self._count, mine.numel())):
                    places[rank].append(row)
            return self._all_gather(flat, [outputs.packed(row, filled=False) for row in places])

        return self._collective("all_gather", inputs, opts, prepare, outputs_)

    def gather(self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any) -> FabricWork:
        root = opts.rootRank
        at_root = root == self._me

        def prepare(outputs: Outputs) -> Call:
            memory.require(checks.one(inputs), memory.check(inputs[0]))
            mine = plain(inputs[0])
            places = self._rows(output_lists, at_root, inputs[0], outputs.place, "outputs")
            if at_root:
                with torch.no_grad():
                    places[self._me].copy_(mine.view(places[self._me].shape))
            others = [writes(view(each), rank) for rank, each in enumerate(places) if rank != self._me]
            return _call("gather", mine, reads(view(mine)), *others, root=root)

        results = output_lists if at_root else []
        return self._collective("gather", inputs, opts, prepare, results, root)

    def scatter(self, outputs_: Tensors, input_lists: Sequence[Tensors], opts: Any) -> FabricWork:
        root = opts.rootRank
        at_root = root == self._me

        def prepare(outputs: Outputs) -> Call:
            memory.require(checks.one(outputs_), memory.check(outputs_[0]))
            parts = self._rows(input_lists, at_root, outputs_[0], plain, "inputs")
            place = outputs.place(outputs_[0])
            if at_root:
                with torch.no_grad():
                    place.copy_(parts[self._me].view(place.shape))
            others = [reads(view(each), rank) for rank, each in enumerate(parts) if rank != self._me]
            block = changes(view(place)) if at_root else writes(view(place))
            return _call("scatter", place, block, *others, root=root)

        return self._collective("scatter", outputs_, opts, prepare, outputs_, root)

    def _rows(
        self,
        lists: Sequence[Tensors],
        at_root: bool,
        like: torch.Tensor,
        take: Callable[[torch.Tensor], torch.Tensor],
        what: str,
    ) -> list[torch.Tensor]:
        """The root's tensors for all ranks; the others have none."""
        if not at_root:
            if lists and any(len(each) for each in lists):
                raise CollectiveError(f"only the root gives a list of {what}")
            return []
        memory.require(checks.one(lists))
        held = list(lists[0])
        memory.require(
            *(memory.check(each) for each in held),
            memory.same([like, *held], f"the tensor and the {what}"),
            checks.counted(held, self._count, what),
        )
        for rank, each in enumerate(held):
            if each.numel() != like.numel():
                raise CollectiveError(
                    f"the {what} for rank {rank} have {each.numel()} elements, not {like.numel()}"
                )
        return [take(each) for each in held]

    def alltoall(self, outputs_: Tensors, inputs: Tensors, opts: Any = None) -> FabricWork:
        def prepare(outputs: Outputs) -> Call:
            every = [*outputs_, *inputs]
            memory.require(
                *(memory.check(each) for each in every),
                memory.same(every, "inputs and outputs"),
                checks.counted(outputs_, self._count, "outputs"),
                checks.counted(inputs, self._count, "inputs"),
            )
            return self._all_to_all(
                [outputs.place(each) for each in outputs_], [plain(each) for each in inputs]
            )

        return self._collective("all_to_all", inputs, opts, prepare, outputs_)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input_: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> FabricWork:
        def prepare(outputs: Outputs) -> Call:
            memory.require(
                memory.check(output),
                memory.check(input_),
                memory.same([output, input_], "input and output"),
                checks.splits(output, output_splits, self._count, "output"),
                checks.splits(input_, input_splits, self._count, "input"),
            )
            return self._all_to_all(
                checks.cut(outputs.place(output), output_splits, self._count),
                checks.cut(plain(input_), input_splits, self._count),
            )

        return self._collective("all_to_all", [input_], opts, prepare, [output])

    def _all_to_all(self, places: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> Call:
        if places[self._me].numel() != parts[self._me].numel():
            raise CollectiveError(
                f"what goes to our own rank has {parts[self._me].numel()} elements, its place "
                f"{places[self._me].numel()}"
            )
        with torch.no_grad():
            places[self._me].view(-1).copy_(parts[self._me].view(-1))
        blocks = [
            *(reads(view(each)) for each in parts),
            *(
                (changes if rank == self._me else writes)(view(each))  # what goes to ourselves is there
                for rank, each in enumerate(places)
            ),
        ]
        return _call("all_to_all", parts[0], *blocks)

    def barrier(self, opts: Any = None) -> FabricWork:
        return self._collective("barrier", [], opts, lambda outputs: Call("barrier"), [])

    # torch calls some of these by an older name as well.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # --- messages ---------------------------------------------------------------------------------------

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> FabricWork:
        self._check_message(tensors, to, tag)
        data = view(plain(tensors[0]))
        groups = self._session.groups
        work: FabricWork = self._message(
            "send", tensors[0], lambda: groups.send(self._label, self._nodes, to, tag, data), None
        )
        return work

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> FabricWork:
        self._check_message(tensors, source, tag)
        return self._receive(tensors[0], source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> FabricWork:
        self._check_message(tensors, None, tag)
        return self._receive(tensors[0], -1, tag)

    def _receive(self, tensor: torch.Tensor, source: int, tag: int) -> FabricWork:
        outputs = Outputs()
        place = view(outputs.inout(tensor))  # a message may fill only a part of it
        groups = self._session.groups
        work: FabricWork = self._message(
            "recv",
            tensor,
            lambda: groups.receive(self._label, self._nodes, source, tag, place),
            outputs.finish if outputs.pending else None,
        )
        return work

    def _check_message(self, tensors: Tensors, peer: int | None, tag: int) -> None:
        self._check_open()
        memory.require(checks.one(tensors), memory.check(tensors[0]))
        if peer is not None and (not 0 <= peer < self._count or peer == self._me):
            raise CollectiveError(
                f"rank {self._me} can't exchange messages with rank {peer} in a group of {self._count}"
            )
        if not 0 <= tag <= MAX_TAG:
            raise CollectiveError(f"a tag is a number from 0 to {MAX_TAG}, not {tag}")
