"""Data parallelism by torch's DistributedDataParallel."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from trainkit.basics.config import check_whole, checked
from trainkit.basics.torch_internals import GradientReducer, stored_values
from trainkit.errors import ConfigError, quoted
from trainkit.precision import Precision
from trainkit.strategies.strategy import Strategy

_is_trained = attrgetter("requires_grad")  # asked of each parameter, each window


class DDP(Strategy):
    """Holds the whole model on every process and averages the gradients once a window.

    Args:
        device: Where the model runs; None: the accelerator of the local rank, else the CPU.
        find_unused_parameters: Set it where a step does not use every parameter; all gradients are
            then sent at the end of a window, none while backward goes on.
        bucket_cap_mb: Size of a gradient bucket in MiB.
        context_parallel: How many neighbouring processes share the samples, and of each sequence
            compute a piece each: for sequences too long for one device. See the page on strategies.
    """

    name = "ddp"

    @checked
    def __init__(
        self,
        *,
        device: torch.device | str | None = None,
        find_unused_parameters: bool = False,
        bucket_cap_mb: float | None = None,
        context_parallel: int = 1,
    ) -> None:
        super().__init__(device=device)
        check_whole("context_parallel", context_parallel)
        self.context_parallel = context_parallel
        if bucket_cap_mb is not None and not 0 < bucket_cap_mb < math.inf:
            raise ConfigError(
                f"`bucket_cap_mb` must be a positive number of MiB, but is {bucket_cap_mb}."
            )
        self.find_unused_parameters = find_unused_parameters
        self.bucket_cap_mb = bucket_cap_mb
        self._begun: Reducing | None = None  # what the last backward of this window reduces
        self._held: list[tuple[nn.Parameter, Tensor | None]] = []  # before the step of a repeat
        self._made: list[nn.Parameter] = []  # what had no gradient before the backward of a repeat

    @override
    def setup(self) -> None:
        super().setup()
        if self.context_parallel > 1:
            from trainkit.strategies.context_parallel import ContextParallel  # few runs need it

            self.context = ContextParallel(self.processes, self.context_parallel)

    @override
    def wrap(self, model: nn.Module, precision: Precision, seed: int = 0) -> nn.Module:
        self.check_whole(model)
        self._begun = None  # of a run that failed
        model = self.to_device(model)
        if self.processes.size == 1 or not any(p.requires_grad for p in model.parameters()):
            return model  # there is nothing to reduce
        wrapped = Reducing(model, **self._options())
        wrapped.require_backward_grad_sync = False  # a step need not call its forward
        return wrapped

    def _options(self) -> dict[str, Any]:
        """Return the arguments of DistributedDataParallel but for the model."""
        return {
            "device_ids": None if self.device.type == "cpu" else [self.device],
            "bucket_cap_mb": self.bucket_cap_mb,
            "find_unused_parameters": self.find_unused_parameters,
            "gradient_as_bucket_view": True,
        }

    # In each window: `begin_reduction` before its last backward, then `finish_reduction`, on all
    # processes alike. A repeat of weight 0 may lie between them; what it did is put back first.

    @override
    def begin_reduction(self, model: nn.Module) -> None:
        self._put_back()
        if self._begun is not None and self._begun.window.stage == "begun":
            self._begun.complete()  # else it would take the next backward for a part of its own
        reducing = _reducing(model)
        if reducing is not None and not reducing.is_stale:
            reducing.begin()
            self._begun = reducing

    @override
    def finish_reduction(self, model: nn.Module, precision: Precision) -> nn.Module:
        reducing, self._begun = _reducing(model), None
        if reducing is None:
            model = self.wrap(model, precision)
            if (reducing := _reducing(model)) is None:
                return model  # still nothing is trained
            reducing.shares_buffers = False  # several optimizers do so before each window
        late: list[nn.Parameter] = []
        if reducing.window.stage == "idle" and reducing.is_stale:
            self._check_frozen(dict(reducing.module.named_parameters()))
            late = self._frozen_late(reducing)
            for p in late:
                p.requires_grad_(True)
            reducing.renew()
        reducing.complete()
        reducing.window.stage = "idle"
        for p in late:
            p.requires_grad_(False)
        return model

    def _frozen_late(self, reducing: "Reducing") -> list[nn.Parameter]:
        """Return what has frozen after it had got a gradient in this window, on any process."""
        held = torch.tensor([p.grad is not None for p in reducing.reduced])
        anywhere = self.processes.all_reduce(held.int(), "max").tolist()
        each = zip(reducing.reduced, anywhere, strict=True)
        return [p for p, is_held in each if is_held and not p.requires_grad]

    @override
    @contextmanager
    def zero_gradients(self, module: nn.Module) -> Iterator[None]:
        # A step may assign gradients, and what only a repeat has used must not seem to be used.
        self._held = [(p, p.grad) for p in module.parameters()]
        for p, _ in self._held:
            p.grad = None
        trained = [p for p, _ in self._held if p.requires_grad]

        def note_first(p: nn.Parameter, _: Tensor) -> None:
            if p.grad is None:
                self._made.append(p)

        hooks = [p.register_hook(partial(note_first, p)) for p in trained]  # type: ignore[no-untyped-call]
        try:
            with super().zero_gradients(module):
                yield
        finally:
            for hook in hooks:
                hook.remove()
            for p in self._made if self.find_unused_parameters else ():
                p.grad = None
            self._put_back()

    def _put_back(self) -> None:
        """Let gradients be what they were before a repeat; zeros where its step made the first."""
        for p, gradient in self._held:
            if gradient is None and p.grad is not None and not self.find_unused_parameters:
                gradient = torch.zeros_like(p.grad)
            p.grad = gradient
        self._held, self._made = [], []

    @override
    def unwrap(self, model: nn.Module) -> nn.Module:
        if isinstance(model, DistributedDataParallel):
            module = model.module
            assert isinstance(module, nn.Module)
            return module
        return model

    @override
    def check_gradients(self, module: nn.Module) -> None:
        if self.processes.size == 1 or self.find_unused_parameters:
            return
        names = sorted({name for own in self._without_gradient(module) for name in own})
        if names:
            raise _no_gradient(names)


@dataclass(slots=True)
class _Window:
    """What has been reduced in a window; no attributes of a module, which are slow to set."""

    stage: Literal["idle", "begun", "complete"] = "idle"
    before: Tensor | None = None  # the gradient that tells whether any has come


class Reducing(GradientReducer):
    """One whose buckets never change, and that reduces every gradient, however it came.

    Torch lays buckets out anew after the first backward, and an element is summed over processes
    in an order that depends on its place: a resumed run would differ in the last bit from one
    that was never stopped (rule 30). Here the buckets are laid out at once, as if gradients came
    in the reverse order of registration. With `find_unused_parameters` torch never changes them.

    In torch the forward makes ready for the backward. Here `begin` does, so that a step may call
    the user's own module. What the backward has not reduced, `complete` does: gradients that were
    assigned, or, with `find_unused_parameters`, all. Only then is it known what is unused: torch
    looks for it in the outputs, which the loss need not use, and which need not be all.

    Attributes:
        reduced: The parameters, in the order in which their gradients are expected.
        window: Whether its last backward reduces, and whether all is reduced.
        shares_buffers: Whether all processes take the buffers of process 0 in each window.
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.window = _Window()
        self.shares_buffers = True
        with _without_gradients(model):
            super().__init__(model, **options)
            self.fix_buckets()
        self._note_frozen()

    def renew(self) -> None:
        """Follow what froze or thawed."""
        with _without_gradients(self.module):
            self.lay_out()
        self._note_frozen()

    def _note_frozen(self) -> None:
        self._frozen = [p for p in self.module.parameters() if not p.requires_grad]

    @override
    def expected_order(
        self, parameters: list[nn.Parameter], are_sparse: list[bool]
    ) -> tuple[list[nn.Parameter], list[bool]]:
        backwards = slice(None, None, 1 if self.find_unused_parameters else -1)
        self.reduced, are_sparse = parameters[backwards], are_sparse[backwards]
        self._sparse = [p for p, sparse in zip(self.reduced, are_sparse, strict=True) if sparse]
        dense = [p for p in self.reduced if p.numel() and not any(p is s for s in self._sparse)]
        self._smallest = sorted(dense, key=torch.numel)[:1]  # its gradient says whether any came
        return self.reduced, are_sparse

    @property
    def is_stale(self) -> bool:
        """Whether parameters froze or thawed since the layout was made."""
        return self.has_thawed or not all(map(_is_trained, self.reduced))

    @property
    def has_thawed(self) -> bool:
        """Whether parameters are trained whose gradients are not expected."""
        return any(map(_is_trained, self._frozen))

    def begin(self) -> None:
        """Let the next backward reduce while it goes on, where that can be."""
        if self.find_unused_parameters or not self._smallest:
            return
        (p,) = self._smallest
        if p.grad is not None:  # it may be the view into a bucket that torch is to put there
            p.grad = p.grad.clone()
        self.window.before = p.grad
        self.reducer.prepare_for_backward([])
        self.window.stage = "begun"

    def complete(self) -> None:
        """Reduce what the backward has not: all, where that was not begun."""
        if self.window.stage == "complete":
            return
        begun, self.window.stage = self.window.stage == "begun", "complete"
        missing = self.unreduced() if begun else []
        came = begun and self._smallest[0].grad is not self.window.before
        if missing or not (came or self.static_graph):
            self._reduce_held(begun, missing)
        # In this window no forward has.
        if self.shares_buffers:
            self.send_buffers()
        self.require_forward_param_sync = True

    def _reduce_held(self, begun: bool, missing: list[int]) -> None:
        """Reduce the gradients that there are, by a backward that computes none.

        Args:
            begun: Whether a backward was to reduce them.
            missing: Those that it has not; empty where it has reduced none.
        """
        without = {index for index, p in enumerate(self.reduced) if p.grad is None}
        if self.find_unused_parameters:
            send = [i for i in range(len(self.reduced)) if i not in without] or [0]
            self.forget_backwards()
            self.reducer.prepare_for_backward([self.reduced[index][...] for index in send])
        else:
            send = missing or [*range(len(self.reduced))]
            if unused := without.intersection(send):
                ids = {id(self.reduced[index]) for index in unused}
                raise _no_gradient([n for n, p in self.module.named_parameters() if id(p) in ids])
            if not begun:
                self.reducer.prepare_for_backward([])
        unused_tables = [p for p in self._sparse if p.grad is None]
        for p in unused_tables:  # torch needs a gradient
            no_rows = torch.empty(1, 0, dtype=torch.int64, device=p.device)
            p.grad = torch.sparse_coo_tensor(
                no_rows, p.detach()[:0], p.shape, check_invariants=True
            )

        def take(_: Tensor) -> None:
            for index in send:
                self.reduce_held(index)

        start = torch.zeros((), device=self.device, requires_grad=True)
        start.register_hook(take)  # type: ignore[no-untyped-call]
        start.backward()  # type: ignore[no-untyped-call]
        for p in unused_tables:
            if p.grad is not None and len(stored_values(p.grad)) == 0:  # no process has used it
                p.grad = None


@contextmanager
def _without_gradients(model: nn.Module) -> Iterator[None]:
    """Take gradients away; torch would divide those in its buckets, where it multiplies others."""
    held = [(p, p.grad) for p in model.parameters()]
    model.zero_grad()
    yield
    for p, gradient in held:
        p.grad = gradient


def _reducing(model: nn.Module) -> Reducing | None:
    """Return what reduces in a model that was wrapped, by a strategy derived from this one too."""
    if isinstance(model, Reducing):
        return model
    return next((module for module in model.modules() if isinstance(module, Reducing)), None)


def _no_gradient(names: list[str]) -> ConfigError:
    return ConfigError(
        f"{len(names)} trainable parameters got no gradient in this window ({quoted(names)}), so "
        "the gradients of the processes would not be averaged. Freeze what the step does not use "
        "by `requires_grad_(False)`, or pass `strategy=DDP(find_unused_parameters=True)`."
    )
