"""`mlfabric certs`: an authority of one's own and a certificate for each host, made with openssl.

The openssl program is on every host that can train; a Python package for it would be the only reason for a
compiled dependency in the core.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Annotated

import typer

from mlfabric.commands.output import console, print_json
from mlfabric.errors import FabricError
from mlfabric.runtime.tls import AUTHORITY, CERTIFICATE, KEY

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_AUTHORITY_KEY = "ca.key"
_NAME = re.compile(r"^[A-Za-z0-9_.\-]{1,60}$")
_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-sha256")


@app.command()
def certs(
    hosts: Annotated[list[str], typer.Argument(help="names of hosts; a folder is made for each")],
    folder: Annotated[Path, typer.Option("--folder", help="where the authority lives")] = Path("certs"),
    days: Annotated[int, typer.Option("--days", min=1, help="how long certificates last")] = 365,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Make certificates for TLS between hosts. Copy each host's folder there and set MLFABRIC_TLS to it; keep
    ca.key where it is. More hosts may be added later."""
    made = make_certificates(folder, hosts, days)
    if as_json:
        print_json({host: str(path) for host, path in made.items()})
        return
    for host, path in made.items():
        console().print(f"{host}: copy {path} there, then MLFABRIC_TLS=<its folder>")


def make_certificates(folder: Path, hosts: list[str], days: int = 365) -> dict[str, Path]:
    """The folder of each host; an authority that is there already is used again."""
    if shutil.which("openssl") is None:
        raise FabricError("there is no openssl on this host; install it, or make the certificates elsewhere")
    for host in hosts:
        if not _NAME.match(host):
            raise FabricError(f"{host!r} is not made of 1 to 60 letters, digits, dots, dashes")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        if not (folder / _AUTHORITY_KEY).exists():
            _make_authority(folder, days)
        return {host: _make_host(folder, host, days) for host in hosts}
    except OSError as error:
        raise FabricError(f"can't write certificates to {folder}: {error.strerror}") from None


def _make_authority(folder: Path, days: int) -> None:
    _openssl(
        folder, "req", "-x509", *_CURVE, "-days", str(days), "-subj", "/CN=MLfabric authority",
        "-addext", "basicConstraints=critical,CA:TRUE,pathlen:0", "-addext", "keyUsage=critical,keyCertSign",
        "-keyout", _AUTHORITY_KEY, "-out", AUTHORITY,
    )  # fmt: skip
    (folder / _AUTHORITY_KEY).chmod(0o600)


def _make_host(folder: Path, host: str, days: int) -> Path:
    place = folder / host
    place.mkdir(exist_ok=True)
    place.chmod(0o700)
    _openssl(
        folder, "req", "-x509", *_CURVE, "-days", str(days), "-subj", f"/CN={host}",
        "-CA", AUTHORITY, "-CAkey", _AUTHORITY_KEY,
        "-addext", "basicConstraints=critical,CA:FALSE", "-addext", f"subjectAltName=DNS:{host}",
        "-addext", "extendedKeyUsage=serverAuth,clientAuth",
        "-keyout", f"{host}/{KEY}", "-out", f"{host}/{CERTIFICATE}",
    )  # fmt: skip
    (place / KEY).chmod(0o600)
    shutil.copy(folder / AUTHORITY, place / AUTHORITY)
    return place


def _openssl(folder: Path, *arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["it gave no reason"]
        raise FabricError(f"openssl could not make a certificate: {lines[-1]}")
