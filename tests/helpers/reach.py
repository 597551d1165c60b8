"""How much a person reads: all of trainkit, what the trainer can reach, what the loop loads."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


@cache
def files() -> dict[str, Path]:
    """Return the files of the product by the names of their modules."""
    folders = {"trainkit": ROOT / "trainkit", "trainkit.callbacks": ROOT / "callbacks"}
    found = {}
    for package, folder in folders.items():
        for path in folder.rglob("*.py"):
            if folder / "callbacks" in path.parents:  # a link
                continue
            parts = path.relative_to(folder).with_suffix("").parts
            name = ".".join((package, *parts)).removesuffix(".__init__")
            found[name] = path
    return found


def lines(names: Iterator[str] | set[str]) -> int:
    """Return how many lines modules have together."""
    known = files()
    return sum(len(known[name].read_text(encoding="utf-8").splitlines()) for name in names)


def reached_by(module: str) -> set[str]:
    """Return what a module imports, and what that imports, inside of functions too."""
    known, seen, todo = files(), set(), [module]
    while todo:
        name = todo.pop()
        if name in seen or name not in known:
            continue
        seen.add(name)
        if known[name].name != "__init__.py" or name == module:  # the names of a face are found
            todo += _imported(name)
    return seen


def loaded_by(module: str) -> set[str]:
    """Return the modules of ours that are there when a program has imported one."""
    code = f"import sys, {module}; print(*(n for n in sys.modules if n.startswith('trainkit')))"
    command = [sys.executable, "-c", code]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return set(answer.stdout.split()) & files().keys()


@lru_cache(16)  # all together are some hundred MB, which each fork of a later test would share
def _tree(name: str) -> ast.Module:
    return ast.parse(files()[name].read_text(encoding="utf-8"))


def _nodes(tree: ast.AST, *, for_types: bool) -> Iterator[ast.AST]:
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        test = node.test if isinstance(node, ast.If) else None
        if for_types or not (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING"):
            yield node
            waiting += ast.iter_child_nodes(node)


@cache
def _imported(name: str) -> tuple[str, ...]:
    found = []
    for node in _nodes(_tree(name), for_types=False):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [_home(node.module or "", alias.name) for alias in node.names]
    return tuple(each for each in found if each in files())


@cache
def _home(package: str, name: str) -> str:
    """Return the module that defines a name which a package gives."""
    known = files()
    if f"{package}.{name}" in known or package not in known:
        return f"{package}.{name}"
    if known[package].name == "__init__.py":
        for node in _nodes(_tree(package), for_types=True):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trainkit"):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return _home(node.module or "", alias.name)
    return package
