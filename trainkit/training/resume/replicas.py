"""Whether processes that should hold the same parameters and optimizer state do (rule 22)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from trainkit.basics.device import memory_of
from trainkit.checkpoint.exact import parameter_states
from trainkit.checkpoint.io.digests import xxh3_64_hexdigest
from trainkit.distributed import Processes
from trainkit.distributed.collectives import are_alike, complain
from trainkit.errors import DistributedError, named
from trainkit.strategies import Strategy
from trainkit.training.setup.settings import group_settings

_CHUNK = 2**22  # elements that a device works on at once: 32 MB in between


def check_replicas(
    strategy: Strategy, parameters: Mapping[str, Tensor], optimizers: Sequence[Optimizer], when: str
) -> None:
    """Raise, on all processes, where those that hold the same part of a model differ in it.

    Every bit counts, by digests: one number travels, and those of each parameter only where it
    differs. What a sharded strategy keeps whole, and the settings of groups, are compared over all
    processes: a checkpoint has them once. Every process must call it, between two updates; a
    device is read once. Buffers are left out: the processes take those of process 0 anew.

    Args:
        strategy: Tells which processes hold the same.
        optimizers: Their state of each parameter, and the settings of their groups, count too.
        when: Stands in the error, such as "after step 12".

    Raises:
        DistributedError: They differ; names parameters and processes.
    """
    processes = strategy.processes
    if processes.size == 1:
        return
    kinds: dict[Any, Any] = {(1,): (0, 1, dict(_settings(optimizers, parameters)))}
    for label, value in _tensors(parameters, optimizers):
        kind, part, parts = strategy.held_part_of(value)
        kinds.setdefault(kind, (part, parts, {}))[2][label] = value
    for _, (part, parts, entries) in sorted(kinds.items()):
        if parts < processes.size:
            _compare(processes, entries, part, parts, when)


def check_parameters(strategy: Strategy, module: nn.Module, when: str) -> None:
    """Do the same as `check_replicas` for the parameters of a model alone."""
    # Values of the others are elsewhere, or come with the first batch.
    known = {n: p for n, p in module.named_parameters() if not (p.is_meta or is_lazy(p))}
    check_replicas(strategy, known, [], when)


def watch_restored(
    module: nn.Module, optimizer: Optimizer, say: Callable[[str], None]
) -> Callable[[], None]:
    """Return what says which parameters, and settings of the optimizer, have changed since now."""

    def digests() -> dict[str, str]:
        known = {n: p for n, p in module.named_parameters() if not (p.is_meta or is_lazy(p))}
        parts = getattr(optimizer, "parts", {"": optimizer}).values()
        return digests_of(dict([*_tensors(known, []), *_settings([*parts], known)]))

    def tell() -> None:
        if changed := [name for name, now in digests().items() if before.get(name, now) != now]:
            say(
                f"trainkit: `on_fit_start` of a callback has changed {', '.join(changed[:3])}, "
                "which the checkpoint had brought back: this run is not the one that was saved. "
                "What is for a new run alone belongs under `if run.state.step == 0:`."
            )

    before = digests()
    return tell


def _compare(
    processes: Processes, entries: Mapping[str, Any], part: int, parts: int, when: str
) -> None:
    digests = digests_of(entries)
    if not are_alike(processes, int(_hex(digests), 16) >> 2, part, parts):
        complain(processes, (part, digests), partial(_error, when))


def _settings(
    optimizers: Sequence[Optimizer], parameters: Mapping[str, Tensor]
) -> Iterator[tuple[str, Any]]:
    """Yield the settings of all groups, and which parameters are in them, by names for errors."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    for index, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            settings = f"`param_groups[{number}]` of optimizer {index}"
            # A group made of a `set` has another order on each process, and nothing follows it.
            held = sorted(names.get(id(parameter), "") for parameter in group["params"])
            for key, value in (group_settings(group) | {"params": held}).items():
                yield f"`{key}` of {settings}", value


