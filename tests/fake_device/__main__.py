"""Run tests with the pretended device as `"auto"`: `python -m tests.fake_device`.

Arguments are pytest's, such as `tests/callbacks -k ema`; without any the whole suite is run but for
what starts programs. What `left_out.py` names is never run here.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.fake_device import build
from tests.fake_device.left_out import LEFT_OUT

ROOT = Path(__file__).resolve().parents[2]
ALL = ("-n", "auto", "--dist", "worksteal", "-m", "not e2e and not slow and not gpu", "tests")
OPTIONS = (
    *("-q", "-p", "no:cacheprovider", "-p", "tests.fake_device.forked"),
    # torch calls some losses of such a device by `out=`, of which the kernels of the CPU warn.
    *("-W", "ignore:An output with one or more elements was resized"),
)


def pytest_with_device(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return the command of a pytest that has the device, and its environment."""
    left_out = [f"--deselect={test}" for tests in LEFT_OUT.values() for test in tests]
    environment = {"OMP_NUM_THREADS": "1", "FAKE_DEVICES": "8", **build.environment()}
    command = [sys.executable, "-m", "pytest", *OPTIONS, *left_out, *(arguments or ALL)]
    return command, environment


if __name__ == "__main__":
    os.chdir(ROOT)
    os.execve(sys.executable, *pytest_with_device(sys.argv[1:]))
