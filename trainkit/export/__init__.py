"""Models for other programs: weights written and read as transformers and Accelerate do."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainkit.export.empty import init_empty_weights
    from trainkit.export.loading import (
        LoadedKeys,
        load_checkpoint_and_dispatch,
        load_checkpoint_in_model,
    )
    from trainkit.export.saving import save_model

__all__ = [
    "LoadedKeys",
    "init_empty_weights",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "save_model",
]

_HOME = {
    "LoadedKeys": "loading",
    "init_empty_weights": "empty",
    "load_checkpoint_and_dispatch": "loading",
    "load_checkpoint_in_model": "loading",
    "save_model": "saving",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module `trainkit.export` has no attribute {name!r}")
    return getattr(import_module(f"trainkit.export.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
