"""Trainings that one environment saves and another resumes; `make test-moves` runs both ways.

    python -m tests.resume.moved write FOLDER
    python -m tests.resume.moved read FOLDER

The reader resumes where the training was over, and must hold what the writer held, bit by bit: it
trains nothing. Then it resumes where the training was under way, and goes on to the end.
"""

import pickle
import platform
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from tests.helpers.ranks import run_ranks
from tests.resume.test_random_resumes import ALONE, SAMPLES, SHARED, draw, fit, loop

MANY, MANY_SHARED = 60, 12
LAST = SAMPLES // 2  # micro-batch of a loop of one's own


def write(rank: int, seeds: Iterable[int], strategies: tuple[str, ...], folder: Path) -> None:
    """Train as the seeds say, and keep the checkpoints and what each training ended with."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        case = draw(seed, strategies)
        name = f"{case.strategy}-{seed}"
        if case.strategy == "accelerator":
            case = replace(case, stop=LAST)
        run = loop if case.strategy == "accelerator" else fit
        whole = run(case, folder / name, None)
        (folder / f"{name}.{rank}").write_bytes(pickle.dumps((case, whole)))


def read(rank: int, strategies: tuple[str, ...], folder: Path, new: Path) -> str:
    """Resume each training, and let it go on in a new folder; return how many there were.

    Raises:
        AssertionError: A resumed training holds something else than the one that was saved.
    """
    read = alike = 0
    left_out = set()
    for written in sorted(path for s in strategies for path in folder.glob(f"{s}-*.{rank}")):
        case, whole = pickle.loads(written.read_bytes())
        if not hasattr(torch.optim, case.optimizer):
            left_out.add(case.optimizer)
            continue
        run = loop if case.strategy == "accelerator" else fit
        *earlier, last = sorted((folder / written.stem / "checkpoints").glob("st*"))
        loaded = run(case, new / written.stem / "loaded", last)
        # A version of torch may have settings of an optimizer that another has not.
        known = {name for name in whole if ".groups." not in name} | (loaded.keys() & whole)
        different = [name for name in sorted(known) if loaded.get(name) != whole[name]]
        assert not different, (written.name, case, different)
        ended = [run(case, new / written.stem / "ended", path) for path in earlier[:1]]
        assert all(each.keys() == loaded.keys() for each in ended), (written.name, case)
        read += 1
        alike += all(each.get(name) == whole[name] for each in ended for name in known)
    without = f"; torch {torch.__version__} has no {', '.join(left_out)}" if left_out else ""
    return f"{read} trainings read, {alike} went on to the same bits{without}"


def main(what: str, folder: Path) -> None:
    """Write or read, on one process and on two."""
    here = f"Python {platform.python_version()}, torch {torch.__version__}"
    if what == "write":
        write(0, range(MANY), ALONE, folder)
        run_ranks(2, write, range(MANY_SHARED), SHARED, folder)
        print(f"{here}: {MANY + MANY_SHARED} trainings written.")
    else:
        with tempfile.TemporaryDirectory() as name:
            new = Path(name)
            print(f"{here}, on one process: {read(0, ALONE, folder, new)}.")
            print(f"{here}, on two processes: {run_ranks(2, read, SHARED, folder, new)[0]}.")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
