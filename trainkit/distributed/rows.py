"""Values with one entry for each sample: check them, cut them, and put them together.

The entries of a value are found like this, for a batch of n samples (`parse`):

- A tensor or array has n as its first dimension; its rows are the entries.
- A dict, data class, named tuple or mapping is a container: the values in it have the entries.
- A list or tuple is a container if everything in it has one entry for each sample, and holds the
  entries itself if it is n long: texts, tensors of any shapes, objects.
- None inside a container stays None. Anything else has no entries and is refused.

A list or tuple may pass for both: three tensors of three rows in a batch of three. Then the
other batches that are put together with it decide: one that passes for only one of the two is
enough. If there is none, what the same place held before decides (`memory`), and at last the
look: a tuple is a container; a list is one if it is at least two long and holds different kinds
of things, or nothing but tensors, arrays and lists of such. A tuple is never taken wrongly for
entries, so `(predictions, references)` is the form to prefer.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainkit.distributed import classes
from trainkit.errors import DataError

__all__ = [
    "Container",
    "Either",
    "Memory",
    "Merge",
    "Node",
    "Nothing",
    "Origin",
    "Rows",
    "Samples",
    "cut",
    "from_plain",
    "join",
    "parse",
    "split",
    "to_plain",
]

Memory = dict[str, str]
"""What ambiguous places held before, by path; equal on all processes."""


@dataclass(slots=True)
class Rows:
    """A tensor or array whose rows are the entries."""

    values: Any


@dataclass(slots=True)
class Samples:
    """A list or tuple whose items are the entries."""

    items: list[Any]
    is_tuple: bool


@dataclass(slots=True)
class Either:
    """A list or tuple of n items with n entries each; never cut, as the entries are unknown."""

    items: list[Any]
    is_tuple: bool
    count: int  # entries that are real


@dataclass(slots=True)
class Container:
    """Values under keys, and the name of the class that holds them."""

    class_name: str
    keys: list[Any]
    children: list[Any]  # nodes


@dataclass(slots=True)
class Nothing:
    """A None."""


Node = Rows | Samples | Either | Container | Nothing


def parse(value: Any, size: int, path: str, known: dict[str, type]) -> Node:
    """Return where the entries of `value` are.

    Args:
        value: Any nesting of containers.
        size: Samples of the batch: the entries that must be there.
        path: Names `value` in errors.
        known: Takes up the classes of the containers, by name.

    Raises:
        DataError: Something in `value` has not `size` entries.
    """
    if is_array(value):
        if value.ndim == 0 or value.shape[0] != size:
            raise _no_entries(value, size, path)
        return Rows(value)
    taken = classes.parts(value)
    if taken is not None:
        keys, values = taken
        children = [
            _parse_child(child, size, f"{path}[{key!r}]", known)
            for key, child in zip(keys, values, strict=True)
        ]
        return Container(_name(type(value), known), keys, children)
    if isinstance(value, list | tuple):
        return _parse_sequence(value, size, path, known)
    raise _no_entries(value, size, path)


def is_array(value: Any) -> bool:
    """Return whether `value` is a tensor or a NumPy array."""
    if isinstance(value, Tensor):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _parse_child(value: Any, size: int, path: str, known: dict[str, type]) -> Node:
    return Nothing() if value is None else parse(value, size, path, known)


def _parse_sequence(
    value: list[Any] | tuple[Any, ...], size: int, path: str, known: dict[str, type]
) -> Node:
    fits = len(value) == size
    is_tuple = isinstance(value, tuple)
    try:
        container = _as_container(value, size, path, known)
    except DataError as error:
        if fits:
            return Samples(list(value), is_tuple)
        if any(is_array(item) or classes.parts(item) for item in value):
            raise error
        raise _no_entries(value, size, path) from None
    return Either(list(value), is_tuple, size) if fits else container


def _as_container(
    value: list[Any] | tuple[Any, ...], size: int, path: str, known: dict[str, type]
) -> Container:
    children = [
        _parse_child(item, size, f"{path}[{index}]", known) for index, item in enumerate(value)
    ]
    if all(isinstance(child, Nothing) for child in children):
        raise _no_entries(value, size, path)
    cls = tuple if isinstance(value, tuple) else list
    return Container(_name(cls, known), list(range(len(value))), children)


def _name(cls: type, known: dict[str, type]) -> str:
    name = f"{cls.__module__}:{cls.__qualname__}"
    known[name] = cls
    return name


def _no_entries(value: Any, size: int, path: str) -> DataError:
    samples = f"{size} sample{'s' * (size != 1)}"
    return DataError(
        f"`{path}` is {_description(value)}, but the batch has {samples}, and it must hold one "
        "entry for each. Return the values of the single samples; for a mean over the batch, "
        "return the sums and counts, or call `run.log(value, weight=n)`."
    )


def _description(value: Any) -> str:
    name = type(value).__name__
    if is_array(value):
        return f"a {name} of shape {tuple(value.shape)}"
    if isinstance(value, list | tuple):
        return f"a {name} of length {len(value)}"
    return f"the {name} {value!r}" if isinstance(value, int | float) else f"a {name}"


def cut(node: Node, count: int) -> Node:
    """Return the first `count` entries of `node`."""
    if isinstance(node, Rows):
        return node if node.values.shape[0] == count else Rows(node.values[:count])
    if isinstance(node, Samples):
        return Samples(node.items[:count], node.is_tuple)
    if isinstance(node, Either):
        return Either(node.items, node.is_tuple, count)
    if isinstance(node, Container):
        children = [cut(child, count) for child in node.children]
        return Container(node.class_name, node.keys, children)
    return node


def join(nodes: Sequence[Node]) -> Node | None:
    """Return one node with the entries of several, in order; None where they are not alike.

    They are if they hold nothing but tensors, of one dtype and shape but for the first dimension.
    """
    first = nodes[0]
    if isinstance(first, Rows):
        tensors = [node.values for node in nodes if isinstance(node, Rows)]
        alike = len(tensors) == len(nodes) and len({*map(_row_form, tensors)}) == 1
        return Rows(torch.cat(tensors)) if alike and isinstance(first.values, Tensor) else None
    if isinstance(first, Container):
        same = [n for n in nodes if isinstance(n, Container) and n.class_name == first.class_name]
        if len(same) < len(nodes) or any(node.keys != first.keys for node in same):
            return None
        columns = zip(*(node.children for node in same), strict=True)
        children = [join(column) for column in columns]
        whole = all(child is not None for child in children)
        return Container(first.class_name, first.keys, children) if whole else None
    return first if all(isinstance(node, Nothing) for node in nodes) else None


def _row_form(values: Any) -> Any:
    return type(values), values.dtype, getattr(values, "device", None), values.shape[1:]


def split(node: Node, sizes: Sequence[int]) -> Sequence[Node]:
    """Return the nodes that `join` put together, from the number of entries in each."""
    if isinstance(node, Rows):
        return [Rows(values) for values in node.values.split(list(sizes))]
    if isinstance(node, Container):
        columns = [split(child, sizes) for child in node.children]
        rows = zip(*columns, strict=True) if columns else [()] * len(sizes)
        return [Container(node.class_name, node.keys, list(row)) for row in rows]
    return [node] * len(sizes)


def to_plain(node: Node) -> tuple[Any, ...]:
    """Return a node in built-in types, which travel faster than data classes."""
    if isinstance(node, Container):
        return "container", node.class_name, node.keys, [to_plain(n) for n in node.children]
    if isinstance(node, Rows):
        return "rows", node.values
    if isinstance(node, Samples):
        return "samples", node.items, node.is_tuple
    if isinstance(node, Either):
        return "either", node.items, node.is_tuple, node.count
    return ("nothing",)


def from_plain(plain: tuple[Any, ...]) -> Node:
    """Return the node that `to_plain` was given."""
    kind, *fields = plain
    if kind == "container":
        return Container(fields[0], fields[1], [from_plain(child) for child in fields[2]])
    node: Node = _KINDS[kind](*fields)
    return node


_KINDS: dict[str, Any] = {"rows": Rows, "samples": Samples, "either": Either, "nothing": Nothing}


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a node comes from, for errors."""

    process: int
    batch: int


