r"""Teach a small language model to answer: LoRA, a chat template, loss on answers, packed rows.

    make data
    .venv/bin/python examples/chat_sft.py
    .venv/bin/trainkit launch --num_processes 2 examples/chat_sft.py --output-dir runs/chat_sft2

The dialogues come with the package `chatterbot-corpus`. No package has a language model that is
small enough, so a new one reads their text first, as text; `--model-name-or-path` takes a
directory or a name on the hub in its place. Then its weights are frozen, and an adapter of peft
learns the answers. The output directory gets `base/`, `adapter/`, which `PeftModel.from_pretrained`
reads, and checkpoints that hold the adapter, and refer to the base.
"""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from peft import LoraConfig, get_peft_model
from tokenizers import ByteLevelBPETokenizer
from torch import nn
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from trainkit import Trainer
from trainkit.callbacks import Checkpoint, JSONLLogger, ProgressBar, Summary, Throughput
from trainkit.data import pack

END, PAD = "<|end|>", "<|pad|>"
SPEAKERS = ("user", "assistant")
MARKS = [f"<|{speaker}|>" for speaker in SPEAKERS]
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message.role + '|>' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + '<|end|>' }}"
    "{% endgeneration %}{% else %}{{ message.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TINY_DIALOGUES = [
    [f"What comes after {number}?", f"After {number} comes {number + 1}."] for number in range(40)
]
TINY = {"max_length": 48, "batch_size": 2, "base_steps": 4, "max_steps": 4, "vocabulary_size": 320}

Dialogue = list[str]  # what is said in turns; the user begins


class Dialogues(NamedTuple):
    """The dialogues of both parts."""

    train: list[Dialogue]
    held_out: list[Dialogue]


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's settings."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model-name-or-path", help="directory or hub name with a chat template (default: new)")
    add("--vocabulary-size", type=int, default=2048, help="of a new one (default: 2048)")
    add("--base-steps", type=int, default=200, help="updates of a new one on text (default: 200)")
    add("--max-length", type=int, default=512, help="tokens of a row (default: 512)")
    add("--batch-size", type=int, default=4, help="rows of a process (default: 4)")
    add("--learning-rate", type=float, default=5e-3, help="of the adapter (default: 5e-3)")
    add("--rank", type=int, default=8, help="of the adapter (default: 8)")
    add("--dora", action="store_true", help="train directions and lengths apart")
    add("--gradient-checkpointing", action="store_true", help="less memory, slower")
    add("--max-epochs", type=int, default=6, help="default: 6")
    add("--max-steps", type=int, help="updates, instead of epochs")
    add("--seed", type=int, default=42)
    add("--output-dir", type=Path, default=Path("runs/chat_sft"))
    add("--resume", help="auto, must, or the folder of a checkpoint")
    add("--tiny", action="store_true", help="seconds, on forty dialogues about numbers")
    if "--tiny" in (sys.argv if given is None else given):
        parser.set_defaults(**TINY)
    return parser.parse_args(given)


