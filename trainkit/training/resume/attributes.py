"""What a training changes and is in no `state_dict`: it is saved, and comes back (rule 22).

A counter or a running mean in an attribute, `Dropout.p` that a callback raises, a generator, a
buffer with `persistent=False`, a layer that was frozen or put into evaluation mode on the way: a
resume that lacked one of these would be another run.
"""

import copy
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from trainkit.basics.outside import Outside, is_users, outside_of
from trainkit.basics.rng import is_generator, new_like, set_state
from trainkit.basics.torch_internals import buffers_of, is_saved, parameters_of
from trainkit.checkpoint.forms import Unfit, check_form
from trainkit.checkpoint.resharding.sharding_spec import is_sharded, local_part
from trainkit.checkpoint.training_state import applying
from trainkit.data import PreparedLoader
from trainkit.data.own_generators import generators_in
from trainkit.data.stream_start import is_stateful
from trainkit.data.workers import datasets_of
from trainkit.errors import quoted
from trainkit.training.resume.drawn_order import DrawnOrder, is_of_sampler
from trainkit.training.resume.lost import CONTAINERS, trace_of, why_lost
from trainkit.training.resume.owners import (
    OF_EVERY_MODULE,
    STATE,
    StateOf,
    attributes_in,
    beside,
    copy_of,
    functions_in,
    has_state,
    is_owner,
    of_callbacks,
    of_container,
    values_of,
)
from trainkit.training.resume.values import (
    CONTENT,
    ENTRY,
    Mark,
    entry_of,
    has_parts,
    is_dense,
    is_holder,
    is_like,
    is_options,
    mark_of,
    put_back,
)

Entries = dict[str, dict[str, Any]]
"""What was saved, by owner and attribute."""

_RECORDS = (list, dict, set)  # a callback may note in these what it has seen
_NO_OBJECTS = (FunctionType, partial, Outside, dict)
_STEP = "training_step"
_CALLBACK = "callbacks["  # before its name
_GENERATOR = "generator "  # before the number of one that is found in a data set
_ORDER = "order of "  # before the name of data, or of a sampler, of which an order was drawn
_TRAINABLE = ".requires_grad"  # behind the name of a parameter
_MOST_HELD = 1024  # objects in a list or dict
_MOST_OBJECTS = 10_000  # that are looked at in all
_LARGEST = 1 << 20  # bytes of a tensor or array in a data set: what is larger is its data


