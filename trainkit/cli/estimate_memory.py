"""`trainkit estimate-memory`: Accelerate's command, by its options."""

import argparse
from functools import partial
from typing import Any

import torch

from trainkit.basics.formatting import readable_size
from trainkit.cli.estimate import empty_model
from trainkit.errors import ConfigError
from trainkit.inspect.memory import memory_of

_BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "int8": 8, "int4": 4}
_WHAT = "Print what a model takes in each dtype, alone and in a training by Adam; see `estimate`."


def add_to(commands: Any) -> None:
    """Add the command to the parser's `commands`."""
    parser = commands.add_parser("estimate-memory", description=_WHAT)
    parser.add_argument(
        "model_name", help="a folder or config.json of transformers, or module:function"
    )
    parser.add_argument("--library_name", choices=["transformers", "timm"], default="transformers")
    default = ["float32", "float16", "int8", "int4"]
    parser.add_argument("--dtypes", nargs="+", choices=[*_BITS], default=default)
    parser.add_argument("--trust_remote_code", action="store_true", help="not done here")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if options.library_name == "timm" or options.trust_remote_code:
        raise ConfigError(
            "`estimate-memory` runs no code of others, and reads no names of timm. Give a function "
            "that makes the model, as `module:function`."
        )
    model = empty_model(options.model_name, "float32")
    adam = partial(torch.optim.Adam, lr=1e-3)
    print(f"{'dtype':10}{'parameters':>14}{'training by Adam':>20}")
    for name in options.dtypes:
        bits = _BITS[name]
        alone = sum(p.numel() for p in model.parameters()) * bits // 8
        trained = "not by itself"
        if bits > 8:
            trained = readable_size(memory_of(model.to(getattr(torch, name)), adam).total)
        print(f"{name:10}{readable_size(alone):>14}{trained:>20}")
    print("Activations come on top: they depend on the batch.")
    return 0
