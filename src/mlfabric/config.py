"""Settings of a process: the only place that reads the environment. Arguments win over it.

Under torchrun its variables say who we are and where rank 0 is; the fabric's own start with MLFABRIC_.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mlfabric.errors import ConnectError, FabricError
from mlfabric.units import goodput, parse_rate

# The scheduler's port where none is given; under torchrun, one above the port of its own store.
DEFAULT_PORT = 7070
_NAME = re.compile(r"^[A-Za-z0-9_.\-]{1,64}$")


@dataclass(frozen=True, slots=True)
class Settings:
    """Who a process is in the fabric and how it may be reached."""

    name: str
    job: str
    host: str
    scheduler: tuple[str, int]  # where the scheduler listens
    embed_scheduler: bool
    secret: bytes
    expected: int  # members the job is known to have; 0: unknown
    up_bytes_per_s: float
    down_bytes_per_s: float
    log: Path | None
    insecure: bool
    rack: str | None = None
    rates_guessed: bool = False
    tls: Path | None = None  # a folder with this host's certificate
    listen: tuple[str, int] | None = None  # where this member listens; None: found by the route
    least_lease_s: float = 0.0  # an embedded scheduler never takes shorter silence for death
    pace: bool = False  # spread what collectives send over the time until it is needed
    mirror: Path | None = None  # a folder where the weights this member leads can be read, even after a kill


def from_environment(
    address: str | None = None,
    *,
    job: str | None = None,
    name: str | None = None,
    embed_scheduler: bool | None = None,
    secret: str | bytes | None = None,
    expected: int | None = None,
    up: str | float | None = None,
    down: str | float | None = None,
    log: str | Path | None = None,
    insecure: bool | None = None,
    host: str | None = None,
    listen: str | None = None,
    tls: str | Path | None = None,
    pace: bool | None = None,
    environment: Mapping[str, str] | None = None,
) -> Settings:
    """Arguments first, then MLFABRIC_ variables, then torchrun's, then defaults."""
    env = os.environ if environment is None else environment
    rank = _whole(env, "RANK") if address is None and "MLFABRIC_SCHEDULER" not in env else None
    where = address or env.get("MLFABRIC_SCHEDULER") or _torchrun_address(env)
    if where is None:
        raise FabricError(
            "join() needs the scheduler's address, MLFABRIC_SCHEDULER or torchrun's variables; "
            "mlfabric.local() needs none of them"
        )
    scheduler = parse_address(where)
    chosen = name or env.get("MLFABRIC_NAME") or (f"rank{rank}" if rank is not None else _default_name())
    if not _NAME.match(chosen):
        raise FabricError(f"the name {chosen!r} is not made of 1 to 64 letters, digits, dots, dashes")
    size = _whole(env, "WORLD_SIZE") if rank is not None else None
    out, into = _rate(up, env.get("MLFABRIC_UP"), scheduler), _rate(down, env.get("MLFABRIC_DOWN"), scheduler)
    written = log or env.get("MLFABRIC_LOG")
    return Settings(
        name=chosen,
        job=job or env.get("MLFABRIC_JOB") or env.get("TORCHELASTIC_RUN_ID") or "job",
        host=host or env.get("MLFABRIC_HOST") or socket.gethostname(),
        scheduler=scheduler,
        embed_scheduler=rank == 0 if embed_scheduler is None else embed_scheduler,
        secret=_secret(secret, env),
        expected=expected if expected is not None else (size or 0),
        up_bytes_per_s=out,
        down_bytes_per_s=into,
        log=Path(written) if written else None,
        listen=_listen(listen or env.get("MLFABRIC_LISTEN")),
        tls=Path(tls or env["MLFABRIC_TLS"]) if tls or env.get("MLFABRIC_TLS") else None,
        insecure=insecure if insecure is not None else env.get("MLFABRIC_INSECURE") == "1",
        pace=pace if pace is not None else _flag(env, "MLFABRIC_PACE"),
        rack=env.get("MLFABRIC_RACK"),
        rates_guessed=all(r is None for r in (up, down, env.get("MLFABRIC_UP"), env.get("MLFABRIC_DOWN"))),
    )


@dataclass(frozen=True, slots=True)
class TorchSettings:
    """What only the process-group backend asks of the environment."""

    secret: bytes  # empty: the first rank draws one and puts it into the store
    address: str | None  # where the first rank listens, if told
    scheduler: str | None  # a standalone scheduler to use instead of an embedded one
    dump_prefix: str  # where the record of recent operations goes after a time-out; the rank is appended
    record_entries: int  # operations remembered for it
    pace: bool  # spread what collectives send over the time until it is needed


