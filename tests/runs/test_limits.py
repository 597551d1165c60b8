"""Limits on the batches of an epoch: the first of its order, and all that is planned follows."""

from tests.helpers.callbacks import OfOneRun
from tests.helpers.callbacks import StopsAt
from collections.abc import Callable
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from tests.data import streams
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import with_few
from tests.helpers.toys import fit, make_trainer, toy_dataset, toy_loaders, toy_model
from trainkit import Callback, CheckpointError, ConfigError, Run, StepResult, Trainer
from trainkit.callbacks import Checkpoint, Evaluation


class Seen(OfOneRun):
    """Keeps the first number of each sample by step, and the rates."""

    def __init__(self) -> None:
        self.steps: list[list[float]] = []
        self.rates: list[float] = []

    def on_step_start(self, run: Run) -> None:
        self.steps.append([])
        self.rates.append(run.optimizer.param_groups[0]["lr"])

    def on_microbatch_start(self, run: Run, batch: Any) -> None:
        self.steps[-1] += [round(row[0].item(), 5) for row in batch[0]]


def run_of(trainer: Trainer) -> Run:
    assert trainer.run is not None
    return trainer.run


def train(loader: Any, model: nn.Module | None = None, **settings: Any) -> tuple[Seen, Run]:
    options = {name: settings.pop(name) for name in ("resume", "lr_scheduler") if name in settings}
    seen, stop = Seen(), StopsAt(settings.pop("stop_at", None))
    trainer = make_trainer(**{"callbacks": [seen, stop, *settings.pop("more", [])]} | settings)
    fit(trainer, loader, model, **options)
    trainer.close()
    return seen, run_of(trainer)


def test_an_epoch_is_its_first_batches_and_all_plans_follow() -> None:
    loader = toy_loaders()[0]
    whole, _ = train(loader, max_epochs=2)
    seen, run = train(loader, max_epochs=2, limit_train_batches=3, lr_scheduler="linear")
    assert seen.steps == [*whole.steps[:3], *whole.steps[8:11]]
    assert (run.planned_steps, run.state.step, run.state.samples_seen) == (6, 6, 24)
    assert seen.rates == [pytest.approx(0.1 * (6 - step) / 6) for step in range(6)]


@pytest.mark.parametrize(("limit", "batches"), [(0.5, 4), (0.49, 3), (1.0, 8), (1, 1), (99, 8)])
def test_a_float_is_a_fraction_of_the_batches(limit: float, batches: int) -> None:
    assert train(toy_loaders(), limit_train_batches=limit)[1].state.step == batches


def test_windows_of_several_batches_end_where_the_limit_is() -> None:
    seen, run = train(toy_loaders()[0], gradient_accumulation_steps=2, limit_train_batches=3)
    assert [len(step) for step in seen.steps] == [8, 4]
    assert run.planned_steps == 2
    drops: dict[str, Any] = {"gradient_accumulation_steps": 2, "drop_last_window": True}
    assert train(toy_loaders()[0], limit_train_batches=3, **drops)[1].state.step == 1
    with pytest.raises(ConfigError, match="0 training steps per epoch"):
        train(toy_loaders()[0], limit_train_batches=1, **drops)


def test_an_evaluation_is_exact_on_the_batches_that_it_has() -> None:
    train_loader, _ = toy_loaders()
    data = toy_dataset(30, seed=1)
    model = toy_model()
    settings: dict[str, Any] = {"limit_eval_batches": 3, "more": [Evaluation(["accuracy"])]}
    _, run = train((train_loader, DataLoader(data, 4)), model, **settings)
    inputs, targets = data[:12]
    hits = model.cpu()(inputs).argmax(1) == targets
    assert run.metrics["eval/accuracy"] == pytest.approx(hits.double().mean().item())
    loss = nn.functional.cross_entropy(model(inputs), targets).item()
    assert run.metrics["eval/loss"] == pytest.approx(loss)
    assert run.state.step == 8  # training has no limit
    trainer = make_trainer(limit_eval_batches=3)
    whole = trainer.evaluate(model, DataLoader(data, 4), loss_fn=nn.CrossEntropyLoss())
    expected = nn.functional.cross_entropy(model.cpu()(data[:][0]), data[:][1]).item()
    assert whole["eval/loss"] == pytest.approx(expected)  # not an evaluation of `fit`


