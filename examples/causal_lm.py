r"""Train GPT-2 on a text, or on JSON of records, with the options of run_clm.

    make data
    .venv/bin/python examples/causal_lm.py
    .venv/bin/trainkit launch --num_processes 2 examples/causal_lm.py \
        --gradient_accumulation_steps 2 --output_dir runs/causal_lm2

Both see 32 blocks an update, and have the same losses; `compare_processes.py` measures that. The
default is a new small GPT-2 with a vocabulary of its own on the verses of the King James Bible;
`--model_name_or_path` goes on from a directory or a name on the hub. `--train_file` may be text,
of which each line is a record, JSON of records (objects, of which `--text_column` is read, or
strings), or a JSON line for each. The output directory gets `metrics.jsonl`, checkpoints, and the
model with its tokenizer under `model/`.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, default_convert, random_split
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    get_scheduler,
)

from trainkit import Communicator, Trainer
from trainkit.callbacks import (
    Checkpoint,
    Evaluation,
    JSONLLogger,
    LRMonitor,
    ProgressBar,
    Summary,
)

END_OF_TEXT = "<|endoftext|>"
TINY_TEXT = Path(__file__).resolve().parent.parent / "LICENSE"
TINY = {
    "train_file": TINY_TEXT,
    "block_size": 32,
    "vocabulary_size": 400,
    "config_overrides": "n_embd=32,n_layer=2,n_head=2",
    "max_steps": 6,
    "logging_steps": 1,
    "warmup_steps": 2,
}


class Texts(NamedTuple):
    """The records of both parts."""

    train: list[str]
    held_out: list[str]


class Blocks(Dataset[Any]):
    """Pieces of equal length of one long row of tokens; what is left at its end is dropped.

    Args:
        tokens: The ids of all tokens.
        size: Tokens of a block.
    """

    def __init__(self, tokens: Tensor, size: int) -> None:
        count = len(tokens) // size
        if count == 0:
            sys.exit(f"{len(tokens)} tokens are less than one block of {size}.")
        self.blocks = tokens[: count * size].view(count, size)

    def __len__(self) -> int:
        """Return the number of blocks."""
        return len(self.blocks)

    def __getitems__(self, indices: list[int]) -> dict[str, Tensor]:
        """Return a batch of blocks; the model itself compares each token with the next."""
        blocks = self.blocks[indices]
        return {"input_ids": blocks, "labels": blocks}


def parse_arguments() -> argparse.Namespace:
    """Return the command line's settings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model_name_or_path", help="directory or hub name (default: a new GPT-2)")
    add("--config_overrides", default="", help='of a new one, such as "n_embd=256,n_layer=6"')
    add("--vocabulary_size", type=int, default=4096, help="of a new one (default: 4096)")
    add("--train_file", type=Path, default=Path("data/kjv.json"), help=".txt, .json or .jsonl")
    add("--validation_file", type=Path, help="the same (default: a part of --train_file)")
    add("--validation_split_percentage", type=int, default=5, help="of the records (default: 5)")
    add("--text_column", default="text", help="where records have their text (default: text)")
    add("--block_size", type=int, default=128, help="tokens of a block (default: 128)")
    add("--per_device_train_batch_size", type=int, default=8, metavar="N", help="default: 8")
    add("--per_device_eval_batch_size", type=int, default=16, metavar="N", help="default: 16")
    add("--gradient_accumulation_steps", type=int, default=4, metavar="N", help="default: 4")
    add("--learning_rate", type=float, default=3e-3, help="the highest one (default: 3e-3)")
    add("--weight_decay", type=float, default=0.1, help="default: 0.1")
    add("--max_grad_norm", type=float, default=1.0, help="default: 1.0")
    add("--lr_scheduler_type", default="cosine", help="linear, cosine, ... (default: cosine)")
    add("--warmup_steps", type=int, default=50, help="default: 50")
    add("--num_train_epochs", type=int, default=1, help="default: 1")
    add("--max_steps", type=int, help="updates, instead of epochs")
    add("--eval_steps", type=int, help="updates between evaluations (default: an epoch)")
    add("--logging_steps", type=int, default=10, help="updates between two logs (default: 10)")
    add("--save_steps", type=int, help="updates between checkpoints (default: an epoch)")
    add("--fp16", action="store_true", help="mixed precision with scaled losses")
    add("--bf16", action="store_true", help="mixed precision")
    add("--seed", type=int, default=42)
    add("--output_dir", type=Path, default=Path("runs/causal_lm"))
    add("--resume_from_checkpoint", help="auto, must, or the folder of a checkpoint")
    add("--tiny", action="store_true", help="seconds, on the licence of this repository")
    if "--tiny" in sys.argv:
        parser.set_defaults(**TINY)
    return parser.parse_args()


