"""Saves the checkpoints of a run, now or in the background, and rotates them."""

import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from trainkit.basics.formatting import count
from trainkit.checkpoint.format.manifest import Manifest
from trainkit.checkpoint.format.names import CHECKPOINTS, WEIGHTS
from trainkit.checkpoint.io import files
from trainkit.checkpoint.listing import Entry, committed, of_run, on_the_way
from trainkit.checkpoint.retention import Best, KeepPolicy, Retention, ranked, rotate
from trainkit.checkpoint.snapshot import Snapshot
from trainkit.checkpoint.store import CheckpointStore
from trainkit.distributed import Processes, run_on_all, run_on_main, with_own_group
from trainkit.distributed.collectives import gather_on_main
from trainkit.errors import CheckpointError, ConfigError, text_of

NonFinite: TypeAlias = Literal["mark", "raise", "allow"]
"""A checkpoint that is not finite is marked and never taken for a good one, or refused, or saved
like any other."""


_Committed: TypeAlias = Callable[[CheckpointStore, Retention, frozenset[int]], frozenset[int]]


@dataclass(slots=True)
class _Job:
    """A save under way in a thread of its own, which waits until it may begin."""

    thread: threading.Thread
    begin: threading.Event = field(default_factory=threading.Event)
    path: Path | None = None
    error: BaseException | None = None


def check_unused(directory: Path) -> None:
    """Raise where a new training would save beside the checkpoints of an earlier one."""
    resume = (
        'Pass `fit(..., resume="auto")` to go on from it, `Trainer(..., new_run=True)` to give '
        "each run a folder of its own in there, or"
    )
    for name, what, advice in (
        (CHECKPOINTS, "", resume),
        (WEIGHTS, "the weights of ", "Remove this folder, or"),
    ):
        if entries := committed(directory / name):
            raise ConfigError(
                f"`{directory / name}` holds {what}{count(len(entries), 'checkpoint')}, the newest "
                f"of step {entries[-1].step}, but a new training was asked for. {advice} choose "
                "another `output_dir`."
            )


