"""Train a small BERT on Chinese reviews, on one process or on several.

    python examples/sentiment.py
    torchrun --standalone --nproc-per-node 2 examples/sentiment.py --output-dir runs/sentiment

The training is the same on any number of processes that divides the batch. The output directory
gets TensorBoard files, `metrics.jsonl`, the model with its tokenizer under `model/`, and
`result.json`, which `check_sentiment.py` recomputes.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sentiment_data import (
    LABELS,
    PadBatch,
    Review,
    ReviewDataset,
    baseline_scores,
    fingerprint,
    load_reviews,
    split_reviews,
    train_tokenizer,
)
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    get_linear_schedule_with_warmup,
)

from trainkit import Communicator, Trainer
from trainkit.callbacks import (
    Checkpoint,
    Evaluation,
    JSONLLogger,
    LRMonitor,
    ProgressBar,
    Summary,
    TensorBoardLogger,
)

METRICS = ["accuracy", "f1"]
WARMUP = 0.1  # of all steps
TINY_REVIEWS = 400
TINY_STEPS = 12


class Reviews(NamedTuple):
    """The two parts of the corpus."""

    train: list[Review]
    held_out: list[Review]


def parse_arguments() -> argparse.Namespace:
    """Return the command line's settings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--precision", default="fp32", help="fp32, bf16 or fp16 (default: fp32)")
    add("--strategy", default="auto", help="auto, single, ddp or fsdp (default: auto)")
    add("--epochs", type=int, default=3, help="passes over the training part (default: 3)")
    add("--max-steps", type=int, help="updates to train for, instead of --epochs")
    add("--gradient-accumulation-steps", type=int, default=1, help="batches an update (default: 1)")
    add("--batch-size", type=int, default=64, help="reviews a batch, all processes (default: 64)")
    add("--max-length", type=int, default=96, help="tokens a review is cut to (default: 96)")
    add("--learning-rate", type=float, default=5e-4, help="the highest one (default: 5e-4)")
    add("--model", help="a pretrained model's directory or hub name (default: a new small BERT)")
    add("--output-dir", type=Path, default=Path("runs/sentiment"))
    add("--seed", type=int, default=0)
    add("--resume", choices=["auto", "must"], help="go on from the checkpoints in --output-dir")
    add("--tiny", action="store_true", help="a few reviews and steps, to see that all of it runs")
    arguments = parser.parse_args()
    if arguments.tiny and arguments.max_steps is None:
        arguments.max_steps = TINY_STEPS
    return arguments


def make_trainer(arguments: argparse.Namespace) -> Trainer:
    """Return the trainer, with everything that watches it."""
    return Trainer(
        max_epochs=arguments.epochs if arguments.max_steps is None else None,
        max_steps=arguments.max_steps,
        strategy=arguments.strategy,
        precision=arguments.precision,
        gradient_accumulation_steps=arguments.gradient_accumulation_steps,
        max_grad_norm=1.0,
        callbacks=[
            ProgressBar(),
            Summary(),
            Evaluation(metrics=METRICS),
            TensorBoardLogger(),
            JSONLLogger(),
            LRMonitor(),
            Checkpoint(keep_best=("eval/accuracy", "max")),
        ],
        output_dir=arguments.output_dir,
        seed=arguments.seed,
    )


