"""What is true on an accelerator that is not CUDA: `tests/test_fake_device.py` runs it on one."""

import contextlib
import io
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import fake_device  # type: ignore[import-not-found]
import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from tests.gradient.test_several_optimizers import KINDS, MAKE, Pair
from tests.helpers.ranks import run_ranks
from tests.processes.test_starters import of_srun
from tests.resume import test_replay
from tests.strategies import test_gradient_checkpointing
from trainkit import (
    Accelerator,
    Callback,
    Combined,
    ConfigError,
    Run,
    StepResult,
    Trainer,
    find_executable_batch_size,
    notebook_launcher,
)
from trainkit.basics import rng
from trainkit.callbacks import EMA, Journal, NaNGuard
from trainkit.checkpoint.snapshot import Snapshot
from trainkit.distributed import Processes
from trainkit.large_models.recomputation import recomputation
from trainkit.precision import BF16, FP16
from trainkit.strategies import DDP, FSDP, SingleDevice, Strategy
from trainkit.testing import check_precision, check_strategy
from trainkit.testing.job import check_job
from trainkit.training.setup.consistency import describe_model
from trainkit.training.weighting import _on_device

LACKS = set(os.environ.get("FAKE_LACKS", "").split())
STEPS, WARM = 12, 4  # steps of a training, those before it is steady
PRECISIONS: dict[str, tuple[Any, int]] = {  # and how often a step makes the host wait
    "fp32": ("fp32", 0),
    "bf16": ("bf16", 0),
    "fp16": (FP16(init_scale=256.0), 1),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"max_grad_norm": 1.0, "max_grad_value": 0.5},
    "accumulated": {"gradient_accumulation_steps": 4, "max_grad_norm": 1.0},
}


@pytest.fixture(autouse=True)
def as_new() -> Any:
    yield
    fake_device.raise_on_wait(False)
    fake_device.late_everywhere(False)
    fake_device.set_limit(0, 1 << 40)
    torch.accelerator.synchronize()


def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))


def data(batch_size: int = 4) -> DataLoader[Any]:
    inputs = torch.randn(256, 12, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, (inputs.sum(1) > 0).long()), batch_size, shuffle=True)


