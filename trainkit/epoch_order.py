"""The order of the epoch that a checkpoint was made in, and that of the run which resumes it."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from trainkit.data.order_facts import changed_facts
from trainkit.errors import CheckpointError
from trainkit.run import Run

__all__ = ["order_of", "order_problems", "say_changes"]

_SETTINGS = (
    "sample_seeding",
    "drop_last_window",
    "split_batches",
    "max_grad_norm",
    "max_grad_value",
    "deterministic",
)
"""Settings that change samples or updates, and that a resume takes from the run, not the save."""


def order_of(run: Run) -> dict[str, Any]:
    """Return what decides the order of the samples: facts, and inside an epoch a digest of it."""
    inside = run.state.epoch_samples > 0
    return {
        "facts": run.train_loader.order_facts(),
        "digest": _digest(run) if inside else None,
    }


def order_problems(
    saved: Mapping[str, Any] | None, epoch: int, run: Run, *, late: str | None
) -> list[str]:
    """Return, in words, why the rest of an epoch would not be that of the checkpoint.

    Args:
        saved: What `order_of` returned; None of older checkpoints, and between epochs.
        epoch: The epoch that the checkpoint was made in.
        run: The run that resumes.
        late: The checkpoint, where a sampler may be what it was only once callbacks and registered
            objects are loaded: then it is looked at again before the first window.
    """
    if saved is None:
        return []
    loader, accumulation = run.train_loader, run.config.gradient_accumulation_steps
    changed = changed_facts(saved["facts"], loader.order_facts())
    if saved["digest"] is None:
        return changed
    words = "; ".join(changed) or (
        "the sampler gives another order for the epoch under way: its weights, its seed or its "
        "data changed, or the batches that make a step, or it keeps a random state of its own: "
        "key it by `set_epoch`, or let it draw from its `.generator`"
    )
    words += " (allowed between epochs; inside one, samples would come twice or never)"
    found = None
    with suppress(Exception):  # one that is not ready raises again later
        found = loader.order_digest(epoch, accumulation)
    if found == saved["digest"]:
        return []
    if late is None:
        return [words]
    loader.forget_order()

    def check() -> None:
        if loader.order_digest(epoch, accumulation) != saved["digest"]:
            raise CheckpointError(
                f"The checkpoint `{late}` does not fit: {words}. The model holds its weights "
                "already, but nothing was trained."
            )

    run.check_order = check
    return []


def say_changes(saved: Mapping[str, Any] | None, config: Mapping[str, Any], run: Run) -> None:
    """Print what a resume changes, and may: the order of later epochs, and some settings.

    Args:
        saved: What `order_of` returned; None of older checkpoints.
        config: The settings of the run that was saved.
        run: The run that resumes.
    """
    changed = changed_facts(saved["facts"], run.train_loader.order_facts()) if saved else []
    if changed:
        run.print(f"trainkit: other epochs have another order now: {'; '.join(changed)}.")
    settings = [
        f"`{name}` was {config[name]!r} and is {getattr(run.config, name)!r}"
        for name in _SETTINGS
        if name in config and config[name] != getattr(run.config, name)
    ]
    if settings:
        run.print(f"trainkit: the run goes on with other settings: {', '.join(settings)}.")


def _digest(run: Run) -> str | None:
    accumulation = run.config.gradient_accumulation_steps
    return run.train_loader.order_digest(run.state.epoch, accumulation)
