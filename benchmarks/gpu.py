"""trainkit against a loop by hand on one CUDA device: a GPT-2 of 124 M parameters, and its data.

Run it in the root of the repository; it needs no network, and about six minutes:

    python -m benchmarks.gpu --output gpu.json

- `training`: tokens per second in bf16, in fp16, and in bf16 compiled, with clipping and a fused
  AdamW; both loops in turns, in one process, with the same options.
- `syncs`: how often a step makes the host wait for the device, as torch itself reports it.
- `data`: a loop that waits for its loader; how much of it is hidden behind the device.
- `checkpoint`: how long a save holds up training, in the foreground and in the background, beside a
  plain copy of the same state to pinned memory.

The device is waited for twice in each run: where the measured steps begin, and where they end.
`--tiny` tries the script itself, also on a CPU; its times say nothing.
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset, TensorDataset
from typing_extensions import override

from trainkit.callbacks import Checkpoint
from trainkit.testing.speed import Span, Task, by_hand, by_trainkit, loss_of, move, run, wait

SAVES = 4
SYNC_WARNING = "synchronizing CUDA operation"


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Args:
        model: Settings of `GPT2Config`.
        batch_size: Sequences.
        warm_up: Steps before the measured ones.
        steps: Measured steps of a run.
        rounds: Runs of each loop, in turns.
        images: Of the data-bound part: number, batch size, width.
        save_every: Steps between two checkpoints; the one before must be written by then.
        backend: Of torch.compile.
    """

    model: dict[str, Any]
    batch_size: int
    warm_up: int
    steps: int
    rounds: int
    images: tuple[int, int, int]
    save_every: int
    backend: str

    @property
    def counted(self) -> tuple[int, int]:
        """Steps of the warm-up, and the measured ones."""
        return self.warm_up, self.steps

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch_size * int(self.model["n_positions"])


