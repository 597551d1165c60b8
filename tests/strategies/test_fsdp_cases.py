"""What FSDP does with unusual models, optimizers and starts; each on real processes."""

import json
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from tests.helpers.needs import HAS_TRANSFORMERS_5, needs_transformers
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import with_few
from tests.strategies.toys import full, gpt2, mlp
from trainkit import Callback, CheckpointError, ConfigError, NonFiniteError, Run, Trainer
from trainkit.callbacks import NaNGuard, Summary
from trainkit.strategies import DDP, FSDP, SingleDevice
from trainkit.strategies.blocks import find_blocks

pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP gains nothing"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor"),
]


def loader(samples: int = 24, batch_size: int = 2, shuffle: bool = False) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(samples, 6, generator=generator)
    return DataLoader(
        TensorDataset(features, torch.randint(0, 3, (samples,), generator=generator)),
        batch_size=batch_size,
        shuffle=shuffle,
    )


def fit(model: nn.Module, strategy: Any = None, **arguments: Any) -> Trainer:
    """Train `model` by FSDP for a few steps; `arguments` go to the trainer or to its fit."""
    of_fit = {
        name: arguments.pop(name) for name in ("optimizer", "lr_scheduler") if name in arguments
    }
    arguments.setdefault("max_steps", 2)
    arguments.setdefault("callbacks", [])
    trainer = Trainer(strategy=strategy or FSDP(), **arguments)
    trainer.fit(
        model,
        loader(),
        loss_fn=nn.functional.cross_entropy,
        **{"optimizer": partial(SGD, lr=0.1), **of_fit},
    )
    return trainer


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(tensor) for name, tensor in model.state_dict().items()}


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def equal(a: dict[str, Tensor], b: dict[str, Tensor], atol: float = 1e-6) -> bool:
    return a.keys() == b.keys() and all(torch.allclose(a[k], b[k], 0, atol) for k in a)


# Blocks


