"""Log how large the gradients are, and how their values are distributed."""

from torch import Tensor
from typing_extensions import override

from trainkit.basics.config import check_whole
from trainkit.callbacks._support.gradient_values import GradientValues, Histogram, HistogramLogger
from trainkit.callbacks._support.log_schedule import log_is_next
from trainkit.errors import ConfigError
from trainkit.training.callback import Callback
from trainkit.training.run import Run
from trainkit.types import StepResult

__all__ = ["GradientMonitor"]


class GradientMonitor(Callback):
    """Logs the L2 norm of the gradients by parameter or module, as `grad_norm/<name>`.

    They are the accumulated, reduced and unscaled gradients before clipping, those of all
    processes where they are sharded. Nothing is computed, and the device is not waited for,
    except in steps that a log follows. A parameter without a gradient is left out.

    Args:
        depth: None: each parameter on its own. Else all whose names begin with the same `depth`
            parts are taken together: with 2, `encoder.0.weight` and `encoder.0.bias` count for
            `encoder.0`.
        histograms: The `TensorBoardLogger` or `WandbLogger` of the same run, which then draws
            the finite values of the gradients as `gradients/<name>`. None: no histograms.
        bins: Of each histogram, at least 1.

    Raises:
        ConfigError: An argument is of no use.
    """

    def __init__(
        self, *, depth: int | None = None, histograms: HistogramLogger | None = None, bins: int = 64
    ) -> None:
        if depth is not None:
            check_whole("depth", depth)
        check_whole("bins", bins)
        if histograms is not None and not isinstance(histograms, HistogramLogger):
            raise ConfigError(
                "`histograms` must be the logger that draws them, but is "
                f"{histograms!r}. Pass the `TensorBoardLogger(...)` that is in `callbacks` too."
            )
        self.depth = depth
        self.histograms = histograms
        self.bins = bins
        self._norms: dict[str, Tensor] = {}
        self._drawn: dict[str, Histogram] = {}

    @override
    def on_fit_start(self, run: Run) -> None:
        self._norms, self._drawn = {}, {}

    @override
    def on_gradients(self, run: Run) -> None:
        if log_is_next(run):  # else a window that was skipped left nothing that is used
            values = GradientValues(run, self.depth)
            self._norms = values.norms()
            if self.histograms is not None:
                self._drawn = values.histograms(self.bins)

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        if not self._norms:
            return
        # Where several optimizers are clipped, theirs are logged by their names.
        known = run.optimizers if run.config.max_grad_norm is not None else ()
        norms = {f"grad_norm/{n}": norm for n, norm in self._norms.items() if n not in known}
        run.log(norms, reduce="last")
        if self.histograms is not None and run.is_main_process:
            for name, histogram in self._drawn.items():
                self.histograms.add_histogram(run, f"gradients/{name}", histogram)
        self._norms, self._drawn = {}, {}
