"""States with sharded tensors, saved by real processes."""

import os
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from tests.helpers.ranks import run_ranks
from trainkit.checkpoint import CheckpointStore
from trainkit.checkpoint.resharding.sharding import split
from trainkit.distributed import Processes
from trainkit.distributed.collectives import gather_on_main

RUN = "fixture"


def whole_parts() -> dict[str, Any]:
    """Return the state, with whole tensors; shapes that two and three processes do not divide."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 3, generator=generator)
    return {
        "model": OrderedDict(
            [
                ("embed", weight),
                ("bias", torch.arange(3, dtype=torch.int64)),
                ("single", torch.full((1, 2), 0.5, dtype=torch.bfloat16)),
                ("buffer", torch.tensor([True, False])),
                ("head", weight),
            ]
        ),
        "optimizer": {
            "state": {"embed": {"step": torch.tensor(3.0), "exp_avg": weight * 2}},
            "groups": [{"lr": 0.1, "params": ["embed"]}],
        },
        "trainer": {"objects": {"ema": {"values": [weight + 1, torch.tensor(7.0)]}}},
    }


SHARDED = {"embed", "bias", "single", "head", "exp_avg", "values"}
"""What lies in shards."""


def placed(value: Any, place: Any, key: str = "") -> Any:
    """Return a state in which `place(tensor)` stands for the tensors that lie in shards."""
    if isinstance(value, Tensor):
        return place(value) if key in SHARDED and value.ndim else value
    if isinstance(value, dict):
        return type(value)((k, placed(v, place, k)) for k, v in value.items())
    return [placed(item, place, key) for item in value] if isinstance(value, list) else value


def sharded_parts(mesh: Any, placements: list[Any]) -> dict[str, Any]:
    """Return the state with tensors that are spread over a mesh; tied ones stay so."""
    from torch.distributed.tensor import distribute_tensor

    done: dict[int, Any] = {}

    def place(tensor: Tensor) -> Any:
        if id(tensor) not in done:
            done[id(tensor)] = tensor, distribute_tensor(tensor, mesh, placements)
        return done[id(tensor)][1].detach()

    return placed(whole_parts(), place)  # type: ignore[no-any-return]


def mesh_of(shape: tuple[int, ...]) -> Any:
    """Return a mesh of all processes."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape)


def save_sharded(rank: int, directory: Path, shape: tuple[int, ...], placements: list[Any]) -> Path:
    """Save the state, as one of the processes of a mesh."""
    processes = Processes.start(device=torch.device("cpu"))
    parts, _ = split(sharded_parts(mesh_of(shape), placements), rank)
    return CheckpointStore(directory).save(
        120,
        parts,
        metadata={"run_id": RUN},
        agree=partial(gather_on_main, processes),
    )


def save(directory: Path, shape: tuple[int, ...], placements: list[Any]) -> Path:
    """Save the state by as many processes as the mesh has."""
    size = torch.Size(shape).numel()
    path: Path = run_ranks(size, save_sharded, directory, shape, placements)[0]
    return path


if __name__ == "__main__":  # makes the fixture
    from torch.distributed.tensor import Shard

    here = Path(__file__).parent / "fixtures"
    made = save(here / "made", (2,), [Shard(0)])
    made.rename(here / "format_2")
    os.rmdir(here / "made")
