"""Documents of different lengths put together in rows of one length, kept apart from each other."""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset
from typing_extensions import override

from trainkit.basics.config import check_whole
from trainkit.data.lengths import lengths_of, read_item
from trainkit.errors import ConfigError, DataError
from trainkit.types import IGNORED

Longer = Literal["error", "truncate", "split", "drop"]


class Document(NamedTuple):
    """A part of an item: tokens `start` to `stop`."""

    item: int
    start: int
    stop: int


def pack(
    dataset: Any,
    max_length: int,
    *,
    longer: Longer = "error",
    pad_id: int = 0,
    mask: bool | torch.dtype = True,
) -> "PackedDataset":
    """Return a data set of rows of `max_length` tokens, each made of whole items of `dataset`.

    A row is a dict of tensors of the shape (max_length,): what the items hold for each token, and

    - `position_ids`, which begin anew with each item.
    - `labels`, by default the tokens; the first of each item is ignored, as none comes before it.
    - `attention_mask`, of the shape (1, max_length, max_length): 0 where a token may look at
      another, at those before it in its own item, else minus infinity.

    So every token has the loss and the gradient that it has in a batch of the same items, and
    counts the same (rule 6). The place that is left in a row is an item of its own whose labels
    are ignored. Items go where they leave the least place, the longest first; a row has them in
    their order in the data set. Rows are the same in every epoch: let the loader shuffle them.

    Args:
        dataset: Items by index, mappings with `input_ids`, and perhaps `labels` and others with a
            value for each token. Tokens that their `attention_mask` hides are left out. Every item
            is read once for its length.
        max_length: Tokens of a row.
        longer: What becomes of items with more tokens: "error"; "truncate": their end is left out;
            "split": they become several items; "drop".
        pad_id: The token that fills a row up.
        mask: The dtype of `attention_mask`; True: float32, which models of transformers take in
            all dtypes but float64: these need `torch.float64`. `torch.bool`, True where a token may
            look, is what torch's own attention takes. False leaves the mask out, which has the
            square of the tokens of a row: for long rows, and for flash attention, which takes none.
            Models of transformers then keep items apart by their positions, but only those whose
            mask is made from positions (not BLOOM, Falcon, MPT), and only with `use_cache=False`.
            The default steps pass that; elsewhere set `model.config.use_cache = False`.

    Raises:
        ConfigError: An argument cannot work, or `dataset` has no lengths.
        DataError: An item is longer than `max_length`, or none is left.
    """
    check_whole("max_length", max_length)
    if longer not in get_args(Longer):
        raise ConfigError(f"`longer` must be one of {get_args(Longer)}, but is {longer!r}.")
    lengths = lengths_of(dataset)
    parts = (_documents(item, n, max_length, longer) for item, n in enumerate(lengths))
    documents = [document for part in parts for document in part]
    if not documents:
        raise DataError(f"None of the {len(dataset)} items has tokens that could be packed.")
    rows = _rows(documents, max_length)
    return PackedDataset(dataset, lengths, rows, max_length, pad_id, mask)


class PackedDataset(Dataset[dict[str, Tensor]]):
    """What `pack` returns; items are read when a row is.

    Attributes:
        padding: Share of places that hold no token of an item, from 0 to below 1.
    """

    def __init__(
        self,
        dataset: Any,
        lengths: Sequence[int],
        rows: Sequence[Sequence[Document]],
        max_length: int,
        pad_id: int,
        mask: bool | torch.dtype,
    ) -> None:
        self._dataset = dataset
        self._lengths = lengths
        self._rows = rows
        self._length = max_length
        self._pad_id = pad_id
        self._mask = torch.float32 if mask is True else mask or None
        tokens = sum(document.stop - document.start for row in rows for document in row)
        self.padding = 1 - tokens / (len(rows) * max_length)

    def __len__(self) -> int:
        return len(self._rows)

    @override
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        documents = self._rows[index]
        parts = [self._read(document) for document in documents]
        names = parts[0].keys()
        if odd := [d.item for d, p in zip(documents, parts, strict=True) if p.keys() != names]:
            raise DataError(
                f"Item {odd[0]} does not have what item {documents[0].item} has, {sorted(names)}. "
                "Items of a row must hold the same."
            )
        lengths = [document.stop - document.start for document in documents]
        lengths += [left := self._length - sum(lengths)]
        fills = {"input_ids": self._pad_id, "labels": IGNORED}
        row = {
            name: F.pad(torch.cat([part[name] for part in parts]), (0, left), value=fills.get(name))
            for name in names
        }
        row["position_ids"] = torch.cat([torch.arange(length) for length in lengths])
        if self._mask is not None:
            row["attention_mask"] = _mask(lengths, self._mask)
        return row

    def _read(self, document: Document) -> dict[str, Tensor]:
        """Return what a document holds for each of its tokens."""
        item, start, stop = document
        given = {n: v for n, v in read_item(self._dataset, item).items() if n != "position_ids"}
        values = {n: torch.as_tensor(v) for n, v in given.items() if not isinstance(v, str)}
        shape = values["input_ids"].shape
        if odd := [n for n in given if n not in values or values[n].shape != shape]:
            raise DataError(
                f"`{odd[0]}` of item {item} has not one value for each of its {shape.numel()} "
                "tokens. Leave it out of items that are packed."
            )
        if (seen := values.pop("attention_mask", None)) is not None:
            values = {name: value[seen.bool()] for name, value in values.items()}
        if len(values["input_ids"]) != self._lengths[item]:
            raise DataError(
                f"Item {item} has {len(values['input_ids'])} tokens, but had {self._lengths[item]} "
                "when it was packed. What is random in a data set must not change lengths."
            )
        part = {name: value[start:stop] for name, value in values.items()}
        part["labels"] = part.get("labels", part["input_ids"]).clone()
        part["labels"][0] = IGNORED
        return part


def _documents(item: int, length: int, row_length: int, longer: Longer) -> Iterator[Document]:
    if length <= row_length:
        if length:
            yield Document(item, 0, length)
    elif longer == "error":
        raise DataError(
            f"Item {item} has {length} tokens, more than the {row_length} of a row. Raise "
            '`max_length`, or say what becomes of them: `longer="truncate"`, "split" or "drop".'
        )
    elif longer == "truncate":
        yield Document(item, 0, row_length)
    elif longer == "split":
        for start in range(0, length, row_length):
            yield Document(item, start, min(start + row_length, length))


def _rows(documents: list[Document], row_length: int) -> list[list[Document]]:
    """Return rows of documents: each where it leaves the least place, the longest first."""
    rows: list[list[Document]] = []
    open_rows: dict[int, list[int]] = {}  # by the place that is left
    rooms: list[int] = []  # the keys of `open_rows`, in order
    for document in sorted(documents, key=lambda d: d.start - d.stop):
        length = document.stop - document.start
        index = bisect_left(rooms, length)
        if index == len(rooms):
            row, left = len(rows), row_length
            rows.append([])
        else:
            left = rooms[index]
            row = open_rows[left].pop()
            if not open_rows[left]:
                del open_rows[left], rooms[index]
        rows[row].append(document)
        if left := left - length:
            if left not in open_rows:
                insort(rooms, left)
            open_rows.setdefault(left, []).append(row)
    return [sorted(row) for row in rows]


def _mask(lengths: list[int], dtype: torch.dtype) -> Tensor:
    """Return which token may look at which: at those before it in its own item."""
    item = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    allowed = torch.tril(item[:, None] == item[None, :])[None]
    if dtype == torch.bool:
        return allowed
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, float("-inf"))
