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
from trainkit.training.callback import Callback
from trainkit.training.callback_list import CallbackList
from trainkit.training.facts import describe_window, parameter_counts
from trainkit.training.lr_schedule import by_name, make_lr_schedule
from trainkit.training.setup import arguments
from trainkit.types import Alternating, class_name

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
        given: `optimizer`, `lr_scheduler` and `warmup`, as for `fit`; `memory`, whether its bytes
            are told.
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
            "callbacks": _table(self._callbacks(), width),
            **({"memory": _table(self._memory(), width)} if self.given.get("memory") else {}),
            "order": self._order(width),
            "settings (* not the default)": _table(self._settings(), width),
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
        processes = count(self.processes.num_processes, "process")
        yield "strategy", f"{strategy.name}: {processes} on {strategy.device}"
        words = (type(self.precision).__doc__ or "").partition("\n")[0]
        yield "precision", f"{self.precision.name}: {words}"
        if self.prepared is None:
            steps, epochs = config.max_steps, config.max_epochs
            end = _known(epochs, "epoch") if steps is None else count(steps, "step")
            yield "length", f"{end}; pass `loaders` to see the window and the steps of an epoch"
            return
        loader, evaluations = self.prepared
        yield "window", describe_window(loader, config.gradient_accumulation_steps)
        ends = config.dry_run and f"; a dry run ends after {count(config.dry_run, 'step')}"
        yield "length", self._length(loader) + (ends or "")
        given = {name: value for name, value in self.given.items() if name != "memory"}
        if model is not None and given:
            yield from self._learning_rate(model, loader, **given)
        own = "" if self.callbacks.schedule_evaluation else "; after each epoch, mean loss only"
        for name, data in evaluations.items():
            label = f"`{name}`: " if name else ""
            samples = _known(data.samples_per_epoch, "sample")
            yield "evaluated on", f"{label}{samples}, each exactly once{own}"

    def _memory(self) -> Rows:
        """Yield the bytes of process 0, which holds as much as any other."""
        from trainkit.inspect.memory import like, memory_of

        model, optimizer, strategy = self.model, self.given.get("optimizer"), self.strategy
        if model is None or optimizer is None or isinstance(optimizer, Mapping | Alternating):
            yield "unknown", "Pass `model` and one `optimizer`, as for `fit`."
            return
        if strategy.name == "model_parallel":
            yield "unknown", "The model comes parallel: what lies here of it is what it holds."
            return
        memory = memory_of(
            model,
            like(optimizer, model) if isinstance(optimizer, Optimizer) else optimizer,
            shards=strategy.held_part[1],
            computes_in=self.precision.dtype,
            wrap_policy=getattr(strategy, "wrap_policy", None),
        )
        for label, size in memory.rows():
            yield label, " ".join(size.split())
        yield (
            "activations",
            "Unknown: they depend on the batch. `DeviceMonitor` logs the peak.",
        )

    def _length(self, loader: PreparedLoader) -> str:
        config = self.config
        accumulation = config.gradient_accumulation_steps
        per_epoch = loader.steps_per_epoch(accumulation, config.drop_last_window)
        planned = _known(arguments.planned_steps(config, loader), "step")
        text = f"{planned}; an epoch is {_known(per_epoch, 'step')}"
        if config.max_epochs is not None:
            text = f"{count(config.max_epochs, 'epoch')}, {text}"
        samples, size = loader.samples_per_epoch, loader.nominal_window(accumulation)
        if samples is None or size is None:
            return text
        what = "dropped" if config.drop_last_window else "applied"
        rest = samples % size
        last = f", the last of them on {count(rest, 'sample')}, {what}" if rest else ""
        return f"{text} over {count(samples, 'sample')}{last}"

    def _learning_rate(
        self,
        model: nn.Module,
        loader: PreparedLoader,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        warmup: float = 0,
    ) -> Rows:
        # Many runs have no schedule, and most have one optimizer.
        from trainkit.training.setup.schedule_check import check_plan, describe, settings_of
        from trainkit.training.several.optimizer_arguments import make_optimizers

        is_alternating = isinstance(optimizer, Alternating)
        several = optimizer.optimizers if is_alternating else optimizer
        if isinstance(several, Mapping):
            for name, each in make_optimizers(several, model).items():
                turns = f"; {optimizer.windows[name]} windows in a row" if is_alternating else ""
                yield f"optimizer {name}", "; ".join(_groups(each, None)) + turns
            return
        # A schedule changes the rates of its optimizer as soon as it is made.
        own = getattr(getattr(lr_scheduler, "scheduler", lr_scheduler), "optimizer", None)
        made = arguments.make_optimizer(optimizer, model)
        yield "optimizer", "; ".join(_groups(made, model))
        planned = arguments.planned_steps(self.config, loader)
        schedule = by_name(lr_scheduler, planned, warmup)
        schedule = make_lr_schedule(schedule, own or settings_of(made))
        if schedule is not None:
            check_plan(schedule, planned, self.config.max_epochs, self.processes.print)
            yield "learning rate", describe(schedule, planned, self.config.max_epochs)

    def _callbacks(self) -> Rows:
        callbacks = self.callbacks.callbacks
        for callback in callbacks:
            own = type(callback).explain is not Callback.explain  # then it tells its settings
            settings = "" if own else _arguments(callback)
            yield callback.name, callback.explain() + (f" ({settings})" if settings else "")
        if not callbacks:
            yield "none", "The run is silent, and leaves nothing behind but the trained model."
        if not any(isinstance(getattr(each, "policy", None), KeepPolicy) for each in callbacks):
            yield "no checkpoints", "A run that ends early is lost: add `Checkpoint()`."
        yield "output_dir", "none" if self.output_dir is None else str(self.output_dir)

    def _order(self, width: int) -> list[str]:
        """Return the hooks that anybody uses, in their order, each with its callbacks."""
        lines, silent = [], []
        tree = (Callback.__doc__ or "").partition("::\n\n")[2].partition("\n\n")[0]
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
        note = f"Used by nobody, at no cost: {', '.join(silent)}." if silent else ""
        return lines + textwrap.wrap(note, width, initial_indent="  ", subsequent_indent="  ")

    def _settings(self) -> Rows:
        """Yield every setting that changes numbers, as `TrainConfig` tells it."""
        told = dict(re.findall(r"^ +(\w+): (.+)$", TrainConfig.__doc__ or "", re.MULTILINE))
        for setting in fields(self.config):
            if setting.name not in ("max_epochs", "max_steps"):  # which are the length, above
                value = getattr(self.config, setting.name)
                mark = "" if value == setting.default else "* "
                shown = f"{value:g}" if isinstance(value, float) else value
                yield f"{mark}{setting.name}", f"{shown}. {told.get(setting.name, '')}"
        matmul = torch.get_float32_matmul_precision()
        yield "matmul", f"torch's `float32_matmul_precision` is {matmul!r}."
        yield "", "What else decides the numbers stands in docs/design.md, rule by rule."


def _table(rows: Rows, width: int) -> list[str]:
    """Return the rows with their texts in a column of their own; a mark stays before its label."""
    table = [(label if label.startswith("*") else f"  {label}", text) for label, text in rows]
    column = max([LABEL, *(len(label) for label, _ in table)]) + 2
    lines = []
    for label, text in table:
        lines += textwrap.wrap(
            text,
            width,
            initial_indent=f"{label:<{column}}",
            subsequent_indent=" " * column,
            break_long_words=False,  # a path is copied
            break_on_hyphens=False,
        )
    return lines


def _arguments(callback: Callback) -> str:
    """Return the constructor's arguments that are not the default ones, where they are kept."""
    arguments = []
    for name, parameter in inspect.signature(type(callback).__init__).parameters.items():
        value = vars(callback).get(name, parameter.default)
        is_plain = isinstance(value, str | int | float | tuple | Path | None)
        if name != "self" and is_plain and value != parameter.default:
            arguments.append(f"{name}={str(value) if isinstance(value, Path) else value!r}")
    return ", ".join(arguments)


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


def _known(number: int | None, noun: str) -> str:
    return f"an unknown number of {noun}s" if number is None else count(number, noun)
