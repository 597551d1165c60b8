"""The lengths of items, and an order that puts items of similar length together."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import Sampler
from typing_extensions import override

from trainkit.basics.config import check_whole
from trainkit.errors import ConfigError

_BATCHES = 50  # of one chunk: more waste less, and mix less


def lengths_of(dataset: Any) -> list[int]:
    """Return how many tokens each item has, without those that its `attention_mask` hides."""
    columns = getattr(dataset, "column_names", None)
    if isinstance(columns, list) and "input_ids" in columns and "attention_mask" not in columns:
        return [len(row) for row in dataset["input_ids"]]  # of `datasets`: far faster
    if not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"A `{type(dataset).__name__}` has no length. Pass a data set that gives items by "
            "index, such as a list."
        )
    items = (read_item(dataset, index) for index in range(len(dataset)))
    masks = ((item["input_ids"], item.get("attention_mask")) for item in items)
    return [len(ids) if mask is None else int(torch.as_tensor(mask).sum()) for ids, mask in masks]


def read_item(dataset: Any, index: int) -> Mapping[str, Any]:
    """Return an item that has `input_ids`; ConfigError where it has none."""
    item = dataset[index]
    if not isinstance(item, Mapping) or "input_ids" not in item:
        kind = f"one with {sorted(item)}" if isinstance(item, Mapping) else f"a {type(item)}"
        raise ConfigError(
            f"Items must be mappings with `input_ids`, but item {index} of the data set is {kind}."
        )
    return item


def group_by_length(
    dataset: Any, batch_size: int, *, lengths: Sequence[int] | None = None
) -> Sampler[int]:
    """Return a sampler for batches of items of similar length, so that little is padded.

    The items are shuffled, sorted by length in chunks of 50 batches, and the batches shuffled, but
    for the longest, which is first: if it does not fit into memory, the first step says so.
    With trainkit the order follows from seed and epoch alone (rule 14); processes share it out and
    a resume goes on in it as with any sampler: `DataLoader(dataset, 8, sampler=...)`.

    Args:
        dataset: Items by index, mappings with `input_ids`; each is read once for its length.
        batch_size: Items that are to be alike: of a batch, on all processes together.
        lengths: Those of the items, where they are known: nothing is read.

    Raises:
        ConfigError: An argument cannot work.
    """
    check_whole("batch_size", batch_size)
    if lengths is not None and len(lengths) != len(dataset):
        raise ConfigError(
            f"`lengths` must have one for each item, but has {len(lengths)} for {len(dataset)}."
        )
    return _LengthSampler(lengths_of(dataset) if lengths is None else lengths, batch_size)


class _LengthSampler(Sampler[int]):
    def __init__(self, lengths: Sequence[int], batch_size: int) -> None:
        self._lengths, self._batch_size = torch.as_tensor(lengths), batch_size

    def __len__(self) -> int:
        return len(self._lengths)

    @override
    def __iter__(self) -> Iterator[int]:
        # torch's global generator: a run has it under the key of the epoch while a sampler runs.
        size, whole = self._batch_size, len(self) // self._batch_size
        chunks = torch.split(torch.randperm(len(self)), _BATCHES * size)
        ordered = torch.cat([c[self._lengths[c].argsort(descending=True)] for c in chunks])
        batches = ordered[: whole * size].view(whole, size)[torch.randperm(whole)]
        if whole:
            longest = int(self._lengths[batches[:, 0]].argmax())
            batches[[0, longest]] = batches[[longest, 0]]
        yield from torch.cat([batches.flatten(), ordered[whole * size :]]).tolist()
