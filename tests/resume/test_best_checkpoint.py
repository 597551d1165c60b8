"""The best checkpoint: which it is, what it gives back, and what is said where there is none."""

import os
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from tests.helpers.callbacks import FailsAt
from tests.helpers.ranks import RanksError, run_ranks
from tests.helpers.toys import toy_loaders, toy_model
from trainkit import Callback, CheckpointError, ConfigError, FitResult, Run, Trainer
from trainkit.callbacks import EMA, Checkpoint, EarlyStopping, Evaluation
from trainkit.checkpoint import CheckpointStore, Entry, KeepPolicy, rotate

HELD_OUT = toy_loaders(batch_size=8)[1]
MIN: Any = ("eval/loss", "min")


class Told(Trainer):
    """Its evaluations give what they are told, one value for each epoch."""

    values: Sequence[float] = ()

    def evaluation_step(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        epoch = self.run.state.epoch if isinstance(self.run, Run) else 0
        value = self.values[epoch - 1] if self.values and epoch else 9.0
        return {**super().evaluation_step(model, batch), "told": torch.tensor(value)}


def train(folder: Path, saving: Checkpoint, *more: Callback, values: Sequence[float] = (),
          model: nn.Module | None = None, trainer: Any = Told, lr: float = 0.5, **options: Any
          ) -> tuple[Told, nn.Module, FitResult]:  # fmt: skip
    """Train four steps in each epoch, and as many epochs as there are values."""
    model = toy_model() if model is None else model
    made = trainer(
        max_epochs=len(values) or 4, output_dir=folder, callbacks=[Evaluation(), *more, saving]
    )
    made.values = values
    options.setdefault("optimizer", partial(SGD, lr=lr))
    result = made.fit(model, toy_loaders(batch_size=8), loss_fn=nn.CrossEntropyLoss(), **options)
    return made, model, result


def steps(folder: Path, kind: str = "checkpoints") -> list[int]:
    return [entry.step for entry in CheckpointStore(folder / kind).checkpoints()]


TOLD: Any = ("eval/told", "max")
NAN = float("nan")


@pytest.mark.parametrize(
    ("values", "count", "best", "kept"),
    [
        ((1.0, 3.0, 2.0, 0.0), 1, 8, [8]),
        ((1.0, 3.0, 2.0, 0.0), 3, 8, [4, 8, 12]),
        ((3.0, 3.0, 3.0, 3.0), 2, 4, [4, 8]),  # of equals the earlier
        ((NAN, 1.0, NAN, NAN), 2, 8, [8]),
        ((0.0, 1.0, 2.0, 3.0), 2, 16, [12, 16]),
    ],
)
@pytest.mark.parametrize("background", [False, True])
def test_the_best_stay(
    values: tuple[float, ...], count: int, best: int, kept: list[int], background: bool,
    tmp_path: Path,
) -> None:  # fmt: skip
    saving = Checkpoint(keep_best=(*TOLD, count), background=background)
    _, _, result = train(tmp_path / "full", saving, values=values)
    assert steps(tmp_path / "full") == sorted({*kept, 16})
    assert (result.best_step, result.best_value) == (best, values[best // 4 - 1])
    assert result.best_checkpoint == tmp_path / "full" / "checkpoints" / f"step-{best:08d}"

    folder = tmp_path / "alone"
    saving = Checkpoint(
        keep_best=(*TOLD, count), weights_only=True, background=background
    )  # fmt: skip
    _, _, result = train(folder, saving, values=values)
    assert result.best_step == best
    assert result.checkpoint == folder / "checkpoints" / "step-00000016"
    assert 16 in steps(folder)
    assert {*steps(folder), *steps(folder, "weights")} == {*kept, 16}
    assert not {*steps(folder)[:-1]} & {*steps(folder, "weights")}


class KillsAt(Callback):
    """Plays a policy that kills the process between a commit and the rotation."""

    def __init__(self, saving: Checkpoint, step: int) -> None:
        self.policy, self.step = saving.policy, step
        saving.policy = self  # type: ignore[assignment]
        self.keep_best = self.policy.keep_best

    def keep(self, entries: Sequence[Entry]) -> set[int]:
        if entries[-1].step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.policy.keep(entries)


def killed(rank: int, folder: Path, values: Sequence[float]) -> None:
    saving = Checkpoint(keep_best=(*TOLD, 1))
    train(folder, saving, KillsAt(saving, 8), values=values)


def test_a_kill_between_save_and_rotation_loses_no_rank(tmp_path: Path) -> None:
    values = (1.0, 5.0, 5.0, 2.0)
    with pytest.raises(RanksError, match="died without a word"):
        run_ranks(1, killed, tmp_path, values)
    assert steps(tmp_path) == [4, 8]
    saving = Checkpoint(keep_best=(*TOLD, 1))
    _, _, result = train(tmp_path, saving, values=values, resume="must")
    assert (result.best_step, result.best_value) == (8, 5.0)
    assert steps(tmp_path) == [8, 16]


def test_weights_alone_are_ranked_on_after_a_crash(tmp_path: Path) -> None:
    """What was saved after the checkpoint that is resumed from is saved once more, not twice."""
    values, saving = (1.0, 5.0, 4.0, 2.0), partial(Checkpoint, keep_best=(*TOLD, 2))
    rare = partial(saving, every_n_epochs=3, weights_only=True)
    with pytest.raises(RuntimeError, match="crash"):
        train(tmp_path, rare(), FailsAt(10, RuntimeError("crash")), values=values)
    # The first evaluation saved all, as there was nothing to resume from.
    assert (steps(tmp_path), steps(tmp_path, "weights")) == ([4], [8])
    _, _, result = train(tmp_path, rare(), values=values, resume="must")
    assert (steps(tmp_path), steps(tmp_path, "weights")) == ([16], [8, 12])
    assert result.best_step == 8
    # With other settings the best of before count too, wherever they are.
    more: Any = {"resume": "must", "schedule": "keep"}
    _, _, result = train(tmp_path, saving(), values=(*values, 9.0), **more)
    assert (result.best_step, steps(tmp_path)[-1]) == (20, 20)
    assert steps(tmp_path, "weights") == [8, 12]


def evaluated(made: Trainer, model: nn.Module, checkpoint: Any = None) -> float:
    return made.evaluate(model, HELD_OUT, checkpoint=checkpoint)["eval/loss"]


class Normalised(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("averages", [False, True])
def test_the_best_weights_are_those_that_were_evaluated(
    averages: bool, weights_only: bool, tmp_path: Path
) -> None:
    more = [EMA(0.5)] if averages else []
    saving = Checkpoint(keep_best=(*MIN, 2), weights_only=weights_only)
    made, model, result = train(tmp_path, saving, *more, model=Normalised(), lr=3.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert evaluated(made, model, "best") == result.best_value
    assert evaluated(made, model, result.best_checkpoint) == result.best_value
    assert evaluated(made, model, "last") == result.metrics["eval/loss"]
    made.save_model(tmp_path / "export", checkpoint="best")
    assert evaluated(made, model, tmp_path / "export") == result.best_value
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())

    made, model, again = train(
        tmp_path, saving, *more, model=Normalised(), lr=3.0, resume="must", restore_best=True
    )
    assert again.best_value == result.best_value == evaluated(made, model)


def test_schedule_free_weights_are_those_that_were_evaluated(tmp_path: Path) -> None:
    schedulefree = pytest.importorskip("schedulefree")
    optimizer = partial(schedulefree.SGDScheduleFree, lr=5.0)
    for weights_only in (False, True):
        saving = Checkpoint(keep_best=MIN, weights_only=weights_only)
        made, model, result = train(
            tmp_path / str(weights_only), saving, optimizer=optimizer, restore_best=True
        )
        assert evaluated(made, model) == result.best_value == evaluated(made, model, "best")
        assert evaluated(made, model, "last") == result.metrics["eval/loss"]


def test_test_is_evaluate_under_another_name(tmp_path: Path) -> None:
    made, model, _ = train(tmp_path, Checkpoint())
    values = made.evaluate(model, {"a": HELD_OUT}, metrics=["accuracy"])
    tested = made.test(model, {"a": HELD_OUT}, metrics=["accuracy"])
    assert tested == {f"test{name.removeprefix('eval')}": v for name, v in values.items()}
    assert sorted(tested) == ["test/a/accuracy", "test/a/loss", "test/a/told"]


def test_what_cannot_be_found_is_said(tmp_path: Path) -> None:
    made, model, result = train(tmp_path, Checkpoint())
    assert (result.best_checkpoint, result.best_step, result.best_value) == (None,) * 3
    with pytest.raises(
        CheckpointError, match=r"no best checkpoint: .* saved without `Checkpoint\(k"
    ):
        evaluated(made, model, "best")
    with pytest.raises(ConfigError, match=r"is 'bset'\. Did you mean `best`\?"):
        made.save_model(tmp_path / "export", checkpoint="bset")
    with pytest.raises(ConfigError, match="`checkpoint` must be a path"):
        evaluated(made, model, 7)
    with pytest.raises(CheckpointError, match="does not fit the model"):
        evaluated(made, nn.Linear(4, 2), "last")
    empty = Trainer(max_steps=1, output_dir=tmp_path / "empty", callbacks=[])
    with pytest.raises(CheckpointError, match=r"holds no last checkpoint\. Pass the folder of one"):
        evaluated(empty, model, "last")
    with pytest.raises(ConfigError, match="but the trainer has none"):
        evaluated(Trainer(max_steps=1, callbacks=[]), model, "best")

    saving = Checkpoint(keep_best=TOLD)
    with pytest.raises(CheckpointError, match="gave a number for the metric of `keep_best`"):
        train(tmp_path / "nan", saving, values=(NAN, NAN), restore_best=True)
    other = Trainer(max_steps=1, output_dir=tmp_path / "nan", callbacks=[])
    with pytest.raises(CheckpointError, match=r"no `eval/told` of \['step-00000008'\] is a number"):
        evaluated(other, model, "best")


class Asks(Callback):
    trainer: Trainer

    def on_epoch_end(self, run: Run) -> None:
        evaluated(self.trainer, run.module, "last")


def test_what_cannot_work_is_refused_before_a_step(tmp_path: Path) -> None:
    for saving in (Checkpoint(), Checkpoint(keep_last=2)):
        with pytest.raises(ConfigError, match=r"nothing says which those are\. Add the callback"):
            train(tmp_path, saving, restore_best=True)
    with pytest.raises(ConfigError, match="`restore_best` must be True or False"):
        train(tmp_path, Checkpoint(keep_best=MIN), restore_best="yes")
    with pytest.raises(ConfigError, match=r"best by 'eval/los', .* only \['eval/loss', 'eval/told"):
        train(tmp_path, Checkpoint(keep_best=("eval/los", "min")))
    with pytest.raises(ConfigError, match="nothing says which those are"):
        Checkpoint(weights_only=True)
    assert not steps(tmp_path)

    asks = Asks()

    class Inside(Told):
        def fit(self, *args: Any, **options: Any) -> FitResult:
            asks.trainer = self
            return super().fit(*args, **options)

    with pytest.raises(ConfigError, match="would exchange weights inside `fit`"):
        train(tmp_path, Checkpoint(), asks, trainer=Inside)


def test_weights_alone_are_never_resumed_from(tmp_path: Path) -> None:
    saving = partial(Checkpoint, keep_best=(*TOLD, 3), weights_only=True)
    values = (1.0, 2.0, 3.0)
    _, _, result = train(tmp_path, saving(), values=values)
    assert steps(tmp_path, "weights") == [8, 12]
    with pytest.raises(CheckpointError, match="holds the weights alone, without optimizer"):
        train(tmp_path, saving(), values=values, resume=result.best_checkpoint)
    # One that somebody has moved among the others is passed over, and drives none of them out.
    assert result.best_checkpoint is not None
    os.rename(result.best_checkpoint, tmp_path / "checkpoints" / "step-00000099")
    (tmp_path / "checkpoints" / "step-00000012").rename(tmp_path / "hidden")
    store = CheckpointStore(tmp_path / "checkpoints")
    assert [entry.step for entry in store.checkpoints()] == [4, 12]
    told: list[str] = []
    newest = store.newest_valid(told.append)
    assert newest is not None
    assert newest.step == 4
    assert "Passed over" in told[0]
    _, _, result = train(tmp_path, saving(keep_last=1), values=values, resume="auto")
    assert result.step == 12

    # Where only weights are left, a new training does not mix with them.
    folder = tmp_path / "checkpoints"
    folder.rename(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"weights` holds the weights of .*Remove this folder"):
        train(tmp_path, saving(), values=values, resume="auto")


def test_rotation_keeps_what_can_be_resumed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (1, 2):
        store.save(step, {"x": {"step": step}}, metadata={"run_id": "r"})
    store.save(3, {"x": {"step": 3}}, metadata={"run_id": "r", "weights_only": True})
    rotate(store, KeepPolicy())
    assert [entry.step for entry in store.checkpoints()] == [2, 3]


def test_early_stopping_and_the_best_agree(tmp_path: Path) -> None:
    values = (1.0, 2.0, 2.0, 2.0, 5.0)
    stopping = EarlyStopping("eval/told", patience=2, mode="max")
    _, _, result = train(tmp_path, Checkpoint(keep_best=TOLD), stopping, values=values)
    assert (result.step, result.best_step) == (16, 8)


def test_what_is_kept_is_explained() -> None:
    saving = Checkpoint(keep_best=("eval/loss", "min", 3), weights_only=True)
    assert saving.explain() == (
        "Saves every epoch and at the last step; keeps the newest, the best 3 by eval/loss (min, "
        "weights alone); training waits meanwhile."
    )


def test_a_run_that_went_back_goes_on_from_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saving = partial(Checkpoint, keep_last=None, keep_best=TOLD)
    train(tmp_path, saving(), values=(1.0, 2.0, 9.0, 9.0))
    back = tmp_path / "checkpoints" / "step-00000008"
    capsys.readouterr()
    _, _, result = train(tmp_path, saving(), values=(1.0, 2.0, 3.0), resume=back)
    assert (result.best_step, result.best_value) == (12, 3.0)  # not what was left
    assert "[12, 16]" in capsys.readouterr().out
    assert steps(tmp_path) == [16, 4, 8, 12]
    _, _, last = train(
        tmp_path, Checkpoint(keep_last=2), values=(1.0, 2.0, 3.0, 4.0, 0.0), resume="auto"
    )
    assert "(step 12)" in capsys.readouterr().out
    assert last.step == 20
    assert steps(tmp_path) == [16, 20]