class Attributes:
    """Saves the attributes that have changed since a training began, and puts them back.

    Of modules, loss functions and trainers these are values that a checkpoint holds, and
    generators; of data sets and collate functions the same without containers, and small tensors;
    of samplers numbers, tensors and short lists; of callbacks without a `state_dict` of the user's
    all, but small tensors in lists, dicts and sets, if they are not like those of the model. A
    function has what it reads from outside (`Outside`); an object of a user's class that
    one of these holds has its attributes, an optimizer that a step uses by itself its `state_dict`.
    What a graph has made, such as a hidden state with which the next step goes on, comes back
    without it. Left alone is what shares memory with a parameter or buffer.

    Args:
        model: What is trained.
        loss_fn: Of modules that are no part of the model, such as this one, or a teacher that the
            trainer or the model holds, also the parameters and buffers, which nothing else saves.
        others: By name: data sets without a state of their own, a trainer of the user's, and what
            is read by the functions that make a step.
        streams: Which of these are data that a resume reads from the beginning of a pass.
        registered: What is saved otherwise.
        say: Prints a line, once for all processes.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Any,
        others: Mapping[str, Any],
        streams: Collection[str],
        registered: Collection[Any],
        say: Callable[[str], None],
    ) -> None:
        self._model, self._say = model, say
        self._loss_fn = loss_fn.__self__ if isinstance(loss_fn, MethodType) else loss_fn
        self._others, self._streams, self._registered = others, streams, registered
        self._before: dict[str, dict[str, Mark]] = {}
        self._names: dict[int, tuple[str, Any]] = {}  # of objects that were there at the beginning
        self._traces: dict[str, Any] = {}  # of what is not saved when training began
        self._told = set[str]()
        self.tell_overwritten: Callable[[], None] = lambda: None  # of a resume
        self._loaded: Entries = {}
        self._at_start: Entries = {}  # of the pass that is under way
        self._drawn = DrawnOrder({n: o for n, o in others.items() if n.endswith("sampler")}, say)

    def watch(self, callbacks: Iterable[Any]) -> None:
        """Look after callbacks and metrics without a state, and what they read from outside."""
        watched = of_callbacks(callbacks)
        for key, each in watched.items():
            if is_users(type(each)):
                name = f"{_CALLBACK}{key}]"
                inner = each.named_modules(prefix=name) if isinstance(each, nn.Module) else ()
                self._others = {**self._others, name: each, **dict(inner)}
        held = self._apart(dict(self._model.named_modules(prefix="model")))
        around = outside_of([*watched.values(), *(each for _, each in held)], self._others[_STEP])
        self._others = {**self._others, "callbacks": around}

    def begin(
        self, device: torch.device, checkpoint: Path | None, draw: Callable[[], None]
    ) -> None:
        """Note what there is, then put back what was loaded.

        Args:
            device: That of the model.
            checkpoint: Where it was loaded from.
            draw: Draws the order of the epoch under way, if that is still to be done: called while
                samplers and data are what they were when that epoch began.

        Raises:
            CheckpointError: An object refused its state.
        """
        self.tell_overwritten()
        self._names, self._before = {}, {}
        owners, self._traces = {}, {}
        for name, owner, held, marks in self._looked_at():
            owners[name], self._before[name] = (owner, marks), marks
            for key, value in held.items() if not self._is_of_stream(name) else ():
                # What libraries keep in a data set's transforms is of the latest sample.
                is_traced = issubclass(type(value), CONTAINERS) == name.startswith("data")
                if key not in marks and is_traced:
                    self._traces[f"{name}.{key}"] = trace_of(value)
        for name, own in self._loaded.items():
            owner, _ = owners.get(name.removeprefix(_ORDER), (None, {}))
            if name.startswith(_ORDER) and owner is not None:
                for key, entry in own.items():
                    with applying(f"`{name}`", checkpoint or Path()):
                        _put_back(owner, key, entry, device)
        self._loaded = {n: own for n, own in self._loaded.items() if not n.startswith(_ORDER)}
        draw()
        if self._drawn.is_needed:
            self._note_drawn()
        outside, lost = list[str](), list[str]()
        # Objects first, then what is in them.
        loaded = [(n, k, e) for n, own in self._loaded.items() for k, e in own.items()]
        for name, key, entry in sorted(loaded, key=lambda each: not {"is", "copy"} & {*each[2]}):
            if name not in owners:
                continue
            owner, given = owners[name]
            if "gone" in entry:
                attributes_in(owner).pop(key, None)
                continue
            if "is" in entry:
                values, other = attributes_in(owner), entry["is"]
                is_lost = other in self._loaded.keys() - owners.keys()
                if is_lost and is_owner(values.get(key)):
                    owners[other] = copy_of(values[key]), {}
                if other in owners:
                    values[key] = owners[other][0]
                continue
            if "copy" in entry:
                source, _ = owners.get(entry["copy"], (None, {}))
                if source is not None and getattr(owner, key, None) is None:
                    made = attributes_in(owner)[key] = copy.deepcopy(source)
                    inner = made.named_modules(prefix=f"{name}.{key}")
                    owners |= {name: (each, {}) for name, each in inner}
                continue
            self._tell_other(f"{name}.{key}", entry, given.get(key))
            is_outside = isinstance(attributes_in(owner), Outside)
            if is_outside or (name.startswith((_STEP, "data")) and _GENERATOR not in key):
                outside.append(f"{name}.{key}")
            with applying(f"`{name}`", checkpoint or Path()):
                if not _put_back(owner, key, entry, device):
                    lost.append(f"{name}.{key}")
        lost += self._loaded.keys() - owners.keys()
        if lost:
            self._say(
                f"trainkit: the checkpoint holds attributes of {quoted(sorted(lost))}, for which "
                "this run has nothing. They are left out: let them be there when `fit` begins."
            )
        if outside:
            self._say(
                "trainkit: globals, closed-over values and attributes of data sets that the saved "
                f"run had changed are back as it left them: {quoted(sorted(outside))}."
            )

    def _tell_other(self, name: str, entry: Mapping[str, Any], given: Mark | None) -> None:
        """Say where a value is given otherwise than when the saved run began, and than it ended."""
        if given is not None and given.scalar and repr(given.scalar[0]) == repr(entry.get("value")):
            return
        how, began = "is given otherwise than", given is None or entry.get("began", given.digest)
        if given is not None and given.scalar and "began_as" in entry:
            here, began = repr(given.scalar[0]), repr(entry["began_as"])
            how = "" if here == began else f"is {here} here, and was {began}"
        is_average = name.startswith(_CALLBACK) and isinstance(entry.get("value"), _RECORDS)
        if given is not None and how and not is_average and began != given.digest:
            self._say(
                f"trainkit: `{name}` {how} when the saved run began. It goes on with "
                f"{repr(entry.get('value', 'its state'))[:80]}, as saved. Set what shall be "
                "otherwise in a callback's `on_checkpoint_loaded`."
            )

    def begin_pass(self, *, goes_on: bool) -> None:
        """Note what the data sets are that are read from here on, or whose order is drawn now.

        Args:
            goes_on: Whether a resume goes on with a pass, whose order `begin` has drawn.
        """
        if self._streams:
            self._at_start = {}
            state = self.state_dict()
            now = {name: state.get(name, {}) for name in state if self._is_of_stream(name)}
            self._at_start = copy.deepcopy({key: {} for key in self._streams} | now)
        if self._drawn.is_needed and not goes_on:
            self._note_drawn()

    def _note_drawn(self) -> None:
        self._drawn.note(
            (name, marks, self._changed(name, values, marks))
            for name, _, values, marks in self._looked_at()
            if name.startswith("data") and not self._is_of_stream(name)
        )

    def end_pass(self) -> None:
        """Go on from what data are now; say what changed of a sampler after its order was drawn."""
        self._at_start = {}
        if self._drawn.is_needed:
            self._drawn.tell_changed()

    def _is_of_stream(self, name: str) -> bool:
        inside = any(name.startswith(f"{stream}.") for stream in self._streams)
        return name in self._streams or (inside and name not in self._others)

    def state_dict(self) -> Entries:
        """Return what has changed."""
        changed: Entries = {}
        for name, owner, values, marks in self._looked_at():
            before, loaded = self._before.get(name, {}), self._loaded.get(name, {})
            changed[name] = self._changed(name, values, marks)
            changed[_ORDER + name] = self._drawn.saved(name, marks)
            was_held = before.keys() | loaded.keys() | ({STATE} if has_state(owner) else set())
            for key, value in values.items():
                if key not in marks:
                    if source := self._source_of(value, f"{name}.{key}"):
                        changed[name][key] = {"copy": source}
                    self._tell_lost(f"{name}.{key}", value, was_held=key in was_held)
            if not isinstance(owner, _NO_OBJECTS):
                gone = {key for key in before if key.isidentifier() and key not in values}
                changed[name] |= {key: {"gone": True} for key in gone}
        changed |= self._at_start
        return {name: entries for name, entries in changed.items() if entries}

    def _changed(
        self, name: str, values: Mapping[str, Any], marks: Mapping[str, Mark]
    ) -> dict[str, Any]:
        before, loaded = self._before.get(name, {}), self._loaded.get(name, {})
        return {
            key: {"is": self._now[id(values[key])]}
            if id(values[key]) in self._now
            else entry_of(values[key], mark, before.get(key))
            for key, mark in marks.items()
            if key in loaded or mark != before.get(key)
        }

    def check_state_dict(self, state: Any) -> None:
        """Raise `Unfit` for what `state_dict` cannot have returned."""
        check_form(state, {str: {str: ENTRY}})
        for name, owner, values, _ in self._looked_at():
            is_object = not (isinstance(owner, _NO_OBJECTS) or has_state(owner))
            for key, entry in state.get(name, {}).items():
                is_method = is_object and callable(getattr(type(owner), key, None))
                if is_method or key in OF_EVERY_MODULE:
                    raise Unfit("is no attribute with a value, but a method", name, key)
                if "generator" in entry and is_generator(values.get(key)):
                    try:
                        set_state(new_like(values[key]), entry["generator"])
                    except Exception as error:
                        raise Unfit(f"is no state of a generator ({error})", name, key) from None

    def load_state_dict(self, state: Entries) -> None:
        """Let `begin` put back what was saved."""
        self._loaded = state

    def merge_state_dicts(self, states: Sequence[Entries]) -> Entries:
        """Return what process 0 has saved, for another number of processes; this is said."""
        names = sorted({f"{name}.{key}" for each in states for name in each for key in each[name]})
        self._say(
            f"trainkit: attributes ({quoted(names)}) differed between the processes that saved "
            "them; all take those of process 0."
        )
        return states[0]

    def _tell_lost(self, name: str, value: Any, *, was_held: bool) -> None:
        """Say once why a resume does not bring a value back, where training may go on with it."""
        if name in self._told:
            return
        is_data = name.startswith("data") and "sampler." not in name
        has_changed = name in self._traces and trace_of(value) != self._traces[name]
        why = why_lost(value, has_changed, was_held, is_data, self._is_shard_of_its_own)
        if why:
            self._told.add(name)
            self._say(f"trainkit: `{name}` {why}")

    def _is_shard_of_its_own(self, value: Any) -> bool:
        """Return whether a value is sharded as those of the model are, and is none of these."""
        if not issubclass(type(value), Tensor) or isinstance(value, nn.Parameter):
            return False
        return (
            is_sharded(value) and local_part(value).untyped_storage().data_ptr() not in self._memory
        )

    def _source_of(self, value: Any, path: str) -> str | None:
        """Return which module of the model one is like that was made on the way, as an average."""
        if path in self._apart_now - self._before.keys() and isinstance(value, nn.Module):
            modules = dict(self._model.named_modules(prefix="model"))
            alike = (n for n, m in modules.items() if type(m) is type(value))
            return next((n for n in alike if _shapes(modules[n]) == _shapes(value)), None)
        return None

    def _is_new(self, value: Any) -> bool:
        return bool(self._before) and id(value) not in self._names

    def _looked_at(self) -> Iterator[tuple[str, Any, dict[str, Any], dict[str, Mark]]]:
        """Yield each owner by its name, with its attributes, and the marks of what can be saved."""
        modules = dict(self._model.named_modules(prefix="model"))
        held = (*self._model.parameters(), *self._model.buffers())
        parts = map(local_part, held)
        memory = {each.untyped_storage().data_ptr() for each in parts if is_dense(each)}
        self._memory = memory
        apart = dict(self._apart(modules))
        objects = {id(o): (n, o) for n, o in apart.items() if not isinstance(o, nn.Module)}
        self._names, self._apart_now = self._names or objects, {*apart}
        self._now = {key: name for key, (name, _) in objects.items()}
        loss = {} if isinstance(self._loss_fn, nn.Module) else {"loss_fn": self._loss_fn}
        owners = {**modules, **loss, **apart, **self._others}
        for name, owner in owners.items():
            values, marks = values_of(owner), dict[str, Mark | None]()
            is_data = name.startswith("data") and not name.endswith("sampler")
            is_callback = name.startswith(_CALLBACK) and not has_state(owner)
            is_filled = is_data or name.startswith(f"{_CALLBACK}metric ")  # anew each time
            left: tuple[type, ...] = CONTAINERS if is_filled else ()
            for key, value in values.items():
                if id(value) in self._now:
                    marks[key] = Mark(self._now[id(value)])
                elif is_data and is_options(value):
                    marks[key] = mark_of(value)
                elif not (issubclass(type(value), left) or (is_data and is_generator(value))):
                    is_record = is_callback and isinstance(value, _RECORDS)
                    is_small = is_data or (is_record and not is_like(value, held))
                    most = _LARGEST if is_small else math.inf
                    marks[key] = mark_of(value, memory, most, self._names)
            if name in ("trainer", _STEP):
                marks.pop("planned_steps", None)  # which each `fit` sets anew
            if name.endswith("sampler"):
                is_own = is_users(type(owner))
                marks = {k: m for k, m in marks.items() if is_of_sampler(values[k], is_own)}
            more: dict[str, Any] = {}
            if name in self._streams:
                more = _own_generators(owner)
            elif isinstance(owner, nn.Module):
                own = {**buffers_of(owner), **({} if name in modules else parameters_of(owner))}
                more = _frozen(owner) | {
                    key: value
                    for key, value in own.items()
                    if name not in modules or not is_saved(owner, key)
                }
            marks |= {key: mark_of(value) for key, value in more.items()}
            yield name, owner, values | more, {k: m for k, m in marks.items() if m is not None}

    def _apart(self, modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Any]]:
        """Yield modules, and objects of a user's classes, that are no part of the model.

        These are the loss, and what it, the modules, the trainer, its step and the data hold or
        read.
        """
        waiting = [(n, each) for n, each in self._others.items() if not n.endswith("sampler")]
        waiting += modules.items()
        known = [*self._registered, *self._others.values(), *modules.values()]
        if isinstance(self._loss_fn, nn.Module) or is_owner(self._loss_fn):
            waiting.append(("", {"loss_fn": self._loss_fn}))
        elif self._loss_fn is not None:
            waiting.append(("loss_fn", self._loss_fn))
        seen, taken = {id(each) for each in known}, {name for name, _ in self._names.values()}
        for name, owner in islice(waiting, _MOST_OBJECTS):  # it grows
            if has_state(owner):
                continue
            is_list = type(owner) in (list, tuple)
            items = [*(enumerate(owner) if is_list else attributes_in(owner).items())]
            if (is_list or type(owner) is dict) and name and not name.startswith("data"):
                inside = of_container(owner)
                path = name if inside is owner else f"{name}{CONTENT}"
                yield from [(path, inside)] if inside else ()
            for index, (key, value) in enumerate(items):
                is_held = is_holder(value) and len(value) <= _MOST_HELD
                if id(value) in seen or not (is_held or is_owner(value)):
                    continue
                if key in OF_EVERY_MODULE and isinstance(owner, nn.Module):
                    continue
                if isinstance(key, Tensor):  # a parameter with an optimizer of its own
                    key = f"key {index}"
                if type(owner) in (list, tuple, dict) and self._is_new(value) and has_parts(value):
                    continue  # the list holds it
                path = f"{name}.{key}".lstrip(".")
                if isinstance(value, nn.Module):
                    named = [*value.named_modules(prefix=path)]
                else:
                    own = self._names.get(id(value), (None, None))[0]
                    named = [(own or (f"{path}'" if path in taken else path), value)]
                for path, each in named:
                    if id(each) not in seen:
                        seen.add(id(each))
                        waiting.append((path, each))
                        if not is_held:
                            yield path, each


def _own_generators(dataset: Any) -> dict[str, Any]:
    return {f"{_GENERATOR}{index}": each for index, each in enumerate(generators_in(dataset))}


def _shapes(module: nn.Module) -> list[tuple[str, torch.Size]]:
    return [(name, each.shape) for name, each in module.named_parameters()]


def _frozen(module: nn.Module) -> dict[str, Any]:
    parameters = parameters_of(module).items()
    return {f"{key}{_TRAINABLE}": p.requires_grad for key, p in parameters if p is not None}


def _put_back(owner: Any, key: str, entry: Mapping[str, Any], device: torch.device) -> bool:
    """Let an owner have what was saved of it; return whether it can."""
    if key.endswith(_TRAINABLE):
        parameter = parameters_of(owner).get(key.removesuffix(_TRAINABLE))
        if parameter is not None:
            parameter.requires_grad_(entry["value"])
        return parameter is not None
    values = attributes_in(owner)
    if isinstance(owner, nn.Module) and key not in values:
        kinds: tuple[Any, ...] = (buffers_of(owner), parameters_of(owner))
        values = next((kind for kind in kinds if key in kind), values)
    if key.startswith(_GENERATOR):
        values = _own_generators(owner)
    if isinstance(values, StateOf):
        values[key] = entry.get("value")
        return True
    return put_back(values, key, entry, device)


def attributes_of(
    module: nn.Module,
    loss_fn: Any,
    loader: PreparedLoader,
    trainer: Any,
    registered: Collection[Any],
    say: Callable[[str], None],
) -> Attributes:
    """Return what looks after the attributes of a run."""
    objects: dict[str, Any] = {}
    if not type(trainer).__module__.startswith("trainkit."):
        objects["trainer"] = trainer
    called = functions_in(registered)
    objects[_STEP] = outside_of([trainer, loss_fn, *module.modules(), *called])
    streams = []
    objects |= beside(registered)
    for key, part in ({"": loader} if loader.parts is None else loader.parts).items():
        name, source = f"data.{key}".rstrip("."), part.source
        dataset = getattr(source, "dataset", source)
        if is_stateful(dataset):
            continue
        if dataset is source or isinstance(dataset, IterableDataset):
            streams.append(name)
        for index, inner in enumerate(datasets_of(dataset)):
            objects[f"{name}.{index}" if index else name] = inner
        for key in ("collate_fn", "batch_sampler", "sampler"):
            objects[f"{name}.{key}"] = getattr(source, key, None)
    return Attributes(module, loss_fn, objects, streams, registered, say)
