"""Sharded tensors: each process writes its own, and reads what it needs of all (rule 31)."""

import math
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.checkpoint.sharded import mesh_of, save, sharded_parts, whole_parts
from tests.checkpoint.test_codec import assert_same
from tests.checkpoint.toys import save_alone
from tests.helpers.ranks import RanksError, run_ranks
from trainkit.checkpoint import Checkpoint, CheckpointStore
from trainkit.checkpoint.checkpoint import open_share
from trainkit.checkpoint.format.tensor_location import ShardRegion, StoredTensor, check_tiling, runs
from trainkit.checkpoint.io import reading
from trainkit.checkpoint.io.reading import HashedFile
from trainkit.checkpoint.resharding.sharding import split
from trainkit.checkpoint.snapshot import Snapshot
from trainkit.containers.json_form import MALFORMED
from trainkit.distributed import Processes
from trainkit.distributed.world import World
from trainkit.errors import CheckpointCorrupt, CheckpointError

FIXTURE = Path(__file__).parent / "fixtures" / "format_2"
PARTS = ("model", "optimizer", "trainer")

LAYOUTS: list[tuple[tuple[int, ...], list[Any]]] = [
    ((3,), [Shard(0)]),
    ((2,), [Replicate()]),
    ((2, 2), [Replicate(), Shard(0)]),  # hybrid
    ((2, 2), [Shard(0), Shard(0)]),
]


def test_a_checkpoint_of_version_2_loads_for_ever() -> None:
    checkpoint = CheckpointStore(FIXTURE.parent).open(FIXTURE)
    assert (checkpoint.step, checkpoint.manifest.format_version) == (120, 2)
    assert checkpoint.manifest.world_size == 2
    for part, state in whole_parts().items():
        assert_same(checkpoint.read(part), state)


@pytest.mark.parametrize(("shape", "placements"), LAYOUTS)
def test_each_process_writes_what_it_holds_once(
    shape: tuple[int, ...], placements: list[Any], tmp_path: Path
) -> None:
    path = save(tmp_path, shape, placements)
    checkpoint = CheckpointStore(tmp_path).open(path)
    for part, state in whole_parts().items():
        assert_same(checkpoint.read(part), state)
    shards = [name for name in checkpoint.names() if "-shard-" in name]
    tensors = [t for part in shards for t in checkpoint.read(part).values()]
    assert sum(t.numel() for t in tensors) == 15 + 3 + 2 + 15 + 15


def load_sharded(rank: int, path: Path, shape: tuple[int, ...], placements: list[Any]) -> list[int]:
    Processes.start(device=torch.device("cpu"))
    like = sharded_parts(mesh_of(shape), placements)
    like["optimizer"] = {"state": {"embed": like["model"]["embed"]}}
    read: list[int] = []
    original = HashedFile.read_into
    with pytest.MonkeyPatch.context() as patch:

        def counted(file: HashedFile, target: memoryview) -> None:
            read.append(len(target))
            original(file, target)

        patch.setattr(HashedFile, "read_into", counted)
        patch.setattr(reading, "_CHUNK", 1000)  # of what is only hashed
        found = {p: CheckpointStore(path.parent).open(path).read(p, like[p]) for p in PARTS}
    assert isinstance(found["model"]["embed"], DTensor)
    embed, head = found["model"]["embed"].to_local(), found["model"]["head"].to_local()
    assert embed.data_ptr() == head.data_ptr()
    assert isinstance(found["optimizer"]["state"]["embed"]["exp_avg"], DTensor)
    assert type(found["optimizer"]["state"]["embed"]["step"]) is Tensor
    for part, state in whole_parts().items():
        assert_same(_whole(found[part]), state)
    return read


