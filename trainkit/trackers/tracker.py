"""The interface of trackers."""

from math import prod
from pathlib import Path
from typing import Any

__all__ = ["GeneralTracker", "has_one"]


class GeneralTracker:
    """The interface of trackers; one of your own sets `name` and writes the methods.

    It is used by `Accelerator(log_with=...)`, and in a `Trainer` by `callbacks.Logger`.

    Args:
        _blank: Makes one that does nothing, for processes that do not track.
    """

    name: str = ""
    requires_logging_directory: bool = False
    main_process_only: bool = True
    place: Path | None = None
    """The file or folder that it writes, which no other may write."""
    owner: str = ""
    """Who writes, for messages; by default the tracker by its name."""
    exit_code: int = 0
    """What the program ends with, as far as it is known when `finish` is called."""

    def __init__(self, _blank: bool = False) -> None:
        self._blank = _blank

    @property
    def tracker(self) -> Any:
        """What the tracking library calls its run."""
        return None

    def start(self) -> None:
        """Begin; called by `init_trackers`."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Note the settings of the run."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Note values of a step."""

    def finish(self) -> None:
        """Write what is left and end."""

    @property
    def _called(self) -> str:
        return self.owner or f"The tracker {self.name!r}"


def has_one(value: Any) -> bool:
    """Return whether a value is a tensor or an array with one element."""
    return hasattr(value, "item") and prod(getattr(value, "shape", ())) == 1
