"""Settings of a process: the only place that reads the environment. Arguments win over it.

Under torchrun its variables say who we are and where rank 0 is; the fabric's own start with MLFABRIC_.
"""

from __future__ import annotations

import contextlib
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

# The scheduler's port where none is given.
DEFAULT_PORT = 7070
# Where the engine of a member runs; "auto": as `runtime.placement` finds best.
ENGINES = ("thread", "process", "auto")
# Under torchrun the scheduler's port follows from that of torchrun's own store, in a range that kernels give
# to nobody by themselves: where torchrun draws a port, the next ones may be taken at any moment.
FIRST_PORT, PORTS = 20000, 12768
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
    max_rate_bytes_per_s: float | None = None  # what this host may send, by all processes of the fabric on it
    job_max_rate_bytes_per_s: float | None = None  # what this job may send from any one host
    pace: bool = False  # spread what collectives send over the time until it is needed
    mirror: Path | None = None  # a folder where the weights this member leads can be read, even after a kill
    engine: str = "auto"  # one of ENGINES
    processors: float = 1.0  # for this process: of those it may use, its part
    others: tuple[tuple[str, int], ...] = ()  # where else somebody may listen who knows the scheduler
    embeds_if_alone: bool = False  # schedules if nobody else does: it listens at the first of the addresses
    awaits_rank_0: bool = False  # torchrun's rank 0 schedules, and this is another one
    restarted: bool = False  # an earlier life of this process may still hold its name for a moment


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
    engine: str | None = None,
    max_rate: str | float | None = None,
    job_max_rate: str | float | None = None,
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
    scheduler, *others = [parse_address(each) for each in where.split(",")]
    on = host or env.get("MLFABRIC_HOST") or socket.gethostname()
    chosen = (
        name or env.get("MLFABRIC_NAME") or (f"rank{rank}" if rank is not None else _default_name(env, on))
    )
    if not _NAME.match(chosen):
        raise FabricError(f"the name {chosen!r} is not made of 1 to 64 letters, digits, dots, dashes")
    size = _whole(env, "WORLD_SIZE") if rank is not None else None
    out, into = _rate(up, env.get("MLFABRIC_UP"), scheduler), _rate(down, env.get("MLFABRIC_DOWN"), scheduler)
    written = log or env.get("MLFABRIC_LOG")
    listens = _listen(listen or env.get("MLFABRIC_LISTEN"))
    if others and listens is None and not _whole(env, "LOCAL_RANK"):
        listens = _own_address((scheduler, *others))
    # Of several torchruns, each of one host, every one has a run id of its own.
    run = env.get("TORCHELASTIC_RUN_ID") if rank is not None else None
    return Settings(
        name=chosen,
        job=job or env.get("MLFABRIC_JOB") or run or "job",
        host=on,
        scheduler=scheduler,
        embed_scheduler=rank == 0 if embed_scheduler is None else embed_scheduler,
        secret=_secret(secret, env),
        expected=expected if expected is not None else (size or 0),
        up_bytes_per_s=out,
        down_bytes_per_s=into,
        log=Path(written) if written else None,
        listen=listens,
        tls=Path(tls or env["MLFABRIC_TLS"]) if tls or env.get("MLFABRIC_TLS") else None,
        insecure=insecure if insecure is not None else env.get("MLFABRIC_INSECURE") == "1",
        pace=pace if pace is not None else _flag(env, "MLFABRIC_PACE"),
        rack=env.get("MLFABRIC_RACK"),
        engine=_engine(engine or env.get("MLFABRIC_ENGINE")),
        processors=_processors(env),
        max_rate_bytes_per_s=read_limit(max_rate or env.get("MLFABRIC_MAX_RATE")),
        job_max_rate_bytes_per_s=read_limit(job_max_rate or env.get("MLFABRIC_JOB_MAX_RATE")),
        rates_guessed=all(r is None for r in (up, down, env.get("MLFABRIC_UP"), env.get("MLFABRIC_DOWN"))),
        others=tuple(others),
        embeds_if_alone=bool(others) and embed_scheduler is None and listens == scheduler,
        awaits_rank_0=bool(rank) and embed_scheduler is None,
        restarted=bool(_whole(env, "TORCHELASTIC_RESTART_COUNT")),
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
    engine: str | None = None  # where the engine runs, if the script says so


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
    # torchrun's own store holds MASTER_PORT; halfway round the range is far from it.
    return f"{env['MASTER_ADDR']}:{FIRST_PORT + (port + PORTS // 2) % PORTS}"


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


def _engine(written: str | None) -> str:
    if written is None or written == "":
        return "auto"
    if written not in ENGINES:
        raise FabricError(f"unknown engine {written!r}; it is one of {', '.join(ENGINES)}")
    return written


def _processors(env: Mapping[str, str]) -> float:
    """As told, or those this process may use, shared with the others that torchrun started on this host."""
    written = env.get("MLFABRIC_PROCESSORS")
    if not written:
        return len(os.sched_getaffinity(0)) / max(_whole(env, "LOCAL_WORLD_SIZE") or 1, 1)
    try:
        count = float(written)
    except ValueError:
        count = 0.0
    if not 0 < count < float("inf"):
        raise FabricError(f"MLFABRIC_PROCESSORS is {written!r}; write how many this process may count on")
    return count


def _own_address(addresses: tuple[tuple[str, int], ...]) -> tuple[str, int] | None:
    """The one of these that is on this host; None where none is, or several are."""
    ours = []
    for address in addresses:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as sock, contextlib.suppress(OSError):
            sock.bind((address[0], 0))
            ours.append(address)
    return ours[0] if len(ours) == 1 else None


def _default_name(env: Mapping[str, str], host: str) -> str:
    """Under torchrun the same after a restart; else one that nobody else has."""
    number = env.get("LOCAL_RANK") or os.getpid()
    return re.sub(r"[^A-Za-z0-9_.\-]", "-", f"{host}-{number}")[:64]


def read_limit(written: str | float | None) -> float | None:
    """Payload bytes per second of a limit, which people write in bits on the wire; "none": no limit."""
    if written is None or written == "none":
        return None
    try:
        rate = parse_rate(written)
    except ValueError as error:
        raise FabricError(str(error)) from None
    if rate <= 0:
        raise FabricError(f"a limit of {written!r} lets nothing through; give one above zero, or none")
    return goodput(rate)


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
