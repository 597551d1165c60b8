"""What a training changes and is in no `state_dict`: it is saved, and comes back (rule 22).

A counter or a running mean in an attribute, `Dropout.p` that a callback raises, a generator, a
buffer with `persistent=False`, a layer that was frozen or put into evaluation mode on the way: a
resume that lacked one of these would be another run.
"""

import copy
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from hashlib import blake2b
from types import FunctionType, MethodType
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler
from typing_extensions import override

from trainkit.basics.device import memory_of
from trainkit.basics.outside import Outside, functions_of, is_users
from trainkit.basics.rng import is_generator, new_like, set_state, state_of
from trainkit.basics.torch_internals import (
    buffers_of,
    is_saved,
    parameters_of,
    tree_leaves,
)
from trainkit.checkpoint.forms import Unfit, check_form
from trainkit.checkpoint.resharding.sharding_spec import local_part
from trainkit.data import PreparedLoader
from trainkit.data.own_generators import generators_in
from trainkit.data.stream_start import is_stateful
from trainkit.data.workers import datasets_of
from trainkit.errors import quoted

Entries = dict[str, dict[str, Any]]
"""What was saved, by owner and attribute."""

_OF_EVERY_MODULE = vars(nn.Module()).keys() - {"training"}
_EXTRA_STATE = nn.Module.get_extra_state
_WITH_STATES = (DataLoader, Dataset, LRScheduler, Optimizer, Sampler)
_STEP = "training_step"
_GENERATOR = "generator "  # before the number of one that is found in a data set
_TRAINABLE = ".requires_grad"  # behind the name of a parameter
_MOST = 10_000  # values in one attribute: what has more is data
_SCALARS = (type(None), bool, int, float, complex, str)
_CONTAINERS = (list, tuple, dict, deque)
_MOST_HELD = 64  # modules in a list or dict
_LARGEST = 1 << 20  # bytes of a tensor or array in a data set: what is larger is its data
_ENTRY = {
    "value?": Any,
    "generator?": Any,
    "in_place?": bool,
    "accelerator?": bool,
    "began_as?": Any,
    "deque?": int | None,
}


