"""What a checkpoint has in common with the run that resumes from it, or not (rules 22, 29)."""

from collections.abc import Mapping, Sequence
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.basics.hparams import changed_hparams
from trainkit.checkpoint.exact import resized_buffers
from trainkit.checkpoint.training_state import parameter_names
from trainkit.data.order_facts import changed_facts
from trainkit.export.state import shapes_in, shapes_of
from trainkit.training.run import Run
from trainkit.training.several.optimizers import Optimizers, described

_SCHEDULED = ("lr", "momentum", "betas")
"""Settings that schedules of torch change in every step."""

_NONE_BEFORE = ("limit of an epoch", "training loaders")  # for older checkpoints

_EQUAL = (
    "optimizer",
    "scheduler",
    "scheduler advances",
    "precision",
    "data set length",
    "global batch",  # samples of a window: what it is called in files
    "seed",
    *_NONE_BEFORE,
)


_MAY_CHANGE = (
    "sample_seeding",
    "drop_last_window",
    "split_batches",
    "max_grad_norm",
    "max_grad_value",
    "deterministic",
    "limit_eval_batches",
)
"""Settings that change samples or updates, and that a resume takes from the run, not the save."""


def fingerprint(run: Run) -> dict[str, Any]:
    """Return what must not change between a save and a resume."""
    parameters = dict(run.module.named_parameters())
    names, loader = parameter_names(run.optimizer, parameters), run.train_loader
    accumulation = run.config.gradient_accumulation_steps
    return {
        "parameters": {name: list(p.shape) for name, p in parameters.items()},
        "layouts": _layouts(run.module),
        "optimizer": described(run.optimizer),
        "optimizer groups": [
            [names[id(p)] for p in group["params"]] for group in run.optimizer.param_groups
        ],
        "added parameters": {
            names[id(p)]: p.requires_grad
            for group in run.optimizer.param_groups[run.internals.given_groups :]
            for p in group["params"]
        },
        "scheduler": run.lr_schedule and run.lr_schedule.kind,
        "scheduler advances": run.lr_schedule and run.lr_schedule.unit,
        "precision": run.precision.described,
        "data set length": loader.samples_per_epoch,
        "global batch": loader.nominal_window(accumulation),
        "seed": run.config.seed,
        "limit of an epoch": _limit(run),
        "training loaders": loader.combination(accumulation),
    }


def _limit(run: Run) -> str | None:
    """Return to what an epoch is limited, over all processes, in words."""
    loader, overfit = run.train_loader, run.config.overfit_batches is not None
    if loader.limit is None:
        return "overfit_batches" if overfit else None
    samples, batches = loader.nominal_window(loader.limit), loader.limit * loader.processes.size
    length = f"{batches} batches" if samples is None else f"{samples} samples"
    return f"{length} by `{'overfit' if overfit else 'limit_train'}_batches`"


