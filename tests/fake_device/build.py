"""Build the pretended device once, and say how a process gets it."""

import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import torch

__all__ = ["compiler", "environment"]

HERE = Path(__file__).parent
SECONDS = 900.0  # to compile: 40 on an idle core


def compiler() -> str | None:
    """Return the C++ compiler of this machine; None without one, or without Python's headers."""
    found = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++"))), None)
    headers = Path(sysconfig.get_path("include"), "Python.h")
    return found if headers.exists() else None


def environment() -> dict[str, str]:
    """Return the variables of a process that is to have the device; builds it where it is new.

    The result stays for later runs, in `~/.cache` or where `XDG_CACHE_HOME` or
    `TRAINKIT_FAKE_DEVICE` says, under a name that changes with the source and with torch.
    """
    digest = hashlib.sha256(
        (HERE / "device.cpp").read_bytes()
        + f"{torch.__version__} {sysconfig.get_config_var('SOABI')}".encode()
    ).hexdigest()[:16]
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    parent = Path(os.environ.get("TRAINKIT_FAKE_DEVICE") or caches / "trainkit-fake-device")
    folder = parent / digest
    if not folder.exists():
        parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=parent))
        try:
            _build(made)
            made.rename(folder)
        except OSError:
            if not folder.exists():  # else another process was faster
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    _copy(HERE / "fake_device.py", folder / "fake_device.py")
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


def _copy(source: Path, target: Path) -> None:
    if not target.exists() or target.read_bytes() != source.read_bytes():
        part = target.with_suffix(f".{os.getpid()}")
        shutil.copy(source, part)
        part.replace(target)


def _build(folder: Path) -> None:
    from torch.utils.cpp_extension import include_paths, library_paths

    command = [str(compiler()), "-std=c++20", "-O0", "-w", "-fPIC", "-shared"]
    command += ["-DTORCH_EXTENSION_NAME=fake_device_c", "-DTORCH_API_INCLUDE_EXTENSION_H"]
    command += [f"-I{path}" for path in (*include_paths(), sysconfig.get_path("include"))]
    command += [str(HERE / "device.cpp"), "-o", str(folder / "fake_device_c.so")]
    command += [f"-L{path}" for path in library_paths()]
    command += ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        raise RuntimeError(f"The pretended device does not compile:\n{done.stderr[-4000:]}")
    metadata = folder / "fake_device-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-device\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\nfake = fake_device:register\n")
