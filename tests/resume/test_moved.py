"""What one environment has saved another reads; here both are the same."""

from pathlib import Path

from tests.resume.moved import read, write
from tests.resume.test_random_resumes import ALONE


def test_a_checkpoint_that_was_moved_is_read_and_goes_on(tmp_path: Path) -> None:
    write(0, range(3), ALONE, tmp_path / "written")
    assert read(0, ALONE, tmp_path / "written", tmp_path) == (
        "3 trainings read, 3 went on to the same bits"
    )
