"""The examples run as they stand, on one process and on two."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sentiment_data import LABELS, PadBatch, Review, clean, fingerprint, split_reviews

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
SECONDS = 240


def _run(*arguments: str) -> str:
    """Run Python with `arguments` and return what it printed; fail where it fails."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout


def _train(folder: Path, processes: int) -> dict[str, object]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    script = [str(EXAMPLES / "sentiment.py"), "--tiny", "--output-dir", str(folder)]
    printed = _run(*(launcher if processes > 1 else []), *script)
    assert printed.count("TF-IDF + logistic regression") == 1  # by one process
    assert list(folder.rglob("events.out.tfevents.*"))
    result: dict[str, object] = json.loads((folder / "result.json").read_text("utf-8"))
    assert result["processes"] == processes
    return result


@pytest.mark.parametrize("processes", [1, 2])
def test_the_sentiment_example_runs_and_its_figures_hold(processes: int, tmp_path: Path) -> None:
    _train(tmp_path, processes)
    last_line = _run(str(EXAMPLES / "check_sentiment.py"), str(tmp_path)).splitlines()[-1]
    assert last_line == "The run's figures hold."
    _spoil(tmp_path)
    refused = subprocess.run(
        [sys.executable, str(EXAMPLES / "check_sentiment.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS,
    )
    assert refused.returncode == 1
    assert "1 held-out reviews were trained on" in refused.stderr


def _spoil(folder: Path) -> None:
    """Make the result say that a held-out review was trained on."""
    result = json.loads((folder / "result.json").read_text("utf-8"))
    result["train"].append(result["held_out"][0])
    (folder / "result.json").write_text(json.dumps(result), "utf-8")


def test_repeated_and_contradictory_reviews_are_dropped() -> None:
    reviews = clean(["good ", "good", "", "mixed"], ["bad", "mixed"])
    assert reviews == [Review("bad", 0), Review("good", 1)]
    assert LABELS[reviews[1].label] == "positive"


def test_no_held_out_review_is_in_the_training_part() -> None:
    reviews = [Review(f"review {number}", number % 2) for number in range(101)]
    train, held_out = split_reviews(reviews, seed=3)
    assert sorted(train + held_out) == sorted(reviews)
    assert len(held_out) == 10
    assert (train, held_out) == split_reviews(reviews, seed=3)
    assert (train, held_out) != split_reviews(reviews, seed=4)
    assert len({fingerprint(review.text) for review in reviews}) == len(reviews)


def test_a_batch_is_padded_to_its_longest_row() -> None:
    batch = PadBatch(9)([{"input_ids": [1, 2, 3], "label": 1}, {"input_ids": [4], "label": 0}])
    assert torch.equal(batch["input_ids"], torch.tensor([[1, 2, 3], [4, 9, 9]]))
    assert torch.equal(batch["attention_mask"], torch.tensor([[1, 1, 1], [1, 0, 0]]))
    assert torch.equal(batch["labels"], torch.tensor([1, 0]))
