"""Checkpoints from before some of what stands in them today are loaded all the same."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.accelerator.toys import bits, numbers, prepared
from tests.helpers.toys import toy_dataset, toy_model
from trainkit import Accelerator, DataLoaderConfiguration, Trainer, set_seed
from trainkit.callbacks import Checkpoint
from trainkit.checkpoint import CheckpointStore

LATER = {"order", "layouts", "added parameters", "scheduler advances", "processes"}
LATER_OF_A_PART = {"optimizer_states", "facts", "digest"}
LATER_OF_A_PROCESS = {"callbacks", "objects", "data", "model", "loaders", "accumulation"}


def without(value: Any, keys: set[str]) -> Any:
    """Return a tree without some keys of its mappings."""
    if isinstance(value, Mapping):
        return {key: without(inner, keys) for key, inner in value.items() if key not in keys}
    return [without(inner, keys) for inner in value] if isinstance(value, list) else value


def as_older(source: Path, directory: Path) -> Path:
    checkpoint = CheckpointStore(source.parent).open(source)
    parts = {name: checkpoint.read(name) for name in checkpoint.names()}
    parts["process-00000"] = without(parts["process-00000"], LATER_OF_A_PROCESS)
    for name in {"trainer", "loop"} & parts.keys():
        parts[name] = without(parts[name], LATER_OF_A_PART)
    metadata = without(checkpoint.manifest.metadata, LATER)
    metadata["run_id"] = checkpoint.manifest.run_id
    store = CheckpointStore(directory)
    return store.save(checkpoint.step, parts, metadata=metadata)


def fit(folder: Path, steps: int, resume: Any = None) -> nn.Module:
    torch.manual_seed(0)
    model = toy_model()
    Trainer(max_steps=steps, callbacks=[Checkpoint()], output_dir=folder).fit(
        model,
        DataLoader(toy_dataset(), 4, shuffle=True),
        optimizer=partial(torch.optim.AdamW, lr=0.1),
        loss_fn=nn.CrossEntropyLoss(),
        resume=resume,
        schedule=None if resume is None else "keep",
    )
    return model


def test_a_run_goes_on_from_an_older_checkpoint(tmp_path: Path) -> None:
    whole = fit(tmp_path / "whole", 6)
    fit(tmp_path / "cut", 4)
    (path,) = (tmp_path / "cut" / "checkpoints").glob("step-*")
    as_older(path, tmp_path / "older" / "checkpoints")
    assert bits(fit(tmp_path / "older", 6, "must")) == bits(whole)


def _own_loop(act: Callable[[Accelerator, int], None]) -> list[int]:
    set_seed(4)
    stateful = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(cpu=True, dataloader_config=stateful)
    model, optimizer, _, loader = prepared(accelerator, numbers(22))
    act(accelerator, 0)
    for count, (batch,) in enumerate(loader, 1):
        accelerator.backward(model(batch).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        act(accelerator, count)
    return bits(model)


def test_an_own_loop_goes_on_from_an_older_state(tmp_path: Path) -> None:
    def save(accelerator: Accelerator, count: int) -> None:
        if count == 3:
            accelerator.save_state(tmp_path / "state")

    def load(accelerator: Accelerator, count: int) -> None:
        if count == 0:
            accelerator.load_state(tmp_path / "older")

    whole = _own_loop(save)
    (path,) = (tmp_path / "state").glob("step-*")
    as_older(path, tmp_path / "older")
    assert _own_loop(load) == whole
