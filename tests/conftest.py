"""Checks around every test, and the imports that forked processes would pay for one by one.

Nothing heavy is imported here: the process that hands out tests to workers needs none of it.
"""

import gc
import importlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.audit import Audit
from tests.helpers.needs import import_late
from tests.helpers.s3 import S3, serving
from tests.helpers.warm import import_ours, keep_environment, settle, warm

_MEMORY = Path("/dev/shm")  # a file system without a disk, on Linux
_ENOUGH = 4 << 30  # bytes
if "TMPDIR" not in os.environ and _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _ENOUGH:
    # A checkpoint waits for the disk ten times; on a busy machine that is most of a test's time.
    os.environ["TMPDIR"] = tempfile.tempdir = str(_MEMORY)

# What a test left to the garbage collector, such as a process group with threads, is not for a
# child of a later test to end: it would wait for threads that it does not have.
os.register_at_fork(after_in_child=gc.freeze)
os.environ["LANGUAGE"] = "C"  # else argparse looks for a translation of each of its words
os.environ["DO_NOT_TRACK"] = "true"  # else mlflow tells its makers what it is used for

_AUDIT = Audit()  # before trainkit is imported

# Set by libraries when they are first imported, or by pytest itself.
_ENVIRONMENT_OF_OTHERS = (
    *("PYTEST_", "KMP_", "_TORCHINDUCTOR_", "TORCHINDUCTOR_"),
    "PYTORCH_NVML_BASED_CUDA_CHECK",
)


# Files with the longest tests: begun last, they would keep one core busy while others wait.
_LONG = (
    *("test_fake_device.py", "test_scale.py", "test_elastic.py"),
    *("test_docs.py", "test_example_scripts.py", "test_exit.py"),
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return one more than processors: tests wait for clocks for a sixth of their time."""
    return (os.cpu_count() or 1) + 1


@pytest.hookimpl(wrapper=True)
def pytest_sessionstart(session: pytest.Session) -> Iterator[None]:
    """Let the workers begin with torch imported, once for all."""
    with warm(lends=True) if session.config.getoption("tx", None) else nullcontext():
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the longest tests come first."""
    items.sort(key=lambda item: item.path.name not in _LONG)


def pytest_collection_finish() -> None:
    """Import what forks would one by one, and make them cheap."""
    keep_environment()
    for name in ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"):
        importlib.import_module(name)
    import_ours()
    settle()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Import what is needed by a few modules of tests, before the test or a fork for it begins."""
    if isinstance(item, pytest.Function):
        import_late(vars(item.module))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail a session in which trainkit did what it must never do, in whatever process."""
    if _AUDIT.findings() and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what the audit found."""
    if findings := _AUDIT.findings():
        terminalreporter.section("what trainkit must not do", red=True)
        for finding in findings:
            terminalreporter.line(finding)


def pytest_unconfigure() -> None:
    """Remove the log of the audit."""
    _AUDIT.close()


def _environment() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_ENVIRONMENT_OF_OTHERS)
    }


def _lasting_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.daemon}


@pytest.fixture(autouse=True)
def _nothing_is_left_behind() -> Iterator[None]:
    """Fail a test that leaves a process group, a non-daemon thread or a changed environment."""
    import torch.distributed

    environment, threads = _environment(), _lasting_threads()
    yield
    left = []
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        left.append("a process group")
    deadline = time.monotonic() + 20.0
    for thread in _lasting_threads() - threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            left.append(f"the thread {thread.name!r}")
    changed = _environment().items() ^ environment.items()
    if changed:
        left.append(f"changed environment variables {sorted({name for name, _ in changed})}")
        os.environ.update(environment)
        for name in _environment().keys() - environment.keys():
            del os.environ[name]
    if left:
        pytest.fail(f"The test left behind: {', '.join(left)}.", pytrace=False)


@pytest.fixture
def warm_programs() -> Iterator[None]:
    """Let programs that a test starts begin with torch imported, and what they start, too."""
    with warm(inside=1):
        yield


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3]:
    pytest.importorskip("moto")
    pytest.importorskip("obstore")
    with serving() as found:
        yield found


@pytest.fixture
def s3(s3_server: S3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[S3]:
    """An S3 of this machine; this process stands for a machine that has never seen it."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.url)
    monkeypatch.setenv("TRAINKIT_STORAGE_LEASE", "3")
    monkeypatch.setenv("TRAINKIT_STORAGE_DIR", str(tmp_path / "machine"))
    s3_server.requests()
    yield s3_server
    s3_server.fault()
