"""The verbs of distributed work: who am I, gather, reduce, wait, run on some processes."""

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ParamSpec, TypeVar, get_args

import torch

from trainkit.containers.tree import map_tensors, named_tensors
from trainkit.distributed import (
    Processes,
    Refusal,
    agreed_counts,
    collective_guard,
    gather_all,
    gather_samples,
    gather_tensors,
)
from trainkit.distributed.active_batches import ActiveLoaders, BatchInfo
from trainkit.distributed.collectives import require_equal, run_on_all
from trainkit.distributed.gather import ROWS_VARY
from trainkit.distributed.processes import Reduction
from trainkit.errors import ConfigError, DataError, by_process

P = ParamSpec("P")
R = TypeVar("R")


class Communicator:
    """What a process of a job does with the others, under the names of Hugging Face Accelerate.

    Every process calls the collectives (`gather*`, `reduce`, `broadcast`, `pad_across_processes`,
    `wait_for_everyone`) in the same order. On one process they return at once, with the same
    results and the same errors.

    Args:
        processes: The processes of the job; joined, or started, if not given.
        device: The device of this process; its own accelerator by default, else the CPU.
    """

    def __init__(
        self, *, processes: Processes | None = None, device: torch.device | str | None = None
    ) -> None:
        wanted = None if device is None else torch.device(device)
        self.processes = Processes.start(device=wanted) if processes is None else processes
        self.device: torch.device = wanted or self.processes.device
        if self.device.type == self.processes.device.type and self.device.index is None:
            self.device = self.processes.device
        self.data_processes = self.processes
        """Those with samples of their own: whoever shares a batch counts as one in a gather."""
        self.loaders = ActiveLoaders()
        """The loaders under way; they tell `gather_for_metrics` which samples are real."""

    @property
    def process_index(self) -> int:
        """Number of this process among all, from 0."""
        return self.processes.rank

    @property
    def local_process_index(self) -> int:
        """Number of this process on its machine, from 0."""
        return self.processes.world.local_rank

    @property
    def num_processes(self) -> int:
        """Processes in all."""
        return self.processes.size

    @property
    def use_distributed(self) -> bool:
        """Whether there are several processes."""
        return self.processes.size > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is process 0 of the job."""
        return self.processes.is_main

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is process 0 of its machine."""
        return self.processes.world.is_local_main

    @property
    def is_last_process(self) -> bool:
        """Whether this is the last process of the job."""
        return self.processes.world.is_last

    def gather(self, tensor: Any, differentiable: bool = False) -> Any:
        """Return the tensors of all processes, joined along dimension 0, on every process.

        Where a `Trainer` lets a process repeat a batch with weight 0, that process gives no rows.

        Args:
            tensor: A tensor, or a nesting of them. A scalar counts as one row. The first
                dimensions may differ between processes.
            differentiable: Whether the result has a graph, for losses that look at the rows of
                all processes (rule 6). A row then gets the sum of the gradients that all
                processes have for it, in a backward that all must run. False: no gradient.

        Raises:
            DataError: On all processes, if the tensors do not fit together.
        """
        if not differentiable:
            return gather_tensors(self.data_processes, tensor, name="tensor")
        from trainkit.distributed.differentiable import gather_with_gradients  # most runs need none

        return gather_with_gradients(self.data_processes, tensor, name="tensor")

    def own_rows(self, tensor: torch.Tensor) -> slice:
        """Return which rows of `gather(tensor)` this process gave; every process calls it.

        `rows.start` is the offset of its labels. It is empty inside a repeat of weight 0.
        """
        collective_guard.check("own_rows")
        processes = self.data_processes
        processes.knows_own_rows = True
        count = 0 if processes.repeats else tensor.shape[:1].numel()
        counts = processes.all_gather(torch.tensor([count]), (1,) * processes.size)
        first = int(counts[: processes.rank].sum())
        return slice(first, first + count)

    def gather_for_metrics(
        self,
        input_data: Any,
        use_gather_object: bool = False,
        *,
        loader: Any = None,
        pad_value: float | None = None,
        strict: bool = True,
    ) -> Any:
        """Return the entry of each real sample of the last batch once, on every process.

        The order is that in which the same loader runs on one process (rule 19). The batch
        is the one yielded last by a loader that is under way. Where none is, as after a loop,
        everything is gathered, and what filled a last batch up is among it.

        Args:
            input_data: Any nesting of tensors, arrays and lists with one entry per sample. Tuples,
                and lists with tensors in them, hold fields; other lists hold one entry per
                sample (`trainkit.containers.sample_rows`).
            use_gather_object: `input_data` is a list of one object per sample, whatever it holds,
                such as tensors of any shapes.
            loader: The loader whose last batch is meant, where several are under way.
            pad_value: Fills up, at the end, tensors that differ in later dimensions. By default
                -100 for signed integers and NaN for floating and complex numbers; other types
                are refused.
            strict: False: a tensor may have the rows of a full batch where the last one is short,
                as `loss.repeat(batch_size)` has: with a warning, and the first of them count.

        Raises:
            DataError: On all processes, if something has not one entry per sample, or two loaders
                yield in turns and the value may belong to either.
        """
        info, processes = self.loaders.current(loader), self.data_processes
        if info is None and use_gather_object:
            return self.gather_object(input_data)
        if info is None:
            return gather_all(processes, input_data, pad_value=pad_value, name="input_data")
        doubt, hint = ("", "") if loader is not None else self.loaders.doubts()
        return gather_samples(
            processes,
            [Refusal(doubt) if doubt else input_data],
            agreed_counts(processes, [info]),
            [info.local_size if strict else _rows_of(input_data, info)],
            pad_value=pad_value,
            name="input_data",
            use_gather_object=use_gather_object,
            hint=hint or ROWS_VARY * (info.own is not None),
        )

    def gather_object(self, object: Any) -> Any:
        """Return the items of the lists of all processes in one list, on every process.

        Args:
            object: A list or tuple of any objects; what is not made of built-in types, tensors
                and data classes travels by pickle.
        """
        if not isinstance(object, list | tuple):
            raise DataError(
                f"`object` must be a list or tuple, but is a {type(object).__name__}. Put it in "
                "a list: `gather_object([value])` returns one value for each process."
            )
        collective_guard.check("gather_object")
        lists = self.data_processes.all_gather_objects(object, allow_pickle=True)
        return object if len(lists) == 1 else [item for items in lists for item in items]

    def reduce(self, tensor: Any, reduction: Reduction = "sum", scale: float = 1.0) -> Any:
        """Return the sum or the like of a tensor, or of each in a nesting, over all processes.

        Args:
            tensor: Equal in structure, shapes and dtypes on all processes; it is not changed.
            reduction: "sum", "mean", "max", "min", "prod", element by element. "none" is refused:
                in Accelerate it is the sum.
            scale: Factor on the result.

        Raises:
            DataError: On all processes, if structures, shapes or dtypes differ.
        """
        if reduction not in get_args(Reduction):
            known = ", ".join(get_args(Reduction))
            raise ConfigError(
                f"`reduction` must be one of {known}, but is {reduction!r}. (For other words than "
                '"mean" and "max" Accelerate returns the sum, also for "none".)'
            )
        collective_guard.check("reduce")
        self._check_alike(tensor, "reduce")

        def reduced(leaf: torch.Tensor) -> torch.Tensor:
            total = self.data_processes.all_reduce(leaf.detach().clone(), reduction)
            return total if scale == 1.0 else total * scale

        return map_tensors(reduced, tensor, "tensor")

    def broadcast(self, tensor: Any, from_process: int = 0) -> Any:
        """Overwrite a tensor, or each in a nesting, with that of one process, and return it.

        Raises:
            DataError: On all processes, if structures, shapes or dtypes differ.
        """
        collective_guard.check("broadcast")
        self._check_alike(tensor, "broadcast")
        return map_tensors(
            lambda leaf: self.processes.broadcast(leaf, from_process), tensor, "tensor"
        )

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
    ) -> Any:
        """Return a tensor, or a nesting of them, made as long as the longest on any process.

        Args:
            tensor: Equal in structure on all processes. Those without dimension `dim` stay.
            dim: The dimension that may differ.
            pad_index: What is filled in.
            pad_first: Whether it goes in front instead of at the end.
        """
        collective_guard.check("pad_across_processes")

        def has(tensor: torch.Tensor) -> bool:
            return not tensor.is_nested and -tensor.ndim <= dim < tensor.ndim

        def measured() -> list[int]:
            tensors = named_tensors(tensor, "tensor")
            return [each.shape[dim] if has(each) else 0 for _, each in tensors]

        sizes = run_on_all(self.processes, measured)
        require_equal(
            self.processes,
            len(sizes),
            lambda numbers: DataError(
                f"`tensor` does not hold as many tensors everywhere: {by_process(numbers)}. Pass "
                "the same structure on all processes."
            ),
        )
        longest = iter(self.processes.all_reduce(torch.tensor(sizes), "max").tolist())

        def padded(tensor: torch.Tensor) -> torch.Tensor:
            size = next(longest)
            if not has(tensor) or tensor.shape[dim] == size:
                return tensor
            missing = size - tensor.shape[dim]
            later = [0, 0] * (tensor.ndim - 1 - dim % tensor.ndim)  # `pad` begins with the last
            ends = [missing, 0] if pad_first else [0, missing]
            return torch.nn.functional.pad(tensor, [*later, *ends], value=pad_index)

        return map_tensors(padded, tensor, "tensor")

    def _check_alike(self, tensor: Any, call: str) -> None:
        """Raise where processes would exchange tensors of other shapes or dtypes.

        Backends read what arrives as what they expect, or end the process.
        """
        failure, form = None, ""
        try:
            form = ", ".join(
                f"{name} {str(each.dtype).removeprefix('torch.')}"
                f"{'nested' if each.is_nested else [*each.shape]}"
                for name, each in named_tensors(tensor, "tensor")
            )
        except DataError as error:  # the others wait
            failure, form = error, str(error)
        require_equal(
            self.processes,
            form,
            lambda forms: DataError(
                f"`{call}` was given other tensors on some processes: {by_process(forms)}. It "
                "needs the same structure, shapes and dtypes on all of them: convert them first, "
                "or use `gather`, which joins any number of rows."
            ),
        )
        if failure is not None:
            raise failure

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the main process of each machine only; a closed stdout is no error."""
        if self.is_local_main_process:
            from trainkit.basics.console import put  # only where something is printed

            put(*args, **kwargs)

    def wait_for_everyone(self) -> None:
        """Return when all processes have called it."""
        collective_guard.check("wait_for_everyone")
        self.processes.barrier()

    def main_process_first(self) -> AbstractContextManager[None]:
        """Let the main process run the code inside before all others do."""
        return self._first(self.is_main_process, "main_process_first")

    def local_main_process_first(self) -> AbstractContextManager[None]:
        """Let the main process of each machine run the code inside before the others do."""
        return self._first(self.is_local_main_process, "local_main_process_first")

    @contextmanager
    def _first(self, goes_first: bool, name: str) -> Iterator[None]:
        collective_guard.check(name)
        if not goes_first:
            self.processes.barrier()
        try:
            with collective_guard.only(name):
                yield
        finally:
            if goes_first:
                self.processes.barrier()

    def on_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Make `function` run on the main process only; elsewhere it returns None."""
        return self._on(function, lambda: self.is_main_process, "on_main_process")

    def on_local_main_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Make `function` run on the main process of each machine only."""
        return self._on(function, lambda: self.is_local_main_process, "on_local_main_process")

    def on_last_process(self, function: Callable[P, R]) -> Callable[P, R | None]:
        """Make `function` run on the last process only."""
        return self._on(function, lambda: self.is_last_process, "on_last_process")

    def on_process(
        self, function: Callable[..., Any] | None = None, process_index: int | None = None
    ) -> Callable[..., Any]:
        """Make a function run on one process only: `@accelerator.on_process(process_index=1)`."""
        return self._on_index(function, process_index, "process_index")

    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Callable[..., Any]:
        """Make a function run on the process of that number on each machine only."""
        return self._on_index(function, local_process_index, "local_process_index")

    def _on_index(
        self, function: Callable[..., Any] | None, index: int | None, name: str
    ) -> Callable[..., Any]:
        if index is None or index < 0:
            raise ConfigError(
                f"`{name}` must be the number of a process, at least 0, but is {index}. Pass it "
                f"as `{name}=`."
            )
        called = f"on_{name.removesuffix('_index')}"

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            return self._on(
                function, lambda: not self.use_distributed or getattr(self, name) == index, called
            )

        return decorate if function is None else decorate(function)

    def _on(
        self, function: Callable[P, R], applies: Callable[[], bool], called: str
    ) -> Callable[P, R | None]:
        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R | None:
            if not applies():
                return None
            with collective_guard.only(called):
                return function(*args, **kwargs)

        return wrapper

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Give this process its part of `inputs`: consecutive slices, the longer ones first.

        Args:
            inputs: A list, tuple, tensor or `datasets.Dataset`, or a dict of such of equal
                lengths. With fewer entries than processes the last processes get empty ones.
            apply_padding: Whether shorter parts are filled up with the last entry of `inputs`,
                so that all are equally long.
        """
        processes = self.data_processes
        yield _part_of(inputs, processes.rank, processes.size, apply_padding)


