"""A user trains two towers on pairs, with negatives from all processes, and looks for the pair."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import with_few
from trainkit import Callback, Run, Trainer

PAIRS = 90


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 8))
        self.text = nn.Embedding(40, 8)
        self.temperature = nn.Parameter(torch.tensor([2.0]))  # FSDP needs a dimension

    def forward(self, images: Tensor, words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        image = F.normalize(self.image(images), dim=-1)
        text = F.normalize(self.text(words).mean(1), dim=-1)
        return image, text, self.temperature.exp()


class Clip(Trainer):
    def training_step(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        assert self.run is not None
        image, text, scale = model(batch["image"], batch["words"])
        images, texts = self.run.gather((image, text), differentiable=True)
        rows = self.run.own_rows(image)
        labels = torch.arange(len(images), device=images.device)[rows]
        to_text = F.cross_entropy(scale * images[rows] @ texts.T, labels)
        to_image = F.cross_entropy(scale * texts[rows] @ images.T, labels)
        self.run.log({"negatives": float(len(images) - 1)})
        return (to_text + to_image) / 2

    def evaluation_step(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Any]:
        image, text, _ = model(batch["image"], batch["words"])
        return {"predictions": (image, text), "references": torch.zeros(len(image))}


def recall(predictions: Any, references: Any) -> float:
    """The share of pictures whose own text is the nearest of all."""
    images, texts = map(torch.as_tensor, predictions)
    return float((images @ texts.T).argmax(1).eq(torch.arange(len(images))).double().mean())


def collate(samples: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    images, words = zip(*samples, strict=True)
    return {"image": torch.stack(images), "words": torch.stack(words)}


class Losses(Callback):
    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        self.seen.append({name: values[name] for name in ("loss", "negatives")})


def project(rank: int, size: int, strategy: Any) -> tuple[list[dict[str, float]], float]:
    generator = torch.Generator().manual_seed(4)
    words = torch.randint(0, 40, (PAIRS, 5), generator=generator)
    meaning = torch.randn(40, 12, dtype=torch.float64, generator=generator)
    images = meaning[words].mean(1)
    data = TensorDataset(images, words)
    torch.manual_seed(9)
    model, losses = TwoTowers().double(), Losses()
    trainer = Clip(max_epochs=5, strategy=strategy, callbacks=[losses], log_every_n_steps=1)
    # 24 pairs in a step, on however many processes; the last step of an epoch has 18, of which
    # the last of three processes has 2.
    make = partial(DataLoader, data, batch_size=24 // size, collate_fn=collate)
    trainer.fit(model, make(shuffle=True), optimizer=partial(torch.optim.AdamW, lr=0.02))
    return losses.seen, trainer.evaluate(model, make(), metrics=[recall])["eval/recall"]


@pytest.mark.parametrize("strategy", with_few([], ["ddp", "fsdp"]))
def test_the_figures_are_those_of_one_process(strategy: str) -> None:
    (expected,) = run_ranks(1, project, 1, "single")
    steps, found = expected
    assert len(steps) == 5 * 4
    assert steps[-1]["loss"] < 0.7 * steps[0]["loss"]
    assert found > 0.1  # by chance 1 in 90
    for size in (2, 3):
        for losses, recalled in run_ranks(size, project, size, strategy):
            assert recalled == found
            for ours, theirs in zip(losses, steps, strict=True):
                assert ours == pytest.approx(theirs, rel=1e-9)
