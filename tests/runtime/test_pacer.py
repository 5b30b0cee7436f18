"""What the kernel is told: the rate of the rhythm, shared among links by what each carries."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest

from mlfabric.collective.switchboard import Switchboard
from mlfabric.runtime.link import Link
from mlfabric.runtime.pacer import Pacer
from mlfabric.runtime.pacing import SO_MAX_PACING_RATE

UNLIMITED = 2**64 - 1
SIZE = 40 * 10**6
PERIOD_S, FULL_SPEED_S = 10.0, 0.5


def told(link: Link) -> int:
    (rate,) = struct.unpack("Q", link.sock.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 8))
    return int(rate)


class Node:
    """A pacer with two links of real sockets, and a clock that only moves when told."""

    def __init__(self, links: dict[str, Link]) -> None:
        self.now = 50.0
        self.links = links
        self.pacer = Pacer(links, lambda: self.now)

    def iterate(self, size: int = SIZE, wait_s: float = FULL_SPEED_S) -> list[int]:
        """One all-reduce, of which three quarters go to the first peer; the rates told when it began."""
        ends: list[str | None] = []
        done = self.pacer.posted(size, ends.append)
        rates = [told(link) for link in self.links.values()]
        for link, share in zip(self.links.values(), (0.75, 0.25), strict=True):
            link.sent_bytes += int(share * size)
        self.now += wait_s
        done(None)
        assert ends == [None]
        self.now += PERIOD_S - wait_s
        return rates


@pytest.fixture
def node() -> Iterator[Node]:
    board = Switchboard("a")
    sockets: list[socket.socket] = []
    links = {}
    with socket.create_server(("127.0.0.1", 0)) as server:
        for peer in ("b", "c"):
            out = socket.create_connection(server.getsockname())
            sockets += [out, server.accept()[0]]
            links[peer] = Link(out, peer, board)
    yield Node(links)
    for each in sockets:
        each.close()


def test_nothing_is_told_before_a_rhythm_is_known(node: Node) -> None:
    for _ in range(3):
        assert node.iterate() == [UNLIMITED, UNLIMITED]


def test_links_share_the_rate_by_what_they_carry(node: Node) -> None:
    for _ in range(4):
        node.iterate()
    first, second = node.iterate()
    assert first == pytest.approx(3 * second, rel=0.01)
    # At least what is needed within the time at full speed and the allowance, far below full speed itself.
    assert first + second >= SIZE / (FULL_SPEED_S + 0.02 * PERIOD_S)
    assert node.pacer.holds_back(10 * (first + second))
    assert not node.pacer.holds_back(first + second)


def test_another_call_frees_all_links(node: Node) -> None:
    for _ in range(6):
        node.iterate()
    assert node.iterate(SIZE + 4096) == [UNLIMITED, UNLIMITED]
    assert not node.pacer.holds_back(None)
