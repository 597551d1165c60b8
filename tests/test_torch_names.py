"""The torch of this environment has the names that it does not document and trainkit needs.

`make test-next-torch` runs it with the newest torch there is: what it has no more is named first.
"""

import ast
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed, nn
from torch.amp import GradScaler
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.lr_scheduler import ConstantLR, SequentialLR
from torch.utils.data import DataLoader, RandomSampler, dataloader
from torch.utils.data._utils import worker

from tests.helpers.ranks import run_ranks
from tests.test_architecture import INTERNALS, ROOT


def names_used() -> Iterator[tuple[str, str]]:
    """Yield the names that begin with an underscore, and what uses them."""
    for part in ast.parse((ROOT / INTERNALS).read_text("utf-8")).body:
        where = getattr(part, "name", "an import")
        own = {each.name for each in ast.walk(part) if isinstance(each, ast.FunctionDef)}
        for node in ast.walk(part):
            names: list[str] = []
            if isinstance(node, ast.Attribute):
                names = [node.attr]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names = [node.value]
            elif isinstance(node, ast.ImportFrom):
                names = [alias.name for alias in node.names]
            yield from ((where, n) for n in names if n[:1] == "_" and n[1:] and n not in own)


def things() -> Iterator[Any]:
    """Yield one of each thing of torch that has such names."""
    yield from (torch, torch._C, torch.ops.aten, torch.empty(0))
    yield from (dynamic_rendezvous, dataloader, worker)
    yield from (GradScaler("cpu"), RandomSampler([0]))
    passes = iter(DataLoader([0], num_workers=1))  # type: ignore[arg-type]
    yield passes
    passes._shutdown_workers()  # type: ignore[attr-defined]
    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters())
    schedule = ConstantLR(optimizer)
    optimizer.step()
    yield from (optimizer, optimizer.step)
    yield from (model, schedule, SequentialLR(optimizer, [schedule, schedule], [1]))
    store = distributed.HashStore()  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    wrapped = DistributedDataParallel(model)
    group: Any = distributed.group.WORLD
    yield from (wrapped, wrapped.reducer, group, group._get_backend(torch.device("cpu")))
    sharded: Any = fully_shard(nn.Linear(1, 1))
    state = sharded._get_fsdp_state()
    yield from (sharded, state, state._fsdp_param_group.fsdp_params[0])
    distributed.destroy_process_group()


def _gone(rank: int) -> list[str]:
    used, there = [*names_used()], set[str]()
    for thing in things():
        there |= {name for _, name in used if hasattr(thing, name)}
    return [f"`{name}`, used by `{where}`" for where, name in used if name not in there]


def test_torch_has_each_name_that_is_not_documented() -> None:
    gone = run_ranks(1, _gone)[0]
    assert len([*names_used()]) > 40
    assert not gone, f"torch {torch.__version__} has no more: {'; '.join(gone)}"
