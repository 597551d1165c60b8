"""How long a save in the background holds up training, against a plain copy of the same state.

The state is a model and its AdamW. All times are taken in one process, in turns: the blocked time
of `Saver.save`, a copy of every tensor into a buffer that is there already, and a save in the
foreground. The parameters change at once after each save; what was written must be what was there.

With `--storage s3://bucket/folder` there are also saves in the background that are mirrored there,
while the upload of the save before may be under way.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.basics.lock import RunLock
from trainkit.basics.outputs import absolute
from trainkit.checkpoint import KeepPolicy
from trainkit.checkpoint.saver import Saver
from trainkit.distributed import Processes
from trainkit.storage.mirror import Mirror

AIM = 1.3  # times the plain copy


def make_state(width: int, depth: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model of `depth` layers and an AdamW that has made a step."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(depth)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def parts_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what a checkpoint holds of them."""
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of a state, in its order."""
    if isinstance(value, Tensor):
        return [value.detach()]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for item in value for t in tensors_in(item)] if isinstance(value, list) else []


def seconds(action: Callable[[], object]) -> float:
    """Return the wall time of `action`."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def check(saver: Saver, path: Path | None, expected: list[Tensor]) -> None:
    """Check that the checkpoint at `path` holds `expected`, to the last bit."""
    assert path is not None
    checkpoint = saver.store.open(path)
    found = tensors_in([checkpoint.read("model"), checkpoint.read("optimizer")])
    if len(found) != len(expected) or not all(map(torch.equal, found, expected)):
        raise SystemExit("The checkpoint does not hold the state of its step.")


def mirrored(saver: Saver, folder: Path) -> Mirror:
    """Let what a saver commits be mirrored; return what does so."""
    mirror = Mirror(RunLock(folder).acquire(), print)
    saver.committed = mirror.committed
    return mirror


def measure(
    model: nn.Module, optimizer: torch.optim.Optimizer, rounds: int, storage: Path | None
) -> dict[str, Any]:
    """Take all times, in turns; the first round fills the buffers and is reported apart."""
    tensors = tensors_in(parts_of(model, optimizer))
    buffers = [tensor.clone() for tensor in tensors]
    expected = [tensor.clone() for tensor in tensors]
    copied, front = [], []
    blocked: dict[str, list[float]] = {}
    written: dict[str, list[float]] = {}

    def copy() -> None:
        for buffer, tensor in zip(buffers, tensors, strict=True):
            buffer.copy_(tensor)

    def save(saver: Saver, step: int) -> float:
        parts = parts_of(model, optimizer)
        return seconds(lambda: saver.save(step, parts, {}))

    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        folders = {"background": Path(place, "background"), "foreground": Path(place, "foreground")}
        if storage is not None:
            folders["mirrored"] = storage
        savers = {
            name: Saver(folder, Processes.start(), KeepPolicy(), run_id="bench",
                        goes_on=False, background=name != "foreground")
            for name, folder in folders.items()
        }  # fmt: skip
        for saver in savers.values():
            stack.enter_context(closing(saver))
        foreground = savers.pop("foreground")
        if storage is not None:
            stack.callback(mirrored(savers["mirrored"], storage).release)
        for step in range(rounds + 1):
            copied.append(seconds(copy))
            for name, saver in savers.items():
                blocked.setdefault(name, []).append(save(saver, step))
                torch._foreach_copy_(expected, tensors)
                optimizer.step()  # training goes on while the thread writes
                path: list[Path | None] = []
                took = seconds(lambda: path.append(saver.wait()))  # noqa: B023
                written.setdefault(name, []).append(took)
                check(saver, path[0], expected)
            front.append(save(foreground, step))
    ours = blocked["background"]
    ratios = [one / other for one, other in zip(ours[1:], copied[1:], strict=True)]
    found = {
        "megabytes": round(sum(tensor.nbytes for tensor in tensors) / 1e6),
        "tensors": len(tensors),
        "plain copy, ms": median(copied),
        "blocked in the background, ms": median(ours),
        "ratio": round(statistics.median(ratios), 2),
        "first save, ms": round(1e3 * ours[0], 1),
        "foreground, ms": median(front),
        "then written within, ms": median(written["background"]),
    }
    if storage is not None:
        found["blocked where it is mirrored, ms"] = median(blocked["mirrored"])
        found["then written within where it is mirrored, ms"] = median(written["mirrored"])
    return found


def median(times: list[float]) -> float:
    """Return the median of seconds in milliseconds, without the first."""
    return round(1e3 * statistics.median(times[1:]), 1)


def main() -> None:
    """Print the tables; exit with 1 where the loop is blocked longer than the aim allows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--storage", metavar="ADDRESS", help="mirror there, too")
    arguments = parser.parse_args()
    results = {}
    for name, width, depth in (("large tensors", 1024, 20), ("small tensors", 256, 300)):
        storage = None
        if arguments.storage is not None:
            address = f"{arguments.storage}/{name.replace(' ', '-')}"
            storage = absolute(address, "--storage", stored=True)
        results[name] = measure(*make_state(width, depth), arguments.rounds, storage)
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in results[name].items()))
    if arguments.output:
        facts = {"python": platform.python_version(), "torch": torch.__version__,
                 "cores": os.cpu_count(), "threads": torch.get_num_threads()}  # fmt: skip
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(facts | {"results": results}, indent=2) + "\n")
    if any(row["ratio"] > AIM for row in results.values()):
        raise SystemExit(f"Blocked longer than {AIM} times a plain copy.")


if __name__ == "__main__":
    main()
