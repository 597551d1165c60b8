"""A resumed run is the same run, bit by bit (rules 29 to 31)."""

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset

from tests.helpers.callbacks import OfOneRun, Rates
from tests.helpers.ranks import RanksError, run_ranks
from tests.helpers.tiers import with_few
from trainkit import Callback, CheckpointError, ConfigError, Run, Trainer
from trainkit.callbacks import Checkpoint, Evaluation, JSONLLogger, LRMonitor
from trainkit.precision import FP16
from trainkit.strategies import FSDP
from trainkit.training.logging import LogSums

SAMPLES = 30


class Augmented(Dataset[tuple[int, Tensor, Tensor]]):
    """Noise on every sample, drawn from the global generators."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        inputs = torch.randn(5, generator=generator) + 0.1 * torch.randn(5) + 0.1 * random.random()
        target = inputs.sum().reshape(1)
        return index, inputs, target * 1e18 if index == 13 else target


class Ema:
    """An average of the weights, registered for checkpointing."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.average: list[Tensor] = []  # made when the parameters are where they stay

    def update(self) -> None:
        self.average = self._now()
        for average, parameter in zip(self.average, self.module.parameters(), strict=True):
            average.lerp_(parameter.detach(), 0.1)

    def state_dict(self) -> dict[str, Any]:
        return {"average": self._now()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        place = next(self.module.parameters()).device
        self.average = [tensor.to(place, copy=True) for tensor in state["average"]]

    def _now(self) -> list[Tensor]:
        return self.average or [p.detach().clone() for p in self.module.parameters()]


class Journal(OfOneRun):
    """Keeps what was seen; ends the process at a step, as a kill would."""

    def __init__(self, ema: Ema, die_at: int | None) -> None:
        self.ema = ema
        self.die_at = die_at
        self.seen: list[tuple[int, int, list[int], float]] = []

    def on_microbatch_start(self, run: Run, batch: Any) -> None:
        self.seen.append(
            (run.state.epoch, run.state.attempts, batch[0].tolist(), float(batch[1].sum()))
        )

    def on_step_end(self, run: Run, result: Any) -> None:
        self.ema.update()
        if run.state.attempts == self.die_at:
            raise KeyboardInterrupt

    def on_step_skipped(self, run: Run, result: Any) -> None:
        if run.state.attempts == self.die_at:
            raise KeyboardInterrupt


class Noisy(Trainer):
    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.mse_loss(model(batch[1]), batch[2])

    def evaluation_step(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        return {"loss": self.training_step(model, batch).nan_to_num(posinf=1e9)}


def fit(
    rank: int, folder: Path, die_at: int | None, resume: str | None, options: dict[str, Any]
) -> dict[str, Any]:
    options = dict(options)
    workers, accumulation = options.pop("workers", 0), options.pop("accumulation", 1)
    batch_size, precision = options.pop("batch_size", 2), options.pop("precision", "fp32")
    save = options.pop("save", {"every_n_steps": 3})
    sharding = options.pop("fsdp", None)
    if sharding is not None:
        options["strategy"] = FSDP(wrap_policy=[nn.Linear], **sharding)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Dropout(0.2), nn.Linear(9, 1))
    ema = Ema(model)
    journal = Journal(ema, die_at)
    trainer = Noisy(
        **({"max_epochs": 3} | options),
        precision=FP16(init_scale=256.0) if precision == "fp16" else precision,
        gradient_accumulation_steps=accumulation,
        max_grad_norm=1.0,
        callbacks=[journal, Evaluation(), JSONLLogger(), LRMonitor(), Checkpoint(**save)],
        output_dir=folder,
        log_every_n_steps=2,
    )
    trainer.register_for_checkpointing(ema=ema)
    try:
        result = trainer.fit(
            model,
            (
                DataLoader(Augmented(), batch_size, shuffle=True, num_workers=workers),
                DataLoader(Augmented(), 4),
            ),
            optimizer=partial(AdamW, lr=1e-2),
            lr_scheduler=lambda o: LambdaLR(o, lambda step: 1 / (1 + 0.1 * step)),
            resume=resume,
        )
        counts: Any = (result.step, result.skipped_steps, result.epoch, result.samples_seen)
    except KeyboardInterrupt:
        counts = None
    run = trainer.run
    assert run is not None
    return {
        "seen": journal.seen,
        "counts": counts,
        "resumed_from": run.checkpoints.resumed_from,
        "weights": [local(p) for p in model.parameters()],
        "ema": [local(average) for average in ema.average],
        "optimizer": [local(v) for s in run.optimizer.state.values() for v in s.values()],
        "scaler": run.precision.state_dict(),
        "draw": torch.rand(3),
        "metrics": run.metrics,
    }


def local(tensor: Tensor) -> Tensor:
    """Return a copy of what this process holds of a tensor."""
    held = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return held.detach().clone()


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, list | tuple) and a and isinstance(a[0], Tensor):
        return len(a) == len(b) and all(map(torch.equal, a, b))
    return bool(a == b)


