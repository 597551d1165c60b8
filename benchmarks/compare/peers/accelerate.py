"""Hugging Face Accelerate: the loop of its documentation, with `prepare` and `backward`."""

from collections.abc import Callable

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from tqdm import tqdm

from benchmarks.compare.evaluation import Evaluation, EvaluationParts
from benchmarks.compare.saving import Saving, StateParts
from benchmarks.compare.sharding import Sharding
from benchmarks.compare.training import LOG_EVERY, Parts, Training
from benchmarks.compare.workload import Unsupported

PACKAGE = "accelerate"


def training(task: Training, parts: Parts) -> None:
    """Train with an own loop."""
    accelerator = Accelerator(
        cpu=True,
        mixed_precision="bf16" if task.bf16 else "no",
        gradient_accumulation_steps=task.accumulation,
        log_with="tensorboard" if task.extras else None,
        project_dir=str(parts.folder),
    )
    model, optimizer, loader = accelerator.prepare(
        parts.model, parts.make_optimizer(parts.model.parameters()), parts.loader
    )
    if task.extras:
        accelerator.init_trackers("run")
    bar = tqdm(
        total=task.steps * task.epochs,
        disable=not task.extras or not accelerator.is_local_main_process,
    )
    step = 0
    model.train()
    for epoch in range(task.epochs):
        for batch in loader:
            if task.accumulation == 1:
                loss = parts.loss(model, batch)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            else:
                with accelerator.accumulate(model):
                    loss = parts.loss(model, batch)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients and task.max_norm is not None:
                        accelerator.clip_grad_norm_(model.parameters(), task.max_norm)
                    optimizer.step()
                    optimizer.zero_grad()
            if task.extras:
                step += 1
                bar.update()
                if step % LOG_EVERY == 0:
                    value = loss.item()
                    bar.set_postfix(loss=value, refresh=False)
                    accelerator.log({"train/loss": value}, step=step)
        if task.extras:
            accelerator.save_state(str(parts.folder / f"epoch-{epoch}"))
    bar.close()
    if task.extras:
        accelerator.end_training()


def evaluation(task: Evaluation, parts: EvaluationParts) -> Callable[[], float]:
    """Evaluate in an own loop, as the documentation shows it."""
    accelerator = Accelerator(cpu=True)
    model, loader = accelerator.prepare(parts.model, parts.loader)
    model.eval()

    def evaluate() -> float:
        right = total = 0
        with torch.no_grad():
            for inputs, targets in loader:
                classes = model(inputs).argmax(-1)
                predictions, references = accelerator.gather_for_metrics((classes, targets))
                right += (predictions == references).sum()
                total += len(references)
        return int(right) / total

    return evaluate


gathering = evaluation


def saving(task: Saving, parts: StateParts) -> Callable[[], None]:
    """Save with `save_state`."""
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(parts.model, parts.optimizer)
    return lambda: accelerator.save_state(str(parts.folder / "state"))


def loading(task: Saving, parts: StateParts) -> Callable[[], None]:
    """Load with `load_state`."""
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(parts.model, parts.optimizer)
    return lambda: accelerator.load_state(str(parts.folder / "state"))


def sharding(task: Sharding, parts: Parts) -> None:
    """Train with the plugin for `fully_shard`."""
    from accelerate import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["GPT2Block"],
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    if accelerator.distributed_type != DistributedType.FSDP:
        raise Unsupported("on CPUs it leaves the plugin aside and trains with DDP")
    model, optimizer, loader = accelerator.prepare(
        parts.model, parts.make_optimizer(parts.model.parameters()), parts.loader
    )
    model.train()
    for _ in range(task.epochs):
        for batch in loader:
            accelerator.backward(parts.loss(model, batch))
            optimizer.step()
            optimizer.zero_grad()
