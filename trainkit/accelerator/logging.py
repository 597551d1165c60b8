"""Loggers that speak once for all processes."""

import logging
import os
from typing import Any, ClassVar

from typing_extensions import override

from trainkit.distributed import Processes
from trainkit.distributed.world import World


class ProcessLogger(logging.LoggerAdapter[logging.Logger]):
    """A logger whose records come from the main process only, unless told otherwise.

    `main_process_only=False` lets every process speak, `in_order=True` one after the other; all
    must make that call.
    """

    _warned: ClassVar[set[str]] = set()

    @override
    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        only_main, in_order = kwargs.pop("main_process_only", True), kwargs.pop("in_order", False)
        kwargs.setdefault("stacklevel", 2)  # who called this
        world = World.current()
        speaks = self.isEnabledFor(level)
        if not in_order:
            if speaks and (world.is_main or not only_main):
                self.logger.log(level, msg, *args, **kwargs)
            return
        for rank in range(world.size):
            if speaks and rank == world.rank:
                self.logger.log(level, msg, *args, **kwargs)
            Processes.start().barrier()

    def warning_once(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """Warn, unless this was called with the same arguments before."""
        call = str((msg, args, kwargs))
        if call not in self._warned:
            self._warned.add(call)
            self.warning(msg, *args, **{"stacklevel": 3, **kwargs})  # who called this


def get_logger(name: str, log_level: str | None = None) -> ProcessLogger:
    """Return a logger for a job of several processes.

    Args:
        name: Of the logger, usually `__name__`.
        log_level: Its level and that of the root logger; None: what `ACCELERATE_LOG_LEVEL` says.
    """
    logger = logging.getLogger(name)
    level = log_level or os.environ.get("ACCELERATE_LOG_LEVEL")
    if level is not None:
        logger.setLevel(level.upper())
        logger.root.setLevel(level.upper())
    return ProcessLogger(logger, {})
