"""Checks around every test, and the imports that forked processes would pay for one by one."""

import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor

# Set by libraries when they are first imported, or by pytest itself.
_ENVIRONMENT_OF_OTHERS = ("PYTEST_", "KMP_")


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
    environment, threads = _environment(), _lasting_threads()
    yield
    left = []
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        left.append("a process group")
    deadline = time.monotonic() + 2.0
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
