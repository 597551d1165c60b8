"""Tests on a pretended accelerator, which is what `"auto"` finds in the processes started here.

It is a device that torch does not know by itself (PrivateUse1), written in C++ and compiled once:
see `tests/fake_device/`. It shows what no CPU can: tensors of two devices do not mix, reads of the
host are counted, copies that nobody waited for are poison, and memory has a limit. These are a few
tests of each kind; `python -m tests.fake_device` runs all on it.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fake_device import build
from tests.fake_device.__main__ import ROOT, pytest_with_device

CASES = "tests/fake_device/cases.py"
LESSER = "float64 pinned streams scaler checkpointing"

pytestmark = [
    pytest.mark.e2e,  # compiling takes a minute
    pytest.mark.skipif(
        build.compiler() is None,
        reason="NO ACCELERATOR IS TESTED: this machine has no C++ compiler, or Python no headers",
    ),
]

RUN = (  # one: to start pytest takes as long as most of these files
    *("-m", "not e2e and not slow", CASES),
    *("tests/test_gpu.py", "tests/data/test_transfer.py", "tests/callbacks/test_device_monitor.py"),
    *("tests/metrics/test_local_metrics.py", "tests/resume/test_resume.py"),
    *("tests/evaluation/test_evaluation.py", "tests/evaluation/test_evaluation_logs.py"),
)


def run_on_device(arguments: tuple[str, ...], **variables: str) -> None:
    """Run tests where the pretended device is the accelerator; fail with what they print."""
    command, environment = pytest_with_device(["-x", *arguments])
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stdout[-12_000:] + done.stderr[-2000:]


def test_on_the_pretended_device() -> None:
    run_on_device(RUN)


WRITE = """
from pathlib import Path
from trainkit.cli import gpu_page as gpu
gpu._SECONDS = 1500.0  # this machine may be busy
every = gpu._parts
gpu._parts = lambda *given: (part for part in every(*given) if "speed" not in part[0])
raise SystemExit(gpu.write_page(Path("page.md"), ["python -c 'raise ValueError(1234)'"]))
"""


@pytest.mark.slow
def test_a_page_is_written_that_a_user_can_send(tmp_path: Path) -> None:
    environment = {**build.environment(), "FAKE_DEVICES": "2", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] += f"{os.pathsep}{ROOT}"
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-c", WRITE],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    page = (tmp_path / "page.md").read_text("utf-8")
    assert '2 of type "fake"' in page
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    outcomes = {title: outcome for title, outcome, _ in rows[2:]}
    *good, failed = outcomes
    assert good == [
        "versions and devices",
        "1 process(es) work together",
        "2 process(es) work together",
        "the same training in other ways",
    ]
    assert {outcomes[title] for title in good} == {"ok"}, page
    assert outcomes[failed] == "FAILED (exit code 1)"
    assert "ValueError: 1234" in page  # its traceback
    assert "2 process(es), device type fake" in page


def test_on_a_device_that_lacks_what_others_have() -> None:
    run_on_device((CASES, "-k", "TestLesserDevice"), FAKE_LACKS=LESSER)
