"""One host of the lab's part: the first only serves, the others push at the same moment, in rounds."""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np

import mlfabric as mf


def main() -> None:
    size_bytes, rounds, form = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    serves = os.environ["RANK"] == "0"
    # All are workers, or they could not meet between rounds; the first has nothing to push.
    roles = ("worker", "server") if serves else ("worker", "aggregator")
    update = np.ones(size_bytes // 4, np.float32)
    with mf.join(timeout=60.0, roles=roles) as fabric:
        fabric.publish(
            {"x": np.zeros_like(update)}, apply=mf.Sum(), max_delay="none", divergence=None, shards=1,
            aggregate=form == "sums",
        )  # fmt: skip
        fabric.pull()
        took = []
        for _ in range(rounds):
            fabric.all_reduce(np.zeros(1))
            began = time.perf_counter()
            if not serves:
                fabric.push({"x": update}).result(120)
            mine = np.array([time.perf_counter() - began])
            fabric.all_reduce(mine, combine="max")
            took.append(float(mine[0]))
        total = float(fabric.pull().arrays["x"].mean())
        _, size = fabric.rank_and_size()
        if total != rounds * (size - 1):
            raise SystemExit(f"the model holds {total} updates, not {rounds * (size - 1)}")
        if serves:
            print(json.dumps({"rounds_s": took}), flush=True)
        fabric.all_reduce(np.zeros(1))


if __name__ == "__main__":
    main()
