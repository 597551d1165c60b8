"""Contract tests for parts that others write: strategies, precisions and callbacks.

Each check starts real processes, trains a small model on them, and raises an AssertionError that
says which promise is broken. Call one from a test, or under `if __name__ == "__main__":`::

    from trainkit.testing import check_strategy

    def test_mine() -> None:
        check_strategy(MyStrategy)

Processes are forked, so a check runs on Linux and macOS, on the CPU, and in a process that has no
process group of its own. trainkit's own parts pass the same checks.
"""

from trainkit.testing.callbacks import check_callback
from trainkit.testing.precisions import check_precision
from trainkit.testing.processes import ProcessFailed, on_processes
from trainkit.testing.strategies import check_strategy

__all__ = ["ProcessFailed", "check_callback", "check_precision", "check_strategy", "on_processes"]
