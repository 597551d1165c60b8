"""A parser of command lines that names the nearest option, and knows where a script begins."""

import argparse
from collections.abc import Sequence
from typing import Any, NoReturn

from typing_extensions import override

from trainkit.cli.config_file import nearest

__all__ = ["CommandParser"]


class CommandParser(argparse.ArgumentParser):
    """Names the nearest option for an unknown one.

    Args:
        takes_script: The first argument that is no option, and all behind it, are a script and
            its own arguments; they are put into `script`, a list.
    """

    def __init__(self, *, takes_script: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs, allow_abbrev=False)
        self._takes_script = takes_script

    @override
    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        arguments = list(args or [])
        script: list[str] = []
        if self._takes_script:
            start = self._script_start(arguments)
            arguments, script = arguments[:start], arguments[start:]
            if script[:1] == ["--"]:
                script = script[1:]
        parsed, rest = super().parse_known_args(arguments, namespace)
        unknown = [each for each in rest if each.startswith("-")]
        if unknown:
            self._refuse(unknown[0])
        if self._takes_script:
            parsed.script = script
        return parsed, rest

    def _script_start(self, arguments: Sequence[str]) -> int:
        """Return the place of the script; options before it may have a value of their own."""
        index = 0
        while index < len(arguments):
            name, equals, _ = arguments[index].partition("=")
            if name == "--" or not name.startswith("-"):
                return index
            action = self._option_string_actions.get(name)
            if action is None:
                self._refuse(name)
            index += 1 if equals or action.nargs == 0 else 2
        return len(arguments)

    def _refuse(self, name: str) -> NoReturn:
        option = name.partition("=")[0]
        self.error(f"`{option}` is no known option.{nearest(option, self._option_string_actions)}")
