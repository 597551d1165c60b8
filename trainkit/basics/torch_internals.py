"""The names of torch that it does not document and trainkit needs: nothing else uses such names.

Each says why there is no other way, and what is done without it where it is younger than torch
2.10. What a newer torch has no more, `make test-next-torch` names.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from datetime import datetime, timedelta
from types import MethodType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves as tree_leaves, tree_map as tree_map
from torch.utils.data import RandomSampler
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter
from typing_extensions import override

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Many tensors in one call, as torch's own optimizers do: over small ones a loop takes ten times
# as long.


def copy_each(targets: list[Tensor], sources: list[Tensor], *, non_blocking: bool = False) -> None:
    """Copy each source into its target."""
    torch._foreach_copy_(targets, sources, non_blocking=non_blocking)


def lerp_each(targets: list[Tensor], ends: list[Tensor], weight: float) -> None:
    """Move each target towards its end by a part of the way."""
    torch._foreach_lerp_(targets, ends, weight)


def multiply_each(tensors: list[Tensor], factor: Tensor | float) -> None:
    """Multiply each tensor in place."""
    torch._foreach_mul_(tensors, factor)


def norm_of_each(
    tensors: list[Tensor], order: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    """Return the norm of each tensor."""
    return tuple(torch._foreach_norm(tensors, order, dtype))


def stored_values(tensor: Tensor) -> Tensor:
    """Return what a tensor stores; of a sparse one an index may come several times.

    `values()` is documented, but wants these added up first, which copies them.
    """
    return tensor._values() if tensor.is_sparse else tensor


def sparse_parts(tensor: Tensor) -> dict[str, Any]:
    """Return what `torch.sparse_coo_tensor` makes this sparse tensor of, as it is."""
    indices, values = tensor._indices(), tensor._values()
    coalesced = tensor.is_coalesced()
    return {
        "indices": indices, "values": values, "size": [*tensor.shape], "is_coalesced": coalesced
    }  # fmt: skip


# The own parameters and buffers of a module as dicts that can be written to. `register_parameter`
# and `register_buffer` refuse names that are there, and change what is saved.


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the parameters of a module without those of its parts; of a scripted one a copy."""
    own: Any = module._parameters
    return own if isinstance(own, dict) else dict(own.items())


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the buffers of a module without those of its parts; of a scripted one a copy."""
    own: Any = module._buffers
    return own if isinstance(own, dict) else dict(own.items())


def hooks_of(module: nn.Module) -> list[Any]:
    """Return the hooks of a module and its parameters, which torch does not tell."""
    forward = ("_forward_pre_hooks", "_forward_hooks")
    backward = ("_backward_pre_hooks", "_backward_hooks", "_post_accumulate_grad_hooks")
    owners = (module, *parameters_of(module).values())
    hooks = [getattr(each, name, None) or {} for each in owners for name in forward + backward]
    return [hook for each in hooks for hook in each.values()]


def is_saved(module: nn.Module, buffer: str) -> bool:
    """Return whether a buffer of a module is part of its state dict."""
    return buffer not in module._non_persistent_buffers_set


# `Module.compile` has no way back, and none to ask.


def compiled_call(module: nn.Module) -> Any:
    """Return what a module that is compiled in place calls; None where it is not."""
    return module._compiled_call_impl


def set_compiled_call(module: nn.Module, call: Any) -> None:
    """Let a module call something compiled; None: nothing."""
    module._compiled_call_impl = call


def call_module(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module with its hooks, past what is compiled."""
    return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]


# `GradScaler` decides on each process alone, and tells nobody what it found.


def found_inf(scaler: GradScaler, optimizer: Optimizer) -> Tensor:
    """Return the flag that `unscale_` has set for an optimizer, and that `update` will read."""
    found: Tensor
    (found,) = scaler._found_inf_per_device(optimizer).values()
    return found


def loss_scale(scaler: GradScaler) -> Tensor | None:
    """Return the scale, on its device; None before it is used. `get_scale` reads the device."""
    return scaler._scale


def make_loss_scale(scaler: GradScaler, device: torch.device) -> None:
    """Make the scale on a device; torch makes it where the first loss is."""
    scaler._lazy_init_scale_growth_tracker(device)


def unscaled_optimizers(scaler: GradScaler) -> dict[int, Any]:
    """Return what a scaler notes of optimizers since its last `update`, by their identity."""
    return scaler._per_optimizer_states


def try_loss_scaling(device: torch.device) -> None:
    """Call what `GradScaler` does on a device; raises where there is none of it."""
    scale, found = torch.ones(1, device=device), torch.zeros(1, device=device)
    torch._amp_foreach_non_finite_check_and_unscale_([torch.ones(1, device=device)], found, scale)
    growth = torch.zeros(1, dtype=torch.int32, device=device)
    torch._amp_update_scale_(scale, growth, found, 2.0, 0.5, 1)


