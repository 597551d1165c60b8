"""Sharded data parallelism by torch's fully_shard."""

import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from trainkit.basics.config import check_whole, checked
from trainkit.basics.device import can_pin, collective_backend, move_module
from trainkit.basics.torch_internals import compiled_call, moves_in_place, start_sharded
from trainkit.checkpoint.resharding.sharding_spec import is_sharded
from trainkit.distributed import Processes
from trainkit.distributed.world import World
from trainkit.errors import ConfigError, quoted
from trainkit.precision import Precision
from trainkit.strategies import single_process_group
from trainkit.strategies.activation_checkpointing import checkpoint_activations
from trainkit.strategies.sharded import ShardedStrategy, outside_graphs, reshard_after_evaluation
from trainkit.strategies.strategy import on_meta

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from trainkit.strategies.blocks import WrapPolicy


@dataclass(slots=True)
class _Sharded:
    """What is known of a sharded model.

    Attributes:
        dtype: That of its parameters while they are used; None: their own.
        replaced: The full parameters that were there before, by the name of the sharded one;
            weak, so that they do not stay in memory.
        parameters: Those of the model while they are sharded, and what has no dimension.
        trained: Which of them trained, in each way that the processes have compared.
        hooks: Those of the strategy that the model was last wrapped by.
        reduces: The present backward reduces gradients: it is not inside `no_sync`.
        shares_buffers: The next forward takes the buffers of process 0: gradients were reduced
            since the last one, or there was none.
        compares: The next forward is compared over the processes: it is the first since `wrap`.
    """

    dtype: torch.dtype | None
    replaced: dict[str, "weakref.ref[nn.Parameter]"]
    parameters: dict[str, nn.Parameter]
    trained: set[tuple[bool, ...]] = field(default_factory=set)
    hooks: list[RemovableHandle] = field(default_factory=list)
    reduces: bool = True
    shares_buffers: bool = True
    compares: bool = True


_models: "weakref.WeakKeyDictionary[nn.Module, _Sharded]" = weakref.WeakKeyDictionary()
_meshes: "weakref.WeakKeyDictionary[Any, dict[Any, DeviceMesh]]" = weakref.WeakKeyDictionary()
"""By the default group that they were made in: each may have groups, which are used again."""


