"""Tests of speed, waiting for data, and the use that is made of the device."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.data import DataLoader, Dataset

from tests.helpers.callbacks import Logged, Skips
from tests.helpers.ranks import run_ranks
from tests.helpers.toys import FEATURES, fit, make_trainer, toy_dataset, toy_loaders, toy_model
from trainkit import Callback, ConfigError, Run, Trainer
from trainkit.callbacks import Checkpoint, Evaluation, Throughput
from trainkit.callbacks.throughput import FlopCounter

ALWAYS = {
    "time/samples_per_second",
    "time/step_seconds_p50",
    "time/step_seconds_p90",
    "time/step_seconds_max",
    "time/data_wait",
}
TOKENS = 6  # of a sample, two of them hidden by the mask


class _Sleeps(Callback):
    """Makes the steps, and what lies between them, last at least so long."""

    def __init__(self, step: float = 0.0, between: float = 0.0) -> None:
        self.step = step
        self.between = between

    def on_microbatch_end(self, run: Run, batch: Any) -> None:
        time.sleep(self.step)

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        time.sleep(self.between)

    def on_evaluation_batch_end(self, run: Run) -> None:
        time.sleep(self.between)

    def on_checkpoint_start(self, run: Run) -> None:
        time.sleep(self.between)

    def on_checkpoint_saved(self, run: Run, path: Path) -> None:
        time.sleep(self.between)


class _Slow(Dataset[Any]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.01)
        return torch.ones(FEATURES), index % 2


def _logged(callback: Throughput, *others: Callback, **options: Any) -> dict[int, dict[str, float]]:
    logs = Logged("time/")
    settings = {"log_every_n_steps": 4, **options.pop("settings", {})}
    fit(make_trainer(callbacks=[callback, *others, logs], **settings), **options)
    return logs.seen


def test_the_figures_stand_under_time_at_log_steps_and_at_the_end() -> None:
    logged = _logged(Throughput(), settings={"max_steps": 6, "max_epochs": None})
    assert list(logged) == [4, 6]
    for figures in logged.values():
        assert set(figures) == ALWAYS
        assert 0 <= figures["time/data_wait"] <= 1
        assert 0 < figures["time/step_seconds_p50"] <= figures["time/step_seconds_p90"]
        assert figures["time/step_seconds_p90"] <= figures["time/step_seconds_max"]


def test_waiting_for_data_is_told_from_work() -> None:
    loader = DataLoader(_Slow(), batch_size=4)
    waiting = _logged(Throughput(), loaders=loader)[8]
    working = _logged(Throughput(), _Sleeps(step=0.02))[8]
    # Bounds that hold on a busy machine too: each log is of 4 steps of 4 samples.
    elapsed = [16 / figures["time/samples_per_second"] for figures in (waiting, working)]
    # Where batches are read ahead, the last of these steps has none to wait for.
    assert waiting["time/data_wait"] * elapsed[0] >= 12 * 0.01
    assert (1 - working["time/data_wait"]) * elapsed[1] >= 4 * 0.02
    assert waiting["time/step_seconds_p50"] >= 4 * 0.01
    assert working["time/step_seconds_p50"] >= 0.02


def test_what_lies_between_steps_counts_for_nothing(tmp_path: Path) -> None:
    between = 0.02
    others = [_Sleeps(between=between), Evaluation(every_n_steps=2), Checkpoint(every_n_steps=2)]
    start = time.perf_counter()
    logged = _logged(Throughput(), *others, settings={"output_dir": tmp_path})
    wall = time.perf_counter() - start
    trained = sum(16 / figures["time/samples_per_second"] for figures in logged.values())
    # Logs, 4 evaluations of 4 batches, and 4 checkpoints with two sleeps each.
    assert trained <= wall - between * (2 + 4 * 4 + 4 * 2)


def test_skipped_windows_are_steps_too() -> None:
    settings = {"max_steps": 2, "max_epochs": None, "log_every_n_steps": 2}
    figures = _logged(Throughput(), Skips(1, 2), _Sleeps(step=0.01), settings=settings)[2]
    assert 4 * 4 / figures["time/samples_per_second"] >= 4 * 0.01


class _Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)

    def forward(self, input_ids: Tensor, **others: Any) -> dict[str, Tensor]:
        return {"loss": self.embedding(input_ids).square().mean()}


def _sequences(*names: str) -> DataLoader[Any]:
    sample = {
        "input_ids": torch.arange(TOKENS),
        "attention_mask": (torch.arange(TOKENS) < TOKENS - 2).long(),
        "labels": torch.tensor([-100, 1, 2, 3, 4, 5]),
    }
    data: Any = [{name: sample[name] for name in ("input_ids", *names)} for _ in range(32)]
    return DataLoader(data, batch_size=4)


@pytest.mark.parametrize(
    ("names", "tokens", "expected"),
    [
        ((), None, TOKENS),
        (("labels",), None, TOKENS),
        (("attention_mask", "labels"), None, TOKENS - 2),
        ((), lambda batch: 5 * len(batch["input_ids"]), 5),
        (("labels",), lambda batch: (batch["labels"] != -100).sum(), TOKENS - 1),
    ],
)
def test_tokens_are_those_that_the_batch_tells(
    names: tuple[str, ...], tokens: Callable[[Any], Any] | None, expected: int
) -> None:
    callback = Throughput(tokens=tokens)
    settings = {"gradient_accumulation_steps": 2, "log_every_n_steps": 2}
    model, loader = _Sequences(), _sequences(*names)
    logged = _logged(callback, model=model, loaders=loader, loss_fn=None, settings=settings)
    for figures in logged.values():
        ratio = figures["time/tokens_per_second"] / figures["time/samples_per_second"]
        assert ratio == pytest.approx(expected, rel=1e-5)


def test_use_of_the_device_is_what_the_model_needs_over_the_peak() -> None:
    for flops, per, of in ((2e6, "sample", "samples"), (3e5, "token", "tokens")):
        callback = Throughput(flops=flops, flops_per=per, peak_flops=1e9)  # type: ignore[arg-type]
        logged = _logged(callback, model=_Sequences(), loaders=_sequences(), loss_fn=None)
        for figures in logged.values():
            speed = figures[f"time/{of}_per_second"]
            assert figures["time/mfu"] == pytest.approx(speed * flops / 1e9, rel=1e-5)


def test_operations_are_counted_in_the_first_window() -> None:
    callback = Throughput(flops="auto", peak_flops=1e9)
    settings = {"gradient_accumulation_steps": 2, "log_every_n_steps": 2}
    for figures in _logged(callback, settings=settings).values():
        # Two layers; the gradient of the first one's input is not needed.
        flops = 2 * (FEATURES * 8 * 2 + 8 * 2 * 3)
        expected = figures["time/samples_per_second"] * flops / 1e9
        assert figures["time/mfu"] == pytest.approx(expected, rel=1e-9)


def test_attention_on_the_cpu_is_counted() -> None:
    counter = FlopCounter(nn.Identity())
    query = torch.randn(2, 3, 5, 8, requires_grad=True)
    counter.start()
    output = scaled_dot_product_attention(query, query, query)
    forward = counter.flops
    output.sum().backward()  # type: ignore[no-untyped-call]
    counter.stop()
    scaled_dot_product_attention(query, query, query)  # no longer counted
    one = 2 * 2 * 3 * 5 * 5 * 8  # one of its products
    assert forward == 2 * one
    assert counter.flops == forward + 5 * one  # backward computes the scores again


def test_an_exception_ends_the_counting() -> None:
    class Raises(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            raise ArithmeticError("in the first forward")

    model = nn.Sequential(toy_model(), Raises())
    with pytest.raises(ArithmeticError):
        _logged(Throughput(flops="auto", peak_flops=1.0), model=model)
    assert _get_current_dispatch_mode() is None


def test_a_compiled_model_shows_no_operations() -> None:
    callback = Throughput(flops="auto", peak_flops=1.0)
    with pytest.raises(ConfigError, match="the model is compiled"):
        _logged(callback, settings={"compile": {"backend": "eager"}})


def test_a_flop_count_for_tokens_needs_tokens() -> None:
    with pytest.raises(ConfigError, match=r"tokens of a 'list' are not known. Pass"):
        _logged(Throughput(flops=1.0, flops_per="token", peak_flops=1.0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": 5}, "`tokens` must be a function"),
        ({"flops": 1.0}, "go together"),
        ({"peak_flops": 1.0}, "go together"),
        ({"flops": "all", "peak_flops": 1.0}, "`flops` must be a positive number or"),
        ({"flops": 1.0, "peak_flops": -1.0}, "`peak_flops` must be a positive number"),
        ({"flops": 1.0, "peak_flops": 1.0, "flops_per": "batch"}, "`flops_per` must be"),
        ({"flops": "auto", "peak_flops": 1.0, "flops_per": "token"}, "operations of a sample"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Throughput(**arguments)


def _on_two(rank: int) -> dict[int, dict[str, float]]:
    logs, flops = Logged("time/"), 1e6
    trainer = Trainer(
        max_epochs=1,
        callbacks=[
            Throughput(tokens=lambda batch: 3 * len(batch[0]), flops=flops, peak_flops=1e9),
            _Sleeps(step=0.03),
            logs,
        ],
        log_every_n_steps=4,
    )
    fit(trainer, (DataLoader(toy_dataset(32), batch_size=4), toy_loaders()[1]))
    trainer.close()
    return logs.seen


@pytest.mark.e2e
def test_processes_are_put_together() -> None:
    first, second = run_ranks(2, _on_two)
    assert first == second
    (figures,) = first.values()
    samples = figures["time/samples_per_second"]
    # Steps end together on both processes; their clocks differ by little.
    assert figures["time/tokens_per_second"] == pytest.approx(3 * samples, rel=0.2)
    assert figures["time/mfu"] == pytest.approx(samples * 1e6 / (2 * 1e9), rel=0.2)
