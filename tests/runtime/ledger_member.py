"""One process of a ledger run: pushes updates that add 1 to a coordinate of their own, tells each outcome.

`python -m tests.runtime.ledger_member '{"name": "w0", ...}'`; one line of JSON per outcome on standard
output, then `"done"`; it stays a member until its standard input ends.
"""

from __future__ import annotations

import json
import logging
import sys
import time

import numpy as np

import mlfabric as mf


def main() -> None:
    logging.basicConfig(
        level=logging.WARNING, format="%(asctime)s.%(msecs)03d %(message)s", datefmt="%H:%M:%S"
    )
    part = json.loads(sys.argv[1])
    index, steps = part["index"], part["steps"]
    with mf.join(
        part["address"],
        job="ledger",
        name=part["name"],
        host=part["name"],
        scheduler=index == 0,
        expected=part["members"],
        up=part["rate"],
        down=part["rate"],
        timeout=30,
    ) as fabric:
        fabric.publish({"w": np.zeros(20_000, np.float32)}, apply=mf.Sum(), divergence=part["divergence"])
        say({"address": fabric.address})
        for step in range(steps):
            fabric.pull(timeout=60)
            time.sleep(part["compute_s"])
            coordinate = index * steps + step
            update = np.zeros(20_000, np.float32)
            update[coordinate] = 1
            ticket = fabric.push({"w": update})
            outcome = ticket.result(60)
            say(
                {
                    "update": ticket.update,
                    "coordinate": coordinate,
                    "committed": isinstance(outcome, mf.Committed),
                    "at_s": time.monotonic(),
                }
            )
        say({"lost": fabric.lost})
        sys.stdin.read()


def say(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
