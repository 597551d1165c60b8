"""Tests of what runs on the main process only."""

import contextlib
import io
import json
from pathlib import Path

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.helpers.toys import fit, make_trainer
from trainkit import Callback, ConfigError, DistributedError, Run, StepResult
from trainkit.callbacks import (
    Evaluation,
    JSONLLogger,
    MainProcess,
    Summary,
    TensorBoardLogger,
    Timer,
    WandbLogger,
    main_process_only,
)
from trainkit.training.callback_list import CallbackList


class _Counter(Callback):
    def __init__(self) -> None:
        self.steps = 0
        self.ends = 0

    def on_step_end(self, run: Run, result: StepResult) -> None:
        self.steps += 1

    @main_process_only
    def on_fit_end(self, run: Run) -> None:
        self.ends += 1

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}


class _Collective(Callback):
    def on_step_end(self, run: Run, result: StepResult) -> None:
        run.strategy.processes.all_reduce(torch.ones(1))


class _Decorated(Callback):
    @main_process_only
    def on_step_end(self, run: Run, result: StepResult) -> None:
        run.processes.gather(torch.ones(1))


def _counts(rank: int) -> tuple[int, int, int]:
    wrapped, plain = _Counter(), _Counter()
    wrapped.name = "wrapped"
    trainer = make_trainer(callbacks=[MainProcess(wrapped), plain])
    fit(trainer)
    trainer.close()
    return wrapped.steps, plain.steps, plain.ends


def test_hooks_run_on_the_main_process_only() -> None:
    assert run_ranks(2, _counts) == [(4, 4, 1), (0, 4, 0)]


def _tells(rank: int, folder: Path) -> str:
    own, out = folder / str(rank), io.StringIO()
    loggers = [
        JSONLLogger(own / "lines" / "log.jsonl"),
        TensorBoardLogger(own / "tensorboard"),
        WandbLogger(directory=own, mode="offline"),
    ]
    with contextlib.redirect_stdout(out):
        trainer = make_trainer(callbacks=[*loggers, Summary(), Timer()], log_every_n_steps=2)
        fit(trainer)
        trainer.close()
    return out.getvalue()


def test_only_the_main_process_writes_and_prints_the_figures_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    told, nothing = run_ranks(2, _tells, tmp_path)
    assert "ddp, 2 processes, cpu" in told
    assert "time of the fit" in told
    assert nothing == ""
    assert [path.name for path in tmp_path.iterdir()] == ["0"]
    assert {path.name for path in (tmp_path / "0").iterdir()} == {"lines", "tensorboard", "wandb"}
    first = (tmp_path / "0" / "lines" / "log.jsonl").read_text().partition("\n")[0]
    assert json.loads(first)["samples"] == 16
    assert len([*(tmp_path / "0").glob("wandb/offline-run-*/run-*.wandb")]) == 1


@pytest.mark.parametrize(
    ("callback", "place"),
    [
        (MainProcess(_Collective()), r"_Collective\.on_step_end"),
        (_Decorated(), r"_Decorated\.on_step_end"),
    ],
)
def test_a_collective_inside_is_an_error_that_names_the_place(
    callback: Callback, place: str
) -> None:
    with pytest.raises(DistributedError, match=place):
        fit(make_trainer(callbacks=[callback]))


def test_only_the_hooks_of_the_callback_inside_are_called() -> None:
    callbacks = CallbackList([MainProcess(_Collective())])
    assert callbacks.listens(Callback.on_step_end)
    assert not callbacks.listens(Callback.on_log)


def test_name_and_state_are_those_of_the_callback_inside() -> None:
    counter = _Counter()
    fit(make_trainer(callbacks=[MainProcess(counter)]))
    assert MainProcess(counter).name == "_Counter"
    assert MainProcess(counter).state_dict() == {"steps": 8}


def test_a_plain_function_takes_the_run_first_or_second() -> None:
    seen: list[str] = []

    @main_process_only
    def first(run: Run) -> None:
        seen.append("first")

    @main_process_only
    def second(text: str, run: Run) -> None:
        seen.append(text)

    trainer = make_trainer(max_steps=1)
    fit(trainer)
    assert trainer.run is not None
    first(trainer.run)
    first(run=trainer.run)
    second("second", trainer.run)
    assert seen == ["first", "first", "second"]


def test_a_function_without_a_run_is_refused() -> None:
    @main_process_only
    def nothing() -> None: ...

    with pytest.raises(ConfigError, match="first or second argument must be a `Run`"):
        nothing()


def test_what_all_processes_must_decide_is_refused() -> None:
    with pytest.raises(ConfigError, match="decides when to evaluate"):
        MainProcess(Evaluation())
    with pytest.raises(ConfigError, match="must be an instance"):
        MainProcess(_Counter)  # type: ignore[arg-type]
