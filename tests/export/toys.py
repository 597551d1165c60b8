"""Models to export, small and whole."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn


class Tied(nn.Module):
    """A tied embedding and head, a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("mask", torch.ones(6), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens) * self.scale * self.mask
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        result: torch.Tensor = self.head(hidden)
        return result


TOKENS = torch.arange(8).reshape(2, 4)


def tied(seed: int = 0) -> Tied:
    """Return the model with fixed weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Tied()


def gpt2(seed: int = 0) -> Any:
    """Return a tiny GPT-2 of transformers, with a tied head."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = GPT2Config(
            vocab_size=17, n_positions=16, n_embd=8, n_layer=2, n_head=2, n_inner=16
        )
        model: Any = GPT2LMHeadModel(config)
        return model.eval()


def read_export(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of an export by safetensors alone, and check that its index is right."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return load_file(folder / "model.safetensors")
    weight_map = json.loads(index.read_text())["weight_map"]
    shards = {file: load_file(folder / file) for file in set(weight_map.values())}
    assert {name: file for file, held in shards.items() for name in held} == weight_map
    return {name: shards[file][name] for name, file in weight_map.items()}