# Devices that torch knows by an extension.


def moves_in_place(device: torch.device) -> bool:
    """Return whether a parameter can move from the CPU to a device and stay the same object."""
    there = torch.empty(0, device=device)
    return bool(torch._has_compatible_shallow_copy_type(torch.empty(0), there))


def extension_kind() -> str:
    """Return the type of devices that an extension of torch adds; "privateuseone" without one."""
    name: str = torch._C._get_privateuse1_backend_name()
    return name


# Operators.


def attention_on_cpu() -> tuple[Any, Any]:
    """Return the operators of attention on the CPU, forward and backward."""
    aten = torch.ops.aten
    forward = aten._scaled_dot_product_flash_attention_for_cpu
    return forward, aten._scaled_dot_product_flash_attention_for_cpu_backward


def dear_operators() -> list[Any]:
    """Return the operators whose results cost the most to compute: products, attention."""
    aten = torch.ops.aten
    attention = (
        aten._scaled_dot_product_flash_attention_for_cpu,
        aten._scaled_dot_product_flash_attention,
        aten._scaled_dot_product_efficient_attention,
        aten._scaled_dot_product_cudnn_attention,
    )
    products = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution)
    return [each.default for each in (*products, *attention)]


# Schedules of torch that are made of others.


def parts_of_schedule(scheduler: Any) -> tuple[list[Any], list[int]]:
    """Return what a `SequentialLR` or `ChainedScheduler` is made of, and when each next begins."""
    return getattr(scheduler, "_schedulers", []), getattr(scheduler, "_milestones", [])


def set_parts_of_schedule(scheduler: Any, parts: list[Any]) -> None:
    """Let a schedule be made of other parts."""
    scheduler._schedulers = parts


def steps_of_schedule(scheduler: Any) -> int:
    """Return how often a schedule was advanced, its making included: `OneCycleLR` has an end."""
    steps: int = scheduler._step_count
    return steps


# Wrappers.


class GradientReducer(DistributedDataParallel):
    """Torch's wrapper, whose reducer follows what we say of buckets, and of gradients by hand.

    In torch the forward makes ready for a backward and lays buckets out, and nothing else can.
    """

    def expected_order(
        self, parameters: list[nn.Parameter], are_sparse: list[bool]
    ) -> tuple[list[nn.Parameter], list[bool]]:
        """Return the parameters, and which have sparse gradients, in the order of their gradients.

        Called by each `lay_out`, and by the constructor.
        """
        return parameters, are_sparse

    def fix_buckets(self) -> None:
        """Lay the buckets out by the expected order, before any backward; torch does it once."""
        self.reducer._push_all_rebuilt_params()
        self._has_rebuilt_buckets = self.reducer._rebuild_buckets()

    def lay_out(self) -> None:
        """Make the reducer and its buckets anew, of the parameters that are trained now."""
        self._remove_autograd_hooks()  # type: ignore[no-untyped-call]
        self.__setstate__(self.__getstate__())  # type: ignore[no-untyped-call]
        self.fix_buckets()
        hooks, self._comm_hooks = self._comm_hooks, []
        for hook, state in hooks:
            self.register_comm_hook(state, hook)

    def unreduced(self) -> list[int]:
        """Return which gradients a backward has not reduced, where it has reduced some."""
        try:
            self.reducer._check_reducer_finalized()
        except RuntimeError as error:
            indices = str(error).rpartition("did not receive grad for rank")[2]
            return [*map(int, re.findall(r"\d+", indices))][1:]
        return []

    def reduce_held(self, index: int) -> None:
        """Reduce the gradient that a parameter holds, inside of a backward."""
        self.reducer._autograd_hook(index)  # type: ignore[attr-defined]

    def forget_backwards(self) -> None:
        """Let the reducer forget what backwards have told it since it was made ready."""
        self.reducer._reset_state()

    def send_buffers(self) -> None:
        """Give all processes the buffers of process 0, if the wrapper is to."""
        if self.will_sync_module_buffers():  # type: ignore[no-untyped-call]
            self._sync_buffers()  # type: ignore[no-untyped-call]

    @override
    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        return self.expected_order(*super()._build_params_for_reducer())  # type: ignore[no-untyped-call]


def was_called(model: DistributedDataParallel) -> bool:
    """Return whether the forward of a wrapper has run: without it nothing is averaged."""
    return bool(model._lazy_init_ran)


def start_sharded(model: nn.Module) -> None:
    """Make ready what `fully_shard` makes ready in the first forward, while parameters may thaw."""
    state: Any = model._get_fsdp_state()  # type: ignore[operator]
    state._lazy_init()


