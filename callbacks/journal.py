"""Write the journal of a run."""

import json
import math
import multiprocessing
import os
import sys
import sysconfig
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from trainkit.basics import device
from trainkit.basics.formatting import json_value
from trainkit.basics.signals import is_interactive
from trainkit.basics.written_files import Lines, check_file, claim
from trainkit.callbacks._support.log_paths import log_place, move_away
from trainkit.callbacks._support.run_facts import hidden_words, run_facts
from trainkit.journal import JOURNAL, VERSION, Record, cut, digest, is_of
from trainkit.training.callback import Callback
from trainkit.training.run import Run
from trainkit.types import StepResult

__all__ = ["Journal"]

_OURS = Path(device.__file__).parents[1]
_INSTALLED = {"site-packages", "dist-packages"}
_OFTEN = 50  # steps at least between two looks at the device
_SELDOM = 1024  # the same, at most


class Journal(Callback):
    """Writes a line for each window, from which it can be replayed and compared with other runs.

    `<output_dir>/journal.txt` has of each window its place, its samples by position, the loss of
    process 0 and the gradient norm to the last bit: some 60 bytes. They wait on the device, and
    are read every 50 steps or more, at a log where there are logs, and before each checkpoint:
    its journal is on the disk when a checkpoint is committed. A resumed run first cuts what was
    written after its step; the journal of another run is moved away. `trainkit.journal.read` reads.

    `Checkpoint` brings one along, which you need not list.
    """

    _file: Lines | None = None  # on the main process
    _rows: list[tuple[Any, ...]]

    @override
    def check_output(self, run: Run) -> None:
        path = self._path(run)
        if run.is_main_process:
            claim(run.internals.outputs, path, f"`{self.name}`")
            check_file(path, f"`{self.name}`")

    @override
    def on_fit_start(self, run: Run) -> None:
        if not run.is_main_process:
            return
        path, every = self._path(run), run.config.log_every_n_steps
        if run.state.attempts and is_of(path, run.checkpoints.run_id):
            cut(path, run.state.attempts)
        else:
            move_away(path)
        self._file = Lines(path, f"`{self.name}`")
        self._file.write(json.dumps(_header(run), allow_nan=False))
        self._rows = []
        self._every = min(_SELDOM, -(-_OFTEN // every) * every)
        self._dtype = device.wide_dtype(run.strategy.device.type)

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        if self._file is not None:
            state, samples = run.state, run.objectives.samples
            # A copy: whoever made the loss may use its memory again.
            loss = result.loss.to(self._dtype, copy=True)
            position = state.step, state.skipped_steps, state.epoch, state.epoch_samples, samples
            of_each = [result] if result.optimizers is None else result.optimizers.values()
            norms = [each.grad_norm for each in of_each if each.grad_norm is not None]
            self._rows.append((position, loss, norms, result.reason))
            if state.step % self._every == 0:
                self._write()

    on_step_skipped = on_step_end

    @override
    def on_checkpoint_start(self, run: Run) -> None:
        if self._file is not None:
            self._write()
            self._file.sync()

    @override
    def on_fit_end(self, run: Run) -> None:
        if self._file is not None:
            try:
                self._write()
            finally:
                self._file.close()
                self._file = None

    def _write(self) -> None:
        """Read what waits on the device, at once, and write it."""
        rows, self._rows = self._rows, []
        if not rows or self._file is None:
            return
        norms = [norm.to(loss) for _, loss, own, _ in rows for norm in own]
        numbers = iter(torch.stack([*(loss for _, loss, _, _ in rows), *norms]).tolist())
        losses = [next(numbers) for _ in rows]
        records = []
        for ((step, skipped, epoch, stop, samples), _, own, reason), loss in zip(
            rows, losses, strict=True
        ):
            norm = math.hypot(*(next(numbers) for _ in own)) if own else None
            record = Record(step, skipped, epoch, stop - samples, stop, loss, norm, reason)
            records.append(record.line())
        self._file.write("\n".join(records))

    def _path(self, run: Run) -> Path:
        return log_place(run, None, JOURNAL, owner=type(self).__name__, argument="path")


def _header(run: Run) -> dict[str, Any]:
    """Return how this process was started, and what the run is made of, as plain values."""
    facts = run_facts(run)
    header: dict[str, Any] = json_value(
        {
            "journal": VERSION,
            "run_id": run.checkpoints.run_id,
            "time": time.time(),
            "after": run.state.attempts,
            "start": _start(run),
            "files": {str(p): _digest(p, p.stat().st_mtime_ns) for p in sorted(_files(run))},
            "hparams": run.hparams,
            "modules": _modules(run),
            **facts,
            "versions": {**facts["versions"], "torch": str(torch.__version__)},
        }
    )
    return header


def _modules(run: Run) -> dict[str, int]:
    """Return how often each kind of module is there, with its numbers, such as `p=0.1`."""
    texts, trainer = [], getattr(run.training_step, "__self__", None)
    loss = getattr(trainer, "loss_fn", None)
    for module in [*run.module.modules(), *(loss.modules() if isinstance(loss, nn.Module) else ())]:
        held = {k: v for k, v in vars(module).items() if issubclass(type(v), int | float)}
        numbers = [f"{k}={v}" for k, v in held.items() if k[0] != "_" and k != "training"]
        texts.append(f"{type(module).__name__}({', '.join(numbers)})")
    return Counter(texts)


def _start(run: Run) -> dict[str, Any]:
    """Return what starts the program once more; without `command` where nothing does."""
    started = multiprocessing.parent_process() is not None  # by the program itself
    typed = is_interactive() or sys.argv[0] in ("", "-") or "--multiprocessing-fork" in sys.argv
    words = hidden_words([sys.executable, *sys.orig_argv[1:]])
    try:
        folder = str(Path.cwd())
    except FileNotFoundError:
        folder = ""
    return {
        **({} if typed or not folder else {"command": words}),
        "folder": folder,
        "fit": run.internals.number,
        "launched": run.processes.num_processes > 1 and not started,
        "threads": torch.get_num_threads(),
    }


def _files(run: Run) -> set[Path]:
    """Return the user's own code: modules of the script's folder, and those of the run's parts."""
    parts = [*run.module.modules(), getattr(run.training_step, "__self__", None)]
    parts += [getattr(run.train_loader.source, "dataset", None), run.lr_schedule, run.optimizer]
    named = {type(part).__module__ for part in parts}
    main = getattr(sys.modules["__main__"], "__file__", None)
    folder = os.path.join(Path(main).resolve().parent, "") if main else ""
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    installed = tuple(os.path.join(str(p), "") for p in (_OURS, *map(sysconfig.get_path, kinds)))
    near = folder != "" and not folder.startswith(installed)  # else none of the thousands is
    files = set[Path]()
    for name in [*sys.modules] if near else named:
        file = getattr(sys.modules.get(name), "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py") or file.startswith(installed):
            continue
        if name in named or file.startswith(folder):
            files.add(Path(file))
    return {path for path in files if _INSTALLED.isdisjoint(path.parts) and path.is_file()}


@cache
def _digest(path: Path, changed: int) -> str:
    """Return that of a file that was written at a time; many fits of a program have the same."""
    return digest(path)
