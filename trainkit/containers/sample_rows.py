"""Values with one entry for each sample: check them, cut them, and put them together.

Where the entries are is decided by the types in a value alone, never by its sizes nor by what was
gathered before (`parse`):

- A tensor or array has them as its rows.
- A dict, data class, named tuple or mapping holds fields: the values in it have the entries.
- A tuple holds fields too, if there is a tensor, list or other container in it. One of single
  things only, such as texts or numbers, has them as its items.
- A list holds fields if there is a tensor in it, directly or inside lists and tuples. Any other
  has them as its items: texts, numbers, lists of tokens, dicts, objects.
- None among fields stays None. Anything else has no entries and is refused.

So `(predictions, references)` are fields whatever they are. A list with one tensor for each sample
is said to be so by the caller (`use_gather_object`), or is a list of dicts.
"""

import functools
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainkit.containers.tree import build, class_named, is_array, is_named, parts
from trainkit.errors import DataError
from trainkit.types import IGNORED


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
class Container:
    """Values under keys, and the name of the class that holds them."""

    class_name: str
    keys: list[Any]
    children: list[Any]  # nodes


@dataclass(slots=True)
class Nothing:
    """A None."""


Node = Rows | Samples | Container | Nothing


def parse(value: Any, size: int | None, path: str, known: dict[str, type]) -> Node:
    """Return where the entries of `value` are.

    Args:
        size: Samples of the batch: the entries that must be there. None: any number, and a tensor
            without dimensions has one.
        path: Names `value` in errors.
        known: Takes up the classes of the containers, by name.
    """
    if is_array(value):
        if hasattr(value, "filled"):
            raise DataError(
                f"`{path}` is a masked array, whose mask would be lost. Gather `{path}.data` and "
                f"`{path}.mask`, or `{path}.filled(...)`."
            )
        if size is None:
            return Rows(value if value.ndim else value.reshape(1))
        if value.ndim == 0 or value.shape[0] != size:
            raise _no_entries(value, size, path)
        return Rows(value)
    if is_named(type(value)):
        return _as_container(type(value), *parts(value), size, path, known)
    if not isinstance(value, list | tuple):
        raise _no_entries(value, size, path)
    if not holds_fields(value):
        return as_samples(value, size, path)
    cls = tuple if isinstance(value, tuple) else list
    try:
        return _as_container(cls, *parts(value), size, path, known)
    except DataError as error:
        if len(value) == size:
            raise DataError(f"{error} {_other_reading(value, path)}") from None
        raise


def as_samples(value: Any, size: int | None, path: str) -> Samples:
    """Return a list or tuple as one entry for each sample, whatever it holds."""
    if not isinstance(value, list | tuple):
        raise _no_entries(value, size, path)
    if size is not None and len(value) != size:
        error = _no_entries(value, size, path)
        if any(isinstance(item, list | tuple) or is_named(type(item)) for item in value):
            raise DataError(f"{error} Fields side by side are a tuple: `tuple({path})`.")
        raise error
    return Samples(list(value), isinstance(value, tuple))


def holds_fields(value: list[Any] | tuple[Any, ...]) -> bool:
    """Return whether a list or tuple holds fields side by side, and not one entry per sample."""
    if isinstance(value, tuple):
        return any(
            is_array(item) or isinstance(item, list | tuple) or is_named(type(item))
            for item in value
        )
    return any(map(_has_arrays, value))


def _has_arrays(value: Any) -> bool:
    if isinstance(value, list | tuple) and not is_named(type(value)):
        return any(map(_has_arrays, value))
    return is_array(value)


def _as_container(
    cls: type,
    keys: list[Any],
    values: list[Any],
    size: int | None,
    path: str,
    known: dict[str, type],
) -> Container:
    children = [
        Nothing() if child is None else parse(child, size, f"{path}[{key!r}]", known)
        for key, child in zip(keys, values, strict=True)
    ]
    name = f"{cls.__module__}:{cls.__qualname__}"
    known[name] = cls
    return Container(name, keys, children)


def _no_entries(value: Any, size: int | None, path: str) -> DataError:
    if size is None:
        return DataError(
            f"`{path}` is {_description(value)}, but must be a tensor, an array or a list, or a "
            "nesting of them. Put a single value in a list."
        )
    samples = f"{size} sample{'s' * (size != 1)}"
    return DataError(
        f"`{path}` is {_description(value)}, but the batch has {samples}, and it must hold one "
        "entry for each. Return the values of the single samples; for a mean over the batch, "
        "return the sums and counts, or call `run.log(value, weight=n)`."
    )


