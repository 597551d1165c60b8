"""The callbacks of a trainer that is given none; tests/testing has the contract of each."""

from trainkit.callbacks import default_callbacks


def test_the_default_is_a_bar_and_a_summary() -> None:
    assert [callback.name for callback in default_callbacks()] == ["ProgressBar", "Summary"]
