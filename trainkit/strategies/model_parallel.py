"""Models that come parallel, over a device mesh of their own."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from trainkit.basics.config import checked
from trainkit.basics.torch_internals import sharded_groups, tree_leaves
from trainkit.checkpoint.resharding.sharding_spec import is_sharded, local_part
from trainkit.distributed import Processes
from trainkit.distributed.collectives import require_equal
from trainkit.distributed.part_of_processes import part_of
from trainkit.errors import ConfigError, quoted
from trainkit.precision import Precision
from trainkit.strategies.fsdp import check_dense
from trainkit.strategies.mesh_layout import MeshLayout, find_layout
from trainkit.strategies.sharded import ShardedStrategy, outside_graphs, reshard_after_evaluation
from trainkit.types import class_name

_OWN_SUM = "replicated_with_grad_allreduce"
"""Transformers' word for what sums its gradient up over the tensor group in each backward."""
_MOST_LOOKS = 100


class ModelParallel(ShardedStrategy):
    """Trains a model that is parallel already, on the mesh that it came with.

    For what torch's `parallelize_module` and `fully_shard` have cut, alone or together on the
    dimensions of one mesh, and for models of transformers that were loaded with a
    `distributed_config`. The processes that `fully_shard` has spread the model over have samples of
    their own. The others hold a model together (a tensor group), and see the same samples: there a
    batch size is that of the group. Without `fully_shard`, all processes of the mesh are one tensor
    group; where there are several groups, gradients are averaged over them once a window.

    Parameters that a tensor group holds whole must begin alike on its processes: seed all alike
    before the model is made.

    Args:
        device: Where the model is; None: the accelerator of the local rank, else the CPU.
    """

    name = "model_parallel"

    @checked
    def __init__(self, *, device: torch.device | str | None = None) -> None:
        super().__init__(device=device)
        self._layouts: weakref.WeakKeyDictionary[nn.Module, MeshLayout] = (
            weakref.WeakKeyDictionary()
        )
        self._parts: dict[Any, Processes] = {}
        self._hook: RemovableHandle | None = None
        self._after_forward: RemovableHandle | None = None
        self._trained: set[tuple[bool, ...]] = set()  # what the processes have compared
        self._unseen: dict[str, nn.Parameter] | None = None  # that had no gradient but 0 so far
        self._looks = 0  # windows in which these were looked at
        self._aside: list[tuple[nn.Parameter, Tensor]] = []  # gradients, during a backward
        self._holders: dict[Any, tuple[int, ...]] = {}
        self._adds_up = False  # whether each backward sums up what earlier ones have left, too
        self._waiting: weakref.WeakSet[Any] = weakref.WeakSet()  # what `fully_shard` reduces
        self._others: list[weakref.ref[nn.Parameter]] = []  # whose gradients nobody else averages

    @property
    @override
    def data_processes(self) -> Processes:
        return self._part(self._layout.data)

    @override
    def setup(self) -> None:
        super().setup()
        size = self.processes.size
        self._layout = MeshLayout((tuple(range(size)),), tuple((rank,) for rank in range(size)))

    @override
    def adopt(self, model: nn.Module) -> Processes:
        if isinstance(model, nn.Module):  # else others say what it must be
            if model not in self._layouts:
                self._check(model)
                self._layouts[model] = find_layout(model, self.processes)
            self._layout = self._layouts[model]
            assert self._group.size  # all processes make it at one place
        return self.data_processes

    @override
    def wrap(self, model: nn.Module, precision: Precision, seed: int = 0) -> nn.Module:
        if precision.name in ("fp16", "fp8"):
            raise ConfigError(
                '`strategy="model_parallel"` has no scale for parameters on several meshes. Use '
                f'`precision="bf16"` or "fp32" instead of "{precision.name}".'
            )
        self.adopt(model)
        self._note_reductions(model)
        self._trained.clear()
        self._unseen = None
        self._holders.clear()
        self._aside.clear()
        self._begin_alike(model)
        self.share_buffers(model)
        for hook in (self._hook, self._after_forward):
            if hook is not None:
                hook.remove()
        after_forward = outside_graphs(reshard_after_evaluation)
        self._after_forward = model.register_forward_hook(after_forward)
        if self._group.size > 1:
            self._hook = model.register_forward_pre_hook(self._compare_inputs, with_kwargs=True)
        return model

    @override
    def to_device(self, model: nn.Module) -> nn.Module:
        return model  # where its mesh is, as `adopt` has seen

    def holders(self, tensor: Tensor) -> tuple[int, ...]:
        """Return, of each process, the first one that holds the same part of a tensor."""
        key = (tensor.device_mesh, tensor.placements) if is_sharded(tensor) else None  # type: ignore[attr-defined]
        if key not in self._holders:
            self._holders[key] = self._layout.holders(tensor)
        return self._holders[key]

    @override
    def held_part_of(self, value: Any) -> tuple[tuple[int, ...], int, int]:
        holders = self.holders(value)
        firsts = sorted({*holders})
        return holders, firsts.index(holders[self.processes.rank]), len(firsts)

    @override
    def rebind_optimizer(self, optimizer: Optimizer, module: nn.Module) -> None:
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConfigError(
                "`LBFGS` joins all parameters in one tensor, which what is cut and what is whole "
                "cannot be. Use an optimizer that updates each by itself, such "
                "as `partial(AdamW, lr=3e-4)`."
            )

    @override
    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        self._let_wait(True)
        self._set_aside(model)
        try:
            yield
        finally:
            self._put_together()
            self._let_wait(False)

    @override
    def begin_reduction(self, model: nn.Module) -> None:
        parameters = dict(model.named_parameters())
        trained = tuple(p.requires_grad for p in parameters.values())
        if trained not in self._trained:
            self._check_frozen(parameters)
            self._trained.add(trained)
        self._set_aside(model)

    @override
    def finish_reduction(self, model: nn.Module, precision: Precision) -> nn.Module:
        self._put_together()
        for p in model.parameters():
            if is_sharded(p) and p.grad is not None and p.grad.placements != p.placements:  # type: ignore[attr-defined]
                p.grad = p.grad.redistribute(placements=p.placements)  # type: ignore[attr-defined]
        if self.data_processes.size > 1:
            self._average([p for p in self._unreduced() if p.requires_grad])
            self.share_buffers(model)
        if self._unseen and self._looks < _MOST_LOOKS:
            self._check_whole(self._unseen, {})
        return model

    @override
    @contextmanager
    def gradients_apart(self, model: nn.Module) -> Iterator[None]:
        self._let_wait(False)  # what waits for its reduction is out of reach
        try:
            yield
        finally:
            self._let_wait(True)

    @override
    @contextmanager
    def zero_gradients(self, module: nn.Module) -> Iterator[None]:
        whole = super(ShardedStrategy, self).zero_gradients(module)  # of what is always here
        with whole, super().zero_gradients(module):
            yield

    @override
    def check_gradients(self, module: nn.Module) -> None:
        super().check_gradients(module)
        saved = module.state_dict(keep_vars=True)
        buffers = {n: b for n, b in module.named_buffers() if n in saved and b.is_floating_point()}
        self._looks = 0
        self._check_whole(dict(module.named_parameters()), buffers)

    def _check_whole(self, parameters: dict[str, nn.Parameter], buffers: dict[str, Tensor]) -> None:
        """Raise where what is whole differs; note whose gradients are 0, which tell nothing yet.

        Of an adapter one half begins as 0, and until it has learnt the other has no gradient.
        """
        gradients = {n: p.grad for n, p in parameters.items() if p.grad is not None}
        if wrong := self._apart(gradients | buffers, 0.01):
            raise ConfigError(
                f"{len(wrong)} parameters or buffers are whole on each process of a tensor group, "
                f"but have other gradients or values on each after a step ({quoted(wrong)})"
                ": each process has seen a part of what they work on. Make them `DTensor`s placed "
                "by `Replicate()`, as `parallelize_module` does, or add up over the group."
            )
        names = [n for n, p in parameters.items() if p.requires_grad and self._is_whole(p)]
        if names and self._group.size > 1:
            none = torch.zeros((), dtype=torch.bool, device=self.device)
            own = [local_part(gradients[n]).any() if n in gradients else none for n in names]
            seen = self.processes.all_reduce(torch.stack(own).int().cpu(), "max").tolist()
            found = zip(names, seen, strict=True)
            self._unseen = {n: parameters[n] for n, is_seen in found if not is_seen}
        self._looks += 1

    @override
    def _counts(self, parameter: Tensor) -> bool:
        rank = self.processes.rank
        return self.holders(parameter)[rank] == rank

    @override
    def close(self) -> None:
        for part in self._parts.values():
            if part is not self.processes:
                part.close()
        self._parts.clear()
        super().close()

    def _part(self, groups: tuple[tuple[int, ...], ...]) -> Processes:
        """Return the processes of the group in which this one is."""
        if groups not in self._parts or not self._parts[groups].is_usable():
            self._parts[groups] = part_of(self.processes, groups)
        return self._parts[groups]

    def _check(self, model: nn.Module) -> None:
        kinds = {t.device.type for t in chain(model.parameters(), model.buffers())}
        if kinds - {self.device.type}:
            raise ConfigError(
                f"`{class_name(model)}` is on {quoted(sorted(kinds))}, but the strategy's device "
                f"is `{self.device.type}`. Make the mesh and the model there, or pass "
                "`strategy=ModelParallel(device=...)`."
            )
        check_dense(model)
        holders: dict[nn.Parameter, set[int]] = {}
        for _, parameters in sharded_groups(model):
            for p, shard in parameters.items():
                holders.setdefault(p, set()).add(id(shard))
        twice = [name for name, p in model.named_parameters() if len(holders.get(p, ())) > 1]
        if twice:
            raise ConfigError(
                f"{quoted(twice)} of `{class_name(model)}` is tied, and `fully_shard` has made a "
                "shard of it in each of its places: a forward after an update would not see it "
                "in all of them. Load the model with `tie_word_embeddings=False`, or whole, with "
                "`strategy=FSDP()`, which keeps what is tied together."
            )

    def _is_whole(self, tensor: Tensor) -> bool:
        """Return whether each process of a tensor group holds the same of a tensor."""
        holders = self.holders(tensor)
        return len({holders[rank] for rank in self._group.ranks}) == 1

    @property
    def _group(self) -> Processes:
        """The tensor group of this process."""
        return self._part(self._layout.tensor)

    def _note_reductions(self, model: nn.Module) -> None:
        """Note who averages which gradients, as the model has come."""
        from torch.distributed.fsdp import FSDPModule

        plans = [getattr(module, "_tp_plan", None) or {} for module in model.modules()]
        self._adds_up = self._group.size > 1 and any(_OWN_SUM in plan.values() for plan in plans)
        waiting = [m for m in model.modules() if isinstance(m, FSDPModule) and not self._adds_up]
        self._waiting = weakref.WeakSet(waiting)
        known = {id(p) for _, parameters in sharded_groups(model) for p in parameters}
        self._others = [weakref.ref(p) for p in model.parameters() if id(p) not in known]

    def _unreduced(self) -> list[nn.Parameter]:
        """Return the parameters whose gradients nobody else averages over the data."""
        return [p for other in self._others if (p := other()) is not None]

    def _begin_alike(self, model: nn.Module) -> None:
        """Take the values of the first data group; compare what a tensor group shares."""
        if wrong := self._apart(dict(model.named_parameters())):
            raise ConfigError(
                f"{len(wrong)} parameters are whole on each process of a tensor group, but differ "
                f"between them ({quoted(wrong)}). Seed all processes alike before the model is "
                "made (`torch.manual_seed`), or make `DTensor`s of parts of a larger one, as "
                "`parallelize_module` does."
            )
        if self.data_processes.size > 1:
            for p in self._unreduced():
                self.data_processes.broadcast(local_part(p.detach()))

    def _apart(self, tensors: Mapping[str, Tensor], tolerance: float = 0.0) -> list[str]:
        """Return the names of what a tensor group holds whole, and some process in another way.

        Args:
            tensors: The same ones on all processes.
            tolerance: Relative to the largest element.
        """
        whole = {name: local_part(t.detach()) for name, t in tensors.items() if self._is_whole(t)}
        flags = [torch.zeros((), dtype=torch.int32, device=self.device)]
        for own in whole.values() if self._group.size > 1 else ():
            if not own.numel():  # a shard of a tensor with fewer rows than processes
                flags.append(torch.zeros_like(flags[0]))
                continue
            high, low = (self._group.all_reduce(own.clone(), op) for op in ("max", "min"))
            largest = torch.maximum(high.abs(), low.abs()).max()
            flags.append(((high - low).max() > tolerance * largest).int())
        flagged = self.processes.all_reduce(torch.stack(flags).cpu(), "max").tolist()
        return [name for name, flag in zip(whole, flagged[1:], strict=False) if flag]

    def _compare_inputs(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Raise, on all processes, where a tensor group has not the same batch; once."""
        if not torch.is_grad_enabled() or self._hook is None:
            return
        self._hook.remove()
        self._hook = None
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        seen = [([*t.shape], t.detach().double().sum().item()) for t in tensors]
        streams = [torch.get_rng_state()]
        if self.device.type != "cpu":
            streams.append(torch.get_device_module(self.device).get_rng_state(self.device))
        require_equal(self._group, [seen, [s.tolist() for s in streams]], _other_inputs)

    def _set_aside(self, model: nn.Module) -> None:
        """Let what sums gradients up in a backward see those of the next one alone."""
        self._put_together()
        if self._adds_up:
            self._aside = [(p, p.grad) for p in model.parameters() if p.grad is not None]
            for p, _ in self._aside:
                p.grad = None

    def _put_together(self) -> None:
        for p, gradient in self._aside:
            p.grad = gradient if p.grad is None else p.grad.add_(gradient)
        self._aside.clear()

    def _average(self, parameters: list[nn.Parameter]) -> None:
        """Average gradients over the data; one that only some processes have is 0 elsewhere."""
        own = torch.tensor([int(p.grad is not None) for p in parameters])
        anywhere = self.data_processes.all_reduce_async(own, "max")
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        parts = self.local_gradients(parameters)
        for pending in [self.data_processes.all_reduce_async(part, "mean") for part in parts]:
            pending.wait()
        for p, is_anywhere in zip(parameters, anywhere.wait().tolist(), strict=True):
            p.grad = p.grad if is_anywhere else None

    def _let_wait(self, waits: bool) -> None:
        """Say whether what `fully_shard` reduces waits for a later backward than the next."""
        for module in self._waiting:
            module.set_requires_gradient_sync(not waits, recurse=False)


def _other_inputs(of_all: Sequence[Any]) -> ConfigError:
    return ConfigError(
        f"The {len(of_all)} processes of a tensor group must see the same batch, and draw the same "
        "numbers, but in the first forward they were given others, or were seeded otherwise. Give "
        "all of them the same data in the same order, and the same seed; where loaders are "
        "`presharded`, a share is that of a group."
    )
