"""One run writes to its folder: a second start in it is refused before it touches anything."""

from tests.helpers.callbacks import At
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.ranks import RanksError, run_ranks
from tests.helpers.toys import fit, make_trainer, toy_loaders, toy_model
from trainkit import Accelerator, Callback, CheckpointError, ConfigError, Run, StepResult
from trainkit.accelerator.settings import ProjectConfiguration
from trainkit.callbacks import Checkpoint, CSVLogger, JSONLLogger, TensorBoardLogger
from trainkit.cli.main import main

LOCKED = r"is locked by process {pid} on host .* Wait for that run to end, or {way}"
CALLBACKS: dict[str, Any] = {
    "checkpoints": lambda: [JSONLLogger(), Checkpoint(every_n_steps=2, keep_last=None)],
    "loggers": lambda: [JSONLLogger(), CSVLogger(), TensorBoardLogger()],
    "nothing": list,
}


def _train(stand: Callable[[], None], folder: Path, callbacks: Any, settings: Any) -> None:
    fit(make_trainer(output_dir=folder, callbacks=[*callbacks, At(5, lambda _: stand())], **settings))


def _be_program(program: Callable[..., None], connection: Connection, arguments: Any) -> None:
    torch.set_num_threads(1)  # those of the parent are not here

    def stand() -> None:
        connection.send("here")
        connection.recv()

    program(stand, *arguments)


