"""Jobs on several hosts begin, refuse to, or end as a whole: a few of `benchmarks.hosts`."""

from pathlib import Path

import pytest

from benchmarks import hosts
from benchmarks.hosts import FAULTS, SETUPS, run_case
from tests.hosts.harness import needs_hosts

CASES = {case.name: case for case in (*SETUPS, *FAULTS)}
# And the seconds in which the machines must meet: the second case waits for their end.
FEW = {
    "own name is docker0's address": 12.0,
    "unknown name": 3.0,
    "machine_rank 0 twice": 12.0,
    "machine_rank 1 twice": 12.0,
    "firewall drops gloo": 12.0,
    "machine 1 dies": 12.0,
}

pytestmark = [needs_hosts, pytest.mark.e2e]


@pytest.mark.parametrize("name", FEW)
def test_a_job_on_several_hosts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "MEETING_SECONDS", FEW[name])
    outcome = run_case(CASES[name], tmp_path)
    assert not outcome.problems, "\n".join([*outcome.problems, outcome.output])
