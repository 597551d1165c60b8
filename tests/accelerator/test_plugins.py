"""What Accelerate's plugins and less common arguments come to, and what of them is refused."""

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, ShardingStrategy
from torch.distributed.fsdp.wrap import (
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from torch.utils.data import DataLoader

from tests.accelerator.toys import Stream, numbers
from tests.helpers.ranks import run_ranks
from trainkit import (
    Accelerator,
    ConfigError,
    DataError,
    DataLoaderConfiguration,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedError,
    FullyShardedDataParallelPlugin,
    LocalSGD,
    ProfileKwargs,
    TorchDynamoPlugin,
)
from trainkit.accelerate_compat.functions import fsdp2_prepare_model
from trainkit.accelerator.arguments import chosen_strategy, compilation
from trainkit.distributed.processes import Reduction
from trainkit.strategies import FSDP
from trainkit.strategies.blocks import find_blocks

LAYER = nn.TransformerEncoderLayer


def test_a_plugin_of_accelerate_is_a_strategy() -> None:
    plain = FullyShardedDataParallelPlugin(fsdp_version=2).strategy()
    assert (plain.reshard_after_forward, plain.cpu_offload, plain.wrap_policy) == (
        True,
        False,
        None,
    )
    chosen = FullyShardedDataParallelPlugin(
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["TransformerEncoderLayer"],
        cpu_offload=CPUOffloadPolicy(),
        activation_checkpointing=True,
        use_orig_params=True,
        state_dict_type="SHARDED_STATE_DICT",
    ).strategy()
    assert not chosen.reshard_after_forward
    assert chosen.cpu_offload
    assert chosen.activation_checkpointing
    policy: Any = chosen.wrap_policy
    assert policy("layers.0", LAYER(4, 1))
    assert not policy("head", nn.Linear(4, 1))
    by_class = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LAYER})
    given = FullyShardedDataParallelPlugin(auto_wrap_policy=by_class)
    assert given.strategy().wrap_policy == {LAYER}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"reshard_after_forward": "HALF_SHARD"}, "HYBRID_SHARD_ZERO2.*'HALF_SHARD'"),
        ({"auto_wrap_policy": "by_size"}, "SIZE_BASED_WRAP, NO_WRAP, but is 'by_size'"),
        ({"auto_wrap_policy": lambda *_: True}, r"FSDP\(wrap_policy="),
        ({"mixed_precision_policy": "bf16"}, r"Say `Accelerator\(mixed_precision=\.\.\.\)`"),
        ({"ignored_modules": "head.*"}, "`FullyShardedDataParallelPlugin.ignored_modules="),
    ],
)
def test_what_would_change_the_sharding_is_refused(settings: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FullyShardedDataParallelPlugin(**settings)


@pytest.mark.parametrize(
    ("strategy", "replicas", "reshards"),
    [
        ("NO_SHARD", "processes", True),
        (ShardingStrategy.HYBRID_SHARD, "machines", True),
        (5, "machines", False),
    ],
)
def test_strategies_of_the_first_version_say_who_holds_a_model(
    strategy: Any, replicas: str, *, reshards: bool
) -> None:
    chosen = FullyShardedDataParallelPlugin(sharding_strategy=strategy).strategy()
    assert (chosen.replicas, chosen.reshard_after_forward) == (replicas, reshards)
    offloads = {"activation_checkpointing": True, "activation_checkpointing_offload": True}
    given: Any = FullyShardedDataParallelPlugin(**offloads)
    assert given.strategy().activation_checkpointing == "offload"


def test_blocks_may_be_chosen_by_their_size() -> None:
    model = nn.Sequential(LAYER(4, 1, 8), nn.ModuleList([nn.Linear(4, 5), nn.Linear(4, 4)]))
    by_size = functools.partial(size_based_auto_wrap_policy, min_num_params=20)
    for given in (
        FullyShardedDataParallelPlugin(auto_wrap_policy=by_size),
        FullyShardedDataParallelPlugin(auto_wrap_policy="SIZE_BASED_WRAP", min_num_params=20),
    ):
        found = [*find_blocks(model, given.strategy().wrap_policy)]
        assert found == ["1.0", "0.linear2", "0.linear1", "0.self_attn", "0"]
    assert not find_blocks(model, 10**8)
    any_size = FullyShardedDataParallelPlugin(auto_wrap_policy="SIZE_BASED_WRAP")
    assert any_size.strategy().wrap_policy is None


def test_a_plugin_asks_the_launcher_for_what_it_is_not_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_ACTIVATION_CHECKPOINTING", "true")
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "SHARD_GRAD_OP")
    monkeypatch.setenv("FSDP_TRANSFORMER_CLS_TO_WRAP", "Linear,Conv2d")
    for plugin in (FullyShardedDataParallelPlugin(), None):
        chosen = chosen_strategy(None, plugin, "no")
        assert isinstance(chosen, FSDP)
        assert (chosen.activation_checkpointing, chosen.reshard_after_forward) == (True, False)
        policy: Any = chosen.wrap_policy
        assert policy("head", nn.Linear(4, 1))
        assert not policy("layers.0", LAYER(4, 1))
    told = FullyShardedDataParallelPlugin(
        activation_checkpointing=False, sharding_strategy="FULL_SHARD"
    ).strategy()
    assert (told.activation_checkpointing, told.reshard_after_forward) == (False, True)


