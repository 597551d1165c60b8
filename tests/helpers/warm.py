"""Programs of Python in processes that begin with torch imported: three seconds less for each.

    with warm():
        subprocess.run([sys.executable, "train.py", "--steps", "3"], cwd=folder, check=True)

Such a process is a child of this one, with a session, environment, folder and descriptors of its
own as `Popen` was told; its `__main__`, `sys.argv` and `sys.path` are those of a new interpreter.
It was cloned from a process that has only imported what `_IMPORTS` names and all of trainkit. Not
alike are the seed of hashes, the command line that `ps` shows, and its end: threads are waited for
and what is registered with `atexit` runs, but modules are not taken down. Where a program needs
more of an interpreter of its own, such as `-I`, `shell=True` or another `PYTHONHASHSEED`, it gets
one.
"""

import atexit
import builtins
import ctypes
import fcntl
import gc
import importlib
import inspect
import io
import json
import os
import pkgutil
import platform
import runpy
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import ModuleType
from typing import Any

__all__ = ["import_ours", "keep_environment", "settle", "warm"]

_IMPORTS = (
    *("numpy", "torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"),
    *("torch.distributed.elastic.multiprocessing", "torch.distributed.run"),
    *("torch.utils.tensorboard", "safetensors.torch", "tqdm", "xxhash", "yaml"),
)
# What is read once, by an import or at the start, must be as it was at the start.
_READ_ONCE = (
    *("PYTHON", "LD_", "LC_", "LANG", "TORCH", "PYTORCH", "OMP_", "MKL_", "KMP_", "ATEN_"),
    *("HF_", "TRANSFORMERS_"),
)
_MAY_DIFFER = (
    *("PYTHONPATH", "PYTHONUNBUFFERED"),
    *("LC_CTYPE", "TORCHELASTIC_", "TORCH_NCCL_", "TORCH_CPP_LOG", "TORCH_DISABLE_SHARE_"),
    # Which torch and sklearn set when they are imported.
    *("TORCHINDUCTOR_CACHE_DIR", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),
)
_CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine(), 0)  # numbers of a system call
_CLONE_PARENT, _SET_TID, _CLEAR_TID = 0x8000, 0x01000000, 0x00200000
_TID = {"x86_64": 720, "aarch64": 208}.get(platform.machine(), 0)  # in glibc's `struct pthread`
_LENDS = -1  # in place of levels
_LIBC = ctypes.PyDLL(None)
_COLLAPSE, _LARGE = 25, 1 << 21  # what `madvise` is told, and the bytes of a large page
_EXECUTE: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def _read_once(environment: Any) -> dict[str, str]:
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_ONCE) and not name.startswith(_MAY_DIFFER)
    }


class _Server:
    """The other end of the process that is cloned.

    Args:
        line: The connection to it.
        environment: What it began with.
        process: It, where it is a child of this process.
    """

    def __init__(
        self, line: socket.socket, environment: dict[str, str], process: int | None = None
    ) -> None:
        self.line, self.environment, self.process = line, environment, process
        self.lock = threading.Lock()
        self.pid = os.getpid()  # whose children the programs become

    def start(self, order: dict[str, Any], descriptors: list[int]) -> int | None:
        """Start a program, and return its process; None where whom we ask has gone before."""
        text = json.dumps(order).encode()
        with self.lock:
            if self.line.fileno() < 0:
                return None
            try:
                socket.send_fds(self.line, [len(text).to_bytes(4, "big")], descriptors)
            except BrokenPipeError:
                self._tell_end()
                return None
            self.line.sendall(text)
            return int.from_bytes(_exactly(self.line, 4), "big")

    def _tell_end(self) -> None:
        """Say how the process ended, in the summary of the tests, and begin another next time."""
        for key in [key for key, server in _servers.items() if server is self]:
            del _servers[key]
        self.line.close()
        how = ""
        if self.process is not None:
            with suppress(ChildProcessError):
                _, status = os.waitpid(self.process, 0)
                how = f", with {os.waitstatus_to_exitcode(status)}"
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn(f"The process that programs are cloned from ended{how}.", stacklevel=2)


def _started_by(server: _Server, inside: int) -> Callable[..., None]:
    """Return what `Popen` starts programs with."""

    def start(self: Any, *given: Any) -> None:
        told = inspect.signature(_EXECUTE).bind(self, *given).arguments
        order = _order(told, server)
        if order is None:
            _EXECUTE(self, *given)
            return
        sys.audit("subprocess.Popen", told["executable"], told["args"], told["cwd"], told["env"])
        standard = {0: told["p2cread"], 1: told["c2pwrite"], 2: told["errwrite"]}
        descriptors = {n: n if own == -1 else own for n, own in standard.items()}
        descriptors |= {int(each): int(each) for each in told["pass_fds"]}
        order |= {"descriptors": [*descriptors], "inside": inside}
        pid = server.start(order, [*descriptors.values()])
        if pid is None:
            _EXECUTE(self, *given)
            return
        self.pid, self._child_created = pid, True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(told[end] for end in ends))

    return start


