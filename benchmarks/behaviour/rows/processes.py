"""Processes that should hold the same, and do not."""

from benchmarks.behaviour import toys
from benchmarks.behaviour.bench import Bench, Outcome, short
from benchmarks.behaviour.rows import row
from benchmarks.behaviour.toys import Tape


def _apart(tapes: list[Tape]) -> float:
    """Return the largest difference between the parameters of two processes."""
    ours, theirs = (tape.weights for tape in tapes)
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


@row("rates_differ", "A learning rate that differs by process", "refused before the first step")
def rates_differ(bench: Bench) -> Outcome:
    """Two processes, 4 updates; the rate is 1 on process 0, and 0.5 on process 1."""
    heard = bench.listen(bench.job(samples=16, optimizer=toys.unequal), 2)
    if heard.refusal(".lr", "learning rate") is not None:
        return Outcome(not heard.updated, "refused" + " too late" * heard.updated)
    largest = max(map(abs, heard.tapes[0].weights))
    figure = f"trains, to weights that are {_apart(heard.tapes) / largest:.0%} apart"
    return Outcome(False, figure)


@row("thaws", "A layer that the model freezes for one step, two processes", "equal on both")
def thaws(bench: Bench) -> Outcome:
    """Four updates; the model sets `requires_grad` of one parameter in its second and third."""
    tapes = bench.tapes(bench.job(samples=16, model=toys.Freezes), 2)
    steps = len(tapes[0].steps)
    right = _apart(tapes) == 0 and steps == 4
    return Outcome(right, f"{steps} updates, weights {short(_apart(tapes))} apart")


@row("replica", "A replica edited on one of two processes", "found before a checkpoint is written")
def replica(bench: Bench) -> Outcome:
    """After the second of 4 updates process 1 adds 1 to a parameter; a checkpoint is due after the
    third.
    """
    folder = bench.new_folder()
    bench.framework.checkpoints(folder)  # not offered where saving is the user's
    job = bench.job(samples=16, model=toys.Edited, folder=folder, save_every=3)
    heard = bench.listen(job, 2)
    saved = len(bench.framework.checkpoints(folder))
    if heard.refusal("weight") is not None:
        return Outcome(saved == 0, "found" if saved == 0 else "found after the checkpoint")
    if saved == 0:
        raise RuntimeError("it saved no checkpoint")
    return Outcome(False, f"a checkpoint is written; weights {short(_apart(heard.tapes))} apart")
