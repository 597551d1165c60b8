"""Who am I: the place of this process among the processes of the job."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch.distributed

from trainkit.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The place of this process, read once from what torchrun sets, or another starter."""

    rank: int = 0  # 0 <= rank < size
    local_rank: int = 0  # rank on this machine; picks the GPU
    size: int = 1  # processes in all
    local_size: int = 1  # processes on this machine

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"`size` must be at least 1, but is {self.size}.")
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"`rank` must be in [0, {self.size}), but is {self.rank}.")
        if not 0 <= self.local_rank < self.local_size:
            raise ConfigError(
                f"`local_rank` must be in [0, {self.local_size}), but is {self.local_rank}."
            )

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Self:
        """Read `RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `LOCAL_WORLD_SIZE`; one process without.

        Tasks of `srun` and `mpirun` are read too.

        Raises:
            ConfigError: The variables say no place, or a machine on which none was started.
        """
        from trainkit.basics import starters  # importing trainkit needs none of it

        env = os.environ if env is None else env
        starters.refuse_alone(env)
        return cls._read(starters.in_torchrun_words(env))

    @classmethod
    def current(cls) -> Self:
        """Return the place in the process group, if there is one, else the launcher's."""
        group = torch.distributed
        if not group.is_available() or not group.is_initialized():
            return cls.from_env()
        from trainkit.basics import starters

        numbers = {"RANK": str(group.get_rank()), "WORLD_SIZE": str(group.get_world_size())}
        return cls._read(starters.in_torchrun_words({**os.environ, **numbers}))

    @classmethod
    def _read(cls, env: Mapping[str, str]) -> Self:
        size = _integer(env, "WORLD_SIZE", 1)
        if size > 1 and "RANK" not in env:
            raise ConfigError(
                f"The environment variable `WORLD_SIZE` asks for {size} processes, but `RANK`, the "
                "number of this one, is not set. Start the job with torchrun, or unset "
                "`WORLD_SIZE`."
            )
        rank = _integer(env, "RANK", 0)
        local_size = _integer(env, "LOCAL_WORLD_SIZE", size)
        local_rank = _integer(env, "LOCAL_RANK", rank % local_size if local_size > 0 else rank)
        return cls(rank=rank, local_rank=local_rank, size=size, local_size=local_size)

    @property
    def is_main(self) -> bool:
        """Whether this is process 0 of the job."""
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        """Whether this is process 0 of its machine."""
        return self.local_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the last process of the job."""
        return self.rank == self.size - 1


def _integer(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"The environment variable `{name}` must be a whole number, but is {text!r}. "
            "Start the job with torchrun, or unset the variable."
        ) from None
