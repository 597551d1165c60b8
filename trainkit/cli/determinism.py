"""What `trainkit test --determinism` trains, in ways whose results must agree, and whether they do.

Each process of a start runs `python -m trainkit.cli.determinism FOLDER ROUND MOST`, and leaves what
it found in the folder. There are two rounds, in processes of their own; `findings` compares.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from trainkit.basics.device import wide_dtype
from trainkit.distributed.world import World
from trainkit.errors import ConfigError
from trainkit.testing.task import Network, Record, Save, train, weights
from trainkit.trainer import Trainer

__all__ = ["ROUNDS", "Finding", "findings", "leave_results"]

ROUNDS = ("first", "again")

_STEPS, _SAVED = 8, 3  # the save is in the middle of an epoch
_BITS = "equal bits"
_LIMITS = {"float64": 1e-12, "float32": 1e-4}  # of the largest value: sums in another order
_COMPILE: Any = True
_MOST_LETTERS = 60  # of why something cannot be tried
_PAIRS = (  # of one strategy on as many processes; the last says whether bits must be equal
    ("the same run twice", "run", "run again", True),
    ("a run that was stopped and resumed", "run", "resumed", True),
    ("windows of one and of two micro-batches", "wide", "accumulated", False),
    ("compiled or not", "wide", "compiled", False),
    ("compiled, the same run twice", "compiled", "compiled again", True),
)


Ranks = dict[int, dict[str, Any]]
"""By process, what each way to train came to, or why it could not be tried."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A promise, and what was found where it was tried; `holds` is None where it was not."""

    device: str
    what: str
    promised: str
    found: str
    holds: bool | None


class _Noisy(Network):
    """A network that draws from the random stream of its process."""

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(inputs), 0.2, self.training)


def leave_results(folder: Path, part: str, most: int) -> None:
    """Train in each way of a round, and write what came out on this process.

    The global batch is the same in all starts, of which the largest has `most` processes.
    """
    world = World.from_env()
    kind = Trainer(max_steps=1, callbacks=[]).processes.device.type
    wide = str(wide_dtype(kind)).removeprefix("torch.")
    results: dict[str, Any] = {}
    for strategy in ("single",) if world.size == 1 else ("ddp", "fsdp"):
        run = partial(_train, 4 * most // world.size, kind, strategy=strategy)
        ways = _ways(run, folder / f"{kind}-{world.size}-{strategy}", part)
        for name, way in ways.items():
            if "compiled" not in name:
                results[f"{strategy} {name}"] = way()
            elif world.size == 1:
                results[f"{strategy} {name}"] = _tried(way)
    about = {"device": kind, "wide": wide, "size": world.size, "rank": world.rank}
    path = folder / f"{kind}-{world.size}-{part}-{world.rank}.json"
    path.write_text(json.dumps({**about, "results": results}))


def _ways(run: Any, own: Path, part: str) -> dict[str, Callable[[], list[float]]]:
    compiled = partial(run, wide=True, compile=_COMPILE)
    if part == ROUNDS[0]:
        accumulated = partial(run, wide=True, accumulation=2)
        first = {"run": partial(run, output_dir=own), "wide": partial(run, wide=True)}
        return {**first, "accumulated": accumulated, "compiled": compiled}
    saved = own / "checkpoints" / f"step-{_SAVED:08d}"
    return {"run again": run, "resumed": partial(run, resume=saved), "compiled again": compiled}


def _train(
    batch: int,
    device: str,
    *,
    wide: bool = False,
    accumulation: int = 1,
    **options: Any,
) -> list[float]:
    """Return the losses after the save, and the weights at the end."""
    record = Record()
    _, _, model = train(
        batch,
        [record, Save(_SAVED)] if "output_dir" in options else [record],
        dtype=wide_dtype(device) if wide else torch.float32,
        model_class=Network if wide else _Noisy,
        evaluates=False,
        max_epochs=None,
        max_steps=_STEPS,
        precision="fp32" if wide else "auto",
        gradient_accumulation_steps=accumulation,
        deterministic=device != "cpu",
        **options,
    )
    ends = torch.cat([value.double().flatten() for value in weights(model).values()])
    return [*record.losses[_SAVED - _STEPS :], *ends.tolist()]


def _tried(way: Callable[[], list[float]]) -> list[float] | str:
    """Return what a compiled training came to, or why nothing can be compiled here."""
    try:
        return way()
    except Exception as error:
        is_torch = type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))
        if not (is_torch or isinstance(error, ConfigError)):
            raise
        return str(error).strip().split("\n", 1)[0]


# What the starts came to.


def findings(folder: Path) -> list[Finding]:
    """Compare what the processes of all starts have left in a folder."""
    devices: dict[tuple[str, str], dict[int, Ranks]] = {}
    for path in sorted(folder.glob("*.json")):
        file = json.loads(path.read_text())
        ranks = devices.setdefault((file["device"], file["wide"]), {}).setdefault(file["size"], {})
        ranks.setdefault(file["rank"], {}).update(file["results"])
    found = sorted(devices.items(), key=lambda device: device[0][0] == "cpu")
    return [row for (kind, wide), sizes in found for row in _of_device(kind, wide, sizes)]


def _of_device(kind: str, wide: str, sizes: Mapping[int, Ranks]) -> Iterator[Finding]:
    row = partial(_finding, kind, wide)
    for size, by_rank in sorted(sizes.items()):
        own = by_rank[0]
        for strategy in dict.fromkeys(name.split()[0] for name in own):
            place = "1 process" if size == 1 else f"{size} processes, {strategy}"
            for what, one, other, bits in _PAIRS:
                a, b = (own.get(f"{strategy} {name}") for name in (one, other))
                if a is not None and b is not None:
                    yield row(f"{place}: {what}", a, b, bits)
        if size > 1:
            held = [by_rank[rank]["ddp run"] for rank in range(size)]
            other = next((each for each in held if each != held[0]), held[0])
            yield row(f"{size} processes, ddp: all hold the same", held[0], other, True)
            yield row(f"{size} processes: ddp and fsdp", own["ddp wide"], own["fsdp wide"], False)
            if 1 in sizes:
                alone = sizes[1][0]["single wide"]
                yield row(f"1 and {size} processes", alone, own["ddp wide"], False)


def _finding(kind: str, wide: str, what: str, a: Any, b: Any, bits: bool) -> Finding:
    limit = _LIMITS[wide]
    promised = _BITS if bits else f"to {limit:.0e} in fp{wide.removeprefix('float')}"
    for why in (a, b):
        if isinstance(why, str):
            return Finding(kind, what, promised, f"not tried: {why[:_MOST_LETTERS]}", None)
    if a == b:
        return Finding(kind, what, promised, _BITS, True)
    x, y = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    apart = float((x - y).abs().max() / x.abs().max())
    return Finding(kind, what, promised, f"apart by {apart:.1e}", not bits and apart <= limit)


if __name__ == "__main__":
    leave_results(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
