"""Two networks against each other, each with an optimizer of its own: a GAN draws digits.

    python examples/gan.py
    trainkit launch --num_processes 2 examples/gan.py --output-dir runs/gan2

They take turns: `--discriminator-windows` windows for the discriminator, one for the generator,
each with its own step, clipping and loss scale. While one learns the other is frozen. What the
trainer promises holds for both: several processes, FSDP, accumulation, fp16, an exact resume.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim import Adam, RMSprop
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from trainkit import Alternating, Trainer
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
    def forward(self, x: Tensor, loss_of: str = "") -> Tensor:
        """Return the mean loss of one of the networks on the real digits `x`.

        Without a name, return the digits that are drawn from the noise `x`.
        """
        if not loss_of:
            return self.generator(x)  # type: ignore[no-any-return]
        drawn = self.generator(torch.randn(len(x), NOISE, device=x.device))
        if loss_of == "generator":
            return judged(self.discriminator(drawn), as_real=True)
        return judged(self.discriminator(x), as_real=True) + judged(
            self.discriminator(drawn), as_real=False
        )


def judged(logits: Tensor, *, as_real: bool) -> Tensor:
    """Return how far `logits` are from saying "real", or from saying "drawn"."""
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(as_real)))


class GANTrainer(Trainer):
    """Trains one network of a GAN, then the other."""

    def training_step_discriminator(self, model: nn.Module, batch: Any) -> Tensor:
        """Return how far the discriminator is from telling real digits."""
        return model(*batch, loss_of="discriminator")  # type: ignore[no-any-return]

    def training_step_generator(self, model: nn.Module, batch: Any) -> Tensor:
        """Return how far the generator is from being taken for real."""
        return model(*batch, loss_of="generator")  # type: ignore[no-any-return]


OPTIMIZERS = {  # by the name of the part of the model that each one trains
    "discriminator": partial(RMSprop, lr=5e-4),
    "generator": partial(Adam, lr=1e-3, betas=(0.5, 0.999)),
}


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
    add("--epochs", type=int, default=120, help="passes over the 1,797 digits (default: 120)")
    add("--discriminator-windows", type=int, default=1, help="for each of the generator's")
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
            ema,
            JSONLLogger(),
            Checkpoint(keep_last=1),
        ],
        output_dir=arguments.output_dir,
    )
    trainer.fit(
        gan,
        DataLoader(data, batch_size=64, shuffle=True),
        optimizer=Alternating(
            OPTIMIZERS, {"discriminator": arguments.discriminator_windows, "generator": 1}
        ),
        resume=arguments.resume,
    )
    noise = torch.randn(1000, NOISE, generator=torch.Generator().manual_seed(1))
    with ema.applied():
        drawn = trainer.predict(gan, DataLoader(TensorDataset(noise), batch_size=250))
    if trainer.processes.is_main_process:
        print_result(drawn.cpu(), digits)
    trainer.close()


if __name__ == "__main__":
    main()
