"""Report an error that ends a process of `trainkit launch` where trainkit does not see it.

The launcher puts this folder first on `PYTHONPATH`, so that Python imports this file. When the
script begins the path is what it was, and what a script may want to set up before, as torch, is not
imported.
"""

import atexit
import os
import sys
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

_HERE = os.path.dirname(__file__)
_PID = os.getpid()


def _report() -> None:
    """Write a report of the error that nobody caught, if there is one and trainkit has not."""
    error = getattr(sys, "last_value", None)
    if not isinstance(error, Exception) or os.getpid() != _PID:  # that of a fork is no failure
        return
    from dataclasses import replace

    from trainkit.watch import report as reports
    from trainkit.watch.where import raised_at

    folder = reports.folder_for(None)
    if folder is None or any(folder.glob(f"*-{_PID}.json")):
        return
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    report = reports.of_error(error, rank, size, {})
    replace(report, cause=report.cause + raised_at(error)).write(folder)


def _report_if_possible() -> None:
    with suppress(Exception):  # the error itself has been printed
        _report()


def _leave_the_path() -> None:
    """Put the path back, and run the `sitecustomize` that this one stands in front of."""
    sys.path[:] = [path for path in sys.path if path != _HERE]
    rest = [path for path in os.environ.pop("PYTHONPATH").split(os.pathsep) if path != _HERE]
    if rest:
        os.environ["PYTHONPATH"] = os.pathsep.join(rest)
    spec = PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    atexit.register(_report_if_possible)
    _leave_the_path()
