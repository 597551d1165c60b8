"""A user's project: a sweep by the script of docs/how-to/sweep.md, whatever the processes."""

import json
from pathlib import Path

import optuna
import pytest

from tests.helpers.markdown import blocks
from tests.helpers.scripts import ROOT, run_forked
from trainkit.cli.main import main

SCRIPT = next(
    block.code for block in blocks(ROOT / "docs/how-to/sweep.md") if block.title == "sweep.py"
)


@pytest.mark.e2e
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what keeps Optuna's data base
def test_a_sweep_can_be_started_again_and_its_runs_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "sweep.py"
    script.write_text(SCRIPT)
    assert "\n6 trials, best: {'lr': " in "\n" + run_forked(script, size=2).output
    assert "\n12 trials, best: {'lr': " in "\n" + run_forked(script, size=1).output
    study = optuna.load_study(study_name="lr", storage="sqlite:///sweep.db")
    trials = study.trials
    assert {trial.state.name for trial in trials} <= {"COMPLETE", "PRUNED"}
    assert trials[0].state.name == "COMPLETE"  # nothing to compare it with

    capsys.readouterr()
    assert main(["runs", "ls", "runs", "--json"]) == 0
    runs = json.loads(capsys.readouterr().out)
    assert len(runs) == 12
    for run, trial in zip(runs, trials, strict=True):
        assert run["best"]["eval/loss"]["value"] == min(trial.intermediate_values.values())
        reported = len(trial.intermediate_values)
        assert run["state"] == ("finished" if reported == 3 else "stopped")
        assert trial.state.name == "PRUNED" or reported == 3
