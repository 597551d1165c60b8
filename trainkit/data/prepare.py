"""Prepares loaders of all kinds for training or evaluation."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from trainkit.basics import rng
from trainkit.data.agreed import AgreedLoader
from trainkit.data.batch_sources import CustomSource, KeySource, Presharded, StreamSource
from trainkit.data.fetch import fetch_for
from trainkit.data.loader import LoaderContext, PreparedLoader
from trainkit.data.mapped import MappedLoader
from trainkit.data.order import KeyedOrder, divide, is_of_torchdata, length_of
from trainkit.data.workers import fetcher_for
from trainkit.errors import ConfigError, quoted

_MODES = {"min_size": "min", "max_size_cycle": "max_cycle", "sequential": "sequential"}
"""What Lightning calls the policies."""


def training_loader(loader: Any, **context: Any) -> PreparedLoader:
    """Prepare `loader` for training: shared out over the processes, in the order of its epoch.

    Args:
        loader: A `DataLoader`, or on one process any iterable of batches.
        **context: The fields of `LoaderContext`, but for `trains`.

    Raises:
        ConfigError: The loader cannot work, or has nothing to train on.
    """
    return prepared(loader, LoaderContext(trains=True, **context))


class LoaderCombination(ABC):
    """What stands in the place of a training loader and is made of several."""

    @abstractmethod
    def prepare(self, context: LoaderContext) -> PreparedLoader:
        """Return the loader that they make together."""


def training_loaders(loaders: Any, **context: Any) -> PreparedLoader:
    """Prepare what is trained on, as `training_loader` does: a loader, or several combined."""
    if isinstance(loaders, LoaderCombination):
        return loaders.prepare(LoaderContext(trains=True, **context))
    if isinstance(loaders, Mapping):
        raise ConfigError(
            f"There are {len(loaders)} training loaders ({quoted([*loaders])}), and nothing says "
            "how they make an epoch. Pass `trainkit.Combined({...}, policy)`, where `policy` is "
            '"min", "max_cycle", "sequential", or weights such as `{"a": 3, "b": 1}`.'
        )
    return training_loader(loaders, **context)


def evaluation_loader(loader: Any, *, seed: int, **context: Any) -> PreparedLoader:
    """Prepare `loader` for evaluation: the same order in each pass, none of training's streams.

    The arguments and errors are those of `training_loader`.
    """
    seed = rng.derive(seed, "evaluation")
    return prepared(loader, LoaderContext(trains=False, seed=seed, **context))


def prepared(loader: Any, context: LoaderContext) -> PreparedLoader:
    """Return a loader of the kind that its data need."""
    if isinstance(loader, PreparedLoader):
        raise ConfigError(
            "The loader is prepared already, and would be shared out twice. Give the loader that "
            "it was made from."
        )
    is_ordinary = isinstance(loader, DataLoader) and (
        type(loader).__iter__ is DataLoader.__iter__ or is_of_torchdata(loader)
    )
    if not is_ordinary:
        return _custom(loader, context)
    if context.split_batches and loader.batch_size is None and loader.batch_sampler is None:
        raise ConfigError(
            "`split_batches` divides the loader's batch size, but the loader has "
            "`batch_size=None`. Give it a batch size, or leave `split_batches` out."
        )
    if isinstance(loader.dataset, IterableDataset):
        return _streamed(loader, context)
    if loader.batch_sampler is not None:
        return MappedLoader(loader, context)
    order = KeyedOrder(loader, context.seed)
    fetch = fetch_for(loader, context)
    source = KeySource(order, fetch, fetcher_for(fetch, loader, context), context)
    keys = length_of(loader.sampler)
    batches = None if keys is None else -(-keys // context.processes.size)
    return AgreedLoader(loader, source, context, batches_per_epoch=batches)


def _streamed(loader: DataLoader[Any], context: LoaderContext) -> PreparedLoader:
    from trainkit.data.stream import StreamReader  # other data needs none of it

    processes, size = context.processes, loader.batch_size
    if context.split_batches and size is not None:
        size = divide(size, processes.size)
    reader = StreamReader(loader, context, size)
    source = StreamSource(reader, loader, context)
    samples = None if reader.is_sharded or size is None else length_of(loader.dataset)
    batches = None
    if samples is not None and size is not None:
        unit = size * processes.size if context.trains else size
        samples -= samples % unit if loader.drop_last else 0
        batches = -(-samples // (size * processes.size))
    return AgreedLoader(
        loader,
        source,
        context,
        batch_size=size,
        whole=loader.drop_last and context.trains,
        samples_per_epoch=samples,
        batches_per_epoch=batches,
    )


def _custom(loader: Any, context: LoaderContext) -> PreparedLoader:
    processes = context.processes
    inner = loader.loader if isinstance(loader, Presharded) else loader
    if context.trains:
        _refuse_combined(inner)
    if processes.size > 1 and inner is loader:
        raise ConfigError(
            f"The loader, a `{type(loader).__name__}`, is not a plain `DataLoader`, so trainkit "
            f"cannot share it out over {processes.size} processes. Use a `DataLoader`, or wrap it "
            "in `trainkit.data.presharded` if each process's loader holds its own share."
        )
    if not hasattr(inner, "__iter__"):
        raise ConfigError(
            f"A loader must be a `DataLoader` or an iterable of batches, but is a "
            f"`{type(inner).__name__}`."
        )
    if context.split_batches:
        raise ConfigError(
            f"`split_batches` divides the batch size of a plain `DataLoader`, but the loader is a "
            f"`{type(inner).__name__}`. Leave `split_batches` out."
        )
    source = CustomSource(inner, context)
    batches = length_of(inner) if processes.size == 1 else None
    return AgreedLoader(loader, source, context, batches_per_epoch=batches)


def _refuse_combined(loader: Any) -> None:
    """Raise ConfigError for several loaders that another way than ours puts together."""
    kind = type(loader).__name__
    several = isinstance(loader, list | tuple) and any(isinstance(x, DataLoader) for x in loader)
    if kind not in ("CombinedLoader", "zip") and not several:
        return
    policy = _MODES.get(getattr(loader, "_mode", ""), "max_cycle" if several else "min")
    parts = getattr(loader, "iterables", {})
    names = [*parts] if isinstance(parts, Mapping) and parts else ["a", "b"]
    listed = ", ".join(f'"{name}": loader_{name}' for name in names)
    raise ConfigError(
        f"A `{kind}` of several training loaders could neither be shared out over processes nor "
        f'resumed. Write `fit(model, trainkit.Combined({{{listed}}}, "{policy}"))`.'
    )