class Waits(Callback):
    """Notes why the host waited, step by step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, int]] = []

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        self.steps.append(fake_device.waits())
        fake_device.reset()


def train(
    model: nn.Module | None = None, callbacks: Sequence[Callback] = (), **settings: Any
) -> nn.Module:
    fused = partial(torch.optim.AdamW, lr=1e-2, fused=True)
    optimizer = settings.pop("optimizer", fused)
    model = network() if model is None else model
    trainer = Trainer(max_steps=STEPS, callbacks=list(callbacks), **settings)
    trainer.fit(model, data(), optimizer=optimizer, loss_fn=nn.CrossEntropyLoss())
    return model


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_steady_step_waits_only_where_fp16_must(precision: str, settings: str) -> None:
    waits = Waits()
    plugin, expected = PRECISIONS[precision]
    model = train(
        callbacks=[waits], precision=plugin, log_every_n_steps=10**6, **SETTINGS[settings]
    )
    assert {p.device.type for p in model.parameters()} == {"fake"}
    for causes in waits.steps[WARM:-1]:
        assert sum(causes.values()) == expected, causes


def waits_of_a_rank(rank: int, strategy: type[Strategy]) -> list[dict[str, int]]:
    waits = Waits()
    train(callbacks=[waits], strategy=strategy(), max_grad_norm=1.0, log_every_n_steps=10**6)
    return waits.steps[WARM:-1]


def test_a_steady_step_of_two_processes_does_not_wait() -> None:
    for steps in run_ranks(2, waits_of_a_rank, DDP):
        assert not any(map(bool, steps)), steps


def waits_of_several(rank: int, kind: str, folder: Path, **settings: Any) -> list[dict[str, int]]:
    """Return why the steps wait of several optimizers, or of several loaders."""
    waits = Waits()
    cls, make = KINDS.get(kind, (Trainer, MAKE))
    trainer = cls(
        max_steps=STEPS,
        callbacks=[waits, Journal(), NaNGuard(), EMA()],
        output_dir=folder / kind,
        max_grad_norm=1.0,
        log_every_n_steps=10**6,
        **settings,
    )
    if kind == "loaders":
        trainer.fit(
            network(),
            Combined({"a": data(), "b": data(6)}, "max_cycle"),
            optimizer=partial(torch.optim.AdamW, lr=1e-2),
            loss_fn=nn.CrossEntropyLoss(weight=WEIGHTS.clone()),
        )
    else:
        points = TensorDataset(torch.randn(256, 2), torch.randn(256, 3))
        torch.manual_seed(0)
        loader = DataLoader(points, 4, shuffle=True)
        trainer.fit(Pair(normalises=True), loader, optimizer=make)
    return waits.steps[WARM:-1]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_steady_step_of_several_waits_once_for_each_scale(precision: str, tmp_path: Path) -> None:
    plugin, expected = PRECISIONS[precision]
    for kind in (*KINDS, "loaders"):
        scales = 2 if kind == "by name" else 1  # in a window
        for causes in waits_of_several(0, kind, tmp_path, precision=plugin):
            assert sum(causes.values()) == expected * scales, (kind, causes)


def steady_on_a_rank(rank: int, folder: Path) -> dict[str, Any]:
    kinds = (*KINDS, "loaders")
    return {kind: waits_of_several(rank, kind, folder, strategy="ddp") for kind in kinds}


def test_a_steady_step_of_several_on_two_processes_does_not_wait(tmp_path: Path) -> None:
    for found in run_ranks(2, steady_on_a_rank, tmp_path):
        for kind, steps in found.items():
            assert not any(map(bool, steps)), (kind, steps)


def test_auto_is_the_accelerator_and_learns_what_the_cpu_learns() -> None:
    on_device, on_cpu = (
        train(nn.Linear(12, 2, bias=False).requires_grad_(), strategy=strategy)
        for strategy in ("auto", SingleDevice(device="cpu"))
        if not torch.manual_seed(0).initial_seed()
    )
    assert on_device.weight.device == torch.device("fake:0")
    assert torch.allclose(on_device.weight.cpu(), on_cpu.weight, atol=1e-5)  # type: ignore[arg-type]


def test_tensors_of_two_devices_do_not_mix() -> None:
    here = torch.ones(3, device="fake:0")
    for other in (torch.ones(3), torch.ones(3, device="fake:1")):
        with pytest.raises(RuntimeError, match="same device"):
            here + other


def test_a_copy_that_nobody_waited_for_is_poison() -> None:
    target = torch.empty(3, pin_memory=True)
    target.copy_(torch.ones(3, device="fake"), non_blocking=True)
    assert target.isnan().all()
    torch.accelerator.synchronize()
    assert target.tolist() == [1.0] * 3


@pytest.mark.parametrize("late", [False, True])
def test_what_a_checkpoint_holds_has_arrived(late: bool) -> None:
    fake_device.late_everywhere(late)
    taken = Snapshot().take({"weights": torch.ones(3, device="fake:0")})
    assert taken["weights"].tolist() == [1.0] * 3


class Holds(nn.Module):
    """A model with tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
        self.second.weight = self.first.weight
        self.last = nn.Linear(12, 2)

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.last(self.second(self.first(inputs)))
        return result


@pytest.mark.parametrize("strategy", [SingleDevice, DDP])
def test_parameters_stay_the_objects_that_they_were(strategy: type[Strategy]) -> None:
    model = Holds()
    before = dict(model.named_parameters())
    start = model.last.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, strategy=strategy(), optimizer=optimizer)
    assert model.second.weight is model.first.weight
    assert all(p is before[name] for name, p in model.named_parameters())
    assert not torch.equal(model.last.weight.cpu(), start)


def test_an_own_loop_trains_the_parameters_that_the_optimizer_holds() -> None:
    accelerator = Accelerator()
    model = Holds()
    start = model.last.weight.detach().clone()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), data()
    )
    for inputs, targets in loader:
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
        optimizer.step()
    assert model.second.weight is model.first.weight
    assert not torch.equal(model.last.weight.detach().cpu(), start)


def test_an_optimizer_that_has_made_steps_counts_them_where_its_kernel_reads_them() -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(1, 12)).sum().backward()
    optimizer.step()
    _, prepared = Accelerator().prepare(model, optimizer)
    states = prepared.optimizer.state.values()
    assert {value.device.type for state in states for value in state.values()} == {"fake"}


def test_a_weight_of_the_host_is_not_copied_over() -> None:
    loss = torch.ones((), device="fake")
    fake_device.reset()
    assert _on_device(torch.tensor([4]), loss).device == loss.device
    assert "aten::_copy_from" not in fake_device.calls()


