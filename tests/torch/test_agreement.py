"""Workers of one job that differ: the one that comes with something else is told, and the others go on."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed here")

from mlfabric.errors import FabricError  # noqa: E402
from mlfabric.torch.training import join  # noqa: E402
from tests.torch.test_training import alone, batches, fabrics_of, loss_of, make_model, work_and_leave  # noqa: E402

PLAIN = ("SGD", {"lr": 0.05})


def refused(first: dict[str, Any], second: dict[str, Any]) -> str:
    """What the second of two workers is told; the first one goes on by itself, whoever led its shards."""
    fabrics = fabrics_of(2)
    said: list[str] = []

    def work(rank: int, fabric: Any) -> None:
        wishes = {"model": make_model(), "optimizer": PLAIN, **(second if rank else first)}
        model = wishes["model"]
        if rank:
            began.result(30)
            try:
                join(fabric=fabric, **wishes)
            except FabricError as error:
                said.append(str(error))
            return
        training = join(fabric=fabric, **wishes)
        began.set_result(None)
        for batch in batches(rank, 6):
            loss_of(model, batch).backward()
            training.step()
        training.close()

    began: Future[None] = Future()
    work_and_leave(fabrics, work)
    assert len(said) == 1, "it was let in"
    return said[0]


def smaller() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))


def renamed() -> Any:
    model = torch.nn.Module()
    for name, layer in zip("abcd", make_model(), strict=True):
        model.add_module(name, layer)
    return model


def swapped() -> Any:
    """The same names and shapes, put together in another order."""
    first, *rest = make_model().named_children()
    model = torch.nn.Module()
    for name, layer in (*rest, first):
        model.add_module(name, layer)
    return model


SHARDS = {"divergence": None, "shards": 2}


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ({"mode": "async"}, {"mode": "local"}, "workers train in mode async, this one trains in mode local"),
        ({"mode": "local"}, {"mode": "async"}, "workers train in mode local, this one trains in mode async"),
        ({"mode": "ssp"}, {"mode": "async"}, "workers train in mode ssp, this one trains in mode async"),
        ({"mode": "async"}, {"mode": "sync"}, "workers train in mode async, this one trains in mode sync"),
        ({}, {"optimizer": ("Adam", {"lr": 0.1})}, "servers step by SGD, this worker asks for Adam"),
        (
            {"optimizer": ("Adam", {"lr": 0.1})},
            {"optimizer": ("AdamW", {"lr": 0.1})},
            "servers step by Adam, this worker asks for AdamW",
        ),
        ({}, {"optimizer": ("SGD", {"lr": 0.1, "momentum": 0.9})}, "give all the same momentum, or none"),
        ({"max_delay": 8}, {"max_delay": 4}, "trains with max_delay=8, this worker asks for 4"),
        ({}, {"max_delay": "none"}, "trains with max_delay='auto', this worker asks for 'none'"),
        ({"mode": "ssp", "staleness": 1}, {"mode": "ssp"}, "staleness=1, this worker asks for 2"),
        ({"mode": "backup"}, {"mode": "backup", "wait_for": 2}, "wait_for=1, this worker asks for 2"),
        ({}, {"codec": "bfloat16"}, "codec='float32', this worker asks for 'bfloat16'"),
        (SHARDS, {"shards": 2}, "divergence=None, this worker asks for 0.02"),
        (SHARDS, {**SHARDS, "model": smaller()}, "array '0.weight' is [16, 8] of float32 there and [4, 8]"),
        (SHARDS, {**SHARDS, "model": renamed()}, "it lacks array '0.weight'"),
        (SHARDS, {**SHARDS, "model": swapped()}, "array '1.weight' comes at another place"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_a_worker_that_differs_is_told_in_what(
    first: dict[str, Any], second: dict[str, Any], words: str
) -> None:
    assert words in refused(first, second)


@pytest.mark.parametrize("engine", ["thread", "process"])
@pytest.mark.parametrize(
    ("mode", "other"),
    [
        ("fastest", "async"),
        ("fastest", "local"),
        ("fastest", "sync"),
        ("async", "fastest"),
        ("sync", "fastest"),
        ("sync", "async"),
    ],
)
def test_a_newcomer_in_another_mode_is_told_both_and_the_others_go_on(
    mode: Any, other: Any, engine: str
) -> None:
    model = make_model()
    with join(model, PLAIN, mode, **alone(engine=engine)) as training:
        for number, batch in enumerate(batches(0, 6)):
            if number == 3:
                where = training.fabric.address
                with pytest.raises(FabricError, match=f"train in mode {mode}, this one .* mode {other};"):
                    join(make_model(), PLAIN, other, address=where, name="w1", host="h1", engine=engine)
            loss_of(model, batch).backward()
            training.step()
        assert training.version == 6


def test_numbers_that_schedules_change_and_what_follows_from_their_count_may_differ() -> None:
    fabrics = fabrics_of(2)
    models = [make_model() for _ in range(2)]

    def work(rank: int, fabric: Any) -> None:
        optimizer = ("SGD", {"lr": 0.05 * (1 + rank), "weight_decay": 0.01 * rank})
        training = join(models[rank], optimizer, "backup", clip_norm=1.0 + rank, fabric=fabric)
        for batch in batches(rank, 4):
            loss_of(models[rank], batch).backward()
            training.step()
        training.close()

    work_and_leave(fabrics, work)
