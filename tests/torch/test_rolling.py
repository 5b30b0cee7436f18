"""Steps that roll on: nobody waits, nothing is lost, and the same step is the same bits everywhere."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed here")

from mlfabric.errors import FabricError  # noqa: E402
from mlfabric.torch.rolling import Gathered  # noqa: E402
from mlfabric.torch.training import Training, join  # noqa: E402
from tests.torch.test_fastest import Party  # noqa: E402
from tests.torch.test_training import alone, batches, judged, loss_of, make_model  # noqa: E402

ADAM = ("Adam", {"lr": 0.01})
SGD = ("SGD", {"lr": 0.01, "momentum": 0.9})


@pytest.mark.parametrize("engine", ["thread", "process"])
@pytest.mark.parametrize(
    "wish", [{}, {"codec": "float16"}, {"local_steps": 2}], ids=["gradients", "float16", "local"]
)
def test_workers_at_the_same_step_hold_the_same_bits_while_one_straggles_and_one_dies(
    wish: dict[str, Any], engine: str
) -> None:
    party = Party(4, engine, mode="rolling", optimizer=ADAM)
    try:
        party.run(
            [wish, wish | {"slow": 0.1, "steps": 40}, wish, wish | {"steps": 8, "leaves": True}],
        )
    finally:
        party.close()
    assert party.common_bits() > 10
    judge = batches(50, 4)
    assert judged(party.models[0], judge) < 0.8 * judged(make_model(0), judge)


def test_every_gradient_is_in_exactly_one_step() -> None:
    """By plain SGD without momentum the sum of all that was applied is what the model has moved by."""
    party = Party(3, mode="rolling", optimizer=("SGD", {"lr": 0.125}))
    ended: list[Training | None] = []
    try:
        party.run([{"steps": 30, "slow": 0.02}, {"steps": 20}, {"steps": 25, "slow": 0.01}])
        ended = party.trainings
    finally:
        party.close()
    assert [training.committed + training.dropped for training in ended if training] == [30, 20, 25]
    assert sum(training.dropped for training in ended if training) <= 5


@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["SGD", "Adam"])
def test_one_worker_alone_learns_as_plain_pytorch_does(optimizer: Any) -> None:
    plain, model = make_model(), make_model()
    stepper = getattr(torch.optim, optimizer[0])(plain.parameters(), **optimizer[1])
    with join(model, optimizer, "rolling", **alone()) as training:
        for batch in batches(1, 15):
            loss_of(model, batch).backward()
            training.step()
            until = time.monotonic() + 10
            while training.version < training.steps and time.monotonic() < until:
                time.sleep(0.001)
                training.catch_up()  # nobody has to wait; here each gradient is to be a step of its own
            stepper.zero_grad()
            loss_of(plain, batch).backward()
            stepper.step()
        assert training.version == training.committed == 15
        assert set(training.delays) == {0}
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_a_newcomer_gets_model_and_optimizer_state_from_those_who_train() -> None:
    first, second = make_model(1), make_model(2)
    seen: list[dict[int, bytes]] = [{}, {}]
    through = threading.Event()

    def train(training: Training, model: Any, rank: int, steps: int) -> None:
        for batch in batches(rank, steps):
            if rank == 0 and through.is_set():
                break
            loss_of(model, batch).backward()
            training.step()
            seen[rank][training.version] = training.weights().tobytes()

    with join(first, ADAM, "rolling", **alone()) as training:
        train(training, first, 0, 5)
        goes_on = threading.Thread(target=train, args=(training, first, 0, 30000), daemon=True)
        goes_on.start()
        where = training.fabric.address
        with join(second, ADAM, "rolling", address=where, name="w1", host="h1") as newcomer:
            assert newcomer.version > 0
            train(newcomer, second, 1, 60)
            assert newcomer.committed > 10
        through.set()
        goes_on.join(20)
        assert not goes_on.is_alive()
    common = seen[0].keys() & seen[1].keys()
    assert len(common) > 5
    assert all(seen[0][version] == seen[1][version] for version in common)


def test_the_module_is_ahead_of_the_common_model_and_a_checkpoint_is_not() -> None:
    party = Party(2, mode="rolling", optimizer=ADAM)
    apart: list[float] = []

    def watch(rank: int, training: Training) -> None:
        if rank == 0 and any(training.delays):
            flat = torch.cat([p.detach().reshape(-1) for p in party.models[0].parameters()]).numpy()
            apart.append(abs(flat - training.weights()).max())

    party.watch = watch
    try:
        party.run([{"steps": 40, "slow": 0.01}, {"steps": 40, "slow": 0.02}])
        training = party.trainings[0]
        assert training is not None
        state = training.state_dict()["model"]
        names = [name for name, _ in party.models[0].named_parameters()]
        held = torch.cat([state[name].reshape(-1) for name in names])
        assert (held.numpy() == training.weights()).all()
    finally:
        party.close()
    assert max(apart) > 0


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"pull": "overlapped"}, "no worker waits"),
        ({"max_delay": "none"}, "steps"),
        ({"codec": "topk"}, "float32 or float16"),
    ],
)
def test_what_has_no_meaning_where_steps_roll_is_refused(wish: dict[str, Any], words: str) -> None:
    with pytest.raises(FabricError, match=words):
        join(make_model(), SGD, "rolling", **wish, **alone())


def test_a_worker_in_another_mode_is_refused_by_those_who_roll() -> None:
    with (
        join(make_model(), SGD, "rolling", **alone()) as training,
        pytest.raises(FabricError, match="mode rolling"),
    ):
        join(make_model(), SGD, "fastest", address=training.fabric.address, name="w1", timeout=10.0)


def test_sums_of_gradients_keep_count_and_bases() -> None:
    import numpy as np

    gathered = Gathered(np.full(3, 9.0, np.float32))
    gathered.add(np.ones(3, np.float32), [4])
    gathered.add(np.full(3, 2.0, np.float32), [5, 6])
    assert gathered.total.tolist() == [3.0, 3.0, 3.0]
    assert gathered.bases == [4, 5, 6]


def test_one_worker_alone_with_local_steps_trains_as_plain_pytorch_does() -> None:
    plain, model = make_model(), make_model()
    stepper = torch.optim.Adam(plain.parameters(), lr=0.01)
    with join(model, ADAM, "rolling", local_steps=3, **alone()) as training:
        for batch in batches(1, 20):
            loss_of(model, batch).backward()
            training.step()
            stepper.zero_grad()
            loss_of(plain, batch).backward()
            stepper.step()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
