"""The global generators are the caller's: no call moves them, a user's draws do (rule 12)."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from tests.helpers.ranks import run_ranks
from tests.helpers.toys import FEATURES, fit, make_trainer, toy_loaders, toy_model
from trainkit import Accelerator, Callback, Combined, Run, Trainer
from trainkit.basics.device import default_kind, get_rng_state, siblings
from trainkit.callbacks import BatchSizeFinder, Checkpoint, Evaluation, LRFinder, MLflowLogger
from trainkit.types import StepResult


def generators() -> tuple[Any, ...]:
    """Return where the global generators are."""
    numpy_state: Any = np.random.get_state()
    devices = siblings(torch.device(default_kind()))
    states = [torch.get_rng_state(), *(get_rng_state(device) for device in devices)]
    numpy_words = numpy_state[1].tolist(), *numpy_state[2:]
    return random.getstate(), numpy_words, [each.tolist() for each in states]


class Augmented(Dataset[Any]):
    """Samples that draw from all generators when they are read."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        noise = random.random() + np.random.rand()
        return torch.rand(FEATURES) + noise, index % 2


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return (Augmented()[index] for index in range(9))


class Fails(Exception):
    pass


class FailsLate(nn.CrossEntropyLoss):
    calls = 0

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 3:
            raise Fails
        return super().forward(outputs, targets)


def with_dropout() -> nn.Module:
    return nn.Sequential(toy_model(), nn.Dropout(0.5))


def fit_kind(kind: str, folder: Path) -> None:
    workers = DataLoader(Augmented(), 2, shuffle=True, num_workers=1)
    loaders: Any = {
        "workers": (workers, workers),
        "stream": (DataLoader(Stream(), 2), DataLoader(Stream(), 2)),
        "several": Combined({"a": toy_loaders()[0], "b": toy_loaders()[0]}, "min"),
    }.get(kind, toy_loaders())
    callback: dict[str, Callback] = {
        "rates": LRFinder(num_steps=3),
        "sizes": BatchSizeFinder(),
        "saved": Checkpoint(every_n_steps=2),
        "evaluated": Evaluation(every_n_steps=1, metrics=["accuracy"]),
    }
    callbacks = [callback[kind]] if kind in callback else []
    trainer = make_trainer(callbacks=callbacks, output_dir=folder)
    fit(trainer, loaders, with_dropout())


def replay(folder: Path) -> None:
    trainer = make_trainer(output_dir=folder, callbacks=[Checkpoint(every_n_steps=2)])
    fit(trainer, model=with_dropout())
    options: dict[str, Any] = {"optimizer": partial(torch.optim.SGD, lr=0.1)}
    options["loss_fn"] = nn.CrossEntropyLoss()
    trainer.replay(with_dropout(), toy_loaders(), step=3, **options)


def fail(folder: Path) -> None:
    with pytest.raises(Fails):
        fit(make_trainer(), loss_fn=FailsLate())


def look(call: str, data: Any, folder: Path) -> None:
    options: dict[str, Any] = {"loss_fn": nn.CrossEntropyLoss()} if call != "explain" else {}
    getattr(make_trainer(), call)(toy_model(), data, **options)


FITS = ("plain", "workers", "stream", "several", "rates", "sizes", "saved", "evaluated")
CALLS: dict[str, Callable[[Path], None]] = {
    **{f"fit, {kind}": partial(fit_kind, kind) for kind in FITS},
    **{
        f"{call}, {kind}": partial(look, call, data)
        for call in ("evaluate", "predict", "test", "explain")
        for kind, data in {
            "shuffled": toy_loaders()[0],
            "augmented": DataLoader(Augmented(), 2),
            "stream": DataLoader(Stream(), 2),
            "workers": DataLoader(Augmented(), 2, num_workers=1),
        }.items()
    },
    "replay": replay,
    "an error": fail,
}


@pytest.mark.filterwarnings("ignore:`predict` returns")
@pytest.mark.parametrize("call", CALLS)
def test_a_call_leaves_the_generators_where_they_were(call: str, tmp_path: Path) -> None:
    toy_model()  # seeds what accelerators there are, whenever one is made
    random.random(), np.random.rand(), torch.rand(())
    before = generators()
    CALLS[call](tmp_path)
    assert generators() == before


def leave(rank: int, strategy: str) -> list[bool]:
    random.seed(rank), np.random.seed(rank), torch.manual_seed(rank), toy_model()
    before, found = generators(), []
    trainer = make_trainer(strategy=strategy)
    fit(trainer, toy_loaders(18, 4), with_dropout())
    found.append(generators() == before)
    trainer.evaluate(toy_model(), toy_loaders()[1])
    found.append(generators() == before)
    if strategy == "fsdp":  # which gives it values
        with torch.device("meta"):
            model = nn.Linear(FEATURES, 2)
        trainer.strategy.wrap(model, trainer.precision, 0)
    found.append(generators() == before)
    try:
        fit(make_trainer(strategy=strategy), loss_fn=FailsLate())
    except Fails:
        found.append(generators() == before)
    return found


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_every_process_keeps_its_generators(strategy: str) -> None:
    assert run_ranks(2, leave, strategy) == [[True] * 4] * 2