def test_overfitting_sees_the_same_batches_in_every_epoch() -> None:
    train_loader, evaluation = toy_loaders(64)
    whole, _ = train(train_loader)
    seen, run = train((train_loader, evaluation), max_epochs=3, overfit_batches=2)
    assert seen.steps == whole.steps[:2] * 3
    assert run.planned_steps == 6
    assert [loader.samples_per_epoch for loader in run.evaluation.loaders.values()] == [8]
    everything, _ = train(train_loader, max_epochs=2, overfit_batches=1.0)
    assert everything.steps == whole.steps * 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"limit_train_batches": 0}, "`limit_train_batches` must be a whole number of batches"),
        ({"limit_eval_batches": 1.5}, "`limit_eval_batches` must be .* but is 1.5"),
        ({"overfit_batches": True}, "`overfit_batches` must be"),
        ({"overfit_batches": 1, "limit_eval_batches": 2}, "`overfit_batches` limits training and"),
        ({"dry_run": -1}, "`dry_run` must be a whole number of at least 1, but is -1"),
        (
            {"limit_train_batches": 0.01},
            "gives each process 8 batches, so a limit of 0.01 of them is none",
        ),
    ],
)
def test_what_cannot_work_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        train(toy_loaders(), **settings)


def test_a_fraction_of_an_unknown_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="an unknown number of batches"):
        on_stream("Counting", Path(), limit_train_batches=0.5)


class Batches(BatchSampler):
    """A batch sampler of its own, with batches of 1, 2, 3, 4, 1, ... samples."""

    def __init__(self, data: TensorDataset) -> None:
        super().__init__(RandomSampler(data), 1, drop_last=False)

    def __iter__(self) -> Any:
        indices, number = iter(list(self.sampler)), 0
        while batch := list(islice(indices, number % 4 + 1)):
            yield batch
            number += 1

    def __len__(self) -> int:
        return 14


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: toy_loaders()[0],
    "batch sampler": lambda: DataLoader(toy_dataset(), batch_sampler=Batches(toy_dataset())),
    "list": lambda: [toy_dataset()[4 * i : 4 * i + 4] for i in range(8)],
    "keys": lambda: DataLoader(_Rows(), batch_size=None, shuffle=True),
}


class _Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return toy_dataset()[4 * index : 4 * index + 4]


def weights(run: Run) -> list[Tensor]:
    return [p.detach().clone() for p in run.module.parameters()]


RESUMES = [
    (limit, kind, stop_at)
    for limit in ("limit_train_batches", "overfit_batches")
    for kind in LOADERS
    for stop_at in (2, 5, 6)
]
FEW = [("limit_train_batches", kind, 2) for kind in LOADERS] + [("overfit_batches", "shuffled", 6)]


@pytest.mark.parametrize(("limit", "kind", "stop_at"), with_few(FEW, RESUMES))
def test_a_resume_goes_on_inside_the_limit(
    limit: str, kind: str, stop_at: int, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        limit: 5,
        "max_epochs": 3,
        "lr_scheduler": "cosine",
        "output_dir": tmp_path,
    }
    saves: dict[str, Any] = {"more": [Checkpoint(every_n_steps=1)]}
    whole, expected = train(LOADERS[kind](), **options | {"output_dir": None})
    train(LOADERS[kind](), **options, **saves, stop_at=stop_at)
    again, run = train(LOADERS[kind](), **options, **saves, resume="must")
    assert again.steps == whole.steps[stop_at:]
    assert all(map(torch.equal, weights(run), weights(expected)))
    assert run.state == expected.state


@pytest.mark.parametrize("kind", LOADERS)
def test_a_resume_with_another_limit_is_refused(kind: str, tmp_path: Path) -> None:
    saves: dict[str, Any] = {
        "more": [Checkpoint(every_n_steps=1)],
        "output_dir": tmp_path,
        "max_epochs": 2,
    }
    train(LOADERS[kind](), **saves, limit_train_batches=3)
    others: list[dict[str, Any]] = [{}, {"limit_train_batches": 4}, {"overfit_batches": 3}]
    for other in others:
        with pytest.raises(CheckpointError, match=r"limit_train_batches|overfit_batches"):
            train(LOADERS[kind](), **saves, **other, resume="must")


def test_another_limit_of_evaluation_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"output_dir": tmp_path, "max_epochs": 2}
    train(toy_loaders(), **options, more=[Checkpoint()], stop_at=3)
    train(toy_loaders(), **options, more=[Checkpoint()], limit_eval_batches=1, resume="must")
    assert "`limit_eval_batches` was None and is 1" in capsys.readouterr().out


def on_stream(kind: str, folder: Path, rank: int = 0, **settings: Any) -> tuple[list[Any], Run]:
    workers: dict[str, Any] = settings.pop("workers", {})
    resume, batch = settings.pop("resume", None), settings.pop("batch", 2)
    seen, stop = Seen(), StopsAt(settings.pop("stop_at", None))
    trainer = make_trainer(
        callbacks=[seen, stop, Checkpoint(every_n_steps=1)], output_dir=folder, max_epochs=3, **settings
    )
    trainer.fit(
        nn.Linear(2, 1).double(),
        DataLoader(getattr(streams, kind)(), batch, **workers),
        optimizer=partial(torch.optim.SGD, lr=1e-3),
        loss_fn=nn.MSELoss(),
        resume=resume,
    )
    trainer.close()
    return seen.steps, run_of(trainer)


