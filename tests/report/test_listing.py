"""What the ends of a long run say of it is what all of it says."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.toys import fit, make_trainer
from trainkit.callbacks import Checkpoint, Evaluation, JSONLLogger
from trainkit.inspect.report import listing
from trainkit.inspect.report.listing import facts, facts_of
from trainkit.inspect.report.records import read_run

METRICS, EVENTS = "metrics.jsonl", "metrics.events.jsonl"


def _train(folder: Path, steps: int, chance: random.Random, resume: str | Path | None) -> None:
    callbacks = [
        *(JSONLLogger(), Evaluation(["accuracy"], every_n_steps=chance.randint(1, 3))),
        Checkpoint(every_n_steps=1, keep_last=99),
    ]
    settings = {"lr": chance.random(), "model": {"width": chance.randint(1, 9)}}
    trainer = make_trainer(
        callbacks=callbacks, output_dir=folder, max_steps=steps, log_every_n_steps=1,
        hparams=settings,
    )  # fmt: skip
    fit(trainer, resume=resume, schedule="keep" if resume else None)


def _kill(folder: Path, chance: random.Random) -> None:
    """Take away what the last start wrote from some line on, as if it had been killed there."""
    events = (folder / EVENTS).read_bytes().splitlines(keepends=True)
    kinds = [json.loads(line)["kind"] for line in events]
    begin = len(kinds) - kinds[::-1].index("start")
    end = chance.randint(begin, len(kinds))
    (folder / EVENTS).write_bytes(b"".join(events[:end]) + b"".join(events[end:])[:20])
    lost = sum(kind in ("log", "evaluation") for kind in kinds[end:])
    lines = (folder / METRICS).read_bytes().splitlines(keepends=True)
    (folder / METRICS).write_bytes(b"".join(lines[: len(lines) - lost]))


def _of_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    with monkeypatch.context() as patch:
        patch.setattr(listing, "_SHORT", -1)
        patch.delattr(listing, "read_run")
        return facts_of(folder / METRICS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(4))
def test_the_ends_of_a_run_say_what_all_of_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    chance, resume, steps = random.Random(seed), None, 0
    for _ in range(4):
        steps += chance.randint(1, 4)
        _train(tmp_path, steps, chance, resume)
        _kill(tmp_path, chance)
        whole = facts(read_run(tmp_path))
        whole["seconds"] = pytest.approx(whole["seconds"])
        assert _of_ends(tmp_path, monkeypatch) == whole
        resume = chance.choice(sorted((tmp_path / "checkpoints").glob("step-*")))
        steps = int(resume.name[5:13])


def test_a_run_that_an_older_version_began_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(0)
    _train(tmp_path, 4, chance, None)
    lines = [json.loads(line) for line in (tmp_path / EVENTS).read_text().splitlines()]
    for entry in lines:
        del entry["before"]
        entry.pop("best", None)
    (tmp_path / EVENTS).write_text("".join(f"{json.dumps(entry)}\n" for entry in lines))
    _train(tmp_path, 6, chance, "auto")
    monkeypatch.setattr(listing, "_SHORT", -1)
    known = facts_of(tmp_path / METRICS)
    assert known == facts(read_run(tmp_path))
    assert known["step"] == 6
