"""What `accelerate.data_loader` has: loaders and samplers that are made by hand."""

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler
from typing_extensions import override

from trainkit.accelerator.arguments import chosen_generators
from trainkit.accelerator.loader import SharedLoader, Sharing, SkippedLoader
from trainkit.accelerator.mapped import take_from_process_0
from trainkit.accelerator.preparer import of_torchdata, shared_out
from trainkit.accelerator.settings import DataLoaderConfiguration
from trainkit.accelerator.state import UNDER_WAY, GradientState
from trainkit.basics.config import checked
from trainkit.data.order import divide, set_epoch_on
from trainkit.data.plan import BatchPlan, FlatPlan, Plan
from trainkit.distributed import Processes, only_this_process
from trainkit.errors import ConfigError

_KEPT = """
    num_workers collate_fn pin_memory timeout worker_init_fn multiprocessing_context generator
    prefetch_factor persistent_workers
"""


@checked
def prepare_data_loader(  # noqa: PLR0913  the names that Accelerate documents
    dataloader: Any,
    device: torch.device | str | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Sequence[Any] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: bool = True,
    slice_fn_for_dispatch: None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: None = None,
) -> SharedLoader:
    """Return a loader whose batches are shared out, as `Accelerator.prepare_data_loader` does.

    Args:
        dataloader: The user's.
        device: Where the batches go if `put_on_device`; None: the device of this process.
        num_processes: Other than those of the job, whose loader this one is then.
        process_index: The process among these.
        split_batches: The rest are settings of `DataLoaderConfiguration` and `Accelerator`.
        put_on_device: Whether batches move to the device.
        slice_fn_for_dispatch: None; batches are cut by their samples.
    """
    processes = Processes.start()
    size = processes.size if num_processes is None else num_processes
    rank = processes.rank if process_index is None else process_index
    if (size, rank) != (processes.size, processes.rank):
        dataloader = _shard(dataloader, size, rank, split_batches, even_batches)
        processes, split_batches = only_this_process(processes), False
    configuration = DataLoaderConfiguration(
        split_batches=split_batches,
        dispatch_batches=dispatch_batches,
        even_batches=even_batches,
        use_seedable_sampler=use_seedable_sampler,
        data_seed=data_seed,
        non_blocking=non_blocking,
        use_stateful_dataloader=use_stateful_dataloader,
    )
    sharing = Sharing(
        processes=processes,
        device=torch.device(device or processes.device),
        moves=put_on_device,
        configuration=configuration,
        rng_types=chosen_generators(rng_types),
        active=UNDER_WAY,
        accumulation=GradientState(),
    )
    return shared_out(dataloader, sharing)


def _shard(loader: Any, size: int, rank: int, split: bool, even: bool) -> DataLoader[Any]:
    """Return the loader of one process of several, which no other process knows of."""
    kept = {name: getattr(loader, name) for name in _KEPT.split()}
    if isinstance(loader.dataset, IterableDataset):
        batch_size, drops = loader.batch_size or 1, loader.drop_last
        whole: Any = loader.dataset
        if getattr(whole, "n_shards", 0) == size:  # of `datasets`: one for each
            part = whole.shard(size, rank)
            return DataLoader(part, batch_size=loader.batch_size, drop_last=drops, **kept)
        data = IterableDatasetShard(whole, batch_size, drops, size, rank, split)
        share = divide(batch_size, size) if split else loader.batch_size
        return DataLoader(data, batch_size=share, drop_last=drops, **kept)
    batches = BatchSamplerShard(loader.batch_sampler, size, rank, split, even)
    return DataLoader(loader.dataset, batch_sampler=batches, **kept)


def _read_here(dataset: Any, device: Any = None, **options: Any) -> SharedLoader:
    """Return a loader of which this process reads all; `DataLoader` takes most options."""
    own = {"rng_types": options.pop("rng_types", None)}
    own["use_stateful_dataloader"] = options.pop("use_stateful_dataloader", False)
    loader = DataLoader(dataset, **options)
    return prepare_data_loader(loader, device, 1, 0, put_on_device=device is not None, **own)


