"""What tests need that may be missing, or takes long to import."""

import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any

import pytest

HAS_TRANSFORMERS = find_spec("transformers") is not None
needs_transformers = pytest.mark.skipif(
    not HAS_TRANSFORMERS, reason="needs the extra `transformers`, whose models it trains"
)
HAS_TRANSFORMERS_5 = (
    HAS_TRANSFORMERS and int(metadata.version("transformers").partition(".")[0]) >= 5
)


class _Late:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and self._name not in sys.modules:
            raise AttributeError(name)  # for pytest, which asks each name of a module what it is
        return getattr(import_module(self._name), name)


def late(name: str) -> Any:
    """Return a module that is imported before the first test of the module that calls this.

    Each worker collects all tests, and runs a few: imports of seconds come with these alone. Where
    it is missing, the module is skipped.
    """
    top = name.partition(".")[0]
    if find_spec(top) is None:
        pytest.skip(f"needs {top}", allow_module_level=True)
    return _Late(name)


def import_late(module: Mapping[str, Any]) -> None:
    """Import what a module of tests wants late, before its tests fork."""
    for value in [*module.values()]:
        if isinstance(value, _Late):
            with suppress(ImportError):  # for the test to tell
                import_module(value._name)
