"""One rank of a training job whose traffic is measured: real gradients, at the pace of a job of full size.

    python -m experiments.burstiness.train --way ddp-gloo --compute-s 10 --steps 6

The model computes real gradients of small images, so that several ranks fit two processors; a job of its own
would compute longer. Every convolution and the last layer therefore take their share of `--compute-s`, by the
multiplications they take on 224x224 images: a third of it forward, two thirds backward, where DDP sends what
is ready meanwhile, as it would there. What is computed sooner waits for the rest; `--compute-s 0` waits for
nothing. Each rank writes the times of its steps to `steps-RANK.json` in the run folder, by the clock that
stamps captured packets.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.models import resnet18, resnet50
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

WAYS = ("ddp-gloo", "ddp-mlfabric", "server-async", "server-sync")
FULL_IMAGE = 224
FORWARD_SHARE = 1 / 3
# Low: statistics of a batch of two are wild, and asynchronous steps see several updates at once.
LEARNING_RATE = 1e-3
PATIENCE_S = 600.0


def tiny() -> nn.Module:
    """A network of 2 MB for tests of the experiment itself."""
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 10))


MODELS: dict[str, Callable[[], nn.Module]] = {"resnet50": resnet50, "resnet18": resnet18, "tiny": tiny}


def multiplications(model: nn.Module) -> dict[nn.Module, int]:
    """What each layer with weights multiplies for one full image."""
    found: dict[nn.Module, int] = {}

    def note(layer: nn.Module, _: Any, out: torch.Tensor) -> None:
        weights: Any = layer.weight
        found[layer] = weights[0].numel() * out[0].numel()

    layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    handles = [layer.register_forward_hook(note) for layer in layers]
    model.eval()  # leaves running statistics alone
    with torch.no_grad():
        model(torch.zeros(1, 3, FULL_IMAGE, FULL_IMAGE))
    model.train()
    for handle in handles:
        handle.remove()
    return found


class Pace:
    """Has every layer of a step be done no sooner than when a slower machine would be."""

    def __init__(self, model: nn.Module, compute_s: float) -> None:
        self._due = 0.0
        counts = multiplications(model)
        total = sum(counts.values())
        for layer, count in counts.items():
            share_s = compute_s * count / total
            layer.register_forward_hook(self._waiting(FORWARD_SHARE * share_s))
            layer.register_full_backward_pre_hook(self._waiting((1 - FORWARD_SHARE) * share_s))

    def begin(self) -> None:
        """A step begins."""
        self._due = time.monotonic()

    def _waiting(self, seconds: float) -> Callable[..., None]:
        def wait(*_: Any) -> None:
            self._due += seconds
            time.sleep(max(self._due - time.monotonic(), 0.0))

        return wait


def batches(size: int, image: int, seed: int) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Images of noise around one picture per class: enough to have gradients that mean something."""
    pictures = torch.randn(10, 3, image, image, generator=torch.Generator().manual_seed(7))
    own = torch.Generator().manual_seed(seed)

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.randint(10, (size,), generator=own)
        return pictures[labels] + torch.randn(size, 3, image, image, generator=own), labels

    return draw


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--way", choices=WAYS, default="ddp-mlfabric")
    parser.add_argument("--model", choices=list(MODELS), default="resnet50")
    parser.add_argument("--compute-s", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--image", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--bucket-mb", type=float, default=25.0)
    parser.add_argument("--delay-s", type=float, default=0.0, help="wait so long before the first step")
    options = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = MODELS[options.model]()
    pace = Pace(model, options.compute_s)
    rank = int(os.environ["RANK"])
    draw = batches(options.batch, options.image, rank)
    train = _ddp if options.way.startswith("ddp-") else _servers
    times, losses = train(model, draw, pace, options)
    parameters = sum(p.numel() for p in model.parameters())
    record = {"rank": rank, "parameters": parameters, "begins_s": times, "losses": losses}
    (_folder() / f"steps-{rank}.json").write_text(json.dumps(record) + "\n")
    print(f"{options.way}: {len(times) - 1} steps, loss {losses[0]:.2f} to {losses[-1]:.2f}", flush=True)


def _ddp(
    model: nn.Module,
    draw: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    pace: Pace,
    options: argparse.Namespace,
) -> tuple[list[float], list[float]]:
    dist.init_process_group(options.way.removeprefix("ddp-"))
    wrapped = DistributedDataParallel(
        model, bucket_cap_mb=options.bucket_mb, gradient_as_bucket_view=True, broadcast_buffers=False
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def step() -> float:
        pace.begin()
        x, y = draw()
        loss = cross_entropy(wrapped(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    try:
        return _timed(step, options.steps, options.delay_s)
    finally:
        dist.destroy_process_group()


def _servers(
    model: nn.Module,
    draw: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    pace: Pace,
    options: argparse.Namespace,
) -> tuple[list[float], list[float]]:
    from mlfabric.torch import join

    mode = options.way.removeprefix("server-")
    training = join(model, ("SGD", {"lr": LEARNING_RATE}), mode, divergence=None, timeout=PATIENCE_S)

    def step() -> float:
        pace.begin()
        x, y = draw()
        loss = cross_entropy(model(x), y)
        loss.backward()
        training.step()
        return float(loss.detach())

    try:
        found = _timed(step, options.steps, options.delay_s)
        training.finish()
        _wait_for_others()  # what who leaves first hands on is no traffic of a step
        return found
    finally:
        training.fabric.close()


def _folder() -> Path:
    return Path(os.environ.get("MLFABRIC_RUN_FOLDER", "."))


def _wait_for_others() -> None:
    """Hosts of a lab share their files: each rank says there that it is through, and waits for the others."""
    (_folder() / f"through-{os.environ['RANK']}").touch()
    give_up = time.monotonic() + PATIENCE_S
    while not all((_folder() / f"through-{rank}").exists() for rank in range(int(os.environ["WORLD_SIZE"]))):
        if time.monotonic() > give_up:
            raise TimeoutError("some ranks are not through")
        time.sleep(0.05)


def _timed(step: Callable[[], float], steps: int, delay_s: float) -> tuple[list[float], list[float]]:
    """When each step began and the last one ended, in seconds since 1970; and the losses."""
    time.sleep(delay_s)
    times, losses = [time.time()], []
    for _ in range(steps):
        losses.append(step())
        times.append(time.time())
    return times, losses


if __name__ == "__main__":
    main()
