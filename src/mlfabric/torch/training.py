"""Training without a barrier: `join(model, optimizer)`, then `step()` after each backward pass.

Servers on the members hold the model and step it; a worker offers its gradients and goes on with the freshest
model. In mode `sync` the ranks average their gradients by all-reduce and step by themselves instead; in mode
`local` they take several steps of their own and offer what these changed.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Literal

import torch

from mlfabric.api import Fabric, Pulling, Ticket
from mlfabric.api import join as join_fabric
from mlfabric.client import Committed, Model, Outcome
from mlfabric.errors import FabricError
from mlfabric.rules import SGD, Average, Pieces, Rule
from mlfabric.torch.flat import FlatModel
from mlfabric.torch.optimizers import OptimizerWish, make_optimizer, read_optimizer

Mode = Literal["async", "sync", "local"]
MODES = ("async", "sync", "local")
Pull = Literal["after", "alongside", "overlapped"]
PULLS = ("after", "alongside", "overlapped")
ARRAY = "model"
# These take values for changes; running statistics are averaged as they are.
LOSSY_FOR_STATISTICS = ("int8", "topk")
# DiLoCo's outer optimizer.
OUTER_LR = 0.7
OUTER_MOMENTUM = 0.9


class Training:
    """A worker's handle on a job. Use it as a context manager, or close() it."""

    def __init__(
        self,
        fabric: Fabric,
        model: torch.nn.Module,
        optimizer: OptimizerWish,
        mode: Mode,
        max_delay: int | Literal["auto", "none"],
        divergence: float | None,
        shards: int | None,
        codec: str,
        pull: Pull,
        clip_norm: float | None,
        local_steps: int,
        outer: tuple[float, float],
        workers: int,
        timeout: float,
    ) -> None:
        self.fabric = fabric
        self.model = model
        self.mode = mode
        self.steps = 0
        self.committed = 0
        self.dropped = 0
        self.delays: list[int] = []  # of committed updates, in updates
        self._timeout = timeout
        self._pull = pull
        self._clip = clip_norm
        self._local_steps = local_steps
        self._flat = FlatModel(model, fabric.empty)
        self._read = read_optimizer(optimizer, self._flat.parameters) if mode == "async" else None
        self._inner = self._read.instance if self._read else make_optimizer(optimizer, self._flat.parameters)
        self._ticket: Ticket | None = None
        self._pulling: Pulling | None = None
        self._base: Model | None = None
        if mode == "sync":
            self._same_start()
            return
        if self._flat.averaged and codec in LOSSY_FOR_STATISTICS:
            raise FabricError(
                f"codec {codec} would spoil the model's running statistics; take bfloat16 or float16"
            )
        rule = self._rule(workers, outer)
        fabric.publish(
            {ARRAY: self._flat.copy()},
            apply=rule,
            max_delay=max_delay,
            divergence=divergence,
            shards=shards or max(workers, 1),
            codec=codec,
            timeout=timeout,
        )
        self._load(fabric.pull(timeout))

    def __repr__(self) -> str:
        return f"<Training {self.mode} as {self.fabric.name}, {self.steps} steps, {self.dropped} dropped>"

    @property
    def version(self) -> int:
        """Updates in the model that this worker has now."""
        return self._base.version if self._base is not None else self.steps

    def step(self) -> Outcome | None:
        """Offer the gradients of the backward passes since the last step; go on with the freshest model.

        The outcome is that of this step's update, or of the one before where pulls are overlapped.
        """
        self.steps += 1
        if self.mode == "sync":
            self._step_together()
            return None
        if self.mode == "local":
            self._inner_step()
            if self.steps % self._local_steps:
                return None
        return self._offer()

    # --- asynchronous -----------------------------------------------------------------------------------

    def _rule(self, workers: int, outer: tuple[float, float]) -> Rule:
        flat = self._flat
        if self._read is not None:
            return self._read.rule(flat.trained, flat.averaged, workers)
        # Every worker's change is a step of its own here, where DiLoCo steps once by their mean.
        outer_rule = SGD(outer[0] / max(workers, 1), outer[1], nesterov=outer[1] > 0)
        if not flat.averaged:
            return outer_rule
        return Pieces(
            ((0, flat.trained, outer_rule), (flat.trained, flat.elements, Average(1 / max(workers, 1))))
        )

    def _offer(self) -> Outcome | None:
        before = self._settle()
        update = self._changed_locally() if self.mode == "local" else self._flat.take_update(self._clip)
        self._ticket = self.fabric.push({ARRAY: update}, base=self._base)
        if self._pull == "overlapped":
            pulled, self._pulling = self._pulling, self.fabric.pull_later()
            if pulled is not None:
                self._load(pulled.result(self._timeout))
            return before
        pulling = self.fabric.pull_later() if self._pull == "alongside" else None
        outcome = self._settle()
        self._load((pulling or self.fabric.pull_later()).result(self._timeout))
        return outcome

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

    def _inner_step(self) -> None:
        self._inner.step()
        self._inner.zero_grad(set_to_none=False)

    def _changed_locally(self) -> Any:
        """The way from here back to where we began, as a gradient; the statistics as they are."""
        assert self._base is not None
        update = self._base.arrays[ARRAY] - self._flat.values.numpy()
        update[self._flat.trained :] = self._flat.values.numpy()[self._flat.trained :]
        return update

    # --- together ---------------------------------------------------------------------------------------

    def _same_start(self) -> None:
        """All ranks begin with rank 0's values."""
        rank, _ = self.fabric.rank_and_size(self._timeout)
        values = self._flat.values.numpy()
        if rank:
            values[:] = 0
        self.fabric.all_reduce(values, self._timeout)

    def _step_together(self) -> None:
        update = self._flat.take_update(self._clip)
        self.fabric.all_reduce(update, self._timeout, combine="avg")
        at = 0
        for parameter in self._flat.parameters:
            piece = torch.from_numpy(update[at : at + parameter.numel()])
            assert parameter.grad is not None
            parameter.grad.copy_(piece.view_as(parameter))
            at += parameter.numel()
        self._flat.values[self._flat.trained :] = torch.from_numpy(update[self._flat.trained :])
        self._inner.step()
        self._inner.zero_grad(set_to_none=False)

    # --- state ------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """A checkpoint of the whole job: `model` for plain PyTorch's load_state_dict, `fabric` to resume."""
        if self.mode == "sync":
            return {"model": _cloned(self.model), "optimizer": self._inner.state_dict()}
        self.finish()
        return {"model": _cloned(self.model), "fabric": self.fabric.state_dict(self._timeout)}

    def finish(self) -> None:
        """Wait for the update on its way and take the freshest model."""
        if self.mode != "sync":
            self._settle()
            self._pulling = None
            self._load(self.fabric.pull(self._timeout))

    def close(self) -> None:
        """Finish, and leave."""
        try:
            self.finish()
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


