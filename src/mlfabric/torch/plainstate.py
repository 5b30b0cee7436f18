"""Checkpoints of plain PyTorch, and the optimizer's state between them and servers, which hold it as vectors
beside the model's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mlfabric.errors import FabricError
from mlfabric.numerics import Vector

# By optimizer: what a rule's vectors are called in PyTorch, in the rule's order.
NAMES: Mapping[str, tuple[str, ...]] = {
    "SGD": ("momentum_buffer",),
    "Adam": ("exp_avg", "exp_avg_sq"),
    "AdamW": ("exp_avg", "exp_avg_sq"),
    "Adagrad": ("sum",),
    "RMSprop": ("square_avg", "momentum_buffer"),
}
COUNTS_STEPS = frozenset({"Adam", "AdamW", "Adagrad", "RMSprop"})


def read_state(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.nn.Parameter],
    vectors: int,
    elements: int,
) -> tuple[list[Vector], int]:
    """The vectors that a rule needs, filled with what the optimizer holds, and how many steps it has made."""
    names = NAMES[type(optimizer).__name__][:vectors]
    found = [np.zeros(elements, np.float32) for _ in range(vectors)]
    steps = 0
    at = 0
    begun = _initial_sums(optimizer)
    for parameter in parameters:
        held = optimizer.state.get(parameter, {})
        steps = max(steps, int(held.get("step", 0)))
        for vector, name in zip(found, names, strict=False):
            if held.get(name) is not None:
                part = held[name].detach().reshape(-1).numpy()
                vector[at : at + parameter.numel()] = part - begun.get(id(parameter), 0.0)
        at += parameter.numel()
    return found, steps


def plain_state(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.nn.Parameter],
    vectors: Sequence[Vector],
    steps: int,
) -> dict[str, Any]:
    """What `optimizer.state_dict()` would be if it had made these steps itself."""
    name = type(optimizer).__name__
    places: dict[int, tuple[int, int]] = {}
    at = 0
    for parameter in parameters:
        places[id(parameter)] = (at, at + parameter.numel())
        at += parameter.numel()
    begun = _initial_sums(optimizer)
    begun_training = steps > 0 or any(vector.any() for vector in vectors)
    state: dict[int, dict[str, Any]] = {}
    index = -1
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            index += 1
            if id(parameter) not in places or not begun_training:
                continue
            held: dict[str, Any] = {"step": torch.tensor(float(steps))} if name in COUNTS_STEPS else {}
            start, stop = places[id(parameter)]
            for key, vector in zip(NAMES[name], vectors, strict=False):
                part = torch.from_numpy(vector[start:stop] + np.float32(begun.get(id(parameter), 0.0)))
                held[key] = part.view_as(parameter).clone()
            state[index] = held
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}


def set_state(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[torch.nn.Parameter],
    vectors: Sequence[Vector],
    steps: int,
) -> None:
    """Have the optimizer hold what it would after these steps; its groups stay as they are."""
    state = plain_state(optimizer, parameters, vectors, steps)["state"]
    everything = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(everything):
        if index in state:
            optimizer.state[parameter] = state[index]
        else:
            optimizer.state.pop(parameter, None)


def _initial_sums(optimizer: torch.optim.Optimizer) -> dict[int, float]:
    """Adagrad's sums begin with a setting, which a rule adds where it uses them."""
    return {
        id(parameter): float(group.get("initial_accumulator_value", 0.0))
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def cloned(model: torch.nn.Module) -> dict[str, Any]:
    """The parameters are views of one vector: a checkpoint holds tensors of its own."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def load_plain(resume: Mapping[str, Any], model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if "model" not in resume:
        raise FabricError("a checkpoint to resume is a dict with `model` and, if you have it, `optimizer`")
    try:
        model.load_state_dict(resume["model"])
        if resume.get("optimizer") is not None:
            optimizer.load_state_dict(resume["optimizer"])
    except (RuntimeError, ValueError, KeyError) as error:
        raise FabricError(f"the checkpoint does not fit: {error}") from None
