"""A plugin of pytest: each test runs in a fork of its own.

autograd starts a thread for each accelerator that it computes on, and no process that has such
threads can be forked; the tests fork. What tests compare is brought to the CPU first; the code of
trainkit gets no such help.
"""

import os
import pickle
import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import pytest
import torch
from _pytest.runner import runtestprotocol


def _on_the_cpu(compare: Callable[..., bool]) -> Callable[..., bool]:
    @wraps(compare)
    def run(*tensors: Any, **options: Any) -> bool:
        if sys._getframe(1).f_globals["__name__"].startswith("tests."):
            tensors = tuple(t.cpu() if isinstance(t, torch.Tensor) else t for t in tensors)
        return compare(*tensors, **options)

    return run


def pytest_configure() -> None:
    for name in ("equal", "allclose"):
        setattr(torch, name, _on_the_cpu(getattr(torch, name)))
    testing: Any = torch.testing
    testing.assert_close = partial(testing.assert_close, check_device=False)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool:
    hook = item.config.hook
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    source, target = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(source)
        found = [
            hook.pytest_report_to_serializable(config=item.config, report=report)
            for report in runtestprotocol(item, log=False, nextitem=None)
        ]
        with os.fdopen(target, "wb") as stream:
            pickle.dump(found, stream)
        os._exit(0)
    os.close(target)
    with os.fdopen(source, "rb") as stream:
        text = stream.read()
    _, status = os.waitpid(pid, 0)
    if not text:
        raise RuntimeError(f"{item.nodeid} ended its process with the status {status}")
    for data in pickle.loads(text):
        report: Any = hook.pytest_report_from_serializable(config=item.config, data=data)
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True
