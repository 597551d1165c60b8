"""The last good checkpoint is never replaced by one that is not finite, unless asked (rule 27)."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from tests.helpers.ranks import run_ranks
from tests.helpers.toys import fit, toy_loaders, toy_model
from trainkit import Callback, NonFiniteError, Run, StepResult, Trainer
from trainkit.callbacks import Checkpoint
from trainkit.checkpoint import CheckpointStore
from trainkit.cli.main import main
from trainkit.strategies import FSDP, Strategy

BAD_STEP = 3  # after which something is not finite


class Spoils(Callback):
    """Makes one number of one parameter NaN, on the last process alone if they are shards."""

    def on_step_end(self, run: Run, result: StepResult) -> None:
        last = run.processes.num_processes - 1
        if run.state.step == BAD_STEP and run.processes.process_index in (0, last):
            with torch.no_grad():
                (*_, part) = run.strategy.local_parts(run.module.parameters())
                part.view(-1)[-1:] = torch.nan if run.processes.process_index == last else 1.0


def train(
    folder: Path,
    *extra: Callback,
    resume: str | None = None,
    strategy: Any = "auto",
    **options: Any,
) -> Run:
    trainer = Trainer(
        max_steps=6,
        output_dir=folder,
        strategy=strategy,
        callbacks=[*extra, Checkpoint(every_n_steps=1, **options)],
    )
    fit(trainer, toy_loaders(48)[0], resume=resume)
    assert trainer.run is not None
    return trainer.run


def steps(folder: Path) -> dict[int, bool]:
    """Return the checkpoints there are, and whether each is finite."""
    store = CheckpointStore(folder / "checkpoints")
    return {entry.step: entry.manifest.is_finite for entry in store.checkpoints()}


@pytest.mark.parametrize("background", [False, True])
def test_the_newest_finite_one_stays_beside_the_newest(
    tmp_path: Path, background: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path, Spoils(), keep_last=1, background=background)
    assert steps(tmp_path) == {2: True, 6: False}
    assert capsys.readouterr().out.count("parameters or the loss of step 3 are not finite") == 1
    main(["checkpoint", "ls", str(tmp_path)])
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.endswith("step-00000006  last, NOT FINITE")


def test_a_resume_takes_the_newest_finite_one_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "spoiled", Spoils())
    capsys.readouterr()
    resumed = train(tmp_path / "spoiled", resume="auto")
    assert "Passed over step 6: its parameters, or the loss before it, are not" in (
        capsys.readouterr().out
    )
    assert resumed.checkpoints.resumed_from == 2
    straight = train(tmp_path / "straight")
    for one, other in zip(resumed.parameters, straight.parameters, strict=True):
        assert torch.equal(one, other)
    assert steps(tmp_path / "spoiled")[6]
    assert train(tmp_path / "spoiled", resume="auto").checkpoints.resumed_from == 6


class Infinite(nn.Module):
    """A loss that becomes infinite where its gradient does not."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        loss = nn.functional.cross_entropy(outputs, targets)
        return loss + torch.inf if self.calls == BAD_STEP else loss


def test_a_loss_that_is_not_finite_counts_too_and_is_over_with_the_next(tmp_path: Path) -> None:
    trainer = Trainer(
        max_steps=6,
        output_dir=tmp_path,
        callbacks=[Checkpoint(every_n_steps=1, keep_last=None)],
    )
    trainer.fit(toy_model(), toy_loaders(48)[0], optimizer=partial(SGD, lr=0.1), loss_fn=Infinite())
    assert steps(tmp_path) == {step: step != BAD_STEP for step in range(1, 7)}


def test_it_is_refused_where_asked(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteError, match=r"Nothing is saved: .* step 3 are not finite"):
        train(tmp_path, Spoils(), non_finite="raise")
    assert steps(tmp_path) == {2: True}


def test_it_is_like_any_other_where_asked(tmp_path: Path) -> None:
    train(tmp_path, Spoils(), non_finite="allow")
    assert steps(tmp_path) == {6: True}


def test_it_is_never_the_best(tmp_path: Path) -> None:
    trainer = Trainer(
        max_steps=4,
        output_dir=tmp_path,
        callbacks=[Spoils(), Checkpoint(every_n_steps=1, keep_best=("eval/loss", "min"))],
    )
    fit(trainer, toy_loaders(48))
    assert not steps(tmp_path)[4]
    assert 2 in steps(tmp_path)


def sharded(rank: int, folder: Path) -> dict[int, bool]:
    strategy: Strategy = FSDP()
    train(folder, Spoils(), strategy=strategy)
    return steps(folder)


@pytest.mark.e2e
def test_one_bad_shard_marks_the_checkpoint_of_all(tmp_path: Path) -> None:
    assert run_ranks(2, sharded, tmp_path) == [{2: True, 6: False}] * 2
    manifest = tmp_path / "checkpoints" / "step-00000006" / "manifest.json"
    assert json.loads(manifest.read_text())["metadata"]["finite"] is False
