"""Asynchronous training by `mlfabric.torch.join`: what plain PyTorch does, without its barrier."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed here")

import mlfabric as mf  # noqa: E402
from mlfabric.api import Fabric  # noqa: E402
from mlfabric.errors import FabricError  # noqa: E402
from mlfabric.torch.optimizers import read_optimizer  # noqa: E402
from mlfabric.torch.training import join  # noqa: E402


def make_model(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16, bias=False), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 1)
    )


def batches(seed: int, count: int) -> list[tuple[Any, Any]]:
    draw = torch.Generator().manual_seed(seed)
    truth = torch.randn(8, 1, generator=torch.Generator().manual_seed(99))
    inputs = [torch.randn(32, 8, generator=draw) for _ in range(count)]
    return [(x, torch.tanh(x @ truth)) for x in inputs]


def loss_of(model: Any, batch: tuple[Any, Any]) -> Any:
    return ((model(batch[0]) - batch[1]) ** 2).mean()


def judged(model: Any, judge: list[tuple[Any, Any]]) -> float:
    with torch.no_grad():
        return float(sum(loss_of(model, batch).item() for batch in judge))


def alone(**wishes: Any) -> dict[str, Any]:
    return {"address": "127.0.0.1:0", "scheduler": True, "name": "w0", "expected": 1, **wishes}


OPTIMIZERS = [
    ("SGD", {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("AdamW", {"lr": 0.01, "betas": (0.8, 0.95)}),
    ("RMSprop", {"lr": 0.005}),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda wish: wish[0])
def test_one_worker_alone_trains_as_plain_pytorch_does(optimizer: tuple[str, dict[str, Any]]) -> None:
    plain, model = make_model(), make_model()
    stepper = getattr(torch.optim, optimizer[0])(plain.parameters(), **optimizer[1])
    with join(model, optimizer, **alone()) as training:
        for batch in batches(1, 20):
            loss_of(model, batch).backward()
            training.step()
            stepper.zero_grad()
            loss_of(plain, batch).backward()
            stepper.step()
    for name, value in plain.state_dict().items():
        if "num_batches" not in name:
            np.testing.assert_allclose(model.state_dict()[name], value, rtol=2e-3, atol=2e-5, err_msg=name)


def test_parameter_groups_keep_their_own_settings() -> None:
    plain, model = make_model(), make_model()

    def groups(which: Any) -> Any:
        return torch.optim.SGD(
            [{"params": which[0].parameters()}, {"params": [*which[1].parameters()], "lr": 0.2},
             {"params": which[3].parameters(), "momentum": 0.5}], lr=0.05,
        )  # fmt: skip

    stepper = groups(plain)
    with join(model, groups(model), **alone()) as training:
        for batch in batches(2, 10):
            loss_of(model, batch).backward()
            training.step()
            stepper.zero_grad()
            loss_of(plain, batch).backward()
            stepper.step()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        np.testing.assert_allclose(mine.detach(), theirs.detach(), rtol=1e-3, atol=1e-5)


def train_together(
    count: int, mode: Any, steps: int = 15, engine: str = "thread", **wishes: Any
) -> list[Any]:
    """Workers in threads of their own; their models at the end."""
    models = [make_model(seed) for seed in range(count)]
    fabrics: list[Fabric] = []
    for rank in range(count):
        where = fabrics[0].address if rank else "127.0.0.1:0"
        fabrics.append(
            mf.join(
                where, name=f"w{rank}", host=f"h{rank}", scheduler=rank == 0, expected=count, engine=engine
            )
        )
    errors: list[BaseException] = []
    done = threading.Barrier(count)

    def work(rank: int) -> None:
        try:
            training = join(models[rank], ("SGD", {"lr": 0.05}), mode, fabric=fabrics[rank], **wishes)
            for batch in batches(rank, steps):
                loss_of(models[rank], batch).backward()
                training.step()
            done.wait(30)
            training.finish()
            done.wait(30)
        except BaseException as error:
            errors.append(error)
            done.abort()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for fabric in reversed(fabrics):
        fabric.close()
    assert not errors, errors
    return models


@pytest.mark.parametrize(
    ("pull", "engine"),
    [("after", "thread"), ("alongside", "thread"), ("overlapped", "thread"), ("overlapped", "process")],
)
def test_workers_end_with_the_model_that_all_of_them_trained(pull: str, engine: str) -> None:
    models = train_together(3, "async", engine=engine, pull=pull)
    judge = batches(50, 4)
    assert judged(models[0], judge) < 0.7 * judged(make_model(0), judge)


@pytest.mark.parametrize("engine", ["thread", "process"])
def test_ranks_in_step_hold_the_same_bits(engine: str) -> None:
    models = train_together(3, "sync", engine=engine)
    for other in models[1:]:
        for mine, theirs in zip(models[0].parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, theirs)


def test_local_steps_bring_workers_together() -> None:
    models = train_together(2, "local", steps=40, local_steps=5)
    judge = batches(50, 4)
    assert judged(models[0], judge) < 0.8 * judged(make_model(0), judge)


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (("LBFGS", {}), "can't step by LBFGS"),
        (("Nothing", {}), "no optimizer 'Nothing'"),
        (("SGD", {"speed": 1}), "refuses its settings"),
        (("SGD", {"lr": 0.1, "dampening": 0.5, "momentum": 0.9}), "dampening=0.5"),
        (("Adam", {"amsgrad": True}), "amsgrad=True"),
        ((lambda parameters: 3), "made a int"),
        (("SGD",), "is a pair like"),
    ],
)
def test_what_servers_can_not_step_by_is_said_in_a_sentence(optimizer: Any, words: str) -> None:
    model = make_model()
    with pytest.raises(FabricError, match=words):
        read_optimizer(optimizer, list(model.parameters())).rule(1, 0, 1)


def test_wrong_wishes_are_refused_before_anything_is_joined() -> None:
    model = make_model()
    for wishes, words in (
        ({"mode": "later"}, "unknown mode 'later'"),
        ({"pull": "never"}, "unknown pull 'never'"),
        ({"local_steps": 0}, "at least 1"),
    ):
        with pytest.raises(FabricError, match=words):
            join(model, ("SGD", {"lr": 0.1}), **wishes)


def test_a_model_of_another_type_is_refused() -> None:
    with pytest.raises(FabricError, match=r"parameter weight is torch.float64"):
        join(torch.nn.Linear(2, 2).double(), ("SGD", {"lr": 0.1}), **alone())
    frozen = torch.nn.Linear(2, 2)
    frozen.requires_grad_(False)
    with pytest.raises(FabricError, match="no parameter that is trained"):
        join(frozen, ("SGD", {"lr": 0.1}), **alone())


def test_a_checkpoint_is_plain_pytorchs() -> None:
    model = make_model()
    with join(model, ("SGD", {"lr": 0.05}), **alone()) as training:
        for batch in batches(3, 3):
            loss_of(model, batch).backward()
            training.step()
        saved = training.state_dict()
    fresh = make_model(5)
    fresh.load_state_dict(saved["model"])
    for mine, theirs in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_gradients_set_to_none_count_as_zero_and_replaced_ones_count() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    before = model.weight.detach().clone()
    with join(model, ("SGD", {"lr": 1.0}), **alone()) as training:
        model.zero_grad(set_to_none=True)
        training.step()
        assert torch.equal(model.weight, before)
        model.weight.grad = torch.ones_like(model.weight)
        training.step()
    np.testing.assert_allclose(model.weight.detach(), before - 1, rtol=1e-6)


def test_clipping_is_at_the_worker() -> None:
    model = torch.nn.Linear(4, 1, bias=False)
    before = model.weight.detach().clone()
    with join(model, ("SGD", {"lr": 1.0}), clip_norm=0.5, **alone()) as training:
        model.weight.grad = torch.full_like(model.weight, 10.0)
        training.step()
    assert float((model.weight.detach() - before).norm()) == pytest.approx(0.5, rel=1e-5)
