"""Asynchronous training by `mlfabric.torch.join`: what plain PyTorch does, without its barrier."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
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


OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
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
    count: int, mode: Any, steps: int = 15, engine: str = "thread", lr: float = 0.05, **wishes: Any
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
            training = join(models[rank], ("SGD", {"lr": lr}), mode, fabric=fabrics[rank], **wishes)
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
    # Plain SGD by gradients that are four updates late, which the bound allows, goes astray here at 0.05; at
    # 0.02 it does not even at ten.
    models = train_together(3, "async", steps=25, engine=engine, lr=0.02, pull=pull)
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


def fabrics_of(count: int) -> list[Fabric]:
    fabrics: list[Fabric] = []
    for rank in range(count):
        where = fabrics[0].address if rank else "127.0.0.1:0"
        fabrics.append(mf.join(where, name=f"w{rank}", host=f"h{rank}", scheduler=rank == 0, expected=count))
    return fabrics


def in_threads(fabrics: list[Fabric], work: Any) -> None:
    """Call `work(rank, fabric)` for each; whatever one raises is raised here."""
    with ThreadPoolExecutor(len(fabrics)) as pool:
        running = [pool.submit(work, rank, fabric) for rank, fabric in enumerate(fabrics)]
        for each in running:
            each.result(60)


def work_and_leave(fabrics: list[Fabric], work: Any) -> None:
    """The same, and all of them leave, the last one first."""
    try:
        in_threads(fabrics, work)
    finally:
        for fabric in reversed(fabrics):
            fabric.close()


def test_bounded_staleness_keeps_workers_together() -> None:
    staleness, steps = 1, 12
    fabrics = fabrics_of(2)
    done = [0, 0]
    apart: list[int] = []
    models = [make_model(rank) for rank in range(2)]

    def work(rank: int, fabric: Fabric) -> None:
        training = join(models[rank], ("SGD", {"lr": 0.05}), "ssp", staleness=staleness, fabric=fabric)
        for batch in batches(rank, steps):
            loss_of(models[rank], batch).backward()
            if rank:
                threading.Event().wait(0.02)  # the slow one
            training.step()
            done[rank] += 1
            apart.append(done[0] - done[1])
        training.finish()

    work_and_leave(fabrics, work)
    assert done == [steps, steps]
    # A step is counted a moment after the model for it came.
    assert max(apart) <= staleness + 1, apart


@pytest.mark.parametrize("optimizer", OPTIMIZERS[:2], ids=lambda wish: wish[0])
def test_a_step_of_two_gradients_is_that_of_their_mean(optimizer: tuple[str, dict[str, Any]]) -> None:
    steps = 8
    fabrics = fabrics_of(2)
    models = [torch.nn.Linear(8, 1), torch.nn.Linear(8, 1)]
    plain = torch.nn.Linear(8, 1)
    plain.load_state_dict(models[0].state_dict())
    models[1].load_state_dict(models[0].state_dict())
    outcomes: list[Any] = []

    def work(rank: int, fabric: Fabric) -> None:
        training = join(models[rank], optimizer, "backup", wait_for=2, fabric=fabric)
        for batch in batches(rank, steps):
            loss_of(models[rank], batch).backward()
            outcomes.append(training.step())
        training.finish()

    work_and_leave(fabrics, work)
    stepper = getattr(torch.optim, optimizer[0])(plain.parameters(), **optimizer[1])
    for first, second in zip(batches(0, steps), batches(1, steps), strict=True):
        stepper.zero_grad()
        ((loss_of(plain, first) + loss_of(plain, second)) / 2).backward()
        stepper.step()
    assert all(isinstance(outcome, mf.Committed) for outcome in outcomes)
    for mine, theirs in zip(models[0].parameters(), plain.parameters(), strict=True):
        np.testing.assert_allclose(mine.detach(), theirs.detach(), rtol=2e-3, atol=2e-5)


def test_the_first_gradients_make_the_step_and_the_rest_is_dropped_unsent() -> None:
    fabrics = fabrics_of(3)
    models = [make_model(rank) for rank in range(3)]
    trainings: list[Any] = [None] * 3
    slow_has_stepped = threading.Event()
    reasons: list[str] = []

    def work(rank: int, fabric: Fabric) -> None:
        training = join(models[rank], ("SGD", {"lr": 0.05}), "backup", wait_for=2, fabric=fabric)
        trainings[rank] = training
        for number, batch in enumerate(batches(rank, 12)):
            loss_of(models[rank], batch).backward()
            if rank == 2 and number == 0:
                slow_has_stepped.wait(20)  # until the others have made steps without it
            outcome = training.step()
            if isinstance(outcome, mf.Dropped):
                reasons.append(outcome.reason)
            if rank == 0 and number == 3:
                slow_has_stepped.set()
        training.finish()

    work_and_leave(fabrics, work)
    assert trainings[2].dropped >= 1
    assert "bound" in reasons[0]
    judge = batches(50, 4)
    assert judged(models[0], judge) < 0.8 * judged(make_model(0), judge)


def test_a_step_is_completed_by_those_who_are_left() -> None:
    fabrics = fabrics_of(3)
    models = [make_model(rank) for rank in range(3)]

    def work(rank: int, fabric: Fabric) -> None:
        training = join(models[rank], ("SGD", {"lr": 0.05}), "backup", wait_for=3, fabric=fabric)
        for number, batch in enumerate(batches(rank, 8)):
            if rank == 2 and number == 2:
                training.close()
                return
            loss_of(models[rank], batch).backward()
            training.step()
        training.finish()

    work_and_leave(fabrics, work)


@pytest.mark.parametrize(
    ("mode", "wishes", "words"),
    [
        ("later", {}, "unknown mode 'later'"),
        ("async", {"pull": "never"}, "unknown pull 'never'"),
        ("local", {"local_steps": 0}, "at least 1"),
        ("ssp", {"max_delay": 3}, "max_delay= has no meaning in mode ssp: staleness= bounds"),
        ("ssp", {"pull": "overlapped"}, "pull= has no meaning in mode ssp"),
        ("ssp", {"staleness": -1}, "staleness counts steps"),
        ("async", {"staleness": 2}, "staleness= has no meaning in mode async: it belongs to mode ssp"),
        ("async", {"wait_for": 2}, "it belongs to mode backup"),
        ("backup", {"wait_for": 0}, "at least one gradient"),
        ("backup", {"max_delay": 3}, "not of the current step is dropped"),
        ("backup", {"local_steps": 3}, "it belongs to mode rolling, local"),
        ("sync", {"codec": "int8"}, "codec= has no meaning in mode sync"),
        ("sync", {"divergence": 0.1}, "divergence= has no meaning in mode sync"),
        ("async", {"clip_norm": 0.0}, "clip_norm is a norm above zero"),
        ("local", {"outer": (0.7, 1.0)}, "a momentum from 0 to below 1"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_anything_is_joined(
    mode: Any, wishes: dict[str, Any], words: str
) -> None:
    with pytest.raises(FabricError, match=re.escape(words)):
        join(make_model(), ("SGD", {"lr": 0.1}), mode, **wishes)


def test_a_step_of_more_gradients_than_workers_is_refused() -> None:
    with pytest.raises(FabricError, match="a step that waits for 3 gradients needs more than 1 workers"):
        join(make_model(), ("SGD", {"lr": 0.1}), "backup", wait_for=3, **alone())


def train_plain_and_alone(
    optimizer: tuple[str, dict[str, Any]], schedule: Any, mode: Any = "async", **wishes: Any
) -> tuple[Any, Any]:
    """The models after the same batches under the same schedule: plain PyTorch's and one worker's."""
    plain, model = make_model(), make_model()
    stepper = getattr(torch.optim, optimizer[0])(plain.parameters(), **optimizer[1])
    theirs = schedule(stepper)
    with join(model, optimizer, mode, **alone(**wishes)) as training:
        ours = schedule(training.optimizer)
        for batch in batches(1, 20):
            loss_of(model, batch).backward()
            training.step()
            ours.step()
            stepper.zero_grad()
            loss_of(plain, batch).backward()
            stepper.step()
            theirs.step()
    return plain, model


def assert_equal(plain: Any, model: Any) -> None:
    for name, value in plain.state_dict().items():
        if "num_batches" not in name:
            np.testing.assert_allclose(model.state_dict()[name], value, rtol=2e-3, atol=2e-5, err_msg=name)


SCHEDULES = {
    "steps": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.3),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=25),
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_schedules_go_with_the_updates(schedule: Any) -> None:
    assert_equal(*train_plain_and_alone(OPTIMIZERS[0], schedule))


def test_schedules_go_with_steps_of_several_gradients() -> None:
    assert_equal(*train_plain_and_alone(OPTIMIZERS[1], SCHEDULES["steps"], "backup", wait_for=1))


def test_an_update_is_applied_by_its_own_settings_not_by_anothers() -> None:
    fabrics = fabrics_of(2)
    models = [torch.nn.Linear(2, 1, bias=False) for _ in range(2)]
    try:
        trainings: list[Any] = [None, None]

        def begin(rank: int, fabric: Fabric) -> None:
            trainings[rank] = join(models[rank], ("SGD", {"lr": 0.5}), fabric=fabric)

        in_threads(fabrics, begin)
        start = models[0].weight.detach().clone()
        trainings[0].optimizer.param_groups[0]["lr"] = 0.1  # what a schedule does
        for rank in (0, 1, 0):
            models[rank].weight.grad = torch.ones(1, 2)
            trainings[rank].step()
        np.testing.assert_allclose(models[0].weight.detach(), start - 0.7, rtol=1e-5)
    finally:
        for fabric in reversed(fabrics):
            fabric.close()


def test_a_schedule_can_not_ask_for_other_state() -> None:
    model = make_model()
    with join(model, ("SGD", {"lr": 0.1}), **alone()) as training:
        training.optimizer.param_groups[0]["momentum"] = 0.9
        with pytest.raises(FabricError, match="other state than those that the job was published with"):
            training.step()


@pytest.mark.parametrize("mode", ["async", "sync", "local"])
def test_a_loop_for_plain_pytorch_with_autocast_and_a_scaler_runs_as_it_is(mode: Any) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    judge = batches(50, 4)
    before = judged(model, judge)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)  # too much at first: steps are skipped
    with join(model, ("SGD", {"lr": 0.05}), mode, clip_norm=1.0, **alone()) as training:
        optimizer = training.optimizer
        for x, y in batches(1, 60):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16):
                loss = ((model(x) - y) ** 2).mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert training.skipped > 0
    assert training.steps + training.skipped == 60
    assert judged(model, judge) < 0.7 * before


def test_running_statistics_are_averaged_past_the_optimizer() -> None:
    fabrics = fabrics_of(2)
    models = [torch.nn.BatchNorm1d(3) for _ in range(2)]
    try:
        trainings: list[Any] = [None, None]

        def begin(rank: int, fabric: Fabric) -> None:
            trainings[rank] = join(models[rank], ("Adam", {"lr": 0.1}), fabric=fabric)

        in_threads(fabrics, begin)
        for rank, value in ((0, 4.0), (1, 8.0)):
            models[rank].running_mean.fill_(value)
            trainings[rank].step()
        # Two workers: each brings its half. Zero, then half of 4, then half the way to 8.
        np.testing.assert_allclose(models[1].running_mean, [5.0] * 3, rtol=1e-6)
    finally:
        for fabric in reversed(fabrics):
            fabric.close()


RESUMED = [
    *OPTIMIZERS,
    ("SGD", {"lr": 0.05}),
    ("Adam", {"lr": 0.01}),
    ("Adagrad", {"lr": 0.05, "initial_accumulator_value": 0.1, "lr_decay": 0.01}),
    ("RMSprop", {"lr": 0.005, "momentum": 0.5}),
]


@pytest.mark.parametrize(
    ("mode", "optimizer"),
    [*(("async", wish) for wish in RESUMED), ("backup", RESUMED[0]), ("backup", RESUMED[1])],
    ids=lambda wish: f"{wish[0]}{len(wish[1])}" if isinstance(wish, tuple) else wish,
)
def test_checkpoints_go_from_plain_pytorch_to_servers_and_back(
    optimizer: tuple[str, dict[str, Any]], mode: Any, tmp_path: Path
) -> None:
    wishes = {"wait_for": 1} if mode == "backup" else {}
    kind = getattr(torch.optim, optimizer[0])
    plain, model = make_model(), make_model(1)
    stepper = kind(plain.parameters(), **optimizer[1])

    def train(which: Any, step: Any, seed: int) -> None:
        for batch in batches(seed, 5):
            which.zero_grad()
            loss_of(which, batch).backward()
            step()

    train(plain, stepper.step, 1)
    torch.save({"model": plain.state_dict(), "optimizer": stepper.state_dict()}, tmp_path / "plain")
    with join(model, optimizer, mode, resume=torch.load(tmp_path / "plain"), **alone(**wishes)) as training:
        train(model, training.step, 2)
        torch.save(training.state_dict(), tmp_path / "ours")
    fresh = make_model(2)
    saved = torch.load(tmp_path / "ours", weights_only=True)
    fresh.load_state_dict(saved["model"])
    again = kind(fresh.parameters(), **optimizer[1])
    again.load_state_dict(saved["optimizer"])
    train(fresh, again.step, 3)
    train(plain, stepper.step, 2)
    train(plain, stepper.step, 3)
    assert_equal(plain, fresh)


def test_a_checkpoint_of_another_model_is_refused() -> None:
    saved = {"model": torch.nn.Linear(3, 3).state_dict()}
    with pytest.raises(FabricError, match="the checkpoint does not fit"):
        join(make_model(), ("SGD", {"lr": 0.1}), resume=saved, **alone())
    with pytest.raises(FabricError, match="is a dict with `model`"):
        join(make_model(), ("SGD", {"lr": 0.1}), resume={}, **alone())


def test_a_worker_starts_without_loading_the_compiler_of_torch() -> None:
    """It takes a second, a third of the time in which a worker comes back."""
    script = """
