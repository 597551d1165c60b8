"""Everything that a run goes on from is in its checkpoint, and nothing moves before it fits."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader

from tests.helpers.callbacks import Counting, OfOneRun
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import with_few
from tests.helpers.toys import toy_dataset, toy_model
from trainkit import Callback, CheckpointError, Run, StepOutput, Trainer
from trainkit.callbacks import Checkpoint, Evaluation, JSONLLogger
from trainkit.checkpoint import CheckpointStore


def facts(run: Run, counting: Counting) -> dict[str, Any]:
    """Return what must be after a resume as it was at the save."""
    names = {id(p): name for name, p in run.module.named_parameters()}
    return {
        "counters": run.state.state_dict(),
        "figures": (run.metrics, run.best_metrics),
        "marks": (
            run.logging.last_step,
            run.evaluation.evaluated_attempt,
            run.checkpoints.saved_attempt,
        ),
        "sums": run.logging.sums.state_dict(),
        "callback": counting.steps,
        "weights": [p.tolist() for p in run.module.parameters()],
        "moments": {
            names[id(p)]: [value.tolist() for value in values.values()]
            for p, values in run.optimizer.state.items()
        },
        "groups": [
            ([names[id(p)] for p in group["params"]], group["lr"], group["weight_decay"])
            for group in run.optimizer.param_groups
        ],
    }


def draws() -> tuple[float, ...]:
    """Return what the generators would give next, and leave them as they are."""
    python, numpy, host = random.getstate(), np.random.get_state(), torch.get_rng_state()
    drawn = random.random(), float(np.random.rand()), torch.rand(1).item()
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(host)
    return drawn


class Witness(OfOneRun):
    """Notes facts when a checkpoint is saved or loaded, and the draws at each step."""

    def __init__(self, counting: Counting, die_at: int | None) -> None:
        self.counting = counting
        self.die_at = die_at
        self.saved: dict[int, dict[str, Any]] = {}
        self.loaded: dict[str, Any] = {}
        self.draws: dict[int, tuple[float, ...]] = {}
        self.epochs: list[int] = []

    def on_checkpoint_saved(self, run: Run, path: Path) -> None:
        self.saved[run.state.step] = facts(run, self.counting)
        if run.state.step == self.die_at:
            raise KeyboardInterrupt

    def on_checkpoint_loaded(self, run: Run, path: Path) -> None:
        self.loaded = facts(run, self.counting)
        random.random()
        np.random.rand()
        torch.rand(1)

    def on_epoch_start(self, run: Run) -> None:
        self.epochs.append(run.state.epoch)

    def on_step_start(self, run: Run) -> None:
        self.draws[run.state.attempts] = draws()
        random.random()
        np.random.rand()
        torch.rand(1)


class Weighted(Trainer):
    """Weighs by items, and evaluates worse with every epoch."""

    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        return StepOutput(loss, 1 + batch[1].sum())

    def evaluation_step(self, model: nn.Module, batch: Any) -> dict[str, Any]:
        assert self.run is not None
        return {"loss": torch.tensor(1.0 + self.run.state.step)}


def two_groups(parameters: Any) -> AdamW:
    """Return an optimizer whose groups are not in the order of the model."""
    listed: list[nn.Parameter] = list(parameters)
    first, second, *rest = listed
    groups: list[dict[str, Any]] = [{"params": rest, "lr": 0.02}, {"params": [second, first]}]
    return AdamW(groups, lr=0.01)


def fit(
    rank: int, folder: Path, die_at: int | None, resume: str | None, **options: Any
) -> tuple[Witness, nn.Module]:
    counting = Counting()
    witness = Witness(counting, die_at)
    model = toy_model()
    save = options.pop("save", {"every_n_steps": 1, "keep_last": None})
    evaluation = Evaluation(every_n_steps=2, at_end=False)
    batch_size = options.pop("batch_size", 2)
    trainer = Weighted(
        max_epochs=2,
        callbacks=[counting, witness, evaluation, JSONLLogger(), Checkpoint(**save)],
        output_dir=folder,
        log_every_n_steps=3,
        gradient_accumulation_steps=2,
        **options,
    )
    trainer.fit(
        model,
        (DataLoader(toy_dataset(), batch_size, shuffle=True), DataLoader(toy_dataset(8), 4)),
        optimizer=two_groups,
        resume=resume,
    )
    return witness, model


# 5: after an evaluation, between two logs. 6: a log and an evaluation. 8: the end of an epoch.
@pytest.mark.parametrize("step", with_few([5], [5, 6, 8, 11]))
def test_a_run_goes_on_from_all_that_it_had(step: int, tmp_path: Path) -> None:
    whole, _ = fit(0, tmp_path / "whole", None, None)
    with pytest.raises(KeyboardInterrupt):
        fit(0, tmp_path / "cut", step, None)
    resumed, _ = fit(0, tmp_path / "cut", None, "must")
    assert whole.saved[step]["figures"][0] != whole.saved[step]["figures"][1]
    for name, value in whole.saved[step].items():
        assert resumed.loaded[name] == value, name
    assert resumed.draws == {k: v for k, v in whole.draws.items() if k >= step}
    assert {s: v for s, v in resumed.saved.items() if s > step} == {
        s: v for s, v in whole.saved.items() if s > step
    }
    assert resumed.epochs == [epoch for epoch in whole.epochs if epoch * 8 >= step]


def fit_two(rank: int, folder: Path, die_at: int) -> Any:
    try:
        witness, _ = fit(rank, folder, die_at, None, batch_size=2, split_batches=True)
    except KeyboardInterrupt:
        store = CheckpointStore(folder / "checkpoints")
        checkpoint = store.open(store.checkpoints()[-1].path)
        return checkpoint.read(f"process-{rank:05d}")["log_sums"]
    return witness.loaded


def test_open_sums_of_the_log_survive_another_number_of_processes(tmp_path: Path) -> None:
    of_two = run_ranks(2, fit_two, tmp_path, 5)
    loaded, _ = fit(0, tmp_path, None, "must", batch_size=2, split_batches=True)
    assert of_two[0].keys() == {"loss"}
    assert of_two[0] != of_two[1]
    kinds, values, weights = zip(*(sums["loss"] for sums in of_two), strict=True)
    assert loaded.loaded["sums"] == {"loss": (kinds[0], sum(values), sum(weights))}


class Other(Counting):
    """Another callback with a state, which no checkpoint here has."""


@pytest.mark.parametrize("other", ["seed", "callback"])
def test_what_does_not_fit_leaves_the_model_alone(tmp_path: Path, other: str) -> None:
    fit(0, tmp_path, None, None)
    model = toy_model(seed=7)
    before = [p.detach().clone() for p in model.parameters()]
    callbacks = [Counting(), Evaluation(every_n_steps=2, at_end=False), Checkpoint()]
    trainer = Weighted(
        max_epochs=2,
        output_dir=tmp_path,
        seed=3 if other == "seed" else 0,
        gradient_accumulation_steps=2,
        callbacks=callbacks if other == "seed" else [*callbacks, Other()],
    )
    with pytest.raises(CheckpointError, match=rf"fit:\n  - {other}"):
        trainer.fit(
            model,
            (DataLoader(toy_dataset(), 2, shuffle=True), DataLoader(toy_dataset(), 4)),
            optimizer=two_groups,
            resume="must",
        )
    assert all(map(torch.equal, before, model.parameters()))


def test_the_manifest_has_figures_of_its_own_step_only(tmp_path: Path) -> None:
    fit(0, tmp_path, None, None)
    found = {
        entry.step: entry.manifest.metadata["metrics"]
        for entry in CheckpointStore(tmp_path / "checkpoints").checkpoints()
    }
    assert {step for step, metrics in found.items() if metrics} == set(range(2, 17, 2))
    assert found[4] == {"eval/loss": 5.0}


def test_each_step_is_saved_once(tmp_path: Path) -> None:
    saved: list[int] = []

    class Asking(Callback):
        def on_checkpoint_start(self, run: Run) -> None:
            saved.append(run.state.step)

        def on_epoch_end(self, run: Run) -> None:
            run.request_checkpoint(agreed=True)

    trainer = Weighted(
        max_epochs=2, output_dir=tmp_path, callbacks=[Asking(), Checkpoint(every_n_steps=3)]
    )
    trainer.fit(toy_model(), DataLoader(toy_dataset(), 4), optimizer=two_groups)
    assert saved == [3, 6, 8, 9, 12, 15, 16]


def test_a_background_save_is_committed_when_the_fit_returns(tmp_path: Path) -> None:
    saved: list[Path] = []

    class Noting(Callback):
        def on_checkpoint_saved(self, run: Run, path: Path) -> None:
            saved.append(path)

    trainer = Weighted(
        max_steps=1, output_dir=tmp_path, callbacks=[Noting(), Checkpoint(background=True)]
    )
    trainer.fit(toy_model(), DataLoader(toy_dataset(), 4), optimizer=two_groups)
    assert saved == [tmp_path / "checkpoints" / "step-00000001"]


def test_the_result_names_the_last_checkpoint(tmp_path: Path) -> None:
    trainer = Weighted(max_steps=1, output_dir=tmp_path, callbacks=[Checkpoint()])
    result = trainer.fit(toy_model(), DataLoader(toy_dataset(), 4), optimizer=two_groups)
    assert result.checkpoint == tmp_path / "checkpoints" / "step-00000001"


def test_a_skipped_window_is_not_read_again(tmp_path: Path) -> None:
    class Skipping(OfOneRun):
        def __init__(self) -> None:
            self.seen: list[Tensor] = []

        def on_microbatch_start(self, run: Run, batch: Any) -> None:
            self.seen.append(batch[0].clone())

        def on_gradients(self, run: Run) -> None:
            if run.state.attempts == 1:
                run.request_skip("a test")

    def run(folder: Path, resume: str | None, steps: int) -> tuple[list[Tensor], Any]:
        skipping = Skipping()
        trainer = Weighted(
            max_steps=steps, output_dir=folder, callbacks=[skipping, Checkpoint(every_n_steps=1)]
        )
        loader = DataLoader(toy_dataset(), 4, shuffle=True)
        result = trainer.fit(
            toy_model(), loader, optimizer=two_groups, resume=resume,
            schedule="keep" if resume else None,
        )  # fmt: skip
        return skipping.seen, result

    whole, result = run(tmp_path / "whole", None, 4)
    assert (result.step, result.skipped_steps, result.samples_seen) == (4, 1, 20)
    first, _ = run(tmp_path / "cut", None, 2)
    rest, _ = run(tmp_path / "cut", "must", 4)
    assert all(map(torch.equal, [*first, *rest], whole))
    assert len(whole) == 5