class Twice(nn.Module):
    """Two blocks share a layer, and a third stands alone."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(layer, nn.Tanh()) for layer in (shared, shared, nn.Linear(6, 6))
        )
        self.head = nn.Linear(6, 3)

    @override
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


@needs_transformers
def test_blocks_are_found_by_structure_by_name_and_by_policy() -> None:
    assert sorted(find_blocks(mlp())) == ["0", "2", "4"]
    assert sorted(find_blocks(gpt2())) == ["transformer.h.0", "transformer.h.1"]
    assert list(find_blocks(Twice())) == ["blocks.2"]
    assert list(find_blocks(Twice(), {nn.Sequential})) == ["blocks.2"]
    assert list(find_blocks(Twice(), lambda name, module: name == "head")) == ["head"]
    nested = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert list(find_blocks(nested, {nn.Sequential, nn.Linear})) == ["0.1", "0.0", "0"]
    assert not find_blocks(nn.Linear(2, 2))


def test_a_policy_that_matches_nothing_lists_the_classes() -> None:
    with pytest.raises(ConfigError, match=r"no module .*Linear \(3\), GELU \(2\)"):
        find_blocks(mlp(), {nn.LSTM})
    with pytest.raises(ConfigError, match="classes of modules, but holds 'Linear'"):
        find_blocks(mlp(), ["Linear"])  # type: ignore[list-item]


def unusual(rank: int, size: int) -> None:
    """Shared modules, fewer rows than processes, frozen parameters: as under DDP."""

    def narrow() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 1), nn.Linear(1, 3))

    for make in (Twice, narrow, mlp):
        for freezes in (False, True):
            results = []
            for strategy in (DDP(), FSDP()):
                model = seeded(make, 4)
                if freezes:
                    next(model.parameters()).requires_grad_(False)
                fit(model, strategy, optimizer=AdamW, max_grad_norm=0.1, max_grad_value=0.05)
                results.append(weights(model))
            assert equal(results[0], results[1])


@pytest.mark.parametrize("size", with_few([], [2, 3]))
def test_unusual_models_train_as_under_ddp(size: int) -> None:
    run_ranks(size, unusual, size)


class Scalar(nn.Linear):
    def __init__(self, trains: bool) -> None:
        super().__init__(6, 3)
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=trains)

    @override
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def scalars(rank: int) -> None:
    fit(Scalar(trains=False))
    with pytest.raises(ConfigError, match=r"no dimension.*`scale`.*\(1,\)"):
        fit(Scalar(trains=True))


def turned(rank: int) -> None:
    model = nn.Linear(6, 3)
    model.weight.data = model.weight.data.t().contiguous().t()
    with pytest.raises(ConfigError, match=r"row by row.*`weight`.*\.contiguous\(\)"):
        fit(model)


def test_parameters_that_do_not_lie_row_by_row_are_named() -> None:
    run_ranks(2, turned)


def sparse(rank: int) -> None:
    model = nn.Linear(6, 3)
    model.words = nn.Embedding(5, 6, sparse=True)
    with pytest.raises(ConfigError, match=r"sparse gradients, which torch cannot.*`words`.*ddp"):
        fit(model)
    model.words.requires_grad_(False)
    fit(model)


@pytest.mark.e2e
def test_a_module_with_sparse_gradients_is_named() -> None:
    run_ranks(2, sparse)


@pytest.mark.e2e
def test_scalars_may_be_frozen_but_not_trained() -> None:
    run_ranks(2, scalars)


# Optimizers


def ready_made(rank: int) -> None:
    results = []
    for strategy in (DDP(), FSDP()):
        model = seeded(mlp)
        first, *others = model.parameters()
        groups: list[dict[str, Any]] = [{"params": others}, {"params": [first], "lr": 0.5}]
        optimizer = AdamW(groups, lr=0.01)
        schedule = StepLR(optimizer, 1, 0.5)
        trainer = fit(model, strategy, optimizer=optimizer, lr_scheduler=schedule)
        assert trainer.run is not None
        assert trainer.run.optimizer is optimizer
        assert [len(group["params"]) for group in optimizer.param_groups] == [5, 1]
        assert [group["lr"] for group in optimizer.param_groups] == [0.0025, 0.125]
        assert optimizer.param_groups[1]["params"][0] is next(model.parameters())
        results.append(weights(model))
        fit(model, strategy, optimizer=optimizer)  # of what is sharded already
    assert equal(results[0], results[1])

    model = seeded(mlp)
    optimizer = AdamW(model.parameters())
    model(torch.randn(2, 6)).sum().backward()
    optimizer.step()
    with pytest.raises(ConfigError, match=r"has state for the full parameters.*partial\(AdamW"):
        fit(model, optimizer=optimizer)
    with pytest.raises(ConfigError, match="not parameters of `Sequential`"):
        fit(seeded(mlp), optimizer=AdamW(mlp().parameters()))


@pytest.mark.e2e
def test_a_ready_made_optimizer_is_moved_to_the_sharded_parameters() -> None:
    run_ranks(2, ready_made)


def second_fit(rank: int) -> None:
    model = seeded(mlp)
    trainer = fit(model)
    fit(model)
    fit(model, gradient_accumulation_steps=2)
    with pytest.raises(
        ConfigError, match=r"precision of its parameters, .*cannot change to `bf16`"
    ):
        fit(model, precision="bf16")
    figures = trainer.evaluate(model, loader(7))
    plain = seeded(mlp)
    plain.load_state_dict(weights(model))
    assert figures == pytest.approx(trainer.evaluate(plain, loader(7)))
    assert torch.allclose(trainer.predict(model, loader(7)), trainer.predict(plain, loader(7)))
    assert all(hasattr(p, "full_tensor") for p in model.parameters())  # sharded again


def test_a_sharded_model_is_trained_again_and_evaluated() -> None:
    run_ranks(2, second_fit)


# Starts


def unlike_starts(rank: int) -> None:
    model = seeded(mlp, rank)
    fit(model, optimizer=partial(SGD, lr=0.0))
    assert equal(weights(model), seeded(mlp).state_dict(), 0)


@pytest.mark.e2e
def test_every_process_starts_from_the_values_of_process_0() -> None:
    run_ranks(2, unlike_starts)


class WithBuffers(nn.Sequential):
    """Has statistics, a table that is not saved, and tied weights."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3), nn.Linear(4, 3))
        self[3].weight = self[2].weight
        self.register_buffer("table", torch.empty(3), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.table.copy_(torch.arange(3.0))

    @override
    def forward(self, x: Tensor) -> Tensor:
        hidden = self[1](self[0](x))
        return self[2](hidden) + self[3](hidden) + self.table  # type: ignore[no-any-return]


def from_meta(rank: int) -> None:
    for make in (WithBuffers, gpt2):
        real = seeded(make)
        with torch.device("cpu" if rank == 0 else "meta"):
            model = seeded(make)
        strategy = FSDP()
        strategy.setup()
        strategy.wrap(model, Trainer(max_steps=1, callbacks=[]).precision)
        assert equal(weights(model), real.state_dict(), 0)
        assert len(list(model.parameters())) == len(list(real.parameters()))  # still tied
    with torch.device("cpu" if rank == 0 else "meta"):
        model = seeded(WithBuffers)
    fit(model)
    other = seeded(WithBuffers)
    fit(other)
    assert equal(weights(model), weights(other), 0)


@needs_transformers
def test_the_values_of_process_0_fill_models_on_the_meta_device() -> None:
    run_ranks(2, from_meta)


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def gpt2_can_be_filled() -> AbstractContextManager[Any]:
    """Return a block that raises before transformers 5, which leaves buffers without values."""
    if HAS_TRANSFORMERS_5:
        return nullcontext()
    return pytest.raises(ConfigError, match=r"have no values: `transformer\.h\.\d\.attn\.")


def initialized(rank: int, seed: int) -> list[dict[str, Tensor]]:
    results = []
    for make in (mlp, WithBuffers, gpt2):
        model = on_meta(make)
        strategy = FSDP()
        strategy.setup()
        with gpt2_can_be_filled() if make is gpt2 else nullcontext():
            strategy.wrap(model, Trainer(max_steps=1, callbacks=[]).precision, seed)
            tensors = weights(model) | {name: b.clone() for name, b in model.named_buffers()}
            assert not any(t.isnan().any() for t in tensors.values())
            results.append(tensors)
    return results


@pytest.mark.e2e
@needs_transformers
def test_a_model_initialises_itself_alike_on_any_number_of_processes() -> None:
    one, two, three = (run_ranks(size, initialized, 5)[0] for size in (1, 2, 3))
    for number, tensors in enumerate(one):
        assert equal(tensors, two[number], 0)
        assert equal(tensors, three[number], 0)
    assert one[1]["table"].tolist() == [0, 1, 2]
    assert one[1]["1.running_var"].tolist() == [1, 1, 1, 1]
    if HAS_TRANSFORMERS_5:
        name = "transformer.h.1.mlp.c_proj.weight"
        expected = gpt2().get_parameter(name).std()  # newer transformers scale it by depth
        assert one[2][name].std().item() == pytest.approx(expected.item(), rel=0.2)
    assert not torch.equal(one[0]["0.weight"], run_ranks(1, initialized, 6)[0][0]["0.weight"])


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)
        self.offset = nn.Parameter(torch.zeros(3))
        self.register_buffer("places", torch.arange(3), persistent=False)