def test_what_is_drawn_between_fits_differs_from_fit_to_fit() -> None:
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    members, rates, bootstraps = [], [], []
    for _ in range(3):
        model = nn.Linear(FEATURES, 2)
        members.append(tuple(model.weight.flatten().tolist()))
        rates.append(random.uniform(0.01, 0.1))
        bootstraps.append(tuple(np.random.randint(0, 32, 32).tolist()))
        fit(make_trainer(), model=model, optimizer=partial(torch.optim.SGD, lr=rates[-1]))
    assert len(set(members)) == len(set(rates)) == len(set(bootstraps)) == 3


def noisy() -> nn.Module:
    """A model that draws in evaluation too, as for Monte Carlo dropout."""

    class Noisy(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(inputs), 0.5, training=True)

    return Noisy(FEATURES, 2)


@pytest.mark.parametrize("after_a_fit", [False, True])
def test_what_a_model_draws_in_predict_is_what_a_loop_by_hand_draws(after_a_fit: bool) -> None:
    trainer, model, (_, loader) = make_trainer(), noisy(), toy_loaders()
    if after_a_fit:
        fit(trainer, model=model)
    torch.manual_seed(3)
    model.to(trainer.processes.device).eval()
    with torch.no_grad():
        parts = loader.dataset.tensors[0].to(trainer.processes.device).split(loader.batch_size)
        by_hand = [torch.cat([model(part) for part in parts]).cpu() for _ in range(3)]
    torch.manual_seed(3)
    found = [trainer.predict(model, loader) for _ in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(by_hand, found, strict=True))
    assert not torch.equal(found[0], found[1])


def predict_three(rank: int) -> bool:
    """Return whether this process, which has 2 samples or 1, draws for its own alone."""
    trainer, model = make_trainer(), noisy()
    loader = DataLoader(TensorDataset(torch.ones(3, FEATURES)), batch_size=1)
    torch.manual_seed(rank)
    trainer.predict(model, loader)
    found = generators()
    torch.manual_seed(rank)
    for _ in range(2 - rank):
        model(torch.ones(1, FEATURES, device=trainer.processes.device))
    return generators() == found


def test_a_batch_that_is_repeated_to_fill_up_moves_no_generator() -> None:
    assert run_ranks(2, predict_three) == [True, True]


class Looks(Callback):
    """Lets another trainer evaluate a model that draws, inside a fit."""

    def __init__(self) -> None:
        self.model = noisy()

    def on_step_end(self, run: Run, result: StepResult) -> None:
        make_trainer().predict(self.model, toy_loaders()[1])


def test_what_is_drawn_in_an_evaluation_inside_a_fit_is_not_drawn_from_its_streams() -> None:
    plain, watched = with_dropout(), with_dropout()
    fit(make_trainer(), model=plain)
    fit(make_trainer(callbacks=[Looks()]), model=watched)
    for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_checkpoint_that_is_saved_after_fit_holds_the_streams_of_the_run(tmp_path: Path) -> None:
    def weights(steps: int, folder: Path, resume: Any = None) -> tuple[Trainer, Tensor]:
        model, trainer = with_dropout(), make_trainer(max_steps=steps, output_dir=folder)
        fit(trainer, model=model, resume=resume, schedule="keep" if resume else None)
        return trainer, torch.cat([p.detach().flatten() for p in model.parameters()])

    _, unbroken = weights(6, tmp_path / "unbroken")
    trainer, _ = weights(3, tmp_path / "resumed")
    torch.manual_seed(9), torch.rand(5)
    trainer.save_checkpoint()
    assert torch.equal(weights(6, tmp_path / "resumed", "must")[1], unbroken)


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of sqlalchemy, to mlflow
def test_runs_in_mlflow_have_names_of_their_own(tmp_path: Path) -> None:
    for number in range(3):
        logger = MLflowLogger(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
        fit(make_trainer(callbacks=[logger], output_dir=tmp_path / str(number)))
    from mlflow import MlflowClient  # takes seconds

    runs = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}").search_runs(["0"])
    assert len({run.info.run_name for run in runs}) == 3


def test_an_own_loop_draws_only_what_the_same_loop_of_torch_does() -> None:
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    before = generators()
    accelerator.prepare(toy_model(), toy_loaders()[1])
    assert generators() == before
