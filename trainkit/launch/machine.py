"""What this machine has, found without importing torch."""

import importlib.util
import os
import platform
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from trainkit.watch.listening import listen

__all__ = [
    "COLLECTIVE_PACKAGES",
    "DRIVER_WORDS",
    "INTERFACE_VARIABLES",
    "core_count",
    "free_port",
    "gpu_count",
    "gpu_names",
    "gpu_variable",
    "has_torch_for",
    "no_gpus",
    "port_is_free",
    "torch_builds",
]

COLLECTIVE_PACKAGES = ("nvidia-nccl", "oneccl")
"""How packages with collectives of accelerators begin."""

DRIVER_WORDS = "TORCH|PYTORCH|CUDA|NCCL|HIP|ROCR|HCCL|ASCEND|ZE"
"""How environment variables of torch and of accelerators begin."""

INTERFACE_VARIABLES = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": "="}
"""What tells torch's back ends their interface, and what stands before it: "=" is no prefix."""

_ROOT = Path("/")
_INTEL = "0x8086"  # as a maker of PCI devices
_INTEGRATED = "00:02.0"  # where graphics in a processor of Intel are on the PCI bus


@dataclass(frozen=True, slots=True)
class _Driver:
    """How the accelerators of one maker are found.

    Args:
        count: Returns how many there are below the root of the file system.
        variables: The environment variables that say which of them a process sees; the first is
            the one to set.
        none: The value of that one that hides all.
        build: What torch must be built for to use them; empty where that is not asked.
    """

    count: Callable[[Path], int]
    variables: tuple[str, ...]
    none: str = ""
    build: str = ""


def _numbered(name: str, root: Path) -> int:
    """Count device files that are called by a name and a number."""
    return sum(1 for path in (root / "dev").glob("*") if re.fullmatch(rf"{name}\d+", path.name))


def _rocm(root: Path) -> int:
    """Count what ROCm's driver lists, where this process, maybe in a container, has its file."""
    if not (root / "dev/kfd").exists():
        return 0
    nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/properties")
    minors = re.findall(r"^drm_render_minor (\d+)$", "".join(map(_text, nodes)), re.MULTILINE)
    return sum((root / f"dev/dri/renderD{minor}").exists() for minor in minors)


def _xpu(root: Path) -> int:
    """Count Intel's GPUs, but for those inside a processor; one of several tiles counts as one."""
    return sum(
        _text(path / "device/vendor").strip() == _INTEL
        and not (path / "device").resolve().name.endswith(_INTEGRATED)
        and (root / "dev/dri" / path.name).exists()
        for path in (root / "sys/class/drm").glob("renderD*")
    )


def _text(path: Path) -> str:
    """Return the content of a file; empty where this process may not read it."""
    with suppress(OSError):
        return path.read_text(errors="replace")
    return ""


_DRIVERS = (
    _Driver(partial(_numbered, "nvidia"), ("CUDA_VISIBLE_DEVICES",)),
    _Driver(partial(_numbered, "davinci"), ("ASCEND_RT_VISIBLE_DEVICES",)),
    _Driver(
        _rocm,
        ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
        none="-1",
        build="hip",
    ),
    _Driver(_xpu, ("ZE_AFFINITY_MASK",), build="xpu"),
)
_PACKAGES = {"npu": "torch_npu"}  # that bring torch a device which it is not built for


def torch_builds() -> dict[str, str] | None:
    """Return what torch was built for, with versions, from the text of its `version.py`.

    None where there is no torch; empty where it does not say.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    source = _text(Path(spec.origin).with_name("version.py"))
    return dict(re.findall(r"^(cuda|hip|xpu)\b.*?= *['\"]?([\w.]+)", source, re.MULTILINE))


def has_torch_for(kind: str) -> bool:
    """Return whether the torch of this environment can use a kind of device, such as "xpu"."""
    if kind in _PACKAGES:
        return importlib.util.find_spec(_PACKAGES[kind]) is not None
    return (torch_builds() or {}).get(kind, "None") != "None"


def core_count() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpu_count(env: Mapping[str, str] = os.environ, root: Path = _ROOT) -> int:
    """Return how many accelerators processes of this machine would see, as drivers tell it.

    Those of NVIDIA, Ascend and Apple, and those of AMD and Intel where torch is built for them.
    """
    if (platform.system(), platform.machine()) == ("Darwin", "arm64"):
        return 1
    driver = _driver(root)
    visible = (env[name] for name in driver.variables if name in env)
    return min((driver.count(root), *map(_named, visible)))


def _named(visible: str) -> int:
    names = [name.strip() for name in visible.split(",")]
    # CUDA stops at the first one that is none, such as -1.
    return next((i for i, name in enumerate(names) if not name or name == "-1"), len(names))


def gpu_variable() -> str:
    """Return the environment variable that says which accelerators a process sees."""
    return _driver(_ROOT).variables[0]


def no_gpus() -> dict[str, str]:
    """Return that variable with the value that hides all accelerators."""
    driver = _driver(_ROOT)
    return {driver.variables[0]: driver.none}


def _driver(root: Path) -> _Driver:
    usable = [each for each in _DRIVERS if not each.build or has_torch_for(each.build)]
    return max(usable, key=lambda driver: driver.count(root))


def gpu_names() -> list[str]:
    """Return the models of the NVIDIA GPUs that the driver lists."""
    found = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        model = re.search(r"^Model:\s*(.+)$", path.read_text(errors="replace"), re.MULTILINE)
        found.append(model.group(1) if model else "unknown")
    return found


def port_is_free(port: int) -> bool:
    """Return whether a server of this machine could listen on a TCP port."""
    with suppress(OSError), listen("", [port], 1):
        return True
    return False


def free_port() -> int:
    """Return a TCP port that no server of this machine listens on now."""
    with listen("", [0], 1) as found:
        return int(found.getsockname()[1])
