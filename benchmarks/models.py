"""The residual networks that examples, benchmarks and experiments train, written out in plain PyTorch.

ResNet-18 and ResNet-50 (He et al., arXiv 1512.03385) in their ImageNet form, with the stride of a bottleneck
in its 3x3 convolution as everyone has it today: 11,689,512 and 25,557,032 parameters at 1,000 classes. They
take images of any size from 32x32 on; the size of the gradients does not depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import relu

RESNET18_PARAMETERS = 11_689_512
RESNET50_PARAMETERS = 25_557_032
STAGE_WIDTHS = (64, 128, 256, 512)


class Residual(nn.Module):  # type: ignore[misc]
    """Convolutions, each with its norm, and a shortcut around them, projected where the shapes differ."""

    def __init__(self, into: int, convolutions: Sequence[nn.Conv2d], stride: int) -> None:
        super().__init__()
        out = convolutions[-1].out_channels
        self.convolutions = nn.ModuleList(convolutions)
        self.norms = nn.ModuleList(nn.BatchNorm2d(c.out_channels) for c in convolutions)
        self.shortcut = nn.Sequential()
        if stride != 1 or into != out:
            self.shortcut = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = x
        last = len(self.convolutions) - 1
        for i, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            inner = norm(convolution(inner))
            if i < last:
                inner = relu(inner)
        return relu(inner + self.shortcut(x))


def basic_block(into: int, width: int, stride: int) -> Residual:
    """Two 3x3 convolutions: the block of ResNet-18."""
    first = nn.Conv2d(into, width, 3, stride, padding=1, bias=False)
    return Residual(into, (first, nn.Conv2d(width, width, 3, padding=1, bias=False)), stride)


def bottleneck(into: int, width: int, stride: int) -> Residual:
    """1x1, 3x3, 1x1 with four times the channels at its end: the block of ResNet-50."""
    narrow = nn.Conv2d(into, width, 1, bias=False)
    middle = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
    return Residual(into, (narrow, middle, nn.Conv2d(width, 4 * width, 1, bias=False)), stride)


def resnet18(classes: int = 1000, channels: int = 3) -> nn.Module:
    stages = []
    into = STAGE_WIDTHS[0]
    for stage, width in enumerate(STAGE_WIDTHS):
        for block in range(2):
            stages.append(basic_block(into, width, 2 if stage and not block else 1))
            into = width
    return _network(stages, into, classes, channels)


def resnet50(classes: int = 1000, channels: int = 3) -> nn.Module:
    stages = []
    into = STAGE_WIDTHS[0]
    for stage, (width, depth) in enumerate(zip(STAGE_WIDTHS, (3, 4, 6, 3), strict=True)):
        for block in range(depth):
            stages.append(bottleneck(into, width, 2 if stage and not block else 1))
            into = 4 * width
    return _network(stages, into, classes, channels)


def _network(blocks: Sequence[nn.Module], out: int, classes: int, channels: int) -> nn.Module:
    """Stem, blocks and head, initialised as in the paper that made such networks trainable (He, fan out)."""
    width = STAGE_WIDTHS[0]
    model = nn.Sequential(
        nn.Conv2d(channels, width, 7, 2, padding=3, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1),
        *blocks,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(out, classes),
    )
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model