def _tensors(
    parameters: Mapping[str, Tensor], optimizers: Sequence[Optimizer]
) -> Iterator[tuple[str, Any]]:
    """Yield the parameters, and each value of their states, by names for errors."""
    yield from ((f"parameter `{name}`", parameter) for name, parameter in parameters.items())
    names = {id(parameter): name for name, parameter in parameters.items()}
    for index, optimizer in enumerate(optimizers):
        states = parameter_states(optimizer)
        for number, group in enumerate(optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                name = names.get(id(parameter), f"parameter {position} of group {number}")
                for key, value in states.get(parameter, {}).items():
                    yield f"`{key}` of `{name}` in optimizer {index}", value


def _error(when: str, by_rank: Sequence[tuple[int, Mapping[str, str]]]) -> DistributedError:
    """Return the error that says which processes differ from the first one with the same part."""
    firsts = {part: rank for rank, (part, _) in reversed([*enumerate(by_rank)])}
    words = []
    for label in dict.fromkeys(label for _, digests in by_rank for label in digests):
        for part, first in firsts.items():
            known = by_rank[first][1].get(label)
            own = [r for r, (p, of) in enumerate(by_rank) if p == part and of.get(label) != known]
            if own:
                words.append(f"{label} on {named(own)} is not that of process {first}")
    rest = f"; and {len(words) - 5} more" if len(words) > 5 else ""
    return DistributedError(
        f"The processes hold different models {when}: {'; '.join(words[:5])}{rest}. "
        "Something has changed it on some of them only, such as an edit under "
        "`if is_main_process:`, or other hardware computes other bits. No checkpoint or metric is "
        "made of it, and earlier ones stay. In `fit`, `ReplicaCheck(every_n_steps=1)` names the "
        "first such step."
    )


def digests_of(entries: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest of the bits of each entry; of sharded tensors, of what lies here.

    Devices of different types give different digests.
    """
    sums: list[Tensor] = []  # of what lies on a device, not yet read
    pieces = {label: [_piece(leaf, sums) for leaf in _leaves(v)] for label, v in entries.items()}
    read = torch.stack([each.to(sums[0].device) for each in sums]).tolist() if sums else []
    return {
        label: _hex([read[piece] if isinstance(piece, slice) else piece for piece in of_entry])
        for label, of_entry in pieces.items()
    }


def _leaves(value: Any) -> Iterator[Any]:
    """Yield the tensors, numbers and texts in a value; of sharded tensors what lies here."""
    if hasattr(value, "__tensor_flatten__"):
        value = [getattr(value, name) for name in value.__tensor_flatten__()[0]]
    if isinstance(value, Mapping):
        value = [*value.items()]
    if isinstance(value, list | tuple):
        for inner in value:
            yield from _leaves(inner)
    elif isinstance(value, Tensor | Number | str):
        yield value


def _piece(leaf: Tensor | Number | str, sums: list[Tensor]) -> str | slice:
    """Return a digest of a leaf, or the slice of `sums` that is one."""
    if not isinstance(leaf, Tensor):
        return repr(leaf)
    data = leaf.detach().contiguous().view(-1).view(torch.uint8)
    if data.is_cpu:
        return f"{leaf.dtype} {[*leaf.shape]} {xxh3_64_hexdigest(memory_of(data))}"
    first = len(sums)
    sums += _checksums(data)
    return slice(first, len(sums))


def _hex(value: Any) -> str:
    return xxh3_64_hexdigest(repr(value).encode())


def _checksums(data: Tensor) -> list[Tensor]:
    """Return, for each chunk of bytes, a sum in which every bit and its place count.

    Each word is multiplied by an odd number of its own, modulo 2**64: a change of one word is
    always seen.
    """
    if data.storage_offset() % 4:
        data = data.clone()
    words = data.view(torch.int32) if data.numel() % 4 == 0 else data
    positions = torch.arange(1, min(_CHUNK, words.numel()) + 1, device=data.device)
    factors = positions * 0x1E3779B97F4A7C15
    factors = (factors ^ (factors >> 31)) * 0x3F58476D1CE4E5B9 | 1
    return [torch.mul(chunk, factors[: len(chunk)]).sum() for chunk in torch.split(words, _CHUNK)]