def differences(saved: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    """Return, in words, where two fingerprints differ."""
    problems = _key_problems("parameter", saved["parameters"], present["parameters"])
    if saved["parameters"] == present["parameters"]:
        added = saved.get("added parameters", {})  # older checkpoints do not tell
        given = [group for group in saved["optimizer groups"] if not added.keys() & {*group}]
        if present["optimizer groups"] not in (given, saved["optimizer groups"]):
            problems.append("the optimizer's groups hold other parameters")
        if "layouts" in saved:  # older checkpoints do not tell
            shapes = present["parameters"]
            problems += _layout_problems(saved["layouts"], present["layouts"], shapes)
    for name in _EQUAL:
        # Older checkpoints do not tell all.
        was = saved.get(name, None if name in _NONE_BEFORE else present[name])
        if was != present[name]:
            shown = "samples of a window" if name == "global batch" else name
            problems.append(f"{shown}: {was!r} in the checkpoint, {present[name]!r} now")
    return problems


def model_problems(saved: Mapping[str, Any], module: nn.Module) -> list[str]:
    """Return, in words, what keeps a saved state out of a model."""
    expected = shapes_of(module, saved) | dict.fromkeys(resized_buffers(module, saved))
    return _key_problems("entry of the model's state", shapes_in(saved, expected), expected)


def horizon_problems(saved: Mapping[str, Any], run: Run, schedule: str | None) -> list[str]:
    """Return, in words, a change of the horizon that nobody decided on."""
    if schedule is not None or run.lr_schedule is None:
        return []
    changed = [
        f"`{name}` was {saved[name]} and is {getattr(run.config, name)}"
        for name in ("max_epochs", "max_steps")
        if saved[name] != getattr(run.config, name)
    ]
    if not changed:
        return []
    return [
        f'the horizon changed: {", ".join(changed)}. Pass `fit(..., schedule="keep")` to go on '
        'with the learning-rate schedule as it was, or `schedule="rescale"` to stretch it to the '
        "new horizon"
    ]


def say_changes(metadata: Mapping[str, Any], run: Run) -> None:
    """Print what a resume changes, and may: the order of later epochs, and some settings."""
    saved, config = metadata.get("order"), metadata["config"]  # older checkpoints have no order
    order = changed_facts(saved["facts"], run.train_loader.order_facts()) if saved else []
    if order:
        run.print(f"trainkit: other epochs have another order now: {'; '.join(order)}.")
    settings = [
        f"`{name}` was {config[name]!r} and is {getattr(run.config, name)!r}"
        for name in _MAY_CHANGE
        if name in config and config[name] != getattr(run.config, name)
    ]
    if settings:
        run.print(f"trainkit: the run goes on with other settings: {', '.join(settings)}.")
    if hparams := changed_hparams(metadata.get("hparams", run.hparams), run.hparams):
        run.print(f"trainkit: other hyperparameters are recorded now: {', '.join(hparams)}.")


def overruled_settings(saved: Sequence[Mapping[str, Any]], run: Run) -> list[str]:
    """Return, in words, which numbers of the optimizer a resume replaces by those of the save.

    What a schedule changes on its way is left out, but for the rate that it began with.
    """
    names = dict.fromkeys(_given_settings(run.optimizer))
    if run.lr_schedule is not None:
        names = dict.fromkeys(["initial_lr", *(n for n in names if n not in _SCHEDULED)])
    overruled = {
        f"`{name}` {was} (given: {given})": None
        for old, new in zip(saved, run.optimizer.param_groups, strict=False)
        for name in names
        if (was := _numbers(old.get(name))) and (given := _numbers(new.get(name))) and was != given
    }
    return list(overruled)


def _given_settings(optimizer: Optimizer) -> list[str]:
    """Return the defaults that a caller can set: some optimizers also count in their groups."""
    if isinstance(optimizer, Optimizers):
        return [n for part in optimizer.parts.values() for n in _given_settings(part)]
    known: dict[str, Any] = {}
    for kind in filter(lambda kind: issubclass(kind, Optimizer), type(optimizer).__mro__):
        parameters = signature(kind).parameters
        known |= parameters
        if not any(each.kind is Parameter.VAR_KEYWORD for each in parameters.values()):
            break  # else what it is given beyond its own is that of the class above
    return [name for name in optimizer.defaults if name in known] or [*optimizer.defaults]


def _numbers(setting: Any) -> str:
    """Return a number, or several, as text; nothing for all else."""
    values = list(setting) if isinstance(setting, tuple | list) else [setting]
    values = [v.item() if isinstance(v, Tensor) and v.numel() == 1 else v for v in values]
    return ", ".join(map(str, values)) if all(isinstance(v, int | float) for v in values) else ""


def _key_problems(what: str, saved: Mapping[str, Any], present: Mapping[str, Any]) -> list[str]:
    missing = [name for name in present if name not in saved]
    extra = [name for name in saved if name not in present]
    return [
        *_listed(f"{what} not in the checkpoint", missing),
        *_listed(f"{what} only in the checkpoint", extra),
        *changes(what, "shape", saved, present),
    ]


def changes(
    what: str, kind: str, saved: Mapping[str, Any], present: Mapping[str, Any]
) -> list[str]:
    """Return, in words, which values of the same name differ."""
    changed = [
        f"`{name}` {saved[name]} in the checkpoint, {present[name]} now"
        for name in present
        if name in saved and saved[name] != present[name]
    ]
    return _listed(f"{what} of another {kind}", changed)


def _listed(what: str, names: list[str]) -> list[str]:
    shown = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "")
    return [f"{len(names)} x {what}: {shown}"] if names else []


def _layouts(module: nn.Module) -> dict[str, list[int]]:
    """Return the strides of the parameters that do not lie row by row."""
    return {
        name: list(parameter.stride())
        for name, parameter in module.named_parameters()
        if not parameter.is_contiguous()
    }


def _layout_problems(
    saved: Mapping[str, list[int]],
    present: Mapping[str, list[int]],
    shapes: Mapping[str, list[int]],
) -> list[str]:
    """Return, in words, which of all parameters lie otherwise than they did, by `_layouts`."""

    def order(strides: Sequence[int] | None, shape: Sequence[int]) -> list[int]:
        """Return the strides that matter: those of dimensions with more than one entry."""
        steps = torch.empty(shape, device="meta").stride() if strides is None else strides
        return [step for step, size in zip(steps, shape, strict=False) if size > 1]

    changed = [
        name
        for name, shape in shapes.items()
        if order(saved.get(name), shape) != order(present.get(name), shape)
    ]
    if not changed:
        return []
    words = [
        f"`{name}` with the strides {saved[name]} in the checkpoint"
        if name in saved
        else f"`{name}` row by row in the checkpoint"
        for name in changed
    ]
    what = "parameter that lies otherwise in memory, which would change the last bits"
    name = changed[0]
    value = "p.data.contiguous()"
    if name in saved:
        value = f"torch.empty_strided({tuple(shapes[name])}, {tuple(saved[name])}).copy_(p)"
    return [
        f'{_listed(what, words)[0]}. Before `fit`, write `p = model.get_parameter("{name}"); '
        f"p.data = {value}`, or where all are to be so `model.to(memory_format=...)`"
    ]