class Saver:
    """Commits checkpoints of one run into its directory, which the run holds (rules 24 to 27).

    Every process makes one and calls the same methods in the same order.

    Args:
        directory: The run's directory; checkpoints go to `checkpoints/` in it, and weights alone
            to `weights/`.
        retention: What stays after each commit.
        run_id: Names the run in every manifest.
        goes_on: Whether checkpoints in the directory may be of this run: a new one finds none.
        background: Write while training goes on: `save` only takes a snapshot.
        non_finite: What is done about parameters or a loss that are not finite; for whoever saves.
        keep_best: What is the best.

    Attributes:
        weights_only: Whether the best are kept as weights alone; for whoever saves.
        has_warned: Whether it was said that a checkpoint is not finite.
        check_replicas: Whether the processes first compare what they hold; for whoever saves.
        courier: What brings process 0 the files of those that do not see the directory; for whoever
            saves.
        check_folder: Called on process 0 before each save; raises where the directory is no longer
            the run's.
        committed: Called on process 0 after each commit, with what decides on its retention;
            returns the steps that must stay for now.
    """

    def __init__(
        self,
        directory: Path,
        processes: Processes,
        retention: Retention,
        *,
        run_id: str,
        goes_on: bool,
        background: bool = False,
        non_finite: NonFinite = "mark",
        keep_best: Best | None = None,
    ) -> None:
        self.store = CheckpointStore(directory / CHECKPOINTS)
        self.keep_best = keep_best
        self.weights_only = False
        self.background = background
        self.non_finite: NonFinite = non_finite
        self.has_warned = False
        self.check_replicas = True
        self.courier: Any = None
        self.check_folder: Callable[[], None] = lambda: None
        self.committed: _Committed = lambda store, policy, more: frozenset()
        self._weights = CheckpointStore(directory / WEIGHTS)
        self._processes = processes
        self._writers = with_own_group(processes) if background else processes
        self._retention = retention
        self._run_id = run_id
        self._saves = 0  # of the run, on process 0
        self._snapshot = Snapshot()
        self._job: _Job | None = None

        def prepare() -> None:
            if not goes_on:
                check_unused(directory)
            files.make_directories(directory)
            self._saves = max((entry.manifest.age[0] for entry in of_run(directory)), default=0)
            for store in (self.store, self._weights):
                store.clean()

        run_on_main(processes, prepare)

    def save(self, step: int, parts: Mapping[str, Any], metadata: Mapping[str, Any]) -> Path | None:
        """Save a checkpoint; return its folder, None where it is still under way.

        Blocks for an earlier save in the background. One whose metadata say `weights_only` is
        complete when this returns.

        Raises:
            CheckpointError: This save, or the earlier one, failed; on all processes.
        """
        self._saves += 1
        metadata = {**metadata, "run_id": self._run_id, "saves": self._saves}
        if "weights_only" in metadata:
            return self._commit(self._processes, self._weights, step, parts, metadata)
        if not self.background:
            return self._commit(self._processes, self.store, step, parts, metadata)
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

    def find_best(self) -> tuple[str, int, float] | None:
        """Return folder, step and value of the best, None without one; every process calls it."""

        directory = self.store.directory.parent

        def find() -> tuple[str, int, float] | None:
            best = next(iter(self._ranked()), None)
            if best is None or self.keep_best is None:
                return None
            name = str(best.path.relative_to(directory))
            return name, best.step, best.manifest.metrics[self.keep_best[0]]

        best = run_on_main(self._processes, find)
        return None if best is None else (str(directory / best[0]), *best[1:])

    def is_among_best(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Return whether a checkpoint with these metrics would stay; every process must call it."""
        about = {"metrics": metrics}
        manifest = Manifest(step=step, run_id="", world_size=1, files={}, metadata=about)
        new = Entry(Path(), step, manifest)
        return run_on_main(self._processes, lambda: new in self._ranked(new))

    def poll(self) -> Path | None:
        """Return the folder of a save that every process knows to be committed, once.

        Every process must call it. A collective, but only while a save is under way: processes
        that learned of a failure at different steps would leave each other waiting.
        """
        if self._job is None:
            return None
        alive = torch.tensor([int(self._job.thread.is_alive())])
        return None if self._processes.all_reduce(alive, "max").item() else self.wait()

    def wait(self) -> Path | None:
        """Block until the save under way is committed; return its folder, once."""
        job, self._job = self._job, None
        if job is None:
            return None
        job.thread.join()
        if job.error is not None:
            raise job.error
        return job.path

    def close(self) -> None:
        """End what writes; a save under way on one process alone is still completed.

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

    def _write(
        self, job: _Job, step: int, parts: Mapping[str, Any], metadata: Mapping[str, Any]
    ) -> None:
        job.begin.wait()
        try:
            job.path = self._commit(self._writers, self.store, step, parts, metadata)
        except BaseException as error:
            job.error = error

    def _commit(
        self,
        processes: Processes,
        store: CheckpointStore,
        step: int,
        parts: Mapping[str, Any],
        metadata: Mapping[str, Any],
    ) -> Path:
        run_on_main(processes, self.check_folder)
        try:
            agree = partial(gather_on_main, processes)
            path = store.save(step, parts, metadata=metadata, agree=agree, courier=self.courier)
        except CheckpointError:
            run_on_main(processes, self.check_folder)  # which may have been moved meanwhile
            raise
        run_on_main(processes, partial(self._rotate, store))
        return path

    def _rotate(self, store: CheckpointStore) -> None:
        more = frozenset(e.step for e in self._ranked() if e.path.parent == store.directory)
        policy = self._retention if store is self.store else KeepPolicy()
        try:
            rotate(store, policy, more | self.committed(store, policy, more))
        except CheckpointError as error:
            error.add_note("The new checkpoint is committed; only removing older ones failed.")
            raise

    def _ranked(self, *more: Entry) -> list[Entry]:
        """Return the best of this run and of `more`, the best first."""
        if self.keep_best is None:
            return []
        own = [e for e in of_run(self.store.directory.parent) if e.manifest.run_id == self._run_id]
        return ranked([*on_the_way(own), *more], self.keep_best)
