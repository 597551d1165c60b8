"""States come back as they were, or are refused with the place that cannot be kept."""

import dataclasses
import enum
import inspect
import math
import random
import re
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors.torch import load_file
from torch.optim import lr_scheduler

from tests.checkpoint.toys import save_alone
from trainkit.checkpoint import CheckpointStore
from trainkit.checkpoint.format import codec
from trainkit.checkpoint.format.codec import decode, encode
from trainkit.containers.json_form import MALFORMED
from trainkit.errors import CheckpointError


def round_trip(state: Any, directory: Path) -> Any:
    """Return what is read of a state that was saved."""
    store = CheckpointStore(directory)
    path = save_alone(store, 1, {"part": state})
    return store.open(path).read("part")


def assert_same(left: Any, right: Any) -> None:
    """Compare types, values to the last bit, order, and shapes."""
    assert type(left) is type(right), (left, right)
    match left:
        case torch.Tensor() | np.ndarray() | np.generic():
            assert (left.dtype, left.shape) == (right.dtype, right.shape)
            assert _content(left) == _content(right)
        case dict():
            assert getattr(left, "default_factory", 0) is getattr(right, "default_factory", 0)
            assert_same(list(left), list(right))
            assert_same(list(left.values()), list(right.values()))
        case list() | tuple():
            assert len(left) == len(right)
            for one, other in zip(left, right, strict=True):
                assert_same(one, other)
        case float() | complex():
            assert _bits(left) == _bits(right)
        case _:
            assert left == right


def _content(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        flat = value.detach().resolve_conj().contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy().tobytes()
    return bytes(value.tobytes())


def _bits(value: complex) -> bytes:
    return struct.pack("dd", value.real, value.imag)


# What holds less than a byte an element, or needs a scale, has no values of its own.
NO_VALUES = re.compile(r"torch\.(q|bits|u?int[1-7]$)")


DTYPES = sorted(
    {
        dtype
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype) and not NO_VALUES.match(str(dtype))
    },
    key=str,
)

VALUES: dict[str, Any] = {
    "nothing": None,
    "empty dict": {},
    "empty list": [],
    "number": 3,
    "text": "caf\u00e9 \ud800 \0 $",
    "numbers": [True, 0, -1, 2**53, 2**53 + 1, -(2**63), 2**200, -(10**5000), 1.5, -0.0, 1e308],
    "not finite": [math.nan, math.inf, -math.inf, struct.unpack("d", b"\1\0\0\0\0\0\xf8\xff")[0]],
    "complex": complex(math.nan, -0.0),
    "tuples": ((), (1, (2,)), [(3,)]),
    "sets": [set(), {1, 2, "a"}, frozenset({(1, 2)})],
    "bytes": [b"", b"\0\xff", b"x" * 1000, bytearray(b"ab"), bytearray(1000)],
    "keys": {1: "a", "1": "b", (2, "x"): "c", None: "d", 1.5: "e", True + 1: "f", b"k" * 999: "g"},
    "dollar": {"$tensor": "x", "a": {"$dict": []}},
    "lone surrogate key": {"\udcff": 1},
    "counter": Counter({3: 2, "a": -1}),
    "ordered": OrderedDict([("b", 1), ("a", OrderedDict([(2, 3)]))]),
    "default": [defaultdict(int, a=1), defaultdict(list, {1: [2]}), defaultdict(None, a=1)],
    "timedelta": timedelta(days=-1, microseconds=7),
    "torch things": [torch.Size([2, 3]), torch.bfloat16, torch.device("cuda:1")],
    "numpy scalars": [np.float64(1.5), np.int8(-3), np.bool_(True), np.str_("ab"), np.str_("")],
    "numpy dates": [np.datetime64("2020-01-02"), np.timedelta64(3, "ns")],
    "arrays": [np.arange(600).reshape(3, 200).T, np.zeros(()), np.zeros((0, 3)), np.array(["a"])],
    "other arrays": [np.arange(3, dtype=">i4"), np.ones(2, np.complex128), np.ones(2, np.float16)],
    "python random": random.Random(1).getstate(),
    "numpy random": [np.random.RandomState(1).get_state(), np.random.default_rng(1)],
    "torch random": torch.Generator().manual_seed(1).get_state(),
}
VALUES["numpy random"][1] = VALUES["numpy random"][1].bit_generator.state


