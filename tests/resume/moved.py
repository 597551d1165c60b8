"""Right programs that one environment saves and another resumes; `make test-moves` runs both ways.

    python -m tests.resume.moved write FOLDER
    python -m tests.resume.moved read FOLDER

The reader resumes where the training was over, and must hold what the writer held, bit by bit: it
trains nothing. Then it resumes where the training was under way, and goes on to the end.
"""

import contextlib
import io
import pickle
import platform
import sys
import tempfile
import warnings
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from tests.helpers.ranks import run_ranks
from tests.right_programs import by_hand, by_own_loop, by_trainkit
from tests.right_programs.by_hand import Outcome
from tests.right_programs.compare import after_resume
from tests.right_programs.program import Program, draw

MANY, MANY_SHARED = 60, 12


def write(rank: int, seeds: Iterable[int], processes: int, folder: Path) -> None:
    """Train as the seeds say, and keep the checkpoints and what each training ended with."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        program = draw(seed, processes)
        program = replace(program, saves=program.saves or 2)
        name = f"{processes}-{seed}"
        whole = _quietly(program, folder / name)
        hand = _by_hand(program) if rank == 0 else None
        (folder / f"{name}.{rank}").write_bytes(pickle.dumps((program, whole, hand)))
        if by_own_loop.fits(program):
            last = by_own_loop.batches(program)
            own = by_own_loop.train(program, folder / f"own-{name}", last)
            (folder / f"own-{name}.{rank}").write_bytes(pickle.dumps((program, own)))


def _quietly(program: Program, folder: Path, resume: Path | None = None) -> Outcome:
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of versions that differ
        return by_trainkit.fit(program, folder, resume)


def _by_hand(program: Program) -> Outcome:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of schedules, where the first step is skipped
        return by_hand.train(program)


def read(rank: int, processes: int, folder: Path, new: Path) -> str:
    """Resume each training, and let it go on in a new folder; return how many there were.

    Where one goes on to other bits, the loop by hand says whether torch does so by itself.

    Raises:
        AssertionError: A resumed training holds something else than the one that was saved.
    """
    read = ended = 0
    others: list[str] = []
    for written in sorted(folder.glob(f"{processes}-*.{rank}")):
        program, whole, hand = pickle.loads(written.read_bytes())
        *earlier, last = sorted((folder / written.stem / "checkpoints").glob("step-*"))
        loaded = _quietly(program, new / written.stem / "loaded", last)
        assert not [*after_resume(whole, whole.counters["step"], loaded)], (written.name, program)
        read += 1
        for path in earlier[:1]:
            again = _quietly(program, new / written.stem / "ended", path)
            assert again.weights.keys() == whole.weights.keys(), (written.name, program)
            ended += 1
            if [*after_resume(whole, whole.counters["step"], again)] and rank == 0:
                same = not [*after_resume(hand, 0, _by_hand(program))]
                what = f"{program.model}, {program.optimizer}, {program.precision}"
                others.append(f"{what}: by hand {'the same' if same else 'other'} bits")
    for written in sorted(folder.glob(f"own-{processes}-*.{rank}")):
        program, whole = pickle.loads(written.read_bytes())
        stop = by_own_loop.batches(program)
        loaded = by_own_loop.train(program, folder / written.stem, stop, resume=True)
        assert not [*after_resume(whole, stop, loaded)], (written.name, program)
        read += 1
    text = f"{read} trainings read, {ended - len(others)} of {ended} went on to the same bits"
    return "; ".join([text, *others])


def main(what: str, folder: Path) -> None:
    """Write or read, on one process and on two."""
    here = f"Python {platform.python_version()}, torch {torch.__version__}"
    if what == "write":
        write(0, range(MANY), 1, folder)
        run_ranks(2, write, range(MANY_SHARED), 2, folder)
        print(f"{here}: {MANY + MANY_SHARED} trainings written.")
    else:
        with tempfile.TemporaryDirectory() as name:
            new = Path(name)
            print(f"{here}, on one process: {read(0, 1, folder, new)}.")
            print(f"{here}, on two processes: {run_ranks(2, read, 2, folder, new)[0]}.")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
