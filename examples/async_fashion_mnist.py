"""A small network on Fashion-MNIST, trained without a barrier: no rank waits for another one's step.

    torchrun --standalone --nproc-per-node=2 examples/async_fashion_mnist.py

Two ranks on one machine: about 30 s, and the last line reads "accuracy 0.88" or better. The images are
those of Debian's package dataset-fashion-mnist, or of a folder given by --data; where there are none, the
1,797 digits that scikit-learn carries are used instead ("accuracy 0.95" or better in about 15 s).
"""

import argparse
import gzip
import os
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import mlfabric.torch


def images(folder: Path, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and labels of one of the set's two parts, "train" or "t10k"."""
    parts = []
    for kind, header in (("images-idx3", 16), ("labels-idx1", 8)):
        path = folder / f"{name}-{kind}-ubyte.gz"
        parts.append(np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8, offset=header))
    x = torch.tensor(parts[0], dtype=torch.float32).view(-1, 1, 28, 28) / 255
    return x, torch.tensor(parts[1], dtype=torch.int64)


def digits() -> list[tuple[torch.Tensor, torch.Tensor]]:
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    x = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    x = nn.functional.interpolate(x, (28, 28))
    y = torch.tensor(labels)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    return [(x[part], y[part]) for part in (order[300:], order[:300])]


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 10),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--epochs", type=float, default=2.0)
    parser.add_argument("--mode", default="async", help="async, ssp, backup or sync")
    options = parser.parse_args()

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(rank)
    torch.set_num_threads(1)
    found = options.data.is_dir()
    train, test = (images(options.data, "train"), images(options.data, "t10k")) if found else digits()
    batch = 64 if found else 32
    steps = int(options.epochs * len(train[1]) / batch / size * (1 if found else 8))
    model = network()
    # Gradients are a step old here: Adam minds that less than momentum does.
    with mlfabric.torch.join(model, ("AdamW", {"lr": 2e-3}), options.mode) as training:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(training.optimizer, max(steps, 1))
        for step in range(steps):
            chosen = torch.randint(len(train[1]), (batch,))
            loss = cross_entropy(model(train[0][chosen]), train[1][chosen])
            loss.backward()
            training.step()
            schedule.step()
            if rank == 0 and step % 100 == 0:
                print(f"step {step} of {steps}, version {training.version}: loss {loss:.3f}", flush=True)
        if rank == 0:
            training.wait_for_others()
            model.eval()
            with torch.no_grad():
                right = (model(test[0]).argmax(1) == test[1]).float().mean()
            print(f"accuracy {right:.3f}", flush=True)


if __name__ == "__main__":
    main()