def bare(rank: int) -> None:
    with pytest.raises(ConfigError, match=r"`offset`, `places`.*`reset_parameters\(\)`"):
        fit(on_meta(Bare))
    for strategy in (DDP(), "ddp"):
        with pytest.raises(ConfigError, match=r"meta device.*`strategy=\"fsdp\"` can fill it"):
            fit(on_meta(mlp), strategy)
    with torch.device("meta" if rank == 0 else "cpu"):
        model = mlp()
    with pytest.raises(ConfigError, match=r"process 0 is on the meta device, but not that of .* 1"):
        fit(model)


@pytest.mark.e2e
def test_what_cannot_be_filled_is_named() -> None:
    run_ranks(2, bare)
    with pytest.raises(ConfigError, match="meta device: its parameters have no values"):
        fit(on_meta(mlp), SingleDevice())


def from_files(rank: int, folder: Path) -> None:
    model = on_meta(WithBuffers)
    fit(model, FSDP(weights=folder / "whole"), optimizer=partial(SGD, lr=0.0), max_steps=1)
    parameters = dict(seeded(WithBuffers).named_parameters())
    assert all(torch.equal(full(p), parameters[name]) for name, p in model.named_parameters())
    assert model.get_buffer("table").tolist() == [0, 1, 2]

    tied = on_meta(gpt2)
    strategy = FSDP(weights=folder / "parts")
    strategy.setup()
    with gpt2_can_be_filled():
        strategy.wrap(tied, Trainer(max_steps=1, callbacks=[]).precision)
        assert equal(weights(tied), seeded(gpt2).state_dict(), 0)

    with pytest.raises(CheckpointError, match=r"(?s)`0.weight`: \[4, 6\] in.*not hold.*`4.bias`"):
        fit(on_meta(mlp), FSDP(weights=folder / "whole"))
    with pytest.raises(CheckpointError, match=r"none of `model.safetensors`"):
        fit(on_meta(mlp), FSDP(weights=folder))
    with pytest.raises(ConfigError, match="`weights` is for a model on the meta device"):
        fit(mlp(), FSDP(weights=folder / "whole"))


