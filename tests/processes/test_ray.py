"""Workers of Ray Train run a script that knows nothing of Ray."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.processes.test_starters import TRAINS

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.slow,  # Ray takes a minute to start
    pytest.mark.skipif(
        find_spec("ray") is None, reason="Ray is not installed: `pip install -e .[ray]`"
    ),
]


def test_workers_of_ray_are_one_training(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TRAINS)
    example = str(ROOT / "examples" / "cluster" / "ray_train.py")
    command = [sys.executable, example, "script.py", "auto"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # Each worker prints the number of processes and the weights.
    found = re.finditer(r"2( -?\d\.\d+){4}", done.stdout + done.stderr)
    assert len({each[0] for each in found}) == 1
