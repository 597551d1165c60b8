"""How large a model and a window are, for summaries."""

from torch import nn

from trainkit.basics.formatting import count
from trainkit.data import PreparedLoader


def parameter_counts(model: nn.Module) -> tuple[int, int]:
    """Return how many elements the parameters of a model have, and how many of them train."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, trains in sizes if trains)


def describe_window(loader: PreparedLoader, accumulation: int) -> str:
    """Return how many samples a window has, and what they come from."""
    if loader.parts:
        policy = (loader.combination(accumulation) or "").partition(" of ")[0]
        parts = (f"`{n}` {describe_window(p, accumulation)}" for n, p in loader.parts.items())
        return f"{policy} of {', '.join(parts)}"
    processes = count(loader.processes.size, "process")
    factors = f"{processes} x {count(accumulation, 'micro-batch')}"
    total = loader.nominal_window(accumulation)
    if total is None:
        return f"varies ({factors})"
    return f"{count(total, 'sample')} ({loader.batch_size} x {factors})"
