"""A rank of the test of probes: three reduce in a group of their own, a fourth probes them and tells what it
believes of its own link, whenever that changes."""

from __future__ import annotations

import sys
import time

import numpy as np

from mlfabric.api import join
from mlfabric.collective.calls import Call, changes
from mlfabric.runtime.engine import Engine


def main(run_s: float) -> None:
    with join(timeout=60.0, engine="thread") as fabric:
        rank, _ = fabric.rank_and_size()
        fabric.all_reduce(np.ones(10**6, np.float32))
        engine = fabric._engine
        assert isinstance(engine, Engine)
        nodes = engine.groups.group("", ()).result(10).nodes
        group = nodes[:3]
        ends = time.monotonic() + run_s
        if rank < 3:
            array = np.ones(500_000, np.float32)
            going = np.ones(1)
            while going[0]:
                going[0] = time.monotonic() < ends  # for all, by whose clock it is over first
                for each, combine in ((array, "max"), (going, "min")):
                    view = each.view("u1").data
                    call = Call(
                        "all_reduce", str(each.dtype), each.itemsize, combine, blocks=(changes(view),)
                    )
                    engine.groups.collective("three", group, call).answer.result(60)
                time.sleep(0.03)
        else:
            engine.call(lambda: engine.probe_links(group))
            watch(engine, ends)
        fabric.all_reduce(np.zeros(1))


def watch(engine: Engine, ends: float) -> None:
    told = 0
    while time.monotonic() < ends:
        rates = engine.mesh.rates
        if len(rates.noticed) > told:
            told = len(rates.noticed)
            sys.stdout.write(f"believes {rates.noticed[-1]} {rates.up.rate or 0} {rates.down.rate or 0}\n")
            sys.stdout.flush()
        time.sleep(0.005)


if __name__ == "__main__":
    main(float(sys.argv[1]))
