"""The modules and names of Accelerate: `import trainkit.accelerate_compat as accelerate`.

Names that trainkit has are trainkit's own. Those for hardware and libraries that it does not drive
can be imported, and raise when they are used; others are not there. Each says what to do instead.
The sub-modules are made from `names.MODULES`, and each of them gives every name.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

from typing_extensions import override

from trainkit.accelerate_compat import names

__version__ = names.VERSION


class _Module(ModuleType):
    """A module of Accelerate, which gives what trainkit has in its place."""

    @override
    def __getattr__(self, name: str) -> Any:
        return _look_up(self.__name__, name)

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        # `utils.tqdm` is a module too, but the function goes before it.
        if not (isinstance(value, ModuleType) and name in names.known()):
            super().__setattr__(name, value)

    @override
    def __dir__(self) -> list[str]:
        return sorted(names.known())


class _Modules(MetaPathFinder, Loader):
    """Makes the sub-modules, and says what is not there: `from` would hide what a module says."""

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(f"{__name__}.")
        if package or not name:
            return None
        if name in names.MODULES:
            return spec_from_loader(fullname, self, is_package=True)
        raise ImportError(names.missing(name), name=fullname)

    @override
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name, "Stands for a module of Accelerate.")

    @override
    def exec_module(self, module: ModuleType) -> None:
        """Leave it as it is: names are looked up when they are asked for."""


def _look_up(module: str, name: str) -> Any:
    """Return a name of a module, or a module inside of it."""
    full = f"{module}.{name}"
    path = full.removeprefix(f"{__name__}.")
    if name in names.known():
        return names.find(name)
    if path in names.MODULES:
        return import_module(full)
    if name == "__all__":
        raise ImportError(f"`from {module} import *` would import nothing. Name what is needed.")
    raise AttributeError(name if name.startswith("__") else names.missing(path))


def __getattr__(name: str) -> Any:
    return _look_up(__name__, name)


def __dir__() -> list[str]:
    return sorted(names.known())


if not any(type(finder).__qualname__ == _Modules.__qualname__ for finder in sys.meta_path):
    sys.meta_path.append(_Modules())
