"""Tests of micro-batches that are cut until they fit, and of nothing else that changes."""

import random
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader, IterableDataset

from tests.helpers.callbacks import FailsAt
from tests.helpers.ranks import RanksError, run_ranks
from tests.helpers.tiers import with_few
from tests.helpers.toys import toy_dataset
from trainkit import Callback, ConfigError, Run, Trainer
from trainkit.callbacks import BatchSizeFinder, Checkpoint
from trainkit.data.split import piece_size, slice_samples

MESSAGES = {
    "device": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "host": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"),
    "windows": RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9"),
}


class Limited(nn.Module):
    """Runs out of memory with too many samples, and has buffers that each forward moves."""

    seen: Tensor

    def __init__(self, most: int, kind: str = "device") -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.most = most
        self.kind = kind
        self.forwards: list[int] = []
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += len(inputs)
        random.random(), numpy.random.random(), torch.rand(1)
        if self.training:
            self.forwards.append(len(inputs))
        if self.training and len(inputs) > self.most:
            raise MESSAGES[self.kind]
        return self.last(torch.tanh(self.first(inputs)))  # type: ignore[no-any-return]


class Trail(Callback):
    """Keeps the samples and gradients of each step, and what is there before the first."""

    def __init__(self) -> None:
        self.samples: list[list[Tensor]] = []
        self.gradients: list[list[Tensor]] = []
        self.before: list[Any] = []

    def on_step_start(self, run: Run) -> None:
        self.samples.append([])
        if not self.before:
            state = [p.detach().clone() for p in run.module.parameters()]
            self.before = [*state, run.optimizer.state_dict()["state"], run.state.state_dict()]
            self.before += [random.random(), numpy.random.random(), torch.rand(2)]
            self.before += [p.grad is None for p in run.module.parameters()]
            self.before += [run.module.get_buffer("seen").clone()]

    def on_microbatch_start(self, run: Run, batch: Any) -> None:
        self.samples[-1].append(batch[0].clone())

    def on_gradients(self, run: Run) -> None:
        gradients = [p.grad for p in run.module.parameters()]
        self.gradients.append([g.clone() for g in gradients if g is not None])


def train(most: int, batch_size: int = 8, **options: Any) -> tuple[Limited, Trail, Run]:
    """Train, with a finder unless `finder` says otherwise."""
    finder = options.pop("finder", None) or BatchSizeFinder()
    trail, stop = Trail(), FailsAt(options.pop("stop_at", None), KeyboardInterrupt())
    model = Limited(most, options.pop("kind", "device"))
    data = options.pop("data", None) or toy_dataset(28)
    shuffle = not isinstance(data, IterableDataset)
    accumulation = options.pop("accumulation", 1)
    resume, more = options.pop("resume", None), options.pop("more", [])
    optimizer = options.pop("optimizer", partial(AdamW, lr=0.05, weight_decay=0.1))
    callbacks = [*([] if finder == "none" else [finder]), trail, stop, *more]
    trainer = options.pop("trainer", Trainer)(
        max_epochs=2,
        callbacks=callbacks,
        gradient_accumulation_steps=accumulation,
        max_grad_norm=1.0,
        **options,
    )
    with suppress(KeyboardInterrupt):
        trainer.fit(
            model,
            DataLoader(data, batch_size, shuffle=shuffle),
            optimizer=optimizer,
            loss_fn=nn.CrossEntropyLoss(),
            resume=resume,
        )
    run = trainer.run
    assert run is not None
    trainer.close()
    return model, trail, run


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def alike(first: Any, second: Any) -> bool:
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(alike, first, second))
    if isinstance(first, Tensor):
        return torch.equal(first, second)
    return bool(first == second)


@pytest.mark.parametrize("kind", MESSAGES)
def test_the_maths_are_those_of_smaller_batches_and_more_of_them(kind: str) -> None:
    finder = BatchSizeFinder()
    model, trail, run = train(5, finder=finder, kind=kind)
    assert finder.size == 4
    assert [len(piece) for piece in trail.samples[0]] == [4, 4]
    assert run.state.samples_seen == 56
    by_hand, same, _ = train(9, batch_size=4, accumulation=2, finder="none")
    assert alike(weights(model), weights(by_hand))
    assert alike(trail.samples, same.samples)
    assert alike(trail.gradients, same.gradients)
    whole, other, _ = train(9, finder="none")
    assert alike([torch.cat(step) for step in trail.samples], [s[0] for s in other.samples])
    for mine, expected in zip(trail.gradients, other.gradients, strict=True):
        torch.testing.assert_close(mine, expected)
    torch.testing.assert_close(weights(model), weights(whole))


def test_a_trial_leaves_no_trace() -> None:
    _, trail, _ = train(3)
    _, untried, _ = train(9, finder="none")
    assert alike(trail.before, untried.before)


