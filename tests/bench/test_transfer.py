"""Rounds of pushes and pulls between ranks of this process, and what the planner says of them."""

from __future__ import annotations

import threading

import pytest

from mlfabric.bench.hosts import make_wish
from mlfabric.bench.prediction import predict_pull, predict_push
from mlfabric.bench.transfer import summarise
from mlfabric.bench.transfer_rank import TransferBench, TransferOrder, TransferReport
from mlfabric.errors import FabricError
from mlfabric.units import goodput
from tests.runtime.test_torchrun import free_port, variables


def run_ranks(order: TransferOrder, ranks: int) -> TransferReport:
    port = free_port()
    reports: dict[int, TransferReport] = {}

    def rank(index: int) -> None:
        own = {**variables(index, ranks, port), "MLFABRIC_HOST": f"h{index}"}
        reports[index] = TransferBench(order, own).run()

    threads = [threading.Thread(target=rank, args=(index,), daemon=True) for index in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(reports) == list(range(ranks))
    assert all(not reports[index].times for index in range(1, ranks))
    return reports[0]


@pytest.mark.parametrize("kind", ["push", "pull"])
def test_every_round_is_timed_checked_and_compared_with_the_plan(kind: str) -> None:
    order = TransferOrder(kind, [8, 40_000], rounds=2, idle_s=0.0)
    report = run_ranks(order, 4)
    assert (report.server, sorted(report.workers)) == ("h0", ["h1", "h2", "h3"])
    assert [times.size_bytes for times in report.times] == [8, 40_000]
    for times in report.times:
        assert len(times.seconds) == len(times.beliefs) == 2
        assert (times.errors, times.dropped) == (0, 0)
        row = summarise(order, report, times, None)
        assert row["workers"] == 3
        assert row["predicted_s"] > 0
        assert row["predicted_true_s"] is None


def test_the_prediction_counts_transfer_times() -> None:
    network = make_wish(9, "200mbit", []).network()
    assert network is not None
    workers = [f"h{k}" for k in range(1, 9)]
    each_s = 1_000_000 / goodput(200e6)
    assert predict_push(network, "h0", workers, 1_000_000) == pytest.approx(4 * each_s)
    assert predict_push(network, "h0", workers, 1_000_000, aggregate=False) == pytest.approx(8 * each_s)
    assert predict_pull(network, "h0", workers, 1_000_000, relay=False) == pytest.approx(8 * each_s)
    chunk = 1_000_000 / 32  # seven more of them after the first copy
    assert predict_pull(network, "h0", workers, 1_000_000) == pytest.approx((1 + 7 * chunk / 1e6) * each_s)


def test_a_wish_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(FabricError, match="names host 9"):
        make_wish(4, "200mbit", ["9=50mbit"])
    with pytest.raises(FabricError, match="2 to 64 hosts"):
        make_wish(1, "200mbit", [])
    with pytest.raises(FabricError, match="under torchrun"):
        TransferBench(TransferOrder("push", [8], 1, 0.0), {})
