"""What is imported when it is first asked for: public names (PEP 562), and what outer rings give.

The core does not import the rings around it. What it asks of them is provided by
`trainkit/__init__.py`, which knows all of trainkit.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["ask", "lazy_exports", "provide"]

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
        return getattr(import_module(whole), name)

    return sorted(home), load, lambda: sorted([*home])


def provide(homes: Mapping[str, str]) -> None:
    """Say in which module of trainkit what the core asks for is found, by its name there."""
    _homes.update(homes)


def ask(name: str) -> Any:
    """Return what was provided under a name."""
    return getattr(import_module(_homes[name]), name)
