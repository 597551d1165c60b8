"""Log the memory and the work of the device and of this program."""

import time

from typing_extensions import override

from trainkit.basics.device import memory_figures, utilization
from trainkit.basics.host import process_memory
from trainkit.callbacks._support.log_schedule import log_follows
from trainkit.training.callback import Callback
from trainkit.training.run import Run
from trainkit.types import StepResult

__all__ = ["DeviceMonitor"]

GIB = 2**30


class DeviceMonitor(Callback):
    """Logs memory and utilisation at log steps; at other steps it does nothing.

    Memory is that of the process that has most of it, because that one runs out first:

    - `device/memory_allocated_gib`, `device/memory_reserved_gib`, `device/memory_peak_gib`: what
      tensors hold on the accelerator, what torch has taken for them, and the most that they held
      since the program began (or since `reset_peak_memory_stats`).
    - `device/host_memory_gib`, `device/host_memory_peak_gib`: resident memory of the process,
      without DataLoader workers, and the most since the program began.

    Work is the mean over the processes:

    - `device/utilization_percent`: share of time in which the GPU was busy lately, where the
      driver tells (NVIDIA: the package `nvidia-ml-py`).
    - `device/cpu_cores`: processor seconds a second of the process since the last log, without
      DataLoader workers.

    These are values of the machine: runs that are equal to the last bit differ in them, as under
    `time/`. A value that the machine does not tell is left out.
    """

    def __init__(self) -> None:
        self._mark = (0.0, 0.0)  # wall and processor seconds

    @override
    def on_fit_start(self, run: Run) -> None:
        self._mark = (time.perf_counter(), time.process_time())

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        if not log_follows(run):
            return
        device, host = run.strategy.device, process_memory()
        names = {"resident": "host_memory_gib", "highest": "host_memory_peak_gib"}
        memory = {name: host[key] for key, name in names.items() if key in host}
        if device.type != "cpu":
            memory |= {f"memory_{name}_gib": size for name, size in memory_figures(device).items()}
        run.log({f"device/{name}": size / GIB for name, size in memory.items()}, reduce="max")
        (wall, processor), self._mark = self._mark, (time.perf_counter(), time.process_time())
        cores = (self._mark[1] - processor) / max(self._mark[0] - wall, 1e-9)
        run.log({"device/cpu_cores": cores})
        if (share := utilization(device)) is not None:
            run.log({"device/utilization_percent": share})
