"""What a replay leaves behind: files of the window, and what is said on the terminal."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainkit.basics.formatting import json_value
from trainkit.basics.terminal import print_table
from trainkit.basics.written_files import replace_file
from trainkit.containers.tree import map_leaves
from trainkit.inspect.observer import named_numbers, numbers_of
from trainkit.inspect.suspects import Fault, Part
from trainkit.training.failure import indices_of
from trainkit.training.run import Run

_MOST_ROWS = 30  # of modules on a terminal


@dataclass(kw_only=True)
class Replayed:
    """What a replay came to."""

    step: int
    """The update of the window that was opened; the last one made, where none was."""
    checkpoint: str | None
    """From where the run was made once more; None: from its start."""
    is_equal: bool | None
    """Whether the loss of each window was that of the recorded run, to the last bit; None where
    the journal has none of them, and after an error on another process than 0."""
    differs_from: int | None = None
    """The first step of which it was not."""
    loss: float | None = None
    """That of process 0 in this window."""
    fault: Fault | None = None
    """What was found that is not finite."""
    folder: Path | None = None
    """Where the window is: for each process its tensors, and a table as JSON."""


def publish(
    run: Run, result: Replayed, parts: list[Part], *, process: int | None, alone: bool
) -> None:
    """Write what the window holds, and say what was found; no collectives.

    Args:
        run: In its window.
        parts: The micro-batches of this process, which were seen.
        process: The one that is written; None: all.
        alone: Whether the others may have been ended.
    """
    rank, folder = run.strategy.processes.rank, result.folder
    assert folder is not None
    folder.mkdir(parents=True, exist_ok=True)
    table = _write_window(run, folder, parts) if process in (None, rank) else []
    if run.is_main_process or alone:
        about = json.dumps(json_value(asdict(result)), indent=1) + "\n"
        replace_file(folder / "replay.json", about.encode())
    of_fault = result.fault.process if result.fault else 0
    if alone or rank == (of_fault if process is None else process):
        _tell(result, table, rank)  # of any process


def _write_window(run: Run, folder: Path, parts: list[Part]) -> list[dict[str, Any]]:
    """Write the batches, modules and parameters of this process; return those of the modules."""
    from safetensors.torch import save_file  # only a replay needs it here

    tensors: dict[str, Tensor] = {}

    def named(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        name = f"batch.{len(tensors)}"
        tensors[name] = leaf.detach().to("cpu", copy=True).contiguous()
        return name

    modules: list[dict[str, Any]] = []
    batches = []
    for number, part in enumerate(parts):
        first, size = part.first, part.micro_batch.count
        span: dict[str, int] = {}
        if first is not None and size:
            span = {"first": first, "last": first + size - 1}
        data = map_leaves(part.micro_batch.data, named)
        batches.append({"count": size, **span, "data": data, **indices_of(run, span)})
        modules += [{"micro_batch": number, **row} for row in part.observer.table()]
    parameters = dict(run.module.named_parameters())
    with torch.no_grad():
        values = zip(parameters, run.strategy.local_parts(parameters.values()), strict=True)
        table = {name: {"value": _numbers(value)} for name, value in values}
        for name, parameter in parameters.items():
            for gradient in run.strategy.local_gradients([parameter]):
                table[name]["gradient"] = _numbers(gradient)
    about = {
        "process": run.strategy.processes.rank,
        "epoch": run.state.epoch,
        "micro_batches": batches,
        "modules": modules,
        "parameters": table,
    }
    name = f"process-{run.strategy.processes.rank}"
    save_file(tensors, folder / f"{name}.safetensors")
    replace_file(folder / f"{name}.json", (json.dumps(json_value(about), indent=1) + "\n").encode())
    return modules


def _numbers(tensor: Tensor) -> dict[str, float]:
    known = tensor.is_floating_point() and tensor.numel()
    return named_numbers([numbers_of(tensor)])[0] if known else {}


def _tell(result: Replayed, modules: list[dict[str, Any]], rank: int) -> None:
    """Say on the terminal what a replay came to."""
    numbers = ("mean", "std", "min", "max")
    rows = [
        (
            (row["module"] or "the model") if row["what"] == "output" else "the loss",
            *(f"{row['output'][name]:.4g}" for name in numbers),
            f"{row['output']['non_finite']:.0f}",
        )
        for row in modules[-_MOST_ROWS:]
    ]
    if rows:
        print_table(("MODULE", *(name.upper() for name in numbers), "NOT FINITE"), rows)
    where = "its start" if result.checkpoint is None else f"`{result.checkpoint}`"
    same = ": bit-equal to the recorded run" if result.is_equal else ""
    if result.is_equal is False:
        same = f": NOT the recorded run: the loss is another one from step {result.differs_from} on"
    loss = "" if result.loss is None else f", loss {result.loss:.9g}"
    lines = [f"step {result.step} on process {rank}, replayed from {where}{same}{loss}."]
    if (fault := result.fault) is not None:
        samples = f"rows {fault.rows} of its batch" if fault.rows else "which samples is not known"
        if fault.positions:
            samples += f", positions {fault.positions} of the epoch"
        if fault.indices:
            samples += f", in the data set {fault.indices}"
        told = "" if fault.kind == "parameter" else f" ({samples})"
        lines.append(f"process {fault.process}: {fault.text}{told}.")
    lines.append(f"see `{result.folder}`.")
    print("\n".join(f"trainkit: {line}" for line in lines), flush=True)