class Attributes:
    """Saves the attributes that have changed since a training began, and puts them back.

    Of modules, loss functions and trainers these are numbers, text, tensors, arrays, generators,
    and lists, tuples, dicts and deques of such; of data sets and collate functions the same without
    containers, and small; of samplers tensors and arrays. A function has what it reads from outside
    (`Outside`); an object of a user's class that one of these holds has its attributes. Left alone
    is what a graph has made, and what shares memory with a parameter or a buffer.

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
        self._before: dict[str, dict[str, Any]] = {}
        self._loaded: Entries = {}
        self._at_start: Entries = {}  # of the pass that is under way

    def begin(self, device: torch.device) -> None:
        """Note what there is, then put back what was loaded; `device` is that of the model."""
        owners = {name: (owner, values) for name, owner, values in self._looked_at()}
        for name, (_, values) in owners.items():
            self._before[name] = {key: _mark(value) for key, value in values.items()}
        if gone := sorted(self._loaded.keys() - owners.keys()):
            self._say(
                f"trainkit: the checkpoint holds attributes of {quoted(gone)}, which this run does "
                "not have. They are left out."
            )
        outside: list[str] = []
        for name in self._loaded.keys() & owners.keys():
            owner, given = owners[name]
            for key, entry in self._loaded[name].items():
                began = entry.get("began_as")
                if "began_as" in entry and key in given and repr(given[key]) != repr(began):
                    self._say(
                        f"trainkit: `{name}.{key}` is {given[key]!r} here, and was {began!r} when "
                        f"the saved run began. It goes on with {entry['value']!r}, as saved."
                    )
                elif name.startswith(_STEP) or isinstance(_attributes(owner), Outside):
                    outside.append(f"{name}.{key}")
                _put_back(owner, key, entry, device)
        if outside:
            self._say(
                "trainkit: globals and closed-over values that the saved run had changed are back "
                f"as it left them: {quoted(sorted(outside))}. (Of what a callback holds, only its "
                "`state_dict` comes back.)"
            )

    def begin_pass(self) -> None:
        """Note what the data sets are that are read from here on."""
        if self._streams:
            self._at_start = {}
            found = self.state_dict()
            now = {name: found.get(name, {}) for name in self._streams}
            self._at_start = copy.deepcopy(now)  # which the pass goes on to change

    def state_dict(self) -> Entries:
        """Return what has changed."""
        found: Entries = {}
        for name, _, values in self._looked_at():
            before, loaded = self._before.get(name, {}), self._loaded.get(name, {})
            marks = {key: _mark(value) for key, value in values.items()}
            found[name] = {
                key: _entry(values[key], before.get(key), _is_same_tensor(before.get(key), mark))
                for key, mark in marks.items()
                if key in loaded or mark != before.get(key)
            }
        found |= self._at_start
        return {name: entries for name, entries in found.items() if entries}

    def check_state_dict(self, state: Any) -> None:
        """Raise `Unfit` for what `state_dict` cannot have returned."""
        check_form(state, {str: {str: _ENTRY}})
        for name, owner, values in self._looked_at():
            is_object = not isinstance(_attributes(owner), Outside)
            for key, entry in state.get(name, {}).items():
                is_method = is_object and callable(getattr(type(owner), key, None))
                if is_method or key in _OF_EVERY_MODULE:
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

    def _looked_at(self) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        """Yield each owner by its name, with the attributes of it that can be saved."""
        modules = dict(self._model.named_modules(prefix="model"))
        held = (*self._model.parameters(), *self._model.buffers())
        parts = map(local_part, held)
        memory = {each.untyped_storage().data_ptr() for each in parts if _is_dense(each)}
        for name, module in modules.items():
            values = _plain_values(module, memory)
            values |= _frozen(module) | {
                key: buffer
                for key, buffer in buffers_of(module).items()
                if not is_saved(module, key) and _is_plain(buffer, ())
            }
            yield name, module, values
        if not isinstance(self._loss_fn, nn.Module):
            yield "loss_fn", self._loss_fn, _plain_values(self._loss_fn, memory)
        for name, owner in self._apart(modules):
            values = _plain_values(owner, memory)
            if isinstance(owner, nn.Module):
                own = {**parameters_of(owner), **buffers_of(owner)}.items()
                values |= _frozen(owner) | {k: v for k, v in own if _is_plain(v, ())}
            yield name, owner, values
        for name, other in self._others.items():
            found = _plain_values(other, memory)
            if name in ("trainer", _STEP):
                found.pop("planned_steps", None)  # which each `fit` sets anew
            elif name.endswith("sampler"):  # its counters follow the epochs
                found = {k: v for k, v in found.items() if isinstance(v, Tensor) or _is_array(v)}
            else:
                found = {k: v for k, v in found.items() if _is_small(v)}
            if name in self._streams:  # others draw under the keys of their samples
                found |= _own_generators(other)
            yield name, other, found

    def _apart(self, modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, Any]]:
        """Yield modules, and objects of a user's classes, that are no part of the model.

        These are the loss, and what it, the modules, the trainer and its step hold or read.
        """
        waiting: list[tuple[str, Any]] = [*modules.items()]
        waiting += [(n, self._others[n]) for n in ("trainer", _STEP) if n in self._others]
        if not isinstance(self._loss_fn, nn.Module):
            waiting.append(("loss_fn", self._loss_fn))
        known = [*self._registered, *self._others.values(), *(owner for _, owner in waiting)]
        seen = {id(each) for each in known}

        def new(value: Any, name: str) -> Iterator[tuple[str, Any]]:
            for found in _owners_in(value, name):
                if id(found[1]) not in seen:
                    seen.add(id(found[1]))
                    waiting.append(found)
                    yield found

        yield from new(self._loss_fn, "loss_fn")
        while waiting:
            name, owner = waiting.pop(0)
            for key, value in _attributes(owner).items():
                held: dict[Any, Any] = {"": value}
                if type(value) in (list, tuple):
                    held = dict(enumerate(value[:_MOST_HELD]))
                elif type(value) is dict:
                    held = value if len(value) <= _MOST_HELD else {}
                for place, each in () if key in _OF_EVERY_MODULE else held.items():
                    yield from new(each, f"{name}.{key}.{place}".rstrip("."))


def _own_generators(dataset: Any) -> dict[str, Any]:
    return {f"{_GENERATOR}{index}": each for index, each in enumerate(generators_in(dataset))}


def _owners_in(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, nn.Module):
        yield from value.named_modules(prefix=name)
    elif (
        is_users(type(value))
        and not isinstance(value, (type, *_WITH_STATES))
        and not hasattr(value, "on_fit_start")  # what callbacks hold is theirs to save
    ):
        yield name, value


def _is_small(value: Any) -> bool:
    is_one = not isinstance(value, _CONTAINERS) and not is_generator(value)
    return is_one and bool(getattr(value, "nbytes", 0) <= _LARGEST)


def _plain_values(owner: Any, memory: Collection[int]) -> dict[str, Any]:
    if isinstance(owner, nn.Module) and type(owner).get_extra_state is not _EXTRA_STATE:
        return {}  # it says itself what is saved of it
    values = _attributes(owner).items()
    return {k: v for k, v in values if k not in _OF_EVERY_MODULE and _is_plain(v, memory)}


def _attributes(owner: Any) -> MutableMapping[str, Any]:
    """Return the attributes of an object, or what functions read, to be read and set."""
    if isinstance(owner, Outside):
        return owner
    if isinstance(owner, FunctionType | partial):
        return Outside(owner)
    attributes: dict[str, Any] = {} if isinstance(owner, type) else getattr(owner, "__dict__", {})
    return attributes


def _frozen(module: nn.Module) -> dict[str, Any]:
    parameters = parameters_of(module).items()
    return {f"{key}{_TRAINABLE}": p.requires_grad for key, p in parameters if p is not None}


def _is_plain(value: Any, memory: Collection[int]) -> bool:
    """Return whether a value can be saved, and is one of its own."""
    waiting, count = [value], 0
    while waiting:
        found = waiting.pop()
        count += 1
        if count > _MOST:
            return False
        if type(found) is dict:
            if not all(type(key) in _SCALARS for key in found):
                return False
            waiting += found.values()
        elif type(found) in (list, tuple, deque):
            waiting += found
        elif isinstance(found, Tensor):
            if not _is_dense(found) or found.is_meta or found.grad_fn is not None:
                return False
            if found.untyped_storage().data_ptr() in memory:
                return False
        elif type(found) not in _SCALARS and not _is_array(found):
            return found is value and is_generator(found)
    return True


def _is_dense(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def _is_array(value: Any) -> bool:
    kind = type(value)
    return kind.__module__ == "numpy" and hasattr(value, "dtype") and not value.dtype.hasobject


class _TensorMark:
    """Tells whether a tensor has the same value, and is the same object.

    Its version would not do: what is changed by way of `.data` counts none.
    """

    def __init__(self, tensor: Tensor) -> None:
        value = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        self.tensor = ref(tensor)
        self.value = tensor.dtype, tensor.shape, blake2b(memory_of(value)).digest()

    __hash__ = None  # type: ignore[assignment]

    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _TensorMark) and self.value == other.value


def _is_same_tensor(one: Any, other: Any) -> bool:
    """Return whether two marks are those of one tensor."""
    are_tensors = isinstance(one, _TensorMark) and isinstance(other, _TensorMark)
    return are_tensors and one.tensor() is not None and one.tensor() is other.tensor()


def _mark(value: Any) -> Any:
    """Return what is equal where a value has not changed."""
    if isinstance(value, Tensor):
        return _TensorMark(value)
    if isinstance(value, dict):
        return dict, tuple((key, _mark(inner)) for key, inner in value.items())
    if isinstance(value, list | tuple | deque):
        return type(value), tuple(map(_mark, value))
    if is_generator(value):
        state = state_of(value)
        return bytes(state.tolist()) if isinstance(state, Tensor) else _mark(state)
    if _is_array(value):
        return str(value.dtype), value.shape, value.tobytes()
    return type(value), value


def _entry(value: Any, before: Any, in_place: bool) -> dict[str, Any]:
    """Return what is saved of a value; `before` is its mark when the training began."""
    if is_generator(value):
        return {"generator": state_of(value)}
    entry: dict[str, Any] = {"value": _moved(value, None), "in_place": in_place}
    if isinstance(before, tuple) and before[0] in _SCALARS:
        entry["began_as"] = before[1]
    if isinstance(value, deque):
        entry |= {"value": list(value), "deque": value.maxlen}
    if not all(tensor.is_cpu for tensor in tree_leaves(value) if isinstance(tensor, Tensor)):
        entry["accelerator"] = True
    return entry


def _put_back(owner: Any, key: str, entry: Mapping[str, Any], device: torch.device) -> None:
    """Let an owner have what was saved of it."""
    if key.endswith(_TRAINABLE):
        parameter = parameters_of(owner).get(key.removesuffix(_TRAINABLE))
        if parameter is not None:
            parameter.requires_grad_(entry["value"])
        return
    values = _attributes(owner)
    if isinstance(owner, nn.Module) and key not in values:
        kinds: tuple[Any, ...] = (buffers_of(owner), parameters_of(owner))
        values = next((kind for kind in kinds if key in kind), values)
    present: Any = values.get(key)
    if "generator" in entry:
        if key.startswith(_GENERATOR):
            present = _own_generators(owner).get(key)
        if is_generator(present):
            set_state(present, entry["generator"])
        return
    value = entry["value"]
    if "accelerator" in entry:
        value = _moved(value, device)
    if "deque" in entry:
        value = deque(value, entry["deque"])
    are_tensors = isinstance(present, Tensor) and isinstance(value, Tensor)
    stays = entry.get("in_place") or isinstance(present, nn.Parameter)
    if are_tensors and stays and present.shape == value.shape:
        with torch.no_grad():
            present.copy_(value)
    elif type(present) is type(value) is dict:  # others may hold it, too
        present.clear()
        present.update(value)
    elif type(present) is type(value) is list:
        present[:] = value
    else:
        values[key] = value


def _moved(value: Any, device: torch.device | None) -> Any:
    """Return a value, its tensors without gradients, and on a device if one is given."""
    if isinstance(value, Tensor):
        return value.detach() if device is None else value.to(device)
    if isinstance(value, dict):
        return {key: _moved(inner, device) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_moved(inner, device) for inner in value)
    return value


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
    kinds = dict.fromkeys(map(type, (trainer, loss_fn, *module.modules())))
    objects[_STEP] = Outside(*(f for kind in kinds for f in functions_of(kind)))
    streams = []
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
