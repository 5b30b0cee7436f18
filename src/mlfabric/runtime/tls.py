"""TLS on every connection, where a folder with certificates is given: both sides show one of one authority.

A `TlsSocket` looks like the plain socket it wraps, as far as the engine uses one: what can't be done now
raises BlockingIOError, what ends it raises Refused with a reason. The handshake happens inside the first
reads and writes. The secret is asked for all the same: a certificate says which hosts may speak, the secret
for which job.
"""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlfabric.errors import FabricError
from mlfabric.runtime.trust import Refused

# The files of a host's folder, as `mlfabric certs` writes them.
AUTHORITY, CERTIFICATE, KEY = "ca.pem", "host.pem", "host.key"
# What a TLS record holds at most; smaller pieces are sent together.
RECORD_BYTES = 16 * 1024

AnySocket = Any  # socket.socket or TlsSocket: the engine uses what both have


class Tls:
    """The certificates of this host, ready for both directions."""

    def __init__(self, folder: Path) -> None:
        self._calling = _context(folder, ssl.PROTOCOL_TLS_CLIENT)
        self._called = _context(folder, ssl.PROTOCOL_TLS_SERVER)

    def wrap(self, sock: socket.socket, called: bool) -> TlsSocket:
        context = self._called if called else self._calling
        return TlsSocket(context.wrap_socket(sock, server_side=called, do_handshake_on_connect=False))

    def wrap_blocking(self, sock: socket.socket) -> ssl.SSLSocket:
        """For those who only ask something; raises Refused."""
        try:
            return self._calling.wrap_socket(sock)
        except ssl.SSLError as error:
            raise Refused(_reason(error)) from None


def _context(folder: Path, protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Members are known by their authority and their secret; addresses change and name nobody.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(folder / AUTHORITY)
        context.load_cert_chain(folder / CERTIFICATE, folder / KEY)
    except (OSError, ssl.SSLError) as error:
        raise FabricError(
            f"can't use the certificates in {folder}: {error}; make them with `mlfabric certs`"
        ) from None
    return context


def _reason(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted: {error.verify_message}"
    name = (error.reason or str(error)).replace("_", " ").lower()
    if "wrong version number" in name or "http request" in name or "unsupported protocol" in name:
        return "it does not speak TLS as we do"
    return f"TLS with it failed: {name}"


class TlsSocket:
    def __init__(self, inner: ssl.SSLSocket) -> None:
        self._inner = inner
        self.waits_to_read = False  # a write can't go on before something is read

    def sendmsg(self, buffers: Sequence[Any]) -> int:
        first = buffers[0]
        if len(first) < RECORD_BYTES and len(buffers) > 1:
            first = b"".join(buffers) if sum(map(len, buffers)) <= RECORD_BYTES else _some(buffers)
        return self.send(first)

    def send(self, data: Any) -> int:
        self.waits_to_read = False
        try:
            return self._inner.send(data)
        except ssl.SSLWantReadError:
            self.waits_to_read = True
            raise BlockingIOError from None
        except ssl.SSLWantWriteError:
            raise BlockingIOError from None
        except ssl.SSLEOFError:
            raise ConnectionResetError(errno.ECONNRESET, "connection closed") from None
        except ssl.SSLError as error:
            raise Refused(_reason(error)) from None

    def recv_into(self, view: memoryview) -> int:
        self.waits_to_read = False
        try:
            return self._inner.recv_into(view)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        except ssl.SSLEOFError:
            return 0
        except ssl.SSLError as error:
            raise Refused(_reason(error)) from None

    def recvmsg_into(self, views: Sequence[Any]) -> tuple[int, list[Any], int, Any]:
        view = next((view for view in views if len(view)), views[0])
        return self.recv_into(view), [], 0, None

    def pending(self) -> int:
        """Bytes that are decrypted and not read: the kernel does not tell of them again."""
        return self._inner.pending()

    def fileno(self) -> int:
        return self._inner.fileno()

    def setsockopt(self, *arguments: Any) -> None:
        self._inner.setsockopt(*arguments)

    def getsockopt(self, *arguments: Any) -> Any:
        return self._inner.getsockopt(*arguments)

    def getsockname(self) -> Any:
        return self._inner.getsockname()

    def getpeername(self) -> Any:
        return self._inner.getpeername()

    def setblocking(self, flag: bool) -> None:
        self._inner.setblocking(flag)

    def close(self) -> None:
        self._inner.close()


def _some(buffers: Sequence[Any]) -> bytes:
    """The first bytes of several buffers, one record at most."""
    gathered = bytearray()
    for buffer in buffers:
        gathered += buffer[: RECORD_BYTES - len(gathered)]
        if len(gathered) >= RECORD_BYTES:
            break
    return bytes(gathered)
