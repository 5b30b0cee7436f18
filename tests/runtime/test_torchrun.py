"""Under torchrun's variables join() needs no argument; rank 0 embeds the scheduler."""

from __future__ import annotations

import socket
import threading
from typing import Any

import numpy as np
import pytest

from mlfabric.api import ALL_ROLES, join_with
from mlfabric.config import from_environment
from mlfabric.errors import FabricError
from mlfabric.rules import Sum


def variables(rank: int, size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "run7",
    }


def free_port() -> int:
    with socket.socket() as first:
        first.bind(("127.0.0.1", 0))
        port: int = first.getsockname()[1]
    return port


def test_ranks_find_each_other_by_torchruns_variables() -> None:
    port = free_port()
    sums: dict[int, Any] = {}

    def rank(index: int) -> None:
        settings = from_environment(environment=variables(index, 3, port))
        with join_with(settings, ALL_ROLES) as fabric:
            array = np.full(10, float(index))
            fabric.all_reduce(array, timeout=30)
            sums[index] = array.copy()
            fabric.all_reduce(array, timeout=30)  # nobody leaves before all have their sum

    threads = [threading.Thread(target=rank, args=(index,), daemon=True) for index in (2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(sums) == [0, 1, 2]
    assert all(array.tolist() == [3.0] * 10 for array in sums.values())


def test_a_rank_that_does_not_come_and_a_second_join_are_said_in_a_sentence() -> None:
    port = free_port()
    with pytest.raises(
        FabricError, match=r"rank 0, which schedules the job at \S+, did not come within 0.3 s"
    ):
        join_with(from_environment(environment=variables(1, 2, port)), ALL_ROLES, timeout=0.3)
    first = from_environment(environment=variables(0, 3, port))
    with join_with(first, ALL_ROLES) as fabric:
        with pytest.raises(FabricError, match="by another process, or by an earlier join of this one"):
            join_with(first, ALL_ROLES)
        second = from_environment(environment=variables(1, 2, port))  # it was told of fewer
        with join_with(second, ALL_ROLES) as other:
            with pytest.raises(FabricError, match="the name rank1 is taken by a living member"):
                join_with(second, ALL_ROLES)
            model = {"w": np.zeros(3, np.float32)}
            for each, expected in ((fabric, "3 members"), (other, "by one of them more")):
                said = rf"2 workers have come \(rank0, rank1\), and {expected} are expected \(after 0.3 s\)"
                with pytest.raises(TimeoutError, match=said):
                    each.publish(model, apply=Sum(), timeout=0.3)


def test_variables_give_names_job_and_who_embeds_the_scheduler() -> None:
    first = from_environment(environment=variables(0, 4, 29500))
    second = from_environment(environment=variables(1, 4, 29500))
    assert (first.name, first.job, first.expected) == ("rank0", "run7", 4)
    assert first.embed_scheduler
    assert not second.embed_scheduler
    assert first.scheduler == second.scheduler == ("127.0.0.1", 30348)


def test_the_schedulers_port_is_never_torchruns_nor_one_that_kernels_give_away() -> None:
    for port in range(1024, 65536, 61):
        scheduler = from_environment(environment=variables(0, 1, port)).scheduler[1]
        assert 20000 <= scheduler <= 32767
        assert scheduler != port


def test_hosts_with_a_torchrun_each_are_known_by_name_and_find_each_other_at_several_addresses() -> None:
    env = {**variables(0, 1, 29500), "MLFABRIC_SCHEDULER": "127.0.0.1:7001,10.255.255.1:7001"}
    first = from_environment(host="alpha", environment=env)
    assert (first.name, first.job, first.expected) == ("alpha-0", "job", 0)
    assert first.scheduler == ("127.0.0.1", 7001)
    assert first.others == (("10.255.255.1", 7001),)
    assert (first.listen, first.embeds_if_alone, first.restarted) == (("127.0.0.1", 7001), True, False)
    second = from_environment(
        environment={**env, "LOCAL_RANK": "1", "MLFABRIC_HOST": "alpha", "TORCHELASTIC_RESTART_COUNT": "2"}
    )
    assert (second.name, second.listen, second.embeds_if_alone) == ("alpha-1", None, False)
    assert second.restarted


def test_arguments_win_over_variables() -> None:
    env = {**variables(1, 4, 29500), "MLFABRIC_SCHEDULER": "10.0.0.9:7000", "MLFABRIC_NAME": "named"}
    assert from_environment(environment=env).scheduler == ("10.0.0.9", 7000)
    assert from_environment("10.0.0.1:7070", name="given", environment=env).name == "given"
    assert from_environment("10.0.0.1:7070", environment=env).scheduler == ("10.0.0.1", 7070)


def test_without_any_word_where_to_go_join_says_what_it_needs() -> None:
    with pytest.raises(FabricError, match="needs the scheduler's address"):
        from_environment(environment={})
    with pytest.raises(FabricError, match="RANK is 'x', not a whole number"):
        from_environment(environment={**variables(0, 2, 1), "RANK": "x"})