def test_the_launcher_says_how_models_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "reduce-overhead")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_FULLGRAPH", "True")
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "False")
    said = {"backend": "eager", "mode": "reduce-overhead", "fullgraph": True}
    assert compilation(None, None) == compilation(None, TorchDynamoPlugin()) == said
    assert TorchDynamoPlugin("aot_x", dynamic=False).to_kwargs() == {
        **said,
        "backend": "aot_x",
        "dynamic": False,
    }
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "True")
    assert compilation("inductor", None) == {**said, "backend": "inductor", "dynamic": True}
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "True")
    with pytest.raises(ConfigError, match="Compile the blocks"):
        Accelerator(cpu=True)


def test_replays_that_would_overwrite_gradients_are_refused() -> None:
    accelerator = Accelerator(
        cpu=True, dynamo_plugin=TorchDynamoPlugin(backend="inductor", mode="reduce-overhead")
    )
    accelerator._preparer.sharing.device = torch.device("cuda", 0)
    with pytest.raises(ConfigError, match="overwrite the gradients of earlier micro-batches"):
        accelerator.gradient_accumulation_steps = 2
    with pytest.raises(ConfigError, match="overwrite the gradients of earlier micro-batches"):
        accelerator.prepare(nn.Linear(1, 1))


def test_settings_without_effect_are_refused() -> None:
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (TorchDynamoPlugin, {"use_regional_compilation": True}, "Compile the blocks"),
        (DistributedDataParallelKwargs, {"comm_hook": "fp8"}, "must be one of no, fp16, bf16"),
        (DistributedDataParallelKwargs, {"comm_wrapper": "power_sgd"}, "one of no, fp16, bf16"),
        (DistributedDataParallelKwargs, {"comm_wrapper": "fp16"}, "but there is none"),
        (
            DistributedDataParallelKwargs,
            {"comm_hook": "fp16", "comm_state_option": {"a": 1}},
            "is for PowerSGD",
        ),
    ]
    for make, settings, words in cases:
        with pytest.raises(ConfigError, match=words):
            make(**settings)
    hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)
    with pytest.raises(ConfigError, match="but the strategy is `fsdp`"):
        Accelerator(cpu=True, strategy=FSDP(device="cpu"), kwargs_handlers=[hook])
    with (
        pytest.raises(ConfigError, match="must be of cpu, cuda"),
        Accelerator(cpu=True).profile(ProfileKwargs(activities=["gpu"])),
    ):
        pass
    with pytest.raises(ConfigError, match="`local_sgd_steps` must be a whole number from 1 on"):
        LocalSGD(Accelerator(cpu=True), nn.Linear(1, 1), 0)


