"""How long a round of pushes or pulls takes by the planner's word, on a network as it is or is believed."""

from __future__ import annotations

from collections.abc import Sequence

from mlfabric.plan.distribution import Wanted, relay_or_not
from mlfabric.plan.planner import plan_updates
from mlfabric.plan.reservation import open_ledger
from mlfabric.plan.values import JobState, Offer, Shard
from mlfabric.topology import Network


def predict_push(
    network: Network, server: str, workers: Sequence[str], size_bytes: int, aggregate: bool = True
) -> float:
    """Seconds until the update of every worker (by host) is at the server, if all are offered at once."""
    offers = [Offer(f"u{k}", f"w{k}", host, size_bytes, 0, arrival=k) for k, host in enumerate(workers)]
    job = JobState(
        concurrency=len(workers) + 1,
        shards=(Shard(0, server),),
        aggregators=tuple(sorted(set(workers))) if aggregate else (),
    )
    plan = plan_updates(network, [], job, offers, 0.0)
    return max(placed.finish_s for placed in plan.placed)


def predict_pull(
    network: Network, server: str, workers: Sequence[str], size_bytes: int, relay: bool = True
) -> float:
    """Seconds until every worker (by host) has the model, if all ask at once."""
    wanted = Wanted(0, 0, server, size_bytes, {host: (host,) for host in workers})
    plans = relay_or_not(network, [], [wanted]) if relay else []
    if plans:
        return max(passed_on.finish_s for passed_on in plans[0])
    ledger = open_ledger(network, [], 0.0)
    return max(ledger.reserve(ledger.path(server, host), size_bytes, 0.0).finish_s for host in workers)
