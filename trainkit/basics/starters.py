"""Who started this process: what Slurm, MPI and pods say of its place, in torchrun's words.

torchrun says it by RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
What is set under these names wins over what is found here.
"""

import os
import re
import zlib
from collections.abc import Mapping
from contextlib import suppress

from trainkit.errors import ConfigError

# Number of the task, tasks in all, and both on its machine. A task of mpirun may have the variables
# of the step of Slurm that started mpirun's daemon, so MPI is asked first.
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
     "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)  # fmt: skip
# Those of a step; without STEP they are what the job has asked for.
_SLURM = (
    "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID",
    "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST",
)  # fmt: skip
_PORTS = range(10_000, 30_000)  # below those that systems hand out


def find_task(env: Mapping[str, str]) -> dict[str, str] | None:
    """Return the place of this process, one of several tasks of `srun` or `mpirun`; else None.

    A batch script and an interactive shell are no tasks, whatever the job has asked for.
    """
    for names in _MPI:
        if all(name in env for name in names):
            numbers, host = [env[name] for name in names], ""
            break
    else:
        if not all(name in env for name in _SLURM) or _is_shell(env):
            return None
        *numbers, node, tasks, hosts = (env[name] for name in _SLURM)
        each = re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks)  # Slurm writes 4,4,3 as `4(x2),3`
        counts = [count for count, times in each for _ in range(int(times or 1))]
        if not node.isdecimal() or int(node) >= len(counts):
            raise ConfigError(
                f"Slurm says that this is node {node!r} of a step with {tasks!r} tasks on its "
                "nodes, which cannot be. Pass all variables `SLURM_*` on as `srun` sets them."
            )
        numbers = [*numbers, counts[int(node)]]
        first = re.match(r"(?:[^,\[]|\[[^]]*\])*", hosts)  # of such as `gpu[07-09,12],login1`
        host = re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first[0] if first else "")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    task = dict(zip(names, numbers, strict=True))
    host = "127.0.0.1" if task["LOCAL_WORLD_SIZE"] == task["WORLD_SIZE"] else host
    task |= {"MASTER_ADDR": host} if host else {}
    if number := job_number(env):
        task["MASTER_PORT"] = str(_PORTS[zlib.crc32(number.encode()) % len(_PORTS)])
    return None if task["WORLD_SIZE"] == "1" else task


def job_number(env: Mapping[str, str]) -> str:
    """Return what tells a job of tasks from others on these machines; empty where nobody says."""
    if "OMPI_COMM_WORLD_RANK" in env:
        return env.get("PMIX_NAMESPACE", "")
    return ".".join(env[name] for name in ("SLURM_JOB_ID", "SLURM_STEP_ID") if name in env)


def in_torchrun_words(env: Mapping[str, str]) -> Mapping[str, str]:
    """Return the variables of a process, and those of torchrun that its starter says otherwise.

    A process that is told its number, but not its number on its machine, is the only one there,
    unless all meet on this machine.
    """
    task = find_task(env)
    if task is not None and env.get("WORLD_SIZE") in (None, task["WORLD_SIZE"]):
        env = {**task, **env}
    host = env.get("MASTER_ADDR", "localhost")
    is_far = host not in ("localhost", "::1") and not host.startswith("127.")
    if is_far and not {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} & env.keys():
        env = {**env, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return env


def refuse_alone(env: Mapping[str, str]) -> None:
    """Refuse a process that was meant to be one of several, and that nobody has told its place."""
    if _is_shell(env) and env.get("SLURM_STEP_NUM_TASKS", "1") != "1" and "RANK" not in env:
        raise ConfigError(
            f"This terminal is the first of {env['SLURM_STEP_NUM_TASKS']} tasks (`srun --pty`). "
            "For a training of all of them write `srun --overlap python SCRIPT`; for one of this "
            "process alone set `RANK=0` and `WORLD_SIZE=1`."
        )
    machines, processes = (env.get(f"PET_{name}", "1") for name in ("NNODES", "NPROC_PER_NODE"))
    is_told = "LOCAL_RANK" in env or ("RANK" in env and processes in ("1", "auto"))
    if is_told or machines.rpartition(":")[2] == "1" or find_task(env) is not None:
        return
    raise ConfigError(
        f"This is one of {machines} machines of a job (`PET_NNODES`), on which a launcher has to "
        "start the processes. Let the command of the job be `trainkit launch SCRIPT`, or "
        "`torchrun SCRIPT`; for a training of this process alone set `RANK=0`, `WORLD_SIZE=1` and "
        "`LOCAL_RANK=0`."
    )


def sees_own_devices(env: Mapping[str, str]) -> bool:
    """Return whether a starter may show each process other devices, which torchrun does not."""
    return "TORCHELASTIC_RUN_ID" not in env and find_task(env) is not None


def _is_shell(env: Mapping[str, str]) -> bool:
    """Return whether this process has the terminal of `srun --pty`; steps from there have none."""
    with suppress(OSError):
        if "SLURM_PTY_PORT" in env:
            os.close(os.open("/dev/tty", os.O_RDWR))
            return True
    return False
