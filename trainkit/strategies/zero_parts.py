"""What DeepSpeed's ZeRO gives each process to update, its gradients, and its optimizer's state."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from math import nan
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainkit.basics.torch_internals import step_of
from trainkit.distributed import Processes
from trainkit.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Piece:
    """What is updated here of a parameter: `size` of its elements from `begin` on, perhaps none."""

    parameter: nn.Parameter
    begin: int
    offset: int  # of the first of them in `flat`
    size: int
    flat: Tensor  # what is updated here of a group; its `.grad` is the reduced gradient

    def of(self, flat: Tensor) -> Tensor:
        """Return it, of `flat` or what is like it."""
        return flat[self.offset : self.offset + self.size]

    def of_whole(self, whole: Tensor) -> Tensor:
        """Return it, of the parameter or what is like it."""
        return whole.reshape(-1)[self.begin : self.begin + self.size]


class ZeroParts:
    """Drives an optimizer of DeepSpeed's, stage 1 or 2: it reduces gradients and spreads updates.

    The user's `optimizer` keeps its parameters and settings; `updating`, the copy of it that
    DeepSpeed's `zero` was made with, updates what lies here. Losses are scaled, norms taken and
    updates made outside of DeepSpeed, so that they are those of every strategy.
    """

    def __init__(self, zero: Any, updating: Optimizer, optimizer: Optimizer) -> None:
        self.updating = updating
        self._zero, self._optimizer = zero, optimizer
        self._in_backward = bool(zero.partition_gradients)
        groups = zero.single_partition_of_fp32_groups
        self._flats = [(flat, [*_pieces(zero, n, flat)]) for n, flat in enumerate(groups)]
        self._groups = {p.parameter: n for n, (_, own) in enumerate(self._flats) for p in own}
        self._pieces = {p.parameter: p for _, own in self._flats for p in own}
        self._came: set[nn.Parameter] = set()  # in a backward since gradients were reduced last
        self._in_window: set[nn.Parameter] = set()
        self._left: dict[nn.Parameter, tuple[Tensor | None, Tensor, int]] = {}  # see `leave`
        zero._coalesce_grad_reduction = not self._in_backward
        hooked: Any = self._pieces if self._in_backward else ()
        note = self._came.add
        self._hooks = [p.register_post_accumulate_grad_hook(note) for p in hooked]
        self._hooks.append(optimizer.register_load_state_dict_pre_hook(self._take_state))
        self._hooks.append(optimizer.register_state_dict_pre_hook(self._check_whole))
        self._is_whole = False
        vars(optimizer).update(step=step_of(optimizer, self._step), zero_grad=self._zero_grad)

    @contextmanager
    def gradients_apart(self) -> Iterator[None]:
        """Let what backward computes stay in `.grad` inside."""
        self.reduce(last=False)
        self._zero._coalesce_grad_reduction = True
        try:
            yield
        finally:
            self._zero._coalesce_grad_reduction = not self._in_backward

    def reduce(self, *, last: bool, whole: bool = True) -> None:
        """Reduce the gradients of a micro-batch; with the last one a window is complete.

        Args:
            whole: Whether every trained parameter must have got a gradient then.
        """
        zero = self._zero
        if not (last or self._in_backward):
            return  # what is not sent yet is added up
        self._take_back()
        left = [p for p in self._pieces if p.grad is not None and p not in self._came]
        if not (last or left or self._came):
            return
        self._in_window |= self._came.union(left)
        trained = [p for group in self._optimizer.param_groups for p in trained_of(group)]
        missing = {*self._pieces, *trained} - self._in_window
        if last and whole and missing:
            raise ConfigError(
                f"{len(missing)} parameters got no gradient in this window (one has the shape "
                f"{[*missing.pop().shape]}), or froze or thawed in this training, and ZeRO updates "
                "all of a group or none. Freeze before `fit` what the step does not use "
                "(`requires_grad_(False)`), or pass `strategy=DDP(find_unused_parameters=True)`."
            )
        zero._coalesce_grad_reduction = False
        zero.set_gradient_accumulation_boundary(last)
        zero.setup_buckets()
        for parameter in left:
            zero.reduce_ready_partitions_and_remove_grads(parameter, self._groups[parameter])
        zero.overlapping_partition_gradients_reduce_epilogue()
        zero._coalesce_grad_reduction = not self._in_backward
        self._came.clear()
        if last:
            self._in_window.clear()
            for number, (flat, _) in enumerate(self._flats):
                gradients = [g.reshape(-1) for g in zero.averaged_gradients.pop(number)]
                flat.grad = torch.cat(gradients).to(flat.dtype)
            zero.all_grad_tensors.clear()

    def leave(self) -> None:
        """Leave to a loop of the user's what a backward left, and see later if it was changed.

        What is sent is not in `.grad`, and neither are its sums: undefined numbers stand there.
        """
        for p in self._came | self._in_window:
            own = p.grad
            p.grad = held = p.new_full((), nan).expand_as(p) if own is None else own
            self._left[p] = own, held, held._version

    def _take_back(self, *, check: bool = True) -> None:
        """Take back what was left."""
        left, self._left = self._left, {}
        changed = []
        for p, (own, held, version) in left.items():
            if p.grad is not held or held._version != version:
                changed.append(p)
            p.grad = own
        if changed and check:
            raise ConfigError(
                f"{len(changed)} gradients were cleared or changed inside of a window (one has the "
                f"shape {[*changed[0].shape]}), by `model.zero_grad()` or by hand, but stage 2 of "
                "ZeRO sends them while each backward goes on. Drop a window by "
                "`optimizer.zero_grad()` where it ends, on all processes, or pass `zero_stage=1`, "
                "which leaves gradients in `.grad` until then."
            )

    @property
    def is_open(self) -> bool:
        """Whether gradients wait for the end of their window."""
        return bool(self._came or self._in_window) or any(p.grad is not None for p in self._pieces)

    @property
    def is_reduced(self) -> bool:
        """Whether those of a window wait for an update."""
        return any(flat.grad is not None for flat, _ in self._flats)

    def _zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, also those that are reduced, in place of the user's optimizer."""
        self._take_back(check=False)
        if self._came or self._in_window:
            self.reduce(last=True, whole=False)
        for flat, _ in self._flats:
            flat.grad = None
        type(self._optimizer).zero_grad(self._optimizer, set_to_none)

    def gradients(self, parameters: Iterable[Any]) -> list[Tensor]:
        """Return the gradients of some parameters, of those that are reduced what lies here."""
        gradients = []
        for p in parameters:
            piece = self._pieces.get(p)
            if p.grad is not None and p not in self._left:
                gradients.append(p.grad)
            elif piece is not None and piece.flat.grad is not None:
                gradients.append(piece.of(piece.flat.grad))
        return gradients

    def _step(self) -> None:
        """Update, in place of the step of the user's optimizer."""
        held = [group for group in self._optimizer.param_groups if trained_of(group)]
        groups = [*zip(held, self.updating.param_groups, strict=True)]
        for theirs, ours in groups:
            ours.update({key: v for key, v in theirs.items() if key != "params"})
        for flat, pieces in self._flats:
            for piece in pieces:  # the same memory, unless somebody has set `parameter.data`
                piece.of(flat.data).copy_(piece.of_whole(piece.parameter.data))
        self.updating.step()
        for theirs, ours in groups:
            theirs.update({key: v for key, v in ours.items() if key != "params"})
        self._zero.update_lp_params()
        for number, (flat, _) in enumerate(self._flats):
            flat.grad = None
            self._zero._update_model_bit16_weights(number)

    # The state of the optimizer, as one process would have it.

    @contextmanager
    @torch.no_grad()
    def whole_state(self, processes: Processes) -> Iterator[None]:
        """Let the user's optimizer hold the state of whole parameters inside, on process 0.

        Every process must enter it. It is sent one tensor at a time, and kept in the CPU's memory.
        """
        for flat, pieces in self._flats:
            for piece in pieces if self.updating.state.get(flat) else ():
                state = {  # a count of steps, too, is one of each parameter
                    key: _whole(processes, piece, v) if _is_like(v, flat) else deepcopy(v)
                    for key, v in self.updating.state[flat].items()
                }
                if processes.is_main:
                    self._optimizer.state[piece.parameter] = state
        self._is_whole = True
        try:
            yield
        finally:
            self._is_whole = False
            for parameter in self._pieces:
                self._optimizer.state.pop(parameter, None)

    def _check_whole(self, _: Optimizer) -> None:
        if self.updating.state and not self._is_whole:
            raise ConfigError(
                "ZeRO has the state of the optimizer in parts, one on each process. Save it with "
                "all else: by `save_state` of an `Accelerator`, or `Checkpoint` of a `Trainer`."
            )

    @torch.no_grad()
    def _take_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Take what lies here from the state of whole parameters; return what else there is."""
        numbers = [n for group in state["param_groups"] for n in group["params"]]
        held = [p for group in optimizer.param_groups for p in group["params"]]
        saved = {p: state["state"].get(n) or {} for n, p in zip(numbers, held, strict=True)}
        for flat, pieces in self._flats:
            self.updating.state[flat] = _cut(flat, pieces, saved)
        return {**state, "state": {k: v for k, v in state["state"].items() if k not in numbers}}

    def close(self) -> None:
        """Give the user's optimizer and model back as they were."""
        self._take_back(check=False)
        for hook in self._hooks:
            hook.remove()
        for name in ("step", "zero_grad"):
            vars(self._optimizer).pop(name, None)
        self._zero.destroy()