def read_texts(arguments: argparse.Namespace) -> Texts:
    """Return the records to train on, and those held out."""
    records = read_records(arguments.train_file, arguments.text_column)
    if arguments.validation_file is not None:
        return Texts(records, read_records(arguments.validation_file, arguments.text_column))
    held_out = max(1, len(records) * arguments.validation_split_percentage // 100)
    parts: list[Any] = random_split(
        records,  # type: ignore[arg-type]
        [len(records) - held_out, held_out],
        torch.Generator().manual_seed(arguments.seed),
    )
    return Texts(*map(list, parts))


def read_records(path: Path, column: str) -> list[str]:
    """Return the texts of a file."""
    if not path.is_file():
        sys.exit(f"There is no file {path}. `make data` fetches data/kjv.json.")
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        found = json.loads(text)
        records = list(found.values()) if isinstance(found, dict) else found
    elif path.suffix == ".jsonl":
        records = [json.loads(line) for line in text.splitlines() if line]
    else:
        records = [line for line in text.splitlines() if line.strip()]
    try:
        return [record if isinstance(record, str) else record[column] for record in records]
    except KeyError:
        sys.exit(f"A record in {path} has no {column!r}. Name the right one by --text_column.")


def make_tokenizer(
    arguments: argparse.Namespace, texts: list[str], processes: Communicator
) -> PreTrainedTokenizerBase:
    """Return the given model's tokenizer, or one whose pieces are learnt from `texts`.

    The main process learns them and writes them down; the others read them.
    """
    if arguments.model_name_or_path is not None:
        return AutoTokenizer.from_pretrained(arguments.model_name_or_path)
    folder = arguments.output_dir / "model"
    with processes.main_process_first():
        if processes.is_main_process:
            bpe = ByteLevelBPETokenizer()
            bpe.train_from_iterator(
                texts, arguments.vocabulary_size, special_tokens=[END_OF_TEXT], show_progress=False
            )
            PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
                tokenizer_object=bpe._tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT
            ).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def make_blocks(texts: list[str], tokenizer: PreTrainedTokenizerBase, size: int) -> Blocks:
    """Return the tokens of all texts, an end after each, cut into blocks."""
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    end = tokenizer.eos_token_id
    return Blocks(torch.tensor([token for row in encoded for token in (*row, end)]), size)


def make_model(
    arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    """Return the given model, or a new GPT-2: small, and without dropout."""
    torch.manual_seed(arguments.seed)  # the same first values on every process
    if arguments.model_name_or_path is not None:
        return AutoModelForCausalLM.from_pretrained(arguments.model_name_or_path)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=arguments.block_size,
        n_embd=128,
        n_layer=4,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    if arguments.config_overrides:
        config.update_from_string(arguments.config_overrides)
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # what transformers takes in the end, after a warning
    return model


def make_trainer(arguments: argparse.Namespace) -> Trainer:
    """Return the trainer, with what watches it."""
    if arguments.fp16 and arguments.bf16:
        sys.exit("Give --fp16 or --bf16, not both.")
    return Trainer(
        max_epochs=arguments.num_train_epochs if arguments.max_steps is None else None,
        max_steps=arguments.max_steps,
        precision="fp16" if arguments.fp16 else "bf16" if arguments.bf16 else "auto",
        gradient_accumulation_steps=arguments.gradient_accumulation_steps,
        max_grad_norm=arguments.max_grad_norm,
        callbacks=[
            ProgressBar(),
            Summary(),
            Evaluation(["perplexity"], every_n_steps=arguments.eval_steps),
            LRMonitor(),
            JSONLLogger(),
            Checkpoint(every_n_steps=arguments.save_steps, keep_last=2),
        ],
        output_dir=arguments.output_dir,
        seed=arguments.seed,
        log_every_n_steps=arguments.logging_steps,
    )


def make_schedule(
    arguments: argparse.Namespace, trainer: Trainer, optimizer: Optimizer
) -> LRScheduler:
    """Return the schedule: up for `--warmup_steps`, then as `--lr_scheduler_type` says."""
    steps = trainer.planned_steps
    schedule: LRScheduler = get_scheduler(
        arguments.lr_scheduler_type, optimizer, arguments.warmup_steps, steps
    )
    return schedule


def main() -> None:
    """Train, save, and print the perplexity on what was held out."""
    arguments = parse_arguments()
    trainer = make_trainer(arguments)
    processes = trainer.processes
    texts = read_texts(arguments)
    tokenizer = make_tokenizer(arguments, texts.train, processes)
    train, held_out = (make_blocks(part, tokenizer, arguments.block_size) for part in texts)
    model = make_model(arguments, tokenizer)
    load = partial(DataLoader, collate_fn=default_convert)  # the batches are made already
    result = trainer.fit(
        model,
        (
            load(train, arguments.per_device_train_batch_size, shuffle=True),
            load(held_out, arguments.per_device_eval_batch_size),
        ),
        optimizer=partial(AdamW, lr=arguments.learning_rate, weight_decay=arguments.weight_decay),
        lr_scheduler=partial(make_schedule, arguments, trainer),
        resume=arguments.resume_from_checkpoint,
    )
    trainer.save_model(arguments.output_dir / "model")
    if processes.is_main_process:
        tokenizer.save_pretrained(arguments.output_dir / "model")
    processes.print(f"perplexity: {result.metrics['eval/perplexity']:.2f}")
    trainer.close()


if __name__ == "__main__":
    main()
