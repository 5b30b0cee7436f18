"""A small ResNet on handwritten digits by DDP; the word "mlfabric" is all that differs from Gloo.

    torchrun --standalone --nproc-per-node=2 examples/ddp_resnet.py

Two ranks on one machine: about 20 s, and the last line reads "accuracy 0.97" or better.
"""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, relu
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Block(nn.Module):
    """Two convolutions and a shortcut around them."""

    def __init__(self, into: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(into, out, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(out)
        self.second = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(out)
        self.shortcut = nn.Sequential()
        if stride != 1 or into != out:
            self.shortcut = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = relu(self.first_norm(self.first(x)))
        return relu(self.second_norm(self.second(inner)) + self.shortcut(x))


def resnet(width: int = 16) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        Block(width, width),
        Block(width, 2 * width, stride=2),
        Block(2 * width, 4 * width, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


def digits() -> tuple[TensorDataset, TensorDataset]:
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    return TensorDataset(x[order[300:]], y[order[300:]]), TensorDataset(x[order[:300]], y[order[:300]])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="mlfabric")
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group(options.backend)
    train, test = digits()
    sampler = DistributedSampler(train, shuffle=True)
    loader = DataLoader(train, batch_size=64, sampler=sampler)
    model = DistributedDataParallel(resnet())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)
    model.eval()
    with torch.no_grad():
        x, y = test[:]
        right = (model.module(x).argmax(1) == y).float().mean()
    dist.all_reduce(right, op=dist.ReduceOp.AVG)
    if dist.get_rank() == 0:
        print(f"accuracy {right.item():.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
