"""Log how fast a training is, and what it waits for."""

import math
from collections.abc import Callable, Mapping
from statistics import quantiles
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from trainkit.basics.config import checked
from trainkit.basics.torch_internals import attention_on_cpu
from trainkit.callbacks._support.log_schedule import log_follows
from trainkit.callbacks.model_summary import is_compiled
from trainkit.data.packing import PackedDataset
from trainkit.errors import ConfigError
from trainkit.training.callback import Callback
from trainkit.training.run import Run
from trainkit.types import IGNORED, Batch, StepResult

__all__ = ["Throughput"]

CountTokens = Callable[[Batch], Tensor | int]


class Throughput(Callback):
    """Logs samples and tokens a second, step times, and the share of time that data cost.

    The values are of the steps since the last log. A step lasts from the end of the one before
    to its own; logs, evaluations and checkpoints between them do not count.

    - `time/samples_per_second`: over all processes.
    - `time/tokens_per_second`: over all processes, where tokens are known.
    - `time/step_seconds_p50`, `time/step_seconds_p90`, `time/step_seconds_max`: percentiles, mean
      over the processes, and the longest on any process. On an accelerator they are those of the
      host, which runs ahead; their sum is right.
    - `time/data_wait`: share of the time in which a process waited for its next batch, mean over
      the processes.
    - `data/padding`: share of the places for tokens that hold none, by `attention_mask`; of rows
      that `trainkit.data.pack` made, their share in the data set, which `tokens_per_second` then
      leaves out.
    - `time/mfu`: model FLOPs utilisation (Chowdhery et al., "PaLM: Scaling Language Modeling with
      Pathways", 2022, appendix B): operations that the model needs, over those that the devices
      could have done. Where `flops` and `peak_flops` are given.

    The device is waited for at log steps only, which read it anyway. Put this callback last in the
    list: what others do at the end of a step, after it, looks like waiting for data.

    Args:
        tokens: `batch -> int | Tensor`, the tokens of a batch; a tensor is not read before the
            log. None: of a mapping those that `attention_mask` does not hide, else all of
            `input_ids`, else the `labels` of sequences that are not ignored; else not known.
        flops: Floating-point operations that forward and backward need for one sample or token;
            for a transformer about 6 a parameter and token. "auto": those of matrix products,
            convolutions and attention for one sample, counted in the first window.
        flops_per: What `flops` is for.
        peak_flops: Most operations a second of one device, in the number format that is used.

    Raises:
        ConfigError: An argument is of no use.
    """

    @checked
    def __init__(
        self,
        *,
        tokens: CountTokens | None = None,
        flops: float | Literal["auto"] | None = None,
        flops_per: Literal["sample", "token"] = "sample",
        peak_flops: float | None = None,
    ) -> None:
        if tokens is not None and not callable(tokens):
            raise ConfigError(
                f"`tokens` must be a function `batch -> int | Tensor`, but is {tokens!r}."
            )
        if (flops is None) != (peak_flops is None):
            raise ConfigError(
                f"`flops` and `peak_flops` go together, but are {flops!r} and {peak_flops!r}. Pass "
                "both for `time/mfu`, or none."
            )
        if flops == "auto" and flops_per == "token":
            raise ConfigError(
                '`flops="auto"` counts the operations of a sample. Leave out `flops_per="token"`.'
            )
        for name, value in (("flops", flops), ("peak_flops", peak_flops)):
            is_auto = name == "flops" and value == "auto"
            is_positive = isinstance(value, int | float) and 0 < value < math.inf
            if value is not None and not is_auto and not is_positive:
                wanted = ' or "auto"' if name == "flops" else ""
                raise ConfigError(f"`{name}` must be a positive number{wanted}, but is {value!r}.")
        self.tokens = tokens
        self.flops = flops
        self.flops_per = flops_per
        self.peak_flops = peak_flops
        self._flops = 0.0  # of this process, for a sample of all processes or a token of its own
        self._counter: FlopCounter | None = None

    @override
    def on_fit_start(self, run: Run) -> None:
        self._counter = FlopCounter(run.module) if self.flops == "auto" else None
        self._timer = _StepTimer(run.strategy.device)
        self._samples = run.state.samples_seen
        self._tokens: Tensor | int | None = None
        self._positions = 0  # for tokens, where it is known which of them hold none
        dataset = getattr(run.train_loader.source, "dataset", None)
        self._packed = dataset.padding if isinstance(dataset, PackedDataset) else None
        if isinstance(self.flops, int | float):
            shares = 1 if self.flops_per == "sample" else run.strategy.data_processes.size
            self._flops = self.flops * shares / run.processes.num_processes

    @override
    def on_epoch_start(self, run: Run) -> None:
        self._timer.resume()

    on_step_start = on_epoch_start

    @override
    def on_microbatch_start(self, run: Run, batch: Batch) -> None:
        self._timer.end_wait()
        if self._counter is not None:
            self._counter.start()

    @override
    def on_microbatch_end(self, run: Run, batch: Batch) -> None:
        if self._counter is not None:
            self._counter.stop()
        count = _count_tokens(batch) if self.tokens is None else self.tokens(batch)
        if count is None:
            if self.flops_per == "token":
                raise ConfigError(
                    f"`flops` is that of one token, but the tokens of a {type(batch).__name__!r} "
                    "are not known. Pass `Throughput(tokens=...)`, a function that counts them."
                )
        else:
            self._tokens = count if self._tokens is None else self._tokens + count
            if self.tokens is None and isinstance(count, Tensor) and "input_ids" in batch:
                self._positions += batch["input_ids"].numel()
        self._timer.begin_wait()

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        self._end_step(run)
        if log_follows(run):
            self._log(run)

    @override
    def on_step_skipped(self, run: Run, result: StepResult) -> None:
        self._end_step(run)

    @override
    def on_evaluation_start(self, run: Run) -> None:
        self._timer.pause()

    on_checkpoint_start = on_evaluation_start

    @override
    def on_exception(self, run: Run, error: BaseException) -> None:
        if self._counter is not None:
            self._counter.stop()

    def _end_step(self, run: Run) -> None:
        self._timer.end_step()
        if self._counter is not None:
            self._flops = self._counter.flops / max(1, run.state.samples_seen - self._samples)
            self._counter = None

    def _log(self, run: Run) -> None:
        steps, waited = self._timer.take()
        seconds = sum(steps)
        samples = run.state.samples_seen - self._samples
        self._samples = run.state.samples_seen
        deciles = quantiles(steps, n=10, method="inclusive") if len(steps) > 1 else steps * 9
        values = {
            "time/samples_per_second": samples / seconds,
            "time/step_seconds_p50": deciles[4],
            "time/step_seconds_p90": deciles[8],
            "time/data_wait": waited / seconds,
        }
        run.log(values)
        run.log({"time/step_seconds_max": max(steps)}, reduce="max")
        tokens: Tensor | float | None = self._tokens
        self._tokens = None
        positions, self._positions = self._positions, 0
        if tokens is not None and self._packed is not None and self.tokens is None:
            positions, tokens = int(tokens), tokens * (1 - self._packed)
        if tokens is not None and positions:
            run.log({"data/padding": 1 - tokens / positions}, weight=positions)
        if tokens is not None:
            run.log({"time/tokens_per_second": tokens / seconds}, reduce="sum")
        if self.peak_flops is not None:
            items = samples if self.flops_per == "sample" else tokens
            if items is not None:  # else this process had no micro-batch
                part = items * self._flops / seconds / self.peak_flops
                shares = run.strategy.data_processes.size
                run.log({"time/mfu": part / shares}, reduce="sum")


