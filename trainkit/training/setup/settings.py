"""The settings of a training's parts, in words that the processes compare (rule 3)."""

import os
import platform
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import partial
from hashlib import blake2b
from inspect import getclosurevars, unwrap
from numbers import Integral, Number
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainkit.precision import Precision
from trainkit.strategies import Strategy
from trainkit.version import __version__

SCRIPT = "the script"  # a process may have none, such as a notebook

_PARTS = (nn.Module, LRScheduler, Strategy, Precision)
_DERIVED = {"training", "base_lrs", "last_lr"}  # from what counts, or the state of the moment
_LARGEST = 4096  # elements of a tensor whose values count


def program() -> Iterator[tuple[str, str]]:
    """Yield the versions, and what the script is."""
    python = "{}.{}".format(*platform.python_version_tuple())
    yield "the versions", f"trainkit {__version__}, torch {torch.__version__}, Python {python}"
    path = Path(getattr(sys.modules["__main__"], "__file__", None) or os.devnull)
    with suppress(OSError):
        lines = path.read_bytes().splitlines()
        # The first line may say where an interpreter is on this machine.
        text = b"\n".join(line for line in lines if not line.startswith(b"#!"))
        if text:
            yield SCRIPT, f"`{path.name}` (digest {digest(text)})"


def settings(
    path: str, value: Any, *, whole: bool = True, seen: frozenset[int] = frozenset()
) -> Iterator[tuple[str, str]]:
    """Yield every setting in `value` by its path, such as "`loss_fn.label_smoothing`".

    Numbers, texts, small tensors and the code of functions count, but not what may well differ:
    devices, file paths, and objects of other kinds.

    Args:
        path: Names `value`.
        value: A number, a function, a module, a scheduler, a strategy, or a nesting of such.
        whole: Whether whole numbers count in what torch and trainkit have not written: a loss
            over the rows of all processes holds the number of its own.
        seen: What `value` is inside of.
    """
    text = _text(value, whole)
    if text is not None:
        yield f"`{path}`", text
    whole = whole or (isinstance(value, _PARTS) and not _is_foreign(type(value)))
    if id(value) not in seen:
        for key, inner in _inside(value, whole):
            yield from settings(path + key, inner, whole=whole, seen=seen | {id(value)})


def optimizer_settings(
    path: str, optimizer: Optimizer, *, ordered: bool = True
) -> Iterator[tuple[str, str]]:
    """Yield the class of an optimizer, and the settings of its groups.

    Args:
        ordered: Whether the order of the parameters in a group counts.
    """
    yield f"`{path}`", getattr(optimizer, "described", type(optimizer).__name__)
    for index, group in enumerate(optimizer.param_groups):
        name = f"{path}.param_groups[{index}]"
        shapes = [tuple(p.shape) for p in group["params"]]
        yield f"`{name}.params`", repr(shapes if ordered else sorted(shapes))
        yield from settings(name, group_settings(group))


def group_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in a group of an optimizer, without tensors that it works in."""

    def is_large(value: Any) -> bool:
        if isinstance(value, list | tuple):
            return any(isinstance(inner, Tensor) for inner in value)
        return isinstance(value, Tensor) and value.numel() > 1

    return {key: value for key, value in group.items() if not is_large(value)}


def code_of(function: Any) -> str:
    """Return the name of a function, and a digest of what it does."""
    own = unwrap(getattr(function, "__func__", function))
    code = getattr(own, "__code__", None)
    name = f"`{getattr(own, '__qualname__', type(own).__name__)}`"
    return name if code is None else f"{name} (code {digest(repr(_content(code)))})"


def digest(data: str | bytes) -> str:
    """Return a short digest, for people to compare."""
    return blake2b(data.encode() if isinstance(data, str) else data, digest_size=4).hexdigest()


def _text(value: Any, whole: bool) -> str | None:
    """Return what a value says by itself."""
    if isinstance(value, str):
        return None if os.sep in value else repr(re.sub(r"(?<=[a-z]):\d+$", "", value))
    if isinstance(value, bool):
        return repr(value)
    if isinstance(value, Number):
        return repr(value) if whole or not isinstance(value, Integral) else None
    if type(value) in (Tensor, nn.Parameter) and not value.is_meta and value.numel() <= _LARGEST:
        text = repr(value.tolist())
        counts = whole or value.is_floating_point()
        return (text if value.numel() == 1 else f"digest {digest(text)}") if counts else None
    if isinstance(value, FunctionType | MethodType):
        return code_of(value)
    if is_dataclass(value) or isinstance(value, _PARTS):
        return type(value).__name__
    return None


def _inside(value: Any, whole: bool) -> Iterator[tuple[str, Any]]:
    """Yield what a value is made of, and how it is reached."""
    if isinstance(value, Mapping):
        yield from ((f".{key}", inner) for key, inner in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{index}]", inner) for index, inner in enumerate(value))
    elif isinstance(value, partial):
        yield from (("", value.func), ("", value.args), ("", value.keywords))
    elif isinstance(value, FunctionType) and _is_foreign(value):
        with suppress(ValueError):  # a name without a value
            captured = getclosurevars(value)
            numbers = {k: v for k, v in captured.globals.items() if isinstance(v, Number)}
            yield from (("", captured.nonlocals), ("", numbers if whole else None))
        yield from (("", value.__defaults__), ("", value.__kwdefaults__))
    elif isinstance(value, _PARTS):
        if _is_foreign(type(value)):
            yield ".forward", getattr(type(value), "forward", None)
        held = {k.lstrip("_"): v for k, v in vars(value).items() if "hook" not in k}
        yield from ((f".{k}", v) for k, v in held.items() if k not in _DERIVED)
    elif is_dataclass(value):
        yield from ((f".{field.name}", getattr(value, field.name, None)) for field in fields(value))


def _is_foreign(kind: Any) -> bool:
    """Return whether neither torch nor trainkit has written a class or a function."""
    return (kind.__module__ or "").partition(".")[0] not in ("torch", "trainkit")


def _content(code: CodeType) -> list[Any]:
    """Return what a function does, alike in every process that runs the same Python."""
    plain = [repr(c) for c in code.co_consts if isinstance(c, Number | str | tuple)]
    inner = [_content(c) for c in code.co_consts if isinstance(c, CodeType)]
    return [code.co_code.hex(), code.co_names, plain, inner]
