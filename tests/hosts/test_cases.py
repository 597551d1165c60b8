"""Jobs on several hosts begin, refuse to, or end as a whole: a few of `benchmarks.hosts`."""

from pathlib import Path

import pytest

from benchmarks.hosts import FAULTS, SETUPS, run_case
from tests.hosts.harness import needs_hosts

CASES = {case.name: case for case in (*SETUPS, *FAULTS)}
FEW = ("own name is docker0's address", "unknown name", "firewall drops gloo", "machine 1 dies")

pytestmark = [needs_hosts, pytest.mark.e2e]


@pytest.mark.parametrize("name", FEW)
def test_a_job_on_several_hosts(name: str, tmp_path: Path) -> None:
    outcome = run_case(CASES[name], tmp_path)
    assert not outcome.problems, "\n".join([*outcome.problems, outcome.output])
