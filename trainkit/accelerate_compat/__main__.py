"""Run a script of Accelerate as it is: `python -m trainkit.accelerate_compat SCRIPT ARGUMENTS`.

Its imports, and those of modules in its folder, are rewritten in memory as `trainkit migrate` does
it. Installed packages keep the Accelerate that they find.
"""

import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from typing_extensions import override

from trainkit.accelerate_compat.migration import migrated
from trainkit.errors import ConfigError


class _Rewriting(SourceFileLoader):
    @override
    def get_code(self, fullname: str) -> CodeType:
        data = self.get_data(self.path)
        with suppress(ConfigError):  # Python itself says better what is wrong with it
            data = migrated(data, self.path).after
        return self.source_to_code(data, self.path)  # not kept, as the script itself would be


class _Finder(MetaPathFinder):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            origin = Path(spec.loader.path)
            is_near = origin.is_relative_to(self._folder) and "site-packages" not in origin.parts
            if is_near and b"accelerate" in origin.read_bytes():
                spec.loader = _Rewriting(spec.loader.name, spec.loader.path)
        return spec


def main(arguments: list[str]) -> None:
    """Run `arguments[0]` as the main module, with the others."""
    if not arguments or arguments[0].startswith("-"):
        raise SystemExit("usage: python -m trainkit.accelerate_compat SCRIPT [ARGUMENT ...]")
    script = Path(arguments[0]).resolve()
    if not script.is_file():
        raise SystemExit(f"trainkit: there is no script `{arguments[0]}` in `{Path.cwd()}`.")
    sys.argv, sys.path[0] = arguments, str(script.parent)
    sys.meta_path.insert(sys.meta_path.index(PathFinder), _Finder(script.parent))
    loader = _Rewriting("__main__", str(script))
    module = ModuleType("__main__")
    module.__file__, module.__loader__ = str(script), loader
    sys.modules["__main__"] = module
    loader.exec_module(module)


if __name__ == "__main__":
    main(sys.argv[1:])