def sharded_groups(model: nn.Module) -> Iterator[tuple[Any, dict[nn.Parameter, Any]]]:
    """Yield the meshes of `fully_shard`, with the parameters there, and what torch has of each."""
    for module in model.modules():
        state: Any = getattr(module, "_get_fsdp_state", lambda: None)()
        if (group := getattr(state, "_fsdp_param_group", None)) is not None:
            infos = [(p, p._module_info) for p in group.fsdp_params]
            yield group.mesh_info.mesh, {getattr(at.module, at.param_name): p for p, at in infos}


def has_unreduced_shards(model: nn.Module) -> bool:
    """Return whether `fully_shard` holds gradients that wait for their reduction."""
    shards = [shard for _, held in sharded_groups(model) for shard in held.values()]
    whole = [getattr(shard, "unsharded_param", shard) for shard in shards]  # after a forward
    waiting = [getattr(each, "grad", None) for each in whole]
    waiting += [shard.unsharded_accumulated_grad for shard in shards]
    return any(each is not None for each in waiting)


# Process groups. `torch.distributed` has a time-out for new groups alone, and no number of what
# a group has begun, by which a report says which process lags.


def group_backends(group: "ProcessGroup") -> list[Any]:
    """Return what does the work of a group: one backend, or one for each type of device."""
    backends: list[Any] = []
    for device in group._device_types:
        backend = group._get_backend(device)
        if all(backend is not other for other in backends):
            backends.append(backend)
    return backends


def begun_collectives(backend: Any) -> int:
    """Return how many collectives this process has begun by a backend."""
    number: int = backend._get_sequence_number_for_group()
    return number


def set_backend_timeout(backend: Any, timeout: timedelta) -> bool:
    """Let the collectives of a backend raise after a time; False where it cannot be changed."""
    if not hasattr(backend, "_set_default_timeout"):
        return False
    backend._set_default_timeout(timeout)
    return True


# Loaders.

WorkersIterator = _MultiProcessingDataLoaderIter


def samples_asked_for(sampler: RandomSampler) -> int | None:
    """Return the number that a sampler was given; None: as many as its data set has."""
    asked: int | None = sampler._num_samples
    return asked


def workers_of(iterator: Any) -> list[Any]:
    """Return the worker processes of a pass of a `DataLoader`; torch tells of none that died."""
    workers: list[Any] = iterator._workers
    return workers


def end_workers(iterator: Any) -> None:
    """End the workers of a pass now; torch leaves that to the garbage collector."""
    iterator._shutdown_workers()


@contextmanager
def in_no_worker() -> Iterator[None]:
    """Let a data set read inside as in the main process: `get_worker_info` gives None.

    Data sets of Hugging Face shuffle otherwise even in the only worker.
    """
    from torch.utils.data._utils import worker

    present, worker._worker_info = worker._worker_info, None
    try:
        yield
    finally:
        worker._worker_info = present


def meet_without_pickles() -> None:
    """Let torch's rendezvous write and read its state as JSON, in this process.

    It is where launchers leave it for each other, and to unpickle is to run what a stranger wants.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous as torchs

    node = torchs._NodeDesc
    attributes = ("round", "complete", "closed")
    nodes = ("wait_list", "redundancy_list")

    class Json:
        """What torch uses of `pickle`."""

        PickleError = ValueError

        @staticmethod
        def dumps(state: Any) -> bytes:
            told = {name: getattr(state, name) for name in attributes}
            told["deadline"] = state.deadline and state.deadline.isoformat()
            for name in nodes:
                told[name] = sorted(map(astuple, getattr(state, name)))
            told["participants"] = [[*astuple(n), r] for n, r in state.participants.items()]
            heard = state.last_heartbeats.items()
            told["last_heartbeats"] = [[*astuple(n), at.isoformat()] for n, at in heard]
            return json.dumps(told).encode()

        @staticmethod
        def loads(text: bytes) -> Any:
            state = torchs._RendezvousState()
            try:
                told = json.loads(text)
                state.round = int(told["round"])
                state.complete, state.closed = bool(told["complete"]), bool(told["closed"])
                state.deadline = told["deadline"] and datetime.fromisoformat(told["deadline"])
                for name in nodes:
                    setattr(state, name, {node(*each) for each in told[name]})
                state.participants = {node(*each): int(r) for *each, r in told["participants"]}
                heard = told["last_heartbeats"]
                state.last_heartbeats = {node(*n): datetime.fromisoformat(at) for *n, at in heard}
            except (LookupError, TypeError) as error:
                raise ValueError(str(error)) from error
            return state

    cast(Any, torchs).pickle = Json


def step_of(optimizer: Optimizer, update: Callable[[], None]) -> Any:
    """Return a method for `optimizer.step` that schedules take for the one that they put there."""

    def step(own: Any, closure: Any = None) -> None:
        own._opt_called = True
        update()

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    return MethodType(step, optimizer)
