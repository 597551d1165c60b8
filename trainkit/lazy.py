"""What is imported when it is first asked for: public names (PEP 562), and what outer rings give.

The core does not import the rings around it. What it asks of them is provided by
`trainkit/__init__.py`, which knows all of trainkit.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

__all__ = ["ask", "lazy_exports", "provide", "what_to_install"]

_REQUIRED = ("torch", "safetensors", "tqdm", "typing_extensions")

_homes: dict[str, str] = {}


def lazy_exports(
    package: str, homes: Mapping[str, str]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` of a package.

    Args:
        package: Its `__name__`.
        homes: The names that each of its modules gives, separated by blanks; one of another
            package by its whole name.
    """
    home = {name: module for module, names in homes.items() for name in names.split()}

    def load(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module `{package}` has no attribute {name!r}")
        module = home[name]
        whole = module if module.startswith("trainkit.") else f"{package}.{module}"
        try:
            return getattr(import_module(whole), name)
        except ModuleNotFoundError as error:
            if (text := what_to_install(error)) is None:
                raise
            raise ModuleNotFoundError(text, name=error.name) from None

    return sorted(home), load, lambda: sorted([*home])


def what_to_install(error: ModuleNotFoundError) -> str | None:
    """Return what to install where a package is missing that no part can do without; else None."""
    missing = [name for name in _REQUIRED if find_spec(name) is None]
    if (error.name or "").partition(".")[0] not in missing:
        return None
    return (
        f"trainkit needs what is not installed: run `pip install {' '.join(missing)}` (of torch, "
        "https://pytorch.org/get-started has the build for each machine)."
    )


def provide(homes: Mapping[str, str]) -> None:
    """Say in which module of trainkit what the core asks for is found, by its name there."""
    _homes.update(homes)


def ask(name: str) -> Any:
    """Return what was provided under a name."""
    return getattr(import_module(_homes[name]), name)