def read_dialogues(tiny: bool = False) -> Dialogues:
    """Return what the package holds; one dialogue of ten is held out, with its repetitions."""
    found = TINY_DIALOGUES if tiny else _english()
    whole = [turns[: len(turns) // 2 * 2] for turns in found if len(turns) > 1]
    unique = list({tuple(turns): turns for turns in whole}.values())
    questions = sorted({turns[0] for turns in unique})
    apart = set(questions[::10])
    return Dialogues(
        [turns for turns in unique if turns[0] not in apart],
        [turns for turns in unique if turns[0] in apart],
    )


def _english() -> list[Dialogue]:
    # Found without being imported: it may want packages that are not there.
    spec = importlib.util.find_spec("chatterbot_corpus")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("The package `chatterbot-corpus` is not installed. `make data` installs it.")
    folder = Path(next(iter(spec.submodule_search_locations))) / "data" / "english"
    return [
        [str(turn).strip() for turn in turns]
        for file in sorted(folder.glob("*.yml"))
        for turns in yaml.safe_load(file.read_text(encoding="utf-8"))["conversations"]
    ]


def make_tokenizer(dialogues: list[Dialogue], vocabulary_size: int) -> PreTrainedTokenizerBase:
    """Return a tokenizer whose pieces are learnt from dialogues, with a chat template."""
    bpe = ByteLevelBPETokenizer()
    texts = (turn for turns in dialogues for turn in turns)
    bpe.train_from_iterator(
        texts, vocabulary_size, special_tokens=[PAD, END, *MARKS], show_progress=False
    )
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bpe._tokenizer, pad_token=PAD, eos_token=END
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def encode(dialogues: list[Dialogue], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """Return the tokens of dialogues; labels are those of the answers, and ignored elsewhere."""
    return [_encode(turns, tokenizer) for turns in dialogues]


def _encode(turns: Dialogue, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    messages = [{"role": SPEAKERS[place % 2], "content": turn} for place, turn in enumerate(turns)]
    encoded: Any = tokenizer.apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    tokens, answers = encoded["input_ids"], encoded["assistant_masks"]
    labels = [token if answer else -100 for token, answer in zip(tokens, answers, strict=True)]
    return {"input_ids": tokens, "labels": labels}


def make_base(vocabulary_size: int, pad_id: int, end_id: int, seed: int) -> nn.Module:
    """Return a new small model."""
    torch.manual_seed(seed)  # the same first values on every process
    config = LlamaConfig(
        vocab_size=vocabulary_size,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=end_id,
        eos_token_id=end_id,
        pad_token_id=pad_id,
    )
    return LlamaForCausalLM(config)


def train_base(
    arguments: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, data: Dialogues
) -> None:
    """Let a new model read the dialogues as text, and write it with its tokenizer."""
    trainer = Trainer(max_steps=arguments.base_steps, seed=arguments.seed, callbacks=[Summary()])
    ends = tokenizer.pad_token_id, tokenizer.eos_token_id
    model = make_base(len(tokenizer), *ends, arguments.seed)
    rows = pack(
        [{"input_ids": tokenizer(" ".join(turns))["input_ids"]} for turns in data.train],
        arguments.max_length,
        longer="split",
        pad_id=tokenizer.pad_token_id,
    )
    loader = DataLoader(rows, arguments.batch_size, shuffle=True)
    trainer.fit(model, loader, optimizer=partial(AdamW, lr=2e-3), lr_scheduler="cosine")
    trainer.save_model(arguments.output_dir / "base", tokenizer=tokenizer)


def add_adapter(base: nn.Module, rank: int, *, dora: bool = False) -> nn.Module:
    """Return the model with a new adapter; its own weights are frozen."""
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules="all-linear",
        use_dora=dora,
        task_type="CAUSAL_LM",
    )
    return get_peft_model(base, config)


def make_trainer(arguments: argparse.Namespace) -> Trainer:
    """Return the trainer of the adapter."""
    return Trainer(
        max_epochs=arguments.max_epochs if arguments.max_steps is None else None,
        max_steps=arguments.max_steps,
        gradient_checkpointing=arguments.gradient_checkpointing,
        callbacks=[
            ProgressBar(),
            Summary(),
            JSONLLogger(),
            Checkpoint(frozen="reference"),
            Throughput(),
        ],
        output_dir=arguments.output_dir,
        seed=arguments.seed,
        log_every_n_steps=5,
    )


def main() -> None:
    """Train the adapter, save it, and say how much better the held-out answers are."""
    arguments = parse_arguments()
    data, trainer = read_dialogues(arguments.tiny), make_trainer(arguments)
    source = arguments.model_name_or_path or arguments.output_dir / "base"
    if arguments.model_name_or_path is None and not (source / "config.json").exists():
        train_base(arguments, make_tokenizer(data.train, arguments.vocabulary_size), data)
    tokenizer = AutoTokenizer.from_pretrained(source)
    torch.manual_seed(arguments.seed)  # the same first values of the adapter on every process
    model = add_adapter(
        AutoModelForCausalLM.from_pretrained(source), arguments.rank, dora=arguments.dora
    )
    rows, held_out = (
        pack(
            encode(part, tokenizer),
            arguments.max_length,
            longer="truncate",
            pad_id=tokenizer.pad_token_id,
        )
        for part in data
    )
    loaders = DataLoader(rows, arguments.batch_size, shuffle=True), DataLoader(held_out, 4)
    before = trainer.evaluate(model, loaders[1])["eval/loss"]
    result = trainer.fit(
        model,
        loaders,
        optimizer=partial(AdamW, lr=arguments.learning_rate),
        lr_scheduler="cosine",
        warmup=0.1,
        resume=arguments.resume,
    )
    trainer.save_model(arguments.output_dir / "adapter", tokenizer=tokenizer)
    after = result.metrics["eval/loss"]
    trainer.processes.print(f"loss of held-out answers: {before:.4f} before, {after:.4f} after")
    trainer.close()


if __name__ == "__main__":
    main()