def torch_settings(pace: bool | None = None, environment: Mapping[str, str] | None = None) -> TorchSettings:
    env = os.environ if environment is None else environment
    default = str(Path(tempfile.gettempdir()) / "mlfabric_trace_rank_")
    entries = _whole(env, "TORCH_FR_BUFFER_SIZE")
    return TorchSettings(
        _secret(None, env),
        env.get("MLFABRIC_ADDRESS"),
        env.get("MLFABRIC_SCHEDULER"),
        env.get("MLFABRIC_DUMP_FILE") or env.get("TORCH_FR_DUMP_TEMP_FILE") or default,
        entries if entries is not None and entries > 0 else 2000,
        pace if pace is not None else _flag(env, "MLFABRIC_PACE"),
    )


def _torchrun_address(env: Mapping[str, str]) -> str | None:
    if "MASTER_ADDR" not in env or "MASTER_PORT" not in env or "RANK" not in env:
        return None
    port = _whole(env, "MASTER_PORT") or 0
    # torchrun's own store holds MASTER_PORT.
    return f"{env['MASTER_ADDR']}:{port + 1 if port < 65535 else port - 1}"


def _flag(env: Mapping[str, str], key: str) -> bool:
    written = env.get(key, "0")
    if written not in ("0", "1"):
        raise FabricError(f"{key} is {written!r}; write 1 or 0")
    return written == "1"


def _whole(env: Mapping[str, str], key: str) -> int | None:
    if key not in env:
        return None
    try:
        return int(env[key])
    except ValueError:
        raise FabricError(f"the variable {key} is {env[key]!r}, not a whole number") from None


def _secret(given: str | bytes | None, env: Mapping[str, str]) -> bytes:
    if given is not None:
        return given.encode() if isinstance(given, str) else given
    if "MLFABRIC_SECRET" in env:
        return env["MLFABRIC_SECRET"].encode()
    path = env.get("MLFABRIC_SECRET_FILE")
    if path is None:
        return b""
    try:
        return Path(path).read_bytes().strip()
    except OSError as error:
        raise FabricError(f"can't read the secret file {path}: {error.strerror}") from None


def read_secrets(path: Path) -> dict[str, bytes]:
    """The secret of each job: a line `job secret` each."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FabricError(f"can't read the secrets in {path}: {error}") from None
    found: dict[str, bytes] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or words[0] in found:
            raise FabricError(f"{path}, line {number}: write `job secret`, each job once")
        found[words[0]] = words[1].encode()
    if not found:
        raise FabricError(f"{path} holds no secret; write a line `job secret` for each job")
    return found


def _listen(written: str | None) -> tuple[str, int] | None:
    """Where to listen; a bare host takes any free port."""
    if written is None:
        return None
    host, port = parse_address(written)
    return host, port if re.search(r":\d+$", written) else 0


def _default_name() -> str:
    return re.sub(r"[^A-Za-z0-9_.\-]", "-", f"{socket.gethostname()}-{os.getpid()}")[:64]


def _rate(given: str | float | None, written: str | None, scheduler: tuple[str, int]) -> float:
    """A link's payload rate: as told, or a guess that measurements will correct."""
    value = given if given is not None else written
    if value is not None:
        try:
            rate = parse_rate(value)
        except ValueError as error:
            raise FabricError(str(error)) from None
        if rate <= 0:
            raise FabricError(f"a link rate of {value!r} carries nothing; give one above zero")
        return goodput(rate)
    return goodput(10e9 if is_loopback(scheduler[0]) else 1e9)


def parse_address(written: str) -> tuple[str, int]:
    """("10.0.0.1", 7070) of "10.0.0.1:7070", "[::1]:7070" or a bare host."""
    match = re.match(r"^(?:\[([^\]]+)\]|([^:\[\]]+))(?::(\d+))?$", written.strip())
    if match is None:
        raise ConnectError(f"{written!r} is not an address; write host:port, for example 10.0.0.1:7070")
    port = int(match.group(3) or DEFAULT_PORT)
    if not 0 <= port <= 65535:
        raise ConnectError(f"{port} in {written!r} is not a port; ports are 1 to 65535")
    return match.group(1) or match.group(2), port


def format_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
