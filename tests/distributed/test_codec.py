"""Tests of the codec: what goes in comes out, in value and type, and nothing is unpickled."""

import enum
import json
import math
import pickle
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.helpers.needs import needs_transformers
from trainkit.containers.wire_format import Unencodable, decode, encode
from trainkit.errors import DistributedError

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32,
    torch.uint64, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


class Color(enum.Enum):
    RED = 1


Point = namedtuple("Point", ["x", "y"])


@dataclass(frozen=True)
class Frozen:
    name: str
    values: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Slotted:
    value: Any


def round_trip(value: Any) -> Any:
    return decode(encode(value))


_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters()),  # lone surrogates included
    st.binary(),
)
_keys = st.one_of(st.booleans(), st.integers(), st.text(), st.tuples(st.integers(), st.text()))
_values = st.recursive(
    _scalars,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(_keys, inner),
        st.frozensets(_keys),
        st.sets(_keys),
    ),
    max_leaves=10,
)


def bits(value: Any) -> Any:
    """Make NaN and -0.0 comparable."""
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, complex):
        return struct.pack("<dd", value.real, value.imag)
    if isinstance(value, list | tuple):
        return type(value), [bits(item) for item in value]
    if isinstance(value, dict):
        return type(value), [(bits(key), bits(item)) for key, item in value.items()]
    return type(value), value


@given(_values)
@settings(max_examples=150, deadline=None)
def test_built_in_values_come_back_to_the_bit(value: Any) -> None:
    assert bits(round_trip(value)) == bits(value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3)], ids=str)
def test_tensors_of_every_dtype_and_shape_come_back(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    raw = torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(shape)
    back = round_trip(tensor)
    assert back.dtype == dtype
    assert back.shape == tensor.shape
    assert torch.equal(back.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_views_and_graphs_come_back_as_plain_tensors() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    assert torch.equal(round_trip(tensor.t()), tensor.t())
    assert torch.equal(round_trip(tensor[:, 1::2]), tensor[:, 1::2])
    assert torch.equal(round_trip(tensor.expand(4, 2, 3)), tensor.expand(4, 2, 3))
    conjugate = torch.tensor([1 + 2j]).conj()
    assert torch.equal(round_trip(conjugate), conjugate)
    parameter = torch.nn.Parameter(tensor)
    assert type(round_trip(parameter)) is torch.Tensor
    assert not round_trip(parameter * 2).requires_grad


def test_a_single_element_of_any_stride_comes_back() -> None:
    for value in (torch.ones(1, 3)[:, 0], torch.ones(0, 3)[:, 0]):
        assert torch.equal(round_trip(value), value)


def test_decoded_tensors_own_writable_memory() -> None:
    tensor = round_trip([b"x", torch.ones(3)])[1]
    tensor += 1
    assert tensor.data_ptr() % tensor.itemsize == 0


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype="<f4").reshape(2, 3).T,
        np.array(["a", "bcd"]),
        np.array([b"a", b""]),
        np.array("2020-01-01", dtype="M8[ns]"),
        np.array([1, 2], dtype=">i2"),
        np.zeros((0, 3), dtype=bool),
        np.float16(0.1),
        np.int64(-3),
        np.str_("x"),
    ],
    ids=lambda array: str(array.dtype),
)
def test_arrays_and_numpy_scalars_come_back(array: Any) -> None:
    back = round_trip(array)
    assert (type(back), back.dtype, back.shape) == (type(array), array.dtype, array.shape)
    assert np.array_equal(back, array)


def test_object_arrays_come_back_item_by_item() -> None:
    array = np.array([[{"a": 1}, None], ["x", 2.5]], dtype=object)
    assert np.array_equal(round_trip(array), array)


