"""What a scheduler may believe of the links: learned from its own transfers up to now, never from the trace.

A link that holds a transfer back shows its rate. A link whose believed rate is fully used is probed by the
payload itself: one chunk in eight goes at 1.25 times the belief, which follows if it was delivered. A link
that nobody uses keeps its last belief, however old.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from mlfabric.sim.fluid import Fluid, Process
from mlfabric.sim.streams import Floats

# A host sees a change in its own sums of bytes within about this time.
OBSERVE_S: Final = 0.15
PROBE_FACTOR: Final = 1.25
PROBE_SHARE: Final = 1 / 8
CHUNK_BYTES: Final = 256 * 1024
# Probes that build on each other before the host looks at its sums again.
MOST_PROBES: Final = 8.0
# What a paced transfer moves on average: seven chunks at the belief and one at 1.25 times it.
PACE: Final = 1 + PROBE_SHARE * (PROBE_FACTOR - 1)
# A link that carries less than this share of its belief for so long is asked: a chunk, or what it is believed
# to carry in a few milliseconds.
IDLE_SHARE: Final = 0.02
IDLE_S: Final = 0.4
ASKING_S: Final = 0.005
# What a link lately carried fades by this factor from one look to the next.
FORGET: Final = 0.9


class Estimator:
    """Believed rates of all links of a world, by the world's link numbers."""

    def __init__(self, world: Fluid, oracle: bool = False) -> None:
        self._world = world
        self._oracle = oracle
        self.revision = 0  # how often a belief changed
        self._forget()

    def _forget(self) -> None:
        self.believed: Floats = self._world.capacity.copy()
        self._lately: Floats = np.zeros(len(self.believed))  # bytes per second, fading
        self._used_at: Floats = np.zeros(len(self.believed))

    def watch(self) -> Process:
        """Look again and again, from nominal rates on."""
        self._forget()
        while True:
            yield OBSERVE_S
            self.observe()

    def observe(self) -> None:
        """Learn from what moves right now."""
        world = self._world
        if self._oracle:
            learned = world.capacity.copy()
        else:
            self._lately = np.maximum(world.used, self._lately * FORGET)
            full = (world.used >= 0.995 * world.capacity) & (world.used > 0)
            # The parts of a stream move by themselves in a real fabric: a link that can't carry any more
            # what it lately did fills up, though the stream as a whole may be held back elsewhere.
            held_back = full | (self._lately > world.capacity)
            learned = np.where(held_back, np.where(full, world.used, world.capacity), self.believed)
            probed = (world.used >= self.believed / PROBE_FACTOR) & ~held_back
            probes = np.minimum(OBSERVE_S * self.believed * PROBE_SHARE / CHUNK_BYTES, MOST_PROBES)
            reach = np.minimum(world.used * PROBE_FACTOR**probes, world.capacity)
            learned = np.where(probed, np.maximum(reach, self.believed), learned)
            self._used_at[world.used > IDLE_SHARE * self.believed] = world.now
            idle = world.now - self._used_at >= IDLE_S
            learned = np.where(idle, world.capacity, learned)
            world.carried[idle] += np.maximum(self.believed[idle] * ASKING_S, CHUNK_BYTES)
            self._used_at[idle] = world.now
        self.revision += bool(np.any(np.abs(learned - self.believed) > 0.02 * self.believed))
        self.believed = learned
