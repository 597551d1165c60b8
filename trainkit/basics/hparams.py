"""Hyperparameters: what a user says of a run, as values that everything can write."""

import dataclasses
import json
import os
import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from enum import Enum
from types import SimpleNamespace
from typing import Any

from trainkit.basics.formatting import json_value
from trainkit.errors import ConfigError

_SECRET = re.compile(
    r"(^|_)(secret|passw(or)?d|credentials?|api_?key|(access|auth|bearer|hf|hub)_?token)$|^token$",
    re.IGNORECASE,
)

_PLAIN = (bool, int, float, str)


def plain(given: Any, argument: str = "hparams") -> dict[str, Any]:
    """Return hyperparameters as nested dicts and lists of numbers, texts, booleans and None.

    Texts under a key that is called like a secret, such as `api_key`, become "(hidden)".

    Args:
        given: A mapping, a dataclass or a namespace, nested as one likes; None: there are none.
    """
    try:
        values = {} if given is None else _value(given, argument)
    except RecursionError:
        raise ConfigError(f"`{argument}` holds itself somewhere inside.") from None
    if not isinstance(values, dict):
        raise ConfigError(
            f"`{argument}` must be a mapping, a dataclass or a namespace, but is {given!r:.60}. "
            f'Write `{argument}={{"lr": 0.1}}`.'
        )
    names = [name for name, _ in _leaves(values, "")]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"`{argument}` says `{min(twice)}` twice: as one key, and nested.")
    return values


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested values by dotted names, for what has no nesting; lists become texts."""
    return dict(_leaves(json_value(values), ""))


def changed_hparams(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return, in words, which hyperparameters are others than they were."""
    old, new = flat(was), flat(now)
    pairs = {name: [each.get(name, "not set") for each in (old, new)] for name in {**old, **new}}
    return [f"`{name}` was {a} and is {b}" for name, (a, b) in pairs.items() if a != b]


def _leaves(values: Mapping[str, Any], above: str) -> list[tuple[str, Any]]:
    leaves = []
    for key, value in values.items():
        if isinstance(value, dict) and value:
            leaves += _leaves(value, f"{above}{key}.")
        else:
            is_text = isinstance(value, dict | list)
            leaves.append((f"{above}{key}", json.dumps(json_value(value)) if is_text else value))
    return leaves


def _value(value: Any, path: str) -> Any:
    """Return a value in plain types; `path` names it in errors."""
    if isinstance(value, Enum):
        value = value.value if isinstance(value.value, str | int | float) else value.name
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):  # of torch or numpy
        value = value.item()
    named = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    if value is None or isinstance(value, bool | int | float | str):
        return next((kind(value) for kind in _PLAIN if isinstance(value, kind)), None)
    if isinstance(value, os.PathLike) or named in ("torch.dtype", "torch.device"):
        return str(value)
    if (fields := _fields(value)) is not None:
        if odd := [key for key in fields if not isinstance(key, str)]:
            raise ConfigError(
                f"`{path}` has the key {odd[0]!r} of the type `{type(odd[0]).__name__}`. Keys of "
                "hyperparameters must be texts."
            )
        found = {key: _value(entry, f"{path}.{key}") for key, entry in fields.items()}
        hides = [k for k, v in found.items() if isinstance(v, str) and _SECRET.search(k)]
        return found | dict.fromkeys(hides, "(hidden)")
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return [_value(entry, f"{path}[{index}]") for index, entry in enumerate(value)]
    raise ConfigError(
        f"`{path}` is of the type `{named}`, which cannot be written as a hyperparameter. Give a "
        "number, a text, True, False, None or a nesting of these, such as its name, or leave it "
        "out."
    )


def _fields(value: Any) -> dict[Any, Any] | None:
    """Return the names and values in what has some; None for all else."""
    if isinstance(value, Mapping):
        return dict(value.items())  # those of omegaconf fill in what they refer to
    if isinstance(value, Namespace | SimpleNamespace):
        return vars(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    named: dict[Any, Any] | None = value._asdict() if hasattr(value, "_asdict") else None
    return named
