"""Models with scores that never change, data with labels for them, and the metrics over both."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from benchmarks.behaviour.toys import Numbers, Pick

CLASSES, HEIGHT, WIDTH = 3, 4, 6
DIMENSIONS = 4  # of an embedding


class Classes(Numbers):
    """Sample i is of class i % 3."""

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([float(index), 0.0]), torch.tensor(index % CLASSES)


class Masks(Numbers):
    """Each sample has a class for every pixel."""

    @override
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        mask = torch.randint(CLASSES, (HEIGHT, WIDTH), generator=generator)
        return torch.tensor([float(index), 0.0]), mask


class Fixed(Pick):
    """Returns for each sample a row of numbers that were drawn once, in fp64."""

    shape: tuple[int, ...] = ()

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        generator = torch.Generator().manual_seed(0)
        numbers = torch.randn(samples, *self.shape, generator=generator, dtype=torch.float64)
        self.weight = nn.Parameter(self.drawn(numbers).flatten())

    def drawn(self, numbers: Tensor) -> Tensor:
        """Return what is made of normal numbers."""
        return numbers

    @override
    def forward(self, x: Tensor) -> Tensor:
        return self.weight.view(-1, *self.shape)[x[:, 0].long()]


class Logits(Fixed):
    """A logit for each class: never between 0 and 1, where it might be a probability."""

    shape = (CLASSES,)

    @override
    def drawn(self, numbers: Tensor) -> Tensor:
        return numbers + numbers.sign()


class PixelLogits(Fixed):
    """A logit for each class and pixel, the classes in dimension 1."""

    shape = (CLASSES, HEIGHT, WIDTH)


class Embeddings(Fixed):
    """An embedding for each sample."""

    shape = (DIMENSIONS,)


def metric(name: str) -> Any:
    """Return a metric of torchmetrics: "auroc" or "iou"."""
    from torchmetrics.classification import MulticlassAUROC, MulticlassJaccardIndex

    return MulticlassAUROC(CLASSES) if name == "auroc" else MulticlassJaccardIndex(CLASSES)


def function(name: str) -> Callable[[Tensor, Tensor], float]:
    """Return the same as a function of all outputs and targets."""

    def compute(outputs: Tensor, targets: Tensor) -> float:
        from torchmetrics.functional import classification as of

        if name == "auroc":
            return float(of.multiclass_auroc(outputs, targets, CLASSES))
        return float(of.multiclass_jaccard_index(outputs, targets, CLASSES))

    return compute


def area(scores: Tensor, labels: Tensor) -> float:
    """Return the mean area under the ROC curves of the classes by hand."""
    areas = []
    for number, of_class in enumerate(scores.softmax(1).T):
        above = of_class[labels == number][:, None] > of_class[labels != number]
        areas.append(float(above.double().mean()))  # how often one of the class is above another
    return sum(areas) / CLASSES


def mean_iou(scores: Tensor, masks: Tensor) -> float:
    """Return the mean intersection over union of the classes by hand."""
    found = scores.argmax(1)
    ratios = []
    for number in range(CLASSES):
        ours, true = found == number, masks == number
        ratios.append(float((ours & true).sum()) / float((ours | true).sum()))
    return sum(ratios) / CLASSES