@pytest.mark.parametrize("name", VALUES)
def test_a_value_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    for index, state in enumerate([VALUES[name], {"a": [VALUES[name]]}]):
        assert_same(round_trip(state, tmp_path / str(index)), state)


@pytest.mark.filterwarnings("ignore:B?Complex(Half|32) support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_of_any_dtype_comes_back_as_it_was(dtype: torch.dtype, tmp_path: Path) -> None:
    raw = torch.arange(240, dtype=torch.uint8) % (2 if dtype == torch.bool else 255)
    flat = raw.view(dtype)
    state = {
        "flat": flat,
        "matrix": flat.reshape(3, -1).clone(),
        "column": flat.reshape(3, -1).clone().t()[:2],
        "turned": flat.reshape(3, -1).clone().t(),
        "single": flat[0].clone(),
        "empty": flat[:0].reshape(0, 4),
    }
    read = round_trip(state, tmp_path)
    assert_same(read, state)
    assert read["turned"].stride() == state["turned"].stride()


def test_views_that_torch_marks_come_back_as_values(tmp_path: Path) -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    state = {
        "conjugated": z.conj(),
        "negated": z.conj().imag.clone(),
        "wide": torch.ones(1).expand(4),
    }
    assert_same(round_trip(state, tmp_path), {key: value.clone() for key, value in state.items()})


def test_a_flat_dict_of_tensors_is_a_plain_safetensors_file(tmp_path: Path) -> None:
    state = torch.nn.LSTM(3, 4, 2).state_dict()
    path = save_alone(CheckpointStore(tmp_path), 1, {"model": state})
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", "model.safetensors"]
    assert_same(
        dict(sorted(load_file(path / "model.safetensors").items())), dict(sorted(state.items()))
    )
    read = CheckpointStore(tmp_path).open(path).read("model")
    assert_same(read, OrderedDict(state))


def test_tensors_that_share_memory_still_share_it_and_are_written_once(tmp_path: Path) -> None:
    weight, buffer = torch.randn(50, 40), torch.arange(20.0)
    state = {
        "embed": weight,
        "head": weight,
        "again": {"turned": weight.t(), "row": weight[3]},
        "left": buffer[:10],
        "right": buffer[10:],
    }
    read = round_trip(state, tmp_path)
    assert_same(read, state)
    size = (tmp_path / "step-00000001" / "part.safetensors").stat().st_size
    assert size < weight.nbytes + buffer.nbytes + 600
    read["embed"].fill_(7.0)
    assert read["head"].eq(7).all()
    assert read["again"]["turned"].eq(7).all()
    assert read["again"]["row"].eq(7).all()
    read["left"].fill_(9.0)
    assert not read["right"].eq(9).any()


def test_tensors_that_share_memory_in_any_order_still_share_it(tmp_path: Path) -> None:
    weight = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    turned = torch.randn(6, 5).t()
    state = {
        "weight": weight,
        "permuted": weight.permute(1, 0, 2, 3),
        "inside": weight[1],
        "row": turned[2],
        "turned": turned,
    }
    read = round_trip(state, tmp_path)
    assert_same(read, state)
    assert [t.stride() for t in read.values()] == [t.stride() for t in state.values()]
    read["weight"].fill_(7.0)
    read["turned"].fill_(7.0)
    assert all(tensor.eq(7).all() for tensor in read.values())


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 4), max_size=5), st.randoms())
def test_strides_come_back_where_they_leave_no_gap(
    tmp_path_factory: pytest.TempPathFactory, shape: list[int], chance: random.Random
) -> None:
    order = chance.sample(range(len(shape)), len(shape))
    tensor = torch.arange(float(np.prod(shape))).reshape(shape).permute(order)
    gap = torch.randn([*tensor.shape, 2])[..., 0]
    directory = tmp_path_factory.mktemp("strides")
    read = round_trip({"a": tensor, "gap": gap}, directory)
    assert torch.equal(read["a"], tensor)
    assert torch.equal(read["gap"], gap)
    steps = zip(read["a"].stride(), tensor.stride(), tensor.shape, strict=True)
    assert not tensor.numel() or all(a == b for a, b, size in steps if size > 1)
    assert read["gap"].is_contiguous()
    plain = load_file(directory / "step-00000001" / "part.safetensors")
    assert torch.equal(plain["a"], tensor)


