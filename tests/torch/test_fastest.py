"""Steps among the workers that are fast now: the same bits wherever the same step is held."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

torch = pytest.importorskip("torch", reason="torch is not installed here")

import mlfabric as mf  # noqa: E402
from mlfabric.api import Fabric  # noqa: E402
from mlfabric.commands.root import app  # noqa: E402
from mlfabric.errors import FabricError  # noqa: E402
from mlfabric.eventlog import read_log  # noqa: E402
from mlfabric.replay import replay  # noqa: E402
from mlfabric.story import tell_story, updates_in  # noqa: E402
from mlfabric.torch.training import Training, join  # noqa: E402
from tests.torch.test_training import alone, batches, judged, loss_of, make_model  # noqa: E402

OPTIMIZER = ("SGD", {"lr": 0.01, "momentum": 0.9})


class Party:
    """Workers in threads of their own, and the digest of every model that one of them has had."""

    def __init__(
        self,
        count: int,
        engine: str = "thread",
        log: Path | None = None,
        mode: Any = "fastest",
        optimizer: tuple[str, dict[str, Any]] = OPTIMIZER,
    ) -> None:
        self.mode, self.optimizer = mode, optimizer
        self.watch: Callable[[int, Training], None] = lambda rank, training: None
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
                    log=log,
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
            fabric = self.fabrics[rank]
            training = join(model, self.optimizer, self.mode, fabric=fabric, timeout=20.0, **wishes)
            self.trainings[rank] = training
            for number, batch in enumerate(batches(rank, steps or 1000)):
                if not steps and self.through.is_set():
                    break
                time.sleep(slow if number % 4 == 3 else 0.002)
                loss_of(model, batch).backward()
                training.step()
                self.seen[rank][training.version] = hashlib.sha256(training.weights()).hexdigest()
                self.watch(rank, training)
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
    # Momentum with gradients that are a step old wants a smaller step than others.
    party = Party(4, engine, optimizer=("SGD", {"lr": 0.003, "momentum": 0.9}))
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


@pytest.mark.parametrize("optimizer", [OPTIMIZER, ("Adam", {"lr": 0.01})], ids=["SGD", "Adam"])
def test_one_worker_alone_steps_as_plain_pytorch_does(optimizer: tuple[str, dict[str, Any]]) -> None:
    plain, model = make_model(), make_model()
    stepper = getattr(torch.optim, optimizer[0])(plain.parameters(), **optimizer[1])
    with join(model, optimizer, "fastest", **alone()) as training:
        for batch in batches(1, 15):
            loss_of(model, batch).backward()
            training.step()
            stepper.zero_grad()
            loss_of(plain, batch).backward()
            stepper.step()
        assert training.version == training.committed == 15
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("optimizer", [OPTIMIZER, ("Adam", {"lr": 0.01})], ids=["SGD", "Adam"])
def test_a_newcomer_gets_model_and_optimizer_state_from_those_who_train(
    optimizer: tuple[str, dict[str, Any]],
) -> None:
    first, second = make_model(1), make_model(2)
    seen: list[dict[int, str]] = [{}, {}]
    through = threading.Event()

    def train(training: Training, model: Any, rank: int, steps: int) -> None:
        for batch in batches(rank, steps):
            if rank == 0 and through.is_set():
                break
            loss_of(model, batch).backward()
            training.step()
            seen[rank][training.version] = digest(model)

    with join(first, optimizer, "fastest", **alone()) as training:
        train(training, first, 0, 5)
        goes_on = threading.Thread(target=train, args=(training, first, 0, 3000), daemon=True)
        goes_on.start()
        where = training.fabric.address
        with join(second, optimizer, "fastest", address=where, name="w1", host="h1") as newcomer:
            assert newcomer.version > 5
            train(newcomer, second, 1, 20)
            assert newcomer.committed > 10
        through.set()
        goes_on.join(20)
        assert not goes_on.is_alive()
    common = seen[0].keys() & seen[1].keys()
    assert len(common) > 10
    assert all(seen[0][version] == seen[1][version] for version in common)


@pytest.mark.parametrize(
    ("wish", "words"), [({"pull": "alongside"}, "alongside"), ({"max_delay": "none"}, "steps")]
)
def test_what_has_no_meaning_among_the_fastest_is_refused(wish: dict[str, Any], words: str) -> None:
    with pytest.raises(FabricError, match=words):
        join(make_model(), OPTIMIZER, "fastest", **wish, **alone())


def test_a_log_of_called_steps_is_read_and_replays_to_the_same_actions(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    party = Party(3, log=path)
    try:
        party.run([{}, {"slow": 0.1, "steps": 8}, {"steps": 4, "leaves": True}])
        shown = CliRunner().invoke(app, ["status", "--at", party.fabrics[0].address])
        assert shown.exit_code == 0
        assert "w1" in shown.output
    finally:
        party.close()
    records = read_log(path)
    said = {record.record["message"]["type"] for record in records if record.type == "MessageReceived"}
    assert said >= {"StepReady", "StepCalled", "StepEnded", "StepsOver"}
    assert {"CarryOutStep", "StepCarriedOut"} <= {record.type for record in records}
    assert replay(records) == []
    assert not list(updates_in(records))
    with pytest.raises(FabricError, match="nothing about update w0#0"):
        tell_story(records, "w0#0")
