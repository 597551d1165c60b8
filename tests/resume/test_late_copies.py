"""What is copied to the CPU has arrived before anything reads it, whatever device it comes from.

The device here is "meta": torch refuses to copy from it to the CPU, so a copy that nobody may make
is an error. What waits for copies that are made is recorded; a real device shows the rest.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from tests.helpers.ranks import run_ranks
from tests.helpers.toys import fit
from trainkit import Accelerator, Callback, ConfigError, Run, Trainer
from trainkit.checkpoint import snapshot
from trainkit.precision import FP16
from trainkit.precision.fp16 import scaled_loss
from trainkit.strategies import FSDP

META = torch.device("meta")


def bound(device: str) -> tuple[FP16, nn.Parameter, SGD]:
    precision = FP16(init_scale=256.0)
    precision.setup(torch.device("cpu"))
    parameter = nn.Parameter(torch.ones(4, device=device))
    optimizer = SGD([parameter], lr=0.1)
    precision.bind(optimizer)
    return precision, parameter, optimizer


def test_the_loss_scale_lies_where_the_gradients_do() -> None:
    precision, parameter, optimizer = bound("cpu")
    loss = torch.ones((), device=META, requires_grad=True)
    precision.backward(loss)
    assert loss.grad is not None
    assert loss.grad.device == META
    parameter.grad = torch.full((4,), 256.0)
    assert precision.unscale(optimizer, lambda overflow: overflow) is False
    assert parameter.grad.tolist() == [1.0] * 4


def test_a_loss_on_the_cpu_goes_to_the_scale() -> None:
    precision, _, _ = bound("meta")
    loss = torch.ones((), requires_grad=True)
    assert scaled_loss(precision.scaler, loss).device == META  # the scale cannot come to the CPU


def test_gradients_on_two_devices_are_refused() -> None:
    precision = FP16()
    precision.setup(torch.device("cpu"))
    parameters = [nn.Parameter(torch.ones(1, device=device)) for device in ("cpu", "meta")]
    with pytest.raises(ConfigError, match="on several devices"):
        precision.bind(SGD(parameters, lr=0.1))


class ScaleDevice(Callback):
    def on_fit_start(self, run: Run) -> None:
        assert isinstance(run.precision, FP16)
        scale = run.precision.scaler._scale
        assert scale is not None  # before the first loss
        self.found = str(scale.device), {str(p.device) for p in run.module.parameters()}


def offloaded(rank: int) -> Any:
    callback = ScaleDevice()
    trainer = Trainer(
        max_steps=2,
        strategy=FSDP(cpu_offload=True),
        precision=FP16(init_scale=256.0),
        callbacks=[callback],
    )
    fit(trainer)
    return callback.found


def test_before_the_first_step_of_an_offloaded_model_the_scale_is_beside_its_parameters() -> None:
    assert run_ranks(2, offloaded) == [("cpu", {"cpu"})] * 2


def test_an_own_loop_places_the_scale_when_the_optimizer_is_prepared() -> None:
    accelerator = Accelerator(mixed_precision="fp16")
    model = nn.Linear(2, 1)
    accelerator.prepare(model, SGD(model.parameters(), lr=0.1))
    assert accelerator.scaler is not None
    assert accelerator.scaler._scale is not None


def waits(monkeypatch: pytest.MonkeyPatch, kind: str, state: Any) -> tuple[list[str], list[bool]]:
    """Return what a snapshot waits for where `kind` is the accelerator, and how it copies."""
    waited: list[str] = []
    late: list[bool] = []

    def copy(targets: list[Tensor], sources: list[Tensor], non_blocking: bool) -> None:
        assert not waited  # they come first
        late.append(non_blocking)

    with monkeypatch.context() as patch:
        patch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device(kind))
        patch.setattr(torch.accelerator, "synchronize", lambda device: waited.append(str(device)))
        patch.setattr(torch, "_foreach_copy_", copy)
        patch.setattr(snapshot, "refused_tensor", lambda tensor: None)
        snapshot.Snapshot().take(state)
    return sorted(waited), late


def test_a_snapshot_waits_for_a_device_of_any_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    state = [torch.ones(2, device=META), torch.ones(4)]
    assert waits(monkeypatch, "meta", state) == (["meta"], [True])


def test_a_snapshot_of_tensors_on_the_cpu_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert waits(monkeypatch, "meta", [torch.ones(2)]) == ([], [False])


def test_copies_from_a_device_that_cannot_be_waited_for_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert waits(monkeypatch, "xpu", [torch.ones(2, device=META)]) == ([], [False])


def test_what_an_own_loop_sends_to_the_cpu_has_arrived() -> None:
    from trainkit.accelerator.operations import send_to_device

    seen: list[bool] = []

    class Part:
        def to(self, device: Any, non_blocking: bool) -> "Part":
            seen.append(non_blocking)
            return self

    for device in ("cpu", "meta"):
        send_to_device(Part(), device, non_blocking=True)
    assert seen == [False, True]
