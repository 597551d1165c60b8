"""Where batches are fetched: in this process, or in the workers of a `DataLoader`."""

import atexit
import gc
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from typing import Any, TypeAlias
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils.data import DataLoader, get_worker_info
from typing_extensions import override

from trainkit.basics import rng
from trainkit.basics.device import can_pin
from trainkit.basics.signals import held_back, ignore
from trainkit.basics.torch_internals import WorkersIterator, end_workers, workers_of
from trainkit.data.fetch import Fetch
from trainkit.data.loader import LoaderContext
from trainkit.data.order import set_epoch_on
from trainkit.errors import ConfigError, DataError, text_of
from trainkit.lazy import ask

_DEATH_SECONDS = 0.3  # from the first sign of a worker's end until it is known

Tasks: TypeAlias = Callable[[], Iterator[Any]]


class Fetcher:
    """Runs a `Fetch` over tasks: in this process, when a batch is asked for."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch

    def batches(self, epoch: int, tasks: Tasks) -> Generator[Any, None, None]:
        """Yield the batch of each task, in order; None for a task that is None.

        Args:
            epoch: The epoch of the samples' keys.
            tasks: Returns a new iterator over the tasks.
        """
        fetch = self.fetch if self._fetch.seeds else self._fetch.fetch
        for task in tasks():
            yield None if task is None else fetch(epoch, task)

    def fetch(self, epoch: int, task: Any) -> Any:
        """Return one batch, made in this process; the generators are as before."""
        if not self._fetch.seeds:
            return self._fetch.fetch(epoch, task)
        with rng.preserved():
            return self._fetch.fetch(epoch, task)

    def close(self) -> None:
        """Stop what runs in the background; a later pass starts it again."""
        return


class WorkerPool(Fetcher):
    """Fetches ahead, in the workers that the user's loader asks for.

    They ignore the signals that ask a training to end: it still needs them to get there.

    Args:
        fetch: What makes the batches; copied to each worker.
        loader: The user's loader; its settings of workers are used.
        context: In training, workers call `set_epoch` of their data set with the epoch of a task.
        alone: The data set sees itself in the only worker.
    """

    def __init__(
        self, fetch: Fetch, loader: DataLoader[Any], context: LoaderContext, alone: bool
    ) -> None:
        super().__init__(fetch)
        if not getattr(loader, "in_order", True):
            raise ConfigError(
                "The loader has `in_order=False`, but the batches of an epoch have a fixed order, "
                "which a resume and the evaluation rely on. Leave `in_order` out."
            )
        self._loader = loader
        self._base_seed = rng.derive(context.seed, "workers", context.processes.rank)
        self._side = _WorkerSide(fetch, loader.worker_init_fn, context.trains, alone)
        self._pin = loader.pin_memory and can_pin(context.device)
        self._keys = _Keys()
        self._inner: DataLoader[Any] | None = None
        self._iterators: list[_Iterator] = []  # which have workers

    @override
    def batches(self, epoch: int, tasks: Tasks) -> Generator[Any, None, None]:
        if self._inner is None:
            self._inner = self._make()
        # Set before each pass: else the loader would draw from the global generators.
        generator = self._inner.generator
        assert isinstance(generator, torch.Generator)
        generator.manual_seed(rng.derive(self._base_seed, epoch))
        self._keys.start(epoch, tasks)  # before the iterator is made, which asks for tasks at once
        # Workers inherit what is held back, until each has said that it ignores these signals.
        with held_back():
            iterator = iter(self._inner)
        assert isinstance(iterator, _Iterator)
        if iterator not in self._iterators:  # a persistent one comes back for each pass
            self._iterators.append(iterator)
        try:
            yield from iterator
        except (RuntimeError, OSError, EOFError) as error:
            # A worker's own error begins with other words; what it shared went with it.
            is_of_torch = text_of(error).startswith("DataLoader worker (")
            is_lost = is_of_torch or not isinstance(error, RuntimeError)
            if is_lost and (cause := _death(iterator)):
                raise DataError(cause) from error
            raise
        finally:
            if not self._loader.persistent_workers:
                self._stop(iterator)

    @override
    def close(self) -> None:
        for iterator in list(self._iterators):
            self._stop(iterator)
        self._inner = None

    def _stop(self, iterator: "_Iterator") -> None:
        # Torch leaves this to the garbage collector wherever an error holds the iterator in a
        # cycle; then it may run much later, or in a forked child, and wait for seconds.
        iterator.end()
        if iterator in self._iterators:
            self._iterators.remove(iterator)

    def _make(self) -> DataLoader[Any]:
        loader = self._loader
        return _Loader(
            self._side,  # type: ignore[arg-type]
            batch_size=None,
            sampler=self._keys,
            collate_fn=_identity,
            num_workers=loader.num_workers,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
            pin_memory=self._pin,
            timeout=loader.timeout,
            worker_init_fn=_start_worker,
            multiprocessing_context=loader.multiprocessing_context,
            generator=torch.Generator(),
        )


class _Loader(DataLoader[Any]):
    """Makes iterators whose workers are ended by the process that started them alone."""

    @override
    def _get_iterator(self) -> Any:
        return _Iterator(self)


class _Iterator(WorkersIterator):
    def __init__(self, loader: DataLoader[Any]) -> None:
        self._made_by = os.getpid()
        super().__init__(loader)
        _at_exit.add(self)

    def end(self) -> None:
        """End the workers; not in a fork, whose parent still needs them."""
        if self._made_by != os.getpid():
            return
        end_workers(self)
        for worker in workers_of(self):
            if worker.is_alive():  # stuck in the data set; torch has tried SIGTERM in vain
                worker.kill()
                worker.join()

    @override
    def __del__(self) -> None:
        # A fork may collect what its parent had dropped, and would wait for the parent's workers.
        if self._made_by == os.getpid():
            super().__del__()


class _Keys:
    """The tasks of the pass under way; torch asks for the iterator more than once."""

    def __init__(self) -> None:
        self._epoch = 0
        self._tasks: Tasks = lambda: iter(())

    def start(self, epoch: int, tasks: Tasks) -> None:
        self._epoch, self._tasks = epoch, tasks

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        epoch = self._epoch
        for task in self._tasks():
            # A tensor would travel through shared memory and a file descriptor.
            yield epoch, task.tolist() if type(task) is Tensor else task


class _WorkerSide:
    """The data set of the inner loader: what a worker does with a key."""

    def __init__(self, fetch: Fetch, init: Any, forwards_epoch: bool, alone: bool) -> None:
        self._fetch = fetch
        self._init = init
        self._forwards_epoch = forwards_epoch
        self._alone = alone
        self._epoch: int | None = None

    def start(self, worker: int) -> None:
        """Show the worker the user's data set, and run the user's `worker_init_fn`."""
        info = get_worker_info()
        assert info is not None
        # Frozen by torch; no worker has begun to read.
        object.__setattr__(info, "dataset", self._fetch.dataset)
        if self._alone:
            object.__setattr__(info, "id", 0)
            object.__setattr__(info, "num_workers", 1)
            worker = 0
        if self._init is not None:
            self._init(worker)

    def __getitem__(self, key: tuple[int, Any]) -> Any:
        epoch, task = key
        if self._forwards_epoch and epoch != self._epoch:
            set_epoch_on(datasets_of(self._fetch.dataset), epoch)
            self._epoch = epoch
        if task is None:
            return None
        try:
            return self._fetch.fetch(epoch, task)
        except Exception as error:
            if _travels(error):
                raise
            text = "".join(traceback.format_exception(error))
        raise RuntimeError(text)


def fetcher_for(
    fetch: Fetch, loader: DataLoader[Any], context: LoaderContext, *, alone: bool = False
) -> Fetcher:
    """Return what fetches in the workers of `loader`, or in this process where it has none."""
    if loader.num_workers == 0:
        return Fetcher(fetch)
    return WorkerPool(fetch, loader, context, alone)


def datasets_of(dataset: Any) -> list[Any]:
    """Return `dataset` and those inside of it (subsets, concatenations, stacks)."""
    parts = getattr(dataset, "datasets", ())
    if isinstance(parts, dict):
        parts = parts.values()
    # A chain may hold a generator, which must not be used up here.
    inner = [] if isinstance(parts, Iterator) else list(parts)
    if hasattr(dataset, "indices") and hasattr(dataset, "dataset"):
        inner.append(dataset.dataset)
    return [dataset, *(deeper for part in inner for deeper in datasets_of(part))]


_at_exit: WeakSet[_Iterator] = WeakSet()  # also those that nobody but a cycle refers to


@atexit.register
def _stop_all() -> None:
    # Else multiprocessing, which hears of the exit later, asks them by SIGTERM and waits.
    for iterator in list(_at_exit):
        iterator.end()


def _start_worker(worker: int) -> None:
    ignore()
    gc.freeze()  # a process group among what is inherited could wait here for threads it had there
    gc.enable()  # it may be off in the process that starts this one
    info = get_worker_info()
    assert info is not None
    side: Any = info.dataset
    _end_with_parent()
    side.start(worker)


def _identity(batch: Any) -> Any:
    return batch


def _end_with_parent() -> None:
    """End this worker as soon as its process has ended, however that came.

    Torch takes seconds for that, and does not see what has ended before.
    """
    parent = multiprocessing.parent_process()  # known from the start, also where it has ended
    assert parent is not None
    assert parent.pid is not None
    try:
        descriptor = os.pidfd_open(parent.pid)
    except ProcessLookupError:
        os._exit(1)
    except (AttributeError, OSError):  # the kernel cannot do it
        return

    def wait() -> None:
        select.select([descriptor], [], [])
        os._exit(1)

    threading.Thread(target=wait, name="parent", daemon=True).start()


def _death(iterator: Any) -> str | None:
    """Return how a worker of a pass ended that should not have, in words; None if none did."""
    dead: list[Any] = []
    deadline = time.monotonic() + _DEATH_SECONDS
    while not dead and time.monotonic() < deadline:
        dead = [worker for worker in workers_of(iterator) if not worker.is_alive()]
        time.sleep(0.0 if dead else 0.02)
    if not dead:
        return None
    worker = max(dead, key=lambda worker: worker.exitcode != 0)
    number = workers_of(iterator).index(worker)
    end = f"ended by itself with the exit code {worker.exitcode}"
    if worker.exitcode < 0:
        end = f"was killed by the signal {signal.Signals(-worker.exitcode).name}"
    text = f"The loader's worker {number} (pid {worker.pid}) {end}."
    return f"{text} {ask('hint_for')('DataError', text)}".rstrip()


def _travels(error: Exception) -> bool:
    """Return whether torch can raise such an error again in the main process, with its text.

    It sends the class by name, and one that has no name would never arrive; it would take a
    StopIteration for the end of the epoch; and it makes a new error from one text, which not
    every class can be made from.
    """
    kind = type(error)
    module = sys.modules.get(kind.__module__)
    if getattr(module, kind.__qualname__, None) is not kind or hasattr(kind, "message"):
        return False
    if isinstance(error, StopIteration):
        return False
    try:
        return kind is KeyError or "text" in str(kind("text"))
    except Exception:
        return False