@dataclass(slots=True)
class Merge:
    """Puts the entries of several nodes together, in their order.

    Args:
        pad_value: Fills up rows that are smaller than the largest in a later dimension, at the
            end. None: such rows are an error.
        known: Classes of containers by name; others are looked up among imported modules.
        memory: What ambiguous places held before; brought up to date.
    """

    pad_value: float | None = 0
    known: dict[str, type] = field(default_factory=dict)
    memory: Memory = field(default_factory=dict)

    def __call__(self, nodes: Sequence[Node], origins: Sequence[Origin], path: str) -> Any:
        """Return one value with the entries of all `nodes`; at least one is needed."""
        nodes = self._decide(nodes, path)
        shapes = [_shape(node) for node in nodes]
        for shape, origin in zip(shapes, origins, strict=True):
            if shape != shapes[0]:
                raise DataError(
                    f"`{path}` is {_words(nodes[0])} on process {origins[0].process} (batch "
                    f"{origins[0].batch}), but {_words(nodes[origins.index(origin)])} on process "
                    f"{origin.process} (batch {origin.batch}). Return the same structure for "
                    "every batch on all processes."
                )
        return self._merge(nodes, origins, path)

    def _merge(self, nodes: Sequence[Node], origins: Sequence[Origin], path: str) -> Any:
        first = nodes[0]
        if isinstance(first, Container):
            return self._merge_containers(nodes, origins, path)
        if isinstance(first, Rows):
            return self._merge_rows([node.values for node in nodes if isinstance(node, Rows)], path)
        if isinstance(first, Samples):
            lists = [node for node in nodes if isinstance(node, Samples)]
            items = [item for node in lists for item in node.items]
            return tuple(items) if all(node.is_tuple for node in lists) else items
        return None

    def _merge_containers(self, nodes: Sequence[Any], origins: Sequence[Origin], path: str) -> Any:
        first = nodes[0]
        values = []
        for key in first.keys:
            children = [node.children[node.keys.index(key)] for node in nodes]
            values.append(self(children, origins, f"{path}[{key!r}]"))
        cls = self.known.get(first.class_name) or classes.find(first.class_name)
        if cls is None:
            raise DataError(
                f"`{path}` is a `{first.class_name.replace(':', '.')}` on process "
                f"{origins[0].process}, a class that this process does not know. Define it in a "
                "module that all processes import."
            )
        return cls(values) if cls in (list, tuple) else classes.build(cls, first.keys, values)

    def _merge_rows(self, rows: list[Any], path: str) -> Any:
        if len(rows) == 1:
            return rows[0]
        later = [tuple(values.shape[1:]) for values in rows]
        if any(sizes != later[0] for sizes in later):
            if self.pad_value is None:
                raise DataError(
                    f"`{path}` has unequal later dimensions: {sorted(set(later))}. Make them "
                    "equal first, for example with `pad_across_processes(value, dim=1)`."
                )
            largest = tuple(max(sizes) for sizes in zip(*later, strict=True))
            rows = [_padded(values, largest, self.pad_value) for values in rows]
        if isinstance(rows[0], Tensor):
            return torch.cat(rows)
        return sys.modules["numpy"].concatenate(rows)

    def _decide(self, nodes: Sequence[Node], path: str) -> list[Node]:
        """Return the nodes without any that is ambiguous."""
        unclear = [node for node in nodes if isinstance(node, Either)]
        kinds = {type(node) for node in nodes} - {Either}
        if unclear and not kinds:
            as_samples = self._guess(unclear[0], path)
        else:
            as_samples = Samples in kinds
            if kinds & {Samples, Container}:
                self.memory[path] = _kind(next(n for n in nodes if not isinstance(n, Either)))
        return [self._clear(node, as_samples, path) for node in nodes]

    def _guess(self, node: Either, path: str) -> bool:
        """Return whether a node that passes for both holds the entries itself."""
        before = self.memory.get(path)
        if before == "samples":
            return True
        if before == f"container of {len(node.items)}" or node.is_tuple:
            return False
        kinds = {_look(item) for item in node.items}
        return len(node.items) < 2 or not (len(kinds) > 1 or _only_arrays(node.items))

    def _clear(self, node: Node, as_samples: bool, path: str) -> Node:
        if not isinstance(node, Either):
            return node
        if as_samples:
            return Samples(node.items[: node.count], node.is_tuple)
        value = tuple(node.items) if node.is_tuple else node.items
        return cut(_as_container(value, len(value), path, self.known), node.count)


