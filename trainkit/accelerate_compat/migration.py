"""Rewrite a script's imports of Accelerate, and say what cannot be rewritten."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import getattr_static
from itertools import accumulate

from trainkit.accelerate_compat import names
from trainkit.errors import ConfigError

THEIRS, OURS = "accelerate", "trainkit.accelerate_compat"
_MODULE = re.compile(rb"\baccelerate\b(?:[\s\\]*\.[\s\\]*\w+)*")
_IN_TEXT = re.compile(r"accelerate((\.\w+)*| (config|env|launch|test)\b.*)", re.S)


@dataclass
class Migration:
    """A script whose imports were rewritten.

    Attributes:
        before: The script as it was.
        after: The script as it is to be.
        left: What is left to be done by hand, as lines and sentences.
    """

    before: bytes
    after: bytes
    left: list[tuple[int, str]]


def migrated(source: bytes, path: str) -> Migration:
    """Rewrite the imports of a script."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(source).readline)
        text = source.decode(encoding)
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise ConfigError(f"`{path}`{line} is no Python of this version: {error}.") from None
    code = text.encode()  # what the columns of `ast` count
    lengths = [len(line) for line in code.splitlines(keepends=True)]
    starts = [0, *accumulate(lengths)]
    for start, end, new in sorted(_edits(tree, code, starts), reverse=True):
        code = code[:start] + new.encode() + code[end:]
    return Migration(source, code.decode().encode(encoding), sorted(set(_left(tree))))


def _edits(tree: ast.AST, code: bytes, starts: list[int]) -> Iterator[tuple[int, int, str]]:
    """Yield the first and last byte of what goes, and what stands there from now on."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in filter(_is_theirs, node.names):
                # `import accelerate.utils` gives the name `accelerate`.
                ours = _ours(alias.name) if alias.asname else OURS
                begin = starts[alias.lineno - 1] + alias.col_offset
                end = starts[(alias.end_lineno or 0) - 1] + (alias.end_col_offset or 0)
                yield begin, end, f"{ours} as {alias.asname or THEIRS}"
        elif isinstance(node, ast.ImportFrom) and _is_theirs(node):
            public = all(alias.name in names.PUBLIC for alias in node.names)
            match = _MODULE.search(code, starts[node.lineno - 1] + node.col_offset)
            assert match is not None
            yield *match.span(), "trainkit" if public else _ours(str(node.module))


def _left(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield what cannot be rewritten: names that are refused or not there, settings, and texts."""
    bound = dict(_bound(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from _set(node, bound)
        for path in _paths(node, bound):
            yield from _unusable(getattr(node, "lineno", 0), path)
        for each in node.args if isinstance(node, ast.Call) else ():
            if isinstance(each, ast.Constant) and _IN_TEXT.fullmatch(text := str(each.value)):
                said = f"{text[:60]!r} names Accelerate in a text, which stays as it is."
                yield each.lineno, said


def _set(node: ast.Attribute, bound: dict[str, str]) -> Iterator[tuple[int, str]]:
    """Yield what is to be said of an attribute that a script sets."""
    owner = _dotted(node.value)
    root, dot, rest = owner.partition(".")
    path = f"{bound.get(root, '')}{dot}{rest}"
    if path == THEIRS or (path.startswith(THEIRS) and path.partition(".")[2] in names.MODULES):
        said = "is set, where trainkit does not look. Leave it out."
        yield node.lineno, f"`{owner}.{node.attr}` {said}"
    elif owner.rpartition(".")[2] == "accelerator":
        ours = getattr_static(names.find("Accelerator"), node.attr, None)
        is_fixed = isinstance(ours, property) and ours.fset is None
        if is_fixed or (ours is None and node.attr.startswith("_")):
            said = "cannot be set. Pass it to `Accelerator(...)`, or leave it out."
            yield node.lineno, f"`{owner}.{node.attr}` {said}"


def _bound(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the names that imports of Accelerate give to the script, and what they stand for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in filter(_is_theirs, node.names):
                yield alias.asname or THEIRS, alias.name if alias.asname else THEIRS
        elif isinstance(node, ast.ImportFrom) and _is_theirs(node):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _paths(node: ast.AST, bound: dict[str, str]) -> Iterator[str]:
    """Yield what a node names of Accelerate, with dots."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in filter(_is_theirs, node.names))
    elif isinstance(node, ast.ImportFrom) and _is_theirs(node):
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Attribute):
        root, _, rest = _dotted(node).partition(".")
        if root in bound:
            yield f"{bound[root]}.{rest}"


def _unusable(line: int, path: str) -> Iterator[tuple[int, str]]:
    """Yield what is to be said of the first name of a path that is no module."""
    parts = path.split(".")[1:]
    for count, name in enumerate(parts, 1):
        if ".".join(parts[:count]) not in names.MODULES:
            sentence = names.refusal(name)
            if sentence is not None:
                yield line, sentence
            elif name not in names.known() and name not in ("*", "__version__"):
                yield line, names.missing(".".join(parts[:count]))
            return


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def _is_theirs(node: ast.AST) -> bool:
    """Return whether an import, or one name of it, is of Accelerate."""
    match node:
        case ast.alias(name=module) | ast.ImportFrom(module=str(module), level=0):
            return module.split(".")[0] == THEIRS
    return False


def _ours(module: str) -> str:
    return OURS + module.removeprefix(THEIRS)
