"""What a process sends does not grow with their number, but for the data; counted, not timed."""

import pytest

from benchmarks import scale
from benchmarks.scale import Counts, Jobs


def test_a_figure_that_grows_and_a_wrong_model_are_named() -> None:
    def job(size: int) -> list[dict[str, Counts]]:
        fine = Counts(bytes=144, messages=3, collectives=[("barrier", 0, 0)])
        phases = dict.fromkeys(scale.PHASES, fine)
        phases["save"] = Counts(bytes=size * 1000, messages=3)
        return [phases] * size

    jobs: Jobs = {2: job(2), 64: job(64)}
    found = scale.check(jobs)
    assert "save: bytes grow as W^1.00" in found
    assert "save, 64 processes: 64000.0 bytes, modelled 0" in found
    assert any(line.startswith("evaluation, 64 processes") for line in found)  # log2 64 of each
    assert not any(line.startswith("evaluation, 2 processes") for line in found)


def test_the_model_counts_the_transfers_of_gloo() -> None:
    counts = scale.modelled([("all_reduce", 1, 4), ("broadcast", 1, 4), ("barrier", 0, 0)], 8)
    assert counts.messages == 3 * (2 * 7 + 7 + 3 * 8) / 8
    assert counts.bytes == (14 * 148 + 7 * 148 + 24 * 144) / 8


@pytest.mark.e2e
def test_what_a_process_sends_for_evaluation_save_and_resume_does_not_grow() -> None:
    jobs = {size: scale.measure(size) for size in (2, 8)}
    for phase in ("evaluation", "save", "resume"):
        figures = scale.rows(jobs, phase)
        for name in ("bytes", "messages", "collectives", "hashed of all"):
            grown = scale.exponent(figures[name])
            assert grown < scale.LIMIT, f"{phase}: {name} grow as W^{grown:.2f}"
    assert not [line for line in scale.check(jobs) if "modelled" in line]
