"""How numbers travel: whole, in 16 bits, in 8 bits with a scale per block, or only the largest of them.

A codec turns a float32 vector into bytes and back; its size follows from the number of elements alone, so a
receiver's place can be reserved before a byte comes. Whatever is lost on the way is kept by the worker that
lost it (`ErrorFeedback`) and goes with its next update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mlfabric.errors import FabricError

Vector = NDArray[Any]
Bytes = NDArray[np.uint8]

INT8_BLOCK = 256
TOP_SHARE = 0.01


class Codec(Protocol):
    name: str

    def size_bytes(self, elements: int) -> int: ...
    def encode(self, vector: Vector) -> Bytes: ...
    def decode(self, encoded: Bytes, elements: int) -> Vector: ...


class Float32:
    name = "float32"

    def size_bytes(self, elements: int) -> int:
        return 4 * elements

    def encode(self, vector: Vector) -> Bytes:
        return np.ascontiguousarray(vector, np.float32).view(np.uint8)

    def decode(self, encoded: Bytes, elements: int) -> Vector:
        return encoded.view(np.float32)


class BFloat16:
    """The upper half of a float32, rounded to the nearest, ties to even."""

    name = "bfloat16"

    def size_bytes(self, elements: int) -> int:
        return 2 * elements

    def encode(self, vector: Vector) -> Bytes:
        bits = np.ascontiguousarray(vector, np.float32).view(np.uint32)
        rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        # Rounding must not carry the largest numbers over into infinity.
        rounded = np.where((rounded & np.uint32(0x7F800000)) == np.uint32(0x7F800000), bits, rounded)
        return (rounded >> np.uint32(16)).astype(np.uint16).view(np.uint8)

    def decode(self, encoded: Bytes, elements: int) -> Vector:
        return (encoded.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


class Float16:
    name = "float16"

    def size_bytes(self, elements: int) -> int:
        return 2 * elements

    def encode(self, vector: Vector) -> Bytes:
        largest = np.float32(np.finfo(np.float16).max)
        return np.clip(vector, -largest, largest).astype(np.float16).view(np.uint8)

    def decode(self, encoded: Bytes, elements: int) -> Vector:
        return encoded.view(np.float16).astype(np.float32)


class Int8:
    """Whole numbers from -127 to 127 times a scale for each block of elements."""

    name = "int8"

    def size_bytes(self, elements: int) -> int:
        return elements + 4 * self._blocks(elements)

    def _blocks(self, elements: int) -> int:
        return -(-elements // INT8_BLOCK)

    def encode(self, vector: Vector) -> Bytes:
        elements = len(vector)
        blocks = self._blocks(elements)
        padded = np.zeros(blocks * INT8_BLOCK, np.float32)
        padded[:elements] = vector
        grid = padded.reshape(blocks, INT8_BLOCK)
        scales = (np.abs(grid).max(axis=1, initial=0) / np.float32(127)).astype(np.float32)
        divisors = np.where(scales > 0, scales, np.float32(1))
        steps = np.rint(grid / divisors[:, None]).clip(-127, 127).astype(np.int8)
        encoded = np.empty(self.size_bytes(elements), np.uint8)
        encoded[: 4 * blocks] = scales.view(np.uint8)
        encoded[4 * blocks :] = steps.reshape(-1)[:elements].view(np.uint8)
        return encoded

    def decode(self, encoded: Bytes, elements: int) -> Vector:
        blocks = self._blocks(elements)
        scales = encoded[: 4 * blocks].copy().view(np.float32)
        steps = encoded[4 * blocks :].view(np.int8).astype(np.float32)
        return steps * np.repeat(scales, INT8_BLOCK)[:elements]


class TopK:
    """The largest elements with their places; the others count as zero."""

    name = "topk"

    def size_bytes(self, elements: int) -> int:
        return 8 * self._kept(elements)

    def _kept(self, elements: int) -> int:
        return min(elements, max(1, round(TOP_SHARE * elements))) if elements else 0

    def encode(self, vector: Vector) -> Bytes:
        kept = self._kept(len(vector))
        values = np.ascontiguousarray(vector, np.float32)
        # Of equal elements the first ones stay, so that equal updates are encoded alike.
        order = np.argsort(-np.abs(values), kind="stable") if len(values) < 4096 else None
        if order is None:
            candidates = np.argpartition(-np.abs(values), kept - 1)[:kept]
            places = np.sort(candidates).astype(np.uint32)
        else:
            places = np.sort(order[:kept]).astype(np.uint32)
        return np.concatenate([places.view(np.uint8), values[places].view(np.uint8)])

    def decode(self, encoded: Bytes, elements: int) -> Vector:
        kept = self._kept(elements)
        places = encoded[: 4 * kept].copy().view(np.uint32)
        if kept and places.max() >= elements:
            raise FabricError(f"an element at {places.max()} of a vector of {elements}")
        vector = np.zeros(elements, np.float32)
        vector[places] = encoded[4 * kept :].copy().view(np.float32)
        return vector


CODECS: dict[str, Codec] = {codec.name: codec for codec in (Float32(), BFloat16(), Float16(), Int8(), TopK())}


def find_codec(name: str) -> Codec:
    codec = CODECS.get(name)
    if codec is None:
        raise FabricError(f"unknown codec {name!r}; known are {', '.join(CODECS)}")
    return codec


class ErrorFeedback:
    """What coding lost, kept by the worker that lost it: it goes with the next update."""

    def __init__(self, codec: Codec, ranges: Sequence[tuple[int, int]]) -> None:
        self._codec = codec
        self._ranges = tuple(ranges)  # start and count of the parts that are coded by themselves
        self._residual: Vector | None = None
        self._sent: dict[str, Vector] = {}

    @property
    def size_bytes(self) -> int:
        """Of an update on the wire."""
        return sum(self._codec.size_bytes(count) for _, count in self._ranges)

    def code(self, update: str, vector: Vector) -> Vector:
        """The update as its receivers will see it; the rest is kept."""
        wanted = vector if self._residual is None else vector + self._residual
        seen = np.empty_like(wanted)
        for start, count in self._ranges:
            part = slice(start, start + count)
            seen[part] = self._codec.decode(self._codec.encode(wanted[part]), count)
        self._residual = wanted - seen
        self._sent[update] = seen
        return seen

    def settle(self, update: str, applied: bool) -> None:
        seen = self._sent.pop(update, None)
        if seen is not None and not applied and self._residual is not None:
            self._residual += seen