def test_where_all_fits_nothing_is_cut() -> None:
    finder = BatchSizeFinder()
    model, trail, _ = train(9, finder=finder)
    assert finder.size is None
    other, untried, _ = train(9, finder="none")
    assert alike(weights(model), weights(other))
    assert alike(trail.samples, untried.samples)


@pytest.mark.parametrize(
    ("most", "size", "tried"), [(7, 4, [8, 4, 4]), (3, 3, [8, 4, 2, 2, 3, 3]), (1, 1, [8, 4, 2, 1])]
)
def test_the_search_finds_the_largest_equal_pieces(most: int, size: int, tried: list[int]) -> None:
    finder = BatchSizeFinder()
    model, _, _ = train(most, finder=finder)
    assert finder.size == size
    assert model.forwards[: len(tried)] == tried


def test_accumulation_goes_on_top() -> None:
    _, trail, run = train(2, accumulation=3, batch_size=4)
    assert [len(step) for step in trail.samples] == [6, 6, 2, 6, 6, 2]
    assert run.state.step == 6


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_it_works_in_half_precision(precision: str) -> None:
    model, _, _ = train(4, precision=precision)
    whole, _, _ = train(9, precision=precision, finder="none")
    torch.testing.assert_close(weights(model), weights(whole), rtol=0.05, atol=0.02)


def test_momentum_has_its_memory_and_loses_it_again() -> None:
    model, trail, _ = train(4, optimizer=partial(SGD, lr=0.1, momentum=0.9))
    whole, other, _ = train(9, finder="none", optimizer=partial(SGD, lr=0.1, momentum=0.9))
    assert alike(trail.before, other.before)
    torch.testing.assert_close(weights(model), weights(whole))


class Weighted(Trainer):
    def training_step(self, model: nn.Module, batch: Any) -> Any:
        assert self.run is not None
        logits, targets = model(batch[0]), batch[1]
        self.run.log({"seen": len(targets)}, reduce="sum")
        loss = nn.functional.cross_entropy(logits, targets)
        return {"loss": loss, "weight": torch.tensor(float(len(targets)))}


def test_weights_of_the_step_count_too() -> None:
    model, _, run = train(3, trainer=Weighted)
    whole, _, _ = train(9, trainer=Weighted, finder="none")
    torch.testing.assert_close(weights(model), weights(whole))
    assert run.logging.sums.reduce(run.strategy.processes)["seen"] == 56


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(toy_dataset(28))


@pytest.mark.parametrize("drop", [False, True])
def test_a_stream_is_read_once(drop: bool) -> None:
    _, trail, run = train(3, data=Stream(), drop_last_window=drop, accumulation=2)
    _, other, whole = train(9, data=Stream(), drop_last_window=drop, accumulation=2, finder="none")
    assert run.state == whole.state
    for mine, expected in zip(trail.gradients, other.gradients, strict=True):
        torch.testing.assert_close(mine, expected)


def train_rank(rank: int, most: list[int], finder: Any = None, **options: Any) -> Any:
    finder = finder or BatchSizeFinder()
    model, trail, run = train(most[rank], finder=finder, **options)
    found = None if finder == "none" else finder.size
    return found, weights(model), trail.samples, run.state.samples_seen


@pytest.mark.parametrize("size", with_few([], [2, 3]))
def test_the_process_with_least_memory_decides(size: int) -> None:
    most = [9, 2, 3][:size]
    results = run_ranks(size, train_rank, most)
    whole = run_ranks(size, train_rank, [9, 9, 9], "none")
    for result, expected in zip(results, whole, strict=True):
        assert result[0] == 2
        assert result[3] == expected[3] == 56
        torch.testing.assert_close(result[1], expected[1])
        assert alike(result[1], results[0][1])
        mine = [torch.cat(step) for step in result[2] if step]
        assert alike(mine, [torch.cat(step) for step in expected[2] if step])


class Gathers(Trainer):
    def training_step(self, model: nn.Module, batch: Any) -> Any:
        assert self.run is not None
        if not self.run.zero_weight:
            size = len(batch[1])
            assert len(self.run.processes.loaders.current().counts) == 2  # type: ignore[union-attr]
            assert self.run.processes.loaders.current().local_size == size  # type: ignore[union-attr]
        return super().training_step(model, batch)


@pytest.mark.e2e
def test_the_batch_under_way_is_the_piece() -> None:
    def body(rank: int) -> int | None:
        finder = BatchSizeFinder()
        train(3, finder=finder, trainer=Gathers)
        return finder.size

    assert run_ranks(2, body) == [3, 3]


class Reduces(Trainer):
    def training_step(self, model: nn.Module, batch: Any) -> Any:
        assert self.run is not None
        self.run.processes.reduce(torch.ones(1))
        return super().training_step(model, batch)


def test_collectives_in_the_step_are_refused() -> None:
    with pytest.raises(RanksError, match="inside `the trial of BatchSizeFinder`"):
        run_ranks(2, train_rank, [9, 9], trainer=Reduces)


