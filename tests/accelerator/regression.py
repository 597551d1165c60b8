"""What the scripts that Accelerate tests itself with train: the parameters of a line."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from typing_extensions import override

from trainkit.accelerator.operations import gather

__all__ = ["RegressionDataset", "RegressionModel", "are_the_same_tensors"]


class RegressionDataset(Dataset[Any]):
    """`length` points near the line `a * x + b`."""

    def __init__(
        self, a: float = 2, b: float = 3, length: int = 64, seed: int | None = None
    ) -> None:
        numbers = np.random.default_rng(seed)
        self.length = length
        self.x = numbers.normal(size=(length,)).astype(np.float32)
        noise = numbers.normal(scale=0.1, size=(length,)).astype(np.float32)
        self.y = a * self.x + b + noise

    def __len__(self) -> int:
        return self.length

    @override
    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "y": self.y[index]}


class RegressionModel(nn.Module):
    """The line `a * x + b`, from these values on."""

    def __init__(self, a: float = 0, b: float = 0, double_output: bool = False) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(a).float())
        self.b = nn.Parameter(torch.tensor(b).float())

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Return the heights at `x`."""
        return x * self.a + self.b


def are_the_same_tensors(tensor: Tensor) -> bool:
    """Return whether all processes have an equal tensor."""
    rows = gather(tensor[None])
    return bool((rows == rows[0]).all())
