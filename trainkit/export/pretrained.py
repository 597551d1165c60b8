"""What transformers wants beside the weights of its models."""

import copy
import sys
from pathlib import Path
from typing import Any

from torch import nn

__all__ = ["write_configuration"]


def write_configuration(model: nn.Module, folder: Path) -> None:
    """Write `config.json`, and how to generate, of a model of transformers; nothing of others."""
    transformers = sys.modules.get("transformers")
    if transformers is None or not isinstance(model, transformers.PreTrainedModel):
        return
    found: Any = model
    config = copy.deepcopy(found.config)
    config.architectures = [_class_name(type(model))]
    config.dtype = str(found.dtype).removeprefix("torch.")
    config.save_pretrained(folder)
    if found.can_generate() and found.generation_config is not None:
        found.generation_config.save_pretrained(folder)


def _class_name(kind: type) -> str:
    """Return the name of a model's class; `fully_shard` makes it one with a prefix."""
    original = kind.__bases__[-1]
    return original.__name__ if kind.__name__ == f"FSDP{original.__name__}" else kind.__name__
