"""What `trainkit test` does on every process of a job: `python -m trainkit.testing.job`.

Without arguments it checks that the processes work together. With `FOLDER ROUND MOST` it trains in
ways whose results must agree, and leaves them in the folder, for `findings` to compare.
"""

import json
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from trainkit.basics.device import wide_dtype
from trainkit.distributed import run_on_main
from trainkit.distributed.collectives import run_on_all
from trainkit.distributed.communicator import Communicator
from trainkit.errors import ConfigError, DistributedError
from trainkit.testing import task
from trainkit.trainer import Trainer

# The processes work together.

_STEPS = 4


def check_job() -> int:
    """Run the checks, print a line for each, and return 0 if all are well."""
    trainer = Trainer(max_steps=1, precision="auto", callbacks=[])
    job, precision = trainer.processes, trainer.precision.name
    job.print(f"{job.num_processes} process(es), device type {job.device.type}")
    checks: dict[str, Callable[[Communicator], None]] = {
        "places: every process has its own number and device": _places,
        "collectives: sum, broadcast and gather are right": _collectives,
        f"precision: {precision} trains to finite, equal weights": partial(_precision, precision),
        "training: the weights are those of one process": _training,
        "checkpoint: a resumed run ends as one that was never stopped": _checkpoint,
    }
    failed = 0
    for name, check in checks.items():
        try:
            run_on_all(job.processes, partial(check, job))
        except Exception as error:
            failed = 1
            job.print(f"FAILED  {name}\n        {type(error).__name__}: {error}")
        else:
            job.print(f"ok      {name}")
    return failed


def _require(is_right: bool, message: str) -> None:
    if not is_right:
        raise DistributedError(message)


def _places(job: Communicator) -> None:
    mine = [job.process_index, str(job.device), socket.gethostname()]
    ranks, *devices = zip(*job.processes.all_gather_objects(mine), strict=True)
    _require([*ranks] == [*range(len(ranks))], f"The processes are numbered {[*ranks]}.")
    used = [*zip(*devices, strict=True)]
    _require(
        job.device.type == "cpu" or len({*used}) == len(used),
        f"Several processes use one device: {used}. Start fewer (`--num_processes`).",
    )