def _whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        done: dict[int, Tensor] = {}  # tied ones stay so
        items = []
        for key, item in value.items():
            address = item.to_local().data_ptr() if isinstance(item, DTensor) else id(item)
            items.append((key, done.setdefault(address, _whole(item)) if address else _whole(item)))
        return type(value)(items)
    return [_whole(item) for item in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    ("shape", "placements"),
    [((2,), [Shard(0)]), ((3,), [Shard(0)]), ((2, 2), [Replicate(), Shard(0)])],
)
def test_any_mesh_reads_what_others_wrote(
    shape: tuple[int, ...], placements: list[Any], tmp_path: Path
) -> None:
    run_ranks(math.prod(shape), load_sharded, FIXTURE, shape, placements)
    unsharded = save_alone(CheckpointStore(tmp_path), 1, whole_parts())
    run_ranks(math.prod(shape), load_sharded, unsharded, shape, placements)


def load_large(rank: int, path: Path) -> tuple[int, int, Tensor]:
    from torch.distributed.tensor import zeros

    Processes.start(device=torch.device("cpu"))
    like = {"weight": zeros((400, 10), device_mesh=mesh_of((2,)), placements=[Shard(1)])}
    largest, allocated = [0], [0]
    original, plain = HashedFile.read_into, torch.empty
    with pytest.MonkeyPatch.context() as patch:

        def counted(file: HashedFile, target: memoryview) -> None:
            largest[0] = max(largest[0], len(target))
            original(file, target)

        def empty(*args: Any, **kwargs: Any) -> Tensor:
            found = plain(*args, **kwargs)
            allocated[0] += 0 if found.is_meta else found.numel()
            return found

        patch.setattr(HashedFile, "read_into", counted)
        patch.setattr(reading, "_CHUNK", 1000)  # of what is only hashed
        checkpoint = CheckpointStore(path.parent).open(path)
        patch.setattr(torch, "empty", empty)
        found = checkpoint.read("model", like)["weight"]
    return largest[0], allocated[0], found.to_local()


def test_a_process_keeps_no_more_than_its_slices(tmp_path: Path) -> None:
    weight = torch.randn(400, 10)
    path = save_alone(CheckpointStore(tmp_path), 1, {"model": {"weight": weight}})
    for rank, (largest, allocated, local) in enumerate(run_ranks(2, load_large, path)):
        assert allocated == 2000
        assert (
            largest <= 4000
        )  # the manifest and the header; of the tensor 20 bytes, of the rest a chunk
        assert torch.equal(local, weight[:, 5 * rank : 5 * rank + 5])


def read_view(rank: int, path: Path) -> None:
    from torch.distributed.tensor import zeros

    Processes.start(device=torch.device("cpu"))
    like = {"rows": zeros((5, 3), device_mesh=mesh_of((2,)), placements=[Shard(0)])}
    rows = CheckpointStore(path.parent).open(path).read("model", like)["rows"]
    assert isinstance(rows, DTensor)
    assert torch.equal(rows.full_tensor(), torch.arange(18.0).reshape(6, 3)[1:])


def test_a_view_is_read_into_shards(tmp_path: Path) -> None:
    whole = torch.arange(18.0).reshape(6, 3)
    parts = {"model": {"whole": whole, "rows": whole[1:]}}
    run_ranks(2, read_view, save_alone(CheckpointStore(tmp_path), 1, parts))


def _regions(shape: tuple[int, ...]) -> st.SearchStrategy[ShardRegion]:
    spans = [
        st.tuples(st.integers(0, size), st.integers(0, size)).map(lambda x: (min(x), max(x)))
        for size in shape
    ]
    return st.tuples(*spans).map(
        lambda found: ShardRegion(tuple(a for a, _ in found), tuple(b - a for a, b in found))
    )


def _cut(values: Tensor, region: ShardRegion) -> Tensor:
    return values[tuple(slice(o, o + n) for o, n in zip(region.offsets, region.sizes, strict=True))]


