"""Shards a model in place by torch's fully_shard."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from trainkit.basics.device import can_pin
from trainkit.errors import ConfigError, quoted
from trainkit.strategies.activation_checkpointing import checkpoint_activations


def shard(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    mesh: DeviceMesh,
    *,
    dtype: torch.dtype | None,
    reshard_after_forward: bool,
    cpu_offload: bool,
    activation_checkpointing: bool,
) -> None:
    """Shard `model` over `mesh`, block by block; each process keeps rows of its own values.

    Args:
        model: Real, or on the meta device.
        blocks: What is sharded on its own, inner modules before those around them.
        mesh: Of one axis, over which everything is sharded, or of two, replicas and shards.
        dtype: That of parameters while they are used; gradients are then reduced in fp32.
        reshard_after_forward: Whether blocks give up their parameters after the forward.
        cpu_offload: Whether parameters stay on the CPU while they are not used.
        activation_checkpointing: Whether blocks compute their activations again in backward.

    Raises:
        ConfigError: A trainable parameter has no dimension or sparse gradients, one does not lie
            row by row in memory, or nothing can be computed again.
    """
    _check_rows(model)
    _check_dense(model)
    frozen_scalars = check_scalars(dict(model.named_parameters()))
    if activation_checkpointing:
        checkpoint_activations(model, blocks.values())
    pin = cpu_offload and can_pin(torch.device(mesh.device_type))
    apply = partial(
        fully_shard,
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=None if dtype is None else torch.float32
        ),
        offload_policy=CPUOffloadPolicy(pin_memory=pin) if cpu_offload else OffloadPolicy(),
        ignored_params=frozen_scalars,
    )
    for block in blocks.values():
        apply(block, reshard_after_forward=reshard_after_forward)
    # What lies outside of the blocks is used first in backward, so it is kept until then.
    apply(model, reshard_after_forward=False)


def check_scalars(parameters: Mapping[str, nn.Parameter]) -> set[nn.Parameter]:
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


def _check_dense(model: nn.Module) -> None:
    kinds = (nn.Embedding, nn.EmbeddingBag)
    sparse = [n for n, m in model.named_modules() if isinstance(m, kinds) and m.sparse]
    sparse = [n for n in sparse if model.get_submodule(n).weight.requires_grad]
    if sparse:
        raise ConfigError(
            f"{len(sparse)} modules have sparse gradients, which torch cannot shard: "
            f'{quoted(sparse)}. Leave out `sparse=True`, freeze them, or use `strategy="ddp"`.'
        )
