"""Saves the checkpoints of a run, now or in the background, and rotates them."""

import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from trainkit.checkpoint.lock import RunLock
from trainkit.checkpoint.retention import Retention, rotate
from trainkit.checkpoint.snapshot import Snapshot
from trainkit.checkpoint.store import CheckpointStore
from trainkit.distributed import Processes, run_on_all, run_on_main, with_own_group
from trainkit.distributed.collectives import gather_on_main
from trainkit.errors import CheckpointError, ConfigError, text_of

__all__ = ["NonFinite", "Saver"]

NonFinite: TypeAlias = Literal["mark", "raise", "allow"]
"""A checkpoint that is not finite is marked and never taken for a good one, or refused, or saved
like any other."""


@dataclass(slots=True)
class _Job:
    """A save under way in a thread of its own, which waits until it may begin."""

    thread: threading.Thread
    begin: threading.Event = field(default_factory=threading.Event)
    path: Path | None = None
    error: BaseException | None = None


class Saver:
    """Commits checkpoints of one run into its directory, which it locks (rules 24 to 27).

    Every process makes one and calls the same methods in the same order.

    Args:
        directory: The run's directory; checkpoints go to `checkpoints/` in it.
        processes: The processes of the run.
        retention: What stays after each commit.
        run_id: Names the run in every manifest.
        resumed_from: The step that the run was resumed from, None for a fresh one.
        background: Write while training goes on: `save` only takes a snapshot.
        non_finite: What is done about parameters or a loss that are not finite; for whoever saves.

    Attributes:
        has_warned: Whether it was said that a checkpoint is not finite.
        check_replicas: Whether the processes first compare what they hold; for whoever saves.
    """

    def __init__(
        self,
        directory: Path,
        processes: Processes,
        retention: Retention,
        *,
        run_id: str,
        resumed_from: int | None,
        background: bool = False,
        non_finite: NonFinite = "mark",
    ) -> None:
        self.store = CheckpointStore(directory / "checkpoints")
        self.background = background
        self.non_finite: NonFinite = non_finite
        self.has_warned = False
        self.check_replicas = True
        self._processes = processes
        self._writers = with_own_group(processes) if background else processes
        self._retention = retention
        self._run_id = run_id
        self._resumed_from = resumed_from
        self._snapshot = Snapshot()
        self._job: _Job | None = None
        self._lock = RunLock(directory, run_id=run_id)
        run_on_main(processes, self._take_directory)

    def save(self, step: int, parts: Mapping[str, Any], metadata: Mapping[str, Any]) -> Path | None:
        """Save a checkpoint; return its folder, None where it is still under way.

        Blocks for an earlier save in the background.

        Raises:
            CheckpointError: This save, or the earlier one, failed; on all processes.
        """
        metadata = {**metadata, "run_id": self._run_id}
        if not self.background:
            return self._commit(self._processes, step, parts, metadata)
        self.wait()
        taken = run_on_all(self._processes, lambda: self._snapshot.take(parts))
        job = _Job(threading.Thread(target=lambda: None))
        job.thread = threading.Thread(
            target=self._write, args=(job, step, taken, metadata), name="checkpoint", daemon=True
        )
        self._job = job
        job.thread.start()
        # Without it the thread would work, and keep the interpreter, before `start` returns.
        job.begin.set()
        return None

    def poll(self) -> Path | None:
        """Return the folder of a save that every process knows to be committed, once.

        Every process must call it. A collective, but only while a save is under way: processes
        that learned of a failure at different steps would leave each other waiting.

        Raises:
            CheckpointError: The save failed.
        """
        if self._job is None:
            return None
        alive = torch.tensor([int(self._job.thread.is_alive())])
        return None if self._processes.all_reduce(alive, "max").item() else self.wait()

    def wait(self) -> Path | None:
        """Block until the save under way is committed; return its folder, once.

        Raises:
            CheckpointError: The save failed.
        """
        job, self._job = self._job, None
        if job is None:
            return None
        job.thread.join()
        if job.error is not None:
            raise job.error
        return job.path

    def close(self) -> None:
        """Give the directory back; a save under way on one process alone is still completed.

        A failure that nobody has heard of becomes a warning: another error is on its way.
        """
        job = self._job
        if job is not None and (self._processes.size == 1 or not job.thread.is_alive()):
            job.thread.join()
            if job.error is not None:
                warnings.warn(
                    f"A checkpoint in the background failed: {text_of(job.error)}", stacklevel=2
                )
        if self._writers is not self._processes and self._job is None:
            self._writers.close()
        self._lock.release()

    def _take_directory(self) -> None:
        self._lock.acquire()
        try:
            self._check_directory()
            self.store.clean()
        except BaseException:
            self._lock.release()
            raise

    def _check_directory(self) -> None:
        existing = self.store.checkpoints()
        if existing and self._resumed_from is None:
            held = f"{len(existing)} checkpoint{'s' * (len(existing) > 1)}"
            raise ConfigError(
                f"`{self.store.directory}` holds {held}, the newest of step "
                f"{existing[-1].step}, but a new training was asked for. Pass "
                '`fit(..., resume="auto")` to go on from it, or choose another `output_dir`.'
            )

    def _write(
        self, job: _Job, step: int, parts: Mapping[str, Any], metadata: Mapping[str, Any]
    ) -> None:
        job.begin.wait()
        try:
            job.path = self._commit(self._writers, step, parts, metadata)
        except BaseException as error:
            job.error = error

    def _commit(
        self,
        processes: Processes,
        step: int,
        parts: Mapping[str, Any],
        metadata: Mapping[str, Any],
    ) -> Path:
        path = self.store.save(
            step,
            parts,
            metadata=metadata,
            agree=partial(gather_on_main, processes),
        )
        run_on_main(processes, self._rotate)
        return path

    def _rotate(self) -> None:
        try:
            rotate(self.store, self._retention)
        except CheckpointError as error:
            error.add_note("The new checkpoint is committed; only removing older ones failed.")
            raise
