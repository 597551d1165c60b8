"""What one environment has saved another reads; here both are the same."""

from pathlib import Path

import pytest

from tests.resume.moved import read, write


@pytest.mark.e2e
def test_a_checkpoint_that_was_moved_is_read_and_goes_on(tmp_path: Path) -> None:
    write(0, range(3), 1, tmp_path / "written")
    assert read(0, 1, tmp_path / "written", tmp_path) == (
        "4 trainings read, 2 of 2 went on to the same bits"
    )
