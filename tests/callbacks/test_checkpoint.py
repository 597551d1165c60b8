"""When checkpoints are saved, and which of them stay."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.toys import fit, toy_loaders
from trainkit import Callback, ConfigError, Run, Trainer
from trainkit.callbacks import Checkpoint, Evaluation
from trainkit.checkpoint import CheckpointStore


class Worse(Trainer):
    """Its evaluation gets worse with every step."""

    def evaluation_step(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        assert self.run is not None
        return {"loss": torch.tensor(float(self.run.state.step))}


def saved(folder: Path, checkpoint: Checkpoint, *others: Callback, **options: Any) -> list[int]:
    """Train two epochs of four steps; return the steps that are kept."""
    trainer = Worse(
        **({"max_epochs": 2} | options), output_dir=folder, callbacks=[*others, checkpoint]
    )
    fit(trainer, toy_loaders(batch_size=8))
    return [entry.step for entry in CheckpointStore(folder / "checkpoints").checkpoints()]


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, [4, 8]),
        ({"every_n_steps": 3}, [3, 6, 8]),
        ({"every_n_epochs": 1}, [4, 8]),
        ({"every_n_epochs": 2}, [8]),
        ({"every_n_steps": 3, "every_n_epochs": 1}, [3, 4, 6, 8]),
        ({"every_minutes": 1e-9}, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({"every_minutes": 1e9}, [8]),
        ({"every_n_steps": 1, "keep_last": 2}, [7, 8]),
        ({"every_n_steps": 1, "keep_last": 1, "keep_every": 3}, [3, 6, 8]),
        ({"every_n_steps": 1, "keep_last": 1, "keep_best": ("eval/loss", "min")}, [2, 8]),
        ({"every_n_steps": 1, "keep_last": 1, "keep_best": ("eval/loss", "max")}, [8]),
    ],
)
@pytest.mark.parametrize("background", [False, True])
def test_what_is_saved_and_stays(
    settings: dict[str, Any], kept: list[int], background: bool, tmp_path: Path
) -> None:
    checkpoint = Checkpoint(**{"keep_last": None} | settings, background=background)
    assert saved(tmp_path, checkpoint, Evaluation(every_n_steps=2)) == kept


class Clock(Callback):
    """Plays `time`: 25 seconds pass with each step."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def on_step_start(self, run: Run) -> None:
        self.now += 25


def test_minutes_are_counted_from_the_last_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("trainkit.callbacks.checkpoint.time", clock)
    assert saved(tmp_path, Checkpoint(every_minutes=1, keep_last=None), clock) == [3, 6, 8]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every_n_steps": 0}, "`every_n_steps` must be"),
        ({"every_n_epochs": True}, "`every_n_epochs` must be"),
        ({"every_minutes": float("nan")}, "`every_minutes` must be"),
        ({"keep_best": ["eval/loss", "min"]}, "`keep_best` must be"),
        ({"keep_best": ("eval/loss", "best")}, r"`keep_best` must say .* \(lower is better\)"),
        ({"keep_last": 0}, "`keep_last` must be"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Checkpoint(**settings)


def test_a_figure_that_no_evaluation_gives_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"keeps the best by 'eval/nothing'.*eval/loss"):
        saved(tmp_path, Checkpoint(keep_best=("eval/nothing", "min")), Evaluation())
    with pytest.raises(ConfigError, match="has none"):
        fit(Trainer(max_steps=1, callbacks=[Checkpoint()]))