def read_reviews(arguments: argparse.Namespace) -> Reviews:
    """Return the training part and the held-out tenth."""
    reviews = load_reviews()
    if arguments.tiny:
        reviews = reviews[:: len(reviews) // TINY_REVIEWS]
    return Reviews(*split_reviews(reviews, seed=arguments.seed))


def make_tokenizer(
    arguments: argparse.Namespace, reviews: Reviews, processes: Communicator
) -> PreTrainedTokenizerBase:
    """Return the given model's tokenizer, or one trained on the training part only.

    The main process trains it and writes it down; the others read it.
    """
    if arguments.model is not None:
        return AutoTokenizer.from_pretrained(arguments.model)
    folder = arguments.output_dir / "model"
    with processes.main_process_first():
        if processes.is_main_process:
            train_tokenizer(review.text for review in reviews.train).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def make_model(arguments: argparse.Namespace, vocabulary_size: int) -> PreTrainedModel:
    """Return the given model with a head for two classes, or a new small BERT."""
    torch.manual_seed(arguments.seed)  # the same first values on every process
    labels = dict(enumerate(LABELS))
    if arguments.model is not None:
        model: PreTrainedModel = AutoModelForSequenceClassification.from_pretrained(
            arguments.model, id2label=labels
        )
        return model
    width = 32 if arguments.tiny else 128
    config = BertConfig(
        vocab_size=vocabulary_size,
        hidden_size=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=4 * width,
        max_position_embeddings=max(arguments.max_length, 16),
        id2label=labels,
        label2id={name: label for label, name in labels.items()},
    )
    return BertForSequenceClassification(config)


def make_loaders(
    arguments: argparse.Namespace,
    reviews: Reviews,
    tokenizer: PreTrainedTokenizerBase,
    processes: int,
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return plain loaders of the two parts: the trainer shares them out."""
    if arguments.batch_size % processes:
        raise SystemExit(
            f"--batch-size must be a multiple of the number of processes, which is {processes}, "
            f"but is {arguments.batch_size}."
        )
    make = partial(
        DataLoader,
        batch_size=arguments.batch_size // processes,
        collate_fn=PadBatch(tokenizer.pad_token_id),
    )
    train, held_out = (ReviewDataset(part, tokenizer, arguments.max_length) for part in reviews)
    return make(train, shuffle=True), make(held_out)


def warm_up_then_fall(trainer: Trainer, optimizer: Optimizer) -> LRScheduler:
    """Return the schedule for `optimizer`: linear to the highest rate, then linear to zero."""
    steps = trainer.planned_steps or 0  # known by now, as the loaders have a length
    schedule: LRScheduler = get_linear_schedule_with_warmup(  # type: ignore[no-untyped-call]
        optimizer, int(WARMUP * steps), steps
    )
    return schedule


def write_result(
    arguments: argparse.Namespace, reviews: Reviews, metrics: dict[str, float], processes: int
) -> None:
    """Write what `check_sentiment.py` recomputes; the reviews themselves stay in their package."""
    result = {
        "accuracy": metrics["eval/accuracy"],
        "f1": metrics["eval/f1"],
        "precision": arguments.precision,
        "max_length": arguments.max_length,
        "seed": arguments.seed,
        "processes": processes,
        "baseline": baseline_scores(*reviews, cache=arguments.output_dir / "baseline.json"),
        "train": [fingerprint(review.text) for review in reviews.train],
        "held_out": [fingerprint(review.text) for review in reviews.held_out],
    }
    text = json.dumps(result, indent=1) + "\n"
    (arguments.output_dir / "result.json").write_text(text, encoding="utf-8")


def print_scores(result_file: Path) -> None:
    """Print the model's figures above the baseline's."""
    result = json.loads(result_file.read_text(encoding="utf-8"))
    rows = {"this model": result, "TF-IDF + logistic regression": result["baseline"]}
    print(f"{'held-out reviews: ' + str(len(result['held_out'])):30}  accuracy      f1")
    for name, scores in rows.items():
        print(f"{name:30}  {scores['accuracy']:8.4f}  {scores['f1']:6.4f}")


def main() -> None:
    """Train, evaluate, save, and print the result beside the baseline."""
    arguments = parse_arguments()
    trainer = make_trainer(arguments)
    processes = trainer.processes
    reviews = read_reviews(arguments)
    tokenizer = make_tokenizer(arguments, reviews, processes)
    loaders = make_loaders(arguments, reviews, tokenizer, processes.num_processes)
    model = make_model(arguments, len(tokenizer))
    trainer.fit(
        model,
        loaders,
        optimizer=partial(AdamW, lr=arguments.learning_rate, weight_decay=0.01),
        lr_scheduler=partial(warm_up_then_fall, trainer),
        resume=arguments.resume,
        restore_best=True,
    )
    metrics = trainer.evaluate(model, loaders[1], metrics=METRICS)
    trainer.save_model(arguments.output_dir / "model")  # all processes: each may hold a part
    if processes.is_main_process:
        tokenizer.save_pretrained(arguments.output_dir / "model")
        write_result(arguments, reviews, metrics, processes.num_processes)
        print_scores(arguments.output_dir / "result.json")
    processes.wait_for_everyone()


if __name__ == "__main__":
    main()
