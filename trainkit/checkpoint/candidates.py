"""Which checkpoint is loaded of several; all processes come to the same one."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from trainkit.distributed import Processes, run_and_gather, run_on_main
from trainkit.errors import CheckpointCorrupt, CheckpointError, ConfigError

__all__ = ["candidates", "first_whole"]

P = TypeVar("P")
T = TypeVar("T")


def first_whole(
    processes: Processes,
    places: Iterator[P | None],
    load: Callable[[P], T],
    skip: Callable[[CheckpointCorrupt], None] | None,
) -> tuple[P, T] | None:
    """Load the first checkpoint that is whole on all processes; return its place, and it.

    Every process must call it. Errors other than `CheckpointCorrupt` are raised by all.

    Args:
        processes: The processes of the job.
        places: Where checkpoints are, those of process 0; None where there is nothing to load.
        load: Reads one.
        skip: Told why a checkpoint is broken, on each process; None: that is raised.
    """
    while (place := run_on_main(processes, lambda: next(places))) is not None:
        found = _load(processes, load, place)
        if not isinstance(found, CheckpointCorrupt):
            return place, found
        if skip is None:
            raise found
        skip(found)
    return None


def _load(processes: Processes, load: Callable[[P], T], place: P) -> T | CheckpointCorrupt:
    """Return a checkpoint, or why it is broken, as some process sees it."""

    def attempt() -> tuple[T | CheckpointCorrupt, str]:
        try:
            return load(place), ""
        except CheckpointCorrupt as error:
            return error, str(error)

    found, texts = run_and_gather(processes, attempt)
    theirs = [f"On process {rank}: {text}" for rank, text in enumerate(texts) if text]
    if theirs and not isinstance(found, CheckpointCorrupt):
        return CheckpointCorrupt(theirs[0])
    return found


def candidates(
    output_dir: Path | None, resume: str | Path, report: Callable[[str], None]
) -> Iterator[str | None]:
    """Yield the folders to resume from, the newest first, and at last None; for process 0."""
    from trainkit.checkpoint import CheckpointStore  # runs without checkpoints need none of it

    if resume not in ("auto", "must"):
        path = Path(resume)
        CheckpointStore(path.parent).open_unverified(path)  # the rest is verified while it is read
        yield str(path)
        return
    if output_dir is None:
        raise ConfigError(
            f'`resume="{resume}"` looks for checkpoints in the output directory, but the trainer '
            "has none. Pass `Trainer(output_dir=...)`."
        )
    store = CheckpointStore(output_dir / "checkpoints")
    for checkpoint in store.valid(report):
        report(f"trainkit: resuming from `{checkpoint.path}` (step {checkpoint.step}).")
        yield str(checkpoint.path)
    if resume == "must":
        raise CheckpointError(
            f'`resume="must"` was given, but `{store.directory}` holds no checkpoint that '
            'verifies. Use `resume="auto"` to start afresh in this case.',
            path=store.directory,
        )
    report(f"trainkit: no checkpoint in `{store.directory}`: a fresh start.")
    yield None
