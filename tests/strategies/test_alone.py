"""Several launched processes, each with a training of its own."""

from pathlib import Path

import pytest
import torch

from tests.helpers.ranks import RanksError, run_ranks
from tests.helpers.toys import fit, make_trainer, toy_loaders, toy_model
from trainkit.callbacks import Checkpoint, EarlyStopping, JSONLLogger
from trainkit.distributed import Processes
from trainkit.strategies import SingleDevice


def member(rank: int, folder: Path, steps: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(rank)
    callbacks = [Checkpoint(every_n_steps=2), JSONLLogger()]
    callbacks.append(EarlyStopping("eval/loss", patience=1, mode="min"))
    trainer = make_trainer(
        strategy=SingleDevice(alone=True),
        seed=rank,
        max_steps=steps[rank],
        output_dir=folder / str(rank),
        callbacks=callbacks,
    )
    model = toy_model()
    fit(trainer, toy_loaders(), model)
    assert trainer.run is not None
    assert trainer.run.is_main_process
    trainer.save_model(folder / str(rank) / "export")
    return [x.detach().clone() for x in model.parameters()]


def joined(rank: int, folder: Path) -> float:
    """Train alone, exchange, and train alone again, as clients of a federation do."""
    processes = Processes.start()
    own = member(rank, folder / "first", (3, 5))
    total = processes.all_reduce(own[0].sum().reshape(1))
    member(rank, folder / "second", (4, 2))
    return float(total - own[0].sum())


def test_each_process_trains_by_itself_as_one_that_was_started_alone(tmp_path: Path) -> None:
    steps = 3, 7
    for rank, found in enumerate(run_ranks(2, member, tmp_path / "two", steps)):
        alone = run_ranks(1, _one, tmp_path / f"one-{rank}", rank, steps)[0]
        assert all(torch.equal(a, b) for a, b in zip(found, alone, strict=True))


def _one(rank: int, folder: Path, member_number: int, steps: tuple[int, ...]) -> list[torch.Tensor]:
    return member(member_number, folder, steps)


@pytest.mark.e2e
def test_what_was_trained_alone_is_exchanged_between_fits(tmp_path: Path) -> None:
    first, second = run_ranks(2, joined, tmp_path)
    assert first != second


def refused(rank: int) -> None:
    fit(make_trainer(strategy="single"))


def test_single_is_refused_with_the_switch_for_it(tmp_path: Path) -> None:
    with pytest.raises(RanksError, match=r"SingleDevice\(alone=True\)"):
        run_ranks(2, refused)
