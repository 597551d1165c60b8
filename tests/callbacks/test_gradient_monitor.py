"""Tests of the norms and histograms of gradients."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.callbacks import Skips
from tests.helpers.ranks import run_ranks
from tests.helpers.toys import FEATURES, fit, make_trainer, toy_model
from trainkit import Callback, ConfigError, Run, StepResult
from trainkit.callbacks import DeviceMonitor, GradientMonitor, TensorBoardLogger, Throughput
from trainkit.callbacks._support.gradient_values import Histogram
from trainkit.strategies import FSDP
from trainkit.testing import task

NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]


class _Keeps(Callback):
    """Keeps the gradients themselves, those that were logged, and what was drawn."""

    def __init__(self) -> None:
        self.gradients: dict[int, dict[str, torch.Tensor]] = {}
        self.logged: dict[int, dict[str, float]] = {}
        self.drawn: dict[int, dict[str, Histogram]] = {}

    def on_gradients(self, run: Run) -> None:
        self.gradients[run.state.step + 1] = {
            name: p.grad.clone() for name, p in run.module.named_parameters() if p.grad is not None
        }

    def on_log(self, run: Run, values: dict[str, float]) -> None:
        self.logged[run.state.step] = {
            n.removeprefix("grad_norm/"): v for n, v in values.items() if "/" in n
        }

    def add_histogram(self, run: Run, name: str, histogram: Histogram) -> None:
        self.drawn.setdefault(run.state.step, {})[name] = histogram


def _kept(depth: int | None = None, *others: Callback, **settings: Any) -> _Keeps:
    keeps = _Keeps()
    callbacks = [*others, keeps, GradientMonitor(depth=depth, histograms=keeps)]
    settings = {"log_every_n_steps": 4, "max_grad_norm": 1e-3, **settings}
    fit(make_trainer(callbacks=callbacks, **settings))
    return keeps


def test_norms_are_those_before_clipping_by_parameter() -> None:
    keeps = _kept(gradient_accumulation_steps=2)
    assert list(keeps.logged) == [4]
    for step, norms in keeps.logged.items():
        assert list(norms) == sorted(NAMES)
        for name, norm in norms.items():
            assert norm == pytest.approx(keeps.gradients[step][name].norm().item(), rel=1e-6)


def test_parts_of_names_put_parameters_together() -> None:
    keeps = _kept(depth=1)
    expected = {
        key: torch.cat([g.reshape(-1) for n, g in keeps.gradients[8].items() if n[0] == key])
        for key in ("0", "2")
    }
    assert keeps.logged[8] == pytest.approx({k: v.norm().item() for k, v in expected.items()})
    for key, values in expected.items():
        histogram = keeps.drawn[8][f"gradients/{key}"]
        assert (histogram.low, histogram.high) == (values.min().item(), values.max().item())
        counts, edges = torch.histogram(values.double(), 64, range=tuple(histogram.edges[::64]))
        assert histogram.counts == counts.tolist()
        assert histogram.edges == pytest.approx(edges.tolist())


def test_a_skipped_window_is_not_logged() -> None:
    # Before and after the monitor: the request may come when the norms are there already.
    for others in ([Skips(3)], []):
        keeps = _Keeps()
        callbacks = [*others, keeps, GradientMonitor(), *([] if others else [Skips(3)])]
        fit(make_trainer(callbacks=callbacks, log_every_n_steps=4, max_steps=6))
        for step, norms in keeps.logged.items():
            last = keeps.gradients[step]["0.bias"]
            assert norms["0.bias"] == pytest.approx(last.norm().item(), rel=1e-6)


def test_parameters_without_gradients_are_left_out() -> None:
    keeps, model = _Keeps(), toy_model()
    model[0].requires_grad_(False)  # type: ignore[index]
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    fit(make_trainer(callbacks=[keeps, GradientMonitor()], log_every_n_steps=4), model=model)
    assert list(keeps.logged[8]) == ["2.bias", "2.weight"]


class _Sets(Callback):
    """Makes the gradients what they are to be."""

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def on_gradients(self, run: Run) -> None:
        for p in run.parameters:
            assert p.grad is not None
            p.grad.zero_()
            p.grad.view(-1)[: len(self.values)] = torch.tensor(self.values)


def test_values_that_are_not_finite_show_in_the_norm_and_not_in_the_histogram() -> None:
    keeps = _kept(None, _Sets([torch.inf, -3.0]), max_steps=4, max_grad_norm=None)
    assert keeps.logged[4]["0.bias"] == torch.inf
    histogram = keeps.drawn[4]["gradients/0.bias"]
    assert (histogram.low, histogram.high) == (-3.0, 0.0)
    assert sum(histogram.counts) == 8 - 1
    keeps = _kept(None, _Sets([torch.nan] * 2), max_steps=4, max_grad_norm=None)
    assert keeps.logged[4]["2.bias"] != keeps.logged[4]["2.bias"]
    assert "gradients/2.bias" not in keeps.drawn[4]


def test_gradients_of_one_value_have_a_histogram_around_it() -> None:
    for values in ([0.0], [5.0] * 2):
        histogram = _kept(None, _Sets(values), max_steps=4).drawn[4]["gradients/2.bias"]
        assert histogram.low < values[0] < histogram.high
        assert sum(histogram.counts) == 2


def test_half_precision_loses_no_digits_of_the_norm() -> None:
    class Halves(_Sets):
        def on_gradients(self, run: Run) -> None:
            for p in run.parameters:
                p.grad = torch.full_like(p, 0.1)

    keeps, model = _Keeps(), toy_model().to(torch.bfloat16)
    trainer = make_trainer(callbacks=[Halves([]), keeps, GradientMonitor()], log_every_n_steps=4)
    data = [(torch.ones(FEATURES, dtype=torch.bfloat16), 0)] * 16
    fit(trainer, torch.utils.data.DataLoader(data, batch_size=4), model)  # type: ignore[arg-type]
    expected = torch.full((32,), 0.1, dtype=torch.bfloat16).float().norm().item()
    assert keeps.logged[4]["0.weight"] == pytest.approx(expected, rel=1e-6)


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that torch runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


class _Counts(Callback):
    """Counts the operations of each step."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def on_step_start(self, run: Run) -> None:
        self.mode = _Counting()
        self.mode.__enter__()  # type: ignore[no-untyped-call]

    def on_step_end(self, run: Run, result: StepResult) -> None:
        self.mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.calls.append(self.mode.calls)


