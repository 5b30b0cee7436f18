"""Settings of a process: arguments, then our variables, then torchrun's; mistakes get one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlfabric.config import DEFAULT_PORT, format_address, from_environment, is_loopback, parse_address
from mlfabric.errors import ConnectError, FabricError
from mlfabric.units import goodput

TORCHRUN = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_arguments_win_over_variables_and_ours_over_torchruns() -> None:
    plain = from_environment(environment=TORCHRUN)
    assert (plain.name, plain.scheduler, plain.expected) == ("rank2", ("10.0.0.1", 30348), 4)
    assert not plain.embed_scheduler
    ours = {**TORCHRUN, "MLFABRIC_SCHEDULER": "h:1", "MLFABRIC_NAME": "n", "MLFABRIC_JOB": "j"}
    named = from_environment(environment=ours)
    assert (named.name, named.job, named.scheduler, named.expected) == ("n", "j", ("h", 1), 0)
    told = from_environment("k:2", name="m", job="i", environment=ours)
    assert (told.name, told.job, told.scheduler) == ("m", "i", ("k", 2))


def test_rank_zero_embeds_the_scheduler_unless_told_otherwise() -> None:
    first = {**TORCHRUN, "RANK": "0"}
    assert from_environment(environment=first).embed_scheduler
    assert not from_environment(environment=first, embed_scheduler=False).embed_scheduler


def test_secrets_come_from_argument_variable_or_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("from file\n")
    env = {"MLFABRIC_SECRET_FILE": str(path)}
    assert from_environment("h", environment=env).secret == b"from file"
    env["MLFABRIC_SECRET"] = "from variable"
    assert from_environment("h", environment=env).secret == b"from variable"
    assert from_environment("h", secret="told", environment=env).secret == b"told"
    assert from_environment("h", environment={}).secret == b""
    with pytest.raises(FabricError, match="can't read the secret file"):
        from_environment("h", environment={"MLFABRIC_SECRET_FILE": str(tmp_path / "none")})


def test_link_rates_are_wire_rates_as_told_or_a_guess() -> None:
    settings = from_environment("10.0.0.1", up="200mbit", environment={"MLFABRIC_DOWN": "1gbit"})
    assert settings.up_bytes_per_s == goodput(200e6)
    assert settings.down_bytes_per_s == goodput(1e9)
    assert from_environment("127.0.0.1", environment={}).up_bytes_per_s == goodput(10e9)


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        ({}, {}, "join() needs the scheduler's address"),
        ({"address": "h"}, {"MLFABRIC_NAME": "a b"}, "'a b'"),
        ({"address": "h", "up": "fast"}, {}, "'fast' is not a rate"),
        ({"address": "h", "up": 0}, {}, "carries nothing"),
        ({}, {**TORCHRUN, "RANK": "two"}, "RANK is 'two'"),
        ({"address": "h:99999"}, {}, "99999"),
        ({"address": "a:b:c"}, {}, "'a:b:c' is not an address"),
        ({"address": "h:"}, {}, "'h:' is not an address"),
    ],
)
def test_a_mistake_gets_one_sentence(
    arguments: dict[str, str], environment: dict[str, str], words: str
) -> None:
    with pytest.raises(FabricError) as caught:
        from_environment(**arguments, environment=environment)  # type: ignore[arg-type]
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@given(st.sampled_from(["10.0.0.1", "::1", "node-7.cluster", "fe80::2"]), st.integers(0, 65535))
def test_an_address_comes_back_as_it_was_formatted(host: str, port: int) -> None:
    assert parse_address(format_address(host, port)) == (host, port)


def test_a_bare_host_gets_the_default_port() -> None:
    assert parse_address(" node7 ") == ("node7", DEFAULT_PORT)
    assert parse_address("[::1]") == ("::1", DEFAULT_PORT)
    with pytest.raises(ConnectError):
        parse_address("")


def test_loopback_is_known_by_address_or_name() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.0.1", "::1", "localhost")))
    assert not any(map(is_loopback, ("10.0.0.1", "0.0.0.0", "node7", "::")))


def test_pacing_is_asked_for_by_argument_or_variable() -> None:
    assert not from_environment("h", environment={}).pace
    assert from_environment("h", environment={"MLFABRIC_PACE": "1"}).pace
    assert not from_environment("h", pace=False, environment={"MLFABRIC_PACE": "1"}).pace
    with pytest.raises(FabricError, match="MLFABRIC_PACE is 'yes'; write 1 or 0"):
        from_environment("h", environment={"MLFABRIC_PACE": "yes"})
