"""Sizes of groups of processes, beside Accelerate's own."""

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn

import trainkit.accelerate_compat as accelerate
from tests.helpers.needs import late, needs_transformers
from tests.helpers.ranks import run_ranks
from trainkit import Accelerator, ConfigError, FullyShardedDataParallelPlugin
from trainkit.accelerator.parallelism import ParallelismConfig
from trainkit.strategies import DDP, FSDP

THEIRS: Any = late("accelerate.parallelism_config")
WAYS: list[dict[str, Any]] = [
    {"dp_shard_size": 4},
    {"dp_replicate_size": 4},
    {"dp_replicate_size": 2, "dp_shard_size": 2},
]
AXES = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
FACTS = [
    *("dp_dim_names", "non_dp_dim_names", "dp_shard_cp_dim_names", "dp_cp_dim_names"),
    *("fsdp_dim_names", "active_mesh_dims", "cp_backend", "sp_backend", "device_mesh"),
    *("total_size", "non_data_parallel_size", "data_parallel_size"),
    *(f"{axis}_{what}" for axis in AXES for what in ("size", "enabled")),
]


@pytest.mark.parametrize(
    "sizes",
    [
        *({}, *WAYS, {"cp_size": 2}, {"sp_size": 2}),
        pytest.param({"tp_size": 2, "dp_shard_size": 3}, marks=needs_transformers),  # Accelerate's
    ],
    ids=str,
)
def test_the_facts_are_theirs(sizes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLELISM_CONFIG_DP_SHARD_SIZE", "2")
    ours, theirs = ParallelismConfig(**sizes), THEIRS.ParallelismConfig(**sizes)
    assert accelerate.ParallelismConfig is ParallelismConfig
    assert [field.name for field in fields(ours)] == [field.name for field in fields(theirs)]
    assert {name: getattr(ours, name) for name in FACTS} == {
        name: getattr(theirs, name) for name in FACTS
    }


@pytest.mark.parametrize("sizes", [{"dp_shard_size": 0}, {"cp_backend": "x"}, {"sp_backend": "x"}])
def test_what_cannot_be_is_refused_as_there(sizes: Any) -> None:
    for kind in (ParallelismConfig, THEIRS.ParallelismConfig):
        with pytest.raises(ValueError, match=next(iter(sizes))):
            kind(**sizes)
    with pytest.raises(ConfigError, match="device"):
        ParallelismConfig().get_device_mesh()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"parallelism_config": {"tp_size": 2}}, "must be a `ParallelismConfig` of trainkit"),
        ({"parallelism_config": ParallelismConfig(tp_size=2)}, r"tp above 1.*ModelParallel"),
        ({"parallelism_config": ParallelismConfig(dp_shard_size=2)}, "is 1 times 2 on 1"),
    ],
)
def test_sizes_that_cannot_be_trained_are_refused(settings: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Accelerator(cpu=True, **settings)


def test_two_answers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    sharded = ParallelismConfig(dp_shard_size=4)
    for config, given, words in (
        (sharded, DDP(), "`dp_shard_size` is 4, but the strategy is `ddp`"),
        (ParallelismConfig(dp_replicate_size=4), FSDP(), "is 1, but the strategy is `fsdp`"),
        (sharded, FSDP(replicas=2), "`dp_replicate_size` is 1.*replicas=2"),
    ):
        with pytest.raises(ConfigError, match=words):
            config.strategy(given)
    plain = DDP()
    assert ParallelismConfig(dp_replicate_size=4).strategy(plain) is plain


def test_the_launcher_of_accelerate_says_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Accelerator(cpu=True).parallelism_config is None
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    config = Accelerator(cpu=True).parallelism_config
    assert config == ParallelismConfig()
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    with pytest.raises(ConfigError, match="tp above 1"):
        Accelerator(cpu=True)


def _trained(rank: int, **settings: Any) -> tuple[list[float], str, Accelerator]:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, **settings)
    made = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    model, optimizer = accelerator.prepare(made, torch.optim.SGD(made.parameters(), lr=0.1))
    norms = []
    for step in range(2):
        x = torch.rand(4, 4, generator=torch.Generator().manual_seed(10 * step + rank))
        accelerator.backward(model(x).square().mean())
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.05)))
        optimizer.step()
        optimizer.zero_grad()
    state = accelerator.get_state_dict(model)
    return (
        [*norms, *(float(each.sum()) for each in state.values())],
        str(accelerator.distributed_type),
        accelerator,
    )


def _mesh(mesh: Any) -> Any:
    return mesh and (mesh.mesh_dim_names, mesh.mesh.tolist(), mesh.get_coordinate())


def _each_way(rank: int) -> list[Any]:
    said = []
    usual = [{"strategy": FSDP()}, {}, {"strategy": FSDP(replicas=2)}]
    for sizes, same in zip(WAYS, usual, strict=True):
        config = ParallelismConfig(**sizes)
        got = _trained(rank, parallelism_config=config)
        want = _trained(rank, **same)
        assert got[2].parallelism_config is got[2].state.parallelism_config is config
        meshes = [
            _mesh(got[2].torch_device_mesh),
            _mesh(THEIRS.ParallelismConfig(**sizes).build_device_mesh("cpu")),
        ]
        said.append((got[:2], want[:2], meshes))
    plugin = FullyShardedDataParallelPlugin(reshard_after_forward=False)
    both = _trained(rank, fsdp_plugin=plugin, parallelism_config=ParallelismConfig(dp_shard_size=4))
    said.append((both[:2], said[0][1], [None, None]))
    given = _trained(rank, strategy=DDP(find_unused_parameters=True))
    said.append((given[:2], said[1][1], [None, None]))
    left_to_us = ParallelismConfig()
    said.append((_trained(rank, parallelism_config=left_to_us)[:2], said[1][1], [None, None]))
    assert left_to_us.data_parallel_size == 4
    return said


@pytest.mark.e2e
def test_sizes_of_groups_train_as_the_strategy_that_they_mean() -> None:
    for said in run_ranks(4, _each_way):
        for got, want, (ours, theirs) in said:
            assert got == want
            assert ours == theirs
        assert [got[1] for got, *_ in said] == [
            *("DistributedType.FSDP", "DistributedType.MULTI_CPU", "DistributedType.FSDP"),
            *("DistributedType.FSDP", "DistributedType.MULTI_CPU", "DistributedType.MULTI_CPU"),
        ]
