"""Read and write the YAML files that describe a job, with the keys of `accelerate config`."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainkit.basics.packages import require
from trainkit.basics.parsing import nearest
from trainkit.basics.written_files import replace_file
from trainkit.errors import ConfigError
from trainkit.launch import accelerate_keys
from trainkit.launch.settings import SETTINGS

VARIABLE = "TRAINKIT_CONFIG"
"""Environment variable with the file to read where no option names one."""

_LARGEST = 1 << 20  # bytes; a real file has a few hundred


@dataclass(slots=True)
class ConfigFile:
    """A configuration file that has been read.

    Args:
        values: The settings in it by name, checked.
        lines: The line of each, from 1.
        variables: What it says on sharding and compiling: environment variables for the processes.
    """

    path: Path
    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, int] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)


def default_path(env: Mapping[str, str] = os.environ) -> Path:
    """Return where `trainkit config` writes, and the other commands look."""
    if env.get(VARIABLE):
        return Path(env[VARIABLE])
    base = env.get("XDG_CONFIG_HOME") or Path("~/.config").expanduser()
    return Path(base) / "trainkit" / "default_config.yaml"


def find(given: str | None, env: Mapping[str, str] = os.environ) -> Path | None:
    """Return the file to read; None where none is named and the default one does not exist."""
    if given is None:
        path = default_path(env)
        return path if path.exists() or env.get(VARIABLE) else None
    return Path(given)


def read(path: Path) -> ConfigFile:
    """Read and check a file."""
    result = ConfigFile(path)
    for key, line, value in _entries(path):
        source = f"`{path}`, line {line}"
        if key in SETTINGS:
            if value in accelerate_keys.NULL:
                continue
            result.values[key] = SETTINGS[key].checked(value, f"({source})")
            result.lines[key] = line
        elif key == "fp16":  # before `mixed_precision` came
            result.values.setdefault("mixed_precision", "fp16" if value == "true" else "no")
            result.lines.setdefault("mixed_precision", line)
        elif key in accelerate_keys.SECTIONS:
            result.variables |= accelerate_keys.section(key, value, source)
        elif key == "dynamo_backend":  # before `dynamo_config` came
            result.variables |= accelerate_keys.part(key, value, source)
        elif key not in accelerate_keys.NO_EFFECT:
            known = [*SETTINGS, *accelerate_keys.SECTIONS]
            if hint := nearest(key, SETTINGS):
                raise ConfigError(f"`{key}` ({source}) is no known key.{hint}")
            accelerate_keys.check(key, value, source, known)
    if result.values.get("distributed_type") == "MULTI_CPU":
        result.values.setdefault("use_cpu", True)
        result.lines.setdefault("use_cpu", result.lines["distributed_type"])
    return result


def _entries(path: Path) -> Iterator[tuple[str, int, Any]]:
    """Yield each key of the file with its line and value: text, lists and dicts of it."""
    require("pyyaml", f"Reading `{path}`")
    import yaml

    try:
        if path.stat().st_size > _LARGEST:
            raise ConfigError(f"`{path}` is larger than 1 MiB: that is no configuration file.")
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"The configuration file `{path}` cannot be read: {error.strerror}. Write one by "
            "`trainkit config`."
        ) from None
    try:
        loader = yaml.BaseLoader(text)  # YAML 1.1 would read 1:4 as 64, and NO as false
        node = loader.get_single_node()
        if node is None:
            raise ConfigError(f"`{path}` is empty. Write it by `trainkit config`.")
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"`{path}` must hold lines of `key: value`, but holds a {node.id}.")
        seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            key, line = str(key_node.value), key_node.start_mark.line + 1
            if key in seen:
                raise ConfigError(f"`{key}` stands twice in `{path}`: lines {seen[key]}, {line}.")
            seen[key] = line
            yield key, line, loader.construct_object(value_node, deep=True)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"`{path}` is no valid YAML: {error}.") from None


def write(path: Path, values: Mapping[str, Any]) -> None:
    """Write settings to a file, all of it or nothing."""
    require("pyyaml", f"Writing `{path}`")
    import yaml

    data = yaml.safe_dump(dict(values), sort_keys=True).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, data)
    except OSError as error:
        raise ConfigError(f"`{path}` cannot be written: {error.strerror}.") from None
