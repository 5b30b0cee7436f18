"""What happens to a lab while it runs: rates change, paths are cut and healed, processes end or stand still.

Applies what the timeline says, or what someone asks for, to a lab's wiring, and keeps the list of what was
done when. It decides nothing: the timeline is the scenario's, drawn by its seed.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from mlfabric.errors import FabricError
from mlfabric.lab import kernel
from mlfabric.lab.timeline import Happening
from mlfabric.lab.wiring import Wiring, shape_with
from mlfabric.scenario import FaultEvent, RateChange

_SIGNALS: Final = {
    "kill": signal.SIGKILL,
    "drain": signal.SIGTERM,
    "pause": signal.SIGSTOP,
    "resume": signal.SIGCONT,
}
_PASSES: Final = 50


@dataclass(frozen=True, slots=True)
class Done:
    """Something that was done to the lab, `at_s` after the scenario began to play."""

    number: int
    time_s: float  # wall clock
    at_s: float | None  # None: not playing
    do: str
    detail: dict[str, Any]


class Controls:
    """Does things to a lab and remembers them."""

    def __init__(self, wiring: Wiring) -> None:
        self.done: list[Done] = []
        self.epoch: float | None = None
        self._wiring = wiring

    def set_rate(
        self, host: str, up_bps: float | None, down_bps: float | None, queue_bytes: int | None = None
    ) -> None:
        owner = self._owner(host)
        for direction, rate_bps in (("up", up_bps), ("down", down_bps)):
            end = self._wiring.end(owner, direction)
            end.set_shape(shape_with(end.shape, rate_bps, queue_bytes))
        self.remember("rate", host=host, up_bps=up_bps, down_bps=down_bps)

    def cut(self, host: str, direction: str) -> None:
        for way in _ways(direction):
            self._wiring.end(self._owner(host), way).lose_everything()
        self.remember("cut", host=host, direction=direction)

    def heal(self, host: str, direction: str) -> None:
        for way in _ways(direction):
            self._wiring.end(self._owner(host), way).carry_again()
        self.remember("heal", host=host, direction=direction)

    def cut_between(self, first: str, second: str, direction: str) -> None:
        for source, target in self._paths(first, second, direction):
            self._wiring.end(target, "down").lose_from(self._address(source))
        self.remember("cut", between=[first, second], direction=direction)

    def heal_between(self, first: str, second: str, direction: str) -> None:
        for source, target in self._paths(first, second, direction):
            self._wiring.end(target, "down").carry_from(self._address(source))
        self.remember("heal", between=[first, second], direction=direction)

    def signal(self, host: str, do: str) -> list[int]:
        """Send the signal of this fault to all that runs on the host; who got it."""
        if do not in _SIGNALS:
            raise FabricError(f"no fault {do!r} acts on processes; there are {', '.join(_SIGNALS)}")
        owner = self._owner(host)
        # Remembered first: whoever sees a process end finds the reason already written.
        self.remember(do, host=host)
        if do == "kill":
            # A machine that dies does so at once: no process may see another's end and react.
            self._send_to_all(owner, signal.SIGSTOP)
        return self._send_to_all(owner, _SIGNALS[do])

    def restart(self, host: str) -> None:
        """Only remembered: whoever started the host's processes starts them again."""
        self.remember("restart", host=host)

    def apply(self, happening: Happening) -> None:
        if isinstance(happening, RateChange):
            self.set_rate(happening.host, happening.up_bps, happening.down_bps)
        elif happening.between is not None:
            act = self.cut_between if happening.do == "cut" else self.heal_between
            act(*happening.between, happening.direction)
        else:
            self._apply_to_host(happening, happening.host or "")

    def _apply_to_host(self, fault: FaultEvent, host: str) -> None:
        if fault.do == "cut":
            self.cut(host, fault.direction)
        elif fault.do == "heal":
            self.heal(host, fault.direction)
        elif fault.do == "restart":
            self.restart(host)
        else:
            self.signal(host, fault.do)

    def _send_to_all(self, owner: str, number: int) -> list[int]:
        """A process may start another while we look, so look again until none is new."""
        inode = kernel.network_inode(self._wiring.namespaces[owner])
        reached: set[int] = set()
        for _ in range(_PASSES):
            fresh = set(kernel.processes_in([inode])) - reached
            if not fresh:
                break
            for pid in fresh:
                kernel.send_signal(pid, number)
            reached |= fresh
        return sorted(reached)

    def _owner(self, host: str) -> str:
        return self._wiring.blueprint.host(host).owner

    def _address(self, host: str) -> str:
        return str(self._wiring.blueprint.host(host).address)

    def _paths(self, first: str, second: str, direction: str) -> list[tuple[str, str]]:
        first, second = self._owner(first), self._owner(second)
        paths = {"out": [(first, second)], "in": [(second, first)]}
        return paths.get(direction, [(first, second), (second, first)])

    def remember(self, do: str, **detail: Any) -> None:
        at_s = None if self.epoch is None else time.monotonic() - self.epoch
        self.done.append(Done(len(self.done), time.time(), at_s, do, detail))


class Player:
    """Plays a timeline against the controls: `due_in` says when to call `play` next."""

    def __init__(self, happenings: Iterator[Happening], controls: Controls) -> None:
        self._happenings = happenings
        self._controls = controls
        self._next: Happening | None = None
        self._epoch: float | None = None

    @property
    def playing(self) -> bool:
        return self._epoch is not None

    def start(self, epoch: float) -> None:
        self._epoch = self._controls.epoch = epoch
        self._next = next(self._happenings, None)
        self.play()

    def due_in(self) -> float | None:
        if self._next is None or self._epoch is None:
            return None
        return max(0.0, self._epoch + self._next.at_s - time.monotonic())

    def play(self) -> None:
        while self._next is not None and self.due_in() == 0.0:
            self._controls.apply(self._next)
            self._next = next(self._happenings, None)


def _ways(direction: str) -> tuple[str, ...]:
    return {"out": ("up",), "in": ("down",)}.get(direction, ("up", "down"))
