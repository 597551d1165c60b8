"""A callback of your own: backs off the learning rate when the training loss jumps.

It keeps a running mean of the loss (state, which a resumed run goes on with), logs it, and after
a jump halves the learning rate and asks for an evaluation.

    python examples/custom_callback.py
    torchrun --standalone --nproc-per-node 2 examples/custom_callback.py
"""

import argparse
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from typing_extensions import override

from trainkit import Callback, Run, StepResult, Trainer
from trainkit.callbacks import Evaluation


class BackOff(Callback):
    """Halves the learning rate where the logged loss is well above its running mean.

    Args:
        factor: How far above the mean counts as a jump, such as 1.5.
        patience: Jumps after which the training stops.
    """

    def __init__(self, factor: float = 1.5, *, patience: int = 3) -> None:
        self.factor = factor
        self.patience = patience
        self._start()

    def _start(self) -> None:
        self.mean = math.nan
        self.jumps = 0

    @override
    def on_fit_start(self, run: Run) -> None:
        if run.checkpoints.resumed_from is None:  # a second fit is a new training
            self._start()

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        if run.is_log_step:
            run.log({"jumps": self.jumps}, reduce="max")

    @override
    def on_log(self, run: Run, values: Mapping[str, float]) -> None:
        # A logged value is that of all processes, so all decide alike.
        loss = values["loss"]
        if loss > self.factor * self.mean:  # False while the mean is NaN
            self.jumps += 1
            for group in run.optimizer.param_groups:
                group["lr"] /= 2
            if run.evaluation.loaders:
                run.request_evaluation(agreed=True)
            if self.jumps >= self.patience:
                run.request_stop(f"the loss jumped {self.jumps} times", agreed=True)
        self.mean = loss if math.isnan(self.mean) else 0.9 * self.mean + 0.1 * loss

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "jumps": self.jumps}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.mean, self.jumps = state["mean"], state["jumps"]


def main() -> None:
    """Train with a learning rate that is too high, and print how it went."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="two epochs, to see that it runs")
    epochs = 2 if parser.parse_args().tiny else 20
    digits = load_digits()
    data = TensorDataset(
        torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    )
    held_out, training = random_split(data, [0.2, 0.8], torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    back_off = BackOff(patience=10)
    trainer = Trainer(
        max_epochs=epochs,
        split_batches=True,
        log_every_n_steps=5,
        callbacks=[back_off, Evaluation(["accuracy"])],
    )
    result = trainer.fit(
        nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
        (DataLoader(training, 64, shuffle=True), DataLoader(held_out, 256)),
        optimizer=partial(torch.optim.SGD, lr=1.0),
        loss_fn=nn.CrossEntropyLoss(),
    )
    trainer.processes.print(f"stopped by: {result.stop_reason}")
    trainer.processes.print(
        f"jumps: {back_off.jumps}, accuracy {result.metrics['eval/accuracy']:.3f}"
    )
    trainer.close()


if __name__ == "__main__":
    main()
