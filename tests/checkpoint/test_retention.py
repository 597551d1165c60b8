"""What rule 27 keeps is always there; everything else goes."""

import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.toys import save_alone
from trainkit.checkpoint import CheckpointStore, KeepPolicy, rotate
from trainkit.checkpoint.io import files
from trainkit.errors import CheckpointError, ConfigError


def save(store: CheckpointStore, step: int, loss: Any = None, run: str = "run-1") -> Path:
    metrics = {} if loss is None else {"eval/loss": loss}
    return save_alone(store, step, {"x": step}, run_id=run, metrics=metrics)


def steps(store: CheckpointStore) -> list[int]:
    return [entry.step for entry in store.checkpoints()]


def damage(path: Path) -> None:
    (path / "x.json").write_text("0" * (path / "x.json").stat().st_size)


def test_the_last_ones_stay(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in range(5):
        save(store, step)
        rotate(store, KeepPolicy(keep_last=2))
    assert steps(store) == [3, 4]


@pytest.mark.parametrize(("mode", "kept"), [("min", [2, 4, 6]), ("max", [1, 3, 6])])
def test_the_best_ones_stay_the_older_of_equals_and_never_nan(
    mode: Any, kept: list[int], tmp_path: Path
) -> None:
    store = CheckpointStore(tmp_path)
    for step, loss in enumerate([math.nan, 9.0, -1.0, 9, -1.0, -1.0, "low"]):
        save(store, step, loss)
    rotate(store, KeepPolicy(keep_best=("eval/loss", mode, 2)))
    assert steps(store) == kept


def test_every_so_many_steps_stay(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (10, 15, 20, 25, 27):
        save(store, step)
    assert [entry.step for entry in rotate(store, KeepPolicy(keep_every=10))] == [15, 25]
    assert steps(store) == [10, 20, 27]


def test_pinned_ones_stay_until_they_are_unpinned(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        save(store, step)
    store.pin(1)
    rotate(store, KeepPolicy())
    assert steps(store) == [1, 3]
    CheckpointStore(tmp_path).unpin(1)
    rotate(store, KeepPolicy())
    assert steps(store) == [3]
    with pytest.raises(CheckpointError, match=r"one of the checkpoints \[3\], but is 1"):
        store.pin(1)


def test_with_a_broken_list_of_pins_nothing_is_removed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        save(store, step)
    for text in ("", "[]", '{"pinned": ["1"]}', '{"pinned": 1}', '{"pinned": [1], "pinned": []}'):
        (tmp_path / "pins.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"pins\.json` must look like"):
            rotate(store, KeepPolicy())
    assert steps(store) == [1, 2]


def test_the_newest_valid_one_stays_where_newer_ones_are_broken(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    paths = [save(store, step) for step in (1, 2, 3)]
    damage(paths[1])
    damage(paths[2])
    rotate(CheckpointStore(tmp_path), KeepPolicy())
    assert steps(store) == [1, 3]


def test_where_nothing_is_valid_nothing_is_removed(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        damage(save(CheckpointStore(tmp_path), step))
    assert rotate(CheckpointStore(tmp_path), KeepPolicy()) == []


def test_the_one_saved_last_stays_where_a_newer_step_is_there(tmp_path: Path) -> None:
    for step in (1, 9):
        save(CheckpointStore(tmp_path), step)
    store = CheckpointStore(tmp_path)
    save(store, 2)
    rotate(store, KeepPolicy())
    assert steps(store) == [2, 9]


def test_the_newest_valid_one_stays_beside_the_one_saved_last(tmp_path: Path) -> None:
    paths = [save(CheckpointStore(tmp_path), step) for step in (1, 5, 9)]
    damage(paths[2])
    store = CheckpointStore(tmp_path)
    save(store, 2)
    rotate(store, KeepPolicy())
    assert steps(store) == [2, 5, 9]


def test_the_newest_valid_one_stays_until_a_newer_one_is_valid(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    paths = [save(store, step) for step in (1, 2, 3, 4)]
    for path in paths[2:]:
        damage(path)
    rotate(CheckpointStore(tmp_path), KeepPolicy())
    assert steps(store) == [2, 4]
    save(store, 3)
    rotate(store, KeepPolicy())
    assert steps(store) == [3, 4]


def test_checkpoints_of_other_runs_are_never_removed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1, run="other")
    for step in (2, 3):
        save(store, step)
    rotate(store, KeepPolicy())
    assert steps(store) == [1, 3]


def test_other_people_s_policies_cannot_remove_what_is_protected(tmp_path: Path) -> None:
    class Nothing:
        def keep(self, entries: Any) -> set[int]:
            return set()

    store = CheckpointStore(tmp_path)
    for step in (1, 2, 3):
        save(store, step)
    store.pin(1)
    rotate(store, Nothing())
    assert steps(store) == [1, 3]


@pytest.mark.parametrize(
    "settings",
    [
        {"keep_last": 0},
        {"keep_last": 1.0},
        {"keep_every": -1},
        {"keep_best": "eval/loss"},
        {"keep_best": ("eval/loss", "low", 1)},
        {"keep_best": ("eval/loss", "min", 0)},
    ],
)
def test_a_policy_that_cannot_work_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        KeepPolicy(**settings)


class _Life:
    """A directory through saves, crashes, restarts and deletions, and what must be in it."""

    def __init__(self, directory: Path, chance: random.Random) -> None:
        self.chance = chance
        self.store = CheckpointStore(directory)
        self.losses: dict[int, float] = {}  # of what was saved and not deleted by hand
        self.step = 0
        best: Any = ("eval/loss", chance.choice(["min", "max"]), chance.randint(1, 2))
        self.policy = KeepPolicy(
            keep_last=chance.randint(1, 3),
            keep_best=chance.choice([None, best]),
            keep_every=chance.choice([None, 4]),
        )

    def act(self) -> None:
        self.chance.choice(
            [self._save] * 5 + [self._crash, self._restart, self._delete, self._pin]
        )()
        assert set(steps(self.store)) == set(self.losses)

    def _save(self) -> None:
        self.step += self.chance.randint(1, 2)
        loss = self.chance.choice([math.nan, 1.0, 2.0, 3.0])
        save(self.store, self.step, loss)
        self.losses[self.step] = loss
        rotate(self.store, self.policy)
        self.losses = {step: self.losses[step] for step in self._expected()}

    def _expected(self) -> set[int]:
        every = sorted(self.losses)
        kept = set(every[-(self.policy.keep_last or 0) :]) | (set(every) & self.store.pinned())
        kept |= {step for step in every if self.policy.keep_every and step % 4 == 0}
        if self.policy.keep_best is not None:
            _, mode, count = self.policy.keep_best
            sign = 1 if mode == "min" else -1
            good = [step for step in every if not math.isnan(self.losses[step])]
            kept.update(sorted(good, key=lambda step: (sign * self.losses[step], step))[:count])
        return kept

    def _crash(self) -> None:
        directory = self.store.directory
        leftover = directory / f".tmp-{self.step + 1}-abc"
        leftover.mkdir(parents=True, exist_ok=True)
        (leftover / "x.json").write_text("{")
        self._restart()
        self.store.clean()
        assert not leftover.exists()

    def _restart(self) -> None:
        self.store = CheckpointStore(self.store.directory)
        newest = self.store.newest_valid(pytest.fail)
        assert (newest.step if newest else 0) == max(self.losses, default=0)

    def _delete(self) -> None:
        if len(self.losses) > 1:
            step = self.chance.choice(sorted(self.losses)[:-1])
            (entry,) = [one for one in self.store.checkpoints() if one.step == step]
            shutil.rmtree(entry.path)
            del self.losses[step]

    def _pin(self) -> None:
        if self.losses:
            self.store.pin(self.chance.choice(sorted(self.losses)))


@pytest.fixture
def _no_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    # What stays does not depend on them, and a life has a hundred.
    for name in ("sync", "sync_directory"):
        monkeypatch.setattr(files, name, lambda _: None)


def _live(directory: Path, seed: int) -> None:
    life = _Life(directory, random.Random(seed))
    for _ in range(12):
        life.act()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.usefixtures("_no_syncs")
def test_in_random_lives_what_must_stay_is_there_and_nothing_else(tmp_path: Path) -> None:
    for seed in range(40):
        _live(tmp_path / str(seed), seed)


@pytest.mark.slow
@pytest.mark.usefixtures("_no_syncs")
def test_in_two_thousand_random_lives_what_must_stay_is_there(tmp_path: Path) -> None:
    for seed in range(1000, 3000):
        _live(tmp_path / str(seed), seed)
