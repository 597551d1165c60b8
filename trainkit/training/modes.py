"""Training and evaluation mode, switched by `train()` and `eval()` as in a loop by hand."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from weakref import WeakSet

import torch
from torch import nn

from trainkit.checkpoint.resharding.sharding_spec import local_part

_left_still: WeakSet[nn.Module] = WeakSet()
"""Modules that the latest `train()` of a model around them has left in evaluation mode.

Detectors keep batch norm so. The next `train()` decides anew; what a user put there by hand stays.
"""


@contextmanager
def in_training_mode(model: nn.Module) -> Iterator[None]:
    """Call `train()` of a model; one that was in evaluation mode is handed back in it.

    Weights are loaded and saved in it: adapters may be merged into them in the other.
    """
    before = {part: part.training for part in model.modules()}
    _train(model, _still_by_hand(model) if before[model] else ())
    try:
        yield
    finally:
        if not before[model]:
            model.eval()
            _set(before)


@contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Call `eval()` of a model, and `train()` afterwards if that is where it was.

    Adapters that merge into a weight for evaluation round it on both ways: the weights of training
    come back to the last bit.
    """
    before = {part: part.training for part in model.modules()}
    by_hand = _still_by_hand(model)
    weights = [
        (weight, weight.clone())
        for part in model.modules()
        if type(part).train is not nn.Module.train
        for parameter in part.parameters(recurse=False)
        for weight in [local_part(parameter.detach())]
    ]
    try:
        model.eval()
        weights = [(weight, value) for weight, value in weights if not torch.equal(weight, value)]
        yield
    finally:
        if before[model]:
            _train(model, by_hand)
        else:
            _set(before)
        for weight, value in weights:
            weight.copy_(value)


def _still_by_hand(model: nn.Module) -> list[nn.Module]:
    """Return what is in evaluation mode, and was not left there by `train()`."""
    return [part for part in model.modules() if not part.training and part not in _left_still]


def _train(model: nn.Module, still: Collection[nn.Module]) -> None:
    """Call `train()` of a model; `still` stays in evaluation mode."""
    model.train()
    modes = {part: part.training for part in model.modules()}
    for part, is_training in modes.items():
        (_left_still.discard if is_training else _left_still.add)(part)
    _set(modes | dict.fromkeys(still, False))


def _set(modes: Mapping[nn.Module, bool]) -> None:
    for part, is_training in modes.items():  # outer ones first: they take inner ones with them
        if part.training != is_training:
            part.train(is_training)
