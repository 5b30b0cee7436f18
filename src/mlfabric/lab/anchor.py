"""The process that holds a lab: builds it, plays its scenario, answers requests, takes it down.

`python -m mlfabric.lab.anchor FOLDER`, where FOLDER is the lab's record. Everything of the lab hangs on this
process; it takes all down when asked (SIGTERM, or the request `down`), and, if the lab is attached, when the
process that made it is gone. One thread: requests, timers and signals are served in turn.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from pyroute2.netlink.exceptions import NetlinkError

from mlfabric.errors import FabricError
from mlfabric.lab import kernel, probe
from mlfabric.lab.blueprint import SWITCH, draw
from mlfabric.lab.faults import Controls, Player
from mlfabric.lab.record import Record
from mlfabric.lab.timeline import happenings
from mlfabric.lab.wiring import Wiring
from mlfabric.scenario import Scenario

_CHECK_MAKER_S: Final = 5.0


class Anchor:
    """A lab from its building to its end."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.scenario: Scenario = record.scenario()
        self.wiring = Wiring(draw(self.scenario))
        self.controls = Controls(self.wiring)
        self.player = Player(happenings(self.scenario), self.controls)
        self.children: dict[str, subprocess.Popen[bytes]] = {}  # programs of the lab itself
        self.measured: list[probe.Measured] = []
        self.stopping = False
        self._selector = selectors.DefaultSelector()

    def build(self, *, verify: bool) -> None:
        content = self.record.read()
        content |= {"anchor": os.getpid(), "anchor_start": kernel.start_ticks(os.getpid())}
        content["in_user_namespace"] = _gain_privileges()
        self.record.write(content)
        self.wiring.make_namespaces()
        content["namespaces"] = {
            name: {"fd": fd, "inode": kernel.network_inode(fd), "cookie": self.wiring.cookies[name]}
            for name, fd in self.wiring.namespaces.items()
        }
        self.record.write(content)
        Path(self.record.hosts_path).write_text(self.wiring.blueprint.hosts_file())
        self.wiring.build()
        self._start_forwarders()
        self.wiring.check()
        if verify:
            self.measured = probe.measure_all(self.wiring)
        self._listen()
        content["state"] = "up"
        self.record.write(content)

    def serve(self, *, attached: bool) -> None:
        """Until told to stop."""
        wake, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # wakes the loop below
        self._selector.register(wake, selectors.EVENT_READ, lambda: os.read(wake, 4096))
        if attached:
            self._selector.register(sys.stdin.fileno(), selectors.EVENT_READ, self._maker_gone)
        while not self.stopping:
            for key, _ in self._selector.select(self.player.due_in()):
                key.data()
            self.player.play()
            self._look_after_children()

    def take_down(self) -> None:
        """End all that runs in the lab, then forget it; the kernel does the rest when this process ends."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # Whoever enters from now on finds no hosts file and leaves; whoever came before is found below.
        Path(self.record.hosts_path).unlink(missing_ok=True)
        for child in self.children.values():
            child.kill()
        inodes = self.wiring.inodes()
        while inside := kernel.processes_in(inodes):
            for pid in inside:
                kernel.send_signal(pid, signal.SIGKILL)
            for child in self.children.values():
                child.poll()
            time.sleep(0.005)
        shutil.rmtree(self.record.folder, ignore_errors=True)

    def answer(self, request: dict[str, Any]) -> tuple[Any, list[int]]:
        """What to reply to a request, and descriptors to hand over with it."""
        do = request.pop("do", "")
        act = getattr(self, f"_on_{do}", None)
        if act is None:
            raise FabricError(f"a lab does not know the request {do!r}")
        result = act(**request)
        if isinstance(result, socket.socket):
            return None, [result.detach()]
        return result, []

    def _on_describe(self) -> dict[str, Any]:
        ends = {
            name: {"rate_bps": end.shape.rate_bps, "queue_bytes": end.shape.queue_bytes, "cut": end.cut,
                   "lost_sources": list(end.lost_sources)}
            for name, end in self.wiring.ends.items()
        }  # fmt: skip
        processes: dict[str, int] = {}
        names = self.wiring.inodes()
        for inode in kernel.processes_in(names).values():
            processes[names[inode]] = processes.get(names[inode], 0) + 1
        return {
            "hosts": {port.owner: port.address for port in self.wiring.blueprint.hosts},
            "ports": {port.owner: port.far for port in self.wiring.blueprint.hosts},
            "links": ends,
            "measured": [asdict(measured) for measured in self.measured],
            "piece_frames": self.wiring.piece_frames,
            "playing": self.player.playing,
            "in_user_namespace": self.record.read().get("in_user_namespace"),
            "processes": processes,
        }

    def _on_set_rate(self, host: str, **change: Any) -> None:
        self.controls.set_rate(host, change.get("up"), change.get("down"), change.get("queue"))

    def _on_cut(self, first: str, second: str | None, direction: str) -> None:
        if second is None:
            self.controls.cut(first, direction)
        else:
            self.controls.cut_between(first, second, direction)

    def _on_heal(self, first: str, second: str | None, direction: str) -> None:
        if second is None:
            self.controls.heal(first, direction)
        else:
            self.controls.heal_between(first, second, direction)

    def _on_signal(self, host: str, fault: str) -> list[int]:
        return self.controls.signal(host, fault)

    def _on_counters(self) -> dict[str, Any]:
        return {name: asdict(counters) for name, counters in self.wiring.counters().items()}

    def _on_socket(self, host: str, family: int, kind: int, protocol: int) -> socket.socket:
        self.wiring.blueprint.host(host)
        return self.wiring.socket_inside(host, family, kind, protocol)

    def _on_play(self) -> float:
        """Begin the scenario; when it began, by the wall clock."""
        if self.player.playing:
            raise FabricError("this lab plays its scenario already")
        epoch = time.monotonic()
        self._start_background(epoch)
        self.player.start(epoch)
        return time.time()

    def _on_done(self, since: int) -> list[dict[str, Any]]:
        return [asdict(done) for done in self.controls.done[since:]]

    def _on_measure(self, owner: str, direction: str) -> dict[str, Any]:
        sockets = probe.Sockets(self.wiring)
        measured = probe.measure_link(self.wiring, sockets, owner, direction)
        sockets.close()
        return asdict(measured)

    def _on_plain_frames(self) -> None:
        self.wiring.set_piece_frames(1)

    def _on_down(self) -> None:
        self.stopping = True

    def _start_forwarders(self) -> None:
        for owner, (near, far) in self.wiring.taps.items():
            delay_ns = round(self.wiring.port(owner).delay_s * 1e9)
            self._start(
                f"forwarder of {owner}", "forwarder", [str(near), str(far), str(delay_ns)], [near, far]
            )

    def _start_background(self, epoch: float) -> None:
        if not self.scenario.background:
            return
        streams = [
            {
                "source": stream.source,
                "target": stream.target,
                "address": self.wiring.blueprint.host(stream.target).address,
                "rate_bps": float(stream.rate),
                "start": epoch + float(stream.start),
                "stop": None if stream.stop is None else epoch + float(stream.stop),
            }
            for stream in self.scenario.background
        ]
        hosts = {name for stream in streams for name in (stream["source"], stream["target"])}
        fds = {str(name): self.wiring.namespaces[str(name)] for name in hosts}
        order = json.dumps({"namespaces": fds, "streams": streams})
        self._start("background traffic", "background", [order], list(fds.values()))

    def _start(self, name: str, program: str, arguments: list[str], fds: list[int]) -> None:
        argv = [sys.executable, "-m", f"mlfabric.lab.{program}", *arguments]
        self.children[name] = subprocess.Popen(argv, stdin=subprocess.DEVNULL, pass_fds=fds)

    def _look_after_children(self) -> None:
        for name, child in list(self.children.items()):
            if child.poll() is not None:
                del self.children[name]
                if child.returncode != 0:
                    self.controls.remember("broken", program=name, exit_code=child.returncode)

    def _listen(self) -> None:
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Relative to the folder: the path of a Unix socket has little room.
        here = os.open(".", os.O_RDONLY)
        os.chdir(self.record.folder)
        server.bind("control")
        os.fchdir(here)
        os.close(here)
        server.listen(64)
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ, lambda: self._accept(server))

    def _accept(self, server: socket.socket) -> None:
        with contextlib.suppress(BlockingIOError):
            peer, _ = server.accept()
            peer.setblocking(True)
            conversation = _Conversation(peer, self)
            self._selector.register(peer, selectors.EVENT_READ, lambda: self._listen_to(conversation))

    def _listen_to(self, conversation: _Conversation) -> None:
        if not conversation.go_on():
            self._selector.unregister(conversation.peer)
            conversation.peer.close()

    def _maker_gone(self) -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            self.stopping = True

    def _stop(self, number: int, frame: object) -> None:
        self.stopping = True


class _Conversation:
    """Requests of one client, a line of JSON each; a reply is a line, with descriptors where asked for."""

    def __init__(self, peer: socket.socket, anchor: Anchor) -> None:
        self.peer = peer
        self._anchor = anchor
        self._heard = b""

    def go_on(self) -> bool:
        try:
            more = self.peer.recv(65536)
            self._heard += more
            while b"\n" in self._heard:
                line, _, self._heard = self._heard.partition(b"\n")
                self._reply(line)
        except OSError:
            return False
        return bool(more)

    def _reply(self, line: bytes) -> None:
        fds: list[int] = []
        try:
            result, fds = self._anchor.answer(json.loads(line))
            reply = {"result": result}
        except FabricError as error:
            reply = {"error": str(error)}
        except (OSError, NetlinkError, TypeError, ValueError, KeyError) as error:
            reply = {"error": f"the lab could not do it: {error!r}"}
        text = json.dumps(reply).encode() + b"\n"
        try:
            sent = socket.send_fds(self.peer, [text], fds)
            self.peer.sendall(text[sent:])
        finally:
            for fd in fds:
                os.close(fd)


def _gain_privileges() -> bool:
    """Make sure that namespaces can be made; whether that took a user namespace of our own."""
    try:
        # A try-out; the namespace goes when the first real one is made.
        kernel.unshare(kernel.CLONE_NEWNET)
        return False
    except PermissionError:
        pass
    try:
        kernel.become_root_of_user_namespace()
        kernel.unshare(kernel.CLONE_NEWNET)
    except OSError as error:
        raise FabricError(
            "a lab needs root, or a kernel that lets users make user namespaces, and here is neither "
            f"({os.strerror(error.errno or 0)}); run it as root, or allow them, on Debian with "
            "sysctl kernel.unprivileged_userns_clone=1 and user.max_user_namespaces above 0"
        ) from None
    return True


def main() -> None:
    record = Record(Path(sys.argv[1]))
    attached, verify = sys.argv[2] == "attached", sys.argv[3] == "verify"
    if not attached and os.fork():
        os._exit(0)  # the lab is nobody's child
    anchor = None
    try:
        anchor = Anchor(record)
        anchor.build(verify=verify)
        answer: dict[str, Any] = {"ready": True}
    except FabricError as error:
        answer = {"error": str(error)}
    except (OSError, NetlinkError) as error:
        answer = {"error": f"the lab can't be built here: {error}"}
    with contextlib.suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), json.dumps(answer).encode() + b"\n")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if anchor is not None:
        try:
            if "ready" in answer:
                anchor.serve(attached=attached)
        finally:
            if anchor.wiring.namespaces.get(SWITCH) is not None:
                anchor.take_down()


if __name__ == "__main__":
    main()
