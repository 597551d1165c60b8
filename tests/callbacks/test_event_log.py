"""What happens to a run is written once, and never cut."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.callbacks import FailsAt
from tests.helpers.toys import fit, make_trainer
from trainkit.callbacks import Checkpoint, JSONLLogger
from trainkit.callbacks._support.run_facts import commit_of, hide_secrets


def _events(folder: Path, name: str = "metrics.events.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines() if line]


def test_each_event_has_the_counters_and_the_seconds_by_phase(tmp_path: Path) -> None:
    callbacks = [JSONLLogger(), Checkpoint(every_n_steps=4)]
    fit(make_trainer(callbacks=callbacks, output_dir=tmp_path, log_every_n_steps=4))
    events = _events(tmp_path)
    assert [(event["kind"], event["step"]) for event in events] == [
        *[("start", 0), ("log", 4), ("checkpoint", 4)],
        *[("log", 8), ("evaluation", 8), ("checkpoint", 8), ("end", 8)],
    ]
    assert list(events[-1]["seconds"]) == ["setup", "train", "save", "evaluate", "end"]
    for phase in ("setup", "train", "save"):  # what was counted stays counted
        spent = [event["seconds"].get(phase, 0.0) for event in events]
        assert spent == sorted(spent)
    assert (events[-1]["reason"], events[-1]["error"]) == ("max_epochs", None)


def test_the_start_says_what_the_run_is_made_of(tmp_path: Path) -> None:
    fit(make_trainer(callbacks=[JSONLLogger()], output_dir=tmp_path, max_grad_norm=2.0))
    start = _events(tmp_path)[0]
    assert start["config"]["max_grad_norm"] == 2.0
    assert start["run"]["window"] == 4
    assert start["optimizer"]["lr"] == 0.1
    assert {"python", "torch", "trainkit"} <= set(start["versions"])
    assert {"command", "commit", "host", "pid"} == set(start["started"])


def test_an_error_is_named_at_the_end(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        fit(
            make_trainer(
                callbacks=[JSONLLogger(), FailsAt(5, ZeroDivisionError())], output_dir=tmp_path
            )
        )
    last = _events(tmp_path)[-1]
    assert (last["kind"], last["step"], last["error"]) == ("end", 5, "ZeroDivisionError")


def test_a_resumed_run_adds_to_the_events_and_cuts_the_figures(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"output_dir": tmp_path, "log_every_n_steps": 1}
    broken = [JSONLLogger(), FailsAt(5, ZeroDivisionError()), Checkpoint(every_n_steps=3)]
    with pytest.raises(ZeroDivisionError):
        fit(make_trainer(callbacks=broken, **settings))
    with (tmp_path / "metrics.events.jsonl").open("a") as file:
        file.write('{"kind": "lo')  # as if it had been killed
    callbacks = [JSONLLogger(), Checkpoint(every_n_steps=3)]
    fit(make_trainer(callbacks=callbacks, **settings), resume="auto")
    lines = (tmp_path / "metrics.events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]  # half a line is not among them
    logged = [event["step"] for event in events if event["kind"] == "log"]
    assert logged == [1, 2, 3, 4, 4, 5, 6, 7, 8]
    assert [e["resumed_from"] for e in events if e["kind"] == "start"] == [None, 3]
    figures = (tmp_path / "metrics.jsonl").read_text().splitlines()
    steps = [entry["step"] for entry in map(json.loads, figures) if entry["kind"] == "train"]
    assert steps == list(range(1, 9))


def test_a_new_run_moves_both_files_away_together(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        fit(make_trainer(callbacks=[JSONLLogger()], output_dir=tmp_path, seed=seed))
    for name, seed in (("metrics.events.jsonl", 3), ("metrics.events.jsonl.2", 2)):
        assert _events(tmp_path, name)[0]["config"]["seed"] == seed
        assert (tmp_path / name.replace(".events", "")).exists()


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["train.py", "--lr", "1"], "train.py --lr 1"),
        (["train.py", "--api-key", "-abc", "--v"], "train.py --api-key (hidden) --v"),
        (["train.py", "wandb.api_key=abc", "a=b"], "train.py wandb.api_key=(hidden) a=b"),
        (["train.py", "--apikey", "abc"], "train.py --apikey (hidden)"),
        (["train.py", "--auth", "abc"], "train.py --auth (hidden)"),
        (["train.py", "--hub_token=abc", "x"], "train.py --hub_token=(hidden) x"),
        (["train.py", "--secret", "--flag"], "train.py --secret --flag"),
        (["train.py", "--keyboard", "us"], "train.py --keyboard us"),
    ],
)
def test_secrets_do_not_get_into_the_log(command: list[str], shown: str) -> None:
    assert hide_secrets(command) == shown


def test_the_commit_is_found(tmp_path: Path) -> None:
    inside = tmp_path / "work" / "examples"
    inside.mkdir(parents=True)
    assert commit_of(inside) is None or len(str(commit_of(inside))) == 40
    git = tmp_path / "work" / ".git"
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "packed-refs").write_text(f"# pack-refs\n{'b' * 40} refs/heads/main\n")
    assert commit_of(inside) == "b" * 40
    (git / "refs" / "heads" / "main").write_text("a" * 40 + "\n")
    assert commit_of(inside) == "a" * 40
    (git / "HEAD").write_text("c" * 40 + "\n")
    assert commit_of(inside) == "c" * 40
    other = tmp_path / "worktree"
    (git / "worktrees" / "other").mkdir(parents=True)
    (git / "worktrees" / "other" / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "worktrees" / "other" / "commondir").write_text("../..\n")
    other.mkdir()
    (other / ".git").write_text(f"gitdir: {git / 'worktrees' / 'other'}\n")
    assert commit_of(other) == "a" * 40
