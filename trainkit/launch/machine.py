"""What this machine has: cores, and the accelerators that torch can use."""

import importlib.util
import os
import re
from contextlib import suppress
from pathlib import Path

COLLECTIVE_PACKAGES = ("nvidia-nccl", "oneccl")
"""How packages with collectives of accelerators begin."""

DRIVER_WORDS = "TORCH|PYTORCH|CUDA|NCCL|HIP|ROCR|HCCL|ASCEND|ZE"
"""How environment variables of torch and of accelerators begin."""

INTERFACE_VARIABLES = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": "="}
"""What tells torch's back ends their interface, and what stands before it: "=" is no prefix."""

_VISIBLE = {
    "hip": "HIP_VISIBLE_DEVICES",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "xpu": "ZE_AFFINITY_MASK",
}


def torch_builds() -> dict[str, str] | None:
    """Return what torch was built for, with versions, from the text of its `version.py`.

    None where there is no torch; empty where it does not say.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    source = ""
    with suppress(OSError):
        source = Path(spec.origin).with_name("version.py").read_text(errors="replace")
    return dict(re.findall(r"^(cuda|hip|xpu)\b.*?= *['\"]?([\w.]+)", source, re.MULTILINE))


def core_count() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpu_count() -> int:
    """Return how many accelerators torch sees; imports torch."""
    from trainkit.basics.device import accelerator_count

    return accelerator_count()


def gpu_variable() -> str:
    """Return the environment variable that says which accelerators a process sees."""
    import torch

    built_for = torch.accelerator.current_accelerator()
    kind = "" if built_for is None else built_for.type
    return _VISIBLE.get("hip" if torch.version.hip else kind, "CUDA_VISIBLE_DEVICES")


def no_gpus() -> dict[str, str]:
    """Return that variable with the value that hides all accelerators."""
    name = gpu_variable()
    return {name: "-1" if name == _VISIBLE["hip"] else ""}


def gpu_names() -> list[str]:
    """Return the models of the NVIDIA GPUs that the driver lists."""
    names = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        model = re.search(r"^Model:\s*(.+)$", path.read_text(errors="replace"), re.MULTILINE)
        names.append(model.group(1) if model else "unknown")
    return names
