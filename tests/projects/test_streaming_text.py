"""A language model on a stream of text that is packed into blocks, ended and gone on with."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from tests.helpers.callbacks import On, StopsAt
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import with_few
from trainkit import Callback, Trainer
from trainkit.callbacks import Checkpoint

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "that", "it", "was", "good", "to")
BLOCK = 8
LETTERS = 27


class Packed(IterableDataset[Any]):
    """Sentences by the letter, packed into blocks; what is left of one goes into the next block."""

    def __init__(self, sentences: int) -> None:
        self.sentences = sentences
        self.state: dict[str, Any] = {"sentence": 0, "rest": []}

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            while len(self.state["rest"]) <= BLOCK:
                if self.state["sentence"] == self.sentences:
                    self.state = {"sentence": 0, "rest": []}
                    return
                self.state["rest"] += self.sentence(self.state["sentence"])
                self.state["sentence"] += 1
            block = torch.tensor(self.state["rest"][: BLOCK + 1])
            del self.state["rest"][:BLOCK]
            yield block[:-1], block[1:]

    @staticmethod
    def sentence(number: int) -> list[int]:
        chosen = [WORDS[(number * 7 + place * (number % 5 + 1)) % len(WORDS)] for place in range(4)]
        return [0 if letter == " " else ord(letter) - 96 for letter in " ".join(chosen) + " "]

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Model(nn.Module):
    """Predicts the next letter from the last one and its place."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, 16)
        self.places = nn.Embedding(BLOCK, 16)
        self.head = nn.Linear(16, LETTERS)

    def forward(self, letters: Tensor) -> Tensor:
        hidden = self.letters(letters) + self.places.weight
        scores: Tensor = self.head(hidden).transpose(1, 2)
        return scores


def _train(
    rank: int, folder: Path, stop_at: int | None = None, workers: int = 0, **options: Any
) -> tuple[float, int, int]:
    """Return the perplexity on other text, the letters read by this process, and all samples."""
    torch.manual_seed(0)
    letters: list[int] = []
    counts = On(Callback.on_microbatch_start, lambda run, batch: letters.append(batch[0].numel()))
    trainer = Trainer(
        max_epochs=2, callbacks=[counts, StopsAt(stop_at), Checkpoint()], output_dir=folder
    )
    batch = 4 // trainer.processes.num_processes
    model = Model().double()
    result = trainer.fit(
        model,
        DataLoader(Packed(30), batch, num_workers=workers),
        optimizer=partial(torch.optim.Adam, lr=0.02),
        loss_fn=nn.CrossEntropyLoss(),
        **options,
    )
    figures = trainer.evaluate(model, DataLoader(Packed(11), 3))
    return figures["eval/loss"], sum(letters), result.samples_seen


@pytest.mark.parametrize("size", with_few([1], [1, 2]))
def test_a_language_model_on_a_stream_is_the_same_ended_or_not(size: int, tmp_path: Path) -> None:
    ((alone, letters, samples),) = run_ranks(1, _train, tmp_path / "alone")
    whole = run_ranks(size, _train, tmp_path / "whole", workers=2)
    first = run_ranks(size, _train, tmp_path, stop_at=17)
    rest = run_ranks(size, _train, tmp_path, workers=2, resume="must")
    assert alone < 2.0  # of 3.3 nats
    assert samples == letters // BLOCK
    assert sum(read for _, read, _ in whole) == letters
    assert sum(read for _, read, _ in (*first, *rest)) == letters
    for loss, _, seen in (*whole, *rest):
        assert seen == samples
        assert loss == pytest.approx(alone, rel=1e-12)  # the order of sums
    assert [loss for loss, _, _ in rest] == [loss for loss, _, _ in whole]
