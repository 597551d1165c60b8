"""A precision of your own: weights in bfloat16 with stochastic rounding.

An update is often smaller than the distance to the next bfloat16 number, and rounding to the
nearest would drop it, each time. Stochastic rounding goes up or down with the probability that
makes the result right on average, so small updates count.

The weights are numbers of bfloat16 kept in fp32 storage: this shows what such training comes to,
with any optimizer and strategy; it saves no memory.

    python examples/custom_precision.py
    torchrun --standalone --nproc-per-node 2 examples/custom_precision.py
"""

import argparse
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset, random_split
from typing_extensions import override

from trainkit import Trainer
from trainkit.callbacks import Evaluation
from trainkit.precision import Precision

DROPPED = 16  # bits of fp32 that bfloat16 does not have


class StochasticBF16(Precision):
    """Rounds the weights to bfloat16 after every update, up or down at random, right on average.

    Args:
        seed: Of the random numbers; every process draws the same.
        nearest: Round to the nearest instead, to see the difference.
    """

    name = "stochastic-bf16"

    def __init__(self, seed: int = 0, *, nearest: bool = False) -> None:
        self.seed = seed
        self.nearest = nearest

    @override
    def setup(self, device: torch.device) -> None:
        super().setup(device)
        self.generator = torch.Generator(device).manual_seed(self.seed)

    @override
    def autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    @override
    @torch.no_grad()
    def step(self, optimizer: Optimizer) -> None:
        super().step(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                # Under FSDP a process holds and rounds its shard only.
                weight = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                weight.copy_(weight.bfloat16() if self.nearest else self.rounded(weight))

    def rounded(self, weight: Tensor) -> Tensor:
        """Return fp32 numbers rounded to bfloat16, in fp32."""
        noise = torch.randint(
            0, 1 << DROPPED, weight.shape, generator=self.generator, dtype=torch.int32,
            device=weight.device,
        )  # fmt: skip
        # The bits of a float are in the order of its size: adding noise below the last bit that
        # stays, and cutting the rest off, carries with the probability of rounding away from 0.
        bits = weight.float().contiguous().view(torch.int32) + noise
        return (bits >> DROPPED << DROPPED).view(torch.float32)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.generator.set_state(state["generator"])


def train(precision: Precision, epochs: int) -> tuple[float, Trainer]:
    """Return the accuracy on held-out digits after training in `precision`, and the trainer."""
    digits = load_digits()
    data = TensorDataset(
        torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    )
    held_out, training = random_split(data, [0.2, 0.8], torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    trainer = Trainer(
        max_epochs=epochs,
        precision=precision,
        split_batches=True,  # the same training on any number of processes
        callbacks=[Evaluation(["accuracy"])],
    )
    result = trainer.fit(
        model,
        (DataLoader(training, 64, shuffle=True), DataLoader(held_out, 256)),
        optimizer=partial(torch.optim.SGD, lr=0.02),
        loss_fn=nn.CrossEntropyLoss(),
    )
    return result.metrics["eval/accuracy"], trainer


def main() -> None:
    """Train with both ways of rounding and print what comes of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="two epochs, to see that it runs")
    epochs = 2 if parser.parse_args().tiny else 20
    nearest, trainer = train(StochasticBF16(nearest=True), epochs)
    stochastic, _ = train(StochasticBF16(), epochs)
    trainer.processes.print(f"rounded to nearest: accuracy {nearest:.3f}")
    trainer.processes.print(f"rounded at random: accuracy {stochastic:.3f}")
    trainer.close()


if __name__ == "__main__":
    main()
