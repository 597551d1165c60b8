"""Fine-tuning on dialogues, by trainkit and by the Trainer of transformers, side by side.

    OMP_NUM_THREADS=1 python -m benchmarks.sft

It needs peft and the package `chatterbot-corpus`. Each row is a process of its own. All train the
model of `examples/chat_sft.py` on the same dialogues, with the same AdamW at a constant rate, for
the same passes over them. "packed" are the rows of `trainkit.data.pack`; "grouped" are batches of
items of similar length, by `group_by_length` of each library. Speed counts tokens of dialogues,
without what fills rows up, in the second half of the steps. Memory is the peak of the resident set
above what the process has before it builds the model. The loss is that of all answers, in
evaluation mode, after training.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from chat_sft import add_adapter, encode, make_base, make_tokenizer, read_dialogues

from trainkit import Callback, Run, StepResult, Trainer
from trainkit.callbacks import Checkpoint
from trainkit.data import group_by_length, pack

ROWS = {
    "trainkit, LoRA, packed": {"by": "trainkit", "packed": True},
    "transformers, LoRA, packed": {"by": "transformers", "packed": True},
    "trainkit, LoRA, grouped": {"by": "trainkit"},
    "transformers, LoRA, grouped": {"by": "transformers"},
    "trainkit, LoRA, packed, activations again": {
        "by": "trainkit",
        "packed": True,
        "recompute": True,
    },
    "trainkit, all weights, packed": {"by": "trainkit", "packed": True, "full": True},
    'trainkit, LoRA, packed, frozen="save"': {"by": "trainkit", "packed": True, "frozen": "save"},
}
COLUMNS = ("tokens/s", "padding", "peak MiB", "checkpoint KiB", "final loss")


class Filled:
    """Makes a batch of items, filled up to the longest of them."""

    def __init__(self, pad_id: int) -> None:
        self.pad_id = pad_id

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, Tensor]:
        longest = max(len(item["input_ids"]) for item in items)
        fills = {"input_ids": self.pad_id, "labels": -100, "attention_mask": 0}
        items = [item | {"attention_mask": [1] * len(item["input_ids"])} for item in items]
        return {
            name: torch.tensor([i[name] + [fill] * (longest - len(i[name])) for i in items])
            for name, fill in fills.items()
        }


class Clock:
    """Notes when each step ends; the speed is that of the second half."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def seconds_per_step(self) -> float:
        late = self.ends[len(self.ends) // 2 :]
        return (late[-1] - late[0]) / (len(late) - 1)


class ClockCallback(Callback):
    """The clock in trainkit's loop."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_step_end(self, run: Run, result: StepResult) -> None:
        self.clock.ends.append(time.monotonic())


def main() -> None:
    """Run every row in a process of its own, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1, help="the median of so many is shown")
    parser.add_argument("--tiny", action="store_true", help="the dialogues of the example's --tiny")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    parser.add_argument("--row", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row is not None:
        print(json.dumps(_measure(options, **ROWS[options.row])))
        return
    found: dict[str, list[dict[str, float]]] = {row: [] for row in ROWS}
    for _ in range(options.rounds):
        for row in ROWS:
            found[row].append(_run(options, row))
            print(f"{row}: {found[row][-1]}", file=sys.stderr, flush=True)
    table = {
        row: {c: sorted(one[c] for one in of_row)[len(of_row) // 2] for c in COLUMNS}
        for row, of_row in found.items()
    }
    print("| | " + " | ".join(COLUMNS) + " |")
    print("| --- |" + " ---: |" * len(COLUMNS))
    for row, values in table.items():
        print(f"| {row} | " + " | ".join(_shown(values[column]) for column in COLUMNS) + " |")
    if options.output is not None:
        options.output.write_text(json.dumps(table, indent=2) + "\n")


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.4f}"


def _run(options: argparse.Namespace, row: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.sft", "--row", row]
    command += ["--epochs", str(options.epochs), *["--tiny"] * options.tiny]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{row}: {done.stderr[-3000:]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _measure(
    options: argparse.Namespace,
    *,
    by: str,
    packed: bool = False,
    full: bool = False,
    recompute: bool = False,
    frozen: str = "reference",
) -> dict[str, float]:
    length, size = (48, 2) if options.tiny else (512, 4)
    data = read_dialogues(options.tiny)
    tokenizer = make_tokenizer(data.train, 320 if options.tiny else 2048)
    items = encode(data.train, tokenizer)
    tokens = sum(len(item["input_ids"]) for item in items)
    rows: Any = pack(items, length, pad_id=tokenizer.pad_token_id) if packed else items
    # Batches of as many tokens: else one library would take more and smaller steps.
    batch = size if packed else round(size * len(items) / (tokens / length))
    collate: Any = None if packed else Filled(tokenizer.pad_token_id)
    _import_all(by)
    before = _peak()
    model = make_base(len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id, seed=0)
    torch.manual_seed(0)
    model = model if full else add_adapter(model, rank=8)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        train = {"trainkit": _by_trainkit, "transformers": _by_transformers}[by]
        extra: dict[str, Any] = {"recompute": recompute, "frozen": "save" if full else frozen}
        train(model, rows, batch, collate, options.epochs, Path(folder), clock, **extra)
        saved = sum(f.stat().st_size for f in Path(folder).rglob("*") if f.is_file())
    peak = _peak() - before
    steps = len(clock.ends) / options.epochs
    return {
        "tokens/s": tokens / steps / clock.seconds_per_step(),
        "padding": rows.padding if packed else _padding(items, batch),
        "peak MiB": peak / 2**20,
        "checkpoint KiB": saved / 2**10,
        "final loss": _final_loss(model, items, Filled(tokenizer.pad_token_id)),
    }


def _import_all(by: str) -> None:
    """Import what a training will, so that it is not part of its memory."""
    import peft  # noqa: F401

    Trainer(max_steps=1, callbacks=[Checkpoint()])
    if by == "transformers":
        from transformers import Trainer as Theirs, TrainingArguments  # noqa: F401


def _peak() -> float:
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def _by_trainkit(
    model: nn.Module,
    rows: Any,
    batch: int,
    collate: Callable[..., Any] | None,
    epochs: int,
    folder: Path,
    clock: Clock,
    **options: Any,
) -> None:
    recompute, frozen = options["recompute"], options["frozen"]
    trainer = Trainer(
        max_epochs=epochs,
        gradient_checkpointing=recompute,
        callbacks=[ClockCallback(clock), Checkpoint(every_n_epochs=epochs, frozen=frozen)],
        output_dir=folder,
        log_every_n_steps=10,
    )
    sampler = None if collate is None else group_by_length(rows, batch)
    loader = DataLoader(rows, batch, shuffle=sampler is None, sampler=sampler, collate_fn=collate)
    trainer.fit(model, loader, optimizer=partial(AdamW, lr=2e-3, weight_decay=0.0))


def _by_transformers(
    model: nn.Module,
    rows: Any,
    batch: int,
    collate: Callable[..., Any] | None,
    epochs: int,
    folder: Path,
    clock: Clock,
    **_: Any,
) -> None:
    from transformers import Trainer as Theirs, TrainerCallback, TrainingArguments
    from transformers.data.data_collator import default_data_collator

    class Ends(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.ends.append(time.monotonic())

    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=epochs,
        per_device_train_batch_size=batch,
        learning_rate=2e-3,
        weight_decay=0.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        train_sampling_strategy="random" if collate is None else "group_by_length",
        save_strategy="epoch",
        save_total_limit=1,
        logging_steps=10,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    trainer = Theirs(
        model=model,
        args=arguments,
        train_dataset=rows,
        data_collator=collate or default_data_collator,
        callbacks=[Ends()],
    )
    trainer.train()


def _padding(items: list[dict[str, Any]], batch: int) -> float:
    """Return the share of padding in the batches of one epoch."""
    lengths = [len(item["input_ids"]) for item in items]
    torch.manual_seed(0)
    order = list(group_by_length(items, batch, lengths=lengths))
    batches = [order[start : start + batch] for start in range(0, len(order), batch)]
    places = sum(len(each) * max(lengths[i] for i in each) for each in batches)
    return 1 - sum(lengths) / places


@torch.no_grad()
def _final_loss(model: Any, items: list[dict[str, Any]], collate: Filled) -> float:
    model.eval()
    total = count = 0.0
    for start in range(0, len(items), 16):
        batch = collate(items[start : start + 16])
        weight = int((batch["labels"][:, 1:] != -100).sum())
        total += float(model(**batch).loss) * weight
        count += weight
    return total / count


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