def _count_tokens(batch: Batch) -> Tensor | int | None:
    """Return the tokens of a batch as transformers models take it; None: not known."""
    if not isinstance(batch, Mapping):
        return None
    ids, mask, labels = (batch.get(name) for name in ("input_ids", "attention_mask", "labels"))
    if isinstance(mask, Tensor) and (mask.ndim == 2 or mask.shape == getattr(ids, "shape", None)):
        return mask.sum()
    if isinstance(ids, Tensor):
        return ids.numel()
    if isinstance(labels, Tensor) and labels.ndim == 2 and not labels.is_floating_point():
        return (labels != IGNORED).sum()
    return None


class _StepTimer:
    """Measures steps one after the other; what happens while it is paused counts nowhere.

    It starts paused. On an accelerator the host runs ahead of the device: single steps are those
    of the host, and the device is waited for only where the clock is read or paused, so that
    their sum is right.

    Args:
        device: What the steps run on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = None if device.type == "cpu" else device
        self._paused = True
        self._start = 0.0  # of the step under way, on the clock of time.perf_counter
        self._idle_since = 0.0
        self._waited = 0.0
        self._steps: list[float] = []

    def resume(self) -> None:
        """Go on after a pause, waiting for data; nothing where there was none."""
        if self._paused:
            self._paused = False
            self._start = self._idle_since = perf_counter()

    def end_wait(self) -> None:
        """The data is there."""
        self._waited += perf_counter() - self._idle_since

    def begin_wait(self) -> None:
        """The next data is waited for."""
        self._idle_since = perf_counter()

    def end_step(self) -> None:
        """End a step, and begin the next one."""
        now = perf_counter()
        self._steps.append(now - self._start)
        self._start = self._idle_since = now

    def pause(self) -> None:
        """Stop until `resume`; what the device has still to do belongs to the last step."""
        if not self._paused:
            self._paused = True
            if self._steps:
                if self._device is not None:
                    torch.accelerator.synchronize(self._device)
                self._steps[-1] += perf_counter() - self._start

    def take(self) -> tuple[list[float], float]:
        """Pause; return the seconds of each step since the last `take`, and those waited."""
        self.pause()
        steps, waited = self._steps, self._waited
        self._steps, self._waited = [], 0.0
        return steps, waited


class FlopCounter:
    """Counts the operations of matrix products, convolutions and attention while it is started.

    What runs gives the same bits as without it, a little slower. Each multiplication and each
    addition is one operation.

    Args:
        module: What will run.
    """

    def __init__(self, module: nn.Module) -> None:
        if is_compiled(module):
            raise ConfigError(
                '`flops="auto"` counts the operations as torch runs them, but the model is '
                "compiled. Pass the number, which the same model tells without `compile`."
            )
        self._counted = 0  # until the latest stop
        self._mode: Any = None

    @property
    def flops(self) -> int:
        """Operations so far."""
        return self._counted + (0 if self._mode is None else self._mode.get_total_flops())

    def start(self) -> None:
        """Count from now on."""
        from torch.utils import flop_counter

        known: Any = flop_counter
        forward, backward = attention_on_cpu()  # which torch leaves out
        formulas = {
            forward: (lambda q, k, v, *_, **__: known.sdpa_flop_count(q, k, v)),
            backward: (
                lambda grad, q, k, v, *_, **__: known.sdpa_backward_flop_count(grad, q, k, v)
            ),
        }
        self._mode = known.FlopCounterMode(display=False, custom_mapping=formulas)
        self._mode.__enter__()

    def stop(self) -> None:
        """Count no more, until the next start."""
        if self._mode is not None:
            self._counted, mode, self._mode = self.flops, self._mode, None
            mode.__exit__(None, None, None)
