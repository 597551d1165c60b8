"""What is said of gradients that overflow and go on to do so (rule 9)."""

from collections.abc import Iterable

import torch
from torch import Tensor

from trainkit.basics.torch_internals import stored_values
from trainkit.distributed.collectives import first_with
from trainkit.errors import NonFiniteError
from trainkit.strategies import Strategy


def low_scale(
    strategy: Strategy, named: Iterable[tuple[str, Tensor]], loss: Tensor, *, step: int
) -> NonFiniteError:
    """Return the error for gradients that overflow at the smallest scale; called by all."""
    parameters = dict(named)
    with torch.no_grad():
        parts = [strategy.local_gradients([p]) for p in parameters.values()]
        values = [[*map(stored_values, part)] for part in parts]
        bad = [i for i, part in enumerate(values) if not all(g.isfinite().all() for g in part)]
    processes = strategy.processes
    # A process without any gives the index after the last, and the one before the first.
    ends = torch.tensor([bad[0], -bad[-1]] if bad else [len(parts), 1])
    first, last = (processes.all_reduce(ends.clone(), "min") * torch.tensor([1, -1])).tolist()
    process = first_with(processes, int(ends[0]) == first) or 0
    value = processes.broadcast(loss.detach().float().mean(), process).item()
    names = [*parameters][first : last + 1]
    where = f", first that of `{names[0]}`, last that of `{names[-1]}`" if names else ""
    return NonFiniteError(
        f"The gradients overflow float16{where}, and the loss scale is at its smallest. After "
        f"{step} updates the loss of process {process} is {value:g}. At a smaller "
        "scale gradients would be rounded to zero. Lower the learning rate, look for inputs or "
        'losses that are not finite, or use "bf16"; `FP16(min_scale=...)` sets the smallest scale.',
        step=step,
        process=process,
        parameter=names[0] if names else None,
    )