def _read_by_process_0(
    dataset: Any, split_batches: bool = False, use_stateful_dataloader: bool = False, **options: Any
) -> SharedLoader:
    return prepare_data_loader(
        DataLoader(dataset, **options),
        split_batches=split_batches,
        put_on_device=True,
        dispatch_batches=True,
        use_stateful_dataloader=use_stateful_dataloader,
    )


def synchronize_rng_states(rng_types: Sequence[Any], generator: Any = None) -> None:
    """Take the states of generators from process 0; `rng_types` are those of `Accelerator`."""
    own = [] if generator is None else [generator]
    take_from_process_0(Processes.start(), chosen_generators(rng_types), own)


def synchronize_rng_state(rng_type: Any = None, generator: Any = None) -> None:
    """Do the same for one kind."""
    synchronize_rng_states([rng_type], generator)


class _Kind(type):
    """The type of a class of Accelerate's whose objects are prepared loaders here."""

    make: Callable[..., SharedLoader]
    dispatches: bool

    @override
    def __call__(cls, dataset: Any, *args: Any, skip_batches: int = 0, **options: Any) -> Any:
        """Return a loader over `dataset`."""
        made = cls.make(dataset, *args, **options)
        return SkippedLoader(made, skip_batches) if skip_batches else made

    @override
    def __instancecheck__(cls, instance: Any) -> bool:
        prepared = isinstance(getattr(instance, "source", None), DataLoader)
        return prepared and bool(getattr(instance, "dispatches", None)) == cls.dispatches


class DataLoaderShard(metaclass=_Kind):
    """A loader of which this process reads all: `DataLoaderShard(dataset, device, **options)`."""

    make, dispatches = staticmethod(_read_here), False


class DataLoaderDispatcher(metaclass=_Kind):
    """A loader that process 0 reads: `DataLoaderDispatcher(dataset, split_batches, **options)`."""

    make, dispatches = staticmethod(_read_by_process_0), True


class SkipDataLoader(SkippedLoader):
    """A `DataLoader` without its first `skip_batches` batches; torchdata's, if it is stateful."""

    def __init__(
        self,
        dataset: Any,
        skip_batches: int = 0,
        use_stateful_dataloader: bool = False,
        **options: Any,
    ) -> None:
        kind: Any = DataLoader
        if use_stateful_dataloader:
            kind = import_module("torchdata.stateful_dataloader").StatefulDataLoader
        self.base_dataloader = kind(dataset, **options)
        super().__init__(self.base_dataloader, skip_batches)
        if use_stateful_dataloader:
            vars(self).update(
                state_dict=self.base_dataloader.state_dict,
                load_state_dict=self.base_dataloader.load_state_dict,
            )
            self.__class__ = of_torchdata(SkipDataLoader)


