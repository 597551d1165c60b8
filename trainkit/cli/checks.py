"""What `trainkit test` runs on every process: `python -m trainkit.cli.checks`."""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.accelerator.accelerator import Accelerator
from trainkit.basics.device import wide_dtype
from trainkit.basics.launch_environment import MIXED_PRECISIONS
from trainkit.distributed import run_on_main
from trainkit.distributed.collectives import run_on_all
from trainkit.distributed.world import World
from trainkit.errors import DistributedError
from trainkit.testing.task import (
    GLOBAL_BATCH,
    SAMPLES,
    STEPS_PER_EPOCH,
    Network,
    check_resume,
    loaders,
    same,
    train,
    weights,
)

_STEPS = 4


def main() -> int:
    """Run the checks, print a line for each, and return 0 if all are well."""
    accelerator = Accelerator()
    kind = accelerator.device.type
    accelerator.print(f"{accelerator.num_processes} process(es), device type {kind}")
    precision = MIXED_PRECISIONS[accelerator.mixed_precision]
    checks: dict[str, Callable[[Accelerator], None]] = {
        "places: every process has its own number and device": _places,
        "collectives: sum, broadcast and gather are right": _collectives,
        f"precision: {precision} trains to finite, equal weights": _precision,
        "training: the weights are those of one process": _training,
        "checkpoint: a resumed run ends as one that was never stopped": _checkpoint,
    }
    failed = 0
    for name, check in checks.items():
        try:
            run_on_all(accelerator.processes, partial(check, accelerator))
        except Exception as error:
            failed = 1
            accelerator.print(f"FAILED  {name}\n        {type(error).__name__}: {error}")
        else:
            accelerator.print(f"ok      {name}")
    return failed


def _require(is_right: bool, message: str) -> None:
    if not is_right:
        raise DistributedError(message)


def _places(accelerator: Accelerator) -> None:
    mine = [accelerator.process_index, str(accelerator.device), os.uname().nodename]
    places = accelerator.processes.all_gather_objects(mine)
    ranks = [place[0] for place in places]
    _require(ranks == list(range(len(ranks))), f"The processes are numbered {ranks}.")
    if accelerator.device.type != "cpu":
        devices = [tuple(place[1:]) for place in places]
        _require(
            len(set(devices)) == len(devices),
            f"Several processes use one device: {devices}. Start fewer (`--num_processes`).",
        )


def _collectives(accelerator: Accelerator) -> None:
    size, rank = accelerator.num_processes, accelerator.process_index
    wrong: list[str] = []  # raised at the end: all processes call the same collectives
    for device in dict.fromkeys((torch.device("cpu"), accelerator.device)):  # in this order on all
        row = torch.arange(1000, device=device)  # whole numbers: exact for any number of processes
        total = accelerator.reduce(row + rank)
        sent = accelerator.broadcast(row + rank, from_process=size - 1)
        gathered = accelerator.gather(torch.full((rank + 1,), rank, device=device)).tolist()
        results = {
            "sum": torch.equal(total, size * row + size * (size - 1) // 2),
            "broadcast": torch.equal(sent, row + size - 1),
            "gather": gathered == [each for each in range(size) for _ in range(each + 1)],
        }
        wrong += [f"{name} on {device.type}" for name, right in results.items() if not right]
    _require(not wrong, f"These are wrong: {', '.join(wrong)}.")


def _fit(dtype: torch.dtype, **options: Any) -> dict[str, Tensor]:
    """Train on all samples in each step, on all processes together; return the weights."""
    batch = -(-SAMPLES // World.current().size)
    usual = {"max_epochs": None, "max_steps": _STEPS, "max_grad_norm": None}
    options = {"gradient_accumulation_steps": 1, **usual, **options}
    return weights(train(batch, [], dtype=dtype, **options)[-1])


def _precision(accelerator: Accelerator) -> None:
    precision = MIXED_PRECISIONS[accelerator.mixed_precision]
    found = _fit(torch.float32, precision=precision)
    is_finite = all(bool(weight.isfinite().all()) for weight in found.values())
    everywhere = accelerator.processes.all_gather_objects(found)
    different = [rank for rank, each in enumerate(everywhere) if not same([each, found])]
    _require(is_finite, f"Training in {precision} gave weights that are not finite.")
    _require(not different, f"Process {different} and this one have different weights.")


def _training(accelerator: Accelerator) -> None:
    dtype = wide_dtype(accelerator.device.type)
    model, (inputs, targets) = Network(dtype), next(iter(loaders(SAMPLES, dtype)[0]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)  # as `fit` has it
    for _ in range(_STEPS):
        optimizer.zero_grad()
        loss: Tensor = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    found = _fit(dtype)
    alone = weights(model)
    error = max(float((found[name] - alone[name]).abs().max()) for name in alone)
    allowed = 4096 * torch.finfo(dtype).eps  # sums in another order
    _require(error < allowed, f"Weights differ by {error:.2g} from those of one process.")


def _checkpoint(accelerator: Accelerator) -> None:
    options = {
        "dtype": torch.float32,
        "max_epochs": None,
        "max_steps": 2 * STEPS_PER_EPOCH,
        "gradient_accumulation_steps": 1,
        "deterministic": accelerator.device.type != "cpu",
    }
    is_one_machine = accelerator.processes.world.local_size == accelerator.num_processes
    place = None if is_one_machine else "."  # several share the present folder
    make = partial(tempfile.mkdtemp, prefix="trainkit-test-", dir=place)
    folder = Path(run_on_main(accelerator.processes, make)).absolute()
    try:
        batch = -(-GLOBAL_BATCH // accelerator.num_processes)
        check_resume("a training", batch, folder, options.copy)
    finally:
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