FULL = Size(
    {"n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50304},
    batch_size=16, warm_up=10, steps=40, rounds=3, images=(16384, 256, 64), save_every=80,
    backend="inductor",
)  # fmt: skip
TINY = Size(
    {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 8, "vocab_size": 64},
    batch_size=2, warm_up=2, steps=4, rounds=1, images=(64, 8, 8), save_every=3,
    backend="eager",
)  # fmt: skip


class Texts(Dataset[dict[str, Tensor]]):
    """Random tokens."""

    def __init__(self, size: Size, length: int) -> None:
        shape = (length, size.model["n_positions"])
        self.tokens = torch.randint(size.model["vocab_size"], shape)

    def __len__(self) -> int:
        return len(self.tokens)

    @override
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


@dataclass
class Syncs(Span):
    """The same, with how often the host waited for the device, as torch itself reports it."""

    @property
    def syncs(self) -> int:
        """How often the host waited."""
        return sum(SYNC_WARNING in text for text in self.warnings)

    @override
    def after_update(self, *_: Any) -> None:
        self._report("default")
        super().after_update()
        self._report("warn" if len(self.stamps) == 1 else "default")

    def _report(self, mode: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_sync_debug_mode(mode)


def make_model(size: Size) -> nn.Module:
    """Return a GPT-2 without dropout, from its settings alone."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model: nn.Module = GPT2LMHeadModel(
        GPT2Config(
            **size.model, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0,
            eos_token_id=0, use_cache=False,
        )
    )  # fmt: skip
    return model


def make_optimizer(parameters: Any) -> Optimizer:
    """Return the optimizer of both loops."""
    return AdamW(parameters, lr=1e-4, fused=True)


def text_task(size: Size, device: torch.device, steps: int, **options: Any) -> Task:
    """Return the training of the language model; its data cost next to nothing."""
    loader = partial(DataLoader, Texts(size, steps * size.batch_size), batch_size=size.batch_size)
    return Task(device, loader, make_optimizer, **options)


def measure_training(size: Size, device: torch.device) -> dict[str, Any]:
    """Return tokens per second and syncs of both loops in each precision."""
    compiled = {"backend": size.backend}
    variants: dict[str, dict[str, Any]] = {
        "bf16": {"precision": "bf16"}, "fp16": {"precision": "fp16"},
        "bf16 compiled": {"precision": "bf16", "compile": compiled},
    }  # fmt: skip
    results: dict[str, Any] = {}
    for name, options in variants.items():
        task = text_task(size, device, size.warm_up + size.steps, **options)
        models = {"raw": make_model(size), "trainkit": make_model(size)}
        loops: dict[str, Callable[..., None]] = {"raw": by_hand, "trainkit": by_trainkit}
        seconds: dict[str, list[float]] = {loop: [] for loop in loops}
        for number in range(size.rounds + 1):
            for loop, train in loops.items():
                span = run(task, train, models[loop], Span(device, *size.counted))
                if number:  # the first round is warm-up: kernels, memory, compilation
                    seconds[loop].append(span.seconds)
        results[name] = row = compare(seconds, size.tokens)
        if "compile" not in options:
            row |= {
                f"{loop} syncs a step": span.syncs / size.steps
                for loop, train in loops.items()
                for span in [
                    run(task, train, models[loop], Syncs(device, size.warm_up, size.steps))
                ]
            }
        show(f"training, {name}", row)
    bf16, fp16 = results["bf16"], results["fp16"]
    results["fp16 costs over bf16"] = row = {
        loop: round(fp16[f"{loop}, ms a step"] / bf16[f"{loop}, ms a step"], 3)
        for loop in ("raw", "trainkit")
    }
    show("fp16 costs over bf16", row)
    return results


def compare(seconds: dict[str, list[float]], tokens: int) -> dict[str, Any]:
    """Return the medians of both loops, and their ratio within the rounds."""
    ratios = [raw / ours for ours, raw in zip(seconds["trainkit"], seconds["raw"], strict=True)]
    row: dict[str, Any] = {}
    for loop, times in seconds.items():
        row[f"{loop}, ms a step"] = round(1e3 * statistics.median(times), 3)
        row[f"{loop}, tokens/s"] = round(tokens / statistics.median(times))
    row["trainkit to raw"] = round(statistics.median(ratios), 4)
    row["range"] = [round(min(ratios), 4), round(max(ratios), 4)]
    return row


def make_net(width: int) -> nn.Module:
    """Return a small convolutional classifier."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, stride=2), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def measure_data(size: Size, device: torch.device) -> dict[str, Any]:
    """Return the time of a step that waits for its data, and what device and data take alone."""
    number, batch_size, width = size.images
    dataset = TensorDataset(torch.randn(number, 3, width, width), torch.randint(10, (number,)))
    steps = number // batch_size
    part = replace(size, warm_up=steps // 4, steps=steps - steps // 4)
    results: dict[str, Any] = {}
    for workers in (0, 2):
        loader = partial(
            DataLoader, dataset, batch_size=batch_size, shuffle=True, num_workers=workers
        )
        task = Task(device, loader, partial(SGD, lr=1e-3), nn.CrossEntropyLoss(), max_norm=None)
        loops: dict[str, Callable[..., None]] = {
            "raw": by_hand, "raw, not pinned": partial(by_hand, pinned=False),
            "trainkit": by_trainkit,
        }  # fmt: skip
        times: dict[str, list[float]] = {loop: [] for loop in loops}
        for _ in range(size.rounds):
            for loop, train in loops.items():
                times[loop].append(
                    run(
                        task, train, make_net(width), Span(device, part.warm_up, part.steps)
                    ).seconds
                )
        row = {f"{loop}, ms a step": 1e3 * statistics.median(t) for loop, t in times.items()}
        row["trainkit to raw"] = statistics.median(
            raw / ours for ours, raw in zip(times["trainkit"], times["raw"], strict=True)
        )
        row["device alone, ms a step"] = 1e3 * _device_alone(task, width, steps)
        row["loader alone, ms a step"] = 1e3 * _loader_alone(task)
        results[f"{workers} workers"] = row = {name: round(v, 3) for name, v in row.items()}
        show(f"data-bound, {workers} workers", row)
    return results


def _device_alone(task: Task, width: int, steps: int) -> float:
    """Return the seconds of a step whose batch lies on the device already."""
    model = make_net(width).to(task.device)
    optimizer = task.make_optimizer(model.parameters())
    batch = move(next(iter(task.loader())), task.device)
    start = 0.0
    for number in range(2 * steps):
        if number == steps:
            wait(task.device)
            start = time.perf_counter()
        torch.autograd.backward(loss_of(model, batch, task.loss_fn))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    wait(task.device)
    return (time.perf_counter() - start) / steps


def _loader_alone(task: Task) -> float:
    """Return the seconds that the plain loader takes for a batch."""
    loader = task.loader()
    start = time.perf_counter()
    for _ in loader:
        pass
    return (time.perf_counter() - start) / len(loader)


def measure_checkpoint(size: Size, device: torch.device) -> dict[str, Any]:
    """Return how long saves hold up training, beside a plain copy of the state."""
    every = size.save_every
    task = text_task(size, device, SAVES * every, precision="bf16")
    results: dict[str, Any] = {}
    for name, background in (("foreground", False), ("background", True)):
        model = make_model(size)
        with tempfile.TemporaryDirectory() as folder:
            saving = Checkpoint(every_n_steps=every, background=background)
            with closing(_Ticks(device)) as ticks:
                by_trainkit(task, model, callbacks=[saving], output_dir=folder)
        ticks.note(results, name, every)
    results["state, MB"], copy = _plain_copy(make_model(size).to(device))
    results["plain copy to pinned memory, ms"] = round(1e3 * copy, 1)
    stall = results["background, first steps after a save, ms longer"]
    results["background to plain copy"] = round(statistics.median(stall) / (1e3 * copy), 2)
    show("checkpoint", results)
    return results


class _Ticks:
    """The moment after each update, when the device has done it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._times: list[float] = []
        self._hook = register_optimizer_step_post_hook(self._tick)

    def close(self) -> None:
        """Watch no more."""
        self._hook.remove()

    def note(self, results: dict[str, Any], name: str, every: int) -> None:
        """Add how much longer the steps took in which a save was made, and those after them."""
        steps = [after - before for before, after in zip(self._times, self._times[1:])]  # noqa: B905
        usual = statistics.median(steps)
        # Step k + 1 begins with the save of step k. The very first save makes the buffers.
        longer = [1e3 * (steps[k - 1] - usual) for k in range(every, len(steps) + 1, every)]
        results[f"{name}, first steps after a save, ms longer"] = [round(t, 1) for t in longer[1:]]
        results[f"{name}, first save, ms longer"] = round(longer[0], 1)
        results[f"{name}, usual step, ms"] = round(1e3 * usual, 2)
        results[f"{name}, mean step, ms"] = round(1e3 * statistics.mean(steps), 2)

    def _tick(self, *_: Any) -> None:
        wait(self._device)
        self._times.append(time.perf_counter())


def _plain_copy(model: nn.Module) -> tuple[int, float]:
    """Return the megabytes of a model with the state of its AdamW, and the seconds of a copy."""
    weights = [parameter.detach() for parameter in model.parameters()]
    tensors = [*weights, *(w.clone() for w in weights), *(w.clone() for w in weights)]
    pinned = weights[0].is_cuda
    buffers = [torch.empty(t.shape, dtype=t.dtype, pin_memory=pinned) for t in tensors]
    times = []
    for _ in range(4):
        wait(weights[0].device)
        start = time.perf_counter()
        torch._foreach_copy_(buffers, tensors, non_blocking=True)
        wait(weights[0].device)
        times.append(time.perf_counter() - start)
    return round(sum(t.nbytes for t in tensors) / 1e6), statistics.median(times[1:])


def show(name: str, row: dict[str, Any]) -> None:
    """Print the figures of a part."""
    print(f"\n{name}")
    for key, value in row.items():
        print(f"    {key:48} {value}")
    sys.stdout.flush()


PARTS: dict[str, Callable[[Size, torch.device], dict[str, Any]]] = {
    "training": measure_training,
    "data": measure_data,
    "checkpoint": measure_checkpoint,
}


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--tiny", action="store_true", help="try the script, also on a CPU")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS], metavar="PART",
                        help=f"some of: {', '.join(PARTS)}")  # fmt: skip
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and not arguments.tiny:
        raise SystemExit(
            "This needs a CUDA device, but torch finds none. `--tiny` tries the script on a CPU."
        )
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    facts = {
        "device": torch.cuda.get_device_name(0) if device.type == "cuda" else "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    size = TINY if arguments.tiny else FULL
    results: dict[str, Any] = {}
    for part in arguments.parts:
        start = time.perf_counter()
        results[part] = PARTS[part](size, device)
        print(f"    ({time.perf_counter() - start:.0f} s)", flush=True)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(facts | results, indent=2) + "\n")


if __name__ == "__main__":
    main()
