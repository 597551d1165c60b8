"""Let all processes do one thing after the other, and all stop where one of them fails."""

import errno as errors
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

from trainkit.checkpoint.listing import committed
from trainkit.errors import CheckpointError, TrainkitError, text_of
from trainkit.formatting import readable_size

__all__ = ["Agree", "CommitSteps", "alone"]

T = TypeVar("T")

Agree: TypeAlias = Callable[[Any, Callable[[list[Any]], Any]], Any]
"""`agree(value, action)` runs `action` on process 0 with the values of all processes, in order of
their ranks, and returns its result on all."""

Failure = tuple[str, str | None, int | None]
"""What happened in words, the file at fault, and the number of the system's error."""


def alone(value: Any, action: Callable[[list[Any]], Any]) -> Any:
    """Agree on one process."""
    return action([value])


class CommitSteps:
    """The steps of one save, each of which ends with an agreement.

    Args:
        directory: Where checkpoints are, for errors.
        step: What is saved, for errors.
        agree: Lets process 0 decide for all.
    """

    def __init__(self, directory: Path, step: int, agree: Agree) -> None:
        self.needed = 0
        """Bytes that all processes together want to write."""
        self._directory = directory
        self._step = step
        self._agree = agree

    def run(self, action: Callable[[], Any], conclude: Callable[[list[Any]], T]) -> T:
        """Do `action` on every process, then `conclude` on process 0 with what each one returned.

        Returns:
            What `conclude` returned, on all.

        Raises:
            CheckpointError: One of them failed somewhere; raised by all, with the cause where
                that is.
        """
        causes: list[Exception] = []

        def attempt(work: Callable[[], Any]) -> tuple[Failure | None, Any]:
            try:
                return None, work()
            except Exception as error:  # all must hear of it, whatever it is
                causes.append(error)
                return self._describe(error), None

        def lead(answers: list[Any]) -> tuple[str, Failure | None, Any]:
            several = len(answers) > 1
            failed = [(rank, answer[0]) for rank, answer in enumerate(answers) if answer[0]]
            if failed:
                rank, failure = failed[0]
                return f" on process {rank}" * several, failure, None
            failure, result = attempt(lambda: conclude([result for _, result in answers]))
            return " on process 0" * several, failure, result

        place, failure, result = self._agree(attempt(action), lead)
        if failure is not None:
            text, file, errno = failure
            raise CheckpointError(
                f"Saving step {self._step} failed{place}: {text}",
                path=self._directory,
                file=file,
                errno=errno,
            ) from next(iter(causes), None)
        return cast("T", result)

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
