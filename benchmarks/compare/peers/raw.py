"""A loop written by hand, as the PyTorch tutorials show it: what all others are compared with."""

import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset

from benchmarks.compare.evaluation import Evaluation, EvaluationParts
from benchmarks.compare.saving import Saving, StateParts
from benchmarks.compare.sharding import Sharding
from benchmarks.compare.training import LOG_EVERY, Parts, Training

PACKAGE = "torch"


def training(task: Training, parts: Parts) -> None:
    """Train with a plain loop."""
    model: nn.Module = parts.model
    loader = parts.loader
    if task.processes > 1:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
        sampler: Any = DistributedSampler(parts.dataset, shuffle=False)
        loader = DataLoader(parts.dataset, batch_size=task.batch_size, sampler=sampler)
    optimizer = parts.make_optimizer(model.parameters())
    autocast = torch.autocast("cpu", torch.bfloat16) if task.bf16 else nullcontext()
    extras = _Extras(task, parts, optimizer) if task.extras else None
    model.train()
    for _ in range(task.epochs):
        for number, batch in enumerate(loader, start=1):
            with autocast:
                loss = parts.loss(model, batch)
            if task.accumulation > 1:
                loss = loss / task.accumulation
            loss.backward()
            if number % task.accumulation:
                continue
            if task.max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), task.max_norm)
            optimizer.step()
            optimizer.zero_grad()
            if extras is not None:
                extras.step(loss)
        if extras is not None:
            extras.save()
    if extras is not None:
        extras.close()


class _Extras:
    """A progress bar, TensorBoard and checkpoints."""

    def __init__(self, task: Training, parts: Parts, optimizer: torch.optim.Optimizer) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from tqdm import tqdm

        self._writer = SummaryWriter(str(parts.folder / "tensorboard"))
        self._bar = tqdm(total=task.steps * task.epochs)
        self._steps = 0
        self._state = {"model": parts.model, "optimizer": optimizer}
        self._folder = parts.folder

    def step(self, loss: torch.Tensor) -> None:
        self._steps += 1
        self._bar.update()
        if self._steps % LOG_EVERY == 0:
            value = loss.item()
            self._bar.set_postfix(loss=value, refresh=False)
            self._writer.add_scalar("train/loss", value, self._steps)

    def save(self) -> None:
        state = {name: part.state_dict() for name, part in self._state.items()}
        torch.save(state | {"step": self._steps}, self._folder / f"step-{self._steps}.pt")

    def close(self) -> None:
        self._bar.close()
        self._writer.close()


def evaluation(task: Evaluation, parts: EvaluationParts) -> Callable[[], float]:
    """Keep what each process finds, and gather it once at the end."""
    rank, shares = _shares(task)
    model = parts.model.eval()
    loader = DataLoader(Subset(parts.dataset, shares[rank]), batch_size=task.batch_size)
    longest = len(shares[0])

    def evaluate() -> float:
        found: list[torch.Tensor] = []
        with torch.no_grad():
            for inputs, targets in loader:
                found.append(model(inputs).argmax(-1) == targets)
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(shares[rank])] = torch.cat(found)
        everything = [torch.empty_like(mine) for _ in shares]
        dist.all_gather(everything, mine)
        right = [all_[: len(share)] for all_, share in zip(everything, shares, strict=True)]
        return int(torch.cat(right).sum()) / task.length

    return evaluate


def gathering(task: Evaluation, parts: EvaluationParts) -> Callable[[], float]:
    """Gather every batch, as long as all are full; of the last ones each has as many as it has."""
    rank, shares = _shares(task)
    model = parts.model.eval()
    loader = DataLoader(Subset(parts.dataset, shares[rank]), batch_size=task.batch_size)

    def evaluate() -> float:
        right = total = 0
        with torch.no_grad():
            for number, (inputs, targets) in enumerate(loader):
                sizes = [min(task.batch_size, len(s) - number * task.batch_size) for s in shares]
                mine = torch.zeros(2, sizes[0], dtype=torch.int64)
                mine[0, : len(inputs)] = model(inputs).argmax(-1)
                mine[1, : len(inputs)] = targets
                everything = [torch.empty_like(mine) for _ in shares]
                dist.all_gather(everything, mine)
                kept = [both[:, :size] for both, size in zip(everything, sizes, strict=True)]
                predictions, references = torch.cat(kept, dim=1)
                right += (predictions == references).sum()
                total += len(references)
        return int(right) / total

    return evaluate


def _shares(task: Evaluation) -> tuple[int, list[range]]:
    """Return the rank of this process, and the samples of each; the first ones have one more."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    size = dist.get_world_size()
    return dist.get_rank(), [range(rank, task.length, size) for rank in range(size)]


def saving(task: Saving, parts: StateParts) -> Callable[[], None]:
    """Write the bytes of the tensors."""
    tensors = parts.tensors()

    def save() -> None:
        with (parts.folder / "bytes").open("xb", buffering=0) as file:
            for tensor in tensors:
                left = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
                while left:
                    left = left[file.write(left) :]
            os.fsync(file.fileno())

    return save


def loading(task: Saving, parts: StateParts) -> Callable[[], None]:
    """Read the bytes back into the tensors."""
    tensors = parts.tensors()

    def load() -> None:
        with (parts.folder / "bytes").open("rb", buffering=0) as file:
            for tensor in tensors:
                left = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
                while left:
                    left = left[file.readinto(left) :]

    return load


def sharding(task: Sharding, parts: Parts) -> None:
    """Train with `fully_shard`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model: Any = parts.model
    mesh = init_device_mesh("cpu", (task.processes,))
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    sampler: Any = DistributedSampler(parts.dataset, shuffle=False)
    loader = DataLoader(parts.dataset, batch_size=task.batch_size, sampler=sampler)
    optimizer = parts.make_optimizer(model.parameters())
    model.train()
    for _ in range(task.epochs):
        for batch in loader:
            parts.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
