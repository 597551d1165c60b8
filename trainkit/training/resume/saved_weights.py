"""The weights of a checkpoint in a model: for a while, or for good."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import nn

from trainkit.basics.outputs import absolute, fetched, folder_of_run
from trainkit.basics.parsing import nearest
from trainkit.checkpoint.listing import of_run
from trainkit.checkpoint.retention import best_of
from trainkit.distributed import Processes, run_on_all, run_on_main
from trainkit.errors import CheckpointError, ConfigError
from trainkit.lazy import ask
from trainkit.training.modes import in_training_mode
from trainkit.training.resume.reference import load_onto_base
from trainkit.training.run import Run
from trainkit.training.run_parts import FitResult
from trainkit.training.unchanged import kept_buffers

_NAMES = ("best", "last")


@contextmanager
def held(
    module: nn.Module,
    which: str | Path,
    output_dir: Path | None,
    processes: Processes,
    *,
    in_fit: bool,
) -> Iterator[None]:
    """Let a module hold the weights of a checkpoint inside, and its own again after it.

    Every process must enter it; see `Trainer.evaluate` for `which`.

    Raises:
        ConfigError: There is no such checkpoint, or a training is under way.
        CheckpointError: It is broken, or does not fit; on all processes.
    """
    if in_fit:
        raise ConfigError(
            f"`checkpoint={str(which)!r}` would exchange weights inside `fit`. Call this when it "
            "has returned."
        )
    path = Path(run_on_main(processes, lambda: str(_find(which, output_dir))))
    module.state_dict()  # shards what a forward has gathered
    before = [(parameter, parameter.detach().clone()) for parameter in module.parameters()]
    try:
        with kept_buffers(module.modules()), in_training_mode(module):
            with ask("on_this_machine")(path, processes) as (here, _):
                run_on_all(processes, lambda: load_onto_base(module, here))
            yield
    finally:
        module.state_dict()
        with torch.no_grad():
            for parameter, weights in before:
                parameter.copy_(weights)


def _find(which: str | Path, output_dir: Path | None) -> Path:
    if which not in _NAMES:
        path = fetched(absolute(which, "checkpoint", stored=True))
        if not path.exists():
            raise ConfigError(
                f'`checkpoint` must be "best", "last" or a folder that is there, but is '
                f"{str(which)!r}.{nearest(str(which), _NAMES)}"
            )
        return path
    if output_dir is None:
        raise ConfigError(
            f'`checkpoint="{which}"` looks in the output directory, but the trainer has none. Pass '
            "`Trainer(output_dir=...)`, or the folder of a checkpoint."
        )
    if not (entries := of_run(output_dir)):
        with suppress(CheckpointError):
            output_dir = folder_of_run(output_dir, "must")  # the newest of a trainer with `new_run`
        entries = of_run(fetched(output_dir))
    metric, candidates = best_of(entries)
    if which == "last":
        candidates = [entry for entry in entries if entry.manifest.is_resumable][-1:]
    if candidates:
        return candidates[0].path
    held = [entry.path.name for entry in entries]
    why = f"no `{metric}` of {held} is a number"
    if not metric:
        why = f'{held} were saved without `Checkpoint(keep_best=("eval/loss", "min"))`'
    raise CheckpointError(
        f"`{output_dir}` holds no {which} checkpoint{f': {why}' if entries else ''}. Pass the "
        "folder of one.",
        path=output_dir,
    )


def restore_best(run: Run, result: FitResult) -> None:
    """Leave the best weights in the model of a training that has ended, and say so, or raise."""
    path = result.best_checkpoint
    if path is None:
        raise CheckpointError(
            "`restore_best=True` finds no best weights: no evaluation gave a number for the metric "
            f"of `keep_best`. The model holds the last ones, as does `{run.checkpoint}`."
        )
    processes = run.strategy.processes
    with (
        in_training_mode(run.module),
        ask("on_this_machine")(path, processes, run.internals.mirror) as (here, _),
    ):
        run_on_all(processes, lambda: load_onto_base(run.module, here))
    run.print(
        f"trainkit: the model holds the best weights, those of step {result.best_step} of "
        f"{result.step}, evaluated as {result.best_value:.6g}."
    )