def test_batches_that_do_not_fit_are_made_smaller() -> None:
    fake_device.set_limit(0, torch.accelerator.memory_allocated(0) + 4000)
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=1 << 10)  # type: ignore[untyped-decorator]
    def run(batch_size: int) -> int:
        tried.append(batch_size)
        return torch.empty(batch_size, 4, device="fake:0").shape[0]

    assert run() == tried[-1] < tried[0]


def test_the_device_draws_from_its_own_generator() -> None:
    device = torch.device("fake:1")
    state = rng.state_dict(device)
    first = torch.rand(4, device=device)
    rng.load_state_dict(state, device)
    assert torch.equal(torch.rand(4, device=device), first)
    with rng.preserved(device):
        torch.rand(4, device=device)
    rng.load_state_dict(state, device)
    assert torch.equal(torch.rand(4, device=device), first)


@pytest.mark.parametrize("strategy", [DDP, FSDP])
def test_strategies_keep_their_contract(strategy: Callable[[], Strategy]) -> None:
    check_strategy(strategy, processes=2, timeout_seconds=500)


@pytest.mark.parametrize("precision", [BF16, partial(FP16, init_scale=256.0)])
def test_precisions_keep_their_contract(precision: Callable[[], Any]) -> None:
    check_precision(precision)


def test_an_own_loop_and_its_strategy_have_one_device() -> None:
    assert Accelerator(strategy=SingleDevice(device="cpu")).device.type == "cpu"
    given: list[dict[str, Any]] = [{"cpu": True}, {"device": "fake:3"}]
    for settings in given:
        strategy = SingleDevice()
        accelerator = Accelerator(strategy=strategy, **settings)
        assert accelerator.device == strategy.device != torch.device("fake:0")
    with pytest.raises(ConfigError, match='made with `device="fake:1"`, but'):
        Accelerator(cpu=True, strategy=SingleDevice(device="fake:1"))


def scattered_mean(rank: int) -> list[float]:
    device = Processes.start().device
    mean = torch.empty(1, device=device)
    row = torch.tensor([1.0, 2.0], device=device) + rank
    torch.distributed.reduce_scatter_single(mean, row, op=torch.distributed.ReduceOp.AVG)
    values: list[float] = mean.tolist()
    return values


def test_its_collectives_have_means_as_fsdp_uses_them() -> None:
    assert run_ranks(2, scattered_mean) == [[1.5], [2.5]]