def copy_for_updates(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer like another one, with groups and a state of its own.

    Groups hold what is trained; those that train nothing are left out.
    """
    made: Optimizer = object.__new__(type(optimizer))
    vars(made).update(vars(optimizer))
    vars(made).pop("step", None)  # a schedule of torch may have put one there
    made.state = defaultdict(dict)
    groups = [{**group, "params": trained_of(group)} for group in optimizer.param_groups]
    made.param_groups = [group for group in groups if group["params"]]
    return made


def trained_of(group: Mapping[str, Any]) -> list[nn.Parameter]:
    """Return the parameters of a group that are trained."""
    return [p for p in group["params"] if p.requires_grad]


def _pieces(zero: Any, number: int, flat: Tensor) -> Iterator[_Piece]:
    """Yield the pieces of a group, and let `flat` be what is used: DeepSpeed has a copy of it."""
    rank = torch.distributed.get_rank(zero.real_dp_process_group[number])
    flat.data = zero.parallel_partitioned_bit16_groups[number][rank].data
    first = rank * flat.numel()
    parameters, offsets = zero.round_robin_bit16_groups, zero.round_robin_bit16_offsets
    for parameter, offset in zip(parameters[number], offsets[number], strict=True):
        parameter._hp_mapping = None  # has the copy
        begin = min(max(first - offset, 0), parameter.numel())
        end = min(max(first + flat.numel() - offset, 0), parameter.numel())
        yield _Piece(parameter, begin, max(offset - first, 0), end - begin, flat)


def _is_like(value: Any, tensor: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == tensor.shape


def _whole(processes: Processes, piece: _Piece, own: Tensor) -> Tensor | None:
    """Return, on process 0, a tensor of which each process has a piece."""
    whole = torch.zeros(piece.parameter.shape, dtype=own.dtype, device=own.device)
    piece.of_whole(whole).copy_(piece.of(own))
    processes.all_reduce(whole.view(-1).view(torch.uint8))  # of bits: -0.0 + 0.0 is another zero
    return whole.cpu() if processes.is_main else None


def _cut(flat: Tensor, pieces: list[_Piece], saved: Mapping[Tensor, Any]) -> dict[str, Any]:
    """Return what lies here of the states of whole parameters."""
    if len({frozenset(saved[piece.parameter]) for piece in pieces}) > 1:
        raise ConfigError(
            "ZeRO has one state for all parameters of a group, but only some have one in this "
            "checkpoint, or another one. Go on with the strategy that made it."
        )
    state: dict[str, Any] = {}
    for key, first in saved[pieces[0].parameter].items():
        each = [(piece, saved[piece.parameter][key]) for piece in pieces]
        if key == "step" or not all(_is_like(value, p.parameter) for p, value in each):
            state[key] = deepcopy(first)
            continue
        state[key] = torch.zeros_like(flat, dtype=first.dtype)
        for piece, value in each:
            piece.of(state[key]).copy_(piece.of_whole(value))
    return state
