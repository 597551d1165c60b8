"""What every process must have alike: compared once, before the first step."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

from trainkit.config import TrainConfig
from trainkit.data import PreparedLoader
from trainkit.distributed import Processes
from trainkit.errors import ConfigError
from trainkit.types import class_name

__all__ = ["OUTPUT_DIR", "check_alike", "check_evaluation", "facts_of"]

OUTPUT_DIR = "`output_dir`"  # the fact that has another remedy than the rest


def facts_of(
    config: TrainConfig,
    module: nn.Module,
    loader: PreparedLoader,
    evaluations: Mapping[str, PreparedLoader],
) -> dict[str, str]:
    """Return, in words, what training depends on and every process must have alike."""
    facts = {f"`{name}`": repr(value) for name, value in asdict(config).items()}
    facts["the model"] = _describe_model(module)
    facts["the training loader"] = _describe_loader(loader)
    facts["the names of the evaluation loaders"] = repr(list(evaluations))
    for name, evaluation in evaluations.items():
        facts[f"the evaluation loader {name!r}"] = _describe_loader(evaluation)
    return facts


def check_alike(processes: Processes, facts: Mapping[str, str]) -> None:
    """Raise ConfigError, on all processes, where a fact differs between them."""
    if processes.size == 1:
        return
    all_facts: list[dict[str, str]] = processes.all_gather_objects(dict(facts))
    names = list(dict.fromkeys(name for of_process in all_facts for name in of_process))
    for name in names:
        values = [of_process.get(name, "missing") for of_process in all_facts]
        if len(set(values)) > 1:
            shown = "; ".join(f"process {rank}: {value}" for rank, value in enumerate(values))
            remedy = (
                "Give all of them one folder that they share."
                if name == OUTPUT_DIR
                else "Every process must build the same; seed what is random in it, such as "
                "`random_split(..., generator=...)`."
            )
            raise ConfigError(f"The processes differ in {name}: {shown}. {remedy}")


def check_evaluation(processes: Processes, epochs: bool, end: bool, metrics: list[str]) -> None:
    """Raise, on all processes, where their callbacks would evaluate differently.

    Args:
        processes: The processes of the run.
        epochs: Whether epochs end with an evaluation by themselves.
        end: Whether the last step is evaluated.
        metrics: Names of the metrics.
    """
    plans = processes.all_gather_objects([epochs, end, metrics])
    for rank, plan in enumerate(plans):
        if plan != plans[0]:
            raise ConfigError(
                f"Process 0 evaluates with the metrics {plans[0][2]}, process {rank} with "
                f"{plan[2]}, or at other times. Give every process the same `Evaluation` "
                "callbacks; `MainProcess` is for callbacks that only look."
            )


def _describe_model(module: nn.Module) -> str:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    rows = [(name, tuple(t.shape), str(t.dtype), t.requires_grad) for name, t in tensors]
    return f"{class_name(module)} with {len(rows)} tensors (digest {_digest(repr(rows))})"


def _describe_loader(loader: PreparedLoader) -> str:
    source = loader.source
    if not isinstance(source, DataLoader):
        return type(source).__name__  # each process may hold its own share
    words = [f"{type(source.dataset).__name__}"]
    if loader.samples_per_epoch is not None:
        words.append(f"{loader.samples_per_epoch} samples an epoch")
    words.append(f"batch size {source.batch_size}")
    words.append(f"sampler {type(source.sampler).__name__}")
    dataset: Any = source.dataset
    if type(dataset) is Subset:
        indices = torch.as_tensor(dataset.indices)
        words.append(f"indices with digest {_digest(indices.numpy().tobytes())}")
    return ", ".join(words)


def _digest(data: str | bytes) -> str:
    data = data.encode() if isinstance(data, str) else data
    return hashlib.blake2b(data, digest_size=4).hexdigest()
