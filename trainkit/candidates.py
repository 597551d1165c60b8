"""Which checkpoint a run resumes from; all processes come to the same one."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.distributed import gather_together, on_main
from trainkit.errors import CheckpointCorrupt, CheckpointError, ConfigError
from trainkit.run import Run

if TYPE_CHECKING:
    from trainkit.checkpoint import CheckpointStore

__all__ = ["broken_for_any", "candidates", "next_path"]


def next_path(run: Run, folders: Iterator[str | None]) -> Path | None:
    """Return what comes next on process 0; every process must call it."""
    processes = run.accelerator.processes
    found: list[str | None] = [None]
    on_main(processes, lambda: found.__setitem__(0, next(folders)))
    path = processes.broadcast_object(found[0])
    return None if path is None else Path(path)


def broken_for_any(run: Run, load: Callable[[], None]) -> CheckpointCorrupt | None:
    """Return why a checkpoint is broken, as some process sees it; other errors are raised by all.

    Every process must call it.
    """
    errors: list[CheckpointCorrupt] = []

    def attempt() -> str:
        try:
            load()
        except CheckpointCorrupt as error:
            errors.append(error)
            return str(error)
        return ""

    texts = gather_together(run.accelerator.processes, attempt)
    if errors:
        return errors[0]
    theirs = [f"On process {rank}: {text}" for rank, text in enumerate(texts) if text]
    return CheckpointCorrupt(theirs[0]) if theirs else None


def candidates(run: Run, resume: str | Path) -> Iterator[str | None]:
    """Yield the folders to resume from, the newest first, and at last None; for process 0."""
    if resume not in ("auto", "must"):
        path = Path(resume)
        _store(path.parent).open_unverified(path)  # the rest is verified while it is read
        yield str(path)
        return
    if run.output_dir is None:
        raise ConfigError(
            f'`resume="{resume}"` looks for checkpoints in the output directory, but the trainer '
            "has none. Pass `Trainer(output_dir=...)`."
        )
    store = _store(run.output_dir / "checkpoints")
    for checkpoint in store.valid(run.print):
        run.print(f"trainkit: resuming from `{checkpoint.path}` (step {checkpoint.step}).")
        yield str(checkpoint.path)
    if resume == "must":
        raise CheckpointError(
            f'`resume="must"` was given, but `{store.directory}` holds no checkpoint that '
            'verifies. Use `resume="auto"` to start afresh in this case.',
            path=store.directory,
        )
    run.print(f"trainkit: no checkpoint in `{store.directory}`: a fresh start.")
    yield None


def _store(directory: Path) -> "CheckpointStore":
    from trainkit.checkpoint import CheckpointStore  # runs without checkpoints need none of it

    return CheckpointStore(directory)