def _look(value: Any) -> Any:
    """Return the kind of thing that `value` is, without sizes."""
    if is_array(value):
        return "array"
    taken = classes.parts(value)
    if taken is not None:
        return type(value), tuple(taken[0])
    if isinstance(value, list | tuple):
        return type(value), frozenset(map(_look, value))
    return type(value)


def _only_arrays(value: Any) -> bool:
    if isinstance(value, list | tuple) and classes.parts(value) is None:
        return all(map(_only_arrays, value))
    return is_array(value)


def _kind(node: Node) -> str:
    return f"container of {len(node.keys)}" if isinstance(node, Container) else "samples"


def _shape(node: Node) -> tuple[Any, ...]:
    """Return what must be equal for nodes to be put together."""
    if isinstance(node, Rows):
        return ("tensor" if isinstance(node.values, Tensor) else "array", node.values.ndim)
    if isinstance(node, Container):
        return (node.class_name, frozenset(node.keys))
    return (type(node),)


def _words(node: Node) -> str:
    """Describe a node for errors."""
    if isinstance(node, Rows):
        return f"a {type(node.values).__name__} of {node.values.ndim} dimensions"
    if isinstance(node, Container):
        name = node.class_name.split(":")[-1]
        return f"a {name} with the keys {_listed(node.keys)}"
    return "None" if isinstance(node, Nothing) else "a list of one entry per sample"


def _listed(keys: Iterable[Any]) -> str:
    return ", ".join(repr(key) for key in keys) or "(none)"


def _padded(values: Any, later: tuple[int, ...], pad_value: float) -> Any:
    """Return the rows filled up at the end of later dimensions."""
    shape = (values.shape[0], *later)
    if tuple(values.shape) == shape:
        return values
    if isinstance(values, Tensor):
        full = values.new_full(shape, pad_value)
    else:
        full = sys.modules["numpy"].full(shape, pad_value, dtype=values.dtype)
    full[tuple(slice(size) for size in values.shape)] = values
    return full