@pytest.mark.e2e
@needs_transformers
def test_a_model_on_the_meta_device_is_read_from_files(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    (tmp_path / "whole").mkdir()
    state = seeded(WithBuffers).state_dict()
    del state["3.weight"]  # tied, and saved once
    save_file(state, tmp_path / "whole" / "model.safetensors")
    model: Any = seeded(gpt2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(tmp_path / "parts", max_shard_size="10KB")
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    run_ranks(2, from_files, tmp_path)


# Steps


def statistics(rank: int) -> None:
    """Batch statistics are those of process 0, as under DDP; also with uneven windows."""
    results = []
    for strategy in (DDP(), FSDP()):
        model = seeded(lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)))
        trainer = Trainer(
            strategy=strategy, max_epochs=2, gradient_accumulation_steps=2, callbacks=[]
        )
        loss_fn = nn.functional.cross_entropy
        trainer.fit(model, loader(22, 4), loss_fn=loss_fn, optimizer=partial(SGD, lr=0.1))
        trainer.strategy.share_buffers(model)
        results.append(weights(model))
    assert equal(results[0], results[1])


@pytest.mark.e2e
def test_buffers_are_those_of_process_0() -> None:
    run_ranks(2, statistics)


class Spoiler(Callback):
    """Makes the gradient of one row overflow on every process, and so one shard."""

    def __init__(self) -> None:
        self.before: list[Tensor] = []
        self.skipped: list[bool] = []

    @override
    def on_step_start(self, run: Run) -> None:
        self.before = [full(p) for p in run.parameters]

    @override
    def on_microbatch_end(self, run: Run, batch: Any) -> None:
        if run.state.attempts != 1:
            return
        gradient = run.parameters[0].grad
        assert gradient is not None
        if run.processes.process_index == run.processes.num_processes - 1:
            gradient.to_local()[0, 0] = float("inf")  # type: ignore[attr-defined]

    @override
    def on_step_skipped(self, run: Run, result: Any) -> None:
        state = run.optimizer.state_dict()["state"]
        self.skipped = [
            torch.equal(full(p), before)
            for p, before in zip(run.parameters, self.before, strict=True)
        ] + [all(entry["step"] == 1 for entry in state.values())]


