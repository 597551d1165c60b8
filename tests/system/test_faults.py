"""One process of a job fails, and all are gone, with one report (rule 32).

`benchmarks/faults.py` has the long version.
"""

from functools import partial
from pathlib import Path

import pytest

from tests.helpers.tiers import with_few
from tests.system.faults import FAULTS, Fault, inject

# Each way to fail once; the rest is for the campaign.
SHORT = [
    ("training step", "raise", 2),
    ("data", "raise", 2),
    ("data", "raise awkwardly", 2),
    ("collate", "raise", 3),
    ("evaluation", "raise", 2),
    ("save", "raise", 2),
    ("state", "raise", 3),
    ("setup", "raise", 2),
    ("training step", "exit 0", 2),
    ("backward", "kill", 3),
    ("training step", "allocate", 2),
    ("data", "kill", 2),
    ("save", "stop", 3),
    ("backward", "hold", 2),
]


FEW = [SHORT[3], SHORT[9], SHORT[12]]  # an error, a kill, a stall


def _is_in(faults: list[tuple[str, str, int]], fault: Fault) -> bool:
    return (fault.place, fault.act, fault.size) in faults


_is_short = partial(_is_in, SHORT)


@pytest.mark.parametrize(
    "fault",
    with_few(filter(partial(_is_in, FEW), FAULTS), filter(_is_short, FAULTS)),
    ids=lambda f: f.name,
)
def test_everyone_leaves_and_one_report_tells_why(fault: Fault, tmp_path: Path) -> None:
    assert inject(fault, tmp_path).problems == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [f for f in FAULTS if not _is_short(f)], ids=lambda fault: fault.name
)
def test_everyone_leaves_whatever_the_fault(fault: Fault, tmp_path: Path) -> None:
    assert inject(fault, tmp_path).problems == []


def test_there_are_forty_faults() -> None:
    assert len(FAULTS) == len({fault.name for fault in FAULTS}) == 40