@pytest.mark.e2e
@settings(deadline=None, max_examples=300)
@given(st.data())
def test_runs_copy_what_two_boxes_have_in_common(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), max_size=4)))
    source, target = data.draw(_regions(shape)), data.draw(_regions(shape))
    values = torch.arange(1, math.prod(shape) + 1).reshape(shape)
    memory, expected = torch.zeros(target.sizes, dtype=torch.int64), torch.zeros_like(values)
    flat, held = memory.reshape(-1), _cut(values, source).reshape(-1)
    for begin, place, length in runs(source, target):
        flat[place : place + length] = held[begin : begin + length]
    _cut(expected, source).copy_(_cut(values, source))
    assert torch.equal(memory, _cut(expected, target))


def test_runs_are_as_long_as_can_be() -> None:
    whole = ShardRegion((0, 0), (6, 4))
    assert list(runs(whole, ShardRegion((2, 0), (3, 4)))) == [(8, 0, 12)]
    assert list(runs(ShardRegion((2, 0), (3, 4)), whole)) == [(0, 8, 12)]
    assert list(runs(whole, ShardRegion((4, 1), (2, 2)))) == [(17, 0, 2), (21, 2, 2)]


def _node(**changed: Any) -> StoredTensor:
    shards = (("m-0", ShardRegion((0, 0), (2, 3))), ("m-1", ShardRegion((2, 0), (2, 3))))
    return StoredTensor(
        **({"name": "w", "dtype": "F32", "shape": (4, 3), "shards": shards} | changed)
    )


def _shards(*regions: tuple[tuple[int, ...], tuple[int, ...]]) -> dict[str, Any]:
    return {"shards": tuple((f"m-{i}", ShardRegion(*region)) for i, region in enumerate(regions))}


GOOD = {"m-0": {"w": torch.zeros(2, 3)}, "m-1": {"w": torch.ones(2, 3)}}
BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "gap": (_shards(((0, 0), (2, 3))), {}, r"`m\.json`: .*`w`: its shards leave a gap"),
    "overlap": (_shards(((0, 0), (2, 3)), ((1, 0), (2, 3))), {}, r"`m\.json`: .* overlap"),
    "beyond": (_shards(((0, 0), (2, 3)), ((3, 0), (2, 3))), {}, r"`m\.json`: .* is not in"),
    "dimensions": (_shards(((0,), (4,))), {}, r"`m\.json`: .* 1 dimensions, the tensor 2"),
    "empty": (_shards(((0, 0), (4, 3)), ((4, 0), (0, 3))), {}, r"`m\.json`: .* is not in"),
    "one part twice": (
        {"shards": 2 * (("m-0", ShardRegion((0, 0), (2, 3))),)},
        {},
        "different names",
    ),
    "no such type": ({"dtype": "F3"}, {}, r"`m\.json`: .* of the type 'F3'"),
    "larger than its files": (
        _shards(((0, 0), (1 << 40, 3))) | {"shape": (1 << 40, 3)},
        {},
        r"`m-0\.safetensors`: `w` is F32 \[2, 3\]",
    ),
    "missing file": ({}, {"m-1": None}, r"`m-1\.safetensors` is missing"),
    "missing tensor": ({}, {"m-1": {"x": torch.ones(2, 3)}}, r"`m-1\.safetensors`: `w` is missing"),
    "other shape": ({}, {"m-1": {"w": torch.ones(3, 2)}}, r"`m-1\..*\[3, 2\], .*\[2, 3\] is exp"),
    "other type": ({}, {"m-1": {"w": torch.ones(2, 3).double()}}, r"`m-1\..*F64 .*F32"),
}


@pytest.mark.parametrize("name", BAD)
def test_shards_that_do_not_fit_are_refused_with_the_file(name: str, tmp_path: Path) -> None:
    changed, files, message = BAD[name]
    parts = {"m": {"w": _node(**changed)}, **GOOD, **files}
    parts = {part: state for part, state in parts.items() if state is not None}
    store = CheckpointStore(tmp_path)
    checkpoint = store.open(save_alone(store, 1, parts))
    with pytest.raises(CheckpointCorrupt, match=message) as caught:
        checkpoint.read("m")
    assert f"`{caught.value.file}`" in str(caught.value)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["w", "F32", "m-0"]),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=8,
)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_node_of_another_form_is_refused(data: st.DataObject) -> None:
    node: Any = _node().node()
    target, path = node, data.draw(st.sampled_from([(0,), (1,), (2, 0), (3,), (3, 1), (3, 0, 2)]))
    for index in path[:-1]:
        target = target[index]
    before, target[path[-1]] = target[path[-1]], data.draw(_JSON)
    try:
        parsed = StoredTensor.parse(node)
    except MALFORMED:
        return
    assert parsed.node() == node
    assert path == (0,) or target[path[-1]] == before


