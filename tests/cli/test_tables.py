"""Tables of commands are as wide as the terminal, and no number in them is torn."""

import sys
from pathlib import Path

import pytest

from tests.helpers.toys import fit, make_trainer
from trainkit.basics.terminal import print_table
from trainkit.callbacks import Checkpoint, Evaluation, JSONLLogger
from trainkit.cli.main import main

COMMANDS = [["runs", "ls", "."], ["checkpoint", "ls", "a"], ["checkpoint", "show", "a"]]
COMMANDS += [["diff", "a", "b"], ["checkpoint", "diff", "a", "b"]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for seed, name in enumerate("ab"):
        callbacks = [Evaluation(["accuracy", "f1"]), Checkpoint(), JSONLLogger()]
        fit(make_trainer(callbacks=callbacks, output_dir=folder / name, seed=seed))
    return folder


@pytest.mark.parametrize("columns", [40, 50, 60, 80])
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_table_fits_into_the_terminal_with_all_its_words(
    runs: Path,
    command: list[str],
    columns: int,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(runs)
    main(command)
    whole = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", f"{columns}")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    main(command)
    narrow = capsys.readouterr().out
    assert sorted(narrow.split()) == sorted(whole.split())
    wide = [line for line in narrow.splitlines() if len(line) > columns]
    assert all(len(line.split()) <= 2 for line in wide)  # of what is itself longer


def test_columns_without_room_stand_in_lines_below(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "12")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_table(("RUN", "STEP", "loss", ""), [("a", 8, "0.125", ""), ("b", 16, "0.5", "best")])
    assert capsys.readouterr().out.splitlines() == [
        *("RUN  STEP", "   loss"),
        *("a       8", "  0.125"),
        *("b      16", "    0.5", "  best"),
    ]
