"""Who may speak: a shared secret proves membership on every connection, in both directions.

Challenge and response with fresh nonces: nothing that went over the wire before opens a connection again.
It keeps strangers out; it does not hide or seal what is sent afterwards from someone on the path. Pure: the
engine does the sending.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from enum import StrEnum

import msgspec

from mlfabric.wire import NOT_DECODABLE, WireError

PROTOCOL = 2
NONCE_BYTES = 32


class Purpose(StrEnum):
    CONTROL = "control"
    BULK = "bulk"
    COLLECTIVE = "collective"
    PROBE = "probe"  # asks who is there, then goes
    QUERY = "query"  # asks something and is answered on the same connection


class Hello(msgspec.Struct, frozen=True, tag=True):
    protocol: int
    node: str
    purpose: Purpose
    nonce: bytes
    job: str  # whose secret is meant


class Challenge(msgspec.Struct, frozen=True, tag=True):
    protocol: int
    node: str
    nonce: bytes
    proof: bytes


class Proof(msgspec.Struct, frozen=True, tag=True):
    proof: bytes


class Welcome(msgspec.Struct, frozen=True, tag=True):
    scheduler: str  # who schedules
    address: str  # and where; empty: here, or nobody knows


class Refusal(msgspec.Struct, frozen=True, tag=True):
    reason: str


HandshakeMessage = Hello | Challenge | Proof | Welcome | Refusal
_decoder = msgspec.msgpack.Decoder(HandshakeMessage)
_encoder = msgspec.msgpack.Encoder()


# The secret of a job; None: there is no such job here.
Secrets = Callable[[str], bytes | None]


class Refused(Exception):  # noqa: N818 - an answer, not a fault
    """The other side, or we, ended the handshake; the reason is a sentence."""


class Handshake:
    """One side of a handshake: bytes in, bytes out, `done` at the end."""

    def __init__(
        self,
        node: str,
        secret: bytes | Secrets,
        nonce: bytes,
        purpose: Purpose | None = None,
        scheduler: tuple[str, str] = ("", ""),
        job: str = "",
    ) -> None:
        self._node = node
        self._secret = secret
        self.job = job
        self._nonce = nonce
        self._purpose = purpose  # None: we were called
        self._scheduler = scheduler
        self._hello: Hello | None = None
        self._challenge: Challenge | None = None
        self.peer = ""
        self.purpose = purpose
        self.scheduler = ("", "")  # name and address, as the other side knows it
        self.done = False

    def begin(self) -> bytes:
        """The caller's first words."""
        assert self._purpose is not None
        self._hello = Hello(PROTOCOL, self._node, self._purpose, self._nonce, self.job)
        return _encoder.encode(self._hello)

    def feed(self, body: bytes) -> bytes | None:
        """What to answer; None: nothing. Raises Refused with the reason where it ends."""
        try:
            message = _decoder.decode(body)
        except NOT_DECODABLE:
            raise WireError("not a handshake of ours") from None
        match message:
            case Refusal(reason=reason):
                raise Refused(reason)
            case Hello() if self._purpose is None and self._hello is None:
                return self._challenged_by(message)
            case Challenge() if self._purpose is not None and self._challenge is None:
                return self._answer(message)
            case Proof() if self._purpose is None and self._challenge is not None and not self.done:
                return self._verify(message)
            case Welcome() if self._purpose is not None and self._challenge is not None and not self.done:
                self.scheduler = (message.scheduler, message.address)
                self.done = True
                return None
        raise WireError(f"{type(message).__name__} out of turn")

    def _challenged_by(self, hello: Hello) -> bytes:
        if hello.protocol != PROTOCOL:
            raise Refused(f"protocol {hello.protocol} is spoken there, {PROTOCOL} here; use one version")
        if len(hello.nonce) != NONCE_BYTES:
            raise WireError("a nonce of the wrong length")
        self._hello, self.peer, self.purpose, self.job = hello, hello.node, hello.purpose, hello.job
        proof = self._seal(b"called", hello, self._node, self._nonce)
        self._challenge = Challenge(PROTOCOL, self._node, self._nonce, proof)
        return _encoder.encode(self._challenge)

    def _answer(self, challenge: Challenge) -> bytes:
        assert self._hello is not None
        if challenge.protocol != PROTOCOL:
            raise Refused(f"protocol {challenge.protocol} is spoken there, {PROTOCOL} here; use one version")
        if len(challenge.nonce) != NONCE_BYTES:
            raise WireError("a nonce of the wrong length")
        expected = self._seal(b"called", self._hello, challenge.node, challenge.nonce)
        if not hmac.compare_digest(expected, challenge.proof):
            raise Refused("the secrets differ; give both sides the same MLFABRIC_SECRET")
        self._challenge, self.peer = challenge, challenge.node
        return _encoder.encode(Proof(self._seal(b"caller", self._hello, challenge.node, challenge.nonce)))

    def _verify(self, proof: Proof) -> bytes:
        assert self._hello is not None
        expected = self._seal(b"caller", self._hello, self._node, self._nonce)
        if not hmac.compare_digest(expected, proof.proof):
            raise Refused("the secrets differ; give both sides the same MLFABRIC_SECRET")
        self.done = True
        return _encoder.encode(Welcome(*self._scheduler))

    def _seal(self, side: bytes, hello: Hello, called: str, nonce: bytes) -> bytes:
        said = (hello.node.encode(), hello.job.encode(), hello.purpose.value.encode(), hello.nonce)
        text = b"".join(len(part).to_bytes(4, "big") + part for part in (side, *said, called.encode(), nonce))
        return hmac.digest(self._key(), text, hashlib.sha256)

    def _key(self) -> bytes:
        if isinstance(self._secret, bytes):
            return self._secret
        # Whoever names a job that is not here learns no more than who has the wrong secret: our own nonce,
        # which nobody can have guessed, stands in.
        known = self._secret(self.job)
        return self._nonce + b"no such job" if known is None else known


def encode_refusal(reason: str) -> bytes:
    return _encoder.encode(Refusal(reason))
