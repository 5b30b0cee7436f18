"""A worker for tests of coming and going: trains until a file appears, and logs every event.

python elastic_member.py FOLDER NAME LISTEN ADDRESSES
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np

import mlfabric as mf
from mlfabric.api import ALL_ROLES, join_with
from mlfabric.config import from_environment


def main(folder: Path, name: str, listen: str, addresses: str) -> None:
    settings = from_environment(
        addresses,
        name=name,
        host=name,
        listen=listen,
        expected=3,
        log=folder / f"{name}.{time.monotonic_ns()}.log",
    )
    with join_with(settings, ALL_ROLES, timeout=30.0) as fabric:
        fabric.publish({"w": np.zeros(100)}, apply=mf.Sum(), max_delay="none", shards=3)
        while not (folder / "stop").exists():
            fabric.pull()
            fabric.push({"w": np.ones(100)}).result()
            time.sleep(0.01)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
