"""A parser of command lines that names the nearest option."""

import argparse
from collections.abc import Sequence
from typing import Any

from typing_extensions import override

from trainkit.basics.parsing import nearest


class CommandParser(argparse.ArgumentParser):
    """Names the nearest option for an unknown one, and takes no abbreviations."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, allow_abbrev=False)

    @override
    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        parsed, rest = super().parse_known_args(args, namespace)
        if "--" in rest and getattr(parsed, "command", None) == []:
            # Before 3.13 argparse has filled a positional of any length before it comes there.
            cut = rest.index("--")
            parsed.command, rest = rest[cut + 1 :], rest[:cut]
        unknown = [each.partition("=")[0] for each in rest if each.startswith("-")]
        if unknown:
            hint = nearest(unknown[0], self._option_string_actions)
            self.error(f"`{unknown[0]}` is no known option.{hint}")
        return parsed, rest