def _collectives(job: Communicator) -> None:
    size, rank = job.num_processes, job.process_index
    wrong: list[str] = []  # raised at the end: all processes call the same collectives
    for device in dict.fromkeys((torch.device("cpu"), job.device)):  # in this order on all
        row = torch.arange(1000, device=device)  # whole numbers: exact for any number of processes
        total = job.reduce(row + rank)
        sent = job.broadcast(row + rank, from_process=size - 1)
        gathered = job.gather(torch.full((rank + 1,), rank, device=device)).tolist()
        results = {
            "sum": torch.equal(total, size * row + size * (size - 1) // 2),
            "broadcast": torch.equal(sent, row + size - 1),
            "gather": gathered == [each for each in range(size) for _ in range(each + 1)],
        }
        wrong += [f"{name} on {device.type}" for name, right in results.items() if not right]
    _require(not wrong, f"These are wrong: {', '.join(wrong)}.")


def _fit(job: Communicator, dtype: torch.dtype, **options: Any) -> dict[str, Tensor]:
    """Train on all samples in each step, on all processes together; return the weights."""
    usual = {"max_epochs": None, "max_steps": _STEPS, "max_grad_norm": None}
    options = {"gradient_accumulation_steps": 1, **usual, **options}
    return task.weights(
        task.train(-(-task.SAMPLES // job.num_processes), [], dtype=dtype, **options)[-1]
    )


def _precision(precision: str, job: Communicator) -> None:
    weights = _fit(job, torch.float32, precision=precision)
    is_finite = all(bool(weight.isfinite().all()) for weight in weights.values())
    everywhere = job.processes.all_gather_objects(weights)
    different = [rank for rank, each in enumerate(everywhere) if not task.same([each, weights])]
    _require(is_finite, f"Training in {precision} gave weights that are not finite.")
    _require(not different, f"Process {different} and this one have different weights.")


def _training(job: Communicator) -> None:
    dtype = wide_dtype(job.device.type)
    model, (inputs, targets) = task.Network(dtype), next(iter(task.loaders(task.SAMPLES, dtype)[0]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)  # as `fit` has it
    for _ in range(_STEPS):
        optimizer.zero_grad()
        loss: Tensor = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    together, alone = _fit(job, dtype), task.weights(model)
    error = max(float((together[name] - alone[name]).abs().max()) for name in alone)
    allowed = 4096 * torch.finfo(dtype).eps  # sums in another order
    _require(error < allowed, f"Weights differ by {error:.2g} from those of one process.")


def _checkpoint(job: Communicator) -> None:
    options = {
        "dtype": torch.float32,
        "max_epochs": None,
        "max_steps": 2 * task.STEPS_PER_EPOCH,
        "gradient_accumulation_steps": 1,
        "deterministic": job.device.type != "cpu",
    }
    is_one_machine = job.processes.world.local_size == job.num_processes
    parent = None if is_one_machine else "."  # several share the present folder
    make = partial(tempfile.mkdtemp, prefix="trainkit-test-", dir=parent)
    folder = Path(run_on_main(job.processes, make)).absolute()
    try:
        batch = -(-task.GLOBAL_BATCH // job.num_processes)
        task.check_resume("a training", batch, folder, options.copy)
    finally:
        job.wait_for_everyone()
        if job.is_main_process:
            shutil.rmtree(folder, ignore_errors=True)


# Trainings whose results must agree.

ROUNDS = ("first", "again")
"""What is repeated or resumed is so in new processes."""

Row = tuple[str, str, str, str, bool | None]
"""Device, what was compared, what is promised and found, whether it holds; None: not tried."""

_ENOUGH, _SAVED = 8, 3  # steps; the save is in the middle of an epoch
_BITS = "equal bits"
_COMPILE: Any = True
_MOST_LETTERS = 60  # of why something cannot be tried
_PAIRS = (  # of one strategy on as many processes; the last says whether bits must be equal
    ("the same run twice", "run", "run again", True),
    ("a run that was stopped and resumed", "run", "resumed", True),
    ("windows of one and of two micro-batches", "wide", "accumulated", False),
    ("compiled or not", "wide", "compiled", False),
    ("compiled, the same run twice", "compiled", "compiled again", True),
    ("all hold the same", "run", "run elsewhere", True),
)


class _Noisy(task.Network):
    """A network that draws from the random stream of its process."""

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(inputs), 0.2, self.training)


def leave_results(folder: Path, part: str, most: int) -> None:
    """Train in each way of a round; process 0 writes what came out.

    The global batch is the same in all starts, of which the largest has `most` processes.
    """
    processes = Trainer(max_steps=1, callbacks=[]).processes.processes
    kind, size, is_first = processes.device.type, processes.size, part == ROUNDS[0]
    results: dict[str, Any] = {}
    for strategy in ("single",) if size == 1 else ("ddp", "fsdp"):
        run = partial(_train, 4 * most // size, kind, strategy=strategy)
        wide = partial(run, dtype=wide_dtype(kind))
        own = folder / f"{kind}-{size}-{strategy}"
        trained: dict[str, Any] = {}
        if is_first:
            trained = {"run": run(output_dir=own), "wide": wide()}
            trained["accumulated"] = wide(gradient_accumulation_steps=2)
            if size > 1:
                held = processes.all_gather_objects(trained["run"])
                trained["run elsewhere"] = next((one for one in held if one != held[0]), held[0])
        else:
            saved = own / "checkpoints" / f"step-{_SAVED:08d}"
            trained = {"run again": run(), "resumed": run(resume=saved)}
        if size == 1:
            compiled = _tried(partial(wide, compile=_COMPILE))
            trained["compiled" if is_first else "compiled again"] = compiled
        results |= {f"{strategy} {name}": values for name, values in trained.items()}
    if processes.is_main:
        (folder / f"{kind}-{size}-{part}.json").write_text(json.dumps(results))


def _train(batch: int, device: str, dtype: torch.dtype | None = None, **options: Any) -> Any:
    """Return the losses after the save, and the weights at the end.

    With a `dtype` it is exact arithmetic, else the job's precision with random numbers.
    """
    record = task.Record()
    defaults = {"gradient_accumulation_steps": 1, "precision": "auto" if dtype is None else "fp32"}
    _, _, model = task.train(
        batch,
        [record, task.Save(_SAVED)] if "output_dir" in options else [record],
        dtype=dtype or torch.float32,
        model_class=_Noisy if dtype is None else task.Network,
        evaluates=False,
        max_epochs=None,
        max_steps=_ENOUGH,
        deterministic=device != "cpu",
        **defaults | options,
    )
    ends = torch.cat([value.double().flatten() for value in task.weights(model).values()])
    return [*record.losses[_SAVED - _ENOUGH :], *ends.tolist()]


def _tried(way: Callable[[], Any]) -> Any:
    """Return what a compiled training came to, or why nothing can be compiled here."""
    try:
        return way()
    except Exception as error:
        is_torch = type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))
        if not (is_torch or isinstance(error, ConfigError)):
            raise
        return str(error).strip().split("\n", 1)[0]


def findings(folder: Path) -> list[Row]:
    """Compare what all starts have left in a folder."""
    devices: dict[str, dict[int, dict[str, Any]]] = {}
    for path in sorted(folder.glob("*.json")):
        kind, size, _ = path.stem.split("-")
        results = devices.setdefault(kind, {}).setdefault(int(size), {})
        results.update(json.loads(path.read_text()))
    kinds = sorted(devices, key=lambda kind: kind == "cpu")
    return [_finding(kind, *pair) for kind in kinds for pair in _pairs(devices[kind])]


def _pairs(sizes: dict[int, dict[str, Any]]) -> Iterator[tuple[str, Any, Any, bool]]:
    """Yield what is compared, both results, and whether their bits must be equal."""
    for size, results in sorted(sizes.items()):
        for strategy in dict.fromkeys(name.split()[0] for name in results):
            job = "1 process" if size == 1 else f"{size} processes, {strategy}"
            for what, one, other, bits in _PAIRS:
                a, b = results.get(f"{strategy} {one}"), results.get(f"{strategy} {other}")
                if a is not None and b is not None:
                    yield f"{job}: {what}", a, b, bits
        if size > 1:
            wide = results["ddp wide"]
            yield f"{size} processes: ddp and fsdp", wide, results["fsdp wide"], False
            if 1 in sizes:
                yield f"1 and {size} processes", sizes[1]["single wide"], wide, False


def _finding(kind: str, what: str, a: Any, b: Any, bits: bool) -> Row:
    limit, promised = 0.0, _BITS
    if not bits:  # sums in another order
        is_double = wide_dtype(kind) == torch.float64
        limit, promised = (1e-12, "to 1e-12 in fp64") if is_double else (1e-4, "to 1e-04 in fp32")
    for why in (a, b):
        if isinstance(why, str):
            return kind, what, promised, f"not tried: {why[:_MOST_LETTERS]}", None
    if a == b:
        return kind, what, promised, _BITS, True
    x, y = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    apart = float((x - y).abs().max() / x.abs().max())
    return kind, what, promised, f"apart by {apart:.1e}", apart <= limit


if __name__ == "__main__":
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # of deterministic trainings
    if len(sys.argv) == 1:
        sys.exit(check_job())
    leave_results(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
