"""What other starters say of a job's settings: below the command line, file and TRAINKIT_*.

`trainkit launch` may be what a starter runs once on each machine: a task of `srun`, a pod.
"""

from collections.abc import Mapping

from trainkit import starters
from trainkit.cli.settings import least_and_most
from trainkit.errors import ConfigError

__all__ = ["PLACE", "check_alone", "starter_settings"]

PLACE = ("num_machines", "machine_rank", "main_process_ip", "main_process_port")
"""The settings that say which machine of how many this is, and where they meet."""

# What torchrun reads; PyTorchJob and TrainJob set them in pods.
_TORCHRUN = {
    **dict(zip(PLACE, ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"), strict=True)),
    "num_processes": "NPROC_PER_NODE",
    **{name: name.upper() for name in ("rdzv_endpoint", "rdzv_backend", "rdzv_conf", "max_restarts",
                                       "monitor_interval", "role", "log_dir", "tee")},
}  # fmt: skip


def starter_settings(env: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return settings that starters say, by name: the text, and who says it.

    `num_processes` is that of each machine.
    """
    found: dict[str, tuple[str, str]] = {}
    said, which = starters.in_torchrun_words(env), _which(env)
    if which and "PET_NNODES" not in env and said.get("LOCAL_WORLD_SIZE") == "1":
        words = zip(PLACE, ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"), strict=True)
        found = {name: (said[word], which) for name, word in words if word in said}
    for name, word in _TORCHRUN.items():
        if text := env.get(f"PET_{word}"):
            says = least_and_most(text) if name == "num_machines" else {name: text}
            if name == "rdzv_endpoint":
                host, _, port = text.partition(":")
                says = {"main_process_ip": host, **({"main_process_port": port} if port else {})}
            found |= {k: (v, f"environment (PET_{word})") for k, v in says.items()}
    if found.get("num_processes", ("",))[0] in ("auto", "gpu"):  # `launch` counts GPUs itself
        del found["num_processes"]
    return found


def _which(env: Mapping[str, str]) -> str:
    """Return in words which task this is; empty where it is none of several."""
    said = starters.in_torchrun_words(env)
    is_one = "RANK" in said and said.get("WORLD_SIZE", "1") != "1"
    return f"task {said['RANK']} of {said['WORLD_SIZE']}" if is_one else ""


def check_alone(env: Mapping[str, str]) -> None:
    """Check that no other launcher is started together with this one, for a job of one machine.

    Raises:
        ConfigError: This launcher is one of several tasks.
    """
    if which := _which(env):
        raise ConfigError(
            f"This launcher is {which}, and each would start a job of its own, which trains on all "
            "the data. Start one on each machine (`srun --ntasks-per-node=1 trainkit launch ...`, "
            "`mpirun --map-by ppr:1:node trainkit launch ...`), or the script as the tasks (`srun "
            "python SCRIPT`). If each is to be a job of its own, pass `--num_machines 1`."
        )
