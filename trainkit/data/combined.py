"""Several loaders of training as one: which of them takes part in which step (rule 17a)."""

import math
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from fractions import Fraction
from itertools import chain, count, islice, repeat
from numbers import Real
from typing import Any, TypeAlias

from typing_extensions import override

from trainkit.basics import rng
from trainkit.basics.parsing import nearest
from trainkit.data.loader import EpochLength, LoaderContext, PreparedLoader
from trainkit.data.mapped import MappedLoader
from trainkit.data.prepare import LoaderCombination, prepared
from trainkit.data.window import MicroBatch, PaddingBatch, Window
from trainkit.errors import ConfigError, DataError, quoted

Policy: TypeAlias = str | Mapping[str, float]

PASS = 100_000
"""Added to the epoch for each later pass of a loader in it: a key of its own for its order."""

_LENGTHS: dict[str, Callable[..., int]] = {"min": min, "max_cycle": max, "sequential": sum}
_KNOWN = '"min", "max_cycle", "sequential", or weights such as `{"a": 3, "b": 1}`'


class Combined(LoaderCombination):
    """Several training loaders in the place of one, in `Trainer.fit`.

    A batch is then a mapping by loader, and so is what `training_step` returns: a loss for each.
    Each loader has a seed of its own, so that two over the same data are shuffled differently.

    Args:
        loaders: By name; plain `DataLoader`s over map-style data sets.
        policy: How they make an epoch. "min": each step has a window of each, until the shortest
            ends; "max_cycle": until the longest does, while others begin again, shuffled anew;
            "sequential": one after the other; weights such as `{"a": 3, "b": 1}`: each step is one
            loader's, in these proportions.

    Raises:
        ConfigError: They cannot make an epoch.
    """

    def __init__(self, loaders: Mapping[str, Any], policy: str | Mapping[str, float]) -> None:
        for problem in _problems(loaders, policy):
            raise ConfigError(problem)
        self.loaders, self.policy = dict(loaders), policy

    @override
    def prepare(self, context: LoaderContext) -> "CombinedLoader":
        parts = {}
        for name, loader in self.loaders.items():
            seed = rng.derive(context.seed, "loader", name)
            try:
                parts[name] = _check_part(prepared(loader, replace(context, seed=seed)))
            except ConfigError as error:
                raise ConfigError(f"The training loader `{name}`: {error}") from error
        return CombinedLoader(parts, self.policy, context)


def _problems(loaders: Any, policy: Any) -> Iterator[str]:
    if not isinstance(loaders, Mapping):
        yield (
            "`Combined` takes a mapping from names to training loaders, such as "
            f'`Combined({{"a": loader_a, "b": loader_b}}, "min")`, but was given {loaders!r}.'
        )
    if len(loaders) < 2:
        yield f"`Combined` was given a mapping of {len(loaders)}. Pass a single loader itself."
    bad = [n for n in loaders if not isinstance(n, str) or not n or "/" in n or n == "loss"]
    if bad:
        yield f"Training loaders are named by words without `/`, not `loss`, but one is {bad[0]!r}."
    yield from _weight_problems(policy, loaders) if isinstance(policy, Mapping) else ()
    if not policy or not (isinstance(policy, Mapping) or policy in (*_LENGTHS,)):
        hint = nearest(policy, _LENGTHS) if isinstance(policy, str) else ""
        yield f"`policy` must be {_KNOWN}, but is {policy!r}.{hint}"


def _weight_problems(weights: Mapping[Any, Any], loaders: Mapping[str, Any]) -> Iterator[str]:
    if weights.keys() != loaders.keys():
        yield (
            f"The weights of `policy` must be those of the training loaders, {quoted([*loaders])}, "
            f"but are of {quoted(list(map(str, weights)))}."
        )
    for name, weight in weights.items():
        is_number = isinstance(weight, Real) and not isinstance(weight, bool)
        if not is_number or not 0 < float(weight) < math.inf:
            yield (
                f"The weight of the training loader `{name}` must be a finite number above 0, but "
                f"is {weight!r}. Leave a loader out that is not to be read."
            )


def _check_part(loader: PreparedLoader) -> MappedLoader:
    """Return a loader that can be combined; raise ConfigError where its length is not known."""
    if isinstance(loader, MappedLoader) and loader.batches_per_epoch is not None:
        return loader
    raise ConfigError(
        "Loaders are combined by how many samples each has, so each must be a plain `DataLoader` "
        "over a map-style data set, with a batch size or with a batch sampler that has a length. "
        "Iterable data sets, `batch_size=None` and other iterables tell it only while they are "
        "read: join such streams in one iterable data set."
    )