def test_tensors_that_overlap_by_half_are_refused(tmp_path: Path) -> None:
    buffer = torch.arange(20.0)
    with pytest.raises(CheckpointError, match=r"`part`.*`a` and `b` overlap.*clone"):
        round_trip({"a": buffer[:15], "b": buffer[5:]}, tmp_path)


class Colour(enum.IntEnum):
    RED = 1


@dataclasses.dataclass
class Point:
    x: int


Pair = namedtuple("Pair", "a b")


class Text(str):
    __slots__ = ()


def _cycle() -> list[Any]:
    own: list[Any] = []
    own.append([own])
    return own


def _deep(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


REFUSED: dict[str, Any] = {
    "lambda": lambda: 0,
    "class": Path,
    "object": object(),
    "module": sys,
    "enum": Colour.RED,
    "dataclass": Point(1),
    "named tuple": Pair(1, 2),
    "text of another class": Text("a"),
    "default of a lambda": defaultdict(lambda: 0),
    "object array": np.array([object()]),
    "fields": np.zeros(2, dtype=[("a", "i4")]),
    "masked": np.ma.masked_array([1]),
    "sparse": torch.eye(2).to_sparse(),
    "meta": torch.empty(2, device="meta"),
    "tensor as a key": {torch.ones(1): 1},
    "cycle": _cycle(),
    "depth": _deep(10_000),
    "generator": iter([]),
    "numpy generator": np.random.default_rng(0),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_named_before_anything_is_written(name: str, tmp_path: Path) -> None:
    state = {"MyCallback": {"cache": [0, 1, 2, REFUSED[name]]}}
    with pytest.raises(CheckpointError, match=r"^`callbacks\.MyCallback\.cache\[3\]"):
        encode(state, "callbacks")
    store = CheckpointStore(tmp_path / "checkpoints")
    with pytest.raises(CheckpointError, match=r"`callbacks\.MyCallback\.cache\[3\]"):
        save_alone(store, 1, {"callbacks": state})
    assert not store.directory.exists()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_quantized_tensors_are_refused() -> None:
    with pytest.raises(CheckpointError, match="`state` is a quantized tensor"):
        encode(torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8), "state")


def test_lists_that_hold_each_other_many_times_end_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(codec, "MOST_VALUES", 10_000)
    value: list[Any] = []
    for _ in range(50):
        value = [value, value]
    with pytest.raises(CheckpointError, match="too many"):
        encode(value, "state")


def test_many_small_keys_are_kept_and_too_large_values_are_refused(tmp_path: Path) -> None:
    state = {f"key {index}": index for index in range(200_000)}
    assert round_trip(state, tmp_path / "small") == state
    with pytest.raises(CheckpointError, match=r"`part` makes \d+ bytes of JSON, most of it in"):
        round_trip({"long": "x" * (1 << 26), "short": 1}, tmp_path / "large")


SMALL = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
KEYS = SMALL.filter(lambda value: value == value)
TREES = st.recursive(
    SMALL,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(KEYS, inner)
        | st.dictionaries(st.text(), inner).map(OrderedDict)
    ),
    max_leaves=20,
)


@settings(max_examples=60, deadline=None)
@given(TREES)
def test_any_tree_comes_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, tree: Any) -> None:
    assert_same(round_trip(tree, tmp_path_factory.mktemp("tree")), tree)


