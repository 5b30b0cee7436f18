"""Wrong addresses, wrong secrets, garbage: one clear sentence, no hang, the job unharmed."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pytest

import mlfabric as mf
from mlfabric.api import Fabric
from mlfabric.config import parse_address
from mlfabric.runtime import reception
from mlfabric.runtime.trust import Handshake, Purpose
from mlfabric.wire import FrameReader, Kind, encode_frame


@contextmanager
def listener(answer: bytes) -> Iterator[str]:
    """Something that listens and says the same to everybody."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.settimeout(5)

        def serve() -> None:
            try:
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.sendall(answer)
                        connection.recv(4096)
            except OSError:
                pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        host, port = server.getsockname()
        yield f"{host}:{port}"


def test_an_address_where_nobody_listens_is_named() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    with pytest.raises(mf.ConnectError, match=rf"no scheduler answered at 127\.0\.0\.1:{port}.*refused"):
        mf.join(f"127.0.0.1:{port}", name="w0", timeout=0.3)


@pytest.mark.parametrize("address", ["not an address", "1.2.3.4:port", "1.2.3.4:99999", ""])
def test_what_is_no_address_is_named(address: str) -> None:
    with pytest.raises(mf.FabricError, match=r"address|port"):
        mf.join(address, name="w0", timeout=0.3)


def test_a_host_name_that_does_not_exist_is_named() -> None:
    with pytest.raises(mf.ConnectError, match=r"no-such-host\.invalid"):
        mf.join("no-such-host.invalid:7070", name="w0", timeout=0.5)


def test_a_listener_that_speaks_something_else_is_named() -> None:
    with (
        listener(b"HTTP/1.1 400 Bad Request\r\n\r\n") as address,
        pytest.raises(mf.ConnectError, match="is not an MLfabric scheduler"),
    ):
        mf.join(address, name="w0", timeout=2)


def test_a_wrong_secret_lets_nobody_in() -> None:
    with (
        mf.join("127.0.0.1:0", name="w0", job="j", scheduler=True, secret="right") as fabric,
        pytest.raises(mf.ConnectError, match="secrets differ"),
    ):
        mf.join(fabric.address, name="w1", job="j", secret="wrong", timeout=2)


def test_listening_beyond_loopback_needs_a_secret() -> None:
    with pytest.raises(mf.FabricError, match=r"refusing to listen.*without a secret"):
        mf.join("0.0.0.0:0", name="w0", scheduler=True)
    with mf.join("0.0.0.0:0", name="w0", scheduler=True, insecure=True):
        pass


GARBAGE = {
    "text": b"GET / HTTP/1.1\r\n\r\n",
    "zeros": bytes(4096),
    "a control message before the handshake": encode_frame(Kind.CONTROL, b"\x80"),
    "a handshake that is none": encode_frame(Kind.HANDSHAKE, b"\xc1\xc1"),
    "an oversized frame": encode_frame(Kind.HANDSHAKE, b"x")[:4] + b"\xff\xff\xff\x7f" + bytes(8),
    "data before the handshake": encode_frame(Kind.DATA, b"x" * 100),
}


@pytest.mark.parametrize("what", list(GARBAGE))
def test_garbage_closes_the_connection_and_harms_nobody(what: str, caplog: pytest.LogCaptureFixture) -> None:
    with mf.local(workers=2) as fabric, caplog.at_level(logging.WARNING, "mlfabric"):
        host, port = parse_address(fabric.address)
        with socket.create_connection((host, port), timeout=5) as sock:
            sock.sendall(GARBAGE[what])
            sock.settimeout(5)
            with suppress(ConnectionResetError):  # what it had sent after the garbage was not even read
                while sock.recv(4096):
                    pass  # a refusal may come before the end
        closed = [record for record in caplog.records if "closed a connection" in record.getMessage()]
        assert len(closed) == 1
        _still_works(fabric)


def test_a_silent_stranger_is_shown_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception, "HANDSHAKE_S", 0.2)
    with mf.local(workers=2) as fabric:
        host, port = parse_address(fabric.address)
        with socket.create_connection((host, port), timeout=5) as sock:
            sock.sendall(b"M")  # one byte of a frame, then nothing
            sock.settimeout(5)
            assert sock.recv(1) == b""
        _still_works(fabric)


def test_too_many_strangers_at_once_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reception, "MAX_STRANGERS", 3)
    with mf.local(workers=1) as fabric:
        host, port = parse_address(fabric.address)
        socks = [socket.create_connection((host, port), timeout=5) for _ in range(6)]
        try:
            socks[-1].settimeout(5)
            assert socks[-1].recv(1) == b""  # the fourth and later are closed at once
        finally:
            for sock in socks:
                sock.close()


def _still_works(fabric: Fabric) -> None:
    fabric.publish({"w": np.zeros(10)}, apply=mf.Sum())
    assert isinstance(fabric.push({"w": np.ones(10)}).result(20), mf.Committed)


def test_a_recorded_handshake_opens_nothing_when_it_is_played_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = bytearray()
    with mf.join("127.0.0.1:0", name="w0", job="j", secret="s", scheduler=True) as fabric:
        address = parse_address(fabric.address)
        caller = Handshake("w1", b"s", bytes(32), Purpose.CONTROL, job="j")
        with socket.create_connection(address, timeout=5) as sock:
            _converse(sock, caller, said)
        assert caller.done
        with caplog.at_level(logging.WARNING, "mlfabric"):
            for _ in range(5):
                with socket.create_connection(address, timeout=5) as sock, suppress(ConnectionResetError):
                    sock.sendall(bytes(said))
                    while sock.recv(4096):
                        pass
        refused = [r.getMessage() for r in caplog.records if "secrets differ" in r.getMessage()]
        assert len(refused) == 1  # five attempts, one line
        fabric.publish({"w": np.zeros(10)}, apply=mf.Sum(), divergence=None)


def _converse(sock: socket.socket, caller: Handshake, said: bytearray) -> None:
    """Go through a handshake and keep what the caller said."""
    reader = FrameReader()
    words: bytes | None = caller.begin()
    while True:
        if words is not None:
            frame = encode_frame(Kind.HANDSHAKE, words)
            said += frame
            sock.sendall(frame)
        if caller.done:
            return
        whole = None
        while whole is None:
            whole = reader.advance(sock.recv_into(reader.wanted()))
        words = caller.feed(whole.body)


def test_slow_strangers_are_shown_out_together_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reception, "HANDSHAKE_S", 0.2)
    with mf.local(workers=2) as fabric, caplog.at_level(logging.WARNING, "mlfabric"):
        address = parse_address(fabric.address)
        socks = [socket.create_connection(address, timeout=5) for _ in range(20)]
        for sock in socks:
            sock.sendall(b"M")
        for sock in socks:
            assert sock.recv(1) == b""
            sock.close()
        late = [record for record in caplog.records if "in time" in record.getMessage()]
        assert len(late) == 1
        _still_works(fabric)
