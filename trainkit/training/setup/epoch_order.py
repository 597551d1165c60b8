"""The order of an epoch: on all processes, of a checkpoint, and of the run which resumes it."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from trainkit.data.order_facts import OWN, changed_facts, run_to
from trainkit.distributed.collectives import require_equal
from trainkit.errors import CheckpointError, ConfigError, by_process
from trainkit.training.run import Run


def check_order(run: Run) -> None:
    """Raise, on all processes, where they draw other orders, of which each takes its part."""
    loader, processes = run.train_loader, run.strategy.processes
    each = (loader.parts or {"": loader}).values()
    parts = [part for part in each if part.order_facts().get("data") == "map-style"]
    if processes.size == 1 or not parts:
        return
    epoch, accumulation = run.state.epoch, run.config.gradient_accumulation_steps
    digest = " ".join(part.order_digest(epoch, accumulation) or "" for part in parts)

    def complain(digests: list[str]) -> ConfigError:
        return ConfigError(
            "The processes draw other orders of the training samples (by digest: "
            f"{by_process(digests)}), so some samples would be read twice and others never. Seed "
            "the sampler, its weights and its generator alike on all of them; without a generator "
            "of its own `fit` seeds it."
        )

    require_equal(processes, digest, complain)


def order_of(run: Run) -> dict[str, Any]:
    """Return what decides the order of the samples: facts, and a digest of the latest epoch's."""
    loader, accumulation = run.train_loader, run.config.gradient_accumulation_steps
    epoch = _latest(run.state.state_dict(), run)
    return {
        "facts": loader.order_facts(),
        "digest": loader.order_digest(epoch, accumulation) if epoch >= 0 else None,
    }


def order_problems(
    saved: Mapping[str, Any] | None, counters: Mapping[str, Any], run: Run, *, late: str | None
) -> list[str]:
    """Return, in words, why the samples would not follow that the checkpoint's run would have had.

    Args:
        saved: What `order_of` returned; None of older checkpoints.
        counters: Those of the checkpoint.
        late: The checkpoint, where a sampler may be what it was only once callbacks, registered
            objects and attributes are loaded: then it is looked at again before the first window.
    """
    if saved is None:
        return []
    loader, accumulation = run.train_loader, run.config.gradient_accumulation_steps
    changed = changed_facts(saved["facts"], loader.order_facts())
    epoch, inside = _latest(counters, run), counters["epoch_samples"] > 0
    digest = saved["digest"]
    if digest is None or (changed and not inside):
        return changed if inside else []
    why = _run_to(digest, epoch, run)
    if not inside:
        return [why] if why == OWN and not _is_registered_in(run) else []
    if not why:
        return []
    words = "; ".join(changed) or why
    words += " (allowed between epochs; inside one, samples would come twice or never)"
    if late is None:
        return [words]
    loader.forget_order()

    def check() -> None:
        if loader.order_digest(epoch, accumulation) != digest:
            loader.forget_order()
            raise CheckpointError(
                f"The checkpoint `{late}` does not fit: {words}. The model holds its weights "
                "already, but nothing was trained."
            )

    run.internals.check_order = check
    return []


def _latest(counters: Mapping[str, Any], run: Run) -> int:
    """Return the epoch whose order was made last; -1 where none was."""
    epoch: int = counters["epoch"] - (counters["epoch_samples"] == 0)
    return epoch if epoch < 0 else run.data_epoch(epoch)


def _run_to(digest: str, epoch: int, run: Run) -> str:
    """Let the sampler run until it gives the order of an epoch; return why it does not."""

    def draw() -> str | None:
        drawn = None
        with suppress(Exception):  # one that is not ready raises again later
            drawn = run.train_loader.order_digest(epoch, run.config.gradient_accumulation_steps)
        if drawn != digest:
            run.train_loader.forget_order()
        return drawn

    return run_to(digest, epoch + 1, draw)


def _is_registered_in(run: Run) -> bool:
    """Return whether the state of a sampler is loaded with the run."""
    source = run.train_loader.source
    batch_sampler = getattr(source, "batch_sampler", None)
    samplers = [batch_sampler, *(getattr(one, "sampler", None) for one in (source, batch_sampler))]
    return any(part is sampler for part in run.checkpoints.objects.values() for sampler in samplers)