def _rows_of(value: Any, info: BatchInfo) -> int:
    """Return how many rows a value may have: those of its batch, or as a repeat of a full one."""
    full = info.full_size or 0
    is_repeat = isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == full
    if not is_repeat or full <= info.local_size:
        return info.local_size
    warnings.warn(
        f"`gather_for_metrics` was given {full} rows for a batch of {info.local_size} samples, as "
        "`loss.repeat(batch_size)` gives. As many as there are real samples count, as under "
        "Accelerate; but each is a mean over the batch, so the mean over all of them is biased "
        "where samples do not weigh the same (tokens, padding), or where the batch was filled up. "
        "Gather the values of the samples, or sums and counts by `reduce`; `strict=True` makes "
        "this an error.",
        stacklevel=4,
    )
    return full


def _part_of(inputs: Any, index: int, parts: int, apply_padding: bool) -> Any:
    """Return part `index` of `parts` of what `split_between_processes` takes."""
    if isinstance(inputs, dict):
        lengths = {key: len(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(
                f"The values of `inputs` must be equally long, but their lengths are {lengths}."
            )
        return {key: _part_of(value, index, parts, apply_padding) for key, value in inputs.items()}
    select = getattr(inputs, "select", None)  # that of a `datasets.Dataset`
    is_plain = isinstance(inputs, list | tuple | torch.Tensor)
    if not is_plain and not (callable(select) and hasattr(inputs, "__len__")):
        raise DataError(
            "`inputs` must be a list, tuple, tensor or `datasets.Dataset`, or a dict of such, but "
            f"is a {type(inputs).__name__}. Write `list(inputs)`."
        )
    each, extra = divmod(len(inputs), parts)
    start = index * each + min(index, extra)
    stop = start + each + (index < extra)
    missing = each + (extra > 0) - (stop - start)
    if not apply_padding or not len(inputs):
        missing = 0
    if not is_plain:
        assert callable(select)
        return select([*range(start, stop), *[len(inputs) - 1] * missing])
    mine, last = inputs[start:stop], inputs[-1:]
    if isinstance(mine, torch.Tensor):
        return torch.cat([mine, *[last] * missing]) if missing else mine
    return mine + last * missing
