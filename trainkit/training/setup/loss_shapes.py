"""Says what a loss function was given, where that does not fit it."""

import math
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainkit.basics import rng
from trainkit.errors import ConfigError
from trainkit.training.unchanged import kept


def refuse_all_pairs(loss_fn: Any, outputs: Tensor, targets: Tensor) -> None:
    """Raise where a loss compares the output of each sample with the targets of all; reads it.

    It does where outputs of shape [N, 1] and targets of shape [N], or the other way round, give the
    value of all pairs [N, N], and another one than where both have the same of their shapes.
    """
    values = []
    with torch.no_grad(), rng.preserved(), suppress(Exception):  # one of them may not fit it
        all_pairs = torch.broadcast_tensors(outputs, targets)  # type: ignore[no-untyped-call]
        alike = ((outputs, targets.reshape_as(outputs)), (outputs.reshape_as(targets), targets))
        for pair in ((outputs, targets), all_pairs, *alike):
            with kept(loss_fn):
                values.append(float(loss_fn(*pair)))
    if len(values) < 4:
        return
    given, of_pairs, meant, too = values
    is_equal = partial(math.isclose, rel_tol=1e-5)
    if is_equal(given, of_pairs) and is_equal(meant, too) and not is_equal(given, meant):
        raise ConfigError(
            f"`loss_fn` got outputs of shape {tuple(outputs.shape)} and targets of shape "
            f"{tuple(targets.shape)}, and compared each output with the targets of all samples: "
            f"the loss is {given:.4g}, and {meant:.4g} where their shapes are equal. Let the "
            "model return, or the data set yield, the shape of the other one, for example by "
            "`outputs.squeeze(-1)`."
        )


def note_given(error: Exception, outputs: Any, targets: Any) -> None:
    """Add to an error of a loss what it was given."""
    note = f"`loss_fn` got {_described(outputs)} as outputs, and {_described(targets)} as targets."
    if not isinstance(outputs, Tensor):
        entry = "outputs[0]"
        if isinstance(outputs, Mapping):
            entry = f"outputs[{next(iter(outputs), 'scores')!r}]"
        note += (
            " It gets what the model returns. Take out what it is to compare: "
            f"`loss_fn=lambda outputs, targets: loss({entry}, targets)`."
        )
    error.add_note(note)


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {[*value.shape]}"
    if isinstance(value, tuple | list):
        inside = ", ".join(map(_described, value[:4])) + ", ..." * (len(value) > 4)
        return f"a {type(value).__name__} of {len(value)} ({inside})"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with the keys {sorted(map(str, value))}"
    return f"a {type(value).__name__}"
