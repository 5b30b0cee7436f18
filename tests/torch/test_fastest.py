"""Steps among the workers that are fast now: the same bits wherever the same step is held."""

from __future__ import annotations

import hashlib
import threading
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed here")

import mlfabric as mf  # noqa: E402
from mlfabric.api import Fabric  # noqa: E402
from mlfabric.torch.training import Training, join  # noqa: E402
from tests.torch.test_training import batches, judged, loss_of, make_model  # noqa: E402

OPTIMIZER = ("SGD", {"lr": 0.01, "momentum": 0.9})


class Party:
    """Workers in threads of their own, and the digest of every model that one of them has had."""

    def __init__(self, count: int, engine: str = "thread") -> None:
        self.fabrics: list[Fabric] = []
        for rank in range(count):
            where = self.fabrics[0].address if rank else "127.0.0.1:0"
            self.fabrics.append(
                mf.join(
                    where,
                    name=f"w{rank}",
                    host=f"h{rank}",
                    scheduler=rank == 0,
                    expected=count,
                    engine=engine,
                )
            )
        self.models = [make_model(seed) for seed in range(count)]
        self.seen: list[dict[int, str]] = [{} for _ in range(count)]
        self.trainings: list[Training | None] = [None] * count
        self.errors: list[BaseException] = []
        self.through = threading.Event()

    def train(
        self, rank: int, steps: int = 0, slow: float = 0.0, leaves: bool = False, **wishes: Any
    ) -> None:
        """Make so many steps, or as many as it takes until all that count theirs are through."""
        model = self.models[rank]
        try:
            training = join(model, OPTIMIZER, "fastest", fabric=self.fabrics[rank], timeout=20.0, **wishes)
            self.trainings[rank] = training
            for number, batch in enumerate(batches(rank, steps or 1000)):
                if not steps and self.through.is_set():
                    break
                time.sleep(slow if number % 4 == 3 else 0.002)
                loss_of(model, batch).backward()
                training.step()
                self.seen[rank][training.version] = digest(model)
            if leaves:
                self.fabrics[rank]._engine.stop(0.0)  # without a word
                return
            if steps:
                self.through.set()
            training.finish()
        except BaseException as error:
            self.errors.append(error)

    def run(self, jobs: list[dict[str, Any]]) -> None:
        threads = [
            threading.Thread(target=self.train, args=(rank,), kwargs=job, daemon=True)
            for rank, job in enumerate(jobs)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not self.errors, self.errors
        assert not any(thread.is_alive() for thread in threads), "somebody still waits"

    def close(self) -> None:
        for fabric in reversed(self.fabrics):
            fabric.close()

    def common_bits(self) -> int:
        """Steps whose model two workers have had; it must be the same one."""
        digests: dict[int, set[str]] = {}
        holders: dict[int, int] = {}
        for seen in self.seen:
            for version, value in seen.items():
                digests.setdefault(version, set()).add(value)
                holders[version] = holders.get(version, 0) + 1
        different = [version for version, values in digests.items() if len(values) > 1]
        assert not different, f"steps {different} have two models"
        return sum(1 for count in holders.values() if count > 1)


def digest(model: Any) -> str:
    whole = hashlib.sha256()
    for parameter in model.parameters():
        whole.update(parameter.detach().numpy().tobytes())
    return whole.hexdigest()


@pytest.mark.parametrize(
    ("pull", "engine"),
    [("after", "thread"), ("overlapped", "thread"), ("after", "process"), ("overlapped", "process")],
)
def test_workers_at_the_same_step_hold_the_same_bits_while_one_straggles_and_one_dies(
    pull: str, engine: str
) -> None:
    party = Party(4, engine)
    try:
        party.run(
            [
                {"pull": pull},
                {"pull": pull, "slow": 0.1, "steps": 30},
                {"pull": pull},
                {"pull": pull, "steps": 8, "leaves": True},
            ]
        )
    finally:
        party.close()
    assert party.common_bits() > 10
    judge = batches(50, 4)
    assert judged(party.models[0], judge) < 0.8 * judged(make_model(0), judge)