def test_a_repeated_mean_is_cut_with_a_warning() -> None:
    accelerator = Accelerator(cpu=True)
    for (batch,) in accelerator.prepare(DataLoader(numbers(6), 4)):
        if len(batch) == 4:
            accelerator.gather_for_metrics(batch.mean().repeat(4))
            continue
        with pytest.warns(UserWarning, match="4 rows for a batch of 2 samples.* is biased"):
            assert accelerator.gather_for_metrics(batch.mean().repeat(4)).tolist() == [4.5, 4.5]
        with pytest.raises(DataError, match=r"shape \(4,\), but the batch has 2 samples"):
            accelerator.gather_for_metrics(batch.mean().repeat(4), strict=True)
        with pytest.raises(DataError, match=r"shape \(3,\), but the batch has 2 samples"):
            accelerator.gather_for_metrics(batch.mean().repeat(3))


def test_options_of_deepspeed_are_named(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(1, 1))
    with pytest.warns(
        UserWarning, match=r"`save_state\(exclude_frozen_parameters=\.\.\.\)` has no"
    ):
        accelerator.save_state(tmp_path, exclude_frozen_parameters=True)
    with pytest.warns(UserWarning, match=r"`load_state\(load_module_strict=\.\.\.\)` has no"):
        accelerator.load_state(tmp_path, load_module_strict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator.load_state(tmp_path, {"weights_only": True}, map_location="cpu")


def test_what_was_left_out_and_kept_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 1))
    accelerator.save_state(tmp_path)
    other = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(2, 1))
    model.bias = nn.Parameter(torch.zeros(1))
    other.prepare(model)
    other.load_state(tmp_path, strict=False)
    said = capsys.readouterr().out
    assert "of the model 1 entries are left out (`weight`), and 2 keep their values" in said


def _reduced(rank: int) -> list[float]:
    kinds: tuple[Reduction, ...] = ("max", "min", "prod")
    accelerator, own = Accelerator(cpu=True), torch.tensor(2.0 + rank)
    return [accelerator.reduce(own, kind).item() for kind in kinds]


def test_reductions_do_what_they_are_called() -> None:
    assert run_ranks(2, _reduced) == [[3.0, 2.0, 6.0]] * 2
    with pytest.raises(ConfigError, match='Accelerate returns the sum, also for "none"'):
        Accelerator(cpu=True).reduce(torch.ones(1), "none")  # type: ignore[arg-type]


