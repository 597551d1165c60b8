"""`accelerator.profile()`: what the device and the host do inside."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.accelerator.settings import KwargsHandler
from trainkit.basics.config import checked
from trainkit.distributed import Processes
from trainkit.errors import ConfigError

if TYPE_CHECKING:
    from torch.profiler import profile


@checked
@dataclass
class ProfileKwargs(KwargsHandler):
    """The arguments of `torch.profiler.profile`.

    Args:
        activities: "cpu", or the type of a device such as "cuda"; None: all there are.
        schedule_option: Arguments of `torch.profiler.schedule`; without it all is recorded.
        on_trace_ready: Called with the profiler when a cycle of the schedule is complete.
        output_trace_dir: Each process writes a Chrome trace `profile_<process>.json` there.
    """

    activities: Sequence[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | Path | None = None

    def build(self) -> "profile":
        """Return the profiler, which has not started."""
        from torch.profiler import ProfilerActivity, profile, schedule  # most loops need none

        known = {name.lower(): each for name, each in ProfilerActivity.__members__.items()}
        unknown = [name for name in self.activities or () if name not in known]
        if unknown:
            raise ConfigError(
                f"`activities` must be of {', '.join(sorted(known))}, but has {unknown[0]!r}."
            )
        cycle = self.schedule_option
        return profile(
            activities=[known[name] for name in self.activities or ()] or None,
            schedule=None if cycle is None else schedule(**cycle),
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )


@contextmanager
def profiled(settings: ProfileKwargs, processes: Processes) -> Iterator["profile"]:
    """Record what runs inside, and write it where the settings say; all processes do so."""
    with settings.build() as profiler:
        yield profiler
    if settings.output_trace_dir is not None:
        folder = Path(settings.output_trace_dir)
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"profile_{processes.rank}.json"))
        processes.barrier()