def resumed(rank: int, folder: Path, most: int, **options: Any) -> Any:
    finder = BatchSizeFinder()
    save = [Checkpoint(every_n_steps=2)]
    model, _, _ = train(most, finder=finder, more=save, output_dir=folder, **options)
    return finder.size, weights(model), model.forwards


@pytest.mark.parametrize("size", with_few([], [1, 2]))
def test_a_resume_uses_the_same_size_without_a_trial(size: int, tmp_path: Path) -> None:
    whole = run_ranks(size, resumed, tmp_path / "whole", 3)
    run_ranks(size, resumed, tmp_path / "cut", 3, stop_at=3)
    found = run_ranks(size, resumed, tmp_path / "cut", 99, resume="must")  # all would fit now
    for mine, expected in zip(found, whole, strict=True):
        assert mine[0] == expected[0] == 3
        assert alike(mine[1], expected[1])
        assert mine[2] == expected[2]  # those before the resume came back with the model


def test_a_second_fit_looks_anew() -> None:
    finder = BatchSizeFinder()
    train(3, finder=finder)
    train(9, finder=finder)
    assert finder.size is None


def test_where_not_even_one_sample_fits_the_cause_is_told() -> None:
    with pytest.raises(ConfigError, match="even with one sample") as caught:
        train(0)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_other_errors_of_the_step_come_through() -> None:
    class Fails(Trainer):
        def training_step(self, model: nn.Module, batch: Any) -> Any:
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        train(3, trainer=Fails)


def shard(rank: int) -> None:
    train(3, strategy="fsdp")


@pytest.mark.e2e
def test_sharded_parameters_are_refused() -> None:
    with pytest.raises(RanksError, match="does not work with sharded parameters"):
        run_ranks(2, shard)


def test_two_of_them_are_refused() -> None:
    second = BatchSizeFinder()
    second.name = "second"
    with pytest.raises(ConfigError, match="two `BatchSizeFinder`s"):
        train(3, more=[second])


@pytest.mark.parametrize(
    ("batch", "piece"),
    [
        (torch.arange(4), torch.tensor([1, 2])),
        ({"x": torch.ones(4, 3), "n": torch.tensor(7)}, {"x": torch.ones(2, 3), "n": 7}),
        ([torch.arange(4), list("abcd")], [torch.tensor([1, 2]), ["b", "c"]]),
        ([torch.zeros(i, 4) for i in range(4)], [torch.zeros(i, 4) for i in (1, 2)]),
        ((numpy.arange(4), None, "name"), (numpy.array([1, 2]), None, "name")),
    ],
)
def test_batches_of_many_forms_are_cut(batch: Any, piece: Any) -> None:
    found = slice_samples(batch, 1, 3, 4)
    assert type(found) is type(batch)
    assert repr(found).replace("tensor(7)", "7") == repr(piece)


def test_a_batch_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"4 samples cannot be cut.*`Tensor` of shape \(9, 4\)"):
        slice_samples({"x": torch.ones(4), "steps": torch.ones(9, 4)}, 0, 2, 4)
    with pytest.raises(ConfigError, match=r"2 samples cannot be cut.*`Tensor` of shape \(9, 4\)"):
        slice_samples((torch.ones(2), torch.ones(9, 4)), 0, 1, 2)


@pytest.mark.parametrize(
    ("samples", "size", "piece"), [(10, 8, 5), (7, 2, 2), (7, 3, 3), (4, 4, 4)]
)
def test_pieces_are_equal_and_few(samples: int, size: int, piece: int) -> None:
    assert piece_size(samples, size) == piece


def test_fields_are_told_from_samples_where_there_are_as_many() -> None:
    x, y = torch.arange(2.0)[:, None], torch.arange(2)
    mask = torch.tensor(3.0)
    cut: list[tuple[Any, Any]] = [
        (["a", "b"], ["b"]),
        (None, None),
        (mask, mask),
        ({"ids": [7, 8]}, {"ids": [8]}),
    ]
    for others, expected in cut:
        first, other = slice_samples((x, others), 1, 2, 2)
        assert torch.equal(first, x[1:])
        assert other is expected or other == expected
    assert torch.equal(slice_samples((x, y), 1, 2, 2)[1], y[1:])
    ragged = [torch.ones(2, 4), torch.ones(3, 4)]
    assert slice_samples({"x": x, "boxes": ragged}, 1, 2, 2)["boxes"][0].shape == (3, 4)
    targets = [{"boxes": torch.ones(2, 4)}, {"boxes": torch.ones(3, 4)}]
    assert slice_samples((x, targets), 1, 2, 2)[1][0]["boxes"].shape == (3, 4)


@pytest.mark.parametrize("other", [torch.ones(2, 4), "a name", None, torch.tensor(3.0)])
def test_a_list_that_can_be_read_in_two_ways_is_not_cut(other: Any) -> None:
    batch = {"x": torch.arange(2.0), "pair": [torch.ones(2, 4), other]}
    with pytest.raises(ConfigError, match="may be 2 samples, or 2 fields"):
        slice_samples(batch, 0, 1, 2)
