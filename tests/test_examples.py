"""The examples run as they stand, on one process and on two."""

import json
from pathlib import Path

import pytest
import torch
from sentiment_data import LABELS, PadBatch, Review, clean, fingerprint, split_reviews

from tests.helpers.scripts import ROOT, run_forked

EXAMPLES = ROOT / "examples"


def _train(folder: Path, processes: int) -> None:
    script = EXAMPLES / "sentiment.py"
    arguments = ("--tiny", "--output-dir", str(folder))
    printed = run_forked(script, *arguments, size=processes).output
    assert printed.count("TF-IDF + logistic regression") == 1  # by one process
    assert list(folder.rglob("events.out.tfevents.*"))
    result = json.loads((folder / "result.json").read_text("utf-8"))
    assert result["processes"] == processes


@pytest.mark.e2e
@pytest.mark.parametrize("processes", [1, 2])
def test_the_sentiment_example_runs_and_its_figures_hold(processes: int, tmp_path: Path) -> None:
    _train(tmp_path, processes)
    check = EXAMPLES / "check_sentiment.py"
    lines = run_forked(check, str(tmp_path)).output.splitlines()
    assert lines[-1] == "The run's figures hold."
    _spoil(tmp_path)
    refused = run_forked(check, str(tmp_path), code=1)
    assert "1 held-out reviews were trained on" in refused.errors


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