def test_without_the_fault_those_shards_are_joined(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    checkpoint = store.open(save_alone(store, 1, {"m": {"w": _node()}, **GOOD}))
    expected = torch.cat([GOOD["m-0"]["w"], GOOD["m-1"]["w"]])
    assert torch.equal(checkpoint.read("m")["w"], expected)
    assert torch.equal(checkpoint.read_tensor("m", "w"), expected)
    with pytest.raises(CheckpointError, match="has no tensor 'x'"):
        checkpoint.read_tensor("m", "x")


def _flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_a_shard_that_changes_after_verification_is_not_used(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = save_alone(store, 1, {"m": {"w": _node()}, **GOOD})
    checkpoint = store.open(path)
    _flip(path / "m-1.safetensors", -1)
    with pytest.raises(CheckpointCorrupt, match=r"`m-1\.safetensors`: its content has changed"):
        checkpoint.read("m")


def test_a_shard_of_another_step_is_found(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    first = save_alone(store, 1, {"m": {"w": _node()}, **GOOD})
    other = {"w": torch.full((2, 3), 5.0)}
    second = save_alone(store, 2, {"m": {"w": _node()}, **GOOD, "m-1": other})
    (second / "m-1.safetensors").write_bytes((first / "m-1.safetensors").read_bytes())
    with pytest.raises(CheckpointCorrupt, match=r"`m-1\.safetensors`"):
        store.open(second)


@pytest.mark.parametrize("machines", [1, 2])
def test_shares_of_the_verification_cover_every_file(machines: int, tmp_path: Path) -> None:
    store, size = CheckpointStore(tmp_path), 4 // machines
    path = save_alone(store, 1, {"m": {"w": _node()}, **GOOD, "process-00002": {"x": 1}})
    worlds = [
        World(rank=rank, size=4, local_rank=rank % size, local_size=size) for rank in range(4)
    ]
    for file in ("m.json", "m-0.safetensors", "m-1.safetensors", "process-00002.json"):
        content = (path / file).read_bytes()
        _flip(path / file, -1)
        opened = [open_share(path, world) for world in worlds]
        broken = [rank for rank, one in enumerate(opened) if not _opens(one.verify_rest)]
        # What all of a machine read, one of them compares; what one process wrote, that process.
        if file == "process-00002.json":
            assert broken == [2]
        else:
            assert [worlds[rank].rank // size for rank in broken] == list(range(machines))
        (path / file).write_bytes(content)


def test_what_is_read_is_verified_and_the_rest_on_demand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    path = save_alone(store, 1, {"m": {"w": _node()}, **GOOD})
    whole = {file: (path / file).read_bytes() for file in os.listdir(path)}
    hashed: list[str] = []
    check = HashedFile.check_digest

    def noting(file: HashedFile, expected: str) -> None:
        hashed.append(file.name)
        check(file, expected)

    monkeypatch.setattr(HashedFile, "check_digest", noting)
    checkpoint = store.open_unverified(path)
    assert not hashed
    checkpoint.read("m")
    read = set(hashed)
    hashed.clear()
    checkpoint.verify_rest()
    assert read | set(hashed) == whole.keys() - {"manifest.json"}
    assert not read & set(hashed)
    hashed.clear()
    checkpoint.verify_rest()
    assert not hashed
    for file in sorted(whole.keys() - {"manifest.json"}):
        _flip(path / file, -1)
        part = file.split(".")[0]
        for parts in ((), (part,), ("m",)):
            with pytest.raises(CheckpointCorrupt, match=re.escape(f"`{file}`")):
                _read_and_verify(store.open_unverified(path), parts)
        (path / file).write_bytes(whole[file].replace(b'"w"', b'"v"', 1))  # is found while decoding
        if (path / file).read_bytes() != whole[file]:
            with pytest.raises(CheckpointCorrupt, match=re.escape(f"`{file}`")):
                _read_and_verify(store.open_unverified(path), ("m",))
        (path / file).write_bytes(whole[file])


def _read_and_verify(checkpoint: Checkpoint, parts: Iterable[str]) -> None:
    for part in parts:
        checkpoint.read(part)
    checkpoint.verify_rest()


def _opens(call: Callable[[], Any]) -> bool:
    try:
        call()
    except CheckpointCorrupt:
        return False
    return True


def test_a_layout_tells_shapes_and_ties() -> None:
    checkpoint = CheckpointStore(FIXTURE.parent).open(FIXTURE)
    layout = checkpoint.layout("model")
    state = whole_parts()["model"]
    assert list(layout) == list(state)
    assert {name: stored.shape for name, stored in layout.items()} == {
        name: tuple(tensor.shape) for name, tensor in state.items()
    }
    assert layout["embed"] == layout["head"]
    assert [layout[name].size for name in ("bias", "single", "buffer")] == [24, 4, 2]
    for name, tensor in state.items():
        assert torch.equal(checkpoint.read_tensor("model", name), tensor)
    with pytest.raises(CheckpointError, match=r"'state' in the part 'optimizer' .* is no tensor"):
        checkpoint.layout("optimizer")


def test_boxes_of_a_grid_are_checked_in_all_dimensions() -> None:
    grid = tuple(ShardRegion((x, y), (2, 2)) for x in (0, 2) for y in (0, 2))
    check_tiling((4, 4), grid)
    with pytest.raises(ValueError, match="gap"):
        check_tiling((4, 4), grid[1:])


def take_apart(rank: int) -> tuple[list[int], str, str]:
    Processes.start(device=torch.device("cpu"))
    parts = sharded_parts(mesh_of((2,)), [Shard(0)])
    mine, digest = split(parts, rank)
    assert ("model" in mine) == (rank == 0)
    held = mine[f"model-shard-{rank:05d}"]["embed"]
    assert held.data_ptr() == parts["model"]["embed"].to_local().data_ptr()  # nothing is copied
    snapshot, addresses = Snapshot(), []
    for _ in range(2):
        copy = snapshot.take(split(parts, rank)[0])
        assert copy.keys() == mine.keys()
        addresses.append(copy[f"model-shard-{rank:05d}"]["embed"].data_ptr())
    assert held.data_ptr() not in addresses
    if rank == 1:
        del parts["model"]["bias"]
    return addresses, digest, split(parts, rank)[1]


def test_a_snapshot_copies_local_shards_into_buffers_that_stay() -> None:
    (first, digest, odd), (second, same, other) = run_ranks(2, take_apart)
    assert len(set(first)) == len(set(second)) == 1
    assert digest == same
    assert odd != other  # how processes learn that their states differ


def place_oddly(rank: int, kind: str) -> None:
    from torch.distributed.tensor import Partial

    Processes.start(device=torch.device("cpu"))
    placement = Partial() if kind == "placement" else Shard(0)
    dtype = torch.complex128 if kind == "dtype" else torch.float32
    local = torch.ones(2, dtype=dtype)
    tensor = DTensor.from_local(local, mesh_of((2,)), [placement], run_check=False)
    split({"model": {"weights": [tensor]}}, rank)


@pytest.mark.parametrize(("kind", "why"), [("placement", "is placed by"), ("dtype", "complex128")])
def test_a_sharded_tensor_without_a_form_is_refused_with_its_path(kind: str, why: str) -> None:
    with pytest.raises(RanksError, match=rf"`model\.weights\.0` is a sharded tensor that .*{why}"):
        run_ranks(2, place_oddly, kind)