@pytest.mark.parametrize(
    "value",
    [
        OrderedDict(b=1, a=2),
        Counter("aab"),
        defaultdict(list, {1: [2]}),
        defaultdict(None, {1: 2}),
        Point(1, [2]),
        Frozen("a", [1]),
        Slotted({"x": 1}),
        torch.Size([1, 2]),
        bytearray(b"ab"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_containers_keep_their_class(value: Any) -> None:
    back = round_trip(value)
    assert type(back) is type(value)
    assert back == value
    if isinstance(value, defaultdict):
        assert back.default_factory is value.default_factory


@needs_transformers
def test_outputs_of_transformers_keep_class_and_attributes() -> None:
    from transformers import BatchEncoding
    from transformers.modeling_outputs import SequenceClassifierOutput

    output = round_trip(SequenceClassifierOutput(logits=torch.ones(2, 3)))
    assert type(output) is SequenceClassifierOutput
    assert list(output) == ["logits"]
    assert output.loss is None
    assert torch.equal(output["logits"], output[0])
    encoding = round_trip(BatchEncoding({"input_ids": torch.ones(2)}))
    assert type(encoding) is BatchEncoding
    assert torch.equal(encoding["input_ids"], torch.ones(2))


def test_other_objects_are_refused_with_their_place() -> None:
    with pytest.raises(Unencodable, match=r"At `value\['a'\]\[1\]`: A `.*Color` cannot be sent"):
        encode({"a": [1, Color.RED]})


def test_other_objects_travel_by_pickle_only_where_both_sides_allow_it() -> None:
    data = encode([Color.RED, 1], allow_pickle=True)
    assert decode(data, allow_pickle=True) == [Color.RED, 1]
    with pytest.raises(
        DistributedError, match="sent a pickled object, which runs code, and this call"
    ):
        decode(data)


def test_what_cannot_even_be_pickled_says_so() -> None:
    with pytest.raises(Unencodable, match=r"`builtins.function` cannot be pickled"):
        encode([lambda: 1], allow_pickle=True)


def test_local_classes_are_refused() -> None:
    @dataclass
    class Local:
        value: int

    with pytest.raises(Unencodable, match="defined in a module"):
        encode(Local(1))


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(Unencodable, match="contains itself"):
        encode(value)


def test_sparse_tensors_are_refused() -> None:
    with pytest.raises(Unencodable, match="to_dense"):
        encode(torch.eye(2).to_sparse())


def forged(form: Any, *blobs: bytes, sizes: Any = None) -> bytes:
    """Return a message that says what it likes."""
    sizes = [len(blob) for blob in blobs] if sizes is None else sizes
    head = json.dumps([form, sizes]).encode()
    return len(head).to_bytes(8, "little") + head + b"".join(blobs)


def test_no_class_is_built_that_is_not_a_container() -> None:
    data = encode(Frozen("a"))
    with pytest.raises(DistributedError):
        decode(data.replace(b"Frozen", b"Color "))
    for name in ("subprocess:Popen", f"{__name__}:Color", "builtins:eval", "os:system"):
        with pytest.raises(DistributedError, match=r"not a container|no module imported"):
            decode(forged({"$object": [name, ["args"], ["true"]]}))
    nodes: list[Any] = [[], {}, ["a"], [1, [], []], [{}, [], []], [f"{__name__}:Frozen", 1, [2]]]
    for node in nodes:
        with pytest.raises(DistributedError, match="damaged"):
            decode(forged({"$object": node}))


def test_containers_of_other_and_of_many_keys_come_back() -> None:
    for keys in ((1, True, "a"), range(50), map(str, range(50))):
        value = OrderedDict((key, str(key)) for key in keys)
        found = decode(encode(value))
        assert type(found) is OrderedDict
        assert [*map(repr, found.items())] == [*map(repr, value.items())]


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_damaged_bytes_raise_and_never_unpickle(data: st.DataObject) -> None:
    whole = encode({"a": [1, 2.5, "text", torch.ones(2)], "b": (None, {3})})
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(DistributedError):
        decode(whole[:cut])


def test_lengths_are_checked_before_memory_is_taken() -> None:
    for data in (
        b"",
        (1 << 60).to_bytes(8, "little") + b"[null, []]",
        forged(None, sizes=[1 << 60]),
        forged(None, b"ab", sizes=[4, -2]),
        forged(None, b"a", sizes=[0.5, 0.5]),
        forged(None, b"a", sizes=[]),
        forged({"$tensor": ["float32", [1 << 60], 0, False]}, b"abcd"),
        forged({"$tensor": ["float32", [1], 1, False]}, b"abcd"),
        forged({"$tensor": ["load", [1], 0, False]}, b"abcd"),
        forged({"$array": ["<f4", [1 << 60], {"$blob": 0}]}, b"abcd"),
        forged({"$objects": [[1 << 60], [None]]}),
        forged({"$unknown": 1}),
        pickle.dumps(1),
    ):
        with pytest.raises(DistributedError, match="damaged"):
            decode(data)
    for depth in (300, 100_000):
        head = b"[" * depth + b"]" * depth
        with pytest.raises(DistributedError, match="damaged"):
            decode((len(head) + 6).to_bytes(8, "little") + b"[" + head + b", []]")


def test_tensors_of_another_device_go_where_the_receiver_wants_them() -> None:
    from_accelerator = forged({"$tensor": ["float32", [2], 0, True]}, bytes(8))
    assert decode(from_accelerator).device.type == "cpu"
    assert decode(from_accelerator, device=torch.device("meta")).device.type == "meta"
    assert decode(encode(torch.ones(2)), device=torch.device("meta")).device.type == "cpu"


def test_a_long_list_of_numbers_is_exact() -> None:
    values = [math.pi * index for index in range(10_000)]
    assert round_trip(values) == values
