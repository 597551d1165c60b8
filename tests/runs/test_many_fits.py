"""A process that fits again and again, as in a sweep, keeps nothing of the fits before."""

import sys
from typing import Any

import pytest

from benchmarks import many_fits
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import with_few

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts as Linux does")

WARM, FITS = 3, 9  # what comes once, at any of them, must not weigh


@pytest.mark.parametrize("kind", with_few(["one process"], ["one process", "fsdp, replicas"]))
def test_fits_leave_nothing_behind(kind: str) -> None:
    size, settings = many_fits.KINDS[kind]
    small: dict[str, Any] = {**settings, "width": 16}
    for before, after in run_ranks(size, many_fits.measure, FITS, WARM, small):
        # Memory is for the benchmark, which makes more fits.
        assert many_fits.check(before, {**after, "KiB": before["KiB"]}, FITS - WARM) == []


def test_what_grows_is_named() -> None:
    before = dict.fromkeys([*many_fits.COUNTED, "objects", "KiB"], 10)
    after = before | {"threads": 11, "objects": 1010, "KiB": 10 + 45 * 6000}
    assert many_fits.check(before, before, 45) == []
    assert [found.split(":")[0] for found in many_fits.check(before, after, 45)] == [
        *["threads", "objects", "KiB"]
    ]
