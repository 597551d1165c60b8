"""What `accelerate.test_utils` gives to examples and their tests; nothing is downloaded."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trainkit.basics.device import accelerator_count, accelerator_kind
from trainkit.basics.packages import require


def get_backend() -> tuple[str, int, Callable[..., int]]:
    """Return the type of this machine's devices, how many, and what counts their memory."""
    kind = accelerator_kind()
    if kind is None:
        return "cpu", 1, int  # it returns 0
    return kind, accelerator_count(), torch.accelerator.memory_allocated


torch_device = get_backend()[0]


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
