"""A small transformer learns to write like Python's manual; ranks meet only after several steps of their own.

    torchrun --standalone --nproc-per-node=2 examples/local_language_model.py

Two ranks on one machine: about 40 s, and the last line reads "loss 2.2" or better, down from 4.8. The text is
what `help()` shows of Python's language, which comes with Python: 600,000 characters.
"""

import argparse
import os
import pydoc_data.topics

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import mlfabric.torch

CONTEXT = 64


class Block(nn.Module):
    """Attention to what was written before, then a network for each character."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.inner_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.asked = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.asked(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.inner(self.inner_norm(x))


class Writer(nn.Module):
    def __init__(self, letters: int, width: int = 96, blocks: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.letters = nn.Embedding(letters, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, letters))

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.letters(text) + self.places.weight[: text.shape[1]]))


def manual() -> tuple[torch.Tensor, int]:
    """The text as numbers of its letters, and how many letters there are."""
    text = "".join(pydoc_data.topics.topics.values())
    letters = sorted(set(text))
    numbers = {letter: number for number, letter in enumerate(letters)}
    return torch.tensor([numbers[letter] for letter in text]), len(letters)


def batch(text: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(text) - CONTEXT - 1, (size, 1))
    pieces = text[starts + torch.arange(CONTEXT + 1)]
    return pieces[:, :-1], pieces[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--local-steps", type=int, default=8)
    parser.add_argument("--outer", type=float, nargs=2, default=(1.0, 0.0), help="rate and momentum")
    options = parser.parse_args()

    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    text, letters = manual()
    split = int(0.9 * len(text))
    torch.manual_seed(rank)
    model = Writer(letters)
    optimizer = ("AdamW", {"lr": 2e-3})
    wishes = {"local_steps": options.local_steps, "outer": tuple(options.outer)}
    with mlfabric.torch.join(model, optimizer, "local", clip_norm=1.0, **wishes) as training:
        for step in range(options.steps):
            x, y = batch(text[:split], 16)
            loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            training.step()
            if rank == 0 and step % 40 == 0:
                print(f"step {step}: loss {loss:.2f}", flush=True)
        if rank == 0:
            training.wait_for_others()
            with torch.no_grad():
                x, y = batch(text[split:], 128)
                print(f"loss {cross_entropy(model(x).flatten(0, 1), y.flatten()):.2f}", flush=True)


if __name__ == "__main__":
    main()