def overflow(rank: int, fused: bool) -> None:
    spoiler = Spoiler()
    model = seeded(mlp)
    trainer = fit(
        model,
        precision="fp16",
        max_steps=4,
        callbacks=[spoiler],
        optimizer=partial(AdamW, fused=fused),
        lr_scheduler=partial(StepLR, step_size=1, gamma=0.5),
    )
    assert trainer.run is not None
    assert spoiler.skipped
    assert all(spoiler.skipped)
    assert (trainer.run.state.step, trainer.run.state.skipped_steps) == (4, 1)
    assert trainer.precision.scale == 2.0**15  # type: ignore[attr-defined]
    assert trainer.run.optimizer.param_groups[0]["lr"] == 1e-3 * 0.5**4
    assert all(full(p).isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("size", with_few([2], [2, 3]))
def test_an_overflow_on_one_shard_skips_on_all(size: int, fused: bool) -> None:
    run_ranks(size, overflow, fused)


class Bad(Callback):
    """Makes one gradient of the second step infinite, on one shard."""

    @override
    def on_gradients(self, run: Run) -> None:
        if run.state.step == 1:
            for gradient in run.strategy.local_gradients(run.parameters[2:3])[-1:]:
                if run.processes.process_index == 1:
                    gradient[0] = float("nan")


def guarded(rank: int) -> None:
    with pytest.raises(NonFiniteError, match=r"After step 1, the gradient of `2.weight`"):
        fit(seeded(mlp), callbacks=[Bad(), NaNGuard(), Summary()], max_steps=3)
    with pytest.raises(Exception, match="windows in a row were skipped"):
        fit(seeded(mlp), callbacks=[Bad(), NaNGuard("skip")], max_steps=3, max_consecutive_skips=2)


@pytest.mark.e2e
def test_the_guard_finds_a_bad_gradient_on_one_shard(capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(2, guarded)
    assert "training Sequential" in capfd.readouterr().out


# Processes


def alone(rank: int) -> None:
    with pytest.warns(UserWarning, match="FSDP gains nothing on one process"):
        trainer = fit(seeded(mlp), "fsdp")
    trainer.close()
    assert not torch.distributed.is_initialized()
    fit(seeded(mlp), "single")
    with pytest.raises(ConfigError, match=r"`replicas` must divide .* 2 on 1"):
        FSDP(replicas=2).setup()


@pytest.mark.e2e
def test_one_process_works_and_says_that_it_gains_nothing() -> None:
    run_ranks(1, alone)


def uneven_use(rank: int) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)

        @override
        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)  # type: ignore[no-any-return]

    fit(Half(), max_grad_norm=1.0, precision="fp16")


@pytest.mark.e2e
def test_parameters_that_no_process_uses_are_left_alone() -> None:
    run_ranks(2, uneven_use)


class Uneven(nn.Module):
    """Leaves out one module on one process."""

    def __init__(self, left_out: str, rank: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.head, self.extra = nn.Linear(6, 3), nn.Linear(6, 3)
        self.left_out = left_out if rank == 1 else ""

    @override
    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if self.left_out != f"blocks.{number}":
                x = block(x)
        return self.head(x) if self.left_out == "extra" else self.head(x) + self.extra(x)  # type: ignore[no-any-return]


def second_of_two(rank: int) -> None:
    strategy = FSDP()
    strategy.setup()
    precision = Trainer(max_steps=1, callbacks=[]).precision
    models = [Uneven("", rank), Uneven("extra", rank)]
    for model in models:
        strategy.wrap(model, precision)
    models[0](torch.randn(2, 6))
    with pytest.raises(ConfigError, match=r"2 trainable.*on some processes only"):
        models[1](torch.randn(2, 6))


@pytest.mark.e2e
def test_each_of_two_sharded_models_is_compared() -> None:
    run_ranks(2, second_of_two)


def parts_used_by_one(rank: int) -> None:
    fit(Uneven("", rank))
    model = Uneven("extra", rank)
    with pytest.raises(ConfigError, match=r"2 trainable.*on some processes only \(`extra.bias`"):
        fit(model)
    assert len(model._forward_hooks) == 2  # torch's and the strategy's: what compared is gone
    model = Uneven("blocks.2", rank)
    with pytest.raises(ConfigError, match=r"came to the block `blocks\.2`, process 1 to the end"):
        fit(model)


@pytest.mark.e2e
def test_what_only_some_processes_use_is_named_instead_of_waited_for() -> None:
    run_ranks(2, parts_used_by_one)


def trained_by_others(rank: int) -> None:
    model = seeded(mlp)
    fit(model)
    with pytest.raises(ConfigError, match='sharded already, and strategy "ddp" cannot'):
        fit(model, DDP())


@pytest.mark.e2e
def test_other_strategies_refuse_a_sharded_model() -> None:
    run_ranks(2, trained_by_others)
