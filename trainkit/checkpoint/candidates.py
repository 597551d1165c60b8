"""Which checkpoint is loaded of several; all processes come to the same one."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar, cast

from trainkit.basics.outputs import fetched
from trainkit.checkpoint.format.names import CHECKPOINTS
from trainkit.distributed import Processes, run_on_main
from trainkit.distributed.collectives import first_with, raise_on_all
from trainkit.errors import CheckpointCorrupt, CheckpointError, ConfigError

P = TypeVar("P")
T = TypeVar("T")


def first_verified(
    processes: Processes,
    candidates: Iterator[P | None],
    load: Callable[[P], T],
    skip: Callable[[CheckpointCorrupt], None] | None,
) -> tuple[P, T] | None:
    """Load the first checkpoint that is whole on all processes; return the candidate, and it.

    Every process must call it. Errors other than `CheckpointCorrupt` are raised by all.

    Args:
        candidates: Where checkpoints are, those of process 0; None where there is nothing to load.
        load: Reads one.
        skip: Told why a checkpoint is broken, on each process; None: that is raised.
    """
    while (candidate := run_on_main(processes, lambda: next(candidates))) is not None:
        loaded = _load(processes, load, candidate)
        if not isinstance(loaded, CheckpointCorrupt):
            return candidate, loaded
        if skip is None:
            raise loaded
        skip(loaded)
    return None


def _load(processes: Processes, load: Callable[[P], T], candidate: P) -> T | CheckpointCorrupt:
    """Return a checkpoint, or why it is broken, as some process sees it.

    Nobody goes on before all have compared their share of it. What one finds broken is no other
    error, though it may look like one to those that have not compared it.
    """
    loaded: T | CheckpointCorrupt | None = None
    failure: Exception | None = None
    try:
        loaded = load(candidate)
    except CheckpointCorrupt as error:
        loaded = error
    except Exception as error:
        failure = error
    first = first_with(processes, isinstance(loaded, CheckpointCorrupt))
    if first is None:
        raise_on_all(processes, failure)
        return cast("T", loaded)
    text = processes.broadcast_object(str(loaded), first)
    if isinstance(loaded, CheckpointCorrupt):
        return loaded
    return CheckpointCorrupt(f"On process {first}: {text}")


def candidates(
    output_dir: Path | None, resume: str | Path, report: Callable[[str], None]
) -> Iterator[str | None]:
    """Yield the folders to resume from, the newest first, and at last None; for process 0."""
    if resume not in ("auto", "must"):
        from trainkit.checkpoint.listing import committed, on_the_way

        path = fetched(Path(resume))
        found = committed(path.parent) if output_dir == path.parent.parent else []
        step = next((entry.step for entry in found if entry.path == path), None)
        if later := [e.step for e in on_the_way(found) if step is not None and e.step > step]:
            report(
                f'trainkit: the run goes back to step {step}. After its next save, `resume="auto"` '
                f"and the best pass over {later}, which `keep_last` then removes first."
            )
        yield str(path)
        return
    if output_dir is None:
        raise ConfigError(
            f'`resume="{resume}"` looks for checkpoints in the output directory, but the trainer '
            "has none. Pass `Trainer(output_dir=...)`."
        )
    from trainkit.checkpoint import CheckpointStore  # runs without checkpoints need none of it

    store = CheckpointStore(output_dir / CHECKPOINTS)
    for checkpoint in store.valid(report, contents=False):  # which all compare together
        yield str(checkpoint.path)
    if resume == "must":
        raise CheckpointError(
            f'`resume="must"` was given, but `{store.directory}` holds no checkpoint that '
            'verifies. Use `resume="auto"` to start afresh in this case.',
            path=store.directory,
        )
    report(f"trainkit: no checkpoint in `{store.directory}`: a fresh start.")
    yield None
