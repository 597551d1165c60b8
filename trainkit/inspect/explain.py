"""Says what a fit would do, before it does anything: `Trainer.explain`."""

import inspect
import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainkit.basics.config import TrainConfig
from trainkit.basics.formatting import count, first_few
from trainkit.checkpoint import KeepPolicy
from trainkit.data import PreparedLoader
from trainkit.distributed.communicator import Communicator
from trainkit.precision import Precision
from trainkit.strategies import Strategy
from trainkit.training.callback import Callback, CallbackList
from trainkit.training.facts import describe_window, parameter_counts
from trainkit.training.lr_schedule import by_name, make_lr_schedule
from trainkit.training.setup import arguments
from trainkit.types import Alternating, class_name

__all__ = ["Explanation"]

LABEL = 15  # columns, at least
Rows = Iterator[tuple[str, str]]
Prepared = tuple[PreparedLoader, Mapping[str, PreparedLoader]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """What a fit would do; nothing is changed to say it.

    Args:
        processes: Of the trainer, as are the parts up to the strategy.
        model: What would be trained; None where that is not known.
        prepared: The training loader and the evaluation loaders; None where not known.
        given: `optimizer`, `lr_scheduler` and `warmup`, as for `fit`.
    """

    processes: Communicator
    callbacks: CallbackList
    config: TrainConfig
    output_dir: Path | None
    precision: Precision
    strategy: Strategy
    model: nn.Module | None
    prepared: Prepared | None
    given: Mapping[str, Any]

    def print(self) -> None:
        """Print it, on the main process."""
        width = min(100, max(60, shutil.get_terminal_size((96, 24)).columns))
        blocks = {
            "what is trained": _table(self._what_is_trained(), width),
            "callbacks": _table(_callbacks(self.callbacks), width),
            "order": self._order(width),
            "saving": _table(self._saving(), width),
            "resume and signals": _table(self._endings(), width),
            "what decides the numbers (* not the default)": _table(self._settings(), width),
        }
        lines = ["trainkit: what `fit` would do. Nothing has been changed or started."]
        for title, block in blocks.items():
            lines += ["", title.upper(), *block]
        self.processes.print("\n".join(lines))

    def _what_is_trained(self) -> Rows:
        config, strategy, model = self.config, self.strategy, self.model
        if model is not None:
            total, trains = parameter_counts(model)
            yield "model", f"{class_name(model)}, {total:,} parameters, {trains:,} of them trained"
        share = "; gradients are reduced once a step" if self.processes.num_processes > 1 else ""
        processes = count(self.processes.num_processes, "process")
        yield "strategy", f"{strategy.name}: {processes} on {strategy.device}{share}"
        yield "precision", _precision(self.precision)
        if self.prepared is None:
            steps, epochs = config.max_steps, config.max_epochs
            end = _known(epochs, "epoch") if steps is None else count(steps, "step")
            more = "pass `loaders` to see the window and the steps of an epoch"
            yield "length", f"{end}; {more}"
            return
        loader, evaluations = self.prepared
        own = "" if self.callbacks.schedule_evaluation else "; after each epoch, mean loss only"
        yield "window", describe_window(loader, config.gradient_accumulation_steps)
        ends = config.dry_run and f"; a dry run ends after {count(config.dry_run, 'step')}"
        yield "length", self._length(loader) + (ends or "")
        if model is not None and self.given:
            yield from self._learning_rate(model, loader, **self.given)
        for name, data in evaluations.items():
            samples = _known(data.samples_per_epoch, "sample")
            label = f"`{name}`: " if name else ""
            yield "evaluated on", f"{label}{samples}, each exactly once{own}"

    def _learning_rate(
        self,
        model: nn.Module,
        loader: PreparedLoader,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        warmup: float = 0,
    ) -> Rows:
        from trainkit.training.setup.schedule_check import (  # many runs have none
            check_plan,
            describe,
            settings_of,
        )

        if isinstance(optimizer, Alternating):
            yield from _several(optimizer.optimizers, optimizer.windows, model)
            return
        if isinstance(optimizer, Mapping):
            yield from _several(optimizer, {}, model)
            return
        # A schedule changes the rates of its optimizer as soon as it is made.
        own = getattr(getattr(lr_scheduler, "scheduler", lr_scheduler), "optimizer", None)
        made = arguments.make_optimizer(optimizer, model)
        yield "optimizer", "; ".join(_groups(made, model))
        copied = own or settings_of(made)
        planned = arguments.planned_steps(self.config, loader)
        schedule = make_lr_schedule(by_name(lr_scheduler, planned, warmup), copied)
        if schedule is not None:
            check_plan(schedule, planned, self.config.max_epochs, self.processes.print)
            yield "learning rate", describe(schedule, planned, self.config.max_epochs)

    def _length(self, loader: PreparedLoader) -> str:
        config = self.config
        planned = arguments.planned_steps(config, loader)
        accumulation = config.gradient_accumulation_steps
        per_epoch = loader.steps_per_epoch(accumulation, config.drop_last_window)
        text = f"{_known(planned, 'step')}; an epoch is {_known(per_epoch, 'step')}"
        if config.max_epochs is not None:
            text = f"{count(config.max_epochs, 'epoch')}, {text}"
        samples = loader.samples_per_epoch
        size = loader.nominal_window(accumulation)
        if samples is None or size is None:
            return text
        rest = samples % size
        what = "dropped" if config.drop_last_window else "applied"
        last = f", the last of them on {count(rest, 'sample')}, {what}" if rest else ""
        return f"{text} over {count(samples, 'sample')}{last}"

    def _order(self, width: int) -> list[str]:
        """Return the hooks that anybody uses, in their order, each with its callbacks."""
        lines, silent = [], []
        tree = (Callback.__doc__ or "").partition("::")[2].partition("\n    After")[0]
        for line in textwrap.dedent(tree).splitlines():
            indent = "  " + " " * (len(line) - len(line.lstrip()))
            for hook in re.findall(r"on_\w+", line):
                if names := self.callbacks.names(hook):
                    head = f"{indent + hook:<44} "
                    lines += textwrap.wrap(
                        ", ".join(names), width, initial_indent=head, subsequent_indent=" " * 45
                    )
                else:
                    silent.append(hook)
        if silent:
            note = f"Used by nobody, at no cost: {', '.join(silent)}."
            lines += textwrap.wrap(note, width, initial_indent="  ", subsequent_indent="  ")
        return lines

    def _saving(self) -> Rows:
        folder = self.output_dir
        savers = [callback for callback in self.callbacks.callbacks if _saves(callback)]
        if not savers:
            yield "checkpoints", _UNSAVED
        for callback in savers:
            yield "checkpoints", callback.explain()
            yield from _SAVED.items()
        yield "output_dir", "none: nothing is written by default" if folder is None else str(folder)
        yield "model", "`save_model` writes it for other programs; nothing does so by itself"

    def _endings(self) -> Rows:
        saves = any(_saves(callback) for callback in self.callbacks.callbacks)
        if saves:
            exact = "" if self.config.deterministic else " (on a GPU: with `deterministic=True`)"
            yield "resume", _RESUME.format(exact=exact)
        saved = "a checkpoint is saved" if saves else "nothing is saved"
        codes = "143 (SIGTERM), 130 (SIGINT), 75 (SIGUSR1, time limit)"
        yield "first signal", f"the run ends after the step; {saved}. Exit code {codes}."
        yield "second signal", "the process leaves at once."
        if self.processes.num_processes > 1:
            yield "a failure", "of one process ends all within seconds, with one report"

    def _settings(self) -> Rows:
        """Yield every setting that changes numbers, as `TrainConfig` tells it, and the rules."""
        told = dict(re.findall(r"^ +(\w+): (.+)$", TrainConfig.__doc__ or "", re.MULTILINE))
        for setting in fields(self.config):
            if setting.name not in ("max_epochs", "max_steps"):  # which are the length, above
                value = getattr(self.config, setting.name)
                mark = "" if value == setting.default else "* "
                shown = f"{value:g}" if isinstance(value, float) else value
                yield f"{mark}{setting.name}", f"{shown}. {told.get(setting.name, '')}"
        yield from _ALWAYS.items()
        not_finite = (
            "Nobody looks: a NaN trains on, and is shown as NaN. `NaNGuard()` stops it (rule 11)."
        )
        if any(type(callback).__name__ == "NaNGuard" for callback in self.callbacks.callbacks):
            not_finite = "`NaNGuard` decides what becomes of such a loss or gradient (rule 11)."
        elif self.precision.name == "fp16":
            not_finite = "An overflow skips the step; other NaN train on (rules 9 and 11)."
        yield "not finite", not_finite
        norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
        modules = () if self.model is None else self.model.modules()
        if self.processes.num_processes > 1 and any(isinstance(each, norms) for each in modules):
            own = "Of each process's own samples; process 0's are kept (rule 6)."
            yield "batch statistics", own
        matmul = torch.get_float32_matmul_precision()
        yield "matmul", f"torch's `float32_matmul_precision` is {matmul!r}."
        yield "", "The rules stand in docs/design.md; all settings stand in each checkpoint."


_ALWAYS = {
    "weights": "An item counts the same, however a step is split: sum(weight x gradient) / "
    "sum(weight) over all processes and micro-batches. The weight is the number of samples; for "
    "models of transformers, class weights and ignored labels, that of the labels that count; or "
    "what `StepOutput` says (rule 6).",
    "order of data": "By seed and epoch alone; the number of processes and workers changes who "
    "computes a sample, not its step. No sample is repeated to fill up; `drop_last` is honoured. "
    "(rules 14 and 16)",
    "schedule": "Advances once for each update, never for a skipped step (rule 10).",
    "evaluation": "In evaluation mode; means weighted by samples; changes no state (rules 19 to "
    "21).",
}
"""What no setting changes."""

_UNSAVED = (
    "None. A run that ends early is lost: add `Checkpoint()` to the callbacks and pass "
    "`output_dir`."
)
_SAVED = {
    "hold": "model, optimizer, schedule, scaler, counters, position in the data, random states, "
    "callbacks, registered objects, open log sums, and every setting below",
    "are there": "once complete on disk; a failed save leaves the earlier ones as they are",
}
_RESUME = (
    'only if `fit` is asked to. resume="auto": from the newest checkpoint that verifies, else '
    'afresh. "must": an error in place of afresh. The same number of processes goes on bit by '
    "bit{exact}; another one on the same samples in the same order."
)


def _table(rows: Rows, width: int) -> list[str]:
    """Return the rows with their texts in a column of their own; a mark stays before its label."""
    found = [(label if label.startswith("*") else f"  {label}", text) for label, text in rows]
    column = max([LABEL, *(len(label) for label, _ in found)]) + 2
    lines = []
    for label, text in found:
        lines += textwrap.wrap(
            text,
            width,
            initial_indent=f"{label:<{column}}",
            subsequent_indent=" " * column,
            break_on_hyphens=False,
        )
    return lines


def _precision(precision: Precision) -> str:
    if precision.name == "fp16":
        return (
            "fp16: autocast to half precision, weights in fp32, the loss scaled; a step whose "
            "gradients overflow on any process is skipped on all"
        )
    if precision.name == "bf16":
        return "bf16: autocast to bfloat16, weights and update in fp32"
    return precision.name


def _callbacks(callbacks: CallbackList) -> Rows:
    for callback in callbacks.callbacks:
        own = type(callback).explain is not Callback.explain  # then it tells its settings
        settings = "" if own else _settings(callback)
        yield callback.name, callback.explain() + (f" ({settings})" if settings else "")
    if not callbacks.callbacks:
        yield "none", "The run is silent, and leaves nothing behind but the trained model."


def _settings(callback: Callback) -> str:
    """Return the constructor's arguments that are not the default ones, where they are kept."""
    found = []
    for name, parameter in inspect.signature(type(callback).__init__).parameters.items():
        value = vars(callback).get(name, parameter.default)
        is_plain = isinstance(value, str | int | float | tuple | Path | None)
        if name != "self" and is_plain and value != parameter.default:
            found.append(f"{name}={str(value) if isinstance(value, Path) else value!r}")
    return ", ".join(found)


def _groups(optimizer: Optimizer, model: nn.Module | None) -> Iterator[str]:
    """Yield what each group of an optimizer trains, and what of a model none of them does."""
    named = () if model is None else model.named_parameters()
    left = {id(p): name for name, p in named if p.requires_grad}
    for group in optimizer.param_groups:
        elements = sum(p.numel() for p in group["params"])
        for p in group["params"]:
            left.pop(id(p), None)
        settings = {name: group[name] for name in optimizer.defaults if name in group}
        shown = [f"{k} {v}" for k, v in settings.items() if isinstance(v, float | tuple) and v]
        yield ", ".join([f"{type(optimizer).__name__}: {elements:,} parameters", *shown])
    if left:
        yield f"nobody trains {first_few([*left.values()], 5)}"


def _several(given: Mapping[str, Any], turns: Mapping[str, int], model: nn.Module) -> Rows:
    from trainkit.training.several.optimizer_arguments import make_optimizers  # most runs have one

    for name, optimizer in make_optimizers(given, model).items():
        turn = f"; {turns[name]} windows in a row" if name in turns else ""
        yield f"optimizer {name}", "; ".join(_groups(optimizer, None)) + turn


def _saves(callback: Callback) -> bool:
    return isinstance(getattr(callback, "policy", None), KeepPolicy)


def _known(number: int | None, noun: str) -> str:
    return f"an unknown number of {noun}s" if number is None else count(number, noun)
