"""What every process must have alike: compared before the first step (rule 3)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Subset

from trainkit.basics.config import TrainConfig
from trainkit.basics.device import memory_of
from trainkit.basics.outputs import address_of
from trainkit.data import PreparedLoader
from trainkit.distributed import Processes
from trainkit.distributed.collectives import require_equal
from trainkit.errors import ConfigError, by_process
from trainkit.training.setup.settings import SCRIPT, code_of, digest, program, settings
from trainkit.types import class_name

_SAME_DATA = (
    "Every process must build the same; seed what is random in it, such as "
    "`random_split(..., generator=...)`."
)
_REMEDIES = {
    "`output_dir`": "Give all of them one folder that they share.",
    "the training loader": _SAME_DATA,
    "the evaluation loader": _SAME_DATA,
    "the loader": _SAME_DATA,
}


def settings_by_name(
    config: TrainConfig,
    module: nn.Module,
    loader: PreparedLoader,
    evaluations: Mapping[str, PreparedLoader],
    parts: Mapping[str, Any],
    callbacks: Mapping[str, Any],
) -> Iterator[tuple[str, str]]:
    """Yield what a training depends on before its optimizer is made; `parts` counts too.

    Args:
        callbacks: `CallbackList.alike`.
    """
    yield from program()
    yield from ((f"`{name}`", repr(value)) for name, value in asdict(config).items())
    yield from describe_model("the model", module)
    yield from _describe_loader("the training loader", loader)
    yield "the names of the evaluation loaders", repr(list(evaluations))
    for name, evaluation in evaluations.items():
        yield from _describe_loader(
            f"the evaluation loader {name!r}".removesuffix(" ''"), evaluation
        )
    for name, part in parts.items():
        if isinstance(part, Path):
            yield f"`{name}`", address_of(part) or str(part.resolve())
        yield from settings(name, part, whole=False)
    yield "the callbacks that act on all processes at once", repr([*callbacks])
    for name, attributes in callbacks.items():
        yield from settings(name, attributes)


def check_alike(processes: Processes, by_name: Iterable[tuple[str, str]]) -> None:
    """Raise ConfigError, on all processes, where a setting differs, or only some have it.

    One process alone looks at none.
    """
    if processes.size > 1:
        require_equal(processes, [*dict(by_name).items()], _difference)


def _difference(by_rank: Sequence[list[tuple[str, str]]]) -> ConfigError | None:
    """Return what is to be said of the settings of all processes; None if they may differ so."""
    of_all = [dict(of_process) for of_process in by_rank]
    differences: dict[str, str] = {}
    for name in dict.fromkeys(name for of_process in of_all for name in of_process):
        known = {of_process[name] for of_process in of_all if name in of_process}
        values = [of_process.get(name, "not set") for of_process in of_all]
        if len(known if name == SCRIPT else set(values)) > 1:
            differences[name] = by_process(values)
    if not differences:
        return None
    first, *others = differences
    also = f" They differ also in {', '.join(others[:5])}." if others else ""
    remedies = [text for name, text in _REMEDIES.items() if first.startswith(name)]
    remedy = remedies[0] if remedies else "Give all of them the same."
    return ConfigError(f"The processes differ in {first}: {differences[first]}. {remedy}{also}")


def check_evaluation(processes: Processes, loader: PreparedLoader, metrics: Iterable[str]) -> None:
    """Raise ConfigError, on all processes, where they do not evaluate the same."""
    by_name = [*_describe_loader("the loader", loader), ("the metrics", repr(list(metrics)))]
    check_alike(processes, by_name)


def describe_model(name: str, module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the class of a model with digests of its tensors' names and code, then each tensor."""
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    code = {code_of(kind.forward) for kind in {type(each) for each in module.modules()}}
    digests = f"names {digest(repr([*tensors]))}, code {digest(repr(sorted(code)))}"
    yield name, f"{class_name(module)} with {len(tensors)} tensors ({digests})"
    for path, part in module.named_modules():
        # Those of a user's own, and lists of parameters, may name the device of this process.
        is_told = type(part).__module__.startswith("torch.nn.") and not isinstance(
            part, nn.ParameterList | nn.ParameterDict
        )
        told = part.extra_repr() if is_told else ""
        yield f"the module `{path}` of {name}", f"{class_name(part)}({told})"
    for path, t in tensors.items():
        trained = "trainable" if t.requires_grad else "frozen"
        yield f"`{path}` of {name}", f"{t.dtype} of {tuple(t.shape)}, {trained}"


def _describe_loader(name: str, loader: PreparedLoader) -> Iterator[tuple[str, str]]:
    source = loader.source
    if loader.parts:
        yield name, str(loader.combination(1))
        for part_name, part in loader.parts.items():
            yield from _describe_loader(f"{name} `{part_name}`", part)
        return
    if not isinstance(source, DataLoader):
        yield name, type(source).__name__  # each process may hold its own share
        return
    words = [f"{type(source.dataset).__name__}"]
    if loader.samples_per_epoch is not None:
        words.append(f"{loader.samples_per_epoch} samples an epoch")
    words.append(f"batch size {source.batch_size}")
    words.append(f"sampler {type(source.sampler).__name__}")
    yield name, ", ".join([*words, *describe_samples(source)])


def describe_samples(source: DataLoader[Any]) -> Iterator[str]:
    """Yield what a loader reads of its data set, and by which functions."""
    datasets: list[Any] = [source.dataset]
    functions: list[Any] = [source.collate_fn]
    for dataset in datasets:
        if isinstance(dataset, Subset):
            datasets.append(dataset.dataset)
            indices = torch.as_tensor(dataset.indices)
            yield f"indices with digest {digest(bytes(memory_of(indices.contiguous())))}"
        elif isinstance(dataset, ConcatDataset):
            datasets += dataset.datasets
        else:
            functions.append(getattr(type(dataset), "__getitem__", None))
            held = getattr(dataset, "__dict__", {}).values()
            functions += [one for one in held if isinstance(one, FunctionType | MethodType)]
    yield f"code of functions {digest(repr([*map(code_of, functions)]))}"
