"""What `accelerate.commands.config` has, of the files that `trainkit config` writes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trainkit.launch.config_file import default_path, read

default_config_file = default_yaml_config_file = str(default_path())


class _Config(SimpleNamespace):
    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def load_config_from_file(config_file: str | Path | None) -> Any:
    """Return the settings of a file, None: of the default one; `to_dict()` has them by name."""
    return _Config(**read(Path(config_file or default_config_file)).values)