WEIGHTS = torch.tensor([0.3, 2.0])
LOSSES: dict[str, Callable[[], Any]] = {
    "module": lambda: nn.CrossEntropyLoss(weight=WEIGHTS.clone()),
    "partial": lambda: partial(nn.functional.cross_entropy, weight=WEIGHTS),
    "both": lambda: partial(nn.CrossEntropyLoss(weight=WEIGHTS.clone())),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_tensors_of_a_loss_come_to_the_device(name: str) -> None:
    def loss(strategy: Any) -> float:
        trainer = Trainer(max_steps=1, callbacks=[], strategy=strategy)
        model, loader = network(), data()
        sgd = partial(torch.optim.SGD, lr=0.0)
        trainer.fit(model, loader, optimizer=sgd, loss_fn=LOSSES[name]())
        figures = Trainer(max_steps=1, callbacks=[], strategy=strategy).evaluate(
            model, loader, loss_fn=LOSSES[name]()
        )
        assert figures == trainer.evaluate(model, loader)
        return figures["eval/loss"]

    assert loss("auto") == pytest.approx(loss(SingleDevice(device="cpu")), rel=1e-5)


class Nested(Trainer):
    @override
    def evaluation_step(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        outputs = model(batch[0])
        return {"predictions": {"pair": (outputs, batch[1]), "rows": [{"row": x} for x in outputs]}}


def test_predictions_are_on_the_host() -> None:
    with pytest.warns(match="this loader draws"):
        scores = Trainer(max_steps=1, callbacks=[]).predict(network(), data())
    with pytest.warns(match="this loader draws"):
        nested = Nested(max_steps=1, callbacks=[]).predict(network(), data())
    for tensor in (scores, *nested["pair"], *(row["row"] for row in nested["rows"])):
        assert tensor.device.type == "cpu"


class Mixed(Callback):
    """Logs what is on the host beside what is on the device, also under one name."""

    def __init__(self) -> None:
        self.seen: dict[str, float] = {}

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        on_device = torch.tensor(3.0, device=run.strategy.device)
        run.log({"host": torch.tensor(2.0), "device": on_device})
        first, second = torch.tensor(1.0), on_device
        run.log({"first on the host": second if run.state.step % 2 == 0 else first})
        run.log({"first on the device": first if run.state.step % 2 == 0 else second}, reduce="sum")

    @override
    def on_log(self, run: Run, values: Any) -> None:
        self.seen = {**values}


def test_values_of_host_and_device_are_logged_together() -> None:
    mixed = Mixed()
    train(callbacks=[mixed], log_every_n_steps=4)
    expected = {"host": 2, "device": 3, "first on the host": 2, "first on the device": 8}
    assert {name: mixed.seen[name] for name in expected} == expected


def device_of_mine(folder: Path) -> None:
    accelerator = Accelerator()
    (folder / f"{accelerator.process_index}").write_text(str(accelerator.device))


def test_a_notebook_forks_without_a_look_after_which_cuda_works_in_no_fork(tmp_path: Path) -> None:
    before = fake_device.looks
    notebook_launcher(device_of_mine, (tmp_path,), num_processes=2)
    assert fake_device.looks == before
    assert sorted(path.read_text() for path in tmp_path.iterdir()) == ["fake:0", "fake:1"]


def the_launchers_checks(rank: int) -> tuple[int, str]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        return check_job(), printed.getvalue()


def test_trainkit_test_finds_all_well() -> None:
    (code, printed), (other, _) = run_ranks(2, the_launchers_checks)
    assert (code, other) == (0, 0), printed
    assert "device type fake" in printed


def one_too_many(rank: int) -> str:
    fake_device.set_count(1)
    if rank == 0:
        return ""
    with pytest.raises(ConfigError) as caught:
        Trainer(max_steps=1)
    return str(caught.value)


def test_more_processes_than_devices_are_refused() -> None:
    text = run_ranks(2, one_too_many)[1]
    assert "has no accelerator of its own: there are 1 for 2 processes" in text
    assert 'device="cpu"' in text


def task_with_one(rank: int) -> str:
    fake_device.set_count(1)
    os.environ.update(of_srun(rank, "2"))
    return str(Trainer(max_steps=1).processes.device)


def test_a_task_that_sees_one_device_uses_it() -> None:
    assert run_ranks(2, task_with_one) == ["fake:0", "fake:0"]


def test_inputs_of_blocks_wait_on_the_host() -> None:
    def held(checkpoint: Any) -> int:
        before = torch.accelerator.memory_allocated()
        inputs = torch.ones(1 << 12, device="fake").requires_grad_() * 2
        result = checkpoint(torch.sigmoid, inputs, use_reentrant=False)
        result.sum().backward(retain_graph=True)
        del inputs
        return torch.accelerator.memory_allocated() - before

    run, _ = recomputation("offload", None)
    assert held(torch.utils.checkpoint.checkpoint) - held(run) == 4 << 12


@pytest.mark.parametrize("device", ["xpu", "mps", "fake:99"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    with pytest.raises(ConfigError, match=f'`device` is "{device}", but on this machine'):
        Trainer(max_steps=1, strategy=SingleDevice(device=device))


class TestLesserDevice:
    """Run where `FAKE_LACKS` is set: without float64, pinned memory and streams, as MPS is.

    Nor does torch keep the random state of MPS when it computes activations again.
    """

    pytestmark = pytest.mark.skipif(not LACKS, reason="the device lacks nothing")

    def test_it_trains(self, tmp_path: Path) -> None:
        train(output_dir=tmp_path, max_grad_norm=1.0, precision="bf16")
        train(output_dir=tmp_path / "2", gradient_accumulation_steps=2)

    def test_activations_are_computed_again_with_the_same_dropout(self) -> None:
        test_gradient_checkpointing.test_the_weights_are_those_of_kept_activations(
            "single", "blocks"
        )

    def test_a_bad_sample_is_found_by_a_replay(self, tmp_path: Path) -> None:
        test_replay.test_a_bad_sample_is_named(tmp_path)

    def test_trainkit_test_finds_all_well(self) -> None:
        test_trainkit_test_finds_all_well()

    def test_it_has_no_loss_scale(self) -> None:
        with pytest.raises(ConfigError, match="no gradient scaler"):
            train(precision="fp16")


def test_what_is_compared_of_a_model_names_no_device() -> None:
    """Each process has a device of its own, which lists of parameters tell of."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ParameterList([torch.zeros(2)])).to("fake:0")
    assert "fake:0" in repr(model)
    assert "fake:0" not in repr([*describe_model("the model", model)])
