"""Let all processes do one thing after the other, and all stop where one of them fails."""

import errno as errors
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainkit.checkpoint.listing import committed
from trainkit.errors import CheckpointError, TrainkitError, text_of
from trainkit.formatting import readable_size

__all__ = ["CommitSteps"]

Failure = tuple[str, str | None, int | None]
"""What happened in words, the file at fault, and the number of the system's error."""


class CommitSteps:
    """The steps of one save, each of which ends with an agreement.

    Args:
        directory: Where checkpoints are, for errors.
        step: What is saved, for errors.
        gather: Returns what each process passes to it, in order of their ranks.
        rank: Which process this is.
    """

    def __init__(
        self, directory: Path, step: int, gather: Callable[[Any], list[Any]], rank: int
    ) -> None:
        self.needed = 0
        """Bytes that all processes together want to write."""
        self._directory = directory
        self._step = step
        self._gather = gather
        self._rank = rank

    def run(self, action: Callable[[], Any]) -> list[Any]:
        """Do `action` on every process; return what each one returned.

        Raises:
            CheckpointError: It failed somewhere; raised by all, with the cause where that is.
        """
        failure: Failure | None = None
        cause: Exception | None = None
        result = None
        try:
            result = action()
        except Exception as error:  # all must hear of it, whatever it is
            cause, failure = error, self._describe(error)
        answers = self._gather((failure, result))
        failed = [(rank, answer[0]) for rank, answer in enumerate(answers) if answer[0]]
        if failed:
            rank, (text, file, errno) = failed[0]
            place = f" on process {rank}" if len(answers) > 1 else ""
            raise CheckpointError(
                f"Saving step {self._step} failed{place}: {text}",
                path=self._directory,
                file=file,
                errno=errno,
            ) from cause
        return [result for _, result in answers]

    def run_on_main(self, action: Callable[[], Any]) -> Any:
        """Do `action` on process 0 alone; return to all what it returned."""
        return self.run(lambda: action() if self._rank == 0 else None)[0]

    def _describe(self, error: Exception) -> Failure:
        if isinstance(error, OSError):
            return self._describe_system(error), _text(error.filename), error.errno
        file = error.file if isinstance(error, CheckpointError) else None
        kind = "" if isinstance(error, TrainkitError) else f"{type(error).__name__}: "
        return f"{kind}{text_of(error)}", file, None

    def _describe_system(self, error: OSError) -> str:
        code = errors.errorcode.get(error.errno or 0, "unknown error")
        kept = ""
        with suppress(OSError):  # of the same disk; the first error is what matters
            steps = [entry.step for entry in committed(self._directory)]
            last = (
                f"The last committed step is {steps[-1]}" if steps else "No step is committed yet"
            )
            kept = f"{last}. "
        return (
            f"{error.strerror} ({code}) at `{_text(error.filename)}`. The checkpoint needs "
            f"{readable_size(self.needed)}, and {readable_size(_free(self._directory))} are free "
            f"in `{self._directory}`. {kept}Earlier checkpoints are untouched. Make room or "
            "choose another `output_dir`, then resume."
        )


def _text(name: Any) -> str | None:
    return None if name is None else os.fsdecode(name)


def _free(directory: Path) -> int:
    """Return the bytes that are free for us where `directory` is or will be; 0 if unknown."""
    for folder in (directory, *directory.parents):
        try:
            status = os.statvfs(folder)
        except OSError:
            continue
        return status.f_bavail * status.f_frsize
    return 0
