"""The callbacks of a trainer that is given none; tests/testing has the contract of each."""

from pathlib import Path

from trainkit.callbacks import default_callbacks


def test_the_default_is_a_bar_and_a_summary() -> None:
    assert [callback.name for callback in default_callbacks()] == ["ProgressBar", "Summary"]


def test_with_a_folder_there_is_a_log_in_it(tmp_path: Path) -> None:
    names = [callback.name for callback in default_callbacks(tmp_path)]
    assert names[2:] == ["JSONLLogger", "Journal"]
