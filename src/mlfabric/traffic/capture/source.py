"""Where bytes come from: a file, a pipe, or a compressed one of either, recognised by its first bytes.

Hands out bytes in order and nothing else: it knows no capture format. A compressed file that breaks off gives
what could be decompressed, then ends, with a note.
"""

from __future__ import annotations

import io
import lzma
import os
import stat
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self, cast

from mlfabric.errors import FabricError
from mlfabric.traffic.capture.notes import Notes

_GZIP: Final = b"\x1f\x8b"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"
_XZ: Final = b"\xfd7zXZ\x00"
_BZIP2: Final = b"BZh"
_LZ4: Final = b"\x04\x22\x4d\x18"
_SNIFFED_BYTES: Final = 16


class _Rewound(io.RawIOBase):
    """A stream whose first bytes were already read, given back in front of the rest."""

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        self._head = head
        self._rest = rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if self._head:
            count = min(len(buffer), len(self._head))
            buffer[:count] = self._head[:count]
            self._head = self._head[count:]
            return count
        return cast(io.RawIOBase, self._rest).readinto(buffer) or 0


class ByteSource:
    """The bytes of one input, decompressed; use it as a context manager."""

    def __init__(self, path: str | Path, notes: Notes, progress: Callable[[int, int], None] | None = None):
        self.name = str(path)
        self._notes = notes
        self._progress = progress
        self._raw = _open_raw(self.name)
        self._size = _regular_size(self._raw)
        self._taken = 0
        head = _read_up_to(self._raw, _SNIFFED_BYTES)
        if self._size is not None:
            self._raw.seek(0)
            plain: BinaryIO = self._raw
        else:
            plain = cast(BinaryIO, io.BufferedReader(_Rewound(head, self._raw), 1 << 20))
        try:
            self.compression, self._stream = _decompressed(self.name, head, plain)
        except FabricError:
            self._raw.close()
            raise
        # One step at a time: a compressed stream that breaks off must not take its last good bytes along.
        self._read_some: Callable[[memoryview], int | None] = getattr(
            self._stream, "readinto1", cast(io.RawIOBase, self._stream).readinto
        )
        self.head = head if self.compression is None else b""

    @property
    def plain_size(self) -> int | None:
        """How many bytes there will be, where that is known without reading them."""
        return self._size if self.compression is None else None

    def read_into(self, view: memoryview) -> int:
        """Fills `view` as far as the input reaches; less than its length only at the end."""
        filled = 0
        while filled < len(view):
            try:
                count = self._read_some(view[filled:]) or 0
            except (EOFError, zlib.error, lzma.LZMAError, OSError) as error:
                self._notes.damage(
                    f"{self.name}: the {self.compression or 'input'} data breaks off after "
                    f"{self._taken + filled:,} decompressed bytes ({error})"
                )
                break
            except Exception as error:
                # zstandard raises its own type, which only exists where it is installed.
                if type(error).__name__ != "ZstdError":
                    raise
                self._notes.damage(
                    f"{self.name}: the zstd data breaks off after {self._taken + filled:,} decompressed bytes"
                )
                break
            if count == 0:
                break
            filled += count
        self._taken += filled
        if self._progress is not None and self._size:
            self._progress(self._raw.tell(), self._size)
        return filled

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not self._raw:
            self._stream.close()
        if self.name != "-":
            self._raw.close()


def _open_raw(name: str) -> BinaryIO:
    if name == "-":
        return sys.stdin.buffer
    try:
        if Path(name).is_dir():
            raise FabricError(f"{name} is a directory; name the capture file in it")
        return cast(BinaryIO, open(name, "rb", buffering=0))
    except FileNotFoundError:
        raise FabricError(f"{name} does not exist") from None
    except OSError as error:
        raise FabricError(f"{name} can't be read: {error.strerror}") from None


def _regular_size(raw: BinaryIO) -> int | None:
    try:
        status = os.fstat(raw.fileno())
    except (OSError, io.UnsupportedOperation):
        return None
    return status.st_size if stat.S_ISREG(status.st_mode) and raw.seekable() else None


def _read_up_to(raw: BinaryIO, count: int) -> bytes:
    head = b""
    while len(head) < count:
        more = raw.read(count - len(head))
        if not more:
            break
        head += more
    return head


def _decompressed(name: str, head: bytes, plain: BinaryIO) -> tuple[str | None, BinaryIO]:
    if head.startswith(_GZIP):
        import gzip

        return "gzip", cast(BinaryIO, gzip.GzipFile(fileobj=plain))
    if head.startswith(_XZ):
        return "xz", cast(BinaryIO, lzma.LZMAFile(plain))
    if head.startswith(_BZIP2):
        import bz2

        return "bzip2", cast(BinaryIO, bz2.BZ2File(plain))
    if head.startswith(_ZSTD):
        try:
            import zstandard
        except ImportError:
            raise FabricError(f"{name} is zstd-compressed; install mlfabric[traffic] to read it") from None
        reader = zstandard.ZstdDecompressor().stream_reader(plain, read_across_frames=True)
        return "zstd", cast(BinaryIO, reader)
    if head.startswith(_LZ4):
        raise FabricError(f"{name} is lz4-compressed, which is not supported; decompress it first (lz4 -d)")
    return None, plain
