"""Stop in the middle of an epoch, and go on as if nothing had happened.

    python examples/own_loop/resuming.py --output-dir runs/resuming --stop-after 17
    python examples/own_loop/resuming.py --output-dir runs/resuming

The second call ends with the same weights as one that was never stopped.
"""

import argparse
from contextlib import suppress
from pathlib import Path

import torch
from data import SAMPLES, checksum, make_data, make_model
from torch import nn
from torch.utils.data import DataLoader

from trainkit import Accelerator, CheckpointMissing, ProjectConfiguration, set_seed

EPOCHS = 3


class Progress:
    """Where the training is; saved with every state."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        """Return the count."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take the count back."""
        self.step = state["step"]


def main() -> None:
    """Train from where the newest state is, and save one every five steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--stop-after", type=int, default=10**9, help="steps to make")
    arguments = parser.parse_args()
    set_seed(3)
    project = ProjectConfiguration(
        arguments.output_dir, automatic_checkpoint_naming=True, total_limit=2
    )
    accelerator = Accelerator(cpu=True, project_config=project)
    model, progress = make_model(), Progress()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(make_data(SAMPLES, seed=1), 20, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(progress)
    with suppress(CheckpointMissing):  # at the first start
        accelerator.load_state()
    first, done = divmod(progress.step, len(loader))
    for epoch in range(first, EPOCHS):
        skips = epoch == first and done > 0
        batches = accelerator.skip_first_batches(loader, done) if skips else loader
        for features, classes in batches:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(features), classes))
            optimizer.step()
            progress.step += 1
            if progress.step % 5 == 0:
                accelerator.save_state()
            if progress.step == arguments.stop_after:
                return
    accelerator.print(f"weights {checksum(accelerator.unwrap_model(model))}")


if __name__ == "__main__":
    main()
