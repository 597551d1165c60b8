"""`new_run=True`: each fit has a folder of its own, and a resume finds the newest."""

from tests.helpers.callbacks import FailsAt
import multiprocessing
import os
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.ranks import RanksError, run_ranks
from tests.helpers.toys import fit, make_trainer
from trainkit import Callback, CheckpointError, ConfigError, FitResult, Run, StepResult
from trainkit.basics.outputs import folder_of_run
from trainkit.callbacks import Checkpoint, JSONLLogger


def _fit(folder: Path, *more: Callback, resume: Any = None, **settings: Any) -> FitResult:
    callbacks = [Checkpoint(every_n_steps=2), JSONLLogger(), *more]
    trainer = make_trainer(output_dir=folder, new_run=True, callbacks=callbacks, **settings)
    return fit(trainer, resume=resume)


def _name(number: int) -> str:
    return f"{time.strftime('%Y-%m-%d', time.gmtime())}_{number}"


def test_each_fit_has_a_folder_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "x"
    trainer = make_trainer(output_dir=folder, new_run=True, callbacks=[Checkpoint(), JSONLLogger()])
    results = [fit(trainer) for _ in range(2)]
    places = [folder / _name(number) for number in (1, 2)]
    assert [result.output_dir for result in results] == places
    assert [result.checkpoint for result in results] == [
        place / "checkpoints" / "step-00000008" for place in places
    ]
    assert all((place / "metrics.jsonl").stat().st_size > 0 for place in places)
    assert sorted(folder.iterdir()) == places
    assert trainer.output_dir == folder
    assert trainer.run is not None
    assert trainer.run.output_dir == places[1]
    assert trainer.save_checkpoint().parents[1] == places[1]


def test_a_resume_goes_on_with_the_newest(tmp_path: Path) -> None:
    _fit(tmp_path)
    with pytest.raises(ZeroDivisionError):
        _fit(tmp_path, FailsAt(5, ZeroDivisionError()))
    result = _fit(tmp_path, resume="auto")
    assert (result.output_dir, result.step) == (tmp_path / _name(2), 8)
    steps = [path.name for path in sorted((tmp_path / _name(2) / "checkpoints").iterdir())]
    assert steps == ["step-00000008"]
    again = _fit(tmp_path, resume="must")
    assert (again.output_dir, again.checkpoint) == (result.output_dir, result.checkpoint)


def test_auto_without_a_run_makes_one_and_must_makes_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r'holds no run\. Use `resume="auto"`'):
        _fit(tmp_path, resume="must")
    assert not any(tmp_path.iterdir())
    assert _fit(tmp_path, resume="auto").output_dir == tmp_path / _name(1)


def test_a_path_begins_a_new_run_from_a_checkpoint_of_another(tmp_path: Path) -> None:
    first = _fit(tmp_path, max_epochs=1)
    assert first.checkpoint is not None
    again = _fit(tmp_path, resume=first.checkpoint)
    assert (again.output_dir, again.step) == (tmp_path / _name(2), first.step)


def test_what_was_trained_without_it_is_gone_on_with(tmp_path: Path) -> None:
    fit(make_trainer(output_dir=tmp_path, callbacks=[Checkpoint()]))
    with pytest.raises(ConfigError, match=r'resume="auto".*`Trainer\(\.\.\., new_run=True\)`'):
        fit(make_trainer(output_dir=tmp_path, callbacks=[Checkpoint()]))
    assert _fit(tmp_path, resume="auto").output_dir == tmp_path
    assert _fit(tmp_path).output_dir == tmp_path / _name(1)
    assert _fit(tmp_path, resume="auto").output_dir == tmp_path / _name(1)


def test_numbers_count_and_other_names_do_not(tmp_path: Path) -> None:
    for name in ("2020-01-02_9", "2020-01-02_10", "notes_1", "2020-01-02_x", "2020-01-01_11"):
        (tmp_path / name).mkdir()
    (tmp_path / "2030-01-01_1").write_text("a file")
    assert folder_of_run(tmp_path, "auto") == tmp_path / "2020-01-02_10"
    assert folder_of_run(tmp_path, None) == tmp_path / _name(1)
    (tmp_path / _name(7)).mkdir()
    assert folder_of_run(tmp_path, None) == tmp_path / _name(8)


def test_the_newest_began_last_whatever_zones_and_clocks_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for zone in ("Etc/GMT-14", "Etc/GMT+12"):  # their dates differ at any time
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        newest = folder_of_run(tmp_path, None)
        assert folder_of_run(tmp_path, "auto") == newest
    (tmp_path / "2999-12-31_9").mkdir()  # since then the clock was set right
    for number in (10, 11):
        assert folder_of_run(tmp_path, None) == tmp_path / f"2999-12-31_{number}"
        assert folder_of_run(tmp_path, "must") == tmp_path / f"2999-12-31_{number}"
    monkeypatch.undo()
    time.tzset()


def _take(folder: Path, start: Any, found: Any) -> None:
    start.wait()
    found.put(str(folder_of_run(folder, None)))


def test_jobs_that_start_at_once_get_different_folders(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    start, found = context.Barrier(8), context.Queue()
    children = [context.Process(target=_take, args=(tmp_path, start, found)) for _ in range(8)]
    for child in children:
        child.start()
    folders = {found.get(timeout=60) for _ in children}
    for child in children:
        child.join()
    assert {Path(folder).name for folder in folders} == {_name(number) for number in range(1, 9)}


def _on_two(rank: int, folder: Path, alone: bool) -> list[Path | None]:
    if alone:  # each on a machine of its own
        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    return [_fit(folder, resume=resume).output_dir for resume in (None, None, "auto")]


@pytest.mark.parametrize("alone", [False, pytest.param(True, marks=pytest.mark.e2e)])
def test_all_processes_agree(tmp_path: Path, alone: bool) -> None:
    wanted = [tmp_path / _name(number) for number in (1, 2, 2)]
    assert run_ranks(2, _on_two, tmp_path, alone) == [wanted, wanted]
    assert sorted(tmp_path.iterdir()) == wanted[:2]


def _differ(rank: int, folder: Path) -> None:
    model = partial(nn.Linear, 4, 2)
    trainer = make_trainer(output_dir=folder, new_run=rank == 0)
    fit(trainer, model=model(), optimizer=partial(torch.optim.SGD, lr=0.1))


@pytest.mark.e2e
def test_processes_that_do_not_all_want_one_are_told(tmp_path: Path) -> None:
    with pytest.raises(RanksError, match="`new_run`"):
        run_ranks(2, _differ, tmp_path)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"new_run": True}, r"the trainer has none. Pass `Trainer\(output_dir="),
        ({"new_run": "auto", "output_dir": "x"}, "`new_run` must be True or False"),
    ],
)
def test_what_cannot_work_is_said(settings: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_trainer(**settings)


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=re.escape(f"`{tmp_path / 'file'}` is a file")):
        _fit(tmp_path / "file" / "x")


def test_explain_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_trainer(output_dir=tmp_path, new_run=True).explain()
    assert "<date>_<n>" in capsys.readouterr().out
    assert not any(tmp_path.iterdir())