TWO = {"num_workers": 2}
LASTING = {"num_workers": 1, "persistent_workers": True}
STREAMS: list[tuple[str, dict[str, Any]]] = [
    (kind, {})
    for kind in ("Counting", "Buffering", "Walking", "Stateless", "Ending", "Sticking", "Epochs")
]
STREAMS += [
    ("Counting", TWO),
    ("Counting", LASTING),
    ("Epochs", LASTING),
    ("Walking", LASTING),
    ("Stateless", TWO),
]


@pytest.mark.parametrize(("kind", "workers"), with_few([STREAMS[0], STREAMS[3]], STREAMS))
def test_streams_are_limited_and_resumed(
    kind: str, workers: dict[str, Any], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"limit_train_batches": 4, "workers": workers}
    whole, _ = on_stream(kind, tmp_path / "whole", **options)
    assert [len(step) for step in whole] == [2] * 12
    if kind not in ("Buffering", "Epochs"):
        assert [value for step in whole[4:8] for value in step] == [*range(8)]
    for stop_at in (3, 6, 9) if not workers else (6,):
        place = tmp_path / f"{stop_at}"
        on_stream(kind, place, **options, stop_at=stop_at)
        rest, _ = on_stream(kind, place, **options, resume="must")
        assert rest == whole[stop_at:], stop_at


def test_a_stream_that_is_shorter_changes_the_plan_aloud(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps, run = on_stream("Counting", tmp_path, limit_train_batches=20)
    assert (len(steps), run.planned_steps) == (33, 33)
    assert "epoch 0 has 11 steps, so 33 steps are planned now, and no longer 60" in (
        capsys.readouterr().out
    )


def stream_rank(rank: int, kind: str, folder: Path, **settings: Any) -> list[Any]:
    return on_stream(kind, folder, rank, limit_train_batches=4, **settings)[0]


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["Counting", "Sharded"])
def test_two_processes_limit_and_resume_streams(kind: str, tmp_path: Path) -> None:
    whole = run_ranks(2, stream_rank, kind, tmp_path / "whole")
    assert [len(steps) for steps in whole] == [12, 12]
    run_ranks(2, stream_rank, kind, tmp_path / "cut", stop_at=6)
    rest = run_ranks(2, stream_rank, kind, tmp_path / "cut", resume="must")
    assert rest == [steps[6:] for steps in whole]


def mapped_rank(rank: int, batch: int, folder: Path | None = None, **settings: Any) -> Any:
    loader = DataLoader(toy_dataset(52), batch, shuffle=True)
    evaluation = DataLoader(toy_dataset(30, seed=1), batch)
    more = [Evaluation(["accuracy"]), *([] if folder is None else [Checkpoint(every_n_steps=1)])]
    seen, run = train((loader, evaluation), more=more, output_dir=folder, **settings)
    return seen.steps, run.metrics, run.state.samples_seen, run.planned_steps


LIMITS = {"max_epochs": 2, "limit_train_batches": 5, "limit_eval_batches": 2}


def together(ranks: list[Any]) -> list[list[float]]:
    steps = zip(*(of_rank[0] for of_rank in ranks), strict=True)
    return [sorted(chain.from_iterable(parts)) for parts in steps]


@pytest.mark.e2e
def test_two_processes_use_the_samples_of_one(tmp_path: Path) -> None:
    one = run_ranks(1, mapped_rank, 8, tmp_path / "one", **LIMITS)
    two = run_ranks(2, mapped_rank, 4, tmp_path / "two", **LIMITS)
    assert together(two) == together(one)
    assert [found[2:] for found in two] == [one[0][2:]] * 2 == [(80, 10)] * 2
    for _, metrics, *_ in two:  # of 16 samples
        assert metrics["eval/accuracy"] == one[0][1]["eval/accuracy"]
        assert metrics["eval/loss"] == pytest.approx(one[0][1]["eval/loss"], rel=1e-6)


@pytest.mark.e2e
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_resume_on_other_processes_goes_on_inside_the_limit(
    before: int, after: int, tmp_path: Path
) -> None:
    whole = run_ranks(1, mapped_rank, 8, tmp_path / "whole", **LIMITS)
    run_ranks(before, mapped_rank, 8 // before, tmp_path, **LIMITS, stop_at=4)
    rest = run_ranks(after, mapped_rank, 8 // after, tmp_path, **LIMITS, resume="must")
    assert together(rest) == together(whole)[4:]
