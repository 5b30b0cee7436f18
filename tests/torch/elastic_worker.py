"""A worker that torchrun starts, and starts again: trains until a file appears, and logs every event.

torchrun ... elastic_worker.py FOLDER
"""

from __future__ import annotations

import time

BEGAN_S = time.time()  # before torch is loaded, which takes longer than all the rest

import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402

import mlfabric.torch  # noqa: E402


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    name = os.environ["MLFABRIC_NAME"]
    model = torch.nn.Linear(32, 4)
    draw = torch.Generator().manual_seed(1)
    (folder / f"{name}.life").write_text(f"{os.getpid()} {BEGAN_S} {time.time()}")
    log = folder / f"{name}.{time.monotonic_ns()}.log"
    with mlfabric.torch.join(model, ("SGD", {"lr": 0.05}), expected=4, host=name, log=log) as training:
        while not (folder / "stop").exists():
            x = torch.randn(16, 32, generator=draw)
            (model(x) - x[:, :4]).square().mean().backward()
            training.step()
            time.sleep(0.01)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
