"""Turn what travels between processes into bytes and back, exactly, without pickle (rule 28).

A message is JSON, as `json_form` makes it, and behind it the bytes of tensors, arrays and strings.
Beside what that holds there are object arrays, and by their parts named tuples, data classes and
mappings of other classes, such as those of transformers. Classes are looked up among the modules
already imported, never imported.
"""

import json
import math
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from trainkit.basics.device import memory_of
from trainkit.containers import tree
from trainkit.containers.json_form import MALFORMED, Decoder, Encoder
from trainkit.errors import DistributedError

_HEADER = 8  # bytes in front, which tell the length of the JSON


class Unencodable(TypeError):
    """A value that cannot be turned into bytes.

    Args:
        reason: A full sentence on what is in the way and what to do.
        keys: Where it stands in the value, from the outside.
    """

    def __init__(self, reason: str, keys: list[Any]) -> None:
        path = "".join(f"[{key!r}]" for key in keys[:8]) + "..." * (len(keys) > 8)
        super().__init__(f"At `value{path}`: {reason}" if keys else reason)
        self.reason = reason


def encode(value: Any, *, allow_pickle: bool = False) -> bytes:
    """Return `value` as bytes.

    Args:
        value: What to encode. Tensors are copied from their device; their graph is left out.
        allow_pickle: Whether objects that have no form of their own are pickled.

    Raises:
        Unencodable: Something in `value` has no form, or is nested too deep.
    """
    encoder = _Encoder(allow_pickle)
    form = encoder.put(value)
    head = json.dumps([form, [blob.nbytes for blob in encoder.blobs]]).encode()
    return b"".join([len(head).to_bytes(_HEADER, "little"), head, *encoder.blobs])


def decode(data: bytes, *, device: torch.device | None = None, allow_pickle: bool = False) -> Any:
    """Return the value that `encode` turned into `data`.

    Args:
        data: What `encode` returned, here or in another process of the job.
        device: Where tensors go that were not on the CPU; the CPU by default.
        allow_pickle: Whether pickled objects in `data` are accepted.
    """
    begin = _HEADER + int.from_bytes(data[:_HEADER], "little")
    try:
        form, sizes = json.loads(bytes(data[_HEADER:begin]))
        ends = list(accumulate(sizes, initial=begin))
        if any(type(size) is not int or size < 0 for size in sizes) or ends[-1] != len(data):
            raise ValueError(f"there are {len(data)} bytes, not {ends[-1]}")
        view = memoryview(data)
        blobs = [view[first:last] for first, last in pairwise(ends)]
        return _Decoder(blobs, device, allow_pickle).get(form)
    except DistributedError:
        raise
    except MALFORMED as error:
        raise DistributedError(
            f"The bytes that came from another process are damaged: {error}. Make sure that all "
            "processes run the same version of trainkit."
        ) from error


class _Encoder(Encoder):
    """`blobs` collects what stands behind the JSON."""

    def __init__(self, allow_pickle: bool) -> None:
        super().__init__()
        self.blobs: list[memoryview] = []
        self._allow_pickle = allow_pickle

    @override
    def refused(self, why: str) -> Unencodable:
        return Unencodable(f"It {why}.", self.keys)

    @override
    def store(self, size: int, read: Callable[[], memoryview]) -> int:
        self.blobs.append(read())
        return len(self.blobs) - 1

    @override
    def put_tensor(self, value: Tensor) -> Any:
        if type(value) not in (Tensor, torch.nn.Parameter):
            return self._put_foreign(value)
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            raise Unencodable(
                f"A tensor of layout {value.layout} on {value.device} cannot be sent to other "
                "processes. Make it dense with `to_dense()` or `dequantize()`.",
                self.keys,
            )
        data = memory_of(value.detach().resolve_conj().resolve_neg().cpu().contiguous())
        dtype, is_remote = str(value.dtype).removeprefix("torch."), value.device.type != "cpu"
        blob = self.store(data.nbytes, lambda: data)
        return {"$tensor": [dtype, list(value.shape), blob, is_remote]}

    @override
    def put_array(self, value: Any, tag: str) -> Any:
        if value.dtype.kind == "V":
            return self._put_foreign(value)
        if value.dtype.hasobject:
            items = value.reshape(-1).tolist()
            return {
                "$objects": [list(value.shape), self.put_items(items, range(len(items)), items)]
            }
        return super().put_array(value, tag)

    @override
    def put_other(self, value: Any) -> Any:
        name = tree.name_of(type(value)) if tree.is_named(type(value)) else None
        if name is None or tree.has_more_state(value):
            return self._put_foreign(value)
        keys, values = tree.parts(value)
        return {"$object": [name, self.put(keys), self.put_items(value, keys, values)]}

    def _put_foreign(self, value: Any) -> Any:
        """Return the form of an object that has none but as a pickle, if that may be."""
        name = f"`{type(value).__module__}.{type(value).__qualname__}`"
        if not self._allow_pickle:
            raise Unencodable(
                f"A {name} cannot be sent to other processes without pickle. Turn it into numbers, "
                "text, tensors, lists, dicts or a data class defined in a module; or gather it "
                "with `use_gather_object=True`, which pickles.",
                self.keys,
            )
        import pickle

        try:
            data = memoryview(pickle.dumps(value))
        except Exception as error:
            raise Unencodable(
                f"A {name} cannot be pickled: {error}. Turn it into numbers, text, tensors, lists "
                "or dicts.",
                self.keys,
            ) from error
        return {"$pickle": self.store(data.nbytes, lambda: data)}


class _Decoder(Decoder):
    def __init__(
        self, blobs: list[memoryview], device: torch.device | None, allow_pickle: bool
    ) -> None:
        super().__init__()
        self._blobs = blobs
        self._device = device
        self._allow_pickle = allow_pickle

    @override
    def blob(self, name: int) -> memoryview:
        return self._blobs[name]

    def _get_tensor(self, node: Any) -> Tensor:
        name, shape, blob, is_remote = node
        dtype = self.get_dtype(name)
        raw = bytearray(self.blob(blob))  # a copy: aligned, writable, its own
        if len(raw) != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{len(raw)} bytes cannot be {shape} of {dtype}")
        if raw:
            tensor = torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(shape)
        else:
            tensor = torch.empty(shape, dtype=dtype)
        return tensor.to(self._device) if is_remote and self._device is not None else tensor

    def _get_objects(self, node: Any) -> Any:
        import numpy

        shape, items = node
        return numpy.fromiter(self.get(items), object, len(items)).reshape(shape)

    def _get_object(self, node: Any) -> Any:
        name, keys, values = node
        cls = tree.class_named(name)
        if cls is None:
            raise DistributedError(
                f"Another process sent a `{name.replace(':', '.')}`, but no module imported in "
                "this process has that class. Import it on all processes."
            )
        if not tree.is_named(cls):
            raise ValueError(f"`{cls.__qualname__}` is not a container")
        return tree.build(cls, self.get_sequence(keys), self.get_sequence(values))

    def _get_pickle(self, blob: Any) -> Any:
        if not self._allow_pickle:
            raise DistributedError(
                "Another process sent a pickled object, which runs code, and this call takes none. "
                "Pass `use_gather_object=True` on all processes."
            )
        import pickle

        try:
            return pickle.loads(self.blob(blob))
        except Exception as error:
            raise DistributedError(
                f"An object that another process pickled cannot be read: {error!r}. Import on all "
                "processes what it is made of."
            ) from error

    readers = Decoder.readers | {
        "$object": _get_object,
        "$objects": _get_objects,
        "$pickle": _get_pickle,
        "$tensor": _get_tensor,
    }