def test_nothing_is_computed_off_the_log_steps() -> None:
    def calls(*watched: Callback) -> list[int]:
        counts, log = _Counts(), _Keeps()
        log.on_gradients = Callback.on_gradients.__get__(log)  # type: ignore[method-assign]
        callbacks = [*watched, counts, log]
        fit(make_trainer(callbacks=callbacks, log_every_n_steps=4, max_steps=7))
        return counts.calls

    keeps = _Keeps()
    alone = calls()
    watched = calls(GradientMonitor(histograms=keeps), Throughput(), DeviceMonitor())
    due = [step in (4, 7) for step in range(1, 8)]
    assert [a == b for a, b in zip(alone, watched, strict=True)] == [not each for each in due]


def _write(folder: Path, **settings: Any) -> EventAccumulator:
    tensorboard = TensorBoardLogger()
    callbacks = [GradientMonitor(histograms=tensorboard, bins=8), tensorboard]
    fit(make_trainer(callbacks=callbacks, output_dir=folder, log_every_n_steps=4, **settings))
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"histograms": 0})
    return events.Reload()


def test_tensorboard_reads_the_histograms(tmp_path: Path) -> None:
    events = _write(tmp_path)
    assert sorted(events.Tags()["histograms"]) == sorted(f"gradients/{n}" for n in NAMES)
    found = events.Histograms("gradients/0.weight")
    assert [event.step for event in found] == [4, 8]
    value = found[-1].histogram_value
    assert sum(value.bucket) == value.num == 32
    assert value.bucket_limit[-1] == value.max
    norm = events.Scalars("train/grad_norm/0.weight")[-1].value
    assert value.sum_squares == pytest.approx(norm**2, rel=0.2)  # to the width of the bins


def test_a_logger_outside_of_the_run_is_an_error() -> None:
    callback = GradientMonitor(histograms=TensorBoardLogger())
    with pytest.raises(ConfigError, match="is not among the callbacks of the run"):
        fit(make_trainer(callbacks=[callback, _Keeps()], log_every_n_steps=4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"depth": 0}, "`depth` must be a whole number from 1 on"),
        ({"bins": None}, "`bins` must be a whole number from 1 on"),
        ({"histograms": True}, "Pass the `TensorBoardLogger"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GradientMonitor(**arguments)


def _on(rank: int, size: int, strategy: Callable[[], Any]) -> Any:
    keeps = _Keeps()
    keeps.on_gradients = Callback.on_gradients.__get__(keeps)  # type: ignore[method-assign]
    trainer = make_trainer(
        callbacks=[GradientMonitor(histograms=keeps, bins=4), keeps],
        log_every_n_steps=2,
        max_steps=2,
        strategy=strategy(),
    )
    task.fit(trainer, task.Network(), task.loaders(task.GLOBAL_BATCH // size))
    trainer.close()
    drawn = keeps.drawn.get(2, {})
    return keeps.logged[2], {name: (h.low, h.high, h.counts) for name, h in drawn.items()}


@pytest.mark.e2e
@pytest.mark.parametrize(
    "strategy", [lambda: "ddp", FSDP, lambda: FSDP(replicas=2)], ids=["ddp", "fsdp", "replicas"]
)
def test_shards_are_put_together(strategy: Callable[[], Any]) -> None:
    (alone,) = run_ranks(1, _on, 1, lambda: "single")
    first, second = run_ranks(2, _on, 2, strategy)
    assert first[0] == second[0] == pytest.approx(alone[0])
    assert second[1] == {}
    assert first[1].keys() == alone[1].keys()
    for name, (low, high, counts) in alone[1].items():
        assert first[1][name][:2] == pytest.approx((low, high))
        assert sum(first[1][name][2]) == sum(counts)
        # A value on an edge may fall into the bin beside it.
        assert first[1][name][2] == pytest.approx(counts, abs=1)