def _order(told: dict[str, Any], server: _Server) -> dict[str, Any] | None:
    """Return how a clone is to be this program; None where it needs an interpreter of its own."""
    args = told["args"]
    if isinstance(args, str | bytes | os.PathLike):
        return None
    words = [os.fsdecode(word) for word in args]
    first = 2 if words[1:2] == ["-u"] else 1
    executable = os.fsdecode(told["executable"] or words[0])
    is_program = len(words) > first and (words[first] in ("-c", "-m") or words[first][0] != "-")
    unusual = [told[name] for name in ("preexec_fn", "shell", "gid", "gids", "uid")]
    unusual += [told["umask"] >= 0, not told["close_fds"], not told["restore_signals"]]
    env = dict(os.environ if told["env"] is None else told["env"])
    if executable != sys.executable or not is_program or any(unusual) or server.pid != os.getpid():
        return None
    if _read_once(env) != _read_once(server.environment):
        return None
    folder = os.fspath(told["cwd"] or os.getcwd())
    if not os.path.isdir(folder):
        return None
    return {
        "words": words,
        "first": first,
        "env": env,
        "folder": os.fsdecode(folder),
        "session": bool(told["start_new_session"]),
        "group": told["process_group"],
    }


_kept: dict[str, str] = {}
_servers: dict[tuple[int, tuple[str, ...]], _Server] = {}  # by who has it, and `imports`


@contextmanager
def warm(*, inside: int = 0, imports: tuple[str, ...] = (), lends: bool = False) -> Iterator[None]:
    """Let programs of Python begin with torch imported, and those that they start.

    Args:
        inside: How many levels of the latter: 1 for the workers of a launcher.
        imports: Modules to begin with besides.
        lends: Let programs have what is cloned for `with warm()` of their own.
    """
    if not _CLONE or sys.platform != "linux":
        yield
        return
    _take_what_is_lent()
    server = _servers.get((os.getpid(), imports)) or _begin(imports)
    with _starting(server, _LENDS if lends else inside):
        yield


@contextmanager
def _starting(server: _Server, inside: int) -> Iterator[None]:
    kind: Any = subprocess.Popen
    before, kind._execute_child = kind._execute_child, _started_by(server, inside)
    try:
        yield
    finally:
        kind._execute_child = before


def _take_what_is_lent() -> None:
    lent, sys.lent_by_warm = getattr(sys, "lent_by_warm", None), None  # type: ignore[attr-defined]
    if lent is not None:
        _servers[os.getpid(), ()] = _Server(*lent)


def _begin(imports: tuple[str, ...]) -> _Server:
    """Begin the process that is cloned: where there is one with fewer imports, as its clone."""
    ours, theirs = socket.socketpair()
    environment = {**(_kept or os.environ), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    lesser = _servers.get((os.getpid(), ()))
    with nullcontext() if lesser is None else _starting(lesser, 0):
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno()), *imports],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            # A thread of numpy's would be waited for by forks of clones, which have none.
            env={**environment, "OPENBLAS_NUM_THREADS": "1"},
        )
    process.returncode = 0  # ends with this process
    theirs.close()
    server = _servers[os.getpid(), imports] = _Server(ours, environment, process.pid)
    return server


def keep_environment() -> None:
    """Let programs begin as in the environment of now, whatever the test has changed of it."""
    _kept.update(os.environ)


def import_ours() -> None:
    """Import all of trainkit that can be, so that forks and clones need not."""
    for module in pkgutil.walk_packages(importlib.import_module("trainkit").__path__, "trainkit."):
        if not module.name.endswith(("__main__", "sitecustomize")):  # which are programs
            with suppress(ImportError):
                importlib.import_module(module.name)


