"""The cross entropy by chunks is that of torch, in value and gradients, with less in memory."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from tests.helpers.ranks import run_ranks
from tests.strategies.toys import STRATEGIES
from trainkit import ConfigError, StepOutput, Trainer
from trainkit.losses import chunked_cross_entropy

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")

WORDS, FEATURES, LENGTH = 31, 5, 7


def texts(rows: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(0, WORDS, (rows, LENGTH), generator=generator)
    return words.masked_fill(torch.rand(words.shape, generator=generator) < 0.3, -100)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("bias", [True, False])
def test_value_and_gradients_are_those_of_torch(bias: bool, smoothing: float) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(4, LENGTH, FEATURES, dtype=torch.float64, requires_grad=True)
    head = nn.Linear(FEATURES, WORDS, bias=bias, dtype=torch.float64)
    labels = texts(4)
    leaves = [hidden, *head.parameters()]
    scores, flat = head(hidden).flatten(0, 1), labels.flatten()
    expected = functional.cross_entropy(scores, flat, label_smoothing=smoothing)
    gradients = torch.autograd.grad(expected, leaves)
    for chunk_size in (1, 9, 1024):  # of 28 tokens
        heads: list[Any] = [head] if bias else [head, head.weight]
        for given in heads:
            loss = chunked_cross_entropy(
                hidden, given, labels, chunk_size=chunk_size, label_smoothing=smoothing
            )
            found = torch.autograd.grad(loss, leaves)
            assert abs(loss.item() - expected.item()) < 1e-12
            for one, other in zip(found, gradients, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes how many numbers the largest new tensor had."""

    numbers = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numbers = max(self.numbers, result.numel())
        return result


def test_only_the_scores_of_a_chunk_are_in_memory() -> None:
    hidden = torch.randn(1, 600, FEATURES, requires_grad=True)
    head = nn.Linear(FEATURES, WORDS)
    labels = torch.randint(0, WORDS, (1, 600))
    with Largest() as largest:  # type: ignore[no-untyped-call]
        chunked_cross_entropy(hidden, head, labels, chunk_size=100).sum().backward()  # type: ignore[no-untyped-call]
    assert largest.numbers == 100 * WORDS


def test_scores_of_few_bits_are_widened() -> None:
    hidden, head = torch.randn(2, 3, FEATURES).bfloat16(), nn.Linear(FEATURES, WORDS).bfloat16()
    labels = texts(2)[:, :3]
    expected = functional.cross_entropy(head(hidden).float().flatten(0, 1), labels.flatten())
    torch.testing.assert_close(chunked_cross_entropy(hidden, head, labels), expected)


def test_what_does_not_fit_is_refused() -> None:
    hidden, head = torch.randn(2, 3, FEATURES), nn.Linear(FEATURES, WORDS)
    with pytest.raises(ConfigError, match=r"which is \[2, 3\], but has \[2, 4\]"):
        chunked_cross_entropy(hidden, head, torch.zeros(2, 4).long())
    with pytest.raises(ConfigError, match="`chunk_size` must be a whole number from 1 on"):
        chunked_cross_entropy(hidden, head, torch.zeros(2, 3).long(), chunk_size=0)


class Language(nn.Module):
    """A model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.words = nn.Embedding(WORDS, FEATURES)
            self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(2))

    @override
    def forward(self, labels: Tensor, chunk_size: int | None) -> Tensor:
        hidden = self.words(labels.clamp(min=0))
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        before, after = hidden[:, :-1], labels[:, 1:]
        if chunk_size is None:
            scores = functional.linear(before, self.words.weight)
            return functional.cross_entropy(scores.flatten(0, 1), after.flatten())
        return chunked_cross_entropy(before, self.words.weight, after, chunk_size=chunk_size)


class Reads(Trainer):
    """Trains it by tokens."""

    chunk_size: int | None = None

    @override
    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        loss = model(batch[0], self.chunk_size)
        return StepOutput(loss, weight=(batch[0][:, 1:] != -100).sum())


def trained(rank: int, strategy: str, chunk_size: int | None) -> dict[str, Tensor]:
    model = Language().double()
    trainer = Reads(
        max_steps=3,
        gradient_accumulation_steps=2,
        strategy=STRATEGIES[strategy](),
        callbacks=[],
    )
    trainer.chunk_size = chunk_size
    data = DataLoader(TensorDataset(texts(32)), 8 if strategy == "single" else 4)
    trainer.fit(model, data, optimizer=partial(SGD, lr=0.5))
    whole = {n: getattr(p, "full_tensor", lambda p=p: p)() for n, p in model.named_parameters()}
    return {name: tensor.detach() for name, tensor in whole.items()}


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.e2e)])
def test_two_processes_learn_what_one_learns_from_all_scores(strategy: str) -> None:
    expected = trained(0, "single", None)
    for found in (trained(0, "single", 5), run_ranks(2, trained, strategy, 5)[0]):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-12)
