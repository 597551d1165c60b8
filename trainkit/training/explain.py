"""Says what a fit would do, before it does anything: `Trainer.explain`."""

import inspect
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from trainkit.checkpoint import KeepPolicy
from trainkit.config import TrainConfig
from trainkit.data import PreparedLoader
from trainkit.precision import Precision
from trainkit.training import arguments
from trainkit.training.callback import HOOKS, Callback, CallbackList
from trainkit.training.explain_settings import Explained, rules
from trainkit.training.lr_schedule import make_lr_schedule
from trainkit.types import class_name

__all__ = ["explain"]

LABEL = 15  # columns, at least
Rows = Iterator[tuple[str, str]]
Prepared = tuple[PreparedLoader, Mapping[str, PreparedLoader]]


def explain(
    trainer: Explained, model: nn.Module | None, prepared: Prepared | None, **given: Any
) -> None:
    """Print, on the main process, what a fit would do.

    Args:
        trainer: The trainer; nothing of it changes.
        model: What would be trained; None where that is not known.
        prepared: The training loader and the evaluation loaders; None where not known.
        **given: `optimizer`, `lr_scheduler` and `warmup`, as for `fit`.
    """
    width = min(100, max(80, shutil.get_terminal_size((96, 24)).columns))
    blocks = {
        "what is trained": _table(_make_up(trainer, model, prepared, given), width),
        "callbacks": _table(_callbacks(trainer.callbacks), width),
        "order": _order(trainer, width),
        "saving": _table(_saving(trainer), width),
        "resume and signals": _table(_endings(trainer), width),
        "what decides the numbers (* not the default)": _table(rules(trainer, model), width),
    }
    lines = ["trainkit: what `fit` would do. Nothing has been changed or started."]
    for title, block in blocks.items():
        lines += ["", title.upper(), *block]
    trainer.processes.print("\n".join(lines))


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


def _make_up(
    trainer: Explained, model: nn.Module | None, prepared: Prepared | None, given: dict[str, Any]
) -> Rows:
    config, strategy = trainer.config, trainer.strategy
    processes = trainer.processes.num_processes
    if model is not None:
        count = sum(p.numel() for p in model.parameters())
        trains = sum(p.numel() for p in model.parameters() if p.requires_grad)
        yield "model", f"{class_name(model)}, {count:,} parameters, {trains:,} of them trained"
    share = "; gradients are reduced once a step" if processes > 1 else ""
    yield "strategy", f"{strategy.name}: {_many(processes, 'process')} on {strategy.device}{share}"
    yield "precision", _precision(trainer.precision)
    if prepared is None:
        end = (
            f"{config.max_steps:,} steps" if config.max_steps else _many(config.max_epochs, "epoch")
        )
        yield "length", f"{end}; pass `loaders` to see the global batch and the steps of an epoch"
        return
    loader, evaluations = prepared
    yield "global batch", _global_batch(config, loader, processes)
    yield "length", _length(config, loader)
    if model is not None and given:
        yield from _learning_rate(trainer, model, loader, **given)
    for name, data in evaluations.items():
        samples = _known(data.samples_per_epoch, "sample")
        when = "" if trainer.callbacks.schedule_evaluation else "; after each epoch, mean loss only"
        yield "evaluated on", f"{f'`{name}`: ' if name else ''}{samples}, each exactly once{when}"


def _learning_rate(
    trainer: Explained,
    model: nn.Module,
    loader: PreparedLoader,
    optimizer: Any = None,
    lr_scheduler: Any = None,
    warmup: float = 0,
) -> Rows:
    from trainkit.training.schedule_plan import (  # many runs have none
        check_plan,
        describe,
        settings_of,
    )

    # A schedule changes the rates of its optimizer as soon as it is made.
    own = getattr(getattr(lr_scheduler, "scheduler", lr_scheduler), "optimizer", None)
    copied = own or settings_of(arguments.make_optimizer(optimizer, model))
    before, planned = trainer.planned_steps, arguments.planned_steps(trainer.config, loader)
    trainer.planned_steps = planned
    schedule = make_lr_schedule(lr_scheduler, copied, planned, warmup)
    trainer.planned_steps = before
    if schedule is not None:
        check_plan(schedule, planned, trainer.config.max_epochs, trainer.processes.print)
        yield "learning rate", describe(schedule, planned, trainer.config.max_epochs)


def _precision(precision: Precision) -> str:
    if precision.name == "fp16":
        return (
            "fp16: autocast to half precision, weights in fp32, the loss scaled; a step whose "
            "gradients overflow on any process is skipped on all"
        )
    if precision.name == "bf16":
        return "bf16: autocast to bfloat16, weights and update in fp32"
    return precision.name


def _global_batch(config: TrainConfig, loader: PreparedLoader, processes: int) -> str:
    accumulation = config.gradient_accumulation_steps
    factors = f"{_many(processes, 'process')} x {_many(accumulation, 'micro-batch')}"
    if loader.batch_size is None:
        return f"varies: {factors}"
    total = loader.nominal_window(accumulation)
    return f"{_known(total, 'sample')} = {loader.batch_size} x {factors}"


def _length(config: TrainConfig, loader: PreparedLoader) -> str:
    planned = arguments.planned_steps(config, loader)
    per_epoch = loader.steps_per_epoch(config.gradient_accumulation_steps, config.drop_last_window)
    text = f"{_known(planned, 'step')}; an epoch is {_known(per_epoch, 'step')}"
    if config.max_epochs is not None:
        text = f"{_many(config.max_epochs, 'epoch')}, {text}"
    samples = loader.samples_per_epoch
    size = loader.nominal_window(config.gradient_accumulation_steps)
    if samples is None or size is None:
        return text
    rest = samples % size
    what = "dropped" if config.drop_last_window else "applied"
    last = f", the last of them on {_many(rest, 'sample')}, {what}" if rest else ""
    return f"{text} over {_many(samples, 'sample')}{last}"


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


