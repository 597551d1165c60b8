"""Keys, records, generators and containers of the user's own come back (rule 22)."""

import random
from array import array
from collections import Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import partial
from pathlib import Path, PurePath
from queue import PriorityQueue, Queue
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from typing_extensions import override

from tests.helpers.callbacks import StopsAt
from tests.helpers.toys import FEATURES, fit, toy_dataset
from trainkit import Callback, Run, Trainer
from trainkit.callbacks import Checkpoint

STEPS, CUT = 12, 6


class Phase(Enum):
    WARM = 1
    MAIN = (2, 3)


@dataclass(frozen=True)
class Point:
    step: int
    phase: Phase = Phase.WARM


@dataclass
class Record:
    step: int
    tags: list[int] = field(default_factory=list)


class Pair(NamedTuple):
    a: int
    b: Phase


class Listed(list[float]):
    """Knows its sum."""

    total = 0.0

    @override
    def append(self, value: float) -> None:
        self.total += value
        super().append(value)


class Counted(OrderedDict[str, int]):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked = 0

    @override
    def __getitem__(self, key: str) -> int:
        self.asked += 1
        return super().__getitem__(key)


calls = 0


def counted(step: int, seen: list[int] = []) -> int:  # noqa: B006  # it is the idiom
    global calls
    calls += 1
    seen.append(step)
    return len(seen) + calls


class Keys:
    """Members of an enum, records and tuples with them, in sets and as keys."""

    def __init__(self) -> None:
        self.points, self.frozen = {Point(0)}, frozenset[Any]({Phase.WARM})
        self.by_phase = {Phase.WARM: 0, Phase.MAIN: 0}
        self.by_pair: dict[Any, Any] = {}
        self.counter, self.ordered = Counter[Any](), OrderedDict[Any, Any]()
        self.lists: Any = defaultdict(list)
        self.nested = [{"a": {(Phase.WARM, 1): {Point(0)}}}]

    def step(self, n: int) -> None:
        self.points.add(Point(n % 4, Phase.MAIN))
        self.frozen |= {Phase.MAIN, (Phase.MAIN, n)}
        self.by_phase[Phase.MAIN] += n
        self.by_pair[Pair(n % 3, Phase.MAIN), "x"] = [Record(n, [n])]
        self.counter[Phase.MAIN] += 1
        self.ordered[Point(n % 3)] = n
        self.ordered.move_to_end(Point(n % 3))
        self.lists[Phase.MAIN].append(n)
        self.nested[0]["a"][Phase.WARM, 1].add(Point(n, Phase.MAIN))

    def dump(self) -> Any:
        lists = dict(self.lists), self.lists[Phase.WARM]
        pairs = {key: [astuple(each) for each in held] for key, held in self.by_pair.items()}
        plain = self.points, self.frozen, self.by_phase, self.counter
        return plain, pairs, list(self.ordered.items()), lists, self.nested


class Numbers:
    """Numbers, times and paths of the standard library."""

    def __init__(self) -> None:
        self.money, self.share = Decimal("0.10"), Fraction(1, 3)
        self.day, self.at, self.took = date(2020, 1, 1), datetime(2020, 1, 1), timedelta(0)
        self.path, self.part, self.numbers = PurePath("a"), slice(0, 1), range(1)
        self.by_day: dict[Any, Any] = {}

    def step(self, n: int) -> None:
        self.money += Decimal("0.10")
        self.share += Fraction(1, n + 1)
        self.at += timedelta(hours=n)
        self.took += timedelta(n)
        self.path, self.part, self.numbers = self.path / str(n), slice(0, n), range(n)
        self.by_day[self.day] = [self.money, {"at": self.at}]
        self.day += timedelta(1)

    def dump(self) -> Any:
        return repr(vars(self))


class Containers:
    """Lists and dicts of a user's class, and those of the standard library that are objects."""

    def __init__(self) -> None:
        self.listed, self.counted = Listed(), Counted({"a": 0, "b": 0})
        self.user_dict, self.user_list = UserDict({"a": 0}), UserList[int]()
        self.queue, self.heap = Queue[int](), PriorityQueue[Any]()
        self.counters: Any = defaultdict(Counter)
        self.deques: Any = [defaultdict(deque)]
        self.records: Any = defaultdict(partial(Record, -1))
        self.same = self.listed

    def step(self, n: int) -> None:
        self.listed.append(n / 7)
        self.counted["ab"[n % 2]] += n
        self.counted.move_to_end("ab"[n % 2])
        self.user_dict["a"] += n
        self.user_list.append(n)
        self.queue.put(n)
        self.heap.put((-n, "x"))
        self.counters[n % 2].update([n])
        self.deques[0][n % 2].append(n)
        self.records[n % 3].tags.append(n)

    def dump(self) -> Any:
        own = list(self.listed), self.listed.total, list(self.counted.items()), self.counted.asked
        library = dict(self.user_dict), list(self.user_list), list(self.queue.queue)
        made = {key: astuple(each) for key, each in self.records.items()}, self.records[7]
        kinds = self.counters[8], type(self.deques[0][8]), self.same is self.listed
        return own, library, list(self.heap.queue), self.counters, self.deques, made, kinds


