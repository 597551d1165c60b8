"""The table that tells what a model is made of."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from trainkit.callbacks._support.model_rows import Row, model_rows
from trainkit.formatting import readable_size
from trainkit.types import class_name

__all__ = ["model_table"]

WIDTH = 79  # in the last column some terminals begin a new line
WIDEST = 22  # of the columns of types and outputs


def model_table(model: nn.Module, depth: int, outputs: Mapping[nn.Module, str]) -> str:
    """Return a table of a model's modules and its sizes, 79 columns wide at most.

    Args:
        model: Any module.
        depth: Levels of modules to show below the model.
        outputs: What modules gave, as text.
    """
    rows = model_rows(model, depth, outputs)
    cells = [("module", "type", "output", "parameters ", "trained"), *map(_cells, rows)]
    lines = [f"trainkit: model {class_name(model)}", *_lines(cells), *_totals(model)]
    if any(row.shared for row in rows):
        lines.append("  * held by a module above too (tied), and counted once in the total")
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    trained = "yes" if row.trained == row.parameters else "part" if row.trained else "no"
    return (
        "  " * (row.level - 1) + row.name if row.level else "(model)",
        row.kind if row.repeats == 1 else f"{row.repeats} x {row.kind}",
        row.output,
        f"{row.parameters:,}{'*' if row.shared else ' '}" if row.parameters else "",
        trained if row.parameters else "",
    )


def _lines(cells: Sequence[Sequence[str]]) -> list[str]:
    """Return the table; what is too long for it is cut."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    widths[1:3] = [min(width, WIDEST) for width in widths[1:3]]
    rest = WIDTH - 2 - 2 * (len(widths) - 1) - sum(widths[1:])
    widths[0] = min(widths[0], max(rest, len("module")))
    return [
        "  "
        + "  ".join(
            cell.rjust(width) if place == 3 else _cut(cell, width).ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 2]}.."


def _totals(model: nn.Module) -> list[str]:
    parameters, buffers = list(model.parameters()), list(model.buffers())  # tied ones once
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    total = sum(p.numel() for p in parameters)
    lines = [
        f"  parameters  {total:,}, of which {trained:,} trained and {total - trained:,} not",
        f"  size        {_sizes(parameters)}" + (f"; buffers {_sizes(buffers)}" if buffers else ""),
    ]
    if any(_local(p) is not p for p in parameters):
        own = sum(_local(p).nbytes for p in parameters)
        lines.append(f"  sharded     of the parameters {readable_size(own)} lie on this process")
    return lines


def _sizes(tensors: Sequence[Tensor]) -> str:
    """Return the bytes of tensors by number format."""
    sizes: dict[str, int] = {}
    for tensor in tensors:
        name = str(tensor.dtype).removeprefix("torch.")
        sizes[name] = sizes.get(name, 0) + tensor.nbytes
    return ", ".join(f"{readable_size(size)} of {name}" for name, size in sizes.items()) or "0 B"


def _local(tensor: Tensor) -> Tensor:
    """Return the part of a tensor on this process; itself where it is whole."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
