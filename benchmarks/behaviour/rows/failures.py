"""Processes that fail, and signals."""

import signal
import time

from benchmarks.behaviour import toys
from benchmarks.behaviour.bench import Bench, Outcome
from benchmarks.behaviour.rows import row

PATIENCE = 60.0  # seconds


@row("raises", "One of two processes raises, under the launcher", "all end, exit code not 0")
def raises(bench: Bench) -> Outcome:
    """Process 1 raises in its third step; the framework's own launcher has started both."""
    ended = bench.command("raises", 2)
    if "the planned failure" not in ended.output:
        raise RuntimeError(f"it failed otherwise: {ended.output[-150:]}")
    if ended.code is None:
        return Outcome(False, f"still there after {ended.seconds:.0f} s")
    stay = f", {ended.stayed} processes stay" if ended.stayed else ""
    return Outcome(ended.code != 0 and not ended.stayed, f"exit code {ended.code}{stay}")


@row("raises_alone", "... with no launcher over them (as `srun` starts them)", "all end, not 0")
def raises_alone(bench: Bench) -> Outcome:
    """The same; both were started one by one, with 60 s to end."""
    started = bench.start(bench.job(samples=32, model=toys.Raises), 2)
    codes = started.wait(PATIENCE)
    stay = codes.count(None)
    figure = f"{stay} of 2 stay" if stay else f"exit codes {codes[0]}, {codes[1]}"
    return Outcome(not stay and 0 not in codes, figure)


@row("sigterm", "SIGTERM in a training", "a checkpoint, exit code not 0")
def sigterm(bench: Bench) -> Outcome:
    """One process, after three steps, with the callback that saves."""
    folder, ready = bench.new_folder(), bench.folder / "ready"
    job = bench.job(samples=4000, model=toys.Slow, folder=folder, save_every=10**6)
    started = bench.start(job, 1, lambda: toys.AFTER_UPDATE.append(toys.touch_after(3, ready)))
    deadline = time.monotonic() + PATIENCE
    while not ready.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    started.send(signal.SIGTERM)
    code = started.wait(PATIENCE)[0]
    saved = len(bench.framework.checkpoints(folder))
    ended = f"goes on for {PATIENCE:.0f} s" if code is None else f"exit code {code}"
    figure = f"{ended}, {'a' if saved else 'no'} checkpoint"
    return Outcome(code not in (None, 0) and saved > 0, figure)
