"""Watches over every process of the test suite: nothing of trainkit may run foreign code.

`sitecustomize.py` is the hook; this installs it here and in every process that the tests start:
forks inherit it, and other processes find it through `PYTHONPATH`.
"""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tests.audit import sitecustomize

LOG = sitecustomize.LOG_VARIABLE
_FOLDER = str(Path(__file__).parent)


class Audit:
    """The hook of one session, and what it found."""

    def __init__(self) -> None:
        self._own: str | None = None
        if LOG not in os.environ:  # else another session has started this one, and reads the log
            self._own = tempfile.mkdtemp(prefix="audit-")
            os.environ[LOG] = os.path.join(self._own, "findings")
        self._log = Path(os.environ[LOG])
        os.environ.update(_with_hook(os.environ))
        sitecustomize.install()
        _reach_subprocesses()

    def findings(self) -> list[str]:
        """Return one line for each thing that must not happen, each once."""
        if not self._log.exists():
            return []
        return sorted(set(self._log.read_text(encoding="utf-8", errors="replace").splitlines()))

    def close(self) -> None:
        """Remove the log, where this session made it."""
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)


def _with_hook(environment: Any) -> dict[str, str]:
    """Return an environment in which Python installs the hook when it starts."""
    result = dict(environment)
    paths = result.get("PYTHONPATH", "").split(os.pathsep)
    result["PYTHONPATH"] = os.pathsep.join([_FOLDER, *(p for p in paths if p not in ("", _FOLDER))])
    result.setdefault(LOG, os.environ[LOG])
    return result


def _reach_subprocesses() -> None:
    """Give the hook to subprocesses too that a test starts with an environment of its own."""
    start: Any = subprocess.Popen.__init__
    if getattr(start, "reaches", False):
        return

    def audited(self: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("env") is not None:
            kwargs["env"] = _with_hook(kwargs["env"])
        start(self, *args, **kwargs)

    audited.reaches = True  # type: ignore[attr-defined]
    subprocess.Popen.__init__ = audited  # type: ignore[method-assign]
