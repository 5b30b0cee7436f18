"""TLS: members with certificates of one authority speak, others are refused, and nothing goes in clear."""

from __future__ import annotations

import logging
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import mlfabric as mf
from mlfabric.commands.certs import make_certificates
from mlfabric.commands.root import app
from mlfabric.config import format_address, parse_address

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two hosts of one authority, and a stranger of another."""
    ours = make_certificates(tmp_path_factory.mktemp("ours"), ["one", "two"])
    theirs = make_certificates(tmp_path_factory.mktemp("theirs"), ["stranger"])
    return {**ours, **theirs}


@pytest.fixture
def first(folders: dict[str, Path]) -> Iterator[mf.Fabric]:
    with mf.join("127.0.0.1:0", job="j", name="w0", host="w0", scheduler=True, tls=folders["one"]) as fabric:
        yield fabric


def test_a_model_is_trained_over_tls(folders: dict[str, Path], first: mf.Fabric) -> None:
    with mf.join(first.address, job="j", name="w1", host="w1", tls=folders["two"]) as second:
        values = np.arange(600_000, dtype=np.float32)  # many records
        first.publish({"w": values}, apply=mf.Sum(), divergence=0.5)
        second.publish({"w": values}, apply=mf.Sum(), divergence=0.5)
        for fabric in (first, second):
            assert isinstance(fabric.push({"w": np.ones_like(values)}).result(30), mf.Committed)
        assert np.array_equal(second.pull().arrays["w"], values + 2)
        told = CliRunner().invoke(
            app, ["status", "--at", second.address], env={"MLFABRIC_TLS": str(folders["two"])}
        )
        assert told.exit_code == 0, told.output


def test_a_certificate_of_another_authority_is_refused_and_logged_once(
    folders: dict[str, Path], first: mf.Fabric, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "mlfabric"):
        for _ in range(3):
            with pytest.raises(mf.ConnectError, match="certificate is not accepted"):
                mf.join(first.address, job="j", name="w1", tls=folders["stranger"], timeout=1.0)
    assert len([r for r in caplog.records if "handshake with" in r.getMessage()]) <= 1


def test_whoever_speaks_no_tls_is_refused_either_way(folders: dict[str, Path], first: mf.Fabric) -> None:
    with pytest.raises(mf.ConnectError):
        mf.join(first.address, job="j", name="w1", timeout=1.0)
    with (
        mf.join("127.0.0.1:0", job="k", name="plain", scheduler=True) as plain,
        pytest.raises(mf.ConnectError),
    ):
        mf.join(plain.address, job="k", name="w1", tls=folders["one"], timeout=1.0)
    first.publish({"w": np.zeros(3)}, apply=mf.Sum(), divergence=None)  # unharmed


def test_nothing_of_an_update_is_seen_on_the_wire(folders: dict[str, Path], first: mf.Fabric) -> None:
    """A forwarder between caller and scheduler sees neither names nor numbers."""
    seen = bytearray()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        threading.Thread(target=forward, args=(listener, first.address, seen), daemon=True).start()
        through = format_address(*listener.getsockname())
        with mf.join(through, job="secretjob", name="secretname", tls=folders["two"], timeout=10):
            pass
    assert len(seen) > 500
    assert b"secretjob" not in seen
    assert b"secretname" not in seen


def forward(listener: socket.socket, target: str, seen: bytearray) -> None:
    try:
        while True:
            here, _ = listener.accept()
            there = socket.create_connection(parse_address(target))
            for source, sink in ((here, there), (there, here)):
                threading.Thread(target=copy, args=(source, sink, seen), daemon=True).start()
    except OSError:
        pass


def copy(source: socket.socket, sink: socket.socket, seen: bytearray) -> None:
    try:
        while data := source.recv(65536):
            seen.extend(data)
            sink.sendall(data)
    except OSError:
        pass
    finally:
        source.close()
        sink.close()


def test_certificates_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(mf.FabricError, match="can't use the certificates"):
        mf.join("127.0.0.1:0", name="w0", scheduler=True, tls=tmp_path)


def test_the_command_makes_a_folder_per_host_and_more_later(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    made = CliRunner().invoke(app, ["certs", "a", "b", "--folder", str(folder), "--json"])
    assert made.exit_code == 0, made.output
    authority = (folder / "ca.pem").read_bytes()
    CliRunner().invoke(app, ["certs", "c", "--folder", str(folder)])
    assert {path.name for path in (folder / "c").iterdir()} == {"ca.pem", "host.pem", "host.key"}
    assert (folder / "c" / "ca.pem").read_bytes() == authority
    assert (folder / "ca.key").stat().st_mode & 0o077 == 0
    assert (folder / "a" / "host.key").stat().st_mode & 0o077 == 0
    bad = CliRunner().invoke(app, ["certs", "../x", "--folder", str(folder)])
    assert isinstance(bad.exception, mf.FabricError)
