"""The records of a capture as columns: what every format is turned into before headers are looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

# Bytes after the end of every buffer that may be read (never believed): headers are gathered without
# asking first whether they are all there.
PADDING_BYTES: Final = 256


@dataclass(frozen=True)
class Frames:
    """A batch of records in file order. `data` is only valid until the next batch is asked for."""

    data: NDArray[np.uint8]
    offset: NDArray[np.int64]  # of each frame's first byte in `data`
    time_ns: NDArray[np.int64]  # since 1970
    captured: NDArray[np.uint32]  # bytes present
    length: NDArray[np.uint32]  # bytes the frame had
    link: int | NDArray[np.uint16]  # link type, of all or of each

    def __len__(self) -> int:
        return len(self.offset)

    def take(self, chosen: NDArray[np.intp] | NDArray[np.bool_]) -> Frames:
        link = self.link if isinstance(self.link, int) else self.link[chosen]
        return Frames(
            self.data,
            self.offset[chosen],
            self.time_ns[chosen],
            self.captured[chosen],
            self.length[chosen],
            link,
        )


def view_at_every_byte(data: NDArray[np.uint8], dtype: str) -> NDArray[np.unsignedinteger]:
    """The buffer as an array with one (unaligned, overlapping) number per byte; costs nothing."""
    kind = np.dtype(dtype)
    return np.ndarray(len(data) - kind.itemsize + 1, kind, data.data, 0, (1,))


def rows_at(data: NDArray[np.uint8], offsets: NDArray[np.int64], width: int) -> NDArray[np.uint8]:
    """`width` bytes from every offset, one row each: one gather where a column at a time would take many."""
    chunks = np.ndarray(len(data) - width + 1, f"V{width}", data.data, 0, (1,))
    return chunks[offsets].view(np.uint8).reshape(-1, width)
