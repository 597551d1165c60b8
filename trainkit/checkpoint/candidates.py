"""Which checkpoint is loaded of several; all processes come to the same one."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from trainkit.distributed import Processes, run_and_gather, run_on_main
from trainkit.errors import CheckpointCorrupt, CheckpointError, ConfigError

__all__ = ["candidates", "first_whole"]

T = TypeVar("T")


def first_whole(
    processes: Processes,
    places: Iterator[T | None],
    load: Callable[[T], object],
    skip: Callable[[CheckpointCorrupt], None] | None,
) -> T | None:
    """Load the first checkpoint that is whole on all processes; return its place.

    Every process must call it. Errors other than `CheckpointCorrupt` are raised by all.

    Args:
        processes: The processes of the job.
        places: Where checkpoints are, those of process 0; None where there is nothing to load.
        load: Reads one.
        skip: Told why a checkpoint is broken, on each process; None: that is raised.
    """
    while True:
        place = run_on_main(processes, lambda: next(places))
        broken = None if place is None else _broken_for_any(processes, load, place)
        if broken is None:
            return place
        if skip is None:
            raise broken
        skip(broken)


def _broken_for_any(
    processes: Processes, load: Callable[[T], object], place: T
) -> CheckpointCorrupt | None:
    """Return why a checkpoint is broken, as some process sees it."""
    errors: list[CheckpointCorrupt] = []

    def attempt() -> str:
        try:
            load(place)
        except CheckpointCorrupt as error:
            errors.append(error)
            return str(error)
        return ""

    texts = run_and_gather(processes, attempt)
    if errors:
        return errors[0]
    theirs = [f"On process {rank}: {text}" for rank, text in enumerate(texts) if text]
    return CheckpointCorrupt(theirs[0]) if theirs else None


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