class FSDP(ShardedStrategy):
    """Holds a part of the parameters, gradients and optimizer state on each process.

    A block's parameters are put together for its forward and backward, and given up after. The
    model is sharded in place: its parameters become `DTensor`s, under the names they had. Every
    process starts from the values of process 0.

    A model may be on the meta device. Where that of process 0 is real, its values are sent;
    else they are read from `weights`, or each module initialises itself, from the seed of the
    run and its name.

    Processes must call the same blocks in the same order, and use the same parameters, else torch
    waits for ever or crashes. The first forward of a training compares this, unless the model is
    compiled; what differs later is found by the watchdog. Parameters are whole only inside the
    model's forward: a penalty on weights belongs there, or into the optimizer.

    Args:
        wrap_policy: Which modules are sharded on their own: classes, or a callable
            `(name, module) -> bool`, or the number of parameters above which a module is. None: the
            blocks that a transformers model names, else the children of the largest list of modules
            of one class.
        reshard_after_forward: Give up a block's parameters between forward and backward; False
            keeps them, for less communication and more memory.
        cpu_offload: Keep parameters, gradients and optimizer state in the memory of the CPU.
        activation_checkpointing: Compute the activations of each block again in backward instead
            of keeping them; "selective" and "offload" as of `Trainer(gradient_checkpointing=)`.
        replicas: Number of groups of processes that hold a whole model each; must divide the
            number of processes. The model is sharded inside a group. "machines": each machine is
            such a group; "processes": each process is, and nothing is sharded.
        weights: What `load_checkpoint_in_model` reads, such as a folder that `save_pretrained`
            wrote. A model on the meta device is filled from it, by each process its own part.
        device: Where the model runs; None: the accelerator of the local rank, else the CPU.
        context_parallel: As of `DDP`; the model is sharded over these processes too.
    """

    name = "fsdp"

    @checked
    def __init__(
        self,
        *,
        wrap_policy: "WrapPolicy | None" = None,
        reshard_after_forward: bool = True,
        cpu_offload: bool = False,
        activation_checkpointing: bool | str = False,
        replicas: int | str = 1,
        weights: str | Path | None = None,
        device: torch.device | str | None = None,
        context_parallel: int = 1,
    ) -> None:
        super().__init__(device=device)
        check_whole("context_parallel", context_parallel)
        self.context_parallel = context_parallel
        self.wrap_policy = wrap_policy
        self.reshard_after_forward = reshard_after_forward
        self.cpu_offload = cpu_offload
        self.activation_checkpointing = activation_checkpointing
        self.replicas: Any = replicas
        self.weights = None if weights is None else Path(weights)

    @override
    def setup(self) -> None:
        if World.from_env().size == 1:
            single_process_group.join(self._default_device())
        super().setup()
        if self.context_parallel > 1:
            from trainkit.strategies.context_parallel import ContextParallel  # few runs need it

            self.context = ContextParallel(self.processes, self.context_parallel)
        world = World.current()
        by_name = {"machines": world.size // world.local_size, "processes": world.size}
        self.replicas = by_name.get(self.replicas, self.replicas)
        if not isinstance(self.replicas, int) or self.replicas < 1 or world.size % self.replicas:
            raise ConfigError(
                f"`replicas` must divide the number of processes, but is {self.replicas!r} on "
                f'{world.size}. Pass a divisor, "machines" or "processes", or leave it out.'
            )
        if self.processes.size == 1 and not self.cpu_offload:
            warnings.warn(
                "FSDP gains nothing on one process: there is nobody to share the model with. "
                'Start more processes, or use `strategy="single"`.',
                stacklevel=2,
            )
        self._mesh = _make_mesh(self.processes, self.device, self.replicas, self.cpu_offload)

    @property
    @override
    def held_part(self) -> tuple[int, int]:
        return self._mesh.get_local_rank("shards"), self.processes.size // self.replicas

    @override
    def wrap(self, model: nn.Module, precision: Precision, seed: int = 0) -> nn.Module:
        known = _models.get(model)
        if known is None:
            self.check_whole(model)
            known = _models[model] = self._shard(model, precision.dtype, seed)
        elif known.dtype != precision.dtype:
            raise ConfigError(
                f"The model was sharded for the precision {known.dtype or 'of its parameters'}, "
                f"and cannot change to `{precision.name}`. Use the same precision, or start from "
                "a model that is not sharded."
            )
        for hook in known.hooks:  # of an earlier strategy
            hook.remove()
        known.reduces = known.shares_buffers = known.compares = True

        def before_forward(model: nn.Module, inputs: Any) -> None:
            self._before_forward(model, known)

        known.hooks = [
            model.register_forward_pre_hook(outside_graphs(before_forward)),
            model.register_forward_hook(outside_graphs(reshard_after_evaluation)),
        ]
        return model

    @override
    def to_device(self, model: nn.Module) -> nn.Module:
        return model if model in _models else super().to_device(model)

    @override
    def rebind_optimizer(self, optimizer: Optimizer, module: nn.Module) -> None:
        sharded = dict(module.named_parameters())
        replaced = {
            id(full): sharded[name]
            for name, reference in _models[module].replaced.items()
            if (full := reference()) is not None
        }
        groups = [group["params"] for group in optimizer.param_groups]
        if not any(id(p) in replaced for group in groups for p in group):
            return
        if any(optimizer.state.values()):
            raise ConfigError(
                "The optimizer has state for the full parameters, which FSDP has replaced by "
                "sharded ones. Pass a callable such as `partial(AdamW, lr=3e-4)`, or an optimizer "
                "that has made no step, and go on from a checkpoint by `resume`."
            )
        optimizer.state.clear()  # what has looked for a state may have left an empty one
        for group in groups:
            group[:] = [replaced.get(id(p), p) for p in group]

    @override
    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        model.set_requires_gradient_sync(False)  # type: ignore[operator]
        known = _models[model]
        known.reduces = False
        try:
            yield
        finally:
            known.reduces = True
            model.set_requires_gradient_sync(True)  # type: ignore[operator]

    @override
    def begin_reduction(self, model: nn.Module) -> None:
        known = _models[model]
        trained = tuple(p.requires_grad for p in known.parameters.values())
        if trained in known.trained:
            return  # torch sees by itself what froze or thawed
        self._check_frozen(known.parameters)
        _check_scalars(known.parameters)
        known.trained.add(trained)

    @override
    @contextmanager
    def gradients_apart(self, model: nn.Module) -> Iterator[None]:
        # What waits for its reduction is out of reach, so each backward reduces.
        model.set_requires_gradient_sync(True)  # type: ignore[operator]
        try:
            yield
        finally:
            model.set_requires_gradient_sync(False)  # type: ignore[operator]

    @override
    def _counts(self, parameter: Tensor) -> bool:
        return self.replicas == 1 or self._mesh.get_local_rank("replicas") == 0

    @override
    def close(self) -> None:
        super().close()
        single_process_group.leave()

    def _shard(self, model: nn.Module, dtype: torch.dtype | None, seed: int) -> _Sharded:
        """Shard the model in place, block by block; each process keeps rows of its own values.

        Raises:
            ConfigError: A trainable parameter has no dimension or sparse gradients, one does not
                lie row by row in memory, or nothing can be computed again.
        """
        from torch.distributed.fsdp import (
            CPUOffloadPolicy,
            MixedPrecisionPolicy,
            OffloadPolicy,
            fully_shard,
        )

        from trainkit.strategies.blocks import find_blocks
        from trainkit.strategies.parameter_initializer import ParameterInitializer

        if not moves_in_place(self.device) and not on_meta(model):
            move_module(model, self.device)  # else torch moves it, one block after the other
        blocks = find_blocks(model, self.wrap_policy, self.called_apart)
        device = torch.device("cpu") if self.cpu_offload else self.device
        initializer = ParameterInitializer(
            model, blocks, self.processes, device, self.weights, seed
        )
        replaced = {name: weakref.ref(p) for name, p in model.named_parameters()}
        _check_rows(model)
        check_dense(model)
        frozen_scalars = _check_scalars(dict(model.named_parameters()))
        if self.activation_checkpointing:
            checkpoint_activations(model, blocks.values(), self.activation_checkpointing)
        pin = self.cpu_offload and can_pin(torch.device(self._mesh.device_type))
        apply = partial(
            fully_shard,
            mesh=self._mesh,
            # Parameters have that dtype while they are used; gradients are then reduced in fp32.
            mp_policy=MixedPrecisionPolicy(
                param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32
            ),
            offload_policy=(
                CPUOffloadPolicy(pin_memory=pin) if self.cpu_offload else OffloadPolicy()
            ),
            ignored_params=frozen_scalars,
        )
        for block in blocks.values():
            apply(block, reshard_after_forward=self.reshard_after_forward)
        # What lies outside of the blocks is used first in backward, so it is kept until then.
        apply(model, reshard_after_forward=False)
        initializer.fill(model)
        for p in frozen_scalars:
            p.data = p.data.to(self.device)  # torch moves what it shards, and nothing else
        # A block of which all is frozen would not learn in which dtype to reduce after a thaw.
        thawed = _first_of_frozen(model, blocks)
        for p in thawed:
            p.requires_grad_(True)
        start_sharded(model)
        for p in thawed:
            p.requires_grad_(False)
        return _Sharded(dtype, replaced, dict(model.named_parameters()))

    def _before_forward(self, model: nn.Module, sharded: _Sharded) -> None:
        """Take the buffers of process 0, once for each reduction, and in an evaluation after it.

        The first forward of a training is compared over the processes.
        """
        trains = torch.is_grad_enabled() and model.training
        if sharded.shares_buffers and (trains or not model.training):
            self.share_buffers(model)
            sharded.shares_buffers = False
        if trains:
            sharded.shares_buffers = sharded.reduces
            compares, sharded.compares = sharded.compares, False
            if compares and self.processes.size > 1 and compiled_call(model) is None:
                from trainkit.strategies.forward_check import ForwardCheck

                sharded.hooks += ForwardCheck(model, self.processes).hooks


def _check_scalars(parameters: Mapping[str, nn.Parameter]) -> set[nn.Parameter]:
    """Return those without a dimension, which cannot be cut into rows; raise where one trains."""
    scalars = {name: p for name, p in parameters.items() if p.ndim == 0}
    trainable = [name for name, p in scalars.items() if p.requires_grad]
    if trainable:
        raise ConfigError(
            f"{len(trainable)} trainable parameters have no dimension, and cannot be sharded: "
            f"{quoted(trainable)}. Give them the shape (1,), freeze "
            'them, or use `strategy="ddp"`.'
        )
    return set(scalars.values())


def _check_rows(model: nn.Module) -> None:
    turned = [name for name, p in model.named_parameters() if not p.is_contiguous()]
    if turned:
        raise ConfigError(
            f"{len(turned)} parameters do not lie row by row in memory, so they cannot be cut into "
            f"rows: {quoted(turned)}. Leave out "
            "`memory_format=torch.channels_last`, write `p.data = p.data.contiguous()` for each, "
            'or use `strategy="ddp"`.'
        )


def check_dense(model: nn.Module) -> None:
    """Raise where trained embeddings have sparse gradients."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    sparse = [n for n, m in model.named_modules() if isinstance(m, kinds) and m.sparse]
    sparse = [n for n in sparse if model.get_submodule(n).weight.requires_grad]
    if sparse:
        raise ConfigError(
            f"{len(sparse)} modules have sparse gradients, which torch cannot shard: "
            f'{quoted(sparse)}. Leave out `sparse=True`, freeze them, or use `strategy="ddp"`.'
        )


def _first_of_frozen(model: nn.Module, blocks: Mapping[str, nn.Module]) -> list[nn.Parameter]:
    """Return a parameter of each block that has none to train."""
    outer_first: list[nn.Module] = [model, *reversed([*blocks.values()])]
    owners = {p: index for index, block in enumerate(outer_first) for p in block.parameters()}
    trains = {index for p, index in owners.items() if p.requires_grad}
    sharded = [p for p in owners if is_sharded(p) and p.is_floating_point()]
    return [*{owners[p]: p for p in sharded if owners[p] not in trains}.values()]


def _make_mesh(
    processes: Processes, device: torch.device, replicas: int, offloads: bool
) -> "DeviceMesh":
    from torch.distributed.device_mesh import init_device_mesh

    made = _meshes.setdefault(torch.distributed.group.WORLD, {})
    key = (device.type, replicas, offloads)
    if key not in made:
        sizes: tuple[int, ...] = (processes.size,)
        names: tuple[str, ...] = ("shards",)
        if replicas > 1:
            sizes, names = (replicas, processes.size // replicas), ("replicas", "shards")
        backends: Any = None
        if offloads and device.type != "cpu":  # gradients are reduced there, and looked at here
            both = f"cpu:gloo,{device.type}:{collective_backend(device)}"
            backends = dict.fromkeys(names, both)
        made[key] = init_device_mesh(
            device.type, sizes, mesh_dim_names=names, backend_override=backends
        )
    processes.apply_timeout(*made[key].get_all_groups())
    return made[key]
