"""Steps that roll on: nobody waits, nothing is lost, and the same step is the same bits everywhere."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed here")

from mlfabric.errors import FabricError  # noqa: E402
from mlfabric.torch import rolledsteps  # noqa: E402
from mlfabric.torch.flat import FlatModel  # noqa: E402
from mlfabric.torch.optimizers import make_optimizer, read_optimizer  # noqa: E402
from mlfabric.torch.pieces import PieceOptimizer  # noqa: E402
from mlfabric.torch.rolledsteps import Gathered, Gradient, RolledSteps, cut_parts  # noqa: E402
from mlfabric.torch.training import Training, join  # noqa: E402
from tests.torch.test_fastest import Party  # noqa: E402
from tests.torch.test_training import alone, batches, judged, loss_of, make_model  # noqa: E402

ADAM = ("Adam", {"lr": 0.01})
SGD = ("SGD", {"lr": 0.01, "momentum": 0.9})


@pytest.fixture(params=[1, 3], ids=["whole", "three-parts"])
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Small models are one part; here they are cut as large ones would be."""
    count: int = request.param
    elements = sum(p.numel() for p in make_model().parameters())
    monkeypatch.setattr(rolledsteps, "LEAST_BYTES", 4 * elements // count)
    return count


@pytest.mark.parametrize("engine", ["thread", "process"])
@pytest.mark.parametrize(
    "wish", [{}, {"codec": "float16"}, {"local_steps": 2}], ids=["gradients", "float16", "local"]
)
def test_workers_at_the_same_step_hold_the_same_bits_while_one_straggles_and_one_dies(
    wish: dict[str, Any], engine: str, parts: int
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


@pytest.mark.parametrize("codec", ["float32", "float16"])
def test_what_a_schedule_changes_is_what_steps_are_made_by(codec: str, parts: int) -> None:
    party = Party(2, mode="rolling", optimizer=ADAM)

    def stop_moving(rank: int, training: Training) -> None:
        if training.steps == 20:
            training.optimizer.param_groups[0]["lr"] = 0.0

    party.watch = stop_moving
    try:
        party.run([{"codec": codec, "steps": 150}] * 2)
    finally:
        party.close()
    for seen in party.seen:
        models = list(seen.values())
        assert len(set(models[:10])) > 5
        assert len(set(models[-20:])) == 1


def test_every_gradient_is_in_exactly_one_step(parts: int) -> None:
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
def test_one_worker_alone_learns_as_plain_pytorch_does(optimizer: Any, parts: int) -> None:
    plain, model = make_model(), make_model()
    stepper = getattr(torch.optim, optimizer[0])(plain.parameters(), **optimizer[1])
    with join(model, optimizer, "rolling", **alone()) as training:
        for batch in batches(1, 15):
            loss_of(model, batch).backward()
            training.step()
            until = time.monotonic() + 10
            while training.version < parts * training.steps and time.monotonic() < until:
                time.sleep(0.001)
                training.catch_up()  # nobody has to wait; here each gradient is to be a step of its own
            stepper.zero_grad()
            loss_of(plain, batch).backward()
            stepper.step()
        assert training.version == parts * training.committed == parts * 15
        assert set(training.delays) == {0}
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_a_newcomer_gets_model_and_optimizer_state_from_those_who_train(parts: int) -> None:
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
            until = time.monotonic() + 20
            # Both come past the same version by chance only: each may apply several steps at once.
            while len(set(seen[0]) & set(seen[1])) <= 5 and time.monotonic() < until:
                train(newcomer, second, 1, 60)
            assert newcomer.committed > 10
        through.set()
        goes_on.join(20)
        assert not goes_on.is_alive()
    common = seen[0].keys() & seen[1].keys()
    assert len(common) > 5
    assert all(seen[0][version] == seen[1][version] for version in common)


def test_a_worker_whose_join_is_broken_off_joins_again(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One lacks a sum that the others have. While they send it the model a feeder fails; after that it joins,
    and its gradients count again."""
    trouble: list[str] = []
    workers: dict[str, RolledSteps] = {}
    end, move = RolledSteps._end, RolledSteps._move

    def lose(self: RolledSteps, under_way: Any, call: Any, settings: Any, state: Any = None) -> None:
        workers[self._node] = self
        if self._node == "w1" and under_way.step >= 3 * parts and not trouble:
            until = time.monotonic() + 10
            while any(worker.holds <= under_way.step for node, worker in workers.items() if node != "w1"):
                assert time.monotonic() < until, "the others do not get their sums"
                time.sleep(0.001)
            trouble.append("lost")
            raise FabricError("a sum was lost")
        end(self, under_way, call, settings, state)

    def cut(self: RolledSteps, call: Any, state: Any) -> Any:
        if trouble == ["lost"] and call.joiners == ("w1",) and self._node in call.feeders:
            trouble.append("cut")
            raise FabricError("the feeder was cut off")
        return move(self, call, state)

    monkeypatch.setattr(RolledSteps, "_end", lose)
    monkeypatch.setattr(RolledSteps, "_move", cut)
    party = Party(3, mode="rolling", optimizer=ADAM)
    late: list[int] = []

    def watch(rank: int, training: Training) -> None:
        if rank == 1 and trouble == ["lost", "cut"]:
            late.append(training.committed)

    party.watch = watch
    try:
        party.run([{}, {"steps": 60}, {}])
    finally:
        party.close()
    assert trouble == ["lost", "cut"]
    assert late[-1] - late[0] > 5
    assert party.common_bits() > 10


def test_the_module_is_ahead_of_the_common_model_and_a_checkpoint_is_not(parts: int) -> None:
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


def test_sums_of_gradients_are_kept_by_part_with_their_settings_and_count() -> None:
    parts = [slice(0, 2), slice(2, 5)]
    waiting, given = Gathered(parts, 1), Gathered(parts, 1)
    for value, base in ((1.0, 4), (2.0, 6)):
        waiting.add(np.full(5, value, np.float32), [0.5], Gradient(base, len(parts)))
    waiting.move(0, given)
    assert [len(each) for each in waiting.gradients] == [0, 2]
    assert [gradient.base for gradient in given.gradients[0]] == [4, 6]
    waiting.add(np.full(5, 10.0, np.float32), [0.25], Gradient(7, len(parts)))
    assert waiting.most == 3
    vector = np.empty(4, np.float32)
    given.read(0, vector)
    assert vector.tolist() == [3.0, 3.0, 1.0, 2.0]
    waiting.read(0, vector)  # nothing of what was there before
    assert vector.tolist() == [10.0, 10.0, 0.25, 1.0]
    given.move(0, waiting)  # a step that failed
    waiting.read(0, vector)
    assert vector.tolist() == [13.0, 13.0, 1.25, 3.0]


def test_parts_are_of_a_size_worth_a_step_and_cover_the_model() -> None:
    assert cut_parts(10) == [0, 10]
    assert len(cut_parts(1_269_706)) == 9
    assert cut_parts(7, least_bytes=8) == [0, 2, 4, 7]
    assert cut_parts(25_557_032)[-1] == 25_557_032


@pytest.mark.parametrize("wish", [ADAM, SGD, ("AdamW", {"lr": 0.01}), ("RMSprop", {"lr": 0.01})])
def test_an_optimizer_steps_part_by_part_what_it_steps_as_a_whole(wish: Any) -> None:
    whole, cut = make_model(), make_model()
    flats = [FlatModel(model, lambda elements: np.empty(elements, np.float32)) for model in (whole, cut)]
    plain, own = (make_optimizer(wish, flat.parameters) for flat in flats)
    vectors = read_optimizer(own, flats[1].parameters).rule(flats[1].trained, 0, 1).vectors
    cuts = cut_parts(flats[1].elements, least_bytes=64)
    pieces = PieceOptimizer(own, flats[1], vectors, cuts)
    for number in range(6):
        gradient = np.random.default_rng(number).standard_normal(flats[0].elements).astype(np.float32)
        if number == 3:
            plain.param_groups[0]["lr"] = own.param_groups[0]["lr"] = 0.02
            held = pieces.read()
            pieces = PieceOptimizer(make_optimizer(wish, flats[1].parameters), flats[1], vectors, cuts)
            pieces.take_over(*held)
            pieces._own.param_groups[0]["lr"] = 0.02
        flats[0].set_gradients(gradient)
        plain.step()
        for part, (start, stop) in enumerate(itertools.pairwise(cuts)):
            pieces.step(part, gradient[start : min(stop, flats[1].trained)])
    assert torch.equal(flats[0].values, flats[1].values)
    pieces.hand_over()
    theirs, mine = plain.state_dict()["state"], pieces._own.state_dict()["state"]
    for index, state in theirs.items():
        for name, value in state.items():
            torch.testing.assert_close(torch.as_tensor(mine[index][name]), torch.as_tensor(value))


def test_one_worker_alone_with_local_steps_trains_as_plain_pytorch_does(parts: int) -> None:
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
