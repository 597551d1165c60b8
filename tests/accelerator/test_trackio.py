"""Trackio, under both faces."""

from pathlib import Path

import pytest
import torch

from tests.helpers.toys import fit, make_trainer
from trainkit import Accelerator
from trainkit.callbacks import Logger
from trainkit.trackers.trackio import TrackioTracker


def test_trackio_gets_values_and_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    for _ in range(2):
        tracker = TrackioTracker("digits", name="first", resume="allow")
        callbacks = [Logger(tracker)]
        fit(make_trainer(max_steps=4, log_every_n_steps=2, hparams={"a": 1}, callbacks=callbacks))
    drawn = torch.random.get_rng_state()
    accelerator = Accelerator(log_with="trackio")
    accelerator.init_trackers("loop", config={"b": 2})
    accelerator.log({"x": torch.tensor(3.0)}, step=1)
    accelerator.end_training()
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert storage.get_runs("digits") == ["first"]
    logs = storage.get_logs("digits", "first")
    assert [each["step"] for each in logs if "train/loss" in each] == [2, 4, 2, 4]
    (run,) = storage.get_runs("loop")
    assert storage.get_logs("loop", run)[0]["x"] == 3.0
