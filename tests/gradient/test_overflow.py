"""An overflow on one process skips the step on all of them (rule 9)."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.ranks import in_turn, run_ranks
from tests.helpers.tiers import with_few
from tests.helpers.toys import toy_loaders, toy_model
from trainkit import Callback, ConfigError, NonFiniteError, Run, StepResult, Trainer, TrainkitError
from trainkit.callbacks import Checkpoint
from trainkit.precision import FP16

SPOILED_STEP = 3  # counted from 0


class Watch(Callback):
    """Keeps what a skip must not change, before and after."""

    def __init__(self) -> None:
        self.before: dict[str, Any] = {}
        self.skips: list[int] = []
        self.unchanged = False
        self.gradients = 0

    def state_of(self, run: Run) -> dict[str, Any]:
        assert run.lr_schedule is not None
        state = run.optimizer.state_dict()["state"]
        return {
            "parameters": [p.detach().clone() for p in run.module.parameters()],
            "optimizer": {(i, k): v.clone() for i, s in state.items() for k, v in s.items()},
            "scheduler": dict(run.lr_schedule.scheduler.state_dict()),
            "lr": run.optimizer.param_groups[0]["lr"],
            "step": run.state.step,
        }

    def on_step_start(self, run: Run) -> None:
        self.before = self.state_of(run)

    def on_gradients(self, run: Run) -> None:
        self.gradients += 1

    def on_step_skipped(self, run: Run, result: StepResult) -> None:
        after = self.state_of(run)
        self.skips.append(run.state.step)
        self.unchanged = equal(self.before, after) and result.skipped
        assert all(p.grad is None for p in run.module.parameters())


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def spoiled_fit(rank: int, size: int, fused: bool, accumulation: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    inputs, targets = torch.randn(96, 4), torch.randn(96, 2)
    batch, window = 2, 2 * size * accumulation
    # The last slice of the window is that of the last process.
    targets[SPOILED_STEP * window + window - 1] = 1e18
    watch = Watch()
    trainer = Trainer(
        max_steps=6,
        precision=FP16(init_scale=256.0),  # so that nothing else overflows
        gradient_accumulation_steps=accumulation,
        callbacks=[watch],
    )
    result = trainer.fit(
        model,
        DataLoader(TensorDataset(inputs, targets), batch_size=batch),
        optimizer=partial(AdamW, lr=1e-2, fused=fused),
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: 0.9**step),
        loss_fn=nn.functional.mse_loss,
    )
    return {
        "step": result.step,
        "skipped": result.skipped_steps,
        "samples": result.samples_seen,
        "skips": watch.skips,
        "unchanged": watch.unchanged,
        "gradients": watch.gradients,
        "window": window,
        "scale": trainer.precision.scale,  # type: ignore[attr-defined]
        "lr": trainer.run.optimizer.param_groups[0]["lr"],  # type: ignore[union-attr]
        "weights": [p.detach().clone() for p in model.parameters()],
    }


@pytest.mark.parametrize(
    ("size", "accumulation"), with_few([(1, 1), (2, 2)], [(1, 1), (2, 2), (3, 1)])
)
def test_overflow_on_one_process_skips_on_all(size: int, accumulation: int) -> None:
    cases = [(size, fused, accumulation) for fused in (False, True)]
    ranks = run_ranks(size, in_turn, spoiled_fit, cases)
    for case, result in [numbered for results in ranks for numbered in enumerate(results)]:
        assert (result["step"], result["skipped"]) == (6, 1)
        assert result["skips"] == [SPOILED_STEP]
        assert result["unchanged"]
        assert result["gradients"] == 6  # not after an overflow
        assert result["samples"] == 7 * result["window"]  # the position moved on
        assert result["scale"] == 128.0
        assert result["lr"] == pytest.approx(1e-2 * 0.9**6)
        assert equal(result["weights"], ranks[0][case]["weights"])


def test_too_many_skips_in_a_row_end_the_run() -> None:
    data = TensorDataset(torch.randn(16, 4), torch.full((16, 2), 1e18))
    trainer = Trainer(max_steps=5, precision="fp16", callbacks=[], max_consecutive_skips=3)
    with pytest.raises(TrainkitError, match=r"4 windows in a row were skipped.*`max_consecutive"):
        trainer.fit(
            nn.Linear(4, 2),
            DataLoader(data, batch_size=2),
            optimizer=partial(AdamW, lr=1e-2),
            loss_fn=nn.functional.mse_loss,
        )


def test_the_scale_grows_at_the_same_window_after_a_resume(tmp_path: Path) -> None:
    def train(max_steps: int, **resume: Any) -> FP16:
        precision = FP16(init_scale=1024.0, growth_interval=5)
        trainer = Trainer(
            max_steps=max_steps,
            precision=precision,
            callbacks=[Checkpoint()],
            output_dir=tmp_path,
        )
        optimizer = partial(AdamW, lr=1e-3)
        loss_fn = nn.CrossEntropyLoss()
        trainer.fit(toy_model(), toy_loaders()[0], optimizer=optimizer, loss_fn=loss_fn, **resume)
        return precision

    assert train(3).scale == 1024
    assert train(6, resume="must", schedule="keep").scale == 2048


def test_an_overflow_that_only_another_process_saw_is_an_overflow() -> None:
    precision = FP16(init_scale=1024.0)
    precision.setup(torch.device("cpu"))
    model = nn.Linear(2, 1)
    optimizer = AdamW(model.parameters())
    precision.backward(model(torch.ones(1, 2)).sum())
    assert precision.unscale(optimizer, lambda found: found.fill_(1.0))
    assert precision.scale == 512


def always_overflows() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(96, 4), torch.full((96, 2), 1e18)), batch_size=2)


def named_overflow(rank: int, strategy: str) -> tuple[str | None, int, str]:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    before = [p.detach().clone() for p in model.parameters()]
    trainer = Trainer(max_epochs=5, precision="fp16", strategy=strategy, callbacks=[])  # type: ignore[arg-type]
    with pytest.raises(NonFiniteError) as caught:
        trainer.fit(
            model,
            always_overflows(),
            optimizer=partial(AdamW, lr=1e-2, weight_decay=0.1),
            loss_fn=nn.functional.mse_loss,
        )
    assert trainer.run is not None
    whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
    assert equal([p.detach() for p in whole], before)  # no update of weight decay alone
    return caught.value.parameter, trainer.run.state.skipped_steps, str(caught.value)


@pytest.mark.parametrize(
    ("size", "strategy"),
    with_few([(1, "single"), (2, "ddp")], [(1, "single"), (2, "ddp"), (2, "fsdp")]),
)
def test_a_scale_that_cannot_fall_further_ends_the_run(size: int, strategy: str) -> None:
    for parameter, skips, message in run_ranks(size, named_overflow, strategy):
        assert parameter == "0.weight"
        assert skips == 30  # from 2**16 to 2**-14
        assert "first that of `0.weight`, last that of `1.bias`" in message
        assert "the loss of process 0 is 1e+36" in message


def test_the_limit_of_skips_comes_first_where_the_scale_has_room() -> None:
    trainer = Trainer(max_epochs=5, precision=FP16(init_scale=2.0**60), callbacks=[])
    with pytest.raises(TrainkitError, match=r"65 windows in a row were skipped"):
        trainer.fit(
            nn.Linear(4, 2),
            always_overflows(),
            optimizer=partial(AdamW, lr=1e-2),
            loss_fn=nn.functional.mse_loss,
        )


def test_a_scale_that_begins_below_the_smallest_is_refused() -> None:
    with pytest.raises(ConfigError, match="`init_scale` of at least `min_scale`"):
        FP16(init_scale=1e-6)
