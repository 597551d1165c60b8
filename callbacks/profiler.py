"""Record what the device and the host do in a few steps."""

import inspect
from functools import partial
from pathlib import Path
from typing import Any

from torch.profiler import profile, schedule
from typing_extensions import override

from trainkit.basics.config import check_argument, check_whole
from trainkit.basics.outputs import absolute, check_folder
from trainkit.basics.written_files import giving_up
from trainkit.callbacks._support.log_paths import log_place
from trainkit.errors import ConfigError
from trainkit.training.callback import Callback
from trainkit.training.run import Run
from trainkit.types import StepResult

__all__ = ["Profiler"]

OURS = {"schedule", "on_trace_ready", "use_cuda"}  # set here, or out of use


class Profiler(Callback):
    """Records some steps by `torch.profiler`, each process into files of its own.

    `wait` steps are left alone, in `warmup` steps the profiler runs but keeps nothing, `active`
    steps are recorded and written; this `repeat` times. Steps are windows of this fit, skipped
    ones too. A fit that ends while steps are recorded writes those that there were. Outside
    these steps there is no profiler, so that nothing is slower.

    For the steps that began after update `s`, process `r` writes

    - `step-<s>-rank-<r>.trace.json.gz`: a trace for https://ui.perfetto.dev or chrome://tracing,
    - `step-<s>-rank-<r>.txt`: a table of the operations that took most time.

    Args:
        wait: Steps to leave alone before each recording, at least 0.
        warmup: Steps in which the profiler runs for nothing, at least 1: its own start is slow.
        active: Steps to record, at least 1.
        repeat: How often, at least 1.
        table_rows: Rows of the table; 0: no table.
        directory: Folder of the files; by default `<output_dir>/profile`.
        **options: Of `torch.profiler.profile`, such as `record_shapes=True`,
            `profile_memory=True`, or `with_stack=True`, which makes steps much slower.

    Raises:
        ConfigError: An argument cannot work, or is none that torch knows.
    """

    def __init__(
        self,
        *,
        wait: int = 10,
        warmup: int = 2,
        active: int = 3,
        repeat: int = 1,
        table_rows: int = 20,
        directory: str | Path | None = None,
        **options: Any,
    ) -> None:
        check_argument("directory", directory, str | Path | None)
        counts = {"wait": (wait, 0), "warmup": (warmup, 1), "active": (active, 1)}
        counts |= {"repeat": (repeat, 1), "table_rows": (table_rows, 0)}
        for name, (value, least) in counts.items():
            check_whole(name, value, least)
        known = sorted({*inspect.signature(profile).parameters} - OURS)
        for name in options:
            if name not in known:
                raise ConfigError(
                    f"`Profiler` was given {name!r}, which `torch.profiler.profile` does not take. "
                    f"It takes {known}."
                )
        self.wait = wait
        self.warmup = warmup
        self.active = active
        self.repeat = repeat
        self.table_rows = table_rows
        self.directory = None if directory is None else absolute(directory, "directory")
        self.options = options
        self._profile: profile | None = None

    @override
    def check_output(self, run: Run) -> None:
        self._folder = log_place(
            run, self.directory, "profile", owner="Profiler", argument="directory"
        )
        if run.processes.is_local_main_process:
            check_folder(self._folder, f"`{self.name}`")

    @override
    def on_fit_start(self, run: Run) -> None:
        self._written = 0  # recordings
        self._next = run.state.attempts + self.wait

    @override
    def on_step_start(self, run: Run) -> None:
        if run.state.attempts != self._next:
            return
        self._recorded_from = run.state.attempts + self.warmup
        self._stop_at = self._recorded_from + self.active
        self._first = run.state.step  # updates before what is recorded
        running = profile(
            schedule=schedule(wait=0, warmup=self.warmup, active=self.active, repeat=1),
            on_trace_ready=partial(self._write, run),
            **{"acc_events": True, **self.options},  # else torch warns of a second recording
        )
        self._profile = running.__enter__()  # type: ignore[no-untyped-call]

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        if self._profile is None:
            return
        attempts = run.state.attempts
        if attempts == self._recorded_from:
            self._first = run.state.step
        self._profile.step()  # writes after the last one
        if attempts == self._stop_at:
            self._end()
            if self._written < self.repeat:
                self._next = attempts + self.wait

    on_step_skipped = on_step_end

    @override
    def on_fit_end(self, run: Run) -> None:
        self._end()

    def _end(self) -> None:
        running, self._profile = self._profile, None
        if running is not None:
            running.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _write(self, run: Run, recorded: profile) -> None:
        self._written += 1
        name = f"step-{self._first:08d}-rank-{run.processes.process_index}"
        with giving_up(f"`{self.name}`", self._give_up):
            recorded.export_chrome_trace(str(self._folder / f"{name}.trace.json.gz"))
            if self.table_rows:
                averages = recorded.key_averages()
                has_device = any(each.self_device_time_total for each in averages)
                table = averages.table(
                    sort_by=f"self_{'device' if has_device else 'cpu'}_time_total",
                    row_limit=self.table_rows,
                    max_name_column_width=50,
                )
                (self._folder / f"{name}.txt").write_text(table + "\n", encoding="utf-8")

    def _give_up(self) -> None:
        self._written = self.repeat
