"""Trains, saves, resumes and exports, alone or as one process of several: `FOLDER`."""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainkit import Trainer, load_checkpoint_in_model
from trainkit.callbacks import Checkpoint, Evaluation, JSONLLogger, TimeLimit

FOLDER = Path(sys.argv[1])
DATA = TensorDataset(torch.linspace(-1, 1, 96).view(24, 4), torch.arange(24) % 2)


def fit(name: str, steps: int, **options: Any) -> tuple[Trainer, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    workers = int(name == "whole")  # which is started anew, with all its imports
    loader = DataLoader(DATA, batch_size=2, shuffle=True, num_workers=workers)
    callbacks = [
        Checkpoint(every_n_steps=2, keep_last=1),
        Evaluation(every_n_steps=4),
        JSONLLogger(),
        TimeLimit(minutes=30),
    ]
    trainer = Trainer(max_steps=steps, output_dir=FOLDER / name, callbacks=callbacks)
    adam = partial(torch.optim.AdamW, lr=0.1)
    data = loader, DataLoader(DATA, batch_size=2)
    trainer.fit(model, data, optimizer=adam, loss_fn=nn.CrossEntropyLoss(), **options)
    return trainer, model


def main() -> None:
    assert not hasattr(os, "fork")
    trainer, whole = fit("whole", 8)
    trainer.save_model(FOLDER / "exported")
    trainer.save_model(FOLDER / "exported")  # in place of the first
    fit("halves", 4)
    _, halves = fit("halves", 8, resume="must", schedule="rescale")
    exported = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    load_checkpoint_in_model(exported, FOLDER / "exported")
    for name, value in whole.state_dict().items():
        assert torch.equal(value, halves.state_dict()[name])
        assert torch.equal(value, exported.state_dict()[name])
    print("equal")


if __name__ == "__main__":
    main()
