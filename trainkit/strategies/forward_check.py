"""Compares, once, which modules and parameters the processes use in a forward."""

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from trainkit.basics.torch_internals import tree_leaves
from trainkit.distributed import Processes
from trainkit.distributed.collectives import require_equal
from trainkit.errors import ConfigError, quoted
from trainkit.strategies.strategy import leaves_behind


class ForwardCheck:
    """Compares the forward of a sharded model that is about to run over the processes.

    A process that leaves out a block, or a parameter of one, makes other collectives than the
    rest, which would wait for ever or crash. Here all raise: a block is compared before its
    parameters are gathered, parameters before gradients are reduced.

    Attributes:
        hooks: What hangs on the model meanwhile; the end of the forward removes it.
    """

    def __init__(self, model: nn.Module, processes: Processes) -> None:
        self._processes = processes
        self._names: dict[Tensor, str] = {}  # of the full parameters, which live in a forward only
        self.hooks = [model.register_forward_hook(self._end)]
        for name, module in model.named_modules():
            is_block = module is not model and isinstance(module, FSDPModule)
            if is_block:
                hook = partial(self._before_block, name)
                self.hooks.append(module.register_forward_pre_hook(hook, prepend=True))
            self.hooks.append(module.register_forward_pre_hook(partial(self._note, name)))
        self._note("", model)  # its own hooks run already

    def _before_block(self, name: str, module: nn.Module, inputs: Any) -> None:
        self._compare_place(f"the block `{name}`")

    def _note(self, name: str, module: nn.Module, inputs: Any = None) -> None:
        for key, parameter in module.named_parameters(recurse=False):
            self._names.setdefault(parameter, f"{name}.{key}" if name else key)

    def _end(self, model: nn.Module, inputs: Any, outputs: Any) -> None:
        for hook in self.hooks:
            hook.remove()
        self._compare_place("the end")
        tensors = [t for t in tree_leaves(outputs) if isinstance(t, Tensor)]
        used = sorted(self._names[p] for p in leaves_behind(tensors) if p in self._names)
        self._names.clear()
        require_equal(self._processes, used, _used_by_some)

    def _compare_place(self, call: str) -> None:
        require_equal(self._processes, call, _in_another_order)


def _used_by_some(of_all: Sequence[Sequence[str]]) -> ConfigError:
    names = sorted({*chain(*of_all)} - set(of_all[0]).intersection(*of_all))
    return ConfigError(
        f"{len(names)} trainable parameters are used in the first forward on some processes only "
        f"({quoted(names)}), but under FSDP all must use the same. Call their modules on all "
        "processes, and multiply by 0 what is not to count."
    )


def _in_another_order(calls: Sequence[str]) -> ConfigError:
    other = next(rank for rank, found in enumerate(calls) if found != calls[0])
    return ConfigError(
        "Under FSDP all processes must call the same blocks in the same order, but in the first "
        f"forward process 0 came to {calls[0]}, process {other} to {calls[other]}. Call each "
        "block on all processes, and multiply by 0 what is not to count."
    )
