"""Where a run writes: chosen, kept against other programs, and tried before the first step."""

import shutil
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainkit.distributed import run_on_all, run_on_main
from trainkit.errors import ConfigError
from trainkit.lazy import ask
from trainkit.training.callback_list import CallbackList
from trainkit.training.run import Run


def choose_folder(run: Run, resume: str | Path | None, new_run: bool) -> str | Path | None:
    """Choose where a run writes; return what it resumes, which in a dry run is nothing."""
    if (many := run.config.dry_run) is not None:
        from trainkit.basics.formatting import count  # only a dry run needs it

        write_apart(run, "dry run")
        tried = "" if resume is None else f" It begins anew: `resume={str(resume)!r}` is not tried."
        run.print(
            f"trainkit: dry run: {count(many, 'step')} of training, {count(many, 'batch')} of each "
            f"evaluation; nothing is kept.{tried}"
        )
        return None
    if new_run:
        from trainkit.basics.outputs import folder_of_run  # most runs have none

        parent, processes = run.output_dir, run.strategy.processes
        assert parent is not None
        name = run_on_main(
            processes, lambda: str(folder_of_run(parent, resume).relative_to(parent))
        )
        run.output_dir = parent / name  # machines may have it in other places
    return resume


@contextmanager
def own_folder(run: Run) -> Iterator[None]:
    """Keep other programs out of the output directory inside (rule 24); every process enters it.

    Raises, on all, where it cannot be written to, is another run's, or is not the same everywhere.
    """
    try:
        if run.output_dir is not None:
            _take(run, run.output_dir)
        yield
    finally:
        for lock in run.internals.locks:
            lock.release()
        run.internals.locks.clear()
        run.internals.mirror = None


def _take(run: Run, given: Path) -> None:
    from trainkit.basics.lock import RunLock
    from trainkit.basics.outputs import address_of, check_folder  # many runs write nothing

    owner, processes = "`Trainer(output_dir=...)`", run.strategy.processes

    def take() -> None:
        check_folder(given, owner)
        advice = "choose another `output_dir`, or pass `new_run=True`"
        run.internals.locks.append(RunLock(given.resolve(), advice=advice).acquire())

    run_on_main(processes, take)
    # For good: whoever points a link elsewhere later does not move the run.
    run.output_dir = folder = given.resolve()
    scratch = run.internals.scratch  # what is in there belongs to a place outside
    real = folder if scratch is None else Path(folder.anchor, *folder.relative_to(scratch).parts)
    address = address_of(real)
    if processes.size > 1 and address is None:
        from trainkit.distributed.shared_folder import check_shared  # one process needs none of it

        check_shared(processes, folder, owner)
    if address is not None:
        run.internals.courier = ask("courier")(processes, folder)
    if address is not None and scratch is None:

        def mirror() -> None:
            locks = run.internals.locks
            run.internals.mirror = ask("Mirror")(locks[0], run.print)
            locks.insert(0, run.internals.mirror)  # which needs the folder's lock until its end

        run.print(f"trainkit: `{address}` mirrors `{folder}`.")
        run_on_main(processes, mirror)


def check_outputs(run: Run, callbacks: CallbackList) -> None:
    """Raise, on all processes, where something that will be written cannot be, or is another's."""

    def check() -> None:
        for callback in callbacks.writers:
            callback.check_output(run)
        for output in run.internals.outputs:
            if output.is_char_device() or output.is_fifo():
                continue
            if run.output_dir is None or not output.is_relative_to(run.output_dir):
                from trainkit.basics.lock import RunLock  # by default all is in there

                parts = (output,) if output.is_dir() else (output.parent, output.name)
                run.internals.locks.append(
                    RunLock(*parts, advice="give the logger another place").acquire()
                )

    run_on_all(run.strategy.processes, check)


def write_apart(run: Run, kind: str) -> None:
    """Let a run write into a folder that goes with the program; every process calls it.

    It is beside the output directory, where all machines see it. Callers may read it after `fit`.
    """
    base = run.output_dir or Path(tempfile.gettempdir())

    def make() -> str:
        above = next(each for each in (base, *base.parents) if each.exists())
        try:
            folder = tempfile.mkdtemp(prefix=f".trainkit-{kind.replace(' ', '-')}-", dir=above)
        except OSError as error:
            raise ConfigError(
                f"A {kind} writes into a folder in `{above}`, but cannot make it: {error}. "
                "Choose another `output_dir`, or make this place writable."
            ) from error
        weakref.finalize(run.processes, shutil.rmtree, folder, ignore_errors=True)
        return folder

    run.internals.scratch = Path(run_on_main(run.strategy.processes, make))
    if run.output_dir is not None:
        run.output_dir = run.place(run.output_dir)
