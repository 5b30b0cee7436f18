"""The handshake: who has the secret gets in, in both directions; nobody else, and nothing twice."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlfabric.runtime import trust
from mlfabric.runtime.trust import Handshake, Purpose, Refused, encode_refusal
from mlfabric.wire import MAX_HANDSHAKE_BYTES, WireError

NONCES = [bytes([fill]) * trust.NONCE_BYTES for fill in range(1, 5)]


def caller(secret: bytes = b"s", nonce: bytes = NONCES[0], node: str = "w0") -> Handshake:
    return Handshake(node, secret, nonce, Purpose.BULK)


def called(secret: bytes = b"s", nonce: bytes = NONCES[1], at: str = "") -> Handshake:
    return Handshake("s0", secret, nonce, scheduler=("s0", at))


def fed(side: Handshake, body: bytes | None) -> bytes:
    assert body is not None
    answer = side.feed(body)
    assert answer is not None
    return answer


@given(st.binary(max_size=60), st.sampled_from(Purpose), st.sampled_from(["", "10.0.0.2:7070"]))
def test_both_sides_with_the_same_secret_come_to_terms(secret: bytes, purpose: Purpose, at: str) -> None:
    one = Handshake("w0", secret, NONCES[0], purpose)
    other = called(secret, at=at)
    challenge = fed(other, one.begin())
    proof = fed(one, challenge)
    early = other.done
    welcome = fed(other, proof)
    assert one.feed(welcome) is None
    assert (early, one.done, other.done) == (False, True, True)
    assert (one.peer, other.peer) == ("s0", "w0")
    assert other.purpose is purpose
    assert one.scheduler == ("s0", at)


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_the_caller_refuses_a_host_with_another_secret(mine: bytes, theirs: bytes) -> None:
    one, other = caller(mine), called(theirs)
    challenge = fed(other, one.begin())
    if mine.rstrip(b"\0") == theirs.rstrip(b"\0"):
        return  # a keyed hash fills short keys up with zeros
    with pytest.raises(Refused, match="the secrets differ"):
        one.feed(challenge)
    assert not one.done


def test_the_called_refuses_a_caller_with_another_secret() -> None:
    honest, other = caller(b"s"), called(b"s")
    stranger = caller(b"guess")
    fed(other, honest.begin())
    sealed = stranger._seal(
        b"caller", trust.Hello(trust.PROTOCOL, "w0", Purpose.BULK, NONCES[0], ""), "s0", NONCES[1]
    )
    with pytest.raises(Refused, match="the secrets differ"):
        other.feed(msgspec.msgpack.encode(trust.Proof(sealed)))
    assert not other.done


def test_a_replayed_transcript_opens_nothing() -> None:
    one, other = caller(), called()
    hello = one.begin()
    proof = fed(one, fed(other, hello))
    fed(other, proof)
    assert other.done
    later = called(nonce=NONCES[2])
    fed(later, hello)
    with pytest.raises(Refused, match="the secrets differ"):
        later.feed(proof)


def test_a_replayed_challenge_proves_nothing_to_a_new_caller() -> None:
    challenge = fed(called(), caller().begin())
    later = caller(nonce=NONCES[3])
    later.begin()
    with pytest.raises(Refused, match="the secrets differ"):
        later.feed(challenge)


def test_a_proof_sent_back_to_its_maker_is_refused() -> None:
    other = called()
    challenge = msgspec.msgpack.decode(fed(other, caller().begin()), type=trust.HandshakeMessage)
    assert isinstance(challenge, trust.Challenge)
    with pytest.raises(Refused, match="the secrets differ"):
        other.feed(msgspec.msgpack.encode(trust.Proof(challenge.proof)))


def test_a_proof_holds_for_the_purpose_it_was_made_for_only() -> None:
    one, other = caller(), called()
    hello = msgspec.msgpack.decode(one.begin(), type=trust.HandshakeMessage)
    assert isinstance(hello, trust.Hello)
    forged = msgspec.structs.replace(hello, purpose=Purpose.CONTROL)
    with pytest.raises(Refused, match="the secrets differ"):
        one.feed(fed(other, msgspec.msgpack.encode(forged)))


def test_messages_out_of_turn_end_the_handshake() -> None:
    one, other = caller(), called()
    hello = one.begin()
    challenge = fed(other, hello)
    for side, body, what in (
        (called(), challenge, "Challenge"),
        (called(), msgspec.msgpack.encode(trust.Proof(b"x" * 32)), "Proof"),
        (called(), msgspec.msgpack.encode(trust.Welcome("s0", "")), "Welcome"),
        (one, hello, "Hello"),
        (one, msgspec.msgpack.encode(trust.Welcome("s0", "")), "Welcome"),
        (other, hello, "Hello"),
    ):
        with pytest.raises(WireError, match=f"{what} out of turn"):
            side.feed(body)
        assert not side.done


def test_nobody_is_welcomed_before_the_called_has_proved_itself() -> None:
    one = caller()
    one.begin()
    with pytest.raises(WireError):
        one.feed(msgspec.msgpack.encode(trust.Welcome("s1", "10.0.0.2:7070")))


def test_a_finished_handshake_takes_no_second_proof() -> None:
    one, other = caller(), called()
    proof = fed(one, fed(other, one.begin()))
    fed(other, proof)
    with pytest.raises(WireError, match="out of turn"):
        other.feed(proof)


def test_another_protocol_is_refused_by_name_on_both_sides() -> None:
    strange = msgspec.msgpack.encode(trust.Hello(99, "w0", Purpose.BULK, NONCES[0], ""))
    with pytest.raises(Refused, match="protocol 99 is spoken there, 2 here"):
        called().feed(strange)
    one = caller()
    one.begin()
    with pytest.raises(Refused, match="protocol 99 is spoken there, 2 here"):
        one.feed(msgspec.msgpack.encode(trust.Challenge(99, "s0", NONCES[1], b"x" * 32)))


def test_nonces_of_the_wrong_length_are_refused_on_both_sides() -> None:
    with pytest.raises(WireError, match="nonce"):
        called().feed(msgspec.msgpack.encode(trust.Hello(trust.PROTOCOL, "w0", Purpose.BULK, b"short", "")))
    one = caller()
    one.begin()
    with pytest.raises(WireError, match="nonce"):
        one.feed(msgspec.msgpack.encode(trust.Challenge(trust.PROTOCOL, "s0", b"", b"x" * 32)))


def test_a_refusal_is_passed_on_in_its_own_words() -> None:
    one = caller()
    one.begin()
    with pytest.raises(Refused, match="the name w0 is taken"):
        one.feed(encode_refusal("the name w0 is taken"))


@given(st.binary(max_size=80))
def test_garbage_ends_in_a_wire_error_or_a_refusal(body: bytes) -> None:
    one = caller()
    one.begin()
    for side in (one, called()):
        with pytest.raises((WireError, Refused)):
            side.feed(body)


def test_a_name_that_is_no_text_is_a_wire_error() -> None:
    body = msgspec.msgpack.encode(trust.Hello(trust.PROTOCOL, "w0", Purpose.BULK, NONCES[0], ""))
    with pytest.raises(WireError, match="not a handshake of ours"):
        called().feed(body.replace(b"w0", b"\xff\xff"))


def test_every_message_of_a_handshake_fits_its_limit() -> None:
    one, other = caller(node="n" * 64), called()
    hello = one.begin()
    challenge = fed(other, hello)
    proof = fed(one, challenge)
    assert max(map(len, (hello, challenge, proof, fed(other, proof)))) < MAX_HANDSHAKE_BYTES


def test_each_job_has_its_own_secret_and_an_unknown_job_is_refused_like_a_wrong_secret() -> None:
    secrets = {"a": b"one", "b": b"two"}

    def attempt(job: str, secret: bytes) -> Handshake:
        one = Handshake("w0", secret, NONCES[0], Purpose.CONTROL, job=job)
        other = Handshake("s", secrets.get, NONCES[1])
        one.feed(fed(other, fed(one, fed(other, one.begin()))))
        return other

    assert attempt("a", b"one").job == "a"
    assert attempt("b", b"two").done
    for job, secret in (("a", b"two"), ("c", b"one"), ("c", b"")):
        with pytest.raises(Refused, match="the secrets differ"):
            attempt(job, secret)
