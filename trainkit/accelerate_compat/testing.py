"""What `accelerate.test_utils` has: programs that a test starts, and the data of its examples."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from subprocess import PIPE, CompletedProcess
from typing import IO, Any

import torch
from torch.utils.data import DataLoader

from trainkit.basics.packages import require

_FOLDER = "tests/test_samples/MRPC"


class SubprocessCallException(Exception):
    """A program that `run_command` started has failed; its errors are in the text."""


def execute_subprocess_async(
    cmd: Sequence[Any],
    env: Mapping[str, str] | None = None,
    stdin: Any = None,
    timeout: float | None = None,
    quiet: bool = False,
    echo: bool = True,
) -> CompletedProcess[Any]:
    """Run a program to its end, and print what it writes as it comes.

    Args:
        cmd: The program and its arguments.
        env: All of its environment; None: as here.
        stdin: What it reads, as of `subprocess.Popen`.
        timeout: Seconds after which it is killed; None: never.
        quiet: Print nothing of what it writes.
        echo: Print the command.

    Returns:
        Its `returncode`, and `stdout` and `stderr` as lists of lines.

    Raises:
        RuntimeError: It failed, or a signal ended it.
        TimeoutExpired: It was killed.
    """
    command = [*map(str, cmd)]
    if echo:
        print("\nRunning: ", *command)
    started: Any = {"env": env, "stdin": stdin, "stdout": PIPE, "stderr": PIPE, "encoding": "utf-8"}
    started |= {"errors": "replace", "start_new_session": True}
    with ThreadPoolExecutor(2) as pool, subprocess.Popen(command, **started) as process:
        streams = ((process.stdout, sys.stdout, "stdout:"), (process.stderr, sys.stderr, "stderr:"))
        readers = [pool.submit(_lines, *stream, quiet) for stream in streams]
        try:
            process.wait(timeout)
        finally:
            if process.returncode is None:  # what it has started holds its streams open, too
                with suppress(ProcessLookupError):
                    if hasattr(os, "killpg"):
                        os.killpg(process.pid, signal.SIGKILL)
                process.kill()
        out, errors = (reader.result() for reader in readers)
    if process.returncode:
        text = "\n".join(["Its errors:", *errors])
        raise RuntimeError(f"`{' '.join(command)}` ended with {process.returncode}. {text}")
    return CompletedProcess(command, 0, out, errors)


def _lines(stream: IO[str] | None, to: Any, label: str, quiet: bool) -> list[str]:
    lines: list[str] = []
    for line in stream or ():
        lines.append(line.rstrip())
        if not quiet:
            print(label, lines[-1], file=to)
    return lines


def run_command(
    command: Sequence[Any], return_stdout: bool = False, env: Mapping[str, str] | None = None
) -> str | None:
    """Run a program; return what it wrote, with its errors, where that is asked for."""
    try:
        done = execute_subprocess_async(command, env, quiet=True, echo=False)
    except RuntimeError as error:
        raise SubprocessCallException(*error.args) from error
    return "".join(f"{line}\n" for line in done.stdout + done.stderr) if return_stdout else None


def get_torch_dist_unique_port() -> int:
    """Return a port for `--master_port`: another one in each worker of `pytest-xdist`."""
    return 29500 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


def mocked_dataloaders(accelerator: Any, batch_size: int = 16) -> tuple[Any, Any]:
    """Return loaders of pairs of sentences for training, two a batch, and evaluation, one a batch.

    They come from `tests/test_samples/MRPC/train.csv` and `dev.csv` under the working folder, as in
    Accelerate's repository, by the tokenizer "bert-base-cased".

    Args:
        accelerator: Of the script; not needed.
        batch_size: Of the script; makes no difference, as there.
    """
    tokenizer, data = _tokenizer_and_samples("bert-base-cased")
    numbers = {label: number for number, label in enumerate(data["train"].unique("label"))}

    def encode(rows: Any) -> Any:
        pairs = rows["sentence1"], rows["sentence2"]
        encoded = tokenizer(*pairs, truncation=True, padding="max_length")
        return {**encoded, "labels": [numbers[label] for label in rows["label"]]}

    def collate(examples: Any) -> Any:
        return tokenizer.pad(examples, padding="longest", return_tensors="pt")

    data = data.map(encode, batched=True, remove_columns=["sentence1", "sentence2", "label"])
    train = DataLoader(data["train"], 2, shuffle=True, collate_fn=collate)
    return train, DataLoader(data["validation"], 1, collate_fn=collate)


def mocked_dataloaders_for_autoregressive_models(
    accelerator: Any, batch_size: int = 16
) -> tuple[Any, Any]:
    """Return loaders of the first sentences of these pairs, with the next token as label.

    None is shuffled; the tokenizer is that of "HuggingFaceTB/SmolLM-360M".

    Args:
        accelerator: Of the script; its `mixed_precision` says of what lengths are a multiple.
        batch_size: Of the script; makes no difference, as there.
    """
    tokenizer, data = _tokenizer_and_samples("HuggingFaceTB/SmolLM-360M")
    tokenizer.pad_token = tokenizer.eos_token
    multiple = {"no": None, "fp8": 16}.get(accelerator.mixed_precision, 8)

    def encode(rows: Any) -> Any:
        return tokenizer(rows["sentence1"], truncation=True, return_attention_mask=False)

    def collate(examples: Any) -> Any:
        batch = tokenizer.pad(
            examples,
            padding="max_length",
            max_length=max(len(each["input_ids"]) for each in examples) + 1,
            pad_to_multiple_of=multiple,
            return_tensors="pt",
        )
        labels = batch["input_ids"][:, 1:]
        inputs = {name: value[:, :-1] for name, value in batch.items()}
        return {**inputs, "labels": torch.where(labels == tokenizer.pad_token_id, -100, labels)}

    data = data.map(encode, batched=True, remove_columns=["sentence1", "sentence2", "label"])
    train, validation = data["train"], data["validation"]
    return DataLoader(train, 2, collate_fn=collate), DataLoader(validation, 1, collate_fn=collate)


def _tokenizer_and_samples(name: str) -> tuple[Any, Any]:
    for package in ("datasets", "transformers"):
        require(package, "`mocked_dataloaders`")
    from datasets import load_dataset
    from transformers import AutoTokenizer

    files = {"train": f"{_FOLDER}/train.csv", "validation": f"{_FOLDER}/dev.csv"}
    return AutoTokenizer.from_pretrained(name), load_dataset("csv", data_files=files)