def settle() -> None:
    """Make forks of this process cheap: what it holds stays, and lies in few large pages.

    A fork copies the table of all pages, and a child that ends takes it down: 50 ms for half a
    gigabyte in pages of 4 kB, 12 in large ones. Where the system has none, nothing changes.
    """
    gc.collect()
    gc.freeze()
    with suppress(OSError), open("/proc/self/maps") as maps:
        for line in maps:
            span, rights, _, _, inode, *_ = line.split()
            if rights == "rw-p" and inode == "0":
                begin, end = (int(at, 16) for at in span.split("-"))
                for at in range(-(-begin // _LARGE) * _LARGE, end - _LARGE + 1, _LARGE):
                    # One at a time: where one cannot be made, the system leaves the rest.
                    _LIBC.madvise(ctypes.c_void_p(at), ctypes.c_size_t(_LARGE), _COLLAPSE)


# What follows runs in the process that is cloned, and in the clones.


def _exactly(line: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        found += (more := line.recv(size - len(found)))
        if not more:
            raise EOFError
    return found


def _serve(line: socket.socket) -> dict[str, Any]:
    """Clone this process for each order; return the order in the clone."""
    while True:
        size, descriptors, _, _ = socket.recv_fds(line, 4, 64)
        if not size:
            os._exit(0)
        order: dict[str, Any] = json.loads(_exactly(line, int.from_bytes(size, "big")))
        pid = _clone()
        if pid == 0:
            line.close()
            order["sent"] = descriptors
            return order
        for each in descriptors:
            os.close(each)
        line.sendall(pid.to_bytes(4, "big"))


def _clone() -> int:
    """Fork; the child is one of this process's parent, not of this process."""
    _LIBC.pthread_self.restype = ctypes.c_void_p
    place = _LIBC.pthread_self() + _TID
    known = ctypes.c_int.from_address(place).value == threading.get_native_id()
    flags = _CLONE_PARENT | signal.SIGCHLD | (_SET_TID | _CLEAR_TID if known else 0)
    tid = ctypes.c_void_p(place if known else None)
    ctypes.pythonapi.PyOS_BeforeFork()
    # Where the two take their arguments in another order, it is the last two.
    last = (tid, None) if platform.machine() == "x86_64" else (None, tid)
    pid = int(_LIBC.syscall(ctypes.c_long(_CLONE), ctypes.c_long(flags), None, None, *last))
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    return pid


def _become(order: dict[str, Any], before: str) -> None:
    """Be as a process that has just been started."""
    if order["session"]:
        os.setsid()
    elif order["group"] >= 0:
        os.setpgid(0, order["group"])
    os.chdir(order["folder"])
    high = [os.dup(each) for each in order["sent"]]
    floor = max([*order["descriptors"], *order["sent"], *high]) + 1
    kept = [fcntl.fcntl(each, fcntl.F_DUPFD, floor) for each in order["sent"]]
    for each in (*high, *order["sent"]):
        os.close(each)
    for each, target in zip(kept, order["descriptors"], strict=True):
        os.dup2(each, target)
        os.close(each)
    os.environ.clear()
    os.environ.update(order["env"])
    words, first = order["words"], order["first"]
    _open_streams(unbuffered=first == 2 or bool(os.environ.get("PYTHONUNBUFFERED")))
    sys.argv, sys.orig_argv[:] = words[first:], words
    old = {*before.split(os.pathsep)}
    own = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = own + [path for path in sys.path[1:] if path not in old]
    importlib.invalidate_caches()
    sys.modules["numpy"].random.seed()
    if "sitecustomize" in sys.modules:
        del sys.modules["sitecustomize"]
        with suppress(ModuleNotFoundError):
            importlib.import_module("sitecustomize")


def _open_streams(*, unbuffered: bool) -> None:
    encoding = sys.__stdout__.encoding if sys.__stdout__ is not None else "utf-8"
    for number, name, mode in ((0, "stdin", "rb"), (1, "stdout", "wb"), (2, "stderr", "wb")):
        is_error = name == "stderr"
        binary: Any = open(number, mode, 0 if unbuffered and number else -1, closefd=False)  # noqa: SIM115
        stream = io.TextIOWrapper(
            binary,
            encoding,
            "backslashreplace" if is_error else "strict",
            line_buffering=is_error or binary.isatty(),
            write_through=unbuffered and number > 0,
        )
        stream.mode = mode[0]  # type: ignore[misc]
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _run(words: list[str]) -> None:
    """Run a program as Python does, in a new `__main__`."""
    kind = words[0]
    if kind == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        return
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    if kind == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        exec(compile(words[1], "<string>", "exec"), main.__dict__)
        return
    sys.path.insert(0, os.path.dirname(os.path.realpath(kind)))
    main.__file__ = kind
    main.__dict__["__cached__"] = None
    with io.open_code(os.path.abspath(kind)) as file:
        code = compile(file.read(), kind, "exec")
    exec(code, main.__dict__)


def _be_program(order: dict[str, Any], before: str) -> None:
    environment = dict(os.environ)
    if order["inside"]:
        ours, theirs = socket.socketpair()
        if os.fork() == 0:
            ours.close()
            for each in order["sent"]:
                os.close(each)
            os.setsid()
            return _be_program(_serve(theirs), before)
        theirs.close()
        if order["inside"] == _LENDS:
            sys.lent_by_warm = ours, environment  # type: ignore[attr-defined]
        else:
            kind: Any = subprocess.Popen
            kind._execute_child = _started_by(_Server(ours, environment), order["inside"] - 1)
    _become(order, before)
    code = 1
    try:
        try:
            _run(order["words"][order["first"] :])
            code = 0
        finally:
            threading._shutdown()  # type: ignore[attr-defined]
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__):
            trace = trace.tb_next
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        if isinstance(error, KeyboardInterrupt):
            code = -signal.SIGINT
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


if __name__ == "__main__":
    _before = os.environ.get("PYTHONPATH", "")
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    for _name in (*_IMPORTS, *sys.argv[2:]):
        with suppress(ImportError):
            importlib.import_module(_name)
    import_ours()
    settle()
    _own = socket.socket(fileno=int(sys.argv[1]))
    _be_program(_serve(_own), _before)
