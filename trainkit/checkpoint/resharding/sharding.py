"""Take sharded tensors out of a state, so that each process writes what it holds."""

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainkit.checkpoint.format.codec import MOST_VALUES
from trainkit.checkpoint.format.names import tensor_name
from trainkit.checkpoint.format.tensor_location import StoredTensor
from trainkit.checkpoint.format.tensors import file_dtype
from trainkit.checkpoint.io.digests import xxh3_128
from trainkit.checkpoint.resharding.sharding_spec import ShardingSpec, is_sharded
from trainkit.containers.json_form import DEEPEST
from trainkit.distributed import Processes, run_on_all
from trainkit.distributed.collectives import are_alike, number_of
from trainkit.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor


def split(parts: Mapping[str, Any], rank: int) -> tuple[dict[str, Any], str]:
    """Return the parts that this process writes, and a digest that must be equal on all.

    Process 0 writes `parts` with a `StoredTensor` in the place of every `DTensor`; each process
    writes what it holds of them, as `<part>-shard-<rank>`. Of equal copies the first is written.
    Nothing is copied or sent.

    Args:
        parts: The state by name of the part; alike on all processes.
        rank: Which process this is.
    """
    digest = xxh3_128()
    mine: dict[str, Any] = {}
    for part, state in parts.items():
        splitter = _Splitter(part, digest)
        tree = splitter.copy(state, ())
        if rank == 0:
            mine[part] = tree
        for number, tensors in splitter.local.items():
            mine[_shard_part(part, rank, number)] = tensors
    return mine, digest.hexdigest()


def split_alike(processes: Processes, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `split` does, after all processes have found the same sharded tensors."""
    mine, digest = run_on_all(processes, lambda: split(parts, processes.rank))
    if not are_alike(processes, number_of(digest)):
        raise CheckpointError(
            "The states to be saved hold other sharded tensors on other processes. `state_dict` "
            "of callbacks and registered objects must return the same `DTensor`s on all."
        )
    return mine


def _shard_part(part: str, rank: int, number: int = 0) -> str:
    """Return where a process writes the pieces of this number: most tensors have one."""
    return f"{part}-piece-{number}-shard-{rank:05d}" if number else f"{part}-shard-{rank:05d}"


class _Splitter:
    """One pass through the state of a part."""

    def __init__(self, part: str, digest: Any) -> None:
        self.local: dict[int, dict[str, Tensor]] = {}  # by the number of the piece
        self._part = part
        self._digest = digest
        self._names: set[str] = set()
        self._storages: dict[int, tuple[Tensor, StoredTensor]] = {}
        self._count = 0

    def copy(self, value: Any, path: tuple[Any, ...]) -> Any:
        """Return the state with placeholders; only what holds others is copied."""
        self._count += 1
        if self._count > MOST_VALUES or len(path) > DEEPEST:
            return value  # lists that hold themselves, which the codec refuses
        if is_sharded(value):
            return self._take(value, path)
        if type(value) is list or type(value) is tuple:
            return type(value)(self.copy(item, (*path, i)) for i, item in enumerate(value))
        if type(value) not in (dict, OrderedDict, defaultdict):
            return value
        items = {key: self.copy(item, (*path, key)) for key, item in value.items()}
        if type(value) is defaultdict:
            return defaultdict(value.default_factory, items)
        return type(value)(items)

    def _take(self, tensor: Any, path: tuple[Any, ...]) -> StoredTensor:
        name = tensor_name(path, self._names)
        self._names.add(name)
        try:
            spec, dtype = ShardingSpec.of(tensor), file_dtype(tensor.dtype)
        except ValueError as error:
            where = ".".join(str(key) for key in (self._part, *path))
            raise CheckpointError(
                f"`{where}` is a sharded tensor that {error}. Return it in another form from "
                "`state_dict`."
            ) from None
        shards = tuple(
            (_shard_part(self._part, rank, number), region)
            for rank, number, region in spec.owners()
        )
        stored = StoredTensor(name, dtype, spec.shape, shards)
        self._digest.update(repr((self._part, stored)).encode("utf-8", "surrogatepass"))
        local = tensor.detach().to_local()
        return self._keep(stored, local, spec) if local.numel() else stored

    def _keep(self, stored: StoredTensor, local: "Tensor", spec: ShardingSpec) -> StoredTensor:
        """Write a shard, unless the same memory is written under another name."""
        address = local.untyped_storage().data_ptr()
        known = self._storages.setdefault(address, (local, stored))
        if known[1] is not stored:
            views = [(t.storage_offset(), t.shape, t.stride(), t.dtype) for t in (local, known[0])]
            if views[0] == views[1] and known[1].shards == stored.shards:
                return known[1]  # tied
            local = local.clone()  # a file has no two tensors that overlap
        if spec.is_first_copy():
            for number, (_, piece) in enumerate(spec.pieces()):
                self.local.setdefault(number, {})[stored.name] = local[piece].contiguous()
        return stored