def _cloned(model: torch.nn.Module) -> dict[str, Any]:
    """The parameters are views of one vector: a checkpoint holds tensors of its own."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def join(
    model: torch.nn.Module,
    optimizer: OptimizerWish,
    mode: Mode = "async",
    *,
    max_delay: int | Literal["auto", "none"] = "auto",
    divergence: float | None = 0.02,
    shards: int | None = None,
    codec: str = "float32",
    pull: Pull = "after",
    clip_norm: float | None = None,
    local_steps: int = 8,
    outer: tuple[float, float] = (OUTER_LR, OUTER_MOMENTUM),
    timeout: float = 60.0,
    fabric: Fabric | None = None,
    **membership: Any,
) -> Training:
    """Train a model with others. Under torchrun nothing else is needed; `membership` is what `mlfabric.join`
    takes, or `fabric` a membership one has already.

    `optimizer` is a pair of a name of torch.optim and its settings, an optimizer of the model's parameters,
    or what makes one from them. `mode`: "async" (servers step as updates come, none older than `max_delay`),
    "sync" (all ranks step together), "local" (`local_steps` steps of one's own, then the `outer` learning
    rate and momentum on what they changed). `pull`: take the model after the update is in, alongside it, or
    overlapped with the next step's computation. `codec`: how gradients travel, see `Fabric.publish`.
    """
    if mode not in MODES:
        raise FabricError(f"unknown mode {mode!r}; modes are {', '.join(MODES)}")
    if pull not in PULLS:
        raise FabricError(f"unknown pull {pull!r}; it is one of {', '.join(PULLS)}")
    if local_steps < 1:
        raise FabricError(f"local_steps is at least 1, not {local_steps}")
    joined = fabric if fabric is not None else join_fabric(**membership)
    try:
        return Training(
            joined,
            model,
            optimizer,
            mode,
            max_delay,
            divergence,
            shards,
            codec,
            pull,
            clip_norm,
            local_steps,
            outer,
            joined.expected,
            timeout,
        )
    except BaseException:
        joined.close()
        raise
