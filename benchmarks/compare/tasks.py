"""Models and data of the training workloads."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

__all__ = ["TASKS"]

WIDTH = 8  # of the input of the small model
POINTS = 2048  # of a signal
VOCABULARY, SEQUENCE = 512, 128


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 1))


def tensors(length: int) -> tuple[nn.Module, Dataset[Any]]:
    """A model so small that the loop around it is what takes the time; data in tensors."""
    model = _mlp(WIDTH)
    return model, TensorDataset(torch.randn(length, WIDTH), torch.randn(length, 1))


class Signals(Dataset[tuple[Tensor, Tensor]]):
    """Signals that are turned into features when they are asked for: the data are the work."""

    def __init__(self, length: int) -> None:
        generator = np.random.default_rng(0)
        self.signals = generator.standard_normal((length, POINTS), dtype=np.float32)
        self.window = np.hanning(POINTS).astype(np.float32)

    def __len__(self) -> int:
        return len(self.signals)

    def features(self, index: int | list[int]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the power in `WIDTH` bands, and the power altogether, of one signal or several."""
        power = np.abs(np.fft.rfft(self.signals[index] * self.window)) ** 2
        bands = power[..., :-1].reshape(*power.shape[:-1], WIDTH, -1).mean(-1)
        levels = np.log1p(bands).astype(np.float32)
        return levels, levels.sum(-1, keepdims=True)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = self.features(index)
        return torch.from_numpy(inputs), torch.from_numpy(target)


class BatchedSignals(Signals):
    """The same, also able to hand out the samples of a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        inputs, targets = map(torch.from_numpy, self.features(indices))
        return list(zip(inputs, targets, strict=True))


def signals(length: int) -> tuple[nn.Module, Dataset[Any]]:
    """A small model, and data that take work for each sample."""
    return _mlp(WIDTH), Signals(length)


def batched_signals(length: int) -> tuple[nn.Module, Dataset[Any]]:
    """The same with a data set that has `__getitems__`."""
    return _mlp(WIDTH), BatchedSignals(length)


class Texts(Dataset[dict[str, Tensor]]):
    """Random tokens for a causal language model."""

    def __init__(self, length: int) -> None:
        self.tokens = torch.randint(VOCABULARY, (length, SEQUENCE))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def gpt2(length: int) -> tuple[nn.Module, Dataset[Any]]:
    """A GPT-2 of 4 layers and width 256, without dropout, so that all peers compute the same."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=SEQUENCE, n_embd=256, n_layer=4, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config), Texts(length)


TASKS: Mapping[str, Callable[[int], tuple[nn.Module, Dataset[Any]]]] = {
    "mlp": tensors,
    "samples": signals,
    "batches": batched_signals,
    "gpt2": gpt2,
}
"""By name: from the number of samples to the model and the data."""
