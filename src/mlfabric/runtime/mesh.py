"""Collective links over TCP: one duplex socket between each two members, in the engine's loop.

Waking up is what costs time here. Links have an epoll of their own, edge-triggered, so that neither room to
send nor the next bytes have to be asked for again and again. While many bytes are on their way all links are
served together, as rarely as their buffers allow; near the end of what runs, and for small operations, as
soon as something comes.
"""

from __future__ import annotations

import contextlib
import select
from collections.abc import Callable

from mlfabric.collective.probing import Prober
from mlfabric.collective.switchboard import Switchboard
from mlfabric.runtime.bandwidth import TICK_S, HostRates
from mlfabric.runtime.link import Closed, Link
from mlfabric.runtime.pacer import Pacer
from mlfabric.runtime.pacing import NOTSENT_BYTES
from mlfabric.runtime.trust import Refused
from mlfabric.wire import WireError

# Links rest for at most so long between two turns; flows are looked at in the same turn.
REST_S = TICK_S
# A shorter rest is none: the clock of epoll counts milliseconds.
LEAST_REST_S = 0.001
# Meanwhile the fastest link moves at most so much: the kernel holds twice that of what is to be sent.
RESTED_BYTES = NOTSENT_BYTES // 2
# A look that is due within so long after a turn is not worth another one.
NEARLY_DUE_S = 0.005
# How fast links are is judged over at least so long.
GAUGE_S = 0.005
# The rest shrinks with the square of what is still to come, from so many bytes on: an operation waits for
# several turns of several hosts, which counts the more the shorter it is.
HURRY_BYTES = 4 * 2**20
# Operations that follow each other overlap: what one waits is not lost, and waking up costs more than that.
OVERLAPPED_REST_S = 0.004

LinkEnd = Closed | Refused | WireError | OSError