def lines(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


CASES = [
    (1, {}, 7),
    (1, {"workers": 2}, 8),
    (2, {}, 5),
    (2, {"precision": "fp16", "accumulation": 3, "workers": 2}, 6),
    (4, {"fsdp": {"replicas": 2}, "save": {"every_n_steps": 2, "background": True}}, 7),
]
"""What else a run is made of is drawn in `right_programs`, and killed in `system`."""

FEW = [CASES[3]]


@pytest.mark.parametrize(("size", "options", "die_at"), with_few(FEW, CASES))
def test_a_resumed_run_is_the_same_run(
    size: int, options: dict[str, Any], die_at: int, tmp_path: Path
) -> None:
    whole = run_ranks(size, fit, tmp_path / "whole", None, None, options)
    first = run_ranks(size, fit, tmp_path / "cut", die_at, "auto", options)
    second = run_ranks(size, fit, tmp_path / "cut", None, "must", options)
    for before, after, expected in zip(first, second, whole, strict=True):
        assert after["resumed_from"] > 0
        start = after["seen"][0][1]
        seen = [entry for entry in before["seen"] if entry[1] < start] + after["seen"]
        assert seen == expected["seen"]
        for name in ("counts", "weights", "ema", "optimizer", "scaler", "draw", "metrics"):
            assert equal(after[name], expected[name]), name
    assert lines(tmp_path / "cut") == lines(tmp_path / "whole")


@pytest.mark.parametrize(("before", "after"), with_few([(2, 3)], [(2, 1), (1, 2), (2, 3)]))
def test_a_run_goes_on_with_other_processes(before: int, after: int, tmp_path: Path) -> None:
    options = {"batch_size": 6, "split_batches": True}
    whole = run_ranks(1, fit, tmp_path / "whole", None, None, options)[0]
    first = run_ranks(before, fit, tmp_path / "cut", 8, "auto", options)
    second = run_ranks(after, fit, tmp_path / "cut", None, "must", options)
    start = second[0]["seen"][0][1]
    seen: dict[int, set[Any]] = {}
    for result in [*first, *second]:
        part = result["seen"] if result in second else [e for e in result["seen"] if e[1] < start]
        for _, attempt, indices, _ in part:
            seen.setdefault(attempt, set()).update(indices)
    assert seen == {attempt: set(indices) for _, attempt, indices, _ in whole["seen"]}
    assert second[0]["counts"] == whole["counts"]


def test_a_checkpoint_can_be_saved_after_the_training_and_not_during_it(tmp_path: Path) -> None:
    class Impatient(Callback):
        def on_step_end(self, run: Run, result: Any) -> None:
            with pytest.raises(ConfigError, match=r"`run.request_checkpoint\(\)`"):
                trainer.save_checkpoint()

    def make(*callbacks: Callback, max_steps: int) -> Noisy:
        return Noisy(max_steps=max_steps, callbacks=callbacks, output_dir=tmp_path)

    trainer, model = make(Impatient(), max_steps=4), nn.Linear(5, 1)
    options: dict[str, Any] = {"optimizer": partial(AdamW, lr=1e-2)}
    trainer.fit(model, DataLoader(Augmented(), 2), **options)
    path = trainer.save_checkpoint()
    assert trainer.save_checkpoint() == path  # once is enough
    other = nn.Linear(5, 1)
    result = make(max_steps=4).fit(other, DataLoader(Augmented(), 2), **options, resume=path)
    assert result.step == 4
    assert torch.equal(other.weight, model.weight)


@pytest.mark.parametrize("limit", [{"max_epochs": 1}, {"max_epochs": None, "max_steps": 4}])
def test_a_run_that_had_ended_trains_no_further(limit: dict[str, Any], tmp_path: Path) -> None:
    first = fit(0, tmp_path, None, "auto", limit)
    again = fit(0, tmp_path, None, "auto", limit)
    assert again["seen"] == []
    assert again["counts"] == first["counts"]
    assert equal(again["weights"], first["weights"])


def test_the_same_directory_needs_a_resume(tmp_path: Path) -> None:
    fit(0, tmp_path, None, None, {"max_epochs": 1})
    with pytest.raises(ConfigError, match=r'holds 1 checkpoint,.*resume="auto"'):
        fit(0, tmp_path, None, None, {"max_epochs": 1})


def test_must_needs_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint that verifies"):
        fit(0, tmp_path, None, "must", {})


def test_a_changed_horizon_must_be_spelt_out(tmp_path: Path) -> None:
    fit(0, tmp_path, None, None, {"max_epochs": 1})
    with pytest.raises(CheckpointError, match=r'`max_epochs` was 1 and is 3.*schedule="keep"'):
        fit(0, tmp_path, None, "auto", {"max_epochs": 3})


@pytest.mark.parametrize("first", [1, 5])
def test_without_a_schedule_a_changed_horizon_is_what_was_meant(first: int, tmp_path: Path) -> None:
    def train(folder: Path, epochs: int) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Linear(5, 1)
        trainer = Noisy(max_epochs=epochs, callbacks=[Checkpoint()], output_dir=folder)
        optimizer = partial(AdamW, lr=0.1)
        trainer.fit(model, DataLoader(Augmented(), 10), optimizer=optimizer, resume="auto")
        return model.weight.tolist()

    train(tmp_path / "a", first)
    went_on, whole = train(tmp_path / "a", 3), train(tmp_path / "b", 3)
    assert went_on == (whole if first < 3 else train(tmp_path / "c", first))


def rates(folder: Path, epochs: int, schedule: Any) -> list[float]:
    watch = Rates()
    trainer = Noisy(max_epochs=epochs, callbacks=[watch, Checkpoint()], output_dir=folder)

    def falling(optimizer: torch.optim.Optimizer) -> LambdaLR:
        horizon = trainer.planned_steps
        assert horizon is not None
        return LambdaLR(optimizer, lambda step: max(0.0, 1 - step / horizon))

    trainer.fit(
        nn.Linear(5, 1),
        DataLoader(Augmented(), 10),
        optimizer=partial(AdamW, lr=1.0),
        lr_scheduler=falling,
        resume="auto",
        schedule=schedule,
    )
    return [round(rate, 6) for rate in watch.seen]


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("keep", [0.0, 0.0, 0.0]), ("rescale", [0.5, round(1 / 3, 6), round(1 / 6, 6)])],
)
def test_a_changed_horizon_keeps_or_stretches_the_schedule(
    schedule: str, expected: list[float], tmp_path: Path
) -> None:
    assert rates(tmp_path, 1, None) == [1.0, round(2 / 3, 6), round(1 / 3, 6)]
    assert rates(tmp_path, 2, schedule) == expected