HOSTILE = [
    {"$unknown": 1},
    {"$tensor": "missing"},
    {"$int": "1" * 5000 + "z"},
    {"$float": "00"},
    {"$bytes": "!!"},
    {"$defaultdict": ["eval", []]},
    {"$dtype": "load"},
    {"$dtype": "nn"},
    {"$device": "x:y:z"},
    {"$array": ["O", [1], {"$bytes": "AAAAAAAAAAA="}]},
    {"$array": ["(1000000000,)f8", [1], {"$bytes": ""}]},
    {"$array": ["<f8", [10**9], {"$bytes": "AAAAAAAAAAA="}]},
    {"$scalar": ["<f8", [], {"$bytes": ""}]},
    {"$set": [[1]]},
    {"$dict": [[[1], 2]]},
    {"$dict": [[1, 2], [1, 3]]},
    {"$dict": 3},
    {"$view": ["a", [4], [1], 10**9]},
    {"$view": ["a", [10**6], [1], 0]},
    {"$raw": ["a", "complex128", [10**9]]},
    {"$raw": ["a", "int16", [2, 1], [2, 1]]},
    {"$raw": ["a", "int16", [2, 1], [1, 1], [1, 1]]},
    {"$timedelta": [10**30, 0, 0]},
    {"$tuple": {"a": 1}},
    {"$size": ["a"]},
    {"$counter": {"a": [1]}, "b": 1},
    _deep(300),
]


@pytest.mark.parametrize("tree", HOSTILE, ids=lambda tree: repr(tree)[:40])
def test_json_that_trainkit_does_not_write_is_refused(tree: Any) -> None:
    with pytest.raises(MALFORMED):
        decode(tree, {"a": torch.zeros(4, dtype=torch.uint8)})


def _optimizers() -> list[type[torch.optim.Optimizer]]:
    found = [value for value in vars(torch.optim).values() if inspect.isclass(value)]
    base = torch.optim.Optimizer
    return [cls for cls in found if issubclass(cls, base) and cls is not base]


def _train(optimizer: torch.optim.Optimizer, params: list[torch.Tensor], sparse: bool) -> None:
    def closure() -> float:
        for index, param in enumerate(params):
            grad = torch.full_like(param, 0.1 * (index + 1)) * param.detach()
            param.grad = grad.to_sparse() if sparse else grad
        return 1.0

    for _ in range(3):
        optimizer.step(closure)


@pytest.mark.parametrize("cls", _optimizers(), ids=lambda cls: cls.__name__)
def test_every_optimizer_of_torch_comes_back_as_it_was(
    cls: type[torch.optim.Optimizer], tmp_path: Path
) -> None:
    sparse = cls is torch.optim.SparseAdam
    params = [torch.nn.Parameter(torch.randn(4, 3)), torch.nn.Parameter(torch.randn(3, 3))]
    optimizer = cls(params, lr=0.1)  # type: ignore[call-arg]
    _train(optimizer, list(params), sparse)
    state = optimizer.state_dict()
    read = round_trip(state, tmp_path)
    assert_same(read, state)
    copies = [torch.nn.Parameter(param.detach().clone()) for param in params]
    other = cls(copies, lr=0.5)  # type: ignore[call-arg]
    other.load_state_dict(read)
    _train(optimizer, list(params), sparse)
    _train(other, list(copies), sparse)
    assert all(torch.equal(one, two) for one, two in zip(params, copies, strict=True))


Scheduler = Callable[[torch.optim.Optimizer], Any]
SCHEDULERS: dict[str, Scheduler] = {
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "ConstantLR": lr_scheduler.ConstantLR,
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "LinearLR": lr_scheduler.LinearLR,
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 4]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.StepLR(o, 2)], [2]
    ),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
}


def test_the_list_of_schedulers_is_torch_s() -> None:
    found = {
        name
        for name, value in vars(lr_scheduler).items()
        if inspect.isclass(value)
        and issubclass(value, lr_scheduler.LRScheduler)
        and name not in ("LRScheduler", "_LRScheduler")
    }
    # SWALR is an optimizer's helper that lives beside averaged models.
    assert found - set(SCHEDULERS) <= {"SWALR"}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_of_torch_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9)
    scheduler = SCHEDULERS[name](optimizer)
    for _ in range(3):
        optimizer.step()
        scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
    state = scheduler.state_dict()
    assert_same(round_trip(state, tmp_path), state)
