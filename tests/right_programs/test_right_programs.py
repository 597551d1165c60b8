"""Right programs, drawn at random: none is refused, each ends as the loop by hand.

A failure prints the program and its seed. `RIGHT_PROGRAM=<seed> pytest tests/right_programs -n 0`
runs it again; `python -m tests.right_programs <seed> 1 <processes>` does so without pytest.
"""

import os
import random
from pathlib import Path

import pytest

from tests.helpers.tiers import with_few
from tests.right_programs.compare import run_seeds
from tests.right_programs.program import draw

GIVEN = os.environ.get("RIGHT_PROGRAM")
FIXED = {1: range(8), 2: range(4)}  # by the number of processes
EACH = {1: 12, 2: 6}  # in one test of new seeds


def check(seeds: list[int], processes: int, folder: Path) -> None:
    """Fail with the programs that are not run rightly."""
    found = run_seeds([int(GIVEN)] if GIVEN else seeds, processes, folder)
    if found:
        texts = [
            f"RIGHT_PROGRAM={seed} on {processes} processes\n{draw(seed, processes)}\n"
            + "\n".join(of)
            for seed, of in found.items()
        ]
        pytest.fail("\n\n".join(texts), pytrace=False)


@pytest.mark.parametrize("processes", with_few([1], FIXED))
def test_right_programs_are_run_as_by_hand(processes: int, tmp_path: Path) -> None:
    check([*FIXED[processes]], processes, tmp_path)


@pytest.mark.e2e
@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("processes", EACH)
def test_new_right_programs_are_run_as_by_hand(processes: int, part: int, tmp_path: Path) -> None:
    first = random.SystemRandom().randrange(10**9)
    check([*range(first, first + EACH[processes])], processes, tmp_path)
