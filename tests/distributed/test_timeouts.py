"""A collective that some process does not enter raises after the time-out, in every group."""

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn
from torch._C._distributed_c10d import FileStore

from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import with_few
from trainkit import Accelerator, ConfigError, InitProcessGroupKwargs, Trainer, Watchdog
from trainkit.distributed import Processes, with_own_group
from trainkit.strategies import FSDP

SECONDS = 2
LIMIT = timedelta(seconds=SECONDS)
# torch's defaults are ten minutes and more; a loaded machine may be late by much less.
AT_MOST = 60


def _waits(rank: int, folder: Path, name: str) -> float:
    """Enter a collective on process 0 alone; return how long it took to raise."""
    collective, expected = GROUPS[name]()
    ended = folder / name
    if rank != 0:
        while not ended.exists():
            time.sleep(0.01)
        return float(ended.read_text())
    begun = time.monotonic()
    try:
        # gloo says so in the one way or the other
        with pytest.raises(RuntimeError, match=r"(?i)timed out|timeout"):
            collective()
        took = time.monotonic() - begun
    finally:
        (folder / "text").write_text(str(time.monotonic() - begun))
        (folder / "text").rename(ended)
    assert expected == Processes.start().timeout
    return took


def _accelerator() -> Processes:
    limit = InitProcessGroupKwargs(timeout=LIMIT)
    return Accelerator(cpu=True, kwargs_handlers=[limit]).processes


def _meet(group: Any) -> Callable[[], object]:
    """Return a collective of a group that all processes have used once: it is connected."""
    tensor = torch.ones(1)
    torch.distributed.all_reduce(tensor, group=group)
    Processes.start().barrier()
    return lambda: torch.distributed.all_reduce(tensor, group=group)


def _default() -> Any:
    _accelerator()
    return _meet(None), LIMIT


def _control() -> Any:
    processes = _accelerator()
    processes.barrier()
    return processes.barrier, LIMIT


def _background() -> Any:
    other = with_own_group(_accelerator())
    other.barrier()
    return other.barrier, LIMIT


def _of_trainer() -> Any:
    watchdog = Watchdog(process_group_timeout=SECONDS)
    trainer = Trainer(max_steps=1, strategy="ddp", watchdog=watchdog)
    trainer.processes.wait_for_everyone()
    return trainer.processes.wait_for_everyone, LIMIT


def _adopted() -> Any:
    """The user has made the default group."""
    rank = Processes.start().rank
    Processes.start().close()
    store = FileStore(FOLDER[0], 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    _accelerator()
    return _meet(None), LIMIT


FOLDER: list[str] = []


def _shards(replicas: int) -> Any:
    strategy = FSDP(device="cpu", replicas=replicas)
    limit = InitProcessGroupKwargs(timeout=LIMIT)
    accelerator = Accelerator(cpu=True, strategy=strategy, kwargs_handlers=[limit])
    accelerator.prepare(nn.Linear(4, 4))
    groups = strategy._mesh.get_all_groups()
    (group,) = [g for g in groups if torch.distributed.get_world_size(g) == 2]
    return _meet(group), LIMIT


def _sharded() -> Any:
    return _shards(1)


def _replicated() -> Any:
    return _shards(2)


GROUPS: dict[str, Callable[[], Any]] = {
    "default": _default,
    "control": _control,
    "background": _background,
    "trainer": _of_trainer,
    "adopted": _adopted,
    "sharded": _sharded,
    "replicated": _replicated,
}


@pytest.mark.parametrize("name", with_few(["trainer"], GROUPS))
def test_a_collective_raises_after_the_time_out(name: str, tmp_path: Path) -> None:
    FOLDER[:] = [str(tmp_path / "store")]
    took, _ = run_ranks(2, _waits, tmp_path, name, timeout=AT_MOST + 60)
    assert SECONDS - 0.5 < took < AT_MOST  # gloo looks at its clock now and then


@pytest.mark.parametrize("value", [0, -1.0, True, "60", float("nan"), float("inf"), timedelta(0)])
def test_a_time_out_that_is_none_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"`Watchdog\(process_group_timeout=\.\.\.\)` must be"):
        Watchdog(process_group_timeout=value)
    with pytest.raises(ConfigError, match="timeout` must be "):
        Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=value)])


def _meets_twice(rank: int, folder: Path) -> None:
    method = f"file://{folder}/meeting"
    handler = InitProcessGroupKwargs(init_method=method)
    for _ in range(2):  # in a notebook, say
        Accelerator(cpu=True, kwargs_handlers=[handler]).wait_for_everyone()
    with pytest.raises(ConfigError, match="has no effect: the process group exists already"):
        Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(init_method="env://")])


def test_an_init_method_that_comes_too_late_is_refused(tmp_path: Path) -> None:
    run_ranks(2, _meets_twice, tmp_path)