@contextmanager
def standing(program: Callable[..., None], *arguments: Any) -> Iterator[Any]:
    """Have another process run a program, which stands where it calls its first argument."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads at a fork
        process = context.Process(target=_be_program, args=(program, theirs, arguments))
        process.start()
    theirs.close()
    try:
        assert ours.poll(240)
        assert ours.recv() == "here"
        yield process
        if process.is_alive():
            ours.send("go on")
            process.join(240)
            assert process.exitcode == 0
    finally:
        process.kill()


def under_way(folder: Path, callbacks: Any = (), **settings: Any) -> Any:
    """Have another process train in a folder, which stands in its fifth step meanwhile."""
    return standing(_train, folder, callbacks, settings)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("resume", [None, "auto"])
@pytest.mark.parametrize("kind", CALLBACKS)
def test_a_second_start_is_refused_before_it_touches_anything(
    tmp_path: Path, kind: str, resume: str | None
) -> None:
    folder = tmp_path / "run"
    with under_way(folder, CALLBACKS[kind]()) as process:
        before = contents(folder)
        trainer = make_trainer(output_dir=folder, callbacks=CALLBACKS[kind]())
        with pytest.raises(CheckpointError, match=LOCKED.format(pid=process.pid, way="choose")):
            fit(trainer, resume=resume)
        assert contents(folder) == before


def test_a_run_in_a_folder_of_its_own_is_held_too(tmp_path: Path) -> None:
    with under_way(tmp_path, [JSONLLogger()], new_run=True) as process:
        before = contents(tmp_path)
        trainer = make_trainer(output_dir=tmp_path, new_run=True, callbacks=[JSONLLogger()])
        with pytest.raises(CheckpointError, match=LOCKED.format(pid=process.pid, way="choose")):
            fit(trainer, resume="auto")
        assert contents(tmp_path) == before
        assert fit(trainer).step == 8


def _second_start(rank: int, folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        fit(make_trainer(output_dir=folder, callbacks=[JSONLLogger()]))
    return str(error.value)


def test_all_processes_of_a_second_start_are_told(tmp_path: Path) -> None:
    with under_way(tmp_path, [JSONLLogger()]) as process:
        before = contents(tmp_path)
        told = run_ranks(2, _second_start, tmp_path)
        assert all(f"locked by process {process.pid}" in text for text in told)
        assert contents(tmp_path) == before


def test_a_logger_outside_of_the_folder_holds_its_file(tmp_path: Path) -> None:
    loggers = [JSONLLogger(tmp_path / "a.jsonl"), TensorBoardLogger(tmp_path / "board")]
    with under_way(tmp_path / "first", loggers) as process:
        for logger in loggers:
            before = contents(tmp_path)
            with pytest.raises(CheckpointError, match=rf"`{logger_place(logger)}` is locked by"):
                fit(make_trainer(callbacks=[logger]))
            assert contents(tmp_path) == before
        assert process.is_alive()
        fit(make_trainer(callbacks=[JSONLLogger(tmp_path / "b.jsonl")]))  # beside it
    fit(make_trainer(callbacks=loggers))


def logger_place(logger: Any) -> Path:
    place: Path = getattr(logger, "path", None) or logger.directory
    return place


def test_reading_a_run_under_way_needs_nothing(tmp_path: Path) -> None:
    with under_way(tmp_path, CALLBACKS["checkpoints"]()):
        trainer = make_trainer(output_dir=tmp_path)
        options: Any = {"loss_fn": nn.CrossEntropyLoss(), "checkpoint": "last"}
        assert "eval/loss" in trainer.evaluate(toy_model(), toy_loaders()[1], **options)
        assert main(["runs", "ls", str(tmp_path)]) == 0
        assert fit(make_trainer(output_dir=tmp_path, dry_run=True)).step == 1


def test_a_run_that_was_killed_holds_nothing(tmp_path: Path) -> None:
    with under_way(tmp_path, CALLBACKS["checkpoints"]()) as process:
        process.kill()
        process.join()
        trainer = make_trainer(output_dir=tmp_path, callbacks=CALLBACKS["checkpoints"]())
        assert fit(trainer, resume="must").step == 8


def test_a_folder_is_given_back_when_fit_has_returned_or_raised(tmp_path: Path) -> None:
    def fail(_: Run) -> None:
        raise ZeroDivisionError

    for action in (fail, fail, lambda _: None):
        trainer = make_trainer(output_dir=tmp_path, callbacks=[JSONLLogger(), At(2, action)])
        if action is fail:
            with pytest.raises(ZeroDivisionError):
                fit(trainer)
        else:
            fit(trainer)
    with under_way(tmp_path, [JSONLLogger()]):
        pass


def test_a_fit_inside_another_one_is_refused_in_its_folder_alone(tmp_path: Path) -> None:
    def again(_: Run) -> None:
        with pytest.raises(CheckpointError, match=LOCKED.format(pid=os.getpid(), way="choose")):
            fit(make_trainer(output_dir=tmp_path))
        fit(make_trainer(output_dir=tmp_path / "other"))
        fit(make_trainer())

    fit(make_trainer(output_dir=tmp_path, callbacks=[At(2, again)]))


# Folders that are exchanged while a run writes to them.


def test_a_link_that_is_pointed_elsewhere_does_not_move_a_run(tmp_path: Path) -> None:
    link, first, second = (tmp_path / name for name in ("latest", "first", "second"))
    first.mkdir()
    second.mkdir()
    link.symlink_to(first)

    def turn(_: Run) -> None:
        link.unlink()
        link.symlink_to(second)

    callbacks = [*CALLBACKS["checkpoints"](), CSVLogger(), At(3, turn)]
    trainer = make_trainer(output_dir=link, callbacks=callbacks, log_every_n_steps=1)
    result = fit(trainer)
    assert result.output_dir == first
    assert len(list((first / "checkpoints").iterdir())) == 4
    assert len((first / "metrics.csv").read_text().splitlines()) == 10
    assert not any(second.iterdir())
    assert trainer.save_checkpoint().parents[1] == first


def test_a_folder_behind_a_link_is_held(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with (
        under_way(tmp_path / "link") as process,
        pytest.raises(CheckpointError, match=LOCKED.format(pid=process.pid, way="choose")),
    ):
        fit(make_trainer(output_dir=tmp_path / "run"))


@pytest.mark.parametrize("background", [False, True])
def test_nothing_is_saved_into_a_folder_that_has_taken_the_place(
    tmp_path: Path, background: bool
) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    fit(make_trainer(output_dir=other, callbacks=CALLBACKS["checkpoints"]()))

    def exchange(_: Run) -> None:
        end = time.monotonic() + 240
        while not (run / "checkpoints" / "step-00000002").is_dir():
            assert time.monotonic() < end
            time.sleep(0.01)  # a save that finds no folder in between would make it anew
        run.rename(tmp_path / "away")
        other.rename(run)

    saves = Checkpoint(every_n_steps=2, keep_last=None, background=background)
    with pytest.raises(CheckpointError, match="another folder than the one that this run began"):
        fit(make_trainer(output_dir=run, callbacks=[saves, At(3, exchange)]))
    kept = [p.name for p in sorted((run / "checkpoints").iterdir())]
    assert kept == [f"step-0000000{step}" for step in (2, 4, 6, 8)]
    assert [p.name for p in (tmp_path / "away" / "checkpoints").iterdir()] == kept[:1]


def test_a_folder_that_was_removed_is_made_anew(tmp_path: Path) -> None:
    run = tmp_path / "run"
    saves = Checkpoint(every_n_steps=2)
    with pytest.warns(UserWarning, match="was removed while a run writes to it"):
        result = fit(
            make_trainer(
                output_dir=run,
                callbacks=[saves, At(3, lambda _: run.rename(tmp_path / "away"))],
            )
        )
    assert result.checkpoint == run / "checkpoints" / "step-00000008"
    with under_way(run):
        pass


def test_a_forgotten_resume_touches_no_log(tmp_path: Path) -> None:
    fit(make_trainer(output_dir=tmp_path, callbacks=CALLBACKS["checkpoints"]()))
    before = contents(tmp_path)
    again = make_trainer(output_dir=tmp_path, callbacks=CALLBACKS["checkpoints"]())
    with pytest.raises(ConfigError, match="a new training was asked for"):
        fit(again)
    after = contents(tmp_path)
    assert before.keys() == after.keys()
    assert {p for p in before if before[p] != after[p]} == {str(tmp_path / ".lock")}


# Loops of one's own.


def _own_loop(project: Path, log_with: Any = None, **options: Any) -> Accelerator:
    config = ProjectConfiguration(project, **options)
    accelerator = Accelerator(project_config=config, log_with=log_with)
    accelerator.prepare(toy_model())
    return accelerator


def _save_twice(stand: Callable[[], None], project: Path) -> None:
    accelerator = _own_loop(project, automatic_checkpoint_naming=True)
    accelerator.save_state()
    stand()
    accelerator.save_state()


@pytest.mark.e2e
def test_two_programs_do_not_number_their_states_in_one_folder(tmp_path: Path) -> None:
    with standing(_save_twice, tmp_path) as process:
        before = contents(tmp_path)
        other = _own_loop(tmp_path, automatic_checkpoint_naming=True, total_limit=1)
        other.load_state()  # as who evaluates meanwhile
        with pytest.raises(CheckpointError, match=LOCKED.format(pid=process.pid, way="give")):
            other.save_state()
        assert contents(tmp_path) == before
    other.load_state()
    assert Path(other.save_state()).name == "checkpoint_2"
    again = _own_loop(tmp_path, automatic_checkpoint_naming=True)  # a cell that is run again
    again.load_state()
    assert Path(again.save_state()).name == "checkpoint_3"
    with pytest.raises(RanksError, match="locked by process"):
        run_ranks(1, _save_from_newest, tmp_path)
    other.end_training()
    again.end_training()
    run_ranks(1, _save_from_newest, tmp_path)


def _save_from_newest(rank: int, project: Path) -> None:
    accelerator = _own_loop(project, automatic_checkpoint_naming=True)
    accelerator.load_state()
    accelerator.save_state()


def test_states_stay_in_the_folder_that_a_link_led_to(tmp_path: Path) -> None:
    link, first, second = (tmp_path / name for name in ("latest", "first", "second"))
    first.mkdir()
    second.mkdir()
    link.symlink_to(first)
    accelerator = _own_loop(link, automatic_checkpoint_naming=True)
    accelerator.save_state()
    link.unlink()
    link.symlink_to(second)
    assert accelerator.save_state() == str(first / "checkpoints" / "checkpoint_1")
    accelerator.load_state()
    first.rename(tmp_path / "away")
    second.rename(first)
    with pytest.raises(CheckpointError, match="another folder than the one that this run began"):
        accelerator.save_state()
    assert not any(first.iterdir())


def _log(stand: Callable[[], None], project: Path, log_with: str) -> None:
    accelerator = Accelerator(project_dir=project, log_with=log_with)
    accelerator.init_trackers("one")
    accelerator.log({"loss": 1.0}, step=1)
    stand()
    accelerator.log({"loss": 2.0}, step=2)
    accelerator.end_training()


@pytest.mark.parametrize("log_with", ["jsonl", "csv"])
def test_two_programs_do_not_log_to_one_file(tmp_path: Path, log_with: str) -> None:
    with standing(_log, tmp_path, log_with) as process:
        before = contents(tmp_path)
        with pytest.raises(
            CheckpointError, match=rf"one/metrics\.{log_with}` is locked by process"
        ):
            _log(lambda: None, tmp_path, log_with)
        assert contents(tmp_path) == before
        other = Accelerator(project_dir=tmp_path, log_with=log_with)
        other.init_trackers("two")
        other.end_training()
        assert process.is_alive()
    _log(lambda: None, tmp_path, log_with)
    _log(lambda: None, tmp_path, log_with)


def test_programs_may_write_events_for_tensorboard_side_by_side(tmp_path: Path) -> None:
    with standing(_log, tmp_path, "tensorboard"):
        _log(lambda: None, tmp_path, "tensorboard")
    assert len(list((tmp_path / "one").glob("events.out.tfevents.*"))) == 2
