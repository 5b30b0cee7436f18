"""Training with others: `join(model, optimizer)`, then `step()` after each backward pass.

Servers on the members hold the model and step it; a worker offers its gradients and goes on with the freshest
model, at once (`async`), not too far ahead of the slowest (`ssp`), or when the first few gradients have made
one step (`backup`). In mode `sync` the ranks average their gradients by all-reduce and step by themselves
instead, and so do in mode `fastest` those that are fast now (`torch.fastest`), in mode `rolling` all of them
without ever waiting (`torch.rolling`); in mode `local` they take several steps of their own and offer what
these changed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import numpy as np
import torch

from mlfabric.api import Fabric, Pulling, Ticket
from mlfabric.api import join as join_fabric
from mlfabric.client import Committed, Dropped, Model, Outcome
from mlfabric.errors import FabricError
from mlfabric.events import TrainingBegun
from mlfabric.messages import RuleSpec, StepSettings
from mlfabric.rules import SGD, Average, Pieces, Rounds, Rule, make_rule
from mlfabric.torch.agreement import difference
from mlfabric.torch.fastest import Fastest
from mlfabric.torch.flat import FlatModel
from mlfabric.torch.modes import UNSET, Bound, Mode, Pull, Unset, Wishes, check_fits, fitting
from mlfabric.torch.optimizers import (
    OptimizerWish,
    ReadOptimizer,
    group_settings,
    load_stepping,
    make_optimizer,
    read_optimizer,
)
from mlfabric.torch.plainstate import cloned, load_plain, plain_state, read_state
from mlfabric.torch.rolling import Rolling
from mlfabric.torch.rollinglocal import RollingLocal
from mlfabric.torch.stepped import SteppedTraining
from mlfabric.torch.stepping import FabricOptimizer
from mlfabric.ways import different_mode

ARRAY = "model"
# How often one that waits for all workers looks whether they train in another way.
LOOK_S = 0.2
# How long a worker that was refused has to hand on what it has been made to lead.
REFUSED_S = 10.0


class Training:
    """A worker's handle on a job. Use it as a context manager, or close() it."""

    def __init__(
        self,
        fabric: Fabric,
        model: torch.nn.Module,
        optimizer: OptimizerWish,
        wishes: Wishes,
        timeout: float,
        resume: Mapping[str, Any] | None = None,
    ) -> None:
        self.fabric = fabric
        self.model = model
        self.mode = wishes.mode
        self.steps = 0
        self.committed = 0
        self.dropped = 0
        self.skipped = 0  # steps whose gradients were infinite, as a scaler's first ones are
        self.delays: list[int] = []  # of committed updates, in updates
        self._wishes = wishes
        self._timeout = timeout
        self._flat = FlatModel(model, fabric.empty)
        workers = max(fabric.expected, fabric.worker_count)
        check_fits(wishes, workers, self._flat.averaged)
        served = wishes.mode in ("async", "ssp", "backup")
        inner = make_optimizer(optimizer, self._flat.parameters)
        if not served:
            load_stepping()
        if resume is not None:
            load_plain(resume, model, inner)
        self._read: ReadOptimizer | None = read_optimizer(inner, self._flat.parameters) if served else None
        self._inner = inner
        self.optimizer = FabricOptimizer(inner, self._step, self._flat.clear_gradients, self._plain_state)
        self._ticket: Ticket | None = None
        self._pulling: Pulling | None = None
        self._base: Model | None = None
        self._outcome: Outcome | None = None
        self._seen = group_settings(inner)
        self._settings: StepSettings | None = None  # what the next update is to be applied by
        self._published = RuleSpec("Sum")  # what servers apply updates by that come without settings
        self._every = wishes.gradients_per_step(workers) if wishes.mode == "backup" else 1
        self._stepped: SteppedTraining | None = None
        if wishes.mode == "sync":
            self._same_start()
        elif wishes.mode in ("fastest", "rolling"):
            rolling = Rolling if wishes.local_steps is None else RollingLocal
            self._stepped = (Fastest if wishes.mode == "fastest" else rolling)(
                fabric, self._flat, inner, wishes, timeout, self._step_settled, self._step_skipped
            )
        else:
            self._publish(workers, resume)

    def __repr__(self) -> str:
        return f"<Training {self.mode} as {self.fabric.name}, {self.steps} steps, {self.dropped} dropped>"

    @property
    def version(self) -> int:
        """Updates in the model that this worker has now."""
        if self._stepped is not None:
            return self._stepped.version
        return self._base.version if self._base is not None else self.steps

    def step(self) -> Outcome | None:
        """Offer the gradients of the backward passes since the last step; go on with the freshest model.

        The outcome is that of this step's update, or of the one before where pulls are overlapped. What a
        schedule changed of the optimizer's settings goes with the update. `optimizer.step()` does the same.
        """
        self._outcome = None
        self.optimizer.step()
        return self._outcome

    def _step(self, scale: float, infinite: bool | None) -> None:
        """`scale` undoes a gradient scaler's; `infinite` is what it found, None where there is none."""
        if self.mode == "sync":
            self._step_together(scale, infinite)
        elif self._stepped is not None:
            self._step_when_called(self._stepped, scale, infinite)
        elif infinite:
            self.skipped += 1
            self._flat.clear_gradients()
        elif self.mode == "local":
            self._inner_step(scale)
            if self.steps % self._wishes.steps_of_its_own == 0:
                before = self._settle()
                self._offer(self._changed_locally(), self._outer_settings(), before)
        else:
            self.steps += 1
            before = self._settle()  # the next gradients go where those on their way are
            update = self._flat.take_update(self._wishes.clip_norm, scale)
            self._offer(update, self._changed_settings(), before)

    # --- the model at its servers -----------------------------------------------------------------------

    def _publish(self, workers: int, resume: Mapping[str, Any] | None) -> None:
        wishes, flat = self._wishes, self._flat
        rule = self._rule(workers)
        model: dict[str, Any] = {ARRAY: flat.copy()}
        if self._read is not None:
            inner = rule.rule if isinstance(rule, Rounds) else rule
            state, steps = read_state(self._inner, flat.parameters, inner.vectors, flat.elements)
            version = int((resume or {}).get("version", 0)) if self._every == 1 else 0
            version = version or steps * self._every
            if version or any(vector.any() for vector in state):
                gathered = [np.zeros(flat.elements, np.float32)] if inner is not rule else []
                vectors = enumerate([*state, *gathered])
                model = {
                    "format": "mlfabric checkpoint 1",
                    "weights": model,
                    "state": {f"vector{index}": {ARRAY: vector} for index, vector in vectors},
                    "version": version,
                }
        self.fabric.publish(
            model,
            apply=rule,
            max_delay="none" if self.mode == "ssp" else wishes.max_delay,
            divergence=wishes.divergence,
            shards=wishes.shards or "auto",
            codec=wishes.codec,
            staleness=wishes.staleness if self.mode == "ssp" else None,
            wait_for=self._every if self.mode == "backup" else None,
            way=self.mode,
            parts=flat.parts,
            timeout=self._timeout,
        )
        self._published = self.fabric._client.rule_spec
        settings = self.fabric._client.settings
        assert settings is not None
        differs = difference(wishes, rule.spec(), settings, self._published)
        if differs:
            raise FabricError(differs)
        self._every = max(settings.wait_for, 1)
        self._changed_settings(first=True)
        self._load(self.fabric.pull(self._timeout))

    def _rule(self, workers: int) -> Rule:
        flat = self._flat
        if self._read is None:
            return self._outer_rule(workers)
        if self.mode != "backup":
            return self._read.rule(flat.trained, flat.averaged, workers)
        # The mean of a step's statistics are the next ones.
        rule = self._read.rule(flat.trained, flat.averaged, 1)
        return Rounds(self._every, rule) if self._every > 1 else rule

    def _outer_rule(self, workers: int) -> Rule:
        """Every worker's change is a step of its own here, where DiLoCo steps once by their mean."""
        flat, (lr, momentum) = self._flat, self._wishes.outer
        share = 1 / max(workers, 1)
        rule = SGD(lr * share, momentum, nesterov=momentum > 0)
        if not flat.averaged:
            return rule
        return Pieces(((0, flat.trained, rule), (flat.trained, flat.elements, Average(share))))

    def _outer_settings(self) -> StepSettings | None:
        """Workers come and go: each change counts as one of those that are here now."""
        spec = self._outer_rule(self.fabric.worker_count).spec()
        return StepSettings(self.steps, spec) if spec != self._published else None

    def _changed_settings(self, first: bool = False) -> StepSettings | None:
        """What a schedule has made of the optimizer's settings, unless that is what was published."""
        if self._read is None:
            return None
        now = group_settings(self._inner)
        if now != self._seen or first:
            self._seen = now
            self._read = read_optimizer(self._inner, self._flat.parameters)
            spec = self._rule(max(self.fabric.expected, self.fabric.worker_count)).spec()
            if make_rule(spec).vectors != make_rule(self._published).vectors:
                raise FabricError(
                    "the optimizer's settings need other state than those that the job was published with; "
                    "turning momentum on or off is not something that a schedule can do"
                )
            self._settings = StepSettings(self.steps, spec) if spec != self._published else None
        return self._settings

    def _offer(self, update: Any, settings: StepSettings | None, before: Outcome | None) -> None:
        self._ticket = self.fabric.push({ARRAY: update}, base=self._base, settings=settings)
        if self._wishes.pull == "overlapped":
            pulled, self._pulling = self._pulling, self.fabric.pull_later()
            if pulled is not None:
                self._load(pulled.result(self._timeout))
            self._outcome = before
            return
        pulling = self.fabric.pull_later() if self._wishes.pull == "alongside" else None
        self._outcome = self._settle()
        self._load((pulling or self.fabric.pull_later()).result(self._timeout))

    def _settle(self) -> Outcome | None:
        """Wait for the update that is on its way; its memory is free then."""
        if self._ticket is None:
            return None
        outcome = self._ticket.result(self._timeout)
        self._ticket = None
        if isinstance(outcome, Committed):
            self.committed += 1
            self.delays.append(outcome.delay_updates)
        else:
            self.dropped += 1
        return outcome

    def _load(self, model: Model) -> None:
        self._base = model
        self._flat.load(model.arrays[ARRAY])

    # --- local steps ------------------------------------------------------------------------------------

    def _inner_step(self, scale: float) -> None:
        self.steps += 1
        self._flat.ready_gradients(self._wishes.clip_norm, scale)
        self._inner.step()
        self._flat.clear_gradients()

    def _changed_locally(self) -> Any:
        """The way from here back to where we began, as a gradient; the statistics as they are."""
        assert self._base is not None
        update = self._base.arrays[ARRAY] - self._flat.values.numpy()
        update[self._flat.trained :] = self._flat.values.numpy()[self._flat.trained :]
        return update

    # --- together ---------------------------------------------------------------------------------------

    def _same_start(self) -> None:
        """All ranks begin with rank 0's values."""
        self.fabric._client.tell_stepper(TrainingBegun(self.mode))
        rank = self._my_rank()
        values = self._flat.values.numpy()
        if rank:
            values[:] = 0
        self.fabric.all_reduce(values, self._timeout)

    def _my_rank(self) -> int:
        """Once all are here; who hears meanwhile that others train without a barrier waits in vain."""
        until = time.monotonic() + self._timeout
        while True:
            published = self.fabric._client.settings
            if published is not None:
                raise FabricError(different_mode(self.mode, published.way))
            try:
                return self.fabric.rank_and_size(LOOK_S)[0]
            except TimeoutError:
                if time.monotonic() >= until:
                    raise TimeoutError(
                        f"the workers of the job are not all here (after {self._timeout:g} s)"
                    ) from None

    def _take_gradient(self, scale: float, infinite: bool | None) -> Any:
        """Infinite gradients of one rank make all skip the step, as their average would be infinite."""
        update = self._flat.take_update(self._wishes.clip_norm if not infinite else None, scale)
        if infinite:
            update[0] = np.inf
        return update

    def _step_together(self, scale: float, infinite: bool | None) -> None:
        update = self._take_gradient(scale, infinite)
        self.fabric.all_reduce(update, self._timeout, combine="avg")
        self._flat.values[self._flat.trained :] = torch.from_numpy(update[self._flat.trained :])
        if infinite is not None and not np.isfinite(update[: self._flat.trained]).all():
            self.skipped += 1
            return
        self.steps += 1
        self._flat.set_gradients(update)
        self._inner.step()
        self._flat.clear_gradients()

    # --- by steps that the scheduler calls --------------------------------------------------------------

    def _step_when_called(self, stepped: SteppedTraining, scale: float, infinite: bool | None) -> None:
        self.steps += 1
        stepped.step(lambda: self._take_gradient(scale, infinite), infinite is not None)

    def _step_settled(self, delay: int | None) -> None:
        if delay is None:
            self.dropped += 1
            self._outcome = Dropped("it was too old when it could have gone into a step")
        else:
            self.committed += 1
            self.delays.append(delay)
            self._outcome = Committed(self.version, delay)

    def _step_skipped(self) -> None:
        self.skipped += 1

    # --- state ------------------------------------------------------------------------------------------

    def weights(self) -> Any:
        """The parameters of the common model that this worker has, in one vector; in mode rolling the module
        itself holds them moved on to where its next gradient will be applied."""
        if self._stepped is not None:
            return self._stepped.weights()
        return self._flat.copy()[: self._flat.trained]

    def catch_up(self) -> None:
        """Have the newest common model that has come in the module, as it is: to evaluate it, say."""
        if self._stepped is not None:
            self._stepped.catch_up()

    def state_dict(self) -> dict[str, Any]:
        """A checkpoint that plain PyTorch loads: `model`, `optimizer`; `join(resume=...)` goes on from it."""
        if self._stepped is not None:
            self._stepped.catch_up()
        else:
            self.finish()
        return {"model": cloned(self.model), "optimizer": self._plain_state(), "version": self.version}

    def _plain_state(self) -> dict[str, Any]:
        if self._read is None:
            own: dict[str, Any] = self._inner.state_dict()
            return own
        held = self.fabric.state_dict(self._timeout)
        vectors = [arrays[ARRAY] for _, arrays in sorted(held["state"].items())]
        steps = int(held["version"]) // self._every
        return plain_state(self._inner, self._flat.parameters, vectors, steps)

    def finish(self) -> None:
        """Wait for the update on its way and take the freshest model; nobody waits for this worker then."""
        if self._stepped is not None:
            self._stepped.finish()
        elif self.mode != "sync":
            self._settle()
            self._pulling = None
            self._load(self.fabric.pull(self._timeout, aside=True))

    def wait_for_others(self, timeout: float | None = None) -> None:
        """Until all other workers have left; then this one has the model that all of them trained."""
        until = time.monotonic() + timeout if timeout is not None else None
        if self._stepped is not None:
            self._stepped.look_on(lambda: self.fabric.worker_count <= 1, timeout)
            return
        self.finish()
        while self.fabric.worker_count > 1:
            if until is not None and time.monotonic() >= until:
                raise TimeoutError(
                    f"{self.fabric.worker_count - 1} workers still train (after {timeout:g} s)"
                )
            time.sleep(0.05)
        self.finish()

    def close(self) -> None:
        """Finish, hand on what this member serves, and leave."""
        try:
            self.finish()
            if self.fabric.worker_count > 1:
                self.fabric.drain(self._timeout)
        finally:
            self.fabric.close()

    def __enter__(self) -> Training:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.fabric.close()


