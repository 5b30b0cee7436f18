"""The contenders, by name: what each is, in which class it is compared, and how its workers are set up."""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from mlfabric.bench.train.settings import StepSize
from mlfabric.errors import FabricError

Kind = Literal["full gradients", "compressed", "infrequent"]


class Entry(msgspec.Struct, frozen=True):
    """A contender."""

    about: str
    kind: Kind
    how: Literal["alone", "ddp", "first-come", "fabric", "torchft", "hivemind"]
    options: dict[str, Any] = {}
    step_size: StepSize = StepSize(0.001, 0.9)  # where no tuning has chosen another
    ours: bool = False
    heavy: bool = False  # keeps two processors more than half busy, so that nothing is run beside it
    policy: str = ""  # of the simulator, that predicts it; empty: none does


ENTRIES: Final[dict[str, Entry]] = {
    "alone": Entry("one host, no network", "full gradients", "alone", policy="alone"),
    "gloo": Entry("DDP on Gloo", "full gradients", "ddp", policy="ring"),
    "gloo-accumulated": Entry(
        "DDP on Gloo, an exchange every 4 gradients", "full gradients", "ddp", {"accumulated": 4}
    ),
    "mlfabric-ddp": Entry("DDP on our backend", "full gradients", "ddp", {"backend": "mlfabric"}, ours=True),
    "fcfs-1": Entry(
        "first-come asynchronous server, one, beside a worker; plain sockets",
        "full gradients",
        "first-come",
        {"servers": 1},
        policy="fcfs-1",
    ),
    "fcfs-sharded": Entry(
        "first-come asynchronous servers on all hosts, equal shards; plain sockets",
        "full gradients",
        "first-come",
        {"servers": 0},
        policy="uniform-shards",
    ),
    "ssp": Entry(
        "the same, nobody more than 3 steps ahead of the slowest",
        "full gradients",
        "first-come",
        {"servers": 0, "slack": 3},
        policy="ssp",
    ),
    "mlfabric-sync": Entry(
        "planned all-reduce, all take part",
        "full gradients",
        "fabric",
        {"mode": "sync"},
        ours=True,
        policy="allreduce",
    ),
    "mlfabric-async": Entry(
        "asynchronous, ordered, bounded",
        "full gradients",
        "fabric",
        {"mode": "async"},
        ours=True,
        policy="mlfabric",
    ),
    "mlfabric-alongside": Entry(
        "the same with pulls beside pushes",
        "full gradients",
        "fabric",
        {"mode": "async", "pull": "alongside"},
        ours=True,
        policy="mlfabric-alongside",
    ),
    "mlfabric-backup": Entry(
        "a step by the mean of the first seven gradients, at the servers",
        "full gradients",
        "fabric",
        {"mode": "backup"},
        ours=True,
    ),
    "mlfabric-rolling": Entry(
        "all-reduces that roll on, each of the gradients that are there",
        "full gradients",
        "fabric",
        {"mode": "rolling"},
        ours=True,
        heavy=True,
        policy="rolling",
    ),
    "mlfabric-fastest": Entry(
        "planned all-reduce among those whose links are fast now",
        "full gradients",
        "fabric",
        {"mode": "fastest"},
        ours=True,
        policy="backup",
    ),
    "mlfabric-fastest-overlapped": Entry(
        "the same, exchanged while the next gradient is computed",
        "full gradients",
        "fabric",
        {"mode": "fastest", "pull": "overlapped"},
        ours=True,
    ),
    "mlfabric-ssp": Entry(
        "asynchronous, nobody more than 3 steps ahead of the slowest",
        "full gradients",
        "fabric",
        {"mode": "ssp", "staleness": 3},
        ours=True,
    ),
    "gloo-fp16": Entry("DDP on Gloo, fp16 hook", "compressed", "ddp", {"hook": "fp16"}),
    "gloo-powersgd": Entry(
        "DDP on Gloo, PowerSGD hook of rank 4", "compressed", "ddp", {"hook": "powersgd", "rank": 4}
    ),
    "mlfabric-rolling-fp16": Entry(
        "mlfabric-rolling, float16",
        "compressed",
        "fabric",
        {"mode": "rolling", "codec": "float16"},
        ours=True,
        heavy=True,
    ),
    "mlfabric-async-fp16": Entry(
        "mlfabric-async, float16", "compressed", "fabric", {"mode": "async", "codec": "float16"}, ours=True
    ),
    "mlfabric-async-int8": Entry(
        "mlfabric-async, int8", "compressed", "fabric", {"mode": "async", "codec": "int8"}, ours=True
    ),
    "mlfabric-async-topk": Entry(
        "mlfabric-async, largest entries only",
        "compressed",
        "fabric",
        {"mode": "async", "codec": "topk"},
        ours=True,
    ),
    "gloo-local": Entry(
        "post-local SGD on Gloo, models averaged every 8 steps", "infrequent", "ddp", {"local_steps": 8}
    ),
    "torchft-diloco": Entry("torchft's DiLoCo, 8 local steps", "infrequent", "torchft", {"local_steps": 8}),
    "hivemind-local": Entry(
        "hivemind's local updates, averaged after 8 steps of all peers together",
        "infrequent",
        "hivemind",
        {"local_steps": 8},
        heavy=True,
    ),
    "mlfabric-rolling-local": Entry(
        "local steps, and averages of how far each worker has come that roll on",
        "infrequent",
        "fabric",
        {"mode": "rolling", "local_steps": 1},
        ours=True,
        heavy=True,
    ),
    "mlfabric-local": Entry(
        "8 local steps, then the outer step at the servers",
        "infrequent",
        "fabric",
        {"mode": "local", "local_steps": 8},
        ours=True,
    ),
}
QUICK: Final = ("gloo", "fcfs-1", "mlfabric-sync", "mlfabric-async")


def find_entry(name: str) -> Entry:
    if name not in ENTRIES:
        raise FabricError(f"unknown contender {name!r}; known are {', '.join(ENTRIES)}")
    return ENTRIES[name]
