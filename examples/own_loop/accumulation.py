"""Accumulation, clipping, a schedule, fp16 and figures in a loop of your own.

python examples/own_loop/accumulation.py --mixed-precision fp16
torchrun --standalone --nproc-per-node 2 examples/own_loop/accumulation.py --output-dir runs/own
"""

import argparse
from pathlib import Path

import torch
from data import SAMPLES, make_data, make_model
from torch import nn
from torch.utils.data import DataLoader

from trainkit import Accelerator, set_seed

EPOCHS = 3


def main() -> None:
    """Train with windows of four micro-batches, and print the last loss and the skipped steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mixed-precision", default="no", help="no, fp16 or bf16 (default: no)")
    parser.add_argument("--output-dir", type=Path, help="a folder for the figures")
    arguments = parser.parse_args()
    set_seed(0)
    accelerator = Accelerator(
        cpu=True,
        mixed_precision=arguments.mixed_precision,
        gradient_accumulation_steps=4,
        log_with=None if arguments.output_dir is None else ["tensorboard", "jsonl"],
        project_dir=arguments.output_dir,
    )
    accelerator.init_trackers("accumulation", config={"epochs": EPOCHS})
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=90)
    loader = DataLoader(make_data(SAMPLES, seed=1), 10, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    step = skipped = 0
    loss = torch.zeros(())
    for _ in range(EPOCHS):
        for features, classes in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(features), classes)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                skipped += accelerator.optimizer_step_was_skipped
                step += not accelerator.optimizer_step_was_skipped
                accelerator.log({"loss": loss.item(), "lr": schedule.get_last_lr()[0]}, step=step)
    mean = accelerator.reduce(loss.detach(), "mean").item()
    accelerator.print(f"loss {mean:.4f} after {step} steps, {skipped} skipped")
    accelerator.end_training()


if __name__ == "__main__":
    main()