class Draws:
    """Generators in lists and dicts, and arrays that share their memory."""

    def __init__(self) -> None:
        self.listed: list[Any] = [random.Random(1), np.random.default_rng(2)]
        self.named = {"a": torch.Generator().manual_seed(3), "b": [np.random.RandomState(4)]}
        self.normal, self.array = random.Random(5), np.zeros(4)
        self.view, self.drawn = self.array[:2], self.normal.gauss(0, 1)

    def step(self, n: int) -> None:
        named: Any = self.named
        self.drawn += self.listed[0].random() + self.listed[1].random()
        self.drawn += torch.rand(1, generator=named["a"]).item() + named["b"][0].rand()
        self.drawn += self.normal.gauss(0, 1)  # it keeps the second of two
        self.array += n
        self.view += self.drawn

    def dump(self) -> Any:
        return self.drawn, self.array.tolist(), self.view.tolist()


class Reads:
    """Has a function that remembers, calls one that does, and counts in its class."""

    number = 0

    def __init__(self) -> None:
        inner = 0

        def count() -> int:
            nonlocal inner
            inner += 1
            return inner

        self.count, self.result = count, (0, 0)

    def step(self, n: int) -> None:
        type(self).number += 1
        self.result = counted(n), self.count()

    def dump(self) -> Any:
        return self.result, self.number


class Mixed:
    """A dict of an object and numbers."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"step": 0, "record": Record(0), "losses": [], "items": None}

    def step(self, n: int) -> None:
        self.state["step"] += n
        self.state["record"].step += n
        self.state["losses"].append(n)
        self.state["items"] = Phase.MAIN
        self.state["late"] = {"a": n}

    def dump(self) -> Any:
        return self.state


class Leaves:
    """Gives up attributes on its way."""

    def __init__(self) -> None:
        self.first, self.table = [1], {"a": 1, "b": 2}

    def step(self, n: int) -> None:
        if n == 2:
            del self.first

    def dump(self) -> Any:
        return sorted(vars(self))


class Others:
    """What no checkpoint holds."""

    def __init__(self) -> None:
        self.fields = np.zeros(2, dtype=[("x", "f4"), ("n", "i8")])
        self.masked = np.ma.masked_array([1.0, 2.0], [False, True])
        self.numbers, self.key = array("d", [0.0]), Record(0)
        self.module = nn.Linear(1, 1)
        self.weak = WeakKeyDictionary({self.module: 0})
        self.still = np.zeros(2, dtype=[("x", "f4")])

    def step(self, n: int) -> None:
        self.fields["n"] += n
        self.masked = self.masked + 1
        self.numbers.append(n)
        self.weak[self.module] += n

    def dump(self) -> Any:
        return None


KINDS: list[Callable[[], Any]] = [Keys, Numbers, Containers, Draws, Reads, Mixed, Leaves]


class Holds(Callback):
    def __init__(self, kind: Callable[[], Any]) -> None:
        self.kind = kind()

    @override
    def on_step_end(self, run: Run, result: Any) -> None:
        self.kind.step(run.state.step)


def _train(folder: Path, kind: Any, stop: int | None = None, **arguments: Any) -> Any:
    global calls
    calls, Reads.number = 0, 0
    cast("Any", counted).__defaults__[0].clear()
    torch.manual_seed(0)
    holds = Holds(kind)
    callbacks = [Checkpoint(every_n_steps=CUT), holds, StopsAt(stop)]
    trainer = Trainer(max_steps=STEPS, output_dir=folder, callbacks=callbacks)
    loss_fn, loader = nn.CrossEntropyLoss(), DataLoader(toy_dataset(), 4)
    fit(trainer, loader, nn.Linear(FEATURES, 2), loss_fn=loss_fn, **arguments)
    return holds.kind.dump()


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_object_of_a_callback_holds_comes_back(
    kind: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = _train(tmp_path / "a", kind)
    _train(tmp_path / "b", kind, stop=CUT)
    assert _train(tmp_path / "b", kind, resume="must") == whole
    assert "no checkpoint holds" not in capsys.readouterr().out


def test_values_that_no_checkpoint_holds_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _train(tmp_path, Others)
    told = [line for line in capsys.readouterr().out.splitlines() if "no checkpoint holds" in line]
    named = [line.partition(".kind.")[2].partition("`")[0] for line in told]
    assert sorted(named) == ["fields", "masked", "numbers", "weak"]