def join(
    model: torch.nn.Module,
    optimizer: OptimizerWish,
    mode: Mode = "async",
    *,
    max_delay: Bound | Unset = UNSET,
    staleness: int | Unset = UNSET,
    wait_for: int | Unset = UNSET,
    divergence: float | Unset | None = UNSET,
    shards: int | Unset = UNSET,
    codec: str | Unset = UNSET,
    pull: Pull | Unset = UNSET,
    clip_norm: float | None = None,
    local_steps: int | Unset = UNSET,
    outer: tuple[float, float] | Unset = UNSET,
    ahead: bool | Unset = UNSET,
    resume: Mapping[str, Any] | None = None,
    timeout: float = 60.0,
    fabric: Fabric | None = None,
    **membership: Any,
) -> Training:
    """Train a model with others. Under torchrun nothing else is needed; `membership` is what `mlfabric.join`
    takes, or `fabric` a membership one has already.

    `optimizer` is a pair of a name of torch.optim and its settings, an optimizer of the model's parameters,
    or what makes one from them. `mode`: "async" (servers step as updates come, none older than `max_delay`),
    "ssp" (the same, no worker more than `staleness` steps ahead of the slowest), "backup" (a step is the mean
    of the first `wait_for` gradients), "sync" (all ranks step together), "fastest" (those step together whose
    links are fast now, by gradients up to `max_delay` steps old), "rolling" (steps follow each other, each by
    the gradients that are there by then, and nobody waits; `ahead`: a gradient is computed where the model
    will be when it is applied; `local_steps`: workers step by themselves, and give how far they have come at
    least so many steps later), "local" (`local_steps` steps of one's own, then the `outer` learning rate and
    momentum on what they changed). `pull`: take the model after the update is in, alongside it, or overlapped
    with the next step's computation. `codec`: how gradients travel, see `Fabric.publish`.
    `resume`: a checkpoint, of `state_dict` or of plain PyTorch.
    """
    wishes = fitting(
        mode,
        {
            "max_delay": max_delay,
            "staleness": staleness,
            "wait_for": wait_for,
            "divergence": divergence,
            "shards": shards,
            "codec": codec,
            "pull": pull,
            "clip_norm": clip_norm,
            "local_steps": local_steps,
            "outer": outer,
            "ahead": ahead,
        },
    )
    joined = fabric if fabric is not None else join_fabric(timeout=timeout, **membership)
    try:
        return Training(joined, model, optimizer, wishes, timeout, resume)
    except BaseException as error:
        if isinstance(error, FabricError):
            joined.drain(min(timeout, REFUSED_S))  # the others go on without it
        joined.close()
        raise
