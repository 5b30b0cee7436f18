"""Which link held a transfer back, judged from what senders say of their flows. Pure; the scheduler asks.

A flow that the network held back was held back by its sender's uplink, by its receiver's downlink, or by
neither's fault: another flow filled one of them too. So what counts is what all flows of a link carry
together.

- What a link carries it can carry: a belief is raised at once.
- A flow held back on a link that is full, as far as believed, is explained.
- Otherwise one of the two beliefs is too high. Flows that a link holds back get like parts of it: where
  another flow gets far more, the link has more to give, and the other one is to blame. If that does not tell,
  after a moment in which the reports of other flows come in, that link is blamed that several such flows have
  in common; else the one whose host has not been seen at such a rate for longer, in either direction; else
  both. A belief that is too low does little harm: transfers are paced above it, and the next one that is let
  through raises it.
"""

from __future__ import annotations

from dataclasses import dataclass

# A link that carries this share of what is believed of it is full.
FULL = 0.88
# Flows that a link holds back get like parts of it; one that gets less than this share of another's part is
# held back elsewhere.
FAIR = 0.5
# A report counts for so long; a sender repeats itself while its flow lasts.
FLOW_S = 1.2
# What a node says of all it sends and receives counts for so long.
TOTAL_S = 0.3
# For so long reports of other flows are awaited before anybody is blamed.
DECIDE_S = 0.25
# Of flows that follow each other, if no more time than this is between them.
SUSPECTED_S = 0.5
# Other flows of a link have told by then that one less or one more shares it with them.
SETTLED_S = 0.4
# So long does the sum of several flows have to be above what was believed.
OVER_S = 0.05
# A link that was seen full so many seconds later than the other is trusted more.
CLEARLY_S = 0.5
# A direction that was not seen full for so long is believed to change with the other one.
FOLLOWS_S = 0.5
# The most that a direction ever had is known once it was seen full so often.
FEW_SIGHTINGS = 20
# How far one report of a full link moves what is believed of it, and differences that are news.
SMOOTHING = 0.3
NEWS = 0.05

Way = tuple[str, str]  # (host, "up" or "down")


@dataclass(slots=True)
class _Flow:
    ends: tuple[str, str]  # hosts
    rate: float | None  # None: it has just begun
    limited: bool  # by the network: neither paced, nor waiting for its application
    at: float
    reports: int = 0  # of a rate; whether it is held back shows from the second on


@dataclass(slots=True)
class _Belief:
    rate: float
    full_at: float  # seen full, or told by somebody who knows
    told: float  # the rate the planner has
    over_since: float | None = None  # it seems to carry more than is believed
    most: float = 0.0  # ever
    sightings: int = 1

    def __post_init__(self) -> None:
        self.most = self.rate

    def tell(self) -> bool:
        """Have the planner know, if it is news."""
        if abs(self.rate - self.told) <= NEWS * self.told:
            return False
        self.told = self.rate
        return True


@dataclass(slots=True)
class _Total:
    rate: float
    at: float


