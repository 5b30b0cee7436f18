"""A worker that torchrun starts, and starts again: trains until a file appears, and logs every event.

torchrun ... elastic_worker.py FOLDER
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

import mlfabric.torch


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    name = os.environ["MLFABRIC_NAME"]
    (folder / f"{name}.pid").write_text(str(os.getpid()))
    model = torch.nn.Linear(32, 4)
    draw = torch.Generator().manual_seed(1)
    log = folder / f"{name}.{time.monotonic_ns()}.log"
    with mlfabric.torch.join(model, ("SGD", {"lr": 0.05}), expected=3, host=name, log=log) as training:
        while not (folder / "stop").exists():
            x = torch.randn(16, 32, generator=draw)
            (model(x) - x[:, :4]).square().mean().backward()
            training.step()
            time.sleep(0.01)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
