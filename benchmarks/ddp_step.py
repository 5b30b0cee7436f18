"""How long is a step of DDP on our backend beside Gloo's? Eight lab hosts train a ResNet-18 on both.

    python benchmarks/ddp_step.py --rate 120mbit                     equal links, some four minutes
    python benchmarks/ddp_step.py --rate 200mbit --slow 3=50mbit     one host at a quarter of the rate

Needs what `mlfabric lab` needs, and PyTorch. Both backends run in the same processes, by turns, on models of
their own; a step is forward, backward with the gradients' average, and the optimizer's step, timed by the
slowest rank. The share of computing in Gloo's step is printed: it should be 10 to 20 %, else take another
--rate or --batch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# What a step of ours may take, in steps of Gloo's: on equal links; with one host at a quarter of the rate.
EQUAL_BAR, SLOW_BAR = 1.05, 0.70
CONTENDERS = ("mlfabric", "gloo")
COMPUTE = "compute"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--hosts", type=int, default=8)
    parser.add_argument("--rate", default="120mbit", help="of every link")
    parser.add_argument("--slow", action="append", default=[], help="a host with another rate: 3=50mbit")
    parser.add_argument("--batch", type=int, default=2, help="images per rank and step")
    parser.add_argument("--warm", type=int, default=2, help="steps before those that count")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="in a turn")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


# --- a rank -----------------------------------------------------------------------------------------------


def resnet18() -> Any:
    """The layers of ResNet-18 for small images: 11.2 million parameters, 45 MB of gradients."""
    import torch
    from torch import nn

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self, into: int, out: int, stride: int) -> None:
            super().__init__()
            self.inner = nn.Sequential(
                nn.Conv2d(into, out, 3, stride, 1, bias=False),
                nn.BatchNorm2d(out),
                nn.ReLU(),
                nn.Conv2d(out, out, 3, 1, 1, bias=False),
                nn.BatchNorm2d(out),
            )
            same = stride == 1 and into == out
            self.shortcut = nn.Identity() if same else nn.Conv2d(into, out, 1, stride, bias=False)

        def forward(self, x: Any) -> Any:
            return torch.relu(self.inner(x) + self.shortcut(x))

    widths = (64, 64, 128, 256, 512)
    blocks = [
        Block(widths[stage] if first else widths[stage + 1], widths[stage + 1], 2 if first and stage else 1)
        for stage in range(4)
        for first in (True, False)
    ]
    stem = [nn.Conv2d(3, 64, 3, 2, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class Contender:
    """A model that is trained over one backend; `steps` are the times of the slowest rank."""

    def __init__(self, group: Any) -> None:
        import torch
        from torch.nn.parallel import DistributedDataParallel

        torch.manual_seed(0)
        self.model = DistributedDataParallel(resnet18(), process_group=group)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.steps: list[float] = []

    def step(self, x: Any, y: Any, alone: bool = False) -> float:
        """Seconds of the slowest rank; `alone`: without the average."""
        import torch
        import torch.distributed as dist

        dist.barrier()
        began = time.perf_counter()
        with self.model.no_sync() if alone else contextlib.nullcontext():
            torch.nn.functional.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        slowest = torch.tensor(time.perf_counter() - began)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        return float(slowest)

    def compute_alone(self, x: Any, y: Any, steps: int) -> list[float]:
        """The times of steps that average nothing and leave the model as it is."""
        (group,) = self.optimizer.param_groups
        rate, group["lr"] = group["lr"], 0.0
        times = [self.step(x, y, alone=True) for _ in range(steps)]
        group["lr"] = rate
        self.optimizer.state.clear()
        return times


def run_rank(wish: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    import mlfabric.torch  # noqa: F401

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    held = {
        "mlfabric": Contender(dist.new_group(backend="mlfabric")),
        "gloo": Contender(dist.group.WORLD),
    }
    torch.manual_seed(dist.get_rank())
    x, y = torch.randn(wish.batch, 3, 32, 32), torch.randint(10, (wish.batch,))
    for contender in held.values():
        for _ in range(wish.warm):
            contender.step(x, y)
    compute = held["gloo"].compute_alone(x, y, max(wish.steps, 2))
    for turn in range(wish.turns):
        for shift in range(len(CONTENDERS)):
            name = CONTENDERS[(turn + shift) % len(CONTENDERS)]
            held[name].steps += [held[name].step(x, y) for _ in range(wish.steps)]
    digests = {}
    for name, contender in held.items():
        flat = torch.cat([p.detach().reshape(-1) for p in contender.model.parameters()])
        others = [torch.empty_like(flat[:1000]) for _ in range(dist.get_world_size())]
        dist.all_gather(others, flat[:1000].clone())
        digests[name] = all(torch.equal(others[0], other) for other in others)
    size = sum(p.numel() * 4 for p in held["gloo"].model.parameters())
    if dist.get_rank() == 0:
        times = {name: contender.steps for name, contender in held.items()}
        print(json.dumps({**times, COMPUTE: compute, "gradient_bytes": size, "equal": digests}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


# --- the lab ----------------------------------------------------------------------------------------------


def run_lab(wish: argparse.Namespace) -> dict[str, Any]:
    from mlfabric.bench.hosts import LabWish
    from mlfabric.lab import Lab, RunOptions

    slow = {int(index): rate for index, _, rate in (one.partition("=") for one in wish.slow)}
    scenario = LabWish(wish.hosts, wish.rate, slow).scenario()
    with Lab(scenario) as lab, tempfile.TemporaryDirectory(prefix="mlfabric-ddp-") as folder:
        argv = [sys.executable, __file__, "--as-rank", f"--batch={wish.batch}", f"--warm={wish.warm}"]
        argv += [f"--turns={wish.turns}", f"--steps={wish.steps}"]
        result = lab.run(argv, RunOptions(folder=Path(folder) / "run", timeout_s=3600))
        said = [Path(rank.log).read_text(errors="replace").splitlines() for rank in result.ranks]
        found = next((line for line in said[0] if line.startswith("{")), None)
        if not result.ok or found is None:
            last = [lines[-1] for lines in said if lines]
            raise SystemExit(f"the ranks failed: {last[0] if last else 'they said nothing'}")
        answer: dict[str, Any] = json.loads(found)
        return answer


def main() -> None:
    wish = options()
    if wish.as_rank:
        run_rank(wish)
        return
    found = run_lab(wish)
    medians = {name: statistics.median(found[name]) for name in (*CONTENDERS, COMPUTE)}
    ratio = medians["mlfabric"] / medians["gloo"]
    bar = SLOW_BAR if wish.slow else EQUAL_BAR
    if wish.json:
        print(json.dumps({**found, "medians": medians, "ratio": ratio, "bar": bar}))
        return
    links = f"{wish.rate}" + "".join(f", host {one}" for one in wish.slow)
    print(f"{wish.hosts} hosts at {links}; {found['gradient_bytes'] / 1e6:.1f} MB of gradients")
    for name in CONTENDERS:
        each = ", ".join(f"{seconds:.2f}" for seconds in found[name])
        alike = "equal" if found["equal"][name] else "NOT EQUAL"
        print(f"{name:9} {medians[name]:6.2f} s a step ({each}); parameters of all ranks {alike}")
    print(
        f"compute   {medians[COMPUTE]:6.2f} s alone, {medians[COMPUTE] / medians['gloo']:.0%} of Gloo's step"
    )
    print(f"mlfabric takes {ratio:.3f} of Gloo's time; the bar is {bar:.2f}")


if __name__ == "__main__":
    main()
