"""Traffic of others: TCP streams between hosts of the lab, each held to its rate by the kernel's pacing.

A program of its own: `python -m mlfabric.lab.background JSON`. A stream shares links as TCP does and never
exceeds its rate; one that breaks (a cut, say) is set up again.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import threading
import time
from typing import Any

from mlfabric.lab.kernel import die_with_parent, enter_network
from mlfabric.units import goodput

SO_MAX_PACING_RATE = 47
TCP_NOTSENT_LOWAT = 25
_CHUNK = bytes(64 * 1024)
_RETRY_S = 0.2
_STUCK_S = 5.0


class Stream:
    """One stream from its start to its stop, in threads that live in the two hosts' namespaces."""

    def __init__(self, order: dict[str, Any], namespaces: dict[str, int]) -> None:
        self._source_fd = namespaces[order["source"]]
        self._target_fd = namespaces[order["target"]]
        self._address: str = order["address"]
        self._pace = int(goodput(order["rate_bps"]))
        self._start: float = order["start"]
        self._stop: float | None = order["stop"]

    def run(self) -> None:
        time.sleep(max(0.0, self._start - time.monotonic()))
        while not self._over():
            with contextlib.suppress(OSError):
                self._carry()
            time.sleep(_RETRY_S)

    def _over(self) -> bool:
        return self._stop is not None and time.monotonic() >= self._stop

    def _carry(self) -> None:
        enter_network(self._target_fd)
        with socket.create_server((self._address, 0)) as server:
            server.settimeout(_STUCK_S)
            threading.Thread(target=_swallow, args=(server,), daemon=True).start()
            enter_network(self._source_fd)
            with socket.socket() as out:
                out.settimeout(_STUCK_S)
                out.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, self._pace.to_bytes(8, sys.byteorder))
                out.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, len(_CHUNK))
                # Nothing of the stream may go on after its end.
                out.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                out.connect(server.getsockname())
                while not self._over():
                    out.send(_CHUNK)


def _swallow(server: socket.socket) -> None:
    with contextlib.suppress(OSError):
        inward, _ = server.accept()
        with inward:
            scratch = bytearray(1 << 20)
            while inward.recv_into(scratch, 0, socket.MSG_TRUNC):
                pass


def main() -> None:
    die_with_parent()
    order = json.loads(sys.argv[1])
    streams = [Stream(stream, order["namespaces"]) for stream in order["streams"]]
    threads = [threading.Thread(target=stream.run) for stream in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