def _other_reading(value: list[Any] | tuple[Any, ...], path: str) -> str:
    """Return what to do where fields were meant to be the entries of the samples."""
    word = "tuple" if isinstance(value, tuple) else "list"
    if not any(map(_has_arrays, value)):
        way = f"write `list({path})`"
    else:
        way = (
            f"write `[{{'value': entry}} for entry in {path}]`, or give the list alone with "
            "`use_gather_object=True`"
        )
    return (
        f"`{path}` is a {word} of fields, each of which has an entry for each sample. If its "
        f"{len(value)} items are the entries, {way}."
    )


def _description(value: Any) -> str:
    name = type(value).__name__
    if is_array(value):
        return f"a {name} of shape {tuple(value.shape)}"
    if isinstance(value, list | tuple):
        return f"a {name} of length {len(value)}"
    return f"the {name} {value!r}" if isinstance(value, int | float) else f"a {name}"


def cut(node: Node, stop: int, start: int = 0) -> Node:
    """Return the entries of `node` from `start` up to `stop`."""
    if isinstance(node, Rows):
        whole = start == 0 and node.values.shape[0] == stop
        return node if whole else Rows(node.values[start:stop])
    if isinstance(node, Samples):
        return Samples(node.items[start:stop], node.is_tuple)
    if isinstance(node, Container):
        children = [cut(child, stop, start) for child in node.children]
        return Container(node.class_name, node.keys, children)
    return node


def join(nodes: Sequence[Node]) -> Node | None:
    """Return one node with the entries of several, in order; None where they are not alike.

    They are if they hold nothing but tensors, of one dtype and shape but for the first dimension.
    """
    first = nodes[0]
    if isinstance(first, Rows):
        tensors = [node.values for node in nodes if isinstance(node, Rows)]
        forms = {(type(v), v.dtype, getattr(v, "device", None), v.shape[1:]) for v in tensors}
        alike = len(tensors) == len(nodes) and len(forms) == 1
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


def split(node: Node, sizes: Sequence[int]) -> Sequence[Node]:
    """Return the nodes that `join` put together, from the number of entries in each."""
    if isinstance(node, Rows):
        return [Rows(values) for values in node.values.split(list(sizes))]
    if isinstance(node, Container):
        columns = [split(child, sizes) for child in node.children]
        rows = zip(*columns, strict=True) if columns else [()] * len(sizes)
        return [Container(node.class_name, node.keys, list(row)) for row in rows]
    return [node] * len(sizes)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a node comes from, for errors."""

    process: int
    batch: int


@dataclass(slots=True)
class Merge:
    """Puts the entries of several nodes together, in their order.

    Args:
        known: Classes of containers by name; others are looked up among imported modules.
        pads: Whether rows that are smaller than the largest in a later dimension are filled up at
            the end; otherwise they are an error.
        pad_value: What with. None: -100 for signed integers, NaN for floating and complex
            numbers; rows of other types are an error.
    """

    known: dict[str, type] = field(default_factory=dict)
    pads: bool = True
    pad_value: float | None = None

    def __call__(self, nodes: Sequence[Node], origins: Sequence[Origin], path: str) -> Any:
        """Return one value with the entries of all `nodes`; at least one is needed."""
        shapes = [_shape(node) for node in nodes]
        for shape, origin in zip(shapes, origins, strict=True):
            if shape != shapes[0]:
                raise DataError(
                    f"`{path}` is {_words(nodes[0])} on process {origins[0].process} (batch "
                    f"{origins[0].batch}), but {_words(nodes[origins.index(origin)])} on process "
                    f"{origin.process} (batch {origin.batch}). Return the same structure for "
                    "every batch on all processes."
                )
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
        cls = self.known.get(first.class_name) or class_named(first.class_name)
        if cls is None:
            raise DataError(
                f"`{path}` is a `{first.class_name.replace(':', '.')}` on process "
                f"{origins[0].process}, a class that this process does not know. Define it in a "
                "module that all processes import."
            )
        return cls(values) if cls in (list, tuple) else build(cls, first.keys, values)

    def _merge_rows(self, rows: list[Any], path: str) -> Any:
        if len(rows) == 1:
            return rows[0]
        if any(values.dtype != rows[0].dtype for values in rows):
            # An empty one says nothing.
            rows = [values for values in rows if len(values)] or rows[:1]
            _check_exact({values.dtype for values in rows}, path)
        later = [tuple(values.shape[1:]) for values in rows]
        if any(sizes != later[0] for sizes in later):
            if not self.pads:
                raise DataError(
                    f"`{path}` has unequal later dimensions: {sorted(set(later))}. Make them "
                    "equal first, for example with `pad_across_processes(value, dim=1)`."
                )
            rows = _filled_up(rows, self.pad_value, path)
        if isinstance(rows[0], Tensor):
            return torch.cat(rows)
        return sys.modules["numpy"].concatenate(rows)


def _check_exact(dtypes: Iterable[Any], path: str) -> None:
    """Raise where joined rows have a type that cannot hold each value of their own types."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and all(isinstance(dtype, numpy.dtype) for dtype in dtypes):
        common = numpy.result_type(*dtypes)
        exact = all(numpy.can_cast(dtype, common) for dtype in dtypes)
    else:
        common = functools.reduce(torch.promote_types, dtypes)
        whole = [dtype for dtype in dtypes if not dtype.is_floating_point and not dtype.is_complex]
        is_whole = not common.is_floating_point and not common.is_complex
        exact = is_whole or all(
            dtype == torch.bool or torch.iinfo(dtype).max <= 2 / torch.finfo(common).eps
            for dtype in whole
        )
    if not exact:
        raise DataError(
            f"`{path}` is {', '.join(sorted(map(str, dtypes)))} in some batches or processes. "
            f"Joined they would be {common}, which rounds large whole numbers. Give all of them "
            "one dtype, such as by `.double()` or `.long()`."
        )


