"""`trainkit estimate`: the memory of a training, before anything is loaded."""

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from trainkit.basics.formatting import count
from trainkit.basics.packages import require
from trainkit.errors import ConfigError
from trainkit.export.loading import dtype_of
from trainkit.inspect.memory import memory_of

_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-3),
    "sgd": partial(torch.optim.SGD, lr=1e-3),
    "momentum": partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    "adafactor": partial(torch.optim.Adafactor, lr=1e-3),
}
_COMPUTES_IN = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
_WHAT = "Print the memory of each process for parameters, gradients and optimizer, from shapes."


def add_to(commands: Any) -> None:
    """Add the command to the parser's `commands`."""
    parser = commands.add_parser("estimate", description=_WHAT)
    parser.add_argument(
        "model", metavar="MODEL", help="a folder or config.json of transformers, or module:function"
    )
    parser.add_argument("--strategy", choices=["single", "ddp", "fsdp"], default="single")
    parser.add_argument("--processes", type=int, default=1, metavar="N", help="of the job")
    parser.add_argument("--precision", choices=[*_COMPUTES_IN], default="fp32")
    parser.add_argument("--dtype", help="of the parameters; left out: as the model is made")
    parser.add_argument("--optimizer", choices=[*_OPTIMIZERS], default="adamw")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    processes, shards = options.processes, options.processes if options.strategy == "fsdp" else 1
    if processes < 1 or (options.strategy == "single" and processes > 1):
        raise ConfigError(
            f"`--processes` must be 1 or more, and 1 for the strategy `single`, but is {processes}."
        )
    model = empty_model(options.model, options.dtype)
    memory = memory_of(
        model,
        _OPTIMIZERS[options.optimizer],
        shards=shards,
        computes_in=_COMPUTES_IN[options.precision],
    )
    total = sum(p.numel() for p in model.parameters())
    print(f"{type(model).__name__}, {total:,} parameters, {options.optimizer}")
    print(f"{options.strategy}, {count(processes, 'process')}, {options.precision}; each holds")
    for label, size in memory.rows():
        print(f"  {label:26}{size}")
    print("  activations               unknown: they depend on the batch; so do casts of autocast,")
    print("                            and what communication and the device itself need")
    return 0


def empty_model(given: str, dtype: str | None) -> nn.Module:
    """Return a model on `meta`, from a folder or file of transformers or by `module:function`."""
    kind = dtype_of(dtype)
    with torch.device("meta"):
        model = _of_config(given) if os.path.exists(given) else _of_function(given)
    return model if kind is None else model.to(kind)


def _of_config(path: str) -> nn.Module:
    require("transformers", f"`{path}`")
    import transformers

    config: Any = transformers.AutoConfig.from_pretrained(path)
    names = getattr(config, "architectures", None) or [""]
    made_by: Any = getattr(transformers, names[0], transformers.AutoModel)
    make = made_by.from_config if made_by is transformers.AutoModel else made_by
    model: nn.Module = make(config)
    return model


def _of_function(given: str) -> nn.Module:
    module, _, name = given.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"MODEL must be a folder or a config.json of transformers, or `module:function`, but "
            f"{given!r} is none: {error}."
        ) from error
    model = make() if callable(make) else make
    if not isinstance(model, nn.Module):
        raise ConfigError(f"`{given}` must return a model, but gave a {type(model).__name__}.")
    return model
