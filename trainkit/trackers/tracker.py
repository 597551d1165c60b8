"""The interface of trackers."""

from math import prod
from pathlib import Path
from typing import Any

from trainkit.errors import DataError


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
    tracker: Any = None
    """What the tracking library calls its run; set it, or write a property."""

    def __init__(self, _blank: bool = False) -> None:
        self._blank = _blank

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


def image_rows(image: Any) -> Any:
    """Return an image [channels, height, width] as an array of bytes [height, width, channels]."""
    import numpy as np  # few programs log images

    array = np.asarray(image.detach().float().cpu() if hasattr(image, "detach") else image)
    if array.ndim != 3 or array.shape[0] not in (1, 3, 4):
        raise DataError(
            f"`image` has the shape {array.shape}, but must be [channels, height, width] with 1, 3 "
            "or 4 channels."
        )
    whole = getattr(image, "dtype", array.dtype)
    is_bytes = str(whole).endswith("uint8")
    scaled = array if is_bytes else np.nan_to_num(array).clip(0, 1) * 255
    return scaled.round().astype(np.uint8).transpose(1, 2, 0)
