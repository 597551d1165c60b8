"""A state that differs by process comes back to its process (rule 22)."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.callbacks import Counting
from tests.helpers.ranks import RanksError, run_ranks
from tests.helpers.toys import fit as fit_toys, toy_dataset, toy_model
from trainkit import Accelerator, Callback, DataLoaderConfiguration, Run, Trainer
from trainkit.callbacks import EMA, Checkpoint, MainProcess
from trainkit.checkpoint import CheckpointStore
from trainkit.strategies import FSDP


class Seen:
    """Keeps what this process has seen: no two processes have the same."""

    def __init__(self, rank: int) -> None:
        self.rows: list[Tensor] = []
        self.rank = rank
        self.loaded: Any = None

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows, "rank": self.rank}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loaded = state["rank"]
        self.rows = list(state["rows"])


class Merging(Seen):
    def merge_state_dicts(self, states: list[Any]) -> dict[str, Any]:
        rows = [row for state in states for row in state["rows"]]
        return {"rows": rows, "rank": [state["rank"] for state in states]}


class Watching(Callback):
    """A callback that gives what it sees to an object, and has a state of its own as well."""

    def __init__(self, seen: Seen, die_at: int | None) -> None:
        self.seen = seen
        self.die_at = die_at
        self.total = 0.0

    def on_microbatch_start(self, run: Run, batch: Any) -> None:
        self.seen.rows.append(batch[0].sum())
        self.total += float(batch[0].sum())

    def on_step_end(self, run: Run, result: Any) -> None:
        if run.state.step == self.die_at:
            raise KeyboardInterrupt

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.total = state["total"]

    def merge_state_dicts(self, states: list[Any]) -> dict[str, Any]:
        return {"total": sum(state["total"] for state in states)}


def fit(
    rank: int,
    folder: Path,
    die_at: int | None,
    resume: str | None,
    make: Any = Seen,
    only_first: bool = False,
    **options: Any,
) -> Any:
    seen = make(rank)
    seen.__dict__ |= options.pop("attributes", {})
    watching, counting = Watching(seen, die_at), Counting()
    ema = EMA(0.5)
    callbacks = [watching, MainProcess(counting), ema, Checkpoint(every_n_steps=1)]
    if only_first and rank == 0:
        extra = Counting()
        extra.name = "extra"
        callbacks.append(extra)
    trainer = Trainer(max_steps=6, callbacks=callbacks, output_dir=folder, split_batches=True)
    trainer.register_for_checkpointing(seen=seen)
    torch.manual_seed(0)
    model = toy_model()
    with suppress(KeyboardInterrupt):
        fit_toys(trainer, DataLoader(toy_dataset(96), 12, shuffle=True), model, resume=resume)
    return [float(row) for row in seen.rows], watching.total, counting.steps, seen.loaded


def test_each_process_gets_its_own_state_back(tmp_path: Path) -> None:
    whole = run_ranks(2, fit, tmp_path / "whole", None, None)
    run_ranks(2, fit, tmp_path / "cut", 3, None)
    resumed = run_ranks(2, fit, tmp_path / "cut", None, "must")
    assert [result[:2] for result in resumed] == [result[:2] for result in whole]
    assert [result[3] for result in resumed] == [0, 1]
    assert whole[0][0] != whole[1][0]
    assert resumed[0][2] == whole[0][2] == 6  # a callback of the main process alone


def test_what_is_alike_is_saved_once(tmp_path: Path) -> None:
    run_ranks(2, fit, tmp_path, 3, None)
    store = CheckpointStore(tmp_path / "checkpoints")
    checkpoint = store.open(store.checkpoints()[-1].path)
    common, own = checkpoint.read("trainer"), checkpoint.read("process-00001")
    assert sorted(common["callbacks"]) == ["Counting", "EMA"]
    assert common["objects"] == {}
    assert sorted(own["callbacks"]) == ["Watching"]
    assert own["objects"]["seen"]["rank"] == 1


@pytest.mark.e2e
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
def test_other_processes_get_what_the_owner_makes_of_all(
    before: int, after: int, tmp_path: Path
) -> None:
    attributes = {"per_process": True}
    run_ranks(before, fit, tmp_path, 3, None, Merging, attributes=attributes)
    resumed = run_ranks(after, fit, tmp_path, 3, "must", Merging, attributes=attributes)
    assert [result[3] for result in resumed] == [list(range(before))] * after


def test_a_state_that_cannot_be_divided_anew_is_refused_before_anything_changes(
    tmp_path: Path,
) -> None:
    run_ranks(2, fit, tmp_path, 3, None)
    with pytest.raises(RanksError) as caught:
        run_ranks(1, fit, tmp_path, None, "must")
    (text,) = caught.value.failures.values()
    assert "registered object `seen` differed between the 2 processes" in text
    assert "merge_state_dicts" in text
    assert "`per_process = False`" in text


@pytest.mark.e2e
def test_an_owner_may_say_that_process_0_speaks_for_all(tmp_path: Path) -> None:
    attributes = {"per_process": False}
    run_ranks(2, fit, tmp_path, 3, None)
    later = run_ranks(3, fit, tmp_path, 4, "must", attributes=attributes)
    assert [result[3] for result in later] == [0, 0, 0]
    again = run_ranks(3, fit, tmp_path, None, "must", attributes=attributes)
    assert [result[3] for result in again] == [0, 0, 0]


@pytest.mark.e2e
def test_a_callback_of_one_process_alone_keeps_its_state(tmp_path: Path) -> None:
    run_ranks(2, fit, tmp_path, 3, None, only_first=True)
    assert len(run_ranks(2, fit, tmp_path, None, "must", only_first=True)) == 2


def fail_on_one(rank: int, folder: Path, what: str) -> None:
    class Failing(Counting):
        def state_dict(self) -> dict[str, Any]:
            if rank == 1:
                raise RuntimeError("no state today")
            return {}

    class Unsavable(Counting):
        def state_dict(self) -> dict[str, Any]:
            return {"function": print if rank == 1 else 1}

    callback = {"raises": Failing, "holds": Unsavable}[what]()
    trainer = Trainer(max_steps=2, callbacks=[callback, Checkpoint()], output_dir=folder)
    fit_toys(trainer, DataLoader(toy_dataset(), 4))


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("what", "words"), [("raises", "no state today"), ("holds", "callbacks.Unsavable.function")]
)
def test_a_state_that_fails_on_one_process_fails_on_all(
    what: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(2, fail_on_one, tmp_path, what)
    assert len(caught.value.failures) == 2
    assert all(words in text for text in caught.value.failures.values())


def shard(rank: int, folder: Path, what: str) -> Any:
    from torch.distributed.tensor import DTensor

    from trainkit.strategies import FSDP

    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    class Holder(Callback):
        loaded: Any = None
        per_process = True if what == "own" else None

        def state_dict(self) -> dict[str, Any]:
            weight = next(model.parameters()).detach()
            assert isinstance(weight, DTensor)
            return {"weight": weight, "rank": rank if what == "differs" else 0}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            self.loaded = type(state["weight"]).__name__

    holder = Holder()
    seen = Seen(rank)
    trainer = Trainer(
        max_steps=2, strategy=FSDP(), callbacks=[holder, Checkpoint()], output_dir=folder
    )
    trainer.register_for_checkpointing(seen=seen)
    fit_toys(trainer, DataLoader(toy_dataset(), 4), model, resume="auto")
    return holder.loaded, seen.loaded


@pytest.mark.e2e
def test_sharded_states_are_saved_together(tmp_path: Path) -> None:
    assert run_ranks(2, shard, tmp_path, "alike") == [(None, None)] * 2
    assert run_ranks(2, shard, tmp_path, "alike") == [("DTensor", 0), ("DTensor", 1)]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("what", "words"),
    [("differs", "values that differ between the processes"), ("own", "`per_process = True`")],
)
def test_sharded_states_with_values_of_one_process_are_refused(
    what: str, words: str, tmp_path: Path
) -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(2, shard, tmp_path, what)
    assert all(words in text for text in caught.value.failures.values())
    assert len(caught.value.failures) == 2


def loop(rank: int, folder: Path, make: Any, load: bool) -> Any:
    accelerator = Accelerator(cpu=True)
    seen, alike = make(rank), Seen(7)
    accelerator.register_for_checkpointing(seen, alike)
    accelerator.prepare(nn.Linear(1, 1))
    if load:
        accelerator.load_state(folder)
    else:
        accelerator.save_state(folder)
    return seen.loaded, alike.loaded


@pytest.mark.e2e
def test_registered_objects_of_an_own_loop_come_back_to_their_process(tmp_path: Path) -> None:
    run_ranks(2, loop, tmp_path, Merging, False)
    assert run_ranks(2, loop, tmp_path, Merging, True) == [(0, 7), (1, 7)]
    assert run_ranks(1, loop, tmp_path, Merging, True) == [([0, 1], 7)]
    with pytest.raises(RanksError, match="object `custom_checkpoint_0` differed"):
        run_ranks(1, loop, tmp_path, Seen, True)


def uneven(rank: int, folder: Path, load: bool) -> Any:
    config = DataLoaderConfiguration(even_batches=False, use_stateful_dataloader=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(10.0)), 2))
    if load:
        accelerator.load_state(folder)
        return [row.tolist() for (row,) in loader]
    for count, _ in enumerate(loader, 1):
        if count == 2 - rank:
            accelerator.save_state(folder)
            break
    return None


@pytest.mark.e2e
def test_the_position_of_a_loader_is_that_of_its_process(tmp_path: Path) -> None:
    run_ranks(2, uneven, tmp_path, False)
    assert run_ranks(2, uneven, tmp_path, True) == [[[8.0, 9.0]], [[6.0, 7.0]]]


class Seeing(nn.Linear):
    """Keeps what it has seen on this process."""

    seen = 0.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += float(inputs.sum())
        return super().forward(inputs)

    def get_extra_state(self) -> dict[str, float]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.seen = state["seen"]


def see(rank: int, folder: Path, steps: int, resume: str | None, size: int = 2) -> float:
    model = Seeing(4, 2)
    trainer = Trainer(max_steps=steps, callbacks=[Checkpoint()], output_dir=folder)
    fit_toys(
        trainer,
        DataLoader(toy_dataset(), 4 // size),
        model,
        resume=resume,
        schedule="keep" if resume else None,
    )
    return model.seen


@pytest.mark.e2e
def test_what_a_model_keeps_on_each_process_comes_back_to_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    straight = run_ranks(2, see, tmp_path / "straight", 6, None)
    saved = run_ranks(2, see, tmp_path / "run", 3, None)
    assert saved[0] != saved[1]
    assert run_ranks(2, see, tmp_path / "run", 6, "must") == straight
    run_ranks(2, see, tmp_path / "again", 3, None)
    capfd.readouterr()
    assert see(0, tmp_path / "again", 3, "must", size=1) == saved[0]
    assert "`_extra_state` of the model differed" in capfd.readouterr().out


def see_oneself(rank: int, folder: Path, load: bool, sharded: bool = False) -> Any:
    accelerator = Accelerator(cpu=True, strategy=FSDP(device="cpu") if sharded else None)
    seen = [Seeing(1, 1), Seeing(1, 1)]
    prepared = accelerator.prepare(seen[0], nn.Sequential(seen[1]))
    if load:
        accelerator.load_state(folder)
        return [model.seen for model in seen]
    for index, model in enumerate(prepared):
        model(torch.full((1, 1), rank + 10.0 * index))
    accelerator.save_state(folder)
    return None


@pytest.mark.e2e
@pytest.mark.parametrize("sharded", [False, True])
def test_so_it_does_in_an_own_loop(
    sharded: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_ranks(2, see_oneself, tmp_path, False, sharded)
    assert run_ranks(2, see_oneself, tmp_path, True, sharded) == [[0.0, 10.0], [1.0, 11.0]]
    assert run_ranks(1, see_oneself, tmp_path, True) == [[0.0, 10.0]]
    told = "`_extra_state` of the model differed"
    assert told in capfd.readouterr().out