@pytest.mark.parametrize("scheduled", [False, True])
def test_settings_that_a_resume_overrules_are_told(
    scheduled: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(steps: int, **settings: float) -> float:
        trainer = Noisy(max_steps=steps, callbacks=[Checkpoint()], output_dir=tmp_path)
        model = nn.Linear(5, 1)
        optimizer = AdamW(model.parameters(), **settings)  # type: ignore[arg-type]
        trainer.fit(
            model,
            DataLoader(Augmented(), 10),
            optimizer=optimizer,
            lr_scheduler=(lambda it: LambdaLR(it, lambda step: 0.5**step)) if scheduled else None,
            resume="auto",
            schedule="keep",
        )
        return float(optimizer.param_groups[0]["lr"])

    train(1, lr=0.1, weight_decay=0.0)
    capsys.readouterr()
    train(2, lr=0.1, weight_decay=0.0)
    assert "goes on with" not in capsys.readouterr().out
    rate = train(3, lr=0.3, weight_decay=0.0)
    assert rate == pytest.approx(0.1 * 0.5**3 if scheduled else 0.1)
    name = "initial_lr" if scheduled else "lr"
    told = f"the optimizer goes on with the checkpoint's `{name}` 0.1 (given: 0.3): a resumed run"
    assert told in capsys.readouterr().out


class Counting(SGD):
    """Counts in its groups, and hands on what it does not name."""

    def __init__(self, params: Any, lr: float, **more: Any) -> None:
        super().__init__(params, lr, **more)
        self.defaults["count"] = 0
        for group in self.param_groups:
            group["count"] = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.param_groups[0]["count"] += 1


def test_counts_of_an_optimizer_that_takes_any_keyword_are_no_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for steps, decay in ((1, 0.0), (2, 0.5)):
        trainer = Noisy(max_steps=steps, callbacks=[Checkpoint()], output_dir=tmp_path)
        optimizer = partial(Counting, lr=0.1, weight_decay=decay)
        data = DataLoader(Augmented(), 10)
        trainer.fit(nn.Linear(5, 1), data, optimizer=optimizer, resume="auto", schedule="keep")
    assert "checkpoint's `weight_decay` 0.0 (given: 0.5): a" in capsys.readouterr().out


def test_what_does_not_fit_is_listed(tmp_path: Path) -> None:
    fit(0, tmp_path, None, None, {"max_epochs": 1})
    with pytest.raises(CheckpointError, match=r"(?s)samples of a window: 2 .*, 3 now") as caught:
        fit(0, tmp_path, None, "auto", {"max_epochs": 1, "batch_size": 3, "seed": 4})
    assert "seed: 0 in the checkpoint, 4 now" in str(caught.value)


def fail_to_save(rank: int, folder: Path) -> None:
    class Huge(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"function": lambda: None} if rank == 0 else {}

    model = nn.Linear(5, 1)
    Noisy(max_steps=2, callbacks=[Huge(), Checkpoint(every_n_steps=1)], output_dir=folder).fit(
        model, DataLoader(Augmented(), 2), optimizer=partial(AdamW, lr=1e-2)
    )


def test_a_failed_save_raises_on_all_processes(tmp_path: Path) -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(2, fail_to_save, tmp_path)
    assert all("callbacks.Huge.function" in text for text in caught.value.failures.values())
    assert len(caught.value.failures) == 2
    assert not list(tmp_path.glob("checkpoints/step-*"))


def test_open_sums_go_on_to_the_last_bit() -> None:
    straight, resumed = LogSums(), LogSums()
    for value in torch.rand(100, dtype=torch.float64, generator=torch.Generator().manual_seed(0)):
        straight.add("loss", value, 3)
        saved, resumed = resumed.state_dict(), LogSums()
        resumed.load_state_dict(saved)
        resumed.add("loss", value, 3)
        assert resumed.state_dict() == straight.state_dict()
