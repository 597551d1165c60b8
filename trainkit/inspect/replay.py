"""A step of a run made once more from a checkpoint, and opened (rule 35b)."""

import json
import os
import shutil
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from trainkit.basics.config import check_whole
from trainkit.basics.device import wide_dtype
from trainkit.basics.formatting import count
from trainkit.basics.outputs import absolute
from trainkit.basics.torch_internals import compiled_call, set_compiled_call
from trainkit.data import MicroBatch, Window
from trainkit.distributed import run_on_main
from trainkit.distributed.collectives import first_with
from trainkit.errors import ConfigError
from trainkit.inspect import suspects
from trainkit.inspect.observer import Observer, bad as bad_events
from trainkit.inspect.replay_plan import find_run, plan
from trainkit.inspect.replay_report import Replayed as Replayed, publish
from trainkit.inspect.suspects import Fault, Part
from trainkit.journal import Record
from trainkit.training.callback import Callback
from trainkit.training.callback_list import CallbackList
from trainkit.training.run import Run
from trainkit.training.run_parts import FitResult
from trainkit.training.setup.fit_context import end
from trainkit.training.setup.run_folder import write_apart
from trainkit.types import StepResult


class Replay(Callback):
    """Lets a fit go to a step of a run that was made before, open it, and end there.

    Args:
        run: The folder of the run; None: the trainer's.
        step: Which update.
        process: Which process to open; None: all.
        until_nonfinite: Go on to the first window with a value that is not finite.
        leaves: Whether the program ends with the replay.

    Raises:
        ConfigError: Nothing is asked for.
    """

    name = "trainkit replay"

    def __init__(
        self,
        run: str | Path | None = None,
        *,
        step: int | None = None,
        process: int | None = None,
        until_nonfinite: bool = False,
        leaves: str | None = None,
    ) -> None:
        if step is None and not until_nonfinite:
            raise ConfigError("A replay needs `step`, or `until_nonfinite=True`.")
        check_whole("step", 1 if step is None else step)
        check_whole("process", process or 0, 0)
        self._folder = None if run is None else absolute(run, "run", stored=True)
        self._step, self._process, self._until = step, process, until_nonfinite
        self._leaves = leaves
        self._target = 0  # the window that is opened; 0 where it is not known
        self._records: dict[int, Record] = {}  # of the windows to come, on process 0
        self._losses: list[tuple[int, int, Tensor]] = []  # after window and step numbers
        self._usual: set[tuple[str, str]] = set()  # not finite where all is well
        self._is_cut = False
        self._parts: list[Part] | None = None  # of the window that is looked at
        self.result: Replayed | None = None

    @classmethod
    def started(cls) -> Self:
        """Return the one that `trainkit replay` has started this program for."""
        return cls(**json.loads(os.environ["TRAINKIT_REPLAY"]))

    def begin(
        self, run: Run, callbacks: CallbackList, new_run: bool
    ) -> tuple[Path | None, CallbackList]:
        """Return where the run goes on from, and its callbacks; nothing of it is written to.

        Every process must call it.
        """
        processes = run.strategy.processes

        def make() -> dict[str, Any]:
            folder = find_run(run.output_dir, new_run, self._folder)
            replay, self._records = plan(folder, self._step, self._until, processes.size)
            return {"folder": str(folder), **replay}

        planned = run_on_main(processes, make)
        self._folder, self._target = Path(planned["folder"]), planned["target"]
        if self._process is not None and self._process >= processes.size:
            raise ConfigError(
                f"`process` is {self._process}, but the run has {count(processes.size, 'process')}."
            )
        if self._leaves is not None and planned["fit"] not in (None, run.internals.number):
            raise ConfigError(
                f"`{self._folder}` was made by `fit` number {planned['fit']} of its program, and "
                f"this is number {run.internals.number}: one that makes several trainings into one "
                "folder is replayed by `trainer.replay` in place of that `fit`."
            )
        for line in planned["notes"]:
            run.print(f"trainkit: {line}")
        write_apart(run, "replay")
        run.checkpoints.restore_best = False
        self.result = None
        self._from = planned["checkpoint"]
        where = "its start" if self._from is None else f"`{self._from}`"
        until = f"step {self._step}" if self._target else "the first value that is not finite"
        run.print(f"trainkit: replay of `{self._folder}` from {where} to {until}.")
        return self._from and Path(self._from), CallbackList([*callbacks.callbacks, self])

    def end(self, run: Run) -> FitResult:
        """Return what `fit` does; leave the program if it was started for this."""
        if self.result is None and self._target:
            raise ConfigError(
                f"The run ended at step {run.state.step} ({run.stop_reason}), before step "
                f"{self._step}. Pass to `fit` what it was given when the run was made."
            )
        if self.result is None:
            self._finish(run, run.state.step)
            run.print(f"trainkit: all was finite until the end, step {run.state.step}.")
        if run.is_main_process and run.internals.scratch is not None:
            shutil.rmtree(run.internals.scratch, ignore_errors=True)
        if self._leaves is not None:
            raise SystemExit(0)
        return end(run)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        """End well after the error that was looked for."""
        return isinstance(error, Exception) and self.result is not None

    # What is done in the run.

    @override
    def on_fit_start(self, run: Run) -> None:
        inner, step = run.internals.recut, run.training_step
        self._dtype = wide_dtype(run.strategy.device.type)
        self._is_cut, self._losses, self._usual = inner is not None, [], set()

        def recut(windows: Generator[Window, None, None]) -> Generator[Window, None, None]:
            return self._windows(run, windows if inner is None else inner(windows))

        run.internals.recut = recut
        run.training_step = partial(self._see, run, step)
        for each in run.optimizers.values():
            if each.training_step is not None:
                each.training_step = partial(self._see, run, each.training_step)

    @override
    def on_gradients(self, run: Run) -> None:
        if self._parts is not None:
            self._look(run, run.state.attempts + 1)
            if self.result is not None and run.requests.skip is None:
                run.request_skip("a replay ends here")

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        state = run.state
        self._losses.append((state.attempts, state.step, result.loss.to(self._dtype, copy=True)))

    @override
    def on_step_skipped(self, run: Run, result: StepResult) -> None:
        if self._parts is not None:  # an overflow
            self._look(run, run.state.attempts)
        if self.result is not None:
            run.state.consecutive_skips = 0  # no reason to give up
        else:
            self.on_step_end(run, result)

    @override
    def on_exception(self, run: Run, error: BaseException) -> None:
        parts, self._parts = self._parts, None
        if parts and isinstance(error, Exception) and self.result is None:
            for part in parts:
                part.observer.end()
            fault = suspects.find_fault(run, parts, self._usual, self._sizes, error)
            self._finish(run, run.state.step + 1, parts, fault, alone=True)

    def _windows(
        self, run: Run, windows: Generator[Window, None, None]
    ) -> Generator[Window, None, None]:
        """Yield the windows, and after the one that was opened let the run stop."""
        with closing(windows):
            for window in windows:
                yield window.through(partial(self._seen, run))
                if self.result is not None:
                    run.requests.evaluation = run.requests.checkpoint = False
                    run.evaluation.at_end = False
                    run.checkpoints.saved_attempt = run.state.attempts
                    run.request_stop("replay", agreed=True)
                    yield window  # is not trained on: the loop looks for requests before it

    def _seen(self, run: Run, window: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Yield the micro-batches, and note them where the window is looked at."""
        after = run.state.attempts
        # The one before the target shows what is not finite where all is well.
        if self._target and after < self._target - 2:
            yield from window
            return
        self._parts, self._sizes = [], suspects.parameter_sizes(run)
        position, rank = run.state.epoch_samples, run.strategy.processes.rank
        for micro_batch in window:
            # Pieces of what a loader gives are no ranges of the order.
            first = None if self._is_cut else position + sum(micro_batch.counts[:rank])
            self._parts.append(Part(micro_batch, first, Observer(run.module)))
            position += micro_batch.total
            yield micro_batch
            self._parts[-1].observer.end()

    def _see(
        self, run: Run, step: Callable[[nn.Module, Any], Any], model: nn.Module, batch: Any
    ) -> Any:
        """Run the training step; where the window is looked at, with the eyes open."""
        part = self._parts[-1] if self._parts else None
        if part is None or part.micro_batch.count == 0 or part.is_seen:
            return step(model, batch)
        part.is_seen, compiled = True, compiled_call(run.module)
        set_compiled_call(run.module, None)  # compiled code shows nothing of its inside
        try:
            part.observer.begin(batch)
            output = step(model, batch)
            part.observer.end_forward(run.objectives.loss_in(output))
        finally:
            set_compiled_call(run.module, compiled)
        return output

    def _look(self, run: Run, attempt: int) -> None:
        """Look at a window that is complete but for its update; every process calls it."""
        parts, self._parts = self._parts or [], None
        for part in parts:
            part.observer.end()
        processes = run.strategy.processes
        here = suspects.is_bad(run, self._sizes, overflowed=attempt == run.state.attempts)
        bad = first_with(processes, here) is not None
        if attempt == self._target or (bad and self._until):
            step = run.state.step + 1
            fault = suspects.find_fault(run, parts, self._usual, self._sizes) if bad else None
            told = processes.all_gather_objects(None if fault is None else asdict(fault))
            faults = [Fault(**each) for each in told if each is not None]
            loss = run.objectives.loss()
            self._losses.append((attempt, step, loss.to(self._dtype, copy=True)))
            self._finish(run, step, parts, suspects.surest(faults))
        elif not bad:
            self._usual |= {e.key for part in parts for e in bad_events(part.observer.events)}

    def _finish(
        self,
        run: Run,
        step: int,
        parts: list[Part] | None = None,
        fault: Fault | None = None,
        *,
        alone: bool = False,
    ) -> None:
        """Say what came of it, and write what the window holds where one was opened.

        Every process calls it; one is `alone` after an error, which ends the others.
        """
        assert self._folder is not None
        values = torch.stack([loss for *_, loss in self._losses]).tolist() if self._losses else []
        same = [
            (at, repr(value) == repr(self._records[attempt].loss))
            for (attempt, at, _), value in zip(self._losses, values, strict=True)
            if attempt in self._records
        ]
        differs = next((at for at, is_same in same if not is_same), None)
        outcome = (differs is None if same else None, differs)
        if not alone:
            outcome = run.strategy.processes.broadcast_object(outcome)
        losses = [
            value for (_, at, _), value in zip(self._losses, values, strict=True) if at == step
        ]
        self.result = Replayed(
            step=step,
            checkpoint=self._from,
            is_equal=outcome[0],
            differs_from=outcome[1],
            loss=losses[-1] if losses and parts is not None else None,
            fault=fault,
            folder=None if parts is None else self._folder / "replay" / f"step-{step:08d}",
        )
        if parts is not None:
            publish(run, self.result, parts, process=self._process, alone=alone)
        if self._leaves is not None and (run.is_main_process or alone):
            Path(self._leaves).write_text(json.dumps({"is_equal": self.result.is_equal}))
