"""What the scheduler shows to people: members, shards, leases and rates, as values."""

from __future__ import annotations

from collections.abc import Mapping

from mlfabric.messages import JobStatus, MemberInfo, MemberStatus, ShardStatus
from mlfabric.roles.leases import LeaseRecord
from mlfabric.roles.orderbook import OrderBook
from mlfabric.topology import Network

RATE_OVER_S = 10.0


def member_status(
    member: MemberInfo,
    lease: LeaseRecord,
    network: Network,
    book: OrderBook | None,
    draining: str,
    limit_bytes_per_s: float | None = None,
) -> MemberStatus:
    host = network.hosts[member.host]
    shards = [shard.range for shard in book.shards.values()] if book is not None else []
    return MemberStatus(
        node=member.node,
        host=member.host,
        address=member.address,
        job=member.job,
        roles=member.roles,
        leads=tuple(range_.index for range_ in shards if range_.leader == member.node),
        follows=tuple(range_.index for range_ in shards if range_.replica == member.node),
        up_bytes_per_s=host.up_bytes_per_s,
        down_bytes_per_s=host.down_bytes_per_s,
        lease_s=lease.lease_s,
        silent_s=lease.silent_s,
        draining=draining,
        limit_bytes_per_s=limit_bytes_per_s,
    )


def job_status(
    name: str, members: Mapping[str, MemberInfo], book: OrderBook | None, ready: bool, failed: str | None,
    now: float, max_rate: float | None = None,
) -> JobStatus:  # fmt: skip
    if book is None:
        return JobStatus(name, len(members), ready, failed, (), 0, 0, 0, 0, 0.0, max_rate)
    waiting, granted = book.entries.open_counts()
    recent = sum(count for at, count in book.recent if at > now - RATE_OVER_S)
    return JobStatus(
        name=name,
        members=len(members),
        ready=ready,
        failed=failed,
        shards=tuple(
            ShardStatus(
                index=index,
                leader=shard.range.leader,
                epoch=shard.range.epoch,
                version=shard.version,
                replica=shard.range.replica,
                replica_filled=shard.replica_filled,
                undurable=len(shard.undurable),
            )
            for index, shard in sorted(book.shards.items())
        ),
        waiting=waiting,
        granted=granted,
        applied=min((shard.version for shard in book.shards.values()), default=0),
        dropped=book.entries.counts["dropped"] + book.entries.counts["dropped_late"],
        applied_per_s=recent / len(book.shards) / RATE_OVER_S if book.shards else 0.0,
        max_rate_bytes_per_s=max_rate,
    )
