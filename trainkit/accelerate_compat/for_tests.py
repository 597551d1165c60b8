"""What `accelerate.test_utils` gives to examples and their tests; nothing is downloaded."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from trainkit.accelerator.operations import gather
from trainkit.device import accelerator_count, accelerator_kind
from trainkit.packages import require


class RegressionDataset(Dataset[Any]):
    """`length` points near the line `a * x + b`."""

    def __init__(
        self, a: float = 2, b: float = 3, length: int = 64, seed: int | None = None
    ) -> None:
        require("numpy", "`RegressionDataset`")
        import numpy as np

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


def get_backend() -> tuple[str, int, Callable[..., int]]:
    """Return the type of this machine's devices, how many, and what counts their memory."""
    kind = accelerator_kind()
    if kind is None:
        return "cpu", 1, int  # it returns 0
    return kind, accelerator_count(), torch.accelerator.memory_allocated


torch_device, device_count, memory_allocated_func = get_backend()


def are_the_same_tensors(tensor: Tensor) -> bool:
    """Return whether all processes have an equal tensor."""
    rows = gather(tensor[None])
    return bool((rows == rows[0]).all())


def mocked_dataloaders(accelerator: Any, batch_size: int = 16) -> tuple[Any, Any]:
    """Return small loaders of pairs of sentences with a label, as examples train on in tests.

    Their tokens are drawn, always the same; batches have 2 and 1 rows.
    """
    return _loader(32, 2, _pairs, shuffle=True), _loader(16, 1, _pairs)


def mocked_dataloaders_for_autoregressive_models(
    accelerator: Any, batch_size: int = 16
) -> tuple[Any, Any]:
    """Return small loaders of texts, whose labels are their next tokens."""
    return _loader(32, 2, _texts), _loader(16, 1, _texts)


def _loader(rows: int, batch_size: int, collate: Any, shuffle: bool = False) -> Any:
    drawn = torch.Generator().manual_seed(rows)
    lengths = torch.randint(8, 24, (rows,), generator=drawn).tolist()
    # Below the 28,996 tokens of "bert-base-cased", above those with a meaning.
    samples: Any = [torch.randint(106, 28_996, (n,), generator=drawn) for n in lengths]
    return DataLoader(samples, batch_size, shuffle, collate_fn=collate)


def _pairs(rows: list[Tensor]) -> Any:
    labels = torch.stack([row[0] % 2 for row in rows])
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return _batch(ids, labels, token_type_ids=torch.zeros_like(ids))


def _texts(rows: list[Tensor]) -> Any:
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return _batch(ids[:, :-1], ids.masked_fill(ids == 0, -100)[:, 1:])


def _batch(ids: Tensor, labels: Tensor, **others: Tensor) -> Any:
    require("transformers", "`mocked_dataloaders`")
    from transformers import BatchEncoding  # has the method `to`, which examples call

    mask = (ids != 0).long()
    return BatchEncoding({"input_ids": ids, "attention_mask": mask, **others, "labels": labels})