def steps_of(policy: Policy, lengths: Mapping[str, int]) -> Iterator[tuple[str, ...]]:
    """Yield which loaders take part in each step of an epoch.

    By weights, each loader has had its share of any number of steps, exactly where all shares are
    whole, else to within a step: it is never one ahead, nor one behind where there are two.

    Args:
        lengths: The steps that each would have alone.
    """
    names = tuple(lengths)
    if isinstance(policy, Mapping):
        return islice(_by_weight(policy, names), sum(lengths.values()))
    if policy == "sequential":
        return chain.from_iterable(repeat((name,), length) for name, length in lengths.items())
    return repeat(names, _LENGTHS[policy](lengths.values()))


def _by_weight(policy: Mapping[str, float], names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the loader that is furthest behind its share, for ever."""
    exact = {name: Fraction(str(policy[name])) for name in names}
    unit = math.lcm(*(weight.denominator for weight in exact.values()))
    weights = {name: int(weight * unit) for name, weight in exact.items()}
    total, taken = sum(weights.values()), dict.fromkeys(names, 0)
    for step in count(1):
        name = max(names, key=lambda name: weights[name] * step - taken[name] * total)
        taken[name] += 1
        yield (name,)


class CombinedBatch(MicroBatch):
    """A micro-batch of the loaders that take part in a step: its data are theirs, by name."""

    __slots__ = ("by_loader",)

    def __init__(self, by_loader: Mapping[str, MicroBatch], last: bool) -> None:
        parts = by_loader.values()
        super().__init__(
            {name: part.data for name, part in by_loader.items()},
            sum(part.count for part in parts),
            sum(part.total for part in parts),
            last,
            tuple(map(sum, zip(*(part.counts for part in parts), strict=True))),
            sum(part.size for part in parts),
        )
        self.by_loader = by_loader


class CombinedWindow(Window):
    """A window made of one of each loader that takes part in a step.

    Args:
        windows: Those of the loaders, by name.
        is_even: Whether each process has the same share of all of them in each micro-batch.
    """

    __slots__ = ("is_even", "windows")

    def __init__(
        self, parts: Iterator[CombinedBatch], windows: Mapping[str, Window], is_even: bool
    ) -> None:
        total = sum(window.total or 0 for window in windows.values())
        super().__init__(parts, total, max(window.size or 0 for window in windows.values()))
        self.windows = windows
        self.is_even = is_even


_Course: TypeAlias = Iterator[tuple[int, int, int]]


def _course(part: MappedLoader, epoch: int, cut: Any) -> _Course:
    """Yield the windows of a loader, pass after pass: its number, samples before and in them."""
    for number in count(epoch, PASS):
        done = 0
        for size in part.window_sizes(number, **cut):
            yield number, done, size
            done += size


class CombinedLoader(PreparedLoader):
    """Several prepared loaders, of which `policy` makes an epoch.

    A step has a window of each loader, or of one of them, so that it is the same step for any
    number of processes and any accumulation with the same windows. An epoch begins with a pass of
    each loader; one that comes to its end before the epoch does begins its next.

    Args:
        policy: "min", "max_cycle", "sequential", or a weight for each loader.
    """

    def __init__(
        self, parts: Mapping[str, MappedLoader], policy: Policy, context: LoaderContext
    ) -> None:
        super().__init__({name: part.source for name, part in parts.items()}, context)
        self.parts: Mapping[str, MappedLoader] = parts
        self.rows_vary = any(part.rows_vary for part in parts.values())
        for part in parts.values():
            part.repeats_last = False  # beside samples of others, what is repeated is seen
        self._policy = policy
        self._steps = _LENGTHS[policy if isinstance(policy, str) else "sequential"]
        self._digest: tuple[int, str | None] | None = None  # of the first passes of an epoch

    @override
    def windows(
        self, epoch: int, *, position: int = 0, accumulation: int = 1, drop_last: bool = False
    ) -> Generator[Window, None, None]:
        cut: Any = {"accumulation": accumulation, "drop_last": drop_last}
        courses = {name: _course(part, epoch, cut) for name, part in self.parts.items()}
        sizes = {name: part.window_sizes(epoch, **cut) for name, part in self.parts.items()}
        lengths = {name: len(of_pass) for name, of_pass in sizes.items()}
        steps, whole = steps_of(self._policy, lengths), self._steps(lengths.values())
        is_even = self._is_even(sizes, whole, accumulation)
        if self._policy not in ("min", "sequential"):
            self.order_digest(epoch, accumulation)  # while the first passes are under way
        left = whole - _skip(steps, courses, position)
        self._known_length = EpochLength(left, whole, sum(map(sum, sizes.values())))
        passes: dict[str, tuple[int, Generator[Window, None, None]]] = {}
        try:
            for names in steps:
                windows = {}
                for name in names:
                    number, start, _ = next(courses[name])
                    if name not in passes or passes[name][0] != number:
                        if name in passes:
                            passes[name][1].close()
                        made = self.parts[name].windows(number, position=start, **cut)
                        passes[name] = number, made
                    windows[name] = next(passes[name][1])
                yield CombinedWindow(self._together(windows), windows, is_even)
        finally:
            for _, under_way in passes.values():
                under_way.close()

    @override
    def batches(self, epoch: int, *, position: int = 0) -> Generator[MicroBatch, None, None]:
        with closing(self.windows(epoch, position=position)) as windows:
            for window in windows:
                yield from window

    @override
    def limit_to(self, batches: int | float | None) -> None:
        for part in self.parts.values():
            part.limit_to(batches)

    @override
    def steps_per_epoch(self, accumulation: int, drop_last: bool) -> int:
        lengths = {
            name: part.steps_per_epoch(accumulation, drop_last) or 0
            for name, part in self.parts.items()
        }
        for name, length in lengths.items():
            if not length:
                raise ConfigError(
                    f"The training loader `{name}` has no full window, and `drop_last_window` is "
                    "True. Accumulate less, use smaller batches, or keep the last window."
                )
        return self._steps(lengths.values())

    @override
    def combination(self, accumulation: int) -> str:
        policy: Any = self._policy
        if isinstance(policy, Mapping):
            policy = ":".join(str(policy[name]) for name in self.parts)
        sizes = (
            f"`{name}` of {_length(part)}, {part.nominal_window(accumulation) or 'various'} in a "
            "window"
            for name, part in self.parts.items()
        )
        return f"{policy} of {'; '.join(sizes)}"

    @override
    def order_facts(self) -> dict[str, Any]:
        return {
            f"{name}: {fact}": value
            for name, part in self.parts.items()
            for fact, value in part.order_facts().items()
        }

    @override
    def order_digest(self, epoch: int, accumulation: int) -> str | None:
        if self._digest is None or self._digest[0] != epoch:
            digests = [part.order_digest(epoch, accumulation) for part in self.parts.values()]
            known = [digest for digest in digests if digest is not None]
            self._digest = epoch, " ".join(known) if len(known) == len(digests) else None
        return self._digest[1]

    @override
    def forget_order(self) -> None:
        self._digest = None
        for part in self.parts.values():
            part.forget_order()

    @override
    def keep_order(self) -> None:
        for part in self.parts.values():
            part.keep_order()

    @override
    def close(self) -> None:
        for part in self.parts.values():
            part.close()

    def _is_even(self, found: Mapping[str, list[int]], steps: int, accumulation: int) -> bool:
        """Return whether all windows of an epoch are full, or those of all loaders are alike."""
        parts = [(self.parts[name], sizes) for name, sizes in found.items()]
        full = all({*sizes[:steps]} == {part.nominal_window(accumulation)} for part, sizes in parts)
        (first, same), *others = parts
        alike = all(p.batch_size == first.batch_size and sizes == same for p, sizes in others)
        return full or (alike and first.batch_size is not None)

    def _together(self, windows: Mapping[str, Window]) -> Iterator[CombinedBatch]:
        """Yield the micro-batches of windows side by side; a shorter one goes on with repeats."""
        size = max(window.size or 0 for window in windows.values())
        nobody = (0,) * self.processes.size
        latest: dict[str, PaddingBatch] = {name: PaddingBatch() for name in windows}
        for index in range(size):
            now = {}
            for name, window in windows.items():
                own, padding = window.size or 0, latest[name]
                if index < own:
                    now[name] = micro_batch = next(iter(window))
                    if index == own - 1 < size - 1:
                        padding.keep(micro_batch.data, micro_batch.size)
                    continue
                if self.active is not None:
                    self.active.yielded(self.parts[name], nobody, padding.size)
                now[name] = MicroBatch(padding.take(), 0, 0, True, nobody, padding.size)
            yield CombinedBatch(now, index == size - 1)


def _length(part: MappedLoader) -> str:
    """Return what an epoch of a loader has over all processes, in words."""
    if part.samples_per_epoch is not None:
        return f"{part.samples_per_epoch} samples"
    return f"{(part.batches_per_epoch or 0) * part.processes.size} batches"


def _skip(steps: Iterator[tuple[str, ...]], courses: Mapping[str, _Course], position: int) -> int:
    """Go past the samples that were consumed, and return how many steps these were."""
    done = skipped = 0
    while done < position and (names := next(steps, None)) is not None:
        done += sum(size for name in names for _, _, size in [next(courses[name])])
        skipped += 1
    if done != position:
        raise DataError(
            f"The position is {position} samples of the epoch, but no step of the combined loaders "
            "begins there. Keep their data sets, global batches and policy of the checkpoint."
        )
    return skipped
