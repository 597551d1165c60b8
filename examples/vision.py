"""Train a small ResNet on Fashion-MNIST: augmentation, EMA, cosine schedule, early stopping.

    make data
    .venv/bin/python examples/vision.py
    .venv/bin/trainkit launch --num_processes 2 examples/vision.py --output-dir runs/vision2

`--data` may be any folder with the four files of MNIST or of a data set like it, gzipped or not.
The output directory gets `metrics.jsonl`, checkpoints, and the average under `model/`. A run that
was stopped goes on with `--resume auto`, and ends with the same weights, bit by bit.
"""

import argparse
import gzip
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, Dataset, default_convert
from typing_extensions import override

from trainkit import Trainer
from trainkit.callbacks import (
    EMA,
    Checkpoint,
    EarlyStopping,
    Evaluation,
    JSONLLogger,
    ProgressBar,
    Summary,
)

SIZE = 28  # pixels of a side


class Images(Dataset[Any]):
    """Grey images and their classes, handed out a batch at a time.

    Args:
        images: Bytes, count x 28 x 28.
        classes: Bytes, one for each image.
        augment: Whether to shift and mirror the images at random.
    """

    def __init__(self, images: Tensor, classes: Tensor, *, augment: bool = False) -> None:
        self.images = images
        self.classes = classes.long()
        self.augment = augment

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.images)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Return images as floats, count x 1 x 28 x 28, and classes."""
        images = self.images[indices]
        if self.augment:  # the trainer seeds what is drawn here: a resumed run draws the same
            images = mirror(shift(images, by=2))
        return images.unsqueeze(1) / 127.5 - 1, self.classes[indices]


def mirror(images: Tensor) -> Tensor:
    """Return the images, about half of them mirrored."""
    chosen = torch.rand(len(images), 1, 1) < 0.5
    return torch.where(chosen, images.flip(-1), images)


def shift(images: Tensor, by: int) -> Tensor:
    """Return the images, each moved by up to `by` pixels in both directions."""
    count = len(images)
    padded = nn.functional.pad(images, (by, by, by, by))
    down, right = torch.randint(0, 2 * by + 1, (2, count, 1))
    rows, columns = down + torch.arange(SIZE), right + torch.arange(SIZE)
    which = torch.arange(count).view(-1, 1, 1)
    return padded[which, rows.unsqueeze(2), columns.unsqueeze(1)]


class Block(nn.Module):
    """Two convolutions, and a way around them."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *convolution(before, after, 3, stride), nn.ReLU(), *convolution(after, after, 3)
        )
        same = before == after and stride == 1
        self.around = nn.Sequential(*([] if same else convolution(before, after, 1, stride)))

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Return what the block makes of `x`."""
        return torch.relu(self.body(x) + self.around(x))


def convolution(before: int, after: int, size: int, stride: int = 1) -> list[nn.Module]:
    """Return a convolution and its normalisation."""
    padding = size // 2
    return [
        nn.Conv2d(before, after, size, stride, padding, bias=False),
        nn.BatchNorm2d(after),
    ]


def make_resnet(width: int) -> nn.Module:
    """Return a ResNet for ten classes; 166 thousand parameters where `width` is 16."""
    model = nn.Sequential(
        *convolution(1, width, 3),
        nn.ReLU(),
        Block(width, 2 * width, stride=2),
        Block(2 * width, 2 * width),
        Block(2 * width, 4 * width, stride=2),
        Block(4 * width, 4 * width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )
    channels_last: Any = {"memory_format": torch.channels_last}  # a third less time on a CPU
    return model.to(**channels_last)


class Parts(NamedTuple):
    """What is trained on, what is chosen by, and what is looked at once."""

    train: Images
    held_out: Images
    test: Images


def read_parts(folder: Path, held_out: int = 3000) -> Parts:
    """Return the images of a folder; the last `held_out` training images are not trained on."""
    images = read_bytes(folder, "train-images-idx3-ubyte")
    classes = read_bytes(folder, "train-labels-idx1-ubyte")
    test = [read_bytes(folder, f"t10k-{name}-ubyte") for name in ("images-idx3", "labels-idx1")]
    return Parts(
        Images(images[:-held_out], classes[:-held_out], augment=True),
        Images(images[-held_out:], classes[-held_out:]),
        Images(*test),
    )


def read_bytes(folder: Path, name: str) -> Tensor:
    """Return the array in one of MNIST's files: after two bytes, its type and dimensions."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            data = (gzip.decompress if path.suffix == ".gz" else bytearray)(path.read_bytes())
            shape = np.frombuffer(data, ">u4", count=data[3], offset=4)
            array = np.frombuffer(data, np.uint8, offset=4 + 4 * data[3])
            return torch.from_numpy(array.reshape(shape).copy())
    sys.exit(f"There is no `{name}` or `{name}.gz` in {folder}. `make data` fetches Fashion-MNIST.")


