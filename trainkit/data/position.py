"""Where an iterable data set is, and how it comes back there (rule 15)."""

import copy
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

from torch.utils.data import DataLoader

from trainkit.data.stream_start import begins_anew, is_stateful
from trainkit.errors import CheckpointError, ConfigError


class StreamPosition:
    """The part of a checkpoint that says where an iterable data set of training is.

    Args:
        shards: How many parts of it are read, one by each process; 1: all read the whole.
    """

    def __init__(self, loader: DataLoader[Any], shards: int) -> None:
        self._dataset: Any = loader.dataset
        self._is_here = loader.num_workers == 0
        self._lasts = loader.num_workers > 0 and loader.persistent_workers
        self._shards = shards
        self.inside = False
        """Whether an epoch is under way."""
        self.state: Any = None  # after the batch consumed last, or the end of the latest epoch
        self.end: Any = None  # after the epoch, where its end comes next
        self.start: dict[str, Any] | None = None  # what was loaded, until a pass begins with it
        self.first: str | None = None  # digest of the first sample of the pass under way
        self.is_trial = False
        """Whether passes leave the data set as they found it."""
        self._has_read = False  # whether a pass has ended since a state was loaded

    def check_evaluations(self, loaders: Iterable[Any]) -> None:
        """Raise ConfigError where one of these reads the same object, while training does."""
        name = type(self._dataset).__name__
        read = [getattr(loader.source, "dataset", None) for loader in loaders]
        if self._is_here and any(dataset is self._dataset for dataset in read):
            raise ConfigError(
                f"Training and evaluation read the same `{name}`, which yields its samples one "
                "after the other: an evaluation in the middle would begin where training is. Give "
                "each a data set of its own."
            )

    def began(self, first: str | None, is_alike: bool) -> None:
        """Note the first sample of a pass; warn where not all who read it see the same."""
        self.first = self.first or first
        if not is_alike or first not in (None, self.first):
            warnings.warn(
                f"`{type(self._dataset).__name__}` begins with another sample for each worker or "
                "process, or in a resume, or anew in a resume though it was given a state, from "
                "which its `__iter__` must go on: samples come twice or never. Split nothing, draw "
                "from the global generators (`.shuffle(1000, rng=random)` in webdataset). What "
                "follows weights or a memory that training changes resumes between epochs alone "
                "(`Checkpoint(every_n_epochs=1)`), or by a `state_dict` of its own.",
                stacklevel=2,
            )

    def ended(self) -> None:
        """Note that nothing of the epoch is left."""
        self.first = None
        self.inside, self.state, self._has_read = False, self.end, True

    def left(self) -> None:
        """Note that nobody goes on with the pass, if one is under way."""
        if self.inside:
            self.end = None
            self.ended()

    @property
    def is_sharded(self) -> bool:
        """Whether each process reads a part of its own."""
        return self._shards > 1

    @property
    def per_process(self) -> bool | None:
        """Whether each process reads data of its own; None: their states are compared."""
        return True if self.inside and self._shards > 1 else None

    def state_dict(self) -> dict[str, Any]:
        """Return where the data set is; between two epochs, where the latest one has left it."""
        state = self.state if self.inside else self._between()
        first = {"first": self.first} if self.inside else {}
        return {"shards": self._shards, "inside": self.inside, "state": state, **first}

    def check_state_dict(self, state: dict[str, Any]) -> None:
        """Raise CheckpointError for a state that the data set cannot go on from."""
        self._fitting(state)
        if "dataset" in (state["state"] or {}) and not is_stateful(self._dataset):
            raise CheckpointError(
                f"The checkpoint holds the state of an iterable data set, but the data set of this "
                f"run, a `{type(self._dataset).__name__}`, has no `state_dict` and "
                "`load_state_dict`. Resume with the data set of the checkpoint."
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass go on from a state."""
        self.start = self._fitting(state)
        self.inside, self.state = self.start["inside"], self.start["state"]
        self.first = self.start.get("first")
        self._has_read = False

    def merge_state_dicts(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return one state for all shards, by `merge_state_dicts` of the data set."""
        name, now = type(self._dataset).__name__, self._shards
        merge = getattr(self._dataset, "merge_state_dicts", None)
        if merge is None or any(state["state"] is None for state in states):
            raise CheckpointError(
                f"The checkpoint was made inside an epoch of the data set `{name}`, which was read "
                f"as {len(states)} shard(s), one by each process, and now they are {now}: who goes "
                "on with what was not consumed is not known. Resume on as many processes as then, "
                f"or give `{name}` a state and `merge_state_dicts(states)`, which returns one for "
                "all shards, of those by shard."
            )
        parts = [state["state"] for state in states]
        kind = "iterator" if "iterator" in parts[0] else "dataset"
        items = sum(part["items"] for part in parts) // now
        merged = {"items": items, "ended": False, "before_last": None}
        merged |= {name: parts[0][name] for name in ("batches",) if name in parts[0]}
        merged[kind] = merge([part[kind] for part in parts])
        return {"shards": now, "inside": True, "state": merged}

    def _fitting(self, state: dict[str, Any]) -> dict[str, Any]:
        if state["inside"] and state["shards"] != self._shards:
            return self.merge_state_dicts([state])
        return state

    def _between(self) -> Any:
        if self.start is not None:
            return self.start["state"]
        goes_on = self._has_read and self._shards == 1 and is_stateful(self._dataset)
        if not goes_on or begins_anew(self._dataset):
            return None
        if not self._is_here:  # the copies in lasting workers go on, others are made anew
            return self.state if self._lasts and "dataset" in (self.state or {}) else None
        state = copy.deepcopy(self._dataset.state_dict())
        return {"items": 0, "ended": False, "before_last": None, "dataset": state}