def _two(rank: int, folder: Path) -> list[str]:
    """Return what two processes are told."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        accelerator = Accelerator(cpu=True, split_batches=True)
        accelerator.prepare(number for number in range(2))
    said = [str(each.message) for each in seen]
    assert seen[1].filename == __file__
    model = accelerator.prepare(nn.Linear(1, 1))
    inner: Any = accelerator.unwrap_model(model)
    with LocalSGD(accelerator, model, 1):  # alike at each step
        accelerator.save_state(folder)
    with LocalSGD(accelerator, model, 3):
        with torch.no_grad():
            inner.weight.fill_(rank)
        try:
            accelerator.save_state(folder)
        except DistributedError as error:
            said.append(str(error))
        accelerator.save_state(folder, check_replicas=False)
    return [*said, str(inner.weight.item())]


def test_what_differs_between_processes_is_said(tmp_path: Path) -> None:
    for told in run_ranks(2, _two, tmp_path):
        divided, unshared, unlike, weight = told
        assert "has no effect, as in Accelerate since 1.0" in divided
        assert "Argument 0 of `prepare` is a `generator`" in unshared
        assert "The processes hold different models in `save_state`" in unlike
        assert weight == "0.5"


class _Broken(torch.utils.data.IterableDataset[Any]):
    """Fails at its sixth sample."""

    def __iter__(self) -> Any:
        for number in range(9):
            if number == 5:
                raise ValueError("the tape is torn")
            yield {"x": torch.tensor([float(number)]), "name": str(number), "none": None}


def _past_the_prepared(rank: int) -> list[list[str]]:
    """Return what is said of a loop that calls the model itself, and of one that does not."""
    said = []
    for passes_by in (True, False):
        accelerator = Accelerator(cpu=True)
        model = nn.Linear(1, 1)
        prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(2):
                output = (model if passes_by else prepared)(torch.ones(1, 1) * rank)
                accelerator.backward(output.sum())
                optimizer.step()
        said.append([str(each.message) for each in seen])
    return said


@pytest.mark.e2e
def test_gradients_that_no_process_averaged_are_said_once() -> None:
    for passed_by, called in run_ranks(2, _past_the_prepared):
        assert len(passed_by) == 1
        assert "gradients of a `Linear` that were not averaged over the processes" in passed_by[0]
        assert not called


def _dispatch(rank: int) -> list[Any]:
    config = DataLoaderConfiguration(dispatch_batches=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    found: list[Any] = []
    loader = DataLoader(_Broken(), 1, collate_fn=_as_lists)
    try:
        for batch in accelerator.prepare(loader):
            row = batch["x"].flatten().tolist(), batch["name"], batch["none"]
            found.append(row)
    except (DistributedError, ValueError) as error:
        found.append(str(error))
    return found


def _as_lists(samples: list[Any]) -> Any:
    rows = torch.stack([sample["x"] for sample in samples])
    return {"x": rows, "name": [sample["name"] for sample in samples], "none": None}


@pytest.mark.e2e
def test_what_process_0_cannot_read_ends_all() -> None:
    first, second = run_ranks(2, _dispatch)
    assert first[0] == ([0.0], ["0"], None)
    assert second[0] == ([1.0], ["1"], None)
    assert "the tape is torn" in first[-1]
    assert second[-1].startswith("On process 0: ")
    assert "the tape is torn" in second[-1]


def _resumed(rank: int, folder: Path, data: Any) -> tuple[Any, Any]:
    """Return the rest of a dispatched pass as it was, and as it is after a resume."""
    found = []
    for stop in (2, None):
        torch.manual_seed(0)
        config = DataLoaderConfiguration(dispatch_batches=True)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        shuffle = None if isinstance(data, Stream) else True
        loader = accelerator.prepare(DataLoader(data, 2, shuffle=shuffle))
        if stop is None:
            accelerator.load_state(folder)
        seen = []
        for count, batch in enumerate(accelerator.skip_first_batches(loader, 2 - (stop or 0)), 1):
            seen.append((torch.cat([*batch]).tolist(), torch.rand(1).item()))
            if count == stop:
                accelerator.save_state(folder)
        for batch in loader:
            seen.append((torch.cat([*batch]).tolist(), torch.rand(1).item()))
            break  # process 0 has read on
        found.append(seen)
    return found[0][2:], found[1]


@pytest.mark.e2e
@pytest.mark.parametrize("data", [numbers(17), Stream(17)], ids=["mapped", "lines"])
def test_a_dispatched_pass_goes_on_where_it_was(tmp_path: Path, data: Any) -> None:
    for before, after in run_ranks(2, _resumed, tmp_path, data):
        assert len(before) == 4  # three of the pass, and one of the next
        assert after == before


def _reference(rank: int) -> tuple[str, bool, bool, int]:
    """Return what becomes of a model that is compared with, beside one that is trained."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.rand(3, 4)
    plain = model(x)
    accelerator.prepare(nn.Linear(4, 2))
    sharded = fsdp2_prepare_model(accelerator, model).eval()
    kind = type(next(sharded.parameters())).__name__
    again = fsdp2_prepare_model(accelerator, sharded)
    return kind, torch.equal(sharded(x), plain), again is sharded, len(accelerator._models)


def test_a_reference_model_is_sharded_and_not_trained() -> None:
    assert run_ranks(2, _reference) == [("DTensor", True, True, 1)] * 2
    with pytest.raises(ConfigError, match="accelerator"):
        fsdp2_prepare_model(Accelerator(cpu=True), nn.Linear(1, 1))


def test_weights_and_biases_is_a_tracker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    accelerator = Accelerator(cpu=True, log_with="wandb")
    options = {"wandb": {"dir": str(tmp_path), "name": "first"}}
    accelerator.init_trackers("project", config={"lr": 0.1}, init_kwargs=options)
    accelerator.log({"loss": 1.0}, step=1)
    (tracker,) = accelerator.trackers
    assert tracker.name == "wandb"
    assert accelerator.get_tracker("wandb", unwrap=True) is tracker.tracker
    assert tracker.tracker.config["lr"] == 0.1
    accelerator.end_training()
