"""Two networks against each other, each with an optimizer of its own: a GAN draws digits.

    python examples/gan.py
    trainkit launch --num_processes 2 examples/gan.py --output-dir runs/gan2

The loop is the trainer's. The model holds both networks and returns both losses, and the gradient
of each loss reaches its own network only: one backward serves both, and what the trainer promises
holds for both: several processes, FSDP, accumulation, fp16, an exact resume. Three parts do it:

- `GAN.forward` computes both losses, as one call is what DDP and FSDP watch;
- `Both` steps two optimizers of any kind as one. For two of one kind, a single optimizer with two
  groups of parameters does without it;
- `Alternate` leaves the generator alone but for every k-th update (`--generator-every`).

Where that ends: both networks see the same batch, the one that is left alone is computed all the
same, and clipping takes one norm over both. Where that is not wanted, keep your own loop, with
`Accelerator`.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim import Adam, Optimizer, RMSprop
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from trainkit import Callback, Run, Trainer
from trainkit.callbacks import EMA, Checkpoint, JSONLLogger, ProgressBar, Summary

NOISE = 32  # numbers that a digit is drawn from
SHADES = " .+#"


class GAN(nn.Module):
    """A generator of digits, and a discriminator that tells them from real ones."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            *(nn.Linear(NOISE, width), nn.BatchNorm1d(width), nn.ReLU()),
            *(nn.Linear(width, 2 * width), nn.BatchNorm1d(2 * width), nn.ReLU()),
            *(nn.Linear(2 * width, 64), nn.Tanh()),
        )
        self.discriminator = nn.Sequential(
            *(nn.Linear(64, 2 * width), nn.LeakyReLU(0.2)),
            *(nn.Linear(2 * width, width), nn.LeakyReLU(0.2)),
            nn.Linear(width, 1),
        )

    @override
    def forward(self, x: Tensor) -> Any:
        """Return the mean losses of generator and discriminator on the real digits `x`.

        In evaluation mode, return the digits that are drawn from the noise `x`.
        """
        if not self.training:
            return self.generator(x)
        drawn = self.generator(torch.randn(len(x), NOISE, device=x.device))
        with frozen(self.discriminator):
            generator_loss = judged(self.discriminator(drawn), as_real=True)
        discriminator_loss = judged(self.discriminator(x), as_real=True) + judged(
            self.discriminator(drawn.detach()), as_real=False
        )
        return generator_loss, discriminator_loss


def judged(logits: Tensor, *, as_real: bool) -> Tensor:
    """Return how far `logits` are from saying "real", or from saying "drawn"."""
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(as_real)))


@contextmanager
def frozen(module: nn.Module) -> Iterator[None]:
    """Let gradients pass through `module`, but not into its parameters."""
    module.requires_grad_(False)
    try:
        yield
    finally:
        module.requires_grad_(True)


class Both(Optimizer):
    """Several optimizers as one, for the trainer, for schedules and for checkpoints.

    Args:
        *optimizers: On parameters that differ.
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        self.optimizers = optimizers
        super().__init__([group for part in optimizers for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Let the parts work on the groups and the state that are seen here."""
        groups = iter(self.param_groups)
        for part in self.optimizers:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state

    @override
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for part in self.optimizers:
            part.step()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()


class Alternate(Callback):
    """Updates one network only every so often; the optimizer passes over what has no gradient.

    Args:
        name: The network's name in the model.
        every: Updates from one to the next.
    """

    def __init__(self, name: str, every: int) -> None:
        self.network = name
        self.every = every

    @override
    def on_gradients(self, run: Run) -> None:
        if (run.state.step + 1) % self.every:
            for parameter in run.module.get_submodule(self.network).parameters():
                parameter.grad = None


class GANTrainer(Trainer):
    """Trains both networks of a GAN, each with its optimizer."""

    @override
    def configure_optimizer(self, model: nn.Module, optimizer: object) -> Optimizer:
        return Both(
            Adam(model.get_submodule("generator").parameters(), lr=1e-3, betas=(0.5, 0.999)),
            RMSprop(model.get_submodule("discriminator").parameters(), lr=5e-4),
        )

    @override
    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        (real,) = batch
        generator_loss, discriminator_loss = model(real)
        assert self.run is not None
        self.run.log({"loss/generator": generator_loss.detach()}, weight=len(real))
        self.run.log({"loss/discriminator": discriminator_loss.detach()}, weight=len(real))
        loss: Tensor = generator_loss + discriminator_loss
        return loss


def print_result(drawn: Tensor, digits: Any) -> None:
    """Print some drawn digits, and what a classifier of real ones makes of all."""
    for row in ((drawn[:8].view(8, 8, 8) + 1) * 2).clamp(max=3).long().permute(1, 0, 2).tolist():
        print("   ".join("".join(SHADES[shade] for shade in line) for line in row))
    classifier = LogisticRegression(max_iter=2000).fit(digits.data / 8 - 1, digits.target)
    chances = torch.from_numpy(classifier.predict_proba(drawn.numpy()))
    counts = torch.bincount(chances.argmax(1), minlength=10).tolist()
    print(f"a classifier is sure of {(chances.amax(1) > 0.9).double().mean():.1%} of the digits;")
    print(f"of {len(drawn)}, {min(counts)} are the one drawn least, {max(counts)} the one most")


def parse_arguments() -> argparse.Namespace:
    """Return the command line's settings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--epochs", type=int, default=60, help="passes over the 1,797 digits (default: 60)")
    add("--generator-every", type=int, default=1, help="updates a generator's one (default: 1)")
    add("--precision", default="auto", help="fp32, bf16 or fp16 (default: fp32)")
    add("--strategy", default="auto", help="auto, single, ddp or fsdp (default: auto)")
    add("--output-dir", type=Path, default=Path("runs/gan"))
    add("--resume", choices=["auto", "must"], help="go on from the checkpoints in --output-dir")
    add("--tiny", action="store_true", help="four epochs, to see that it runs")
    return parser.parse_args()


def main() -> None:
    """Train, and print digits that the generator's average draws."""
    arguments = parse_arguments()
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 8 - 1)
    torch.manual_seed(0)  # the same first weights on every process
    gan = GAN()
    ema = EMA(decay=0.99)
    trainer = GANTrainer(
        max_epochs=4 if arguments.tiny else arguments.epochs,
        precision=arguments.precision,
        strategy=arguments.strategy,
        split_batches=True,
        callbacks=[
            ProgressBar(),
            Summary(),
            Alternate("generator", arguments.generator_every),
            ema,
            JSONLLogger(),
            Checkpoint(keep_last=1),
        ],
        output_dir=arguments.output_dir,
    )
    trainer.fit(gan, DataLoader(data, batch_size=64, shuffle=True), resume=arguments.resume)
    noise = torch.randn(1000, NOISE, generator=torch.Generator().manual_seed(1))
    with ema.applied():
        drawn = trainer.predict(gan, DataLoader(TensorDataset(noise), batch_size=250))
    if trainer.processes.is_main_process:
        print_result(drawn.cpu(), digits)
    trainer.close()


if __name__ == "__main__":
    main()
