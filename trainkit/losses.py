"""Losses over many classes, such as the words of a vocabulary, without all scores in memory."""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from trainkit.basics.config import check_whole
from trainkit.errors import ConfigError
from trainkit.types import IGNORED

__all__ = ["chunked_cross_entropy"]

Head: TypeAlias = Callable[[Tensor], Tensor] | Tensor


def chunked_cross_entropy(
    hidden: Tensor,
    head: Head,
    labels: Tensor,
    *,
    chunk_size: int = 1024,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the mean cross entropy of `head(hidden)`, of which only a chunk is ever in memory.

    Value and gradients are those of `cross_entropy(head(hidden), labels)`, but for the order of
    sums. The scores of a chunk of tokens are computed again in backward: the head takes half as
    long again. Below 32 bits they are widened to fp32. The mean is over the labels that count, and
    NaN where none does; a training step tells their number with it, as the weight:
    `StepOutput(loss, weight=(labels != -100).sum())`.

    Call it in the `forward` of the model: there FSDP has put the head together, and what DDP
    wraps returns a loss.

    Args:
        hidden: What the last layer gave, of shape [..., features]. Shift before: of causal models
            `hidden[:, :-1]` belongs to `labels[:, 1:]`.
        head: The module that makes scores [tokens, classes] of [tokens, features], or the weight
            [classes, features] of one without a bias, such as that of tied embeddings.
        labels: The class of each token, of shape [...], or `ignore_index`.
        chunk_size: Tokens at once.
        ignore_index: The label of what does not count.
        label_smoothing: The part of each target that is spread over all classes, in [0, 1].

    Raises:
        ConfigError: There is not one label for each token, or `chunk_size` is no whole number.
    """
    check_whole("chunk_size", chunk_size)
    if hidden.shape[:-1] != labels.shape:
        raise ConfigError(
            f"`labels` must have the shape of `hidden` without its last dimension, which is "
            f"{[*hidden.shape[:-1]]}, but has {[*labels.shape]}. Shift both alike, such as "
            "`hidden[:, :-1]` and `labels[:, 1:]`."
        )
    score = partial(functional.linear, weight=head) if isinstance(head, Tensor) else head

    def summed(rows: Tensor, targets: Tensor) -> Tensor:
        scores = score(rows)
        return functional.cross_entropy(
            scores.float() if scores.itemsize < 4 else scores,
            targets,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction="sum",
        )

    tokens, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    parts = [each.split(chunk_size) for each in (tokens, targets)]  # type: ignore[no-untyped-call]
    sums = [checkpoint(summed, *each, use_reentrant=False) for each in zip(*parts, strict=True)]
    return torch.stack(sums).sum() / (targets != ignore_index).sum()
