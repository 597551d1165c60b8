"""What is imported when it is first asked for: public names (PEP 562), and what outer rings give.

The core does not import the rings around it. What it asks of them is provided by
`trainkit/__init__.py`, which knows all of trainkit.
"""

import dis
import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

__all__ = ["ask", "lazy_exports", "provide", "what_to_install"]

_REQUIRED = ("torch", "safetensors", "tqdm", "typing_extensions")

_homes: dict[str, str] = {}


def lazy_exports(package: str) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` of the package that calls this.

    It gives what it imports `if TYPE_CHECKING`, which is read from its code: so each name and its
    module are said once, for type checkers and for programs.

    Args:
        package: Its `__name__`.
    """
    here = inspect.currentframe()
    assert here is not None
    caller = here.f_back
    assert caller is not None
    home, module = dict[str, str](), ""
    for instruction in dis.get_instructions(caller.f_code):
        if instruction.opname == "IMPORT_NAME":
            module = instruction.argval
        elif instruction.opname == "IMPORT_FROM" and instruction.argval not in caller.f_globals:
            home[instruction.argval] = module

    def load(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module `{package}` has no attribute {name!r}")
        try:
            return getattr(import_module(home[name]), name)
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