def _filled_up(rows: list[Any], pad_value: float | None, path: str) -> list[Any]:
    """Return tensors, or arrays, of one type, as large in later dimensions as the largest.

    Args:
        pad_value: What they are filled up with, at the end; None: what no loss or metric takes
            for data.

    Raises:
        DataError: `pad_value` is needed, or is none of the type.
    """
    is_tensor = isinstance(rows[0], Tensor)
    if is_tensor:
        dtype = functools.reduce(torch.promote_types, [values.dtype for values in rows])
    else:
        dtype = sys.modules["numpy"].result_type(*rows)
    later = tuple(max(sizes) for sizes in zip(*(values.shape[1:] for values in rows), strict=True))
    value = _fill(dtype, pad_value, path)
    filled = []
    for values in rows:
        shape = (values.shape[0], *later)
        if is_tensor:
            full = torch.full(shape, value, dtype=dtype, device=values.device)
        else:
            full = sys.modules["numpy"].full(shape, value, dtype=dtype)
        full[tuple(slice(size) for size in values.shape)] = values
        filled.append(full)
    return filled


def _fill(dtype: Any, pad_value: float | None, path: str) -> Any:
    """Return what rows of `dtype` are filled up with."""
    is_float, is_signed, limits = _kind_of(dtype)
    if pad_value is None:
        if is_float or is_signed:
            return math.nan if is_float else IGNORED
        raise DataError(
            f"`{path}` has rows of different width, and {dtype} has no value that cannot be data. "
            "Say by `pad_value=` what they are filled up with, or make them equally wide first; "
            "where a `Trainer` gathers, do that in `evaluation_step`, or return integers or floats."
        )
    if limits is not None and not (
        pad_value == pad_value // 1 and limits[0] <= pad_value <= limits[1]
    ):
        raise DataError(
            f"`pad_value` is {pad_value}, which {dtype}, the type of `{path}`, cannot hold. Give "
            f"a whole number from {limits[0]} to {limits[1]}."
        )
    return pad_value if limits is None else int(pad_value)


def _kind_of(dtype: Any) -> tuple[bool, bool, tuple[int, int] | None]:
    """Return whether a type is floating or complex, or signed whole numbers, and its limits."""
    if isinstance(dtype, torch.dtype):
        if dtype.is_floating_point or dtype.is_complex:
            return True, True, None
        if dtype is torch.bool:
            return False, False, (0, 1)
        info: Any = torch.iinfo(dtype)
        return False, dtype.is_signed, (info.min, info.max)
    if dtype.kind in "iu":
        info = sys.modules["numpy"].iinfo(dtype)
        return False, dtype.kind == "i", (int(info.min), int(info.max))
    return dtype.kind in "fc", dtype.kind in "fc", (0, 1) if dtype.kind == "b" else None


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
        keys = ", ".join(map(repr, node.keys)) or "(none)"
        return f"a {node.class_name.split(':')[-1]} with the keys {keys}"
    return "None" if isinstance(node, Nothing) else "a list of one entry per sample"
