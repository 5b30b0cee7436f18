"""The bytes of a node: named buffers and shards, and the arithmetic that actions ask for.

`ArrayData` holds real arrays and serves the runtime and the simulator alike. A buffer belongs to one name;
what is accepted is bounded by `limit_bytes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mlfabric.codecs import Codec, find_codec
from mlfabric.errors import FabricError
from mlfabric.messages import RuleSpec, ShardRange
from mlfabric.numerics import ShardStore, Vector
from mlfabric.rules import Rule, make_rule

# What arrays on the wire may be made of.
WIRE_DTYPES = frozenset(
    f"{kind}{bits}"
    for kind, widths in (("float", (16, 32, 64)), ("int", (8, 16, 32, 64)), ("uint", (8, 16, 32, 64)))
    for bits in widths
)


class DataPlane(Protocol):
    """What a node needs done to bytes. Sizes only are enough for some simulations."""

    def outgoing(
        self, buffer: str, ranges: Sequence[tuple[int, int]], scale: float, codec: str = ""
    ) -> tuple[Vector, str]: ...
    def incoming(self, buffer: str, dtype: str, size_bytes: int, start: int | None) -> Vector: ...
    def take(self, buffer: str) -> Vector: ...
    def put(self, buffer: str, vector: Vector) -> None: ...
    def free(self, buffer: str) -> None: ...
    def add_into(self, target: str, source: str) -> None: ...
    def create_shard(self, shard: ShardRange, rule: RuleSpec, dtype: str) -> None: ...
    def drop_shard(self, shard: int) -> None: ...
    def fill_shard(self, shard: int, buffer: str, with_state: bool, version: int) -> None: ...
    def measure_step(
        self, shard: int, buffer: str, weight: float, members: int, rule: RuleSpec | None = None
    ) -> tuple[float, float, float]: ...
    def commit_step(self, shard: int) -> None: ...
    def snapshot_shard(
        self, shard: int, buffer: str, with_state: bool, with_staged: bool, for_replica: bool
    ) -> None: ...
    def mark_image(self, shard: int, buffer: str | None) -> None: ...
    def dump_shard(self, shard: int, label: str) -> None: ...


class ArrayData:
    """Real arrays. With `mirror` a shard's weights live in a file, so that they can be read after a kill."""

    def __init__(self, limit_bytes: int = 16 * 2**30, mirror: Path | None = None) -> None:
        self._buffers: dict[str, Vector] = {}
        self._coded: dict[str, tuple[Codec, int]] = {}  # buffers that hold coded numbers: how, how many
        self.shards: dict[int, ShardStore] = {}
        self._ranges: dict[int, ShardRange] = {}
        self._changed: dict[int, tuple[RuleSpec, Rule]] = {}  # by shard: the rule of the last such update
        self._limit_bytes = limit_bytes
        self._mirror = mirror

    def held_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def names(self) -> list[str]:
        return sorted(self._buffers)

    def outgoing(
        self, buffer: str, ranges: Sequence[tuple[int, int]], scale: float, codec: str = ""
    ) -> tuple[Vector, str]:
        """The bytes of ranges of a buffer, and what they are: a type, or a codec and how many elements."""
        whole = self._vector(buffer)
        parts = [whole[start : start + count] for start, count in ranges] or [whole]
        vector = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if scale != 1.0:
            vector = vector * vector.dtype.type(scale)
        if codec:
            return find_codec(codec).encode(vector), f"{codec}:{len(vector)}"
        return vector, str(vector.dtype)

    def incoming(self, buffer: str, dtype: str, size_bytes: int, start: int | None) -> Vector:
        if ":" in dtype:
            return self._incoming_coded(buffer, dtype, size_bytes)
        if dtype not in WIRE_DTYPES:
            raise FabricError(f"a transfer of {dtype!r} can't be taken")
        kind = np.dtype(dtype)
        if size_bytes < 0 or size_bytes % kind.itemsize:
            raise FabricError(f"a transfer of {size_bytes} bytes is no whole number of {dtype}")
        count = size_bytes // kind.itemsize
        if start is not None:
            target = self._buffers[buffer]
            if target.dtype != kind or start + count > len(target):
                raise FabricError(f"a transfer of {count} {dtype} does not fit its place in {buffer}")
            return target[start : start + count]
        self._check_room(size_bytes)
        self._buffers[buffer] = self.room(buffer, count, kind)
        return self._buffers[buffer]

    def room(self, buffer: str, count: int, kind: Any) -> Vector:
        """Memory for what arrives."""
        return np.empty(count, kind)

    def _incoming_coded(self, buffer: str, dtype: str, size_bytes: int) -> Vector:
        """A place for coded numbers; they are decoded when somebody needs them."""
        name, _, written = dtype.partition(":")
        elements = int(written) if written.isdigit() else -1
        codec = find_codec(name)
        if elements < 0 or codec.size_bytes(elements) != size_bytes:
            raise FabricError(f"a transfer of {size_bytes} bytes is not {written} elements by {name}")
        self._check_room(size_bytes + 4 * elements)
        self._coded[buffer] = (codec, elements)
        self._buffers[buffer] = np.empty(size_bytes, np.uint8)
        return self._buffers[buffer]

    def _check_room(self, size_bytes: int) -> None:
        if self.held_bytes() + size_bytes > self._limit_bytes:
            raise FabricError(f"no memory for {size_bytes} bytes beside {self.held_bytes()} held")

    def _vector(self, buffer: str) -> Vector:
        if buffer in self._coded:
            codec, elements = self._coded.pop(buffer)
            self._buffers[buffer] = codec.decode(self._buffers[buffer], elements)
        return self._buffers[buffer]

    def take(self, buffer: str) -> Vector:
        vector = self._vector(buffer)
        del self._buffers[buffer]
        return vector

    def put(self, buffer: str, vector: Vector) -> None:
        self._buffers[buffer] = vector

    def free(self, buffer: str) -> None:
        self._buffers.pop(buffer, None)
        self._coded.pop(buffer, None)

    def add_into(self, target: str, source: str) -> None:
        if target in self._buffers:
            self._vector(target)
            self._buffers[target] += self._vector(source)
        else:
            self._buffers[target] = self._vector(source).copy()

    def create_shard(self, shard: ShardRange, rule: RuleSpec, dtype: str) -> None:
        weights = None
        self._ranges[shard.index] = shard
        self._changed.pop(shard.index, None)
        if self._mirror is not None:
            self._mirror.mkdir(parents=True, exist_ok=True)
            path = mirror_path(self._mirror, shard.index)
            weights = np.memmap(path, dtype, mode="w+", shape=(shard.count,))
        self.shards[shard.index] = ShardStore(
            shard.count, dtype, make_rule(rule, shard.start, shard.count), weights
        )

    def drop_shard(self, shard: int) -> None:
        self.shards.pop(shard, None)

    def fill_shard(self, shard: int, buffer: str, with_state: bool, version: int) -> None:
        self.shards[shard].fill(self._buffers[buffer], with_state, version)

    def measure_step(
        self, shard: int, buffer: str, weight: float, members: int, rule: RuleSpec | None = None
    ) -> tuple[float, float, float]:
        store = self.shards[shard]
        if buffer:
            store.stage(self._vector(buffer), weight, members, self._rule(shard, rule))
        return store.measure()

    def _rule(self, shard: int, spec: RuleSpec | None) -> Rule | None:
        """What an update came with, unless it would need other state than there is."""
        if spec is None:
            return None
        known = self._changed.get(shard)
        if known is None or known[0] != spec:
            range_ = self._ranges[shard]
            known = self._changed[shard] = (spec, make_rule(spec, range_.start, range_.count))
        return known[1] if known[1].vectors == self.shards[shard].rule.vectors else None

    def commit_step(self, shard: int) -> None:
        self.shards[shard].commit()

    def snapshot_shard(
        self, shard: int, buffer: str, with_state: bool, with_staged: bool, for_replica: bool
    ) -> None:
        store = self.shards[shard]
        vector = store.snapshot(with_state, with_staged)
        self._buffers[buffer] = vector
        if for_replica:
            store.coming_image = vector[: len(store.weights)]

    def mark_image(self, shard: int, buffer: str | None) -> None:
        store = self.shards[shard]
        if buffer is None:
            store.image = store.coming_image = None
        else:
            store.image, store.coming_image = self._buffers.pop(buffer)[: len(store.weights)], None

    def dump_shard(self, shard: int, label: str) -> None:
        if self._mirror is not None:
            self.shards[shard].weights.tofile(mirror_path(self._mirror, shard, label))


def mirror_path(folder: Path, shard: int, label: str = "weights") -> Path:
    """Where a node with a mirror keeps a shard's weights, as plain numbers of the model's type."""
    return folder / f"shard{shard}.{label}"
