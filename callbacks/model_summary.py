"""Say what the model is made of."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from trainkit.basics.config import check_whole
from trainkit.basics.formatting import readable_size
from trainkit.basics.torch_internals import compiled_call
from trainkit.checkpoint.resharding.sharding_spec import local_part
from trainkit.containers.tree import children
from trainkit.training.callback import Callback
from trainkit.training.run import Run
from trainkit.types import StepResult, class_name

__all__ = ["ModelSummary"]

WIDTH = 79  # in the last column some terminals begin a new line
WIDEST = 22  # of the columns of types and outputs


class ModelSummary(Callback):
    """Prints modules, output shapes, parameters and sizes of the model, on the main process.

    The outputs are those of the first batch that the model sees in this fit: of an evaluation if
    there is one, which is tried out before the first step, else of training. It is watched, not
    run again, so that nothing of the training changes. A module that is not called has no output.
    A compiled model is shown at the start and without outputs, because watching would change how
    it is compiled.

    Under FSDP the parameters are those of the whole model, and a line says how much of it lies on
    this process. A model that was on the meta device has been filled by then.

    Args:
        depth: Levels of modules to show below the model, at least 0.
    """

    def __init__(self, depth: int = 3) -> None:
        check_whole("depth", depth, least=0)
        self.depth = depth
        self._outputs: dict[nn.Module, str] = {}
        self._watches: list[RemovableHandle] = []

    @override
    def on_fit_start(self, run: Run) -> None:
        self._outputs = {}
        if not run.is_main_process:
            return
        if is_compiled(run.module):
            print(model_table(run.module, self.depth, {}))
            return
        for module in run.module.modules():
            self._watches.append(module.register_forward_hook(self._note))
        last = run.module.register_forward_hook(lambda *_: self._show(run))
        self._watches.append(last)

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        if self._watches:  # the step called parts of the model, not the whole
            self._show(run)

    @override
    def on_fit_end(self, run: Run) -> None:
        self._unwatch()

    def _note(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._outputs.setdefault(module, describe_output(output))

    def _show(self, run: Run) -> None:
        self._unwatch()
        print(model_table(run.module, self.depth, self._outputs))
        self._outputs = {}

    def _unwatch(self) -> None:
        for watch in self._watches:
            watch.remove()
        self._watches = []


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One module, or several like it that follow one another.

    Attributes:
        level: How many modules it lies inside.
        name: Under which the module around it knows it; "0-11" for several.
        kind: Its class.
        repeats: How many they are.
        output: What one gives, as text; empty where it was not called.
        parameters: Elements of the parameters of one, those of modules inside it too.
        trained: How many of them require a gradient.
        shared: Whether a row above holds some of them too.
        inside: Rows of the modules inside one.
    """

    level: int
    name: str
    kind: str
    repeats: int = 1
    output: str
    parameters: int
    trained: int
    shared: bool
    inside: tuple["Row", ...] = ()


def model_rows(model: nn.Module, depth: int, outputs: Mapping[nn.Module, str]) -> list[Row]:
    """Return the rows of a model from the outermost one down.

    Modules in a list that are alike, and give alike outputs, are one row.

    Args:
        depth: Levels of modules to show below the model.
    """
    seen: set[nn.Parameter] = set()  # those of the rows that are complete

    def read(module: nn.Module, name: str, level: int) -> Row:
        parameters = set(module.parameters())
        is_shared = not parameters.isdisjoint(seen)
        is_opened = level < depth
        seen.update(module.parameters(recurse=False) if is_opened else parameters)
        parts = module.named_children() if is_opened else ()
        return Row(
            level=level,
            name=name,
            kind=class_name(module),
            output=outputs.get(module, ""),
            parameters=sum(p.numel() for p in parameters),
            trained=sum(p.numel() for p in parameters if p.requires_grad),
            shared=is_shared,
            inside=_merged(read(child, own_name, level + 1) for own_name, child in parts),
        )

    return list(_flat(read(model, "", 0)))


def _flat(row: Row) -> Iterator[Row]:
    yield row
    for inner in row.inside:
        yield from _flat(inner)


def _merged(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Return rows with those of lists put together that follow one another and are alike."""
    merged: list[Row] = []
    for row in rows:
        last = merged[-1] if merged else None
        # They say the same but for their names.
        if last and row.name.isdigit() and replace(last, name=row.name, repeats=1) == row:
            first = last.name.split("-")[0]
            merged[-1] = replace(last, name=f"{first}-{row.name}", repeats=last.repeats + 1)
        else:
            merged.append(row)
    return tuple(merged)


def describe_output(output: Any) -> str:
    """Return the shape of what a module gave: of `logits`, else of its first tensor."""
    tensor = _first_tensor(output)
    return "" if tensor is None else str(list(tensor.shape))


def _first_tensor(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and output.get("logits") is not None:
        return _first_tensor(output["logits"])
    tensors = map(_first_tensor, children(output))
    return next((tensor for tensor in tensors if tensor is not None), None)


def model_table(model: nn.Module, depth: int, outputs: Mapping[nn.Module, str]) -> str:
    """Return a table of a model's modules and its sizes, 79 columns wide at most."""
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
    lines = []
    for row in cells:
        cut = [t if len(t) <= w else f"{t[: w - 2]}.." for t, w in zip(row, widths, strict=True)]
        padded = [cell.ljust(width) for cell, width in zip(cut, widths, strict=True)]
        padded[3] = row[3].rjust(widths[3])  # the number of parameters
        lines.append("  " + "  ".join(padded).rstrip())
    return lines


def _totals(model: nn.Module) -> list[str]:
    parameters, buffers = list(model.parameters()), list(model.buffers())  # tied ones once
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    total = sum(p.numel() for p in parameters)
    lines = [
        f"  parameters  {total:,}, of which {trained:,} trained and {total - trained:,} not",
        f"  size        {_sizes(parameters)}" + (f"; buffers {_sizes(buffers)}" if buffers else ""),
    ]
    if any(local_part(p) is not p for p in parameters):
        own = sum(local_part(p).nbytes for p in parameters)
        lines.append(f"  sharded     of the parameters {readable_size(own)} lie on this process")
    return lines


def _sizes(tensors: Sequence[Tensor]) -> str:
    """Return the bytes of tensors by number format."""
    sizes: dict[str, int] = {}
    for tensor in tensors:
        name = str(tensor.dtype).removeprefix("torch.")
        sizes[name] = sizes.get(name, 0) + tensor.nbytes
    return ", ".join(f"{readable_size(size)} of {name}" for name, size in sizes.items()) or "0 B"


def is_compiled(module: nn.Module) -> bool:
    """Return whether any part of a model goes through `torch.compile`."""
    return any(
        compiled_call(part) is not None or hasattr(part, "_orig_mod") for part in module.modules()
    )