import sys, torch, mlfabric.torch
model = torch.nn.Linear(2, 1)
kept = {"address": "127.0.0.1:0", "scheduler": True, "name": "w0", "expected": 1}
with mlfabric.torch.join(model, ("SGD", {"lr": 0.1}), **kept) as training:
    model(torch.ones(1, 2)).sum().backward()
    training.step()
    assert "torch._dynamo" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("mode", ["async", "ssp", "backup", "local"])
def test_workers_close_when_they_are_through_and_the_others_go_on(mode: Any) -> None:
    """Every one of them serves a part of the model, without replicas, and the first to leave schedules."""
    steps = (4, 12, 24)
    fabrics = fabrics_of(len(steps))
    models = [make_model(rank) for rank in range(len(steps))]
    made = [0] * len(steps)

    def work(rank: int, fabric: Fabric) -> None:
        wishes: dict[str, Any] = {"divergence": None, "shards": 3, "fabric": fabric}
        if mode == "local":
            wishes["local_steps"] = 2
        training = join(models[rank], ("SGD", {"lr": 0.05}), mode, **wishes)
        for batch in batches(rank, steps[rank]):
            loss_of(models[rank], batch).backward()
            training.step()
            made[rank] += 1
        training.close()

    work_and_leave(fabrics, work)
    assert made == list(steps)
    judge = batches(50, 4)
    assert judged(models[2], judge) < judged(make_model(0), judge)
