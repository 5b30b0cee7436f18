"""What is said about strangers and broken connections: once per host and kind and minute, so that nobody
outside can fill the log."""

from __future__ import annotations

import logging
import time

from mlfabric.config import parse_address
from mlfabric.runtime.connection import Connection

logger = logging.getLogger("mlfabric")

QUIET_S = 60.0  # for how long the same complaint about a host is not repeated
MAX_COMPLAINTS = 1000


class Complaints:
    def __init__(self) -> None:
        self._quiet_until: dict[tuple[str, str], float] = {}  # (host, kind) -> until when it is not repeated

    def say(self, host: str, kind: str, sentence: str) -> None:
        now = time.monotonic()
        if now < self._quiet_until.get((host, kind), 0.0):
            return
        if len(self._quiet_until) >= MAX_COMPLAINTS:
            self._quiet_until.clear()
        self._quiet_until[host, kind] = now + QUIET_S
        logger.warning("%s", sentence)


def host_of(connection: Connection) -> str:
    return parse_address(connection.origin)[0] if connection.origin else connection.peer


def origin_of(connection: Connection) -> str:
    return connection.peer or connection.origin
