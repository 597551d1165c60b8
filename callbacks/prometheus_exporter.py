"""Let Prometheus read how a run is doing."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typing_extensions import override

from trainkit.basics.config import checked
from trainkit.basics.packages import require
from trainkit.errors import ConfigError
from trainkit.training.callback import Callback
from trainkit.training.run import Run
from trainkit.types import Scalars, StepResult

__all__ = ["PrometheusExporter"]


class PrometheusExporter(Callback):
    """Serves the state of a run over HTTP, as Prometheus reads it, while a fit lasts.

    - `trainkit_step`, `trainkit_epoch`, `trainkit_skipped_steps`, `trainkit_samples_total`: the
      counters of `run.state`; samples a second are `rate(trainkit_samples_total[1m])`.
    - `trainkit_last_step_timestamp_seconds`, `trainkit_last_checkpoint_timestamp_seconds`: since
      1970; a run that hangs is one with `time() - trainkit_last_step_timestamp_seconds > 600`.
      Before the first of its kind, it is missing.
    - `trainkit_value{name="train/loss"}`: the newest logged and evaluated values, as loggers
      name them.

    Only the main process serves. Values are read when somebody asks: a step costs the reading of a
    clock. It needs the package `prometheus-client`, which is imported when a fit starts.

    Args:
        port: TCP port, from 1 to 65535; 0: a free one, which `port` then is.
        host: Address to listen on; "0.0.0.0" lets other machines ask. There is no password.

    Raises:
        ConfigError: The package is not installed, or the port is no port; when a fit starts, that
            it cannot be listened on.
    """

    per_process = False  # only the main process serves

    @checked
    def __init__(self, port: int = 9400, *, host: str = "127.0.0.1") -> None:
        if not 0 <= port <= 65535:
            raise ConfigError(f"`port` must be from 0 to 65535, but is {port}.")
        require("prometheus-client", "`PrometheusExporter`", module="prometheus_client")
        self.port = port
        self.host = host
        self._server: Any = None

    @override
    def on_fit_start(self, run: Run) -> None:
        if not run.is_main_process or run.internals.scratch is not None:
            return
        from prometheus_client import CollectorRegistry, start_http_server

        self._run = run
        self._values: dict[str, float] = {}
        self._times: dict[str, float] = {}
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, _ = start_http_server(self.port, self.host, registry)
        except OSError as error:
            raise ConfigError(
                f"`PrometheusExporter` cannot listen on `{self.host}:{self.port}`: {error}. Pass "
                "another `port`, or 0 for a free one."
            ) from error
        self.port = self._server.server_port

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        if self._server is not None:
            self._times["step"] = time.time()

    @override
    def on_log(self, run: Run, values: Scalars) -> None:
        self._keep("train/", values)

    @override
    def on_late_log(self, run: Run, values: Scalars) -> None:
        self._keep("train/", values)

    @override
    def on_evaluation_end(self, run: Run, metrics: Scalars) -> None:
        self._keep("", metrics)

    @override
    def on_checkpoint_saved(self, run: Run, path: Path) -> None:
        if self._server is not None:
            self._times["checkpoint"] = time.time()

    @override
    def on_fit_end(self, run: Run) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def collect(self) -> Iterator[Any]:
        """Yield what Prometheus asked for, in a thread of the server."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        state = self._run.state
        for name, count, meaning in (
            ("step", state.step, "Updates applied."),
            ("epoch", state.epoch, "Epochs completed."),
            ("skipped_steps", state.skipped_steps, "Windows that ended without an update."),
        ):
            yield GaugeMetricFamily(f"trainkit_{name}", meaning, value=count)
        meaning = "Samples consumed by all processes."
        yield CounterMetricFamily("trainkit_samples", meaning, value=state.samples_seen)
        for kind, when in self._times.copy().items():
            meaning = f"When the last {kind} was done, in seconds since 1970."
            yield GaugeMetricFamily(f"trainkit_last_{kind}_timestamp_seconds", meaning, value=when)
        values = GaugeMetricFamily("trainkit_value", "Newest logged values.", labels=["name"])
        for name, value in self._values.copy().items():
            values.add_metric([name], value)
        yield values

    def _keep(self, prefix: str, values: Scalars) -> None:
        if self._server is not None:
            self._values.update({f"{prefix}{name}": value for name, value in values.items()})