def tiny_parts() -> Parts:
    """Return the 8x8 digits of scikit-learn, drawn larger."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    small = torch.tensor(digits.images).unsqueeze(1) * (255 / 16)
    images = nn.functional.interpolate(small, size=SIZE).squeeze(1).to(torch.uint8)
    classes = torch.tensor(digits.target)
    return Parts(
        Images(images[:500], classes[:500], augment=True),
        Images(images[500:600], classes[500:600]),
        Images(images[600:700], classes[600:700]),
    )


def parse_arguments() -> argparse.Namespace:
    """Return the command line's settings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, default=Path("data/fashion-mnist"), help="folder of the four files")
    add("--epochs", type=int, default=10, help="passes over the training part (default: 10)")
    add("--batch-size", type=int, default=128, help="images an update (default: 128)")
    add("--learning-rate", type=float, default=4e-3, help="the highest one (default: 4e-3)")
    add("--width", type=int, default=16, help="channels of the first layer (default: 16)")
    add("--patience", type=int, default=3, help="epochs without a better figure (default: 3)")
    add("--precision", default="auto", help="fp32, bf16 or fp16 (default: fp32)")
    add("--output-dir", type=Path, default=Path("runs/vision"))
    add("--seed", type=int, default=0)
    add("--resume", choices=["auto", "must"], help="go on from the checkpoints in --output-dir")
    add("--tiny", action="store_true", help="digits of scikit-learn for seconds, without the data")
    return parser.parse_args()


def main() -> None:
    """Train, and print how the average does on the test part."""
    arguments = parse_arguments()
    if arguments.tiny:  # with 4 channels torch 2.13 writes past its memory on CPUs without AVX-512
        arguments.epochs, arguments.width = 2, 8
    train, held_out, test = tiny_parts() if arguments.tiny else read_parts(arguments.data)
    torch.manual_seed(arguments.seed)  # the same first weights on every process
    model = make_resnet(arguments.width)
    ema = EMA(decay=0.998)
    trainer = Trainer(
        max_epochs=arguments.epochs,
        precision=arguments.precision,
        split_batches=True,  # as many images an update on any number of processes
        callbacks=[
            ProgressBar(),
            Summary(),
            Evaluation(["accuracy"]),
            ema,
            EarlyStopping("eval/accuracy", patience=arguments.patience, mode="max"),
            JSONLLogger(),
            Checkpoint(keep_last=1),
        ],
        output_dir=arguments.output_dir,
        seed=arguments.seed,
    )
    load = partial(DataLoader, collate_fn=default_convert)  # the batches are made already
    trainer.fit(
        model,
        (load(train, arguments.batch_size, shuffle=True), load(held_out, 500)),
        optimizer=partial(AdamW, lr=arguments.learning_rate, weight_decay=0.05),
        lr_scheduler=lambda optimizer: CosineAnnealingLR(optimizer, trainer.planned_steps or 1),
        loss_fn=nn.CrossEntropyLoss(),
        resume=arguments.resume,
    )
    ema.save_model(arguments.output_dir / "model")
    with ema.applied():
        figures = trainer.evaluate(model, load(test, 500), metrics=["accuracy"])
    trainer.processes.print(f"test accuracy: {figures['eval/accuracy']:.4f}")
    trainer.close()


if __name__ == "__main__":
    main()
