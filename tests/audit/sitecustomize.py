"""The hook that records what trainkit must never do; Python imports it where it is on the path.

An event counts where a frame of trainkit stands on its stack, and none of Python's own transport
between processes comes before it. Only the standard library may be used here: every process of the
test suite pays for it.
"""

import importlib.machinery
import importlib.util
import os
import sys
from types import FrameType
from typing import Any

LOG_VARIABLE = "TRAINKIT_AUDIT_LOG"

_HERE = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.dirname(os.path.dirname(_HERE)) + os.sep
_OURS = (_ROOT + "trainkit" + os.sep, _ROOT + "callbacks" + os.sep)
_LIBRARY = os.path.dirname(os.__file__)

# That none of our code makes code of text, `tests/test_architecture.py` reads in it.
_EVENTS = frozenset(
    {
        "ctypes.dlopen",
        "marshal.load",
        "marshal.loads",
        "os.exec",
        "os.posix_spawn",
        "os.spawn",
        "os.system",
        "pickle.find_class",
        "shutil.unpack_archive",
        "socket.connect",
        "subprocess.Popen",
        "urllib.Request",
    }
)

# What a `DataLoader` moves to and from its workers, the script that `trainkit launch` lets torch
# start, what the logger of Weights & Biases starts where a user asks for it, torch's own search for
# the driver of a GPU, and an import statement.
_TRANSPORT = (
    os.sep + os.path.join("torch", "cuda", "__init__.py"),
    os.path.join("site-packages", "wandb") + os.sep,
    os.path.join(_LIBRARY, "multiprocessing") + os.sep,
    os.sep + os.path.join("torch", "multiprocessing") + os.sep,
    os.sep + os.path.join("torch", "distributed", "elastic", "multiprocessing") + os.sep,
    "<frozen importlib",
)

# Objects that a user hands to a gather may be pickled: by this function, called by one of these.
_UNPICKLER = ("containers/wire_format.py", "_get_pickle")
_GATHERS = {
    ("distributed/communicator.py", "gather_object"),
    ("distributed/gather.py", "_exchange"),
}
# The program of a run, which `trainkit replay` is there to start, and that for `trainkit diff`; the
# parts of `trainkit test --gpu`, and the commands that a user gives to it; and those that a test
# hands to `execute_subprocess_async`, which has no other use.
_STARTERS = {
    ("accelerate_compat/testing.py", "execute_subprocess_async"),
    ("cli/replay.py", "_run"),
    ("cli/diff.py", "_replay"),
    ("cli/gpu_page.py", "_run"),
}
# The codec's own test asks for it by `allow_pickle=True`, as a user does.
_ASKS = os.path.join(_ROOT, "tests", "distributed", "test_codec.py")


def install() -> None:
    """Install the hook in this process, once."""
    if not getattr(sys, "trainkit_audit", False):
        sys.trainkit_audit = True  # type: ignore[attr-defined]
        sys.addaudithook(_hook)


def _hook(event: str, arguments: Any) -> None:
    if event in _EVENTS:
        culprit = _culprit(sys._getframe().f_back)
        if culprit is not None and not (event == "socket.connect" and _is_local(arguments[1])):
            _report(event, arguments, culprit)


def _culprit(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of trainkit, None where there is none or all is in order."""
    while frame is not None:
        file = frame.f_code.co_filename
        if any(part in file for part in _TRANSPORT):
            return None
        if file.startswith(_OURS):
            return None if _is_for_users(frame) else frame
        frame = frame.f_back
    return None


def _is_for_users(frame: FrameType) -> bool:
    if _place(frame) in _STARTERS:
        return True
    if _place(frame) != _UNPICKLER:
        return False
    outer = frame.f_back
    while outer is not None and _place(outer) not in _GATHERS:
        if outer.f_code.co_filename == _ASKS:
            return True
        outer = outer.f_back
    return outer is not None


def _place(frame: FrameType) -> tuple[str, str]:
    file = frame.f_code.co_filename.removeprefix(_OURS[0])
    return file.replace(os.sep, "/"), frame.f_code.co_name


def _is_local(address: Any) -> bool:
    """Return whether an address is of this machine: a path, or a loopback address.

    The network of the hosts that `tests/hosts` makes is on this machine, too.
    """
    if not isinstance(address, tuple):
        return True
    host = str(address[0])
    is_host = os.uname().nodename.startswith("host-") and host.startswith(("10.", "fd77::"))
    return is_host or host in ("localhost", "::1", "") or host.startswith("127.")


def _report(event: str, arguments: Any, frame: FrameType) -> None:
    code = frame.f_code
    file = code.co_filename.removeprefix(_ROOT)
    shown = " ".join(repr(argument)[:60] for argument in arguments[:2])
    text = f"{event} {shown} under {file}:{frame.f_lineno} in {code.co_name}"
    line = text.replace("\n", " ").encode("utf-8", "replace") + b"\n"
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    descriptor = os.open(os.environ[LOG_VARIABLE], flags, 0o600)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


def _run_the_one_behind() -> None:
    """Run the `sitecustomize` of the installation, which this one stands in front of."""
    others = [path for path in sys.path if os.path.abspath(path or ".") != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "sitecustomize":
    if LOG_VARIABLE in os.environ:
        install()
    _run_the_one_behind()