class Mesh:
    """The links of a node. `open_link` is the engine's way to one; `ended` hears how one ended."""

    def __init__(
        self,
        board: Switchboard,
        open_link: Callable[[str], None],
        ended: Callable[[Link, LinkEnd], None],
        pace: bool = False,
    ) -> None:
        self.board = board
        self.rates: HostRates[Link] = HostRates()
        self.rest_until = 0.0  # what comes before is left alone, while the links rest
        self._open = open_link
        self._ended = ended
        self._epoll = select.epoll()
        self._links: dict[str, Link] = {}
        self._by_number: dict[int, Link] = {}
        self._readable: list[Link] = []
        self._racks: dict[str, str | None] = {}
        self._look_at: float | None = None
        self._gauged_at = 0.0
        self._fastest = 0.0  # bytes per second over one link, lately
        self._rest_s = 0.0
        self._prober = Prober(board.probes)
        self._pacer = Pacer(self._links) if pace else None
        if self._pacer is not None:
            board.listener = self._pacer

    def fileno(self) -> int:
        return self._epoll.fileno()

    def close(self) -> None:
        self._epoll.close()

    # --- rates ------------------------------------------------------------------------------------------

    def place(self, node: str, rack: str | None) -> None:
        """A member is in a rack."""
        self._racks[node] = rack

    def next_look(self, now: float) -> float | None:
        """When to look again, at the flows or for the next probe; None: nothing is under way."""
        probe_at = None if self.board.busy else self._prober.next_s(now)
        return min((at for at in (probe_at, self._next_flows(now)) if at is not None), default=None)

    def _next_flows(self, now: float) -> float | None:
        if not self.board.busy or (len(self._links) < 2 and self._pacer is None):
            self._look_at = None
        elif self._look_at is None:
            self._look_at = now
        if self._look_at is not None and self.rests:
            return max(self._look_at, self.rest_until)
        return self._look_at

    def look(self, now: float) -> tuple[float | None, float | None] | None:
        """See how flows and probes fare; the host's rates, if they are news."""
        looked = self._look_at_probes(now)
        if self._look_at is not None and now >= self._look_at - NEARLY_DUE_S:
            self._look_at = now + TICK_S
            looked |= self._look_at_flows(now)
        return self.rates.news(now) if looked else None

    def _look_at_flows(self, now: float) -> bool:
        held_back = False
        if self._pacer is not None:
            self._pacer.look(now)
            held_back = self._pacer.holds_back(self.rates.up.rate)
        links = list(self._links.values())
        if len(links) < 2:
            return False
        home = self._racks.get(self.board.node)
        used = self.board.peers_in_use
        flows = {
            link: link.state(now, self._racks.get(link.peer) != home, link.peer in used) for link in links
        }
        pressed = self.rates.look(now, flows, held_back)
        for link in links:
            link.pressed = link in pressed
        return True

    def probe(self, peers: tuple[str, ...]) -> None:
        """Find out about our own link by probes of these peers, while we are in no operation."""
        self.connect(peers)
        home = self._racks.get(self.board.node)
        near = tuple(peer for peer in peers if self._racks.get(peer) == home)
        self._prober.probe(near or peers)

    def _look_at_probes(self, now: float) -> bool:
        """Take what probes showed and begin the next; whether something was learned."""
        probes = self.board.probes
        results, probes.results = probes.results, []
        probes.tend(now, self.board.in_use)
        if self.board.busy:
            self.flush()
            return False
        for peer, up, down in results:
            link = self._links.get(peer)
            held_back = link is None or link.limited or (self._pacer is not None and self._pacer.rate)
            self.rates.probed(now, None if held_back else up, down)
        self._prober.turn(now, self._links.__contains__, self.rates.slower)
        self.flush()
        return bool(results)

    # --- links ------------------------------------------------------------------------------------------

    def connect(self, peers: tuple[str, ...]) -> None:
        """Have links to all of them; of each two the one with the lower name calls."""
        for peer in peers:
            if self.board.node < peer and peer not in self._links:
                self._open(peer)

    def add(self, link: Link) -> None:
        self._links[link.peer] = link
        self._by_number[link.sock.fileno()] = link
        self._epoll.register(link.sock.fileno(), select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)
        self._readable.append(link)  # TLS may hold bytes of which the kernel does not tell
        self.board.woken.add(link.peer)
        self.flush()

    def drop(self, link: Link) -> None:
        """Its socket is about to be closed."""
        self._by_number.pop(link.sock.fileno(), None)
        if self._links.get(link.peer) is link:
            del self._links[link.peer]

    def lose(self, peer: str, reason: str) -> None:
        self.board.lost(peer, reason)
        self.flush()

    # --- bytes ------------------------------------------------------------------------------------------

    def serve(self, now: float) -> None:
        """Take what came, send what became possible, and say when to do so again."""
        for number, mask in self._epoll.poll(0):
            link = self._by_number.get(number)
            if link is None:
                continue
            if mask & ~select.EPOLLOUT and link not in self._readable:
                self._readable.append(link)
            if mask & select.EPOLLOUT and link.blocked:
                link.blocked = False
                self.board.woken.add(link.peer)
        readable, self._readable = self._readable, []
        for link in readable:
            if self._links.get(link.peer) is not link:
                continue
            try:
                if link.receive(self._rest_s > 0):
                    self._readable.append(link)
            except (Closed, Refused, WireError, OSError) as end:
                self._ended(link, end)
        self.flush()
        self._gauge(now)
        self._rest_s = self._allowed_rest_s()
        self.rest_until = now + self._rest_s

    @property
    def hurried(self) -> bool:
        """Whether bytes that nobody will tell of again wait to be read."""
        return bool(self._readable)

    @property
    def rests(self) -> bool:
        """Whether to serve at `rest_until` rather than as soon as something comes."""
        return self._rest_s > 0 and self.board.bulk_to_come > 0

    def _gauge(self, now: float) -> None:
        past = now - self._gauged_at
        if past < GAUGE_S:
            return
        self._gauged_at = now
        self._fastest = max((link.moved_bytes for link in self._links.values()), default=0) / past
        for link in self._links.values():
            link.moved_bytes = 0

    def _allowed_rest_s(self) -> float:
        to_come = self.board.bulk_to_come
        if not to_come or not self._fastest or self._readable:
            return 0.0
        rest_s = REST_S * min(1.0, to_come / HURRY_BYTES) ** 2
        if self.board.overlapping:
            rest_s = max(rest_s, OVERLAPPED_REST_S)
        rest_s = min(rest_s, RESTED_BYTES / self._fastest)
        return rest_s if rest_s >= LEAST_REST_S else 0.0

    def resume(self) -> None:
        """Links that had sent as much as they may go on."""
        self.board.woken.update(link.peer for link in self._links.values() if link.held)
        self.flush()

    def flush(self) -> None:
        """Send whatever became possible."""
        woken = self.board.woken
        while woken:
            link = self._links.get(woken.pop())
            if link is None or link.blocked:
                continue
            with contextlib.suppress(OSError, Refused):  # its end is noticed where it is read
                link.pump()
