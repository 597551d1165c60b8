"""A collate function that leaves samples out or adds rows: what came counts (rules 6, 19)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import with_few
from trainkit import Accelerator, Callback, Combined, Run, StepOutput, Trainer
from trainkit.callbacks import Checkpoint
from trainkit.data.fetch import Recounted, recounted
from trainkit.errors import DataError
from trainkit.strategies import FSDP

SAMPLES, WINDOW, LIMIT = 29, 12, 1e-12


def sample(index: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    inputs = torch.randn(4, dtype=torch.float64, generator=generator)
    return inputs, inputs[:1] + 0.3 * torch.randn(1, dtype=torch.float64, generator=generator)


def is_broken(index: int) -> bool:
    return index % 3 == 0 or 8 <= index < 12


class Rows(Dataset[Any]):
    """Yields None for what is broken."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return None if is_broken(index) else sample(index)


class Whole(Rows):
    def __getitem__(self, index: int) -> Any:
        return sample(index)


class Batches(Rows):
    """Asked for several samples at once, it returns those that are not broken."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [sample(index) for index in indices if not is_broken(index)]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return map(Rows().__getitem__, range(SAMPLES))


def left(samples: list[Any]) -> Any:
    """Leave out what is broken."""
    kept = [one for one in samples if one is not None]
    return default_collate(kept) if kept else [torch.zeros(0, n).double() for n in (4, 1)]


def small(samples: list[Any]) -> Any:
    """Leave out what is far off, which only this function knows."""
    return left([one if one[0].abs().max() < 1.9 else None for one in samples])


def repeated(samples: list[Any]) -> Any:
    """A row for each part of a sample, the more the larger it is."""
    many = [1 + int(inputs.abs().max()) for inputs, _ in samples]
    return default_collate([s for s, n in zip(samples, many, strict=True) for _ in range(n)])


KINDS: dict[str, tuple[Any, Any]] = {
    "broken": (Rows, left),
    "far off": (Whole, small),
    "repeated": (Whole, repeated),
    "several at once": (Batches, left),
    "stream": (Stream, left),
}


def loader_of(kind: str, batch: int, workers: int = 0) -> DataLoader[Any]:
    data, collate = KINDS[kind]
    return DataLoader(data(), batch, collate_fn=collate, num_workers=workers)


class Seen(Callback):
    """Keeps the gradient of every step, and what was logged."""

    def __init__(self) -> None:
        self.gradients: list[Tensor] = []
        self.losses: list[float] = []

    def on_gradients(self, run: Run) -> None:
        grad: Any = next(run.module.parameters()).grad
        whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        self.gradients.append(whole.cpu().flatten().clone())

    def on_log(self, run: Run, values: Any) -> None:
        self.losses.append(values["loss"])


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(4, 1).double()


class Own(Trainer):
    """Returns a mean over its rows, gathers them, and looks at them one by one."""

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        assert isinstance(self.run, Run)
        gathered = self.run.gather_for_metrics(targets)
        assert isinstance(gathered, Tensor)
        self.found = [*getattr(self, "found", []), gathered.flatten()]
        return (model(inputs) - targets).square().mean()


class Twice(Own):
    """The same as two terms, one of which says itself how many rows it is a mean over."""

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        loss = super().training_step(model, batch)
        return {"a": 0.25 * loss, "b": StepOutput(0.75 * loss, len(batch[0]))}


def fit(
    kind: str, batch: int, accumulation: int, trainer: type[Trainer] = Trainer, **options: Any
) -> Any:
    seen, model = Seen(), make_model()
    one = trainer(
        max_epochs=1,
        gradient_accumulation_steps=accumulation,
        log_every_n_steps=1,
        callbacks=[seen],
        **options,
    )
    loader = loader_of(kind, batch, workers=int(accumulation == 1 and trainer is Own))
    result = one.fit(model, loader, optimizer=lambda p: SGD(p, lr=0.0), loss_fn=nn.MSELoss())
    assert result.samples_seen == SAMPLES  # those that were asked for
    predicted = one.predict(model, loader)
    values = one.evaluate(model, loader, metrics=["mse"])
    found = torch.cat(one.found) if isinstance(one, Own) else None
    return seen.gradients, seen.losses, predicted, values, found


def fit_all(rank: int, size: int) -> dict[Any, Any]:
    found = {}
    for kind in KINDS:
        for batch in (WINDOW // size, WINDOW // size // 3):
            for trainer in (Trainer, Own, Twice):
                accumulation = WINDOW // size // batch
                found[kind, batch, trainer.__name__] = fit(kind, batch, accumulation, trainer)
    if size > 1:
        found["broken", 2, "sharded"] = fit("broken", 2, WINDOW // size // 2, strategy=FSDP())
    return found


@pytest.mark.parametrize("size", with_few([1], [1, 3]))
def test_rows_that_came_count(size: int) -> None:
    model = make_model()
    results = run_ranks(size, fit_all, size)
    for kind, (data, collate) in KINDS.items():
        gradients, losses, rows = [], [], []
        for inputs, targets in DataLoader(data(), WINDOW, collate_fn=collate):
            model.zero_grad()
            loss: Any = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            gradient = next(model.parameters()).grad
            assert gradient is not None
            gradients.append(gradient.flatten().clone())
            losses.append(loss.item())
            rows.append((inputs, targets))
        inputs, targets = (torch.cat(parts) for parts in zip(*rows, strict=True))
        outputs = model(inputs).detach()
        mean = nn.functional.mse_loss(outputs, targets).item()
        for case, (grads, logged, predicted, values, gathered) in (
            item for result in results for item in result.items() if item[0][0] == kind
        ):
            for ours, theirs in zip(grads, gradients, strict=True):
                assert (ours - theirs).norm() / theirs.norm() <= LIMIT, case
            assert logged == pytest.approx(losses, rel=LIMIT), case
            torch.testing.assert_close(predicted, outputs, rtol=LIMIT, atol=LIMIT)
            assert values == pytest.approx({"eval/loss": mean, "eval/mse": mean}, rel=1e-6), case
            if gathered is not None:
                assert torch.equal(gathered, targets.flatten()), case


def by_hand(rank: int, kind: str) -> Any:
    accelerator = Accelerator()
    model, loader = accelerator.prepare(make_model(), loader_of(kind, 3))
    pairs = [accelerator.gather_for_metrics((model(x), y)) for x, y in loader]
    return [torch.cat(parts).detach() for parts in zip(*pairs, strict=True)]


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["broken", "repeated", "stream"])
def test_an_own_loop_gathers_the_rows_that_came(kind: str) -> None:
    rows = [*loader_of(kind, SAMPLES)]
    for outputs, targets in run_ranks(2, by_hand, kind):
        assert torch.equal(targets, rows[0][1])
        torch.testing.assert_close(outputs, make_model()(rows[0][0]).detach(), rtol=0, atol=LIMIT)


def test_a_resume_in_an_epoch_of_such_batches_is_the_same_run(tmp_path: Path) -> None:
    whole, resumed = make_model(), make_model()
    options: Any = {"optimizer": lambda p: SGD(p, lr=0.1), "loss_fn": nn.MSELoss()}
    checkpoint = Checkpoint(every_n_steps=2, keep_last=None)
    trainer = Trainer(max_epochs=1, callbacks=[checkpoint], output_dir=tmp_path, seed=3)
    trainer.fit(whole, loader_of("repeated", 4), **options)
    (first, *_) = sorted((tmp_path / "checkpoints").iterdir())
    Trainer(max_epochs=1, callbacks=[], seed=3).fit(
        resumed, loader_of("repeated", 4), resume=first, **options
    )
    assert all(map(torch.equal, whole.parameters(), resumed.parameters()))


class OfTwo(Trainer):
    says_rows = True

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        losses = {name: (model(x) - y).square().mean() for name, (x, y) in batch.items()}
        if self.says_rows:
            return {name: StepOutput(loss, len(batch[name][0])) for name, loss in losses.items()}
        return losses


def test_of_several_loaders_a_weight_says_the_rows() -> None:
    loaders = {"a": loader_of("broken", 5), "b": loader_of("repeated", 5)}
    trainer = OfTwo(max_epochs=1, callbacks=[])
    options: Any = {"optimizer": lambda p: SGD(p, lr=0.1)}
    trainer.fit(make_model(), Combined(loaders, "min"), **options)
    trainer.says_rows = False
    with pytest.raises(DataError, match=r"of the training loader `\w` made \d rows of 5 samples"):
        trainer.fit(make_model(), Combined(loaders, "min"), **options)


def rows_of(data: Any, samples: list[Any], asked: int = 8) -> int:
    found = recounted(data, samples, asked)
    return found.rows if isinstance(found, Recounted) else asked


image, vector, time = torch.zeros(1, 9, 9), torch.zeros(4), torch.zeros(7, 2)
box = {"boxes": torch.zeros(1, 4), "labels": torch.zeros(1)}
crops = [torch.zeros(5, 4)] * 3
packed = [torch.zeros(1, 40), torch.zeros(1, 40)]
nodes, edges = torch.zeros(9, 3), torch.zeros(2, 30)
none = [None, None]


@pytest.mark.parametrize(
    ("data", "samples", "rows"),
    [
        ([torch.zeros(5, 4), torch.zeros(5)], [(vector, 0)] * 8, 5),
        ([torch.zeros(5, 8), torch.zeros(5)], [("text", 0)] * 8, 8),  # may be 5 steps of 8 samples
        ([torch.zeros(5, 9), torch.zeros(5, 1)], [("text", 0.5)] * 8, 5),
        ({"inputs": torch.zeros(5, 4), "names": ["a"] * 5}, [(vector, "a")] * 8, 5),
        (torch.zeros(5, 3, 9, 9), ["a.png"] * 8, 5),
        (torch.zeros(16, 4), [(vector,)] * 8, 16),
        ([torch.zeros(0, 9), torch.zeros(0, 3)], [(vector, 0)] * 8, 0),
        # Neither boxes nor the channels of an image are rows.
        (((image,) * 8, (box,) * 8), [(image, box)] * 8, 8),
        (((image,) * 6, (box,) * 6), [(image, box)] * 8, 6),
        (((image,) * 6, (box,) * 6), [(image, box)] * 6 + none, 6),
        ([(image, box)] * 2, [(image, box)] * 2 + [None] * 6, 2),
        ([crops, torch.zeros(5)], [([vector] * 3, 0)] * 8, 5),
        ([crops, torch.zeros(5)], [("image", 0)] * 8, 8),  # may be 3 samples
        # What replaces samples that are None counts.
        ([torch.zeros(8, 4), torch.zeros(8)], [(vector, 0)] * 6 + none, 8),
        # A batch that `__getitems__` made is no list of samples.
        ([torch.zeros(8, 4), torch.zeros(8)], [torch.zeros(8, 4), torch.zeros(8)], 8),
        # Time in dimension 0, packed rows, edges beside nodes.
        ([torch.zeros(7, 8, 2), torch.zeros(7, 8)], [(time, time[:, 0])] * 8, 8),
        ([torch.zeros(7, 6, 2), torch.zeros(7, 6)], [(time, time[:, 0])] * 6 + none, 6),
        (packed, [(torch.zeros(5), torch.zeros(5))] * 8, 8),
        (packed, [(torch.zeros(5), torch.zeros(5))] * 6 + none, 6),
        ([nodes, edges, torch.zeros(8)], [(vector, 0)] * 8, 8),
        # Graphs of two nodes each, joined.
        ([torch.zeros(16, 3), torch.zeros(16)], [nodes[:2]] * 8, 8),
        ([torch.zeros(12, 3), torch.zeros(12)], [(nodes[:2], 0)] * 6 + none, 6),
    ],
)
def test_what_counts_as_rows(data: Any, samples: list[Any], rows: int) -> None:
    assert rows_of(data, samples) == rows


def test_a_list_of_the_samples_that_are_left_is_one_of_samples() -> None:
    pair = (image, box)
    assert rows_of([pair], [pair, None], 2) == 1
    assert rows_of([pair, pair], [pair, (vector, box), pair], 3) == 2