class BatchSamplerShard(BatchSampler):
    """The batches of one process of several.

    Args:
        batch_sampler: Read to its end when a pass begins.
        split_batches: Each batch is cut into one part for each process.
        even_batches: Last batches are filled up.
    """

    def __init__(
        self,
        batch_sampler: Any,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.batch_size: Any = getattr(batch_sampler, "batch_size", None)
        self.num_processes, self.process_index = num_processes, process_index
        self.split_batches, self.even_batches = split_batches, even_batches
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        if split_batches:
            if self.batch_size is None:
                raise ConfigError(
                    "`split_batches` cuts batches of one size, but the batch sampler has no "
                    "`batch_size`. Leave `split_batches` out."
                )
            divide(self.batch_size, num_processes)  # or an error

    @property
    def total_length(self) -> int:
        """Batches of the sampler inside."""
        return len(self.batch_sampler)

    @override
    def __len__(self) -> int:
        if self.split_batches:
            return self.total_length
        whole, left = divmod(self.total_length, self.num_processes)
        if self.drop_last:
            return whole
        return whole + (left > (0 if self.even_batches else self.process_index))

    @override
    def __iter__(self) -> Iterator[list[Any]]:
        plan = self._plan([list(batch) for batch in self.batch_sampler])
        yield from (list(task) for task in plan.tasks(0, plan.length) if task is not None)

    def _plan(self, batches: list[list[Any]]) -> Plan:
        size, split = self.num_processes, self.split_batches
        cut: Any = {"rank": self.process_index, "size": size, "fill": self.even_batches}
        full = self.batch_size
        if full is None or any(len(batch) != full for batch in batches[:-1]):
            kept = len(batches) - (len(batches) % size if self.drop_last else 0)
            return BatchPlan(batches[:kept], split=split, **cut)
        share = full // size if split else full
        order = [index for batch in batches for index in batch]
        if self.drop_last:
            order = order[: len(order) - len(order) % (share * size)]
        return FlatPlan(order, batch_size=share, **cut)

    def set_epoch(self, epoch: int) -> None:
        """Tell the sampler inside."""
        set_epoch_on([self.batch_sampler], epoch)


class IterableDatasetShard(IterableDataset[Any]):
    """The samples of one process of several, which all read the whole data set.

    Args:
        dataset: The data set.
        batch_size: Of one process; with `split_batches` of all.
        drop_last: Leave out what does not fill a batch of all; else the first samples fill it up.
        split_batches: See `batch_size`.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        self.dataset, self.drop_last, self.process_index = dataset, drop_last, process_index
        self.num_processes = num_processes
        self.batch_size, self.split_batches = batch_size, split_batches
        self._share = divide(batch_size, num_processes) if split_batches else batch_size

    def set_epoch(self, epoch: int) -> None:
        """Tell the data set."""
        self.epoch = epoch
        set_epoch_on([self.dataset], epoch)

    def __len__(self) -> int:
        """Return the samples of this process, where those of the data set are known."""
        together = self._share * self.num_processes
        whole, left = divmod(len(self.dataset), together)
        return (whole + (left > 0 and not self.drop_last)) * self._share

    @override
    def __iter__(self) -> Iterator[Any]:
        reading, first = iter(self.dataset), list[Any]()
        together = self._share * self.num_processes
        while group := list(islice(reading, together)):
            first = first or group
            if len(group) < together:
                if self.drop_last:
                    return
                group += islice(cycle([*first]), together - len(group))
            yield from group[self._share * self.process_index :][: self._share]


class SkipBatchSampler(BatchSampler):
    """A batch sampler without its first `skip_batches` batches."""

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler, self.skip_batches = batch_sampler, skip_batches
        self.sampler: Any = getattr(batch_sampler, "sampler", None)
        self.batch_size = getattr(batch_sampler, "batch_size", 1)
        self.drop_last = getattr(batch_sampler, "drop_last", False)

    @override
    def __iter__(self) -> Iterator[list[Any]]:
        return islice(iter(self.batch_sampler), self.skip_batches, None)

    @property
    def total_length(self) -> int:
        """Batches of the whole."""
        return len(self.batch_sampler)

    @override
    def __len__(self) -> int:
        return self.total_length - self.skip_batches

    def set_epoch(self, epoch: int) -> None:
        """Tell the sampler inside."""
        self.epoch = epoch
        set_epoch_on([self.batch_sampler, self.sampler], epoch)


class SeedableRandomSampler(RandomSampler):
    """A random sampler whose order follows a seed and the epoch's number.

    Args:
        *args: Of `RandomSampler`.
        data_seed: The seed; None: the one that torch's generator started from.
        **options: Of `RandomSampler`.
    """

    def __init__(self, *args: Any, data_seed: int | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    @override
    def __iter__(self) -> Iterator[int]:
        if self.generator is None:
            self.generator = torch.Generator()
        self.generator.manual_seed(self.initial_seed + self.epoch)
        yield from super().__iter__()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next pass is."""
        self.epoch = epoch
