"""Runs programs: `python -m tests.right_programs FIRST [COUNT [PROCESSES]]`."""

import sys
import tempfile
from pathlib import Path

from tests.right_programs.compare import run_seeds
from tests.right_programs.program import draw

AT_ONCE = 20

if __name__ == "__main__":
    first, count, processes = map(int, [*sys.argv[1:], *("1", "1")[len(sys.argv) - 2 :]])
    wrong = 0
    for begin in range(first, first + count, AT_ONCE):
        seeds = [*range(begin, min(begin + AT_ONCE, first + count))]
        with tempfile.TemporaryDirectory() as folder:
            found = run_seeds(seeds, processes, Path(folder))
        for seed, texts in found.items():
            wrong += 1
            print(draw(seed, processes), *texts, "", sep="\n", flush=True)
    print(f"{wrong} of {count} programs are not right.")
