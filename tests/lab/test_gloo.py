"""PyTorch's own DDP on Gloo runs unmodified under `lab run`, at the speed its links allow."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import sys
from pathlib import Path

import pytest

from mlfabric.lab import RunOptions
from mlfabric.lab.testing import MakeLab
from mlfabric.scenario import parse

SCRIPT = """
import json, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(100, 100))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.manual_seed(dist.get_rank())
for step in range(3):
    loss = model(torch.randn(8, 100)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
weights = [torch.empty_like(model.module.weight) for _ in range(dist.get_world_size())]
dist.all_gather(weights, model.module.weight.detach())
equal = all(torch.equal(weights[0], other) for other in weights)
update, times = torch.ones(4_000_000), []
for repeat in range(6):
    dist.barrier()
    began = time.perf_counter()
    dist.all_reduce(update)
    times.append(time.perf_counter() - began)
if dist.get_rank() == 0:
    print(json.dumps({"equal": equal, "times": times}))
dist.destroy_process_group()
"""
EQUAL = 'network = { rate = "200mbit" }\nhosts = [{ name = "w", count = 8 }]'
ONE_SLOW = """
network = { rate = "200mbit" }
hosts = [{ name = "w", count = 7 }, { name = "slow", rate = "50mbit" }]
"""


def python_with_torch() -> str:
    if importlib.util.find_spec("torch") is not None:
        return sys.executable
    named = os.environ.get("MLFABRIC_TORCH_PYTHON")
    if named:
        return named
    pytest.skip("torch is not installed here; MLFABRIC_TORCH_PYTHON may name a Python that has it")


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("text", "low_s", "high_s"), [(EQUAL, 1.17, 1.35), (ONE_SLOW, 4.4, 5.8)])
def test_all_reduce_of_16_mb_takes_what_the_links_allow(
    make_lab: MakeLab, tmp_path: Path, text: str, low_s: float, high_s: float
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    lab = make_lab(parse(text), verify=True)
    result = lab.run([python_with_torch(), str(script)], RunOptions(folder=tmp_path / "run", timeout_s=300))
    assert result.ok, result.complaints
    said = json.loads(Path(result.ranks[0].log).read_text().strip().splitlines()[-1])
    assert said["equal"]
    # The first is a warm-up; a busy machine can only make an all-reduce slower.
    assert low_s <= statistics.median(sorted(said["times"][1:])[:3]) <= high_s
