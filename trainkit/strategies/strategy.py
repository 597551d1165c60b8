"""The interface of strategies."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.basics.device import move_module
from trainkit.basics.torch_internals import multiply_each
from trainkit.distributed import Processes
from trainkit.distributed.collectives import check_called_by_all, require_equal
from trainkit.distributed.group import default_device
from trainkit.distributed.world import World
from trainkit.errors import ConfigError, quoted
from trainkit.precision import Precision
from trainkit.types import NOTHING, class_name

cut_models: "WeakKeyDictionary[nn.Module, Callable[[], None]]" = WeakKeyDictionary()
"""Those that are given pieces of sequences, with what ends that."""


class Strategy(ABC):
    """Places and wraps the model, and decides when gradients are reduced.

    Only `wrap` must be written: the rest is right wherever every process holds all parameters. A
    `setup` of your own must set `device` and `processes`.

    Args:
        device: Where the model runs; None: the accelerator of the local rank, else the CPU.
    """

    name: ClassVar[str]
    sharded: ClassVar[bool] = False
    engines: tuple[Any, ...] = ()  # of a library, which hold what model and optimizers have
    """Whether processes hold parts of the parameters, and each one saves its own."""
    called_apart: Collection[nn.Module] = ()
    """What is called outside of the model's forward, perhaps a part of it: a loss that learns. Set
    before `wrap`."""
    device: torch.device
    processes: Processes
    context_parallel = 1
    """How many processes share each sequence."""
    context: Any = None
    """What cuts sequences, a `ContextParallel`, since `setup`; None: they are whole."""

    def __init__(self, *, device: torch.device | str | None = None) -> None:
        self._asked_device = None if device is None else _device(device)

    def agree_on(self, device: torch.device | str | None) -> torch.device | None:
        """Use `device`, unless it is None; return what was asked for here or there.

        Raises:
            ConfigError: The strategy was made for another one.
        """
        wanted = self._asked_device if device is None else _device(device)
        if self._asked_device not in (None, wanted):
            raise ConfigError(
                f'The strategy was made with `device="{self._asked_device}"`, but the device is to '
                f'be "{wanted}". Give it to one of them alone.'
            )
        self._asked_device = wanted
        return wanted

    @property
    def held_part(self) -> tuple[int, int]:
        """Which part of a model lies on this process, from 0, and how many parts there are.

        Processes with the same part must hold the same to the bit, which is compared before each
        checkpoint. As many parts as processes: there is nothing to compare.
        """
        return (self.processes.rank, self.processes.size) if self.sharded else (0, 1)

    def held_part_of(self, value: Any) -> tuple[tuple[int, ...], int, int]:
        """Return how a parameter, or what is made like it, lies, and the `held_part` of it."""
        from trainkit.checkpoint.resharding.sharding_spec import is_sharded  # on demand

        in_parts = is_sharded(value) if self.sharded else self.held_part[1] > 1
        part, parts = self.held_part if in_parts else (0, 1)
        return (parts,), part, parts

    @property
    def data_processes(self) -> Processes:
        """Over whom samples are shared out, and sums made: all, unless some share a batch."""
        return self.processes if self.context is None else self.context.data

    def adopt(self, model: nn.Module) -> Processes:
        """Find out, before loaders are made, who shares a batch; return `data_processes`."""
        if isinstance(model, nn.Module):  # else others say what it must be
            module = self.unwrap(model)
            if self.context is not None:
                self.context.attach(module)
            elif module in cut_models:  # by an earlier strategy
                cut_models[module]()
        return self.data_processes

    def setup(self) -> None:
        """Find the device and join the other processes. Called once, before anything else."""
        self.device = self._default_device()
        self.processes = Processes.start(device=self.device)

    @abstractmethod
    def wrap(self, model: nn.Module, precision: Precision, seed: int = 0) -> nn.Module:
        """Move the model to the device and return what the training step calls.

        Args:
            model: The user's module.
            precision: Bound to the device; for strategies that choose the format of what they
                send and hold.
            seed: That of the run, for strategies that give a model its first values.
        """

    def to_device(self, model: nn.Module) -> nn.Module:
        """Return a model that is only evaluated, on the device."""
        model = self.unwrap(model)
        if on_meta(model):
            raise ConfigError(
                f"The model is on the meta device: its parameters have no values. Build it on a "
                f'real one for strategy "{self.name}"; `strategy="fsdp"` can fill it, in `fit`.'
            )
        return move_module(model, self.device)

    def check_whole(self, model: nn.Module) -> None:
        """Raise if another strategy has sharded the model in place.

        Raises:
            ConfigError: Parameters are `DTensor`s.
        """
        if any(hasattr(p, "full_tensor") for p in model.parameters()):
            raise ConfigError(
                f"The parameters of `{class_name(model)}` are sharded already, and strategy "
                f'"{self.name}" cannot train it. Go on with the strategy that sharded it, or '
                "export it by `save_model` and load it into a new model; or pass "
                '`strategy="model_parallel"`, for models that you have made parallel.'
            )

    def rebind_optimizer(self, optimizer: Optimizer, module: nn.Module) -> None:
        """Point `optimizer` at the parameters that `wrap` created in `module`.

        Nothing is to be done where `wrap` keeps the parameters. The optimizer object stays.
        """

    def check_settings(self, known: Mapping[str, Any]) -> None:
        """Raise `ConfigError` where what the strategy was given contradicts the training.

        Args:
            known: The settings of `TrainConfig`, `optimizer`, `scheduler`, and `batch_size` of a
                process; None where it varies.
        """

    def updated(self, optimizer: Optimizer) -> Optimizer:
        """Return what updates the parameters of `optimizer` here, and has their gradients."""
        return optimizer

    def whole_state(self, optimizer: Optimizer) -> AbstractContextManager[object]:
        """Return a context in which `optimizer` holds, on process 0, its state to be saved.

        Nothing is to be done where it holds it anyway. Every process must enter it.
        """
        return NOTHING

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the user's own module behind what `wrap` returned."""
        return model

    def no_sync(self, model: nn.Module) -> AbstractContextManager[object]:
        """Return a context in which backward accumulates without reducing over processes."""
        return NOTHING

    def begin_reduction(self, model: nn.Module) -> None:
        """Let the next backward, the last of a window, reduce gradients while it goes on.

        Called, as `finish_reduction` is, where there are several processes. Neither may count on a
        forward of `model`: a step may call the user's own module. Where the gradients reduce
        themselves, nothing is to be done.

        Args:
            model: What `wrap`, or `finish_reduction`, returned.
        """

    def finish_reduction(self, model: nn.Module, precision: Precision) -> nn.Module:
        """Reduce what the backwards of a window have not; return what the step calls from now on.

        Called once a window; it need not have been begun. Parameters may have frozen or thawed
        since the last one.

        Args:
            model: As in `begin_reduction`; the user's own where nothing was trained before.
            precision: As in `wrap`.
        """
        return model

    def gradients_apart(self, model: nn.Module) -> AbstractContextManager[object]:
        """Return a context in which backward leaves all it computes in `.grad`, to be taken away.

        It is entered inside of `no_sync`, after the forward. Nothing is to be done where gradients
        that wait for their reduction are in `.grad` anyway.
        """
        return NOTHING

    @contextmanager
    def zero_gradients(self, module: nn.Module) -> Iterator[None]:
        """Let a backward inside make its collectives, but add nothing but zeros to the gradients.

        A loss that counts for nothing is multiplied by 0, which does not make zeros of infinite
        or undefined gradients.
        """
        trainable = [p for p in module.parameters() if p.requires_grad]
        hooks = [p.register_hook(zeros_for) for p in trainable]  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def check_gradients(self, module: nn.Module) -> None:
        """Raise, on all processes, if the first backward left gradients unreduced."""

    def share_buffers(self, module: nn.Module) -> None:
        """Give every process the buffers of process 0, such as batch statistics.

        Called before an evaluation and at the end of training: what is evaluated and saved is
        one model. Those of one dtype travel together.
        """
        processes = self.data_processes if self.context is None else self.processes
        if processes.size == 1:
            return
        for buffers in _by_kind(self.local_parts(module.buffers())):
            packed = processes.broadcast(torch.cat([b.detach().reshape(-1) for b in buffers]))
            parts = torch.split(packed, [b.numel() for b in buffers])
            for buffer, part in zip(buffers, parts, strict=True):
                buffer.detach().copy_(part.view_as(buffer))

    def reduce_overflow(self, overflow: Tensor) -> Tensor:
        """Make `overflow` the maximum over all processes, in place.

        Nothing is to be done where every process holds the same reduced gradients.
        """
        return overflow

    def local_parts(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Return what lies on this process of parameters, or of what is spread like them.

        They share memory with the tensors. Call it where no gradients are recorded.
        """
        return list(tensors)

    def local_gradients(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Return the gradients that there are, or of each the part that lies here, to be changed.

        They share memory with the gradients.
        """
        return self.local_parts([p.grad for p in parameters if p.grad is not None])

    def scale_gradients(self, parameters: Iterable[Tensor], scale: Tensor | float) -> None:
        """Multiply all gradients by one number, in place."""
        for gradients in _by_kind(self.local_gradients(parameters)):
            like = gradients[0]
            multiply_each(gradients, scale.to(like) if isinstance(scale, Tensor) else scale)

    def clip_grad_norm(self, parameters: Iterable[Tensor], max_norm: float) -> Tensor:
        """Clip the global L2 norm of the gradients; return the norm before, on the device."""
        parameters = list(parameters)
        norm = nn.utils.get_total_norm(gradient_values(parameters))
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def clip_grad_value(self, parameters: Iterable[Tensor], max_value: float) -> None:
        """Clip every element of the gradients to [-max_value, max_value]; sharded ones: `FSDP`."""
        dense = []
        for p in parameters:
            if p.grad is not None and p.grad.is_sparse:
                p.grad = p.grad.coalesce()  # an element is the sum of all that stands for it
                p.grad.values().clamp_(-max_value, max_value)
            else:
                dense.append(p)
        nn.utils.clip_grad_value_(dense, max_value)

    def grad_norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Return the global L2 norm of the gradients, on the device, without changing them."""
        return nn.utils.get_total_norm(gradient_values(parameters))

    def close(self) -> None:
        """Give back what `setup` took."""
        if self.context is not None:
            self.context.close()
        self.processes.close()

    def _check_frozen(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Raise, on all processes, where parameters froze or thawed on some of them only."""
        check_called_by_all(self.processes, "requires_grad_")
        frozen = [name for name, p in parameters.items() if not p.requires_grad]
        require_equal(self.processes, frozen, _frozen_otherwise)

    def _default_device(self) -> torch.device:
        """Return the device that was asked for, else that of this process."""
        return default_device(World.current(), self._asked_device)

    def _without_gradient(self, module: nn.Module) -> list[list[str]]:
        """Return which trainable parameters have no gradient: on all processes, and on any."""
        parameters = dict(module.named_parameters())
        here = torch.tensor([p.requires_grad and p.grad is None for p in parameters.values()]).int()
        highest = self.processes.all_reduce(torch.stack([1 - here, here]), "max")
        everywhere, anywhere = (1 - highest[0]).tolist(), highest[1].tolist()
        return [
            [name for name, missing in zip(parameters, row, strict=True) if missing]
            for row in (everywhere, anywhere)
        ]


def _frozen_otherwise(of_all: Sequence[list[str]]) -> ConfigError:
    names = sorted({*chain(*of_all)} - set(of_all[0]).intersection(*of_all))
    return ConfigError(
        f"{len(names)} parameters are frozen on some processes only ({quoted(names)}). Freeze and "
        "thaw the same ones on all."
    )


def _by_kind(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return tensors in groups of one device and one dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())


def _device(device: torch.device | str) -> torch.device:
    if isinstance(device, torch.device | str):
        try:
            return torch.device(device)
        except RuntimeError as error:
            raise ConfigError(f"`device` must be a device, but is {device!r}: {error}") from None
    raise ConfigError(f'`device` must be a device such as "cpu" or "mps", but is {device!r}.')


def leaves_behind(tensors: Iterable[Tensor]) -> set[Tensor]:
    """Return the leaves of the graph behind some tensors, such as parameters."""
    waiting: list[Any] = [tensor.grad_fn for tensor in tensors]
    seen: set[Any] = {None}
    leaves: set[Tensor] = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(node.variable)
        waiting += [inner for inner, _ in node.next_functions]
    return leaves


def zeros_for(gradient: Tensor | None) -> Tensor | None:
    """Return zeros in place of a gradient; DDP asks also where outputs are not used."""
    return None if gradient is None else torch.zeros_like(gradient)


def gradient_values(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients that there are; of sparse ones the elements that they have, each once.

    Torch has no norm of a sparse tensor on every device.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    return [g.coalesce().values() if g.is_sparse else g for g in gradients]


def on_meta(model: nn.Module) -> bool:
    """Return whether a tensor of the model is on the meta device, that is, has no values."""
    return any(t.is_meta for t in (*model.parameters(), *model.buffers()))