class LinkBeliefs:
    """What is believed of the links of hosts, in payload bytes per second."""

    def __init__(self) -> None:
        self._totals: dict[Way, dict[str, _Total]] = {}  # by node
        self._flows: dict[tuple[str, str], _Flow] = {}  # by source and target node
        self._beliefs: dict[Way, _Belief] = {}
        self._suspected: dict[Way, tuple[float, float]] = {}  # flows held back unexplained: first and last
        self._changed_at: dict[Way, float] = {}  # a flow began or ended

    def rate(self, host: str, way: str) -> float | None:
        """None: nothing was learned of it."""
        belief = self._beliefs.get((host, way))
        return belief.told if belief is not None else None

    def assume(self, host: str, way: str, rate: float) -> None:
        """What a member said of its own link counts until its flows say otherwise."""
        self._beliefs.setdefault((host, way), _Belief(rate, float("-inf"), rate))

    def learn(self, host: str, way: str, rate: float, now: float) -> bool:
        """The host itself has found out; whether that is news."""
        return self._set((host, way), rate, now, own_word=True)

    def forget(self, host: str) -> None:
        for way in ("up", "down"):
            self._beliefs.pop((host, way), None)
        self._flows = {nodes: flow for nodes, flow in self._flows.items() if host not in flow.ends}

    def flow_seen(
        self,
        source: str,
        target: str,
        rate: float | None,
        limited: bool,
        now: float,
        nodes: tuple[str, str] | None = None,
    ) -> bool:
        """A sender's report of what it sends from host to host, zero when it has ended, None when it has just
        begun; whether a belief changed. `nodes` tells apart the flows of several processes of a host."""
        key = nodes or (source, target)
        self._flows = {each: flow for each, flow in self._flows.items() if now - flow.at <= FLOW_S}
        up, down = (source, "up"), (target, "down")
        before = self._flows.get(key)
        if rate == 0 or before is None:
            self._changed_at[up] = self._changed_at[down] = now
        if rate == 0 or source == target:
            self._flows.pop(key, None)
            return False
        reports = (before.reports if before is not None else 0) + (rate is not None)
        flow = self._flows[key] = _Flow((source, target), rate, limited, now, reports)
        news = [self._raise(way, limited, now) for way in (up, down)]
        if limited:
            news.append(self._explain(flow, up, down, now))
        return any(news)

    def total_seen(self, host: str, way: str, rate: float, now: float, node: str) -> bool:
        """What a node sends or receives altogether, as it says itself; whether a belief changed."""
        self._totals.setdefault((host, way), {})[node] = _Total(rate, now)
        belief = self._beliefs.get((host, way))
        total = self._total((host, way), now)
        if belief is None or total is None or total <= (1 + NEWS) * belief.rate:
            return False
        return self._set((host, way), total, now)

    def _total(self, way: Way, now: float) -> float | None:
        """What the nodes of a host said lately of what they send or receive; None: nothing."""
        fresh = [total.rate for total in self._totals.get(way, {}).values() if now - total.at <= TOTAL_S]
        return sum(fresh) if fresh else None

    def _flows_of(self, way: Way) -> list[_Flow]:
        host, direction = way
        end = 0 if direction == "up" else 1
        return [flow for flow in self._flows.values() if flow.ends[end] == host]

    def _is_clear(self, way: Way, now: float) -> bool:
        """Whether what its flows carry together is known: each has been heard of since the last change."""
        if self._total(way, now) is not None:
            return True
        changed_at = self._changed_at.get(way, now)
        return all(
            flow.reports > 1 and (flow.at >= changed_at or now - changed_at >= SETTLED_S)
            for flow in self._flows_of(way)
        )

    def _carried(self, way: Way, now: float) -> float:
        total = self._total(way, now)
        return sum(flow.rate or 0.0 for flow in self._flows_of(way)) if total is None else total

    def _holds_back(self, way: Way) -> int:
        """How many flows a link may hold back: all that get about as much of it as any."""
        return sum(flow.limited and self._has_its_part(way, flow) for flow in self._flows_of(way))

    def _has_its_part(self, way: Way, flow: _Flow) -> bool:
        return (flow.rate or 0.0) >= FAIR * max(other.rate or 0.0 for other in self._flows_of(way))

    def _raise(self, way: Way, limited: bool, now: float) -> bool:
        """What a link carries it can carry; whether that is news."""
        belief = self._beliefs.get(way)
        carried = self._carried(way, now)
        if belief is None or carried < FULL * belief.rate:
            return False
        if carried <= (1 + NEWS) * belief.rate:
            belief.over_since = None
            down = carried < belief.rate
            move = 0.0 if down and not (limited and self._is_clear(way, now)) else carried - belief.rate
            return self._set(way, belief.rate + SMOOTHING * move, now)
        # One of several flows may have ended without our knowing yet; a single one is sure.
        if belief.over_since is None:
            belief.over_since = now
        flows = self._flows_of(way)
        sure = all(flow.reports > 1 for flow in flows) and now - belief.over_since >= OVER_S
        if len(flows) > 1 and not sure:
            return False
        return self._set(way, carried, now)

    def _explain(self, flow: _Flow, up: Way, down: Way, now: float) -> bool:
        for way in (up, down):
            if self._explains(way, flow, now):
                return False
        since = [self._suspect(way, now) for way in (up, down)]
        if now - min(since) < DECIDE_S or not (self._is_clear(up, now) and self._is_clear(down, now)):
            return False
        news = [self._set(way, self._carried(way, now), now) for way in self._blamed(flow, up, down, now)]
        return any(news)

    def _suspect(self, way: Way, now: float) -> float:
        """A flow over this link is held back without an explanation: since when that is so."""
        since, last = self._suspected.get(way, (now, now))
        if now - last > SUSPECTED_S:
            since = now
        self._suspected[way] = (since, now)
        return since

    def _is_full(self, way: Way, now: float) -> bool:
        belief = self._beliefs.get(way)
        return belief is not None and self._carried(way, now) >= FULL * belief.rate

    def _explains(self, way: Way, flow: _Flow, now: float) -> bool:
        """Whether a link is full, and the flow has about as much of it as the others."""
        return self._is_full(way, now) and self._has_its_part(way, flow)

    def _blamed(self, flow: _Flow, up: Way, down: Way, now: float) -> tuple[Way, ...]:
        possible = [way for way in (up, down) if self._has_its_part(way, flow)]
        if len(possible) == 1:
            return tuple(possible)
        full = [self._is_full(way, now) for way in (up, down)]
        if any(full):  # of others' bytes
            return () if all(full) else (down,) if full[0] else (up,)
        out, into = self._holds_back(up), self._holds_back(down)
        if out != into and max(out, into) > 1:
            return (up,) if out > into else (down,)
        proved = [self._proved_at(way, now) for way in (up, down)]
        if proved[0] is None or proved[1] is None:
            return tuple(way for way, at in zip((up, down), proved, strict=True) if at is None)
        if abs(proved[0] - proved[1]) >= CLEARLY_S:
            return (up,) if proved[0] < proved[1] else (down,)
        return (up, down)

    def _proved_at(self, way: Way, now: float) -> float | None:
        """When a link was last seen full. What slows a host down mostly slows both of its directions: the
        other one, if it was faster then than this one is now, speaks for it."""
        belief = self._beliefs.get(way)
        if belief is None:
            return None
        other = self._beliefs.get(_opposite(way))
        if other is None or FULL * other.rate < self._carried(way, now):
            return belief.full_at
        return max(belief.full_at, other.full_at)

    def _set(self, way: Way, rate: float, now: float, own_word: bool = False) -> bool:
        if rate <= 0:
            return False  # that a link carried nothing for a while says nothing of what it can carry
        belief = self._beliefs.get(way)
        if belief is None:
            self._beliefs[way] = _Belief(rate, now, rate)
            return True
        belief.rate, belief.full_at, belief.over_since = rate, now, None
        belief.most = max(belief.most, rate)
        belief.sightings += 1
        self._suspected.pop(way, None)
        news = belief.tell()
        return self._follow(way, belief, now, own_word) or news

    def _follow(self, way: Way, belief: _Belief, now: float, own_word: bool) -> bool:
        """What changes a host's link mostly changes both of its directions: one that has not been seen full
        lately is believed to have as much left of the most it ever had as the other. What a host said of
        itself, and nothing showed yet, stays."""
        other = self._beliefs.get(_opposite(way))
        if other is None or not FOLLOWS_S <= now - other.full_at < float("inf"):
            return False
        other.rate = other.most * belief.rate / belief.most
        if own_word and other.sightings < FEW_SIGHTINGS:
            # It may have been seen in its worst moments only; where it is too much, the host notices soon.
            other.rate = max(other.rate, belief.rate)
        return other.tell()


def _opposite(way: Way) -> Way:
    host, direction = way
    return host, "down" if direction == "up" else "up"