def _order(trainer: Explained, width: int) -> list[str]:
    """Return the algorithm, line by line, with the callbacks at each hook that anybody uses."""
    lines, silent = [], []
    for depth, text in _algorithm(trainer):
        indent = "  " + "    " * depth
        if text not in HOOKS:
            lines += textwrap.wrap(
                text, width, initial_indent=indent, subsequent_indent=indent + "  "
            )
        elif names := trainer.callbacks.names(text):
            head = f"{indent}{text:<{44 - len(indent)}} "
            lines += textwrap.wrap(
                ", ".join(names), width, initial_indent=head, subsequent_indent=" " * 45
            )
        else:
            silent.append(text)
    if silent:
        note = f"Used by nobody, at no cost: {', '.join(silent)}."
        lines += textwrap.wrap(note, width, initial_indent="  ", subsequent_indent="  ")
    return lines


def _algorithm(trainer: Explained) -> Iterator[tuple[int, str]]:
    """Yield hooks by name, and in words what happens between them (rules 3 to 5)."""
    config, processes = trainer.config, trainer.processes.num_processes
    accumulation = config.gradient_accumulation_steps
    several = f" on each of {processes} processes" if processes > 1 else ""
    yield 0, "on_fit_start"
    yield 0, "on_checkpoint_loaded"
    yield 0, "each epoch:"
    yield 1, "on_epoch_start"
    yield 1, f"each step, {_many(accumulation, 'micro-batch')}{several}:"
    yield 2, "on_step_start"
    yield 2, "on_microbatch_start"
    yield 2, f"forward in {trainer.precision.name}, backward"
    yield 2, "on_microbatch_end"
    yield (
        2,
        "gradients: reduced, normalised, unscaled" if processes > 1 else "gradients: normalised",
    )
    yield 2, "on_gradients"
    if config.max_grad_norm is not None:
        yield 2, f"clipped to the norm {config.max_grad_norm:g}, over all parameters"
    if config.max_grad_value is not None:
        yield 2, f"clipped to the value {config.max_grad_value:g}, each element"
    yield 2, "update by the optimizer, then the learning-rate schedule"
    yield 2, "on_step_end"
    yield 2, "on_step_skipped"
    yield 1, "after the last step of the epoch:"
    yield 2, "on_epoch_end"
    yield 1, f"where due, first the log (every {_many(config.log_every_n_steps, 'step')}):"
    yield 2, "on_log"
    yield 1, "then the evaluation:"
    for hook in ("on_evaluation_start", "on_evaluation_batch_end", "on_evaluation_end"):
        yield 2, hook
    yield 1, "then the checkpoint, with the final state of all callbacks:"
    yield 2, "on_checkpoint_start"
    yield 2, "on_checkpoint_saved"
    yield 1, "then requests to stop, and signals"
    yield 0, "on_late_log"
    yield 0, "on_exception"
    yield 0, "on_fit_end"


def _saves(callback: Callback) -> bool:
    return isinstance(getattr(callback, "policy", None), KeepPolicy)


def _saving(trainer: Explained) -> Rows:
    folder = trainer.output_dir
    savers = [callback for callback in trainer.callbacks.callbacks if _saves(callback)]
    if not savers:
        yield (
            "checkpoints",
            (
                "None. A run that ends early is lost: add `Checkpoint()` to the callbacks and pass "
                "`output_dir`."
            ),
        )
    for callback in savers:
        yield "checkpoints", callback.explain()
        yield (
            "hold",
            (
                "model, optimizer, schedule, scaler, counters, position in the data, random "
                "states, callbacks, registered objects, open log sums, and every setting below"
            ),
        )
        yield (
            "are there",
            "once complete on disk; a failed save leaves the earlier ones as they are",
        )
    yield "output_dir", "none: nothing is written by default" if folder is None else str(folder)
    yield "model", "`save_model` writes it for other programs; nothing does so by itself"


def _endings(trainer: Explained) -> Rows:
    saves = any(_saves(callback) for callback in trainer.callbacks.callbacks)
    what = "the run ends after the step; " + (
        "a checkpoint is saved" if saves else "nothing is saved"
    )
    if saves:
        exact = "" if trainer.config.deterministic else " (on a GPU: with `deterministic=True`)"
        yield (
            "resume",
            (
                'only if `fit` is asked to. resume="auto": from the newest checkpoint that '
                'verifies, else afresh. "must": an error in place of afresh. The same number of '
                f"processes goes on bit by bit{exact}; another one on the same samples in the "
                "same order."
            ),
        )
    yield (
        "first signal",
        f"{what}. Exit code 143 (SIGTERM), 130 (SIGINT), 75 (SIGUSR1, time limit).",
    )
    yield "second signal", "the process leaves at once."
    if trainer.processes.num_processes > 1:
        yield "a failure", "of one process ends all within seconds, with one report"


def _many(count: int | None, noun: str) -> str:
    if count == 1:
        return f"1 {noun}"
    return f"{count:,} {noun}{'es' if noun.endswith(('s', 'tch')) else 's'}"


def _known(count: int | None, noun: str) -> str:
    return f"an unknown number of {noun}s" if count is None else _many(count, noun)
