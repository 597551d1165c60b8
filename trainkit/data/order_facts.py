"""What decides the order of the samples, in plain values that a checkpoint can hold."""

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from trainkit.basics.device import memory_of
from trainkit.data.order import is_plain, whole_numbers

_SETTINGS = {"replacement": "replacement", "num_samples": "samples drawn", "drop_last": "drop_last"}
"""Attributes of samplers that decide the order, and what they are called."""

CHANGED = (
    "the sampler gives another order for the latest epoch: its weights, its seed or its data "
    "changed, or the batches that make a step"
)
OWN = (
    "the sampler keeps a random state of its own, and does not come to the checkpoint's order: key "
    "it by `set_epoch`, let it draw from its `.generator`, seed that state where it is made, or "
    "give it `state_dict` and `load_state_dict` and register it for checkpointing"
)


def order_facts(loader: Any) -> dict[str, Any]:
    """Return what is known of how a loader orders its samples, by names for people.

    Facts never suffice for samplers of the user's own: for those there is `digest_of`.
    """
    if not isinstance(loader, DataLoader):
        return {"loader": type(loader).__name__}
    if isinstance(loader.dataset, IterableDataset):
        return {"data": "iterable"}
    facts: dict[str, Any] = {"data": "map-style"}
    batch_sampler: Any = loader.batch_sampler
    sampler = loader.sampler if batch_sampler is None else getattr(batch_sampler, "sampler", None)
    if batch_sampler is None or not is_plain(batch_sampler):
        facts["batch sampler"] = batch_sampler and type(batch_sampler).__name__
    if sampler is not None:
        facts["sampler"] = type(sampler).__name__
    for part in (sampler, batch_sampler):
        for attribute, name in _SETTINGS.items():
            # Not those of a `RandomSampler` that follow the length of the data set.
            value = getattr(part, f"_{attribute}", getattr(part, attribute, None))
            if isinstance(value, bool | int):
                facts[name] = value
    return facts


def changed_facts(
    saved: Mapping[str, Any],
    present: Mapping[str, Any],
    where: tuple[str, str] = ("in the checkpoint", "now"),
) -> list[str]:
    """Return, in words, which facts differ; `where` says where the two are."""
    return [
        f"{name}: {saved.get(name)} {where[0]}, {present.get(name)} {where[1]}"
        for name in dict.fromkeys([*saved, *present])
        if saved.get(name) != present.get(name)
    ]


def run_to(digest: str, runs: int, draw: Callable[[], str | None]) -> str:
    """Let a sampler run until it gives an order; return why it does not, in words.

    One that keeps a random state of its own gives it when it has run as often as it had.

    Args:
        runs: How often the sampler had run, this order included.
        draw: Runs it, and returns the digest of what it gives.
    """
    drawn: str | None = None
    for _ in range(max(2, runs)):
        earlier = drawn
        drawn = draw()
        if drawn == digest:
            return ""
        if drawn == earlier:
            return CHANGED
    return OWN


def digest_of(order: Tensor | Sequence[Any]) -> str | None:
    """Return a digest of the indices of an epoch; None of what is not made of plain values."""
    data = order if isinstance(order, Tensor) else whole_numbers(order)
    if data is None and {*map(type, order)} == {Tensor}:
        with suppress(RuntimeError):  # of several shapes
            data = torch.stack(list(order))
    if data is not None:
        content: Any = memory_of(data.contiguous())
    else:
        try:
            content = _bytes_of(order)
        except (TypeError, struct.error):
            return None
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _bytes_of(value: Any) -> bytes:
    """Return what tells a nesting of plain values from others; digests in checkpoints are of it.

    Raises:
        TypeError: There is something else.
    """
    kind = type(value)
    if kind is list or kind is tuple:
        tag = b"l" if kind is list else b"t"
        return tag + struct.pack("<Q", len(value)) + b"".join(map(_bytes_of, value))
    if kind is int:
        return b"i" + struct.pack("<q", value)
    if kind is float:
        return b"f" + struct.pack("<d", value)
    if kind is str:
        return _counted(b"s", value.encode("utf-8", "surrogatepass"))
    if kind is bytes:
        return _counted(b"b", value)
    if kind is Tensor:
        name = str(value.dtype).removeprefix("torch.")
        return _array(b"x", name, value.shape, bytes(memory_of(value.cpu().contiguous())))
    if hasattr(value, "dtype") and hasattr(value, "tobytes"):  # a number of NumPy
        return _array(b"g", value.dtype.str, value.shape, value.tobytes())
    raise TypeError(f"a {kind.__name__} is no plain value")


def _counted(tag: bytes, data: bytes) -> bytes:
    return tag + struct.pack("<Q", len(data)) + data


def _array(tag: bytes, dtype: str, shape: Sequence[int], data: bytes) -> bytes:
    sizes = struct.pack(f"<B{len(shape)}Q", len(shape), *shape)
    return _counted(tag, dtype.encode()) + sizes + _counted(b"", data)
