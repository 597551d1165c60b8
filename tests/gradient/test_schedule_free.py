"""Optimizers that evaluate other weights than they train, such as those of `schedulefree`."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import schedulefree
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader

from tests.helpers.callbacks import StopsAt
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import with_few
from tests.helpers.toys import toy_dataset, toy_model
from trainkit import Accelerator, Callback, ConfigError, Run, Trainer
from trainkit.callbacks import EMA, Checkpoint, Evaluation
from trainkit.export import load_checkpoint_in_model
from trainkit.precision import FP16
from trainkit.strategies import DDP, FSDP, SingleDevice

KINDS: dict[str, Any] = {
    "AdamW": partial(schedulefree.AdamWScheduleFree, lr=0.1, warmup_steps=3, weight_decay=0.1),
    "SGD": partial(schedulefree.SGDScheduleFree, lr=1.0, foreach=False),
    "RAdam": partial(schedulefree.RAdamScheduleFree, lr=0.1),
    "reference": partial(schedulefree.AdamWScheduleFreeReference, lr=0.1),
}
STRATEGIES: dict[str, Any] = {"single": SingleDevice, "ddp": DDP, "fsdp": FSDP}
STEPS = 8


class Journal(Callback):
    """Notes the weights after each step, and at each evaluation."""

    def __init__(self) -> None:
        self.trained: dict[int, list[Tensor]] = {}
        self.evaluated: dict[int, list[Tensor]] = {}
        self.losses: dict[int, float] = {}

    def on_step_end(self, run: Run, result: Any) -> None:
        self.trained[run.state.step] = weights(run.module)

    def on_step_skipped(self, run: Run, result: Any) -> None:
        self.trained[-run.state.attempts] = weights(run.module)

    def on_evaluation_start(self, run: Run) -> None:
        self.evaluated[run.state.step] = weights(run.module)

    def on_evaluation_end(self, run: Run, metrics: Any) -> None:
        self.losses[run.state.step] = metrics["eval/loss"]


def weights(module: nn.Module) -> list[Tensor]:
    local: list[Any] = [p.detach() for p in module.parameters()]
    return [(p.to_local() if hasattr(p, "to_local") else p).clone() for p in local]


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return all(torch.equal(left, right) for left, right in zip(one, other, strict=True))


class Fitted:
    """A training, with what it left behind."""

    def __init__(
        self,
        folder: Path,
        kind: str = "AdamW",
        strategy: str = "single",
        *,
        stop_at: int | None = None,
        resume: str | None = None,
        evaluate_every: int = 2,
        callbacks: tuple[Callback, ...] = (),
        background: bool = False,
        **settings: Any,
    ) -> None:
        self.journal = Journal()
        self.model = toy_model()
        self.trainer = Trainer(
            max_steps=STEPS,
            strategy=STRATEGIES[strategy](device="cpu"),
            output_dir=folder,
            callbacks=[
                *callbacks,
                Evaluation(every_n_steps=evaluate_every),
                Checkpoint(every_n_steps=3, keep_last=None, background=background),
                self.journal,
                StopsAt(stop_at),
            ],
            **settings,
        )
        loaders = DataLoader(toy_dataset(), batch_size=2, shuffle=True), self.data
        optimizer = KINDS[kind]
        loss_fn = nn.CrossEntropyLoss()
        try:
            self.trainer.fit(
                self.model, loaders, optimizer=optimizer, loss_fn=loss_fn, resume=resume
            )
        finally:
            self.trainer.close()
        assert self.trainer.run is not None
        self.run = self.trainer.run

    @property
    def data(self) -> Any:
        return DataLoader(toy_dataset(8, seed=1), batch_size=4)


def by_hand(kind: str, evaluate: bool) -> tuple[dict[int, list[Tensor]], list[Tensor]]:
    """Return the weights after each step of a plain loop, and those of evaluation at the end."""
    model = toy_model()
    optimizer: Any = KINDS[kind](model.parameters())
    loader = DataLoader(toy_dataset(), batch_size=2)
    optimizer.train()
    trained = {}
    for step, (inputs, targets) in enumerate([*loader][:STEPS], 1):
        loss: Any = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trained[step] = weights(model)
    optimizer.eval()
    return trained, weights(model)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_training_of_a_plain_loop(kind: str, tmp_path: Path) -> None:
    trained, evaluated = by_hand(kind, False)
    journal = Journal()
    model = toy_model()
    trainer = Trainer(max_steps=STEPS, callbacks=[journal, Evaluation(every_n_steps=1)])
    loaders = DataLoader(toy_dataset(), batch_size=2), DataLoader(toy_dataset(8), batch_size=4)
    trainer.fit(model, loaders, optimizer=KINDS[kind], loss_fn=nn.CrossEntropyLoss())
    assert equal(journal.trained, trained)
    assert equal(weights(model), evaluated)
    assert equal(journal.evaluated[STEPS], evaluated)
    assert not equal(trained[STEPS], evaluated)
    figures = trainer.evaluate(model, loaders[1])
    assert figures["eval/loss"] == journal.losses[STEPS]
    trainer.save_model(tmp_path)
    fresh = toy_model(1)
    load_checkpoint_in_model(fresh, tmp_path)
    assert equal(weights(fresh), evaluated)


def resumes_exactly(rank: int, folder: Path, kind: str, strategy: str, settings: Any) -> bool:
    whole = Fitted(folder / "whole", kind, strategy, **settings)
    for stop_at in range(1, STEPS) if kind == "AdamW" and not settings else (3, 4):
        place = folder / str(stop_at)
        first = Fitted(place, kind, strategy, stop_at=stop_at, **settings)
        second = Fitted(place, kind, strategy, resume="must", **settings)
        assert equal(first.journal.trained | second.journal.trained, whole.journal.trained)
        assert equal(
            {**first.journal.evaluated, **second.journal.evaluated},
            {**first.journal.evaluated, **whole.journal.evaluated},
        )
        assert equal(weights(second.model), weights(whole.model))
        assert second.journal.losses[STEPS] == whole.journal.losses[STEPS]
    return True


@pytest.mark.parametrize("kind", with_few(["AdamW"], KINDS))
def test_a_run_resumed_at_any_step_is_the_same_run(kind: str, tmp_path: Path) -> None:
    assert resumes_exactly(0, tmp_path, kind, "single", {})


@pytest.mark.parametrize(
    "settings",
    [
        {"background": True},
        {"gradient_accumulation_steps": 2},
        {"precision": FP16(init_scale=2.0**40, growth_interval=2)},
        {"callbacks": (EMA(0.5),), "evaluate_every": 1},
    ],
    ids=["background", "accumulation", "fp16", "ema"],
)
def test_so_it_is_with_other_settings(settings: dict[str, Any], tmp_path: Path) -> None:
    assert resumes_exactly(0, tmp_path, "AdamW", "single", settings)


@pytest.mark.e2e
@pytest.mark.parametrize(("kind", "strategy"), [("AdamW", "ddp"), ("RAdam", "fsdp")])
def test_so_it_is_on_two_processes(kind: str, strategy: str, tmp_path: Path) -> None:
    assert run_ranks(2, resumes_exactly, tmp_path, kind, strategy, {}) == [True, True]


def test_a_checkpoint_holds_the_weights_to_be_evaluated(tmp_path: Path) -> None:
    fitted = Fitted(tmp_path)
    assert fitted.run.checkpoint is not None
    fresh = toy_model(1)
    load_checkpoint_in_model(fresh, fitted.run.checkpoint)
    assert equal(weights(fresh), weights(fitted.model))


@pytest.mark.e2e
def test_a_sharded_run_goes_on_without_shards(tmp_path: Path) -> None:
    run_ranks(2, partial(_sharded, folder=tmp_path))
    whole = Fitted(tmp_path / "whole", "AdamW")
    resumed = Fitted(tmp_path / "cut", "AdamW", resume="must")
    for one, other in zip(weights(resumed.model), weights(whole.model), strict=True):
        torch.testing.assert_close(one, other)  # other processes sum in another order


def _sharded(rank: int, folder: Path) -> None:
    Fitted(folder / "cut", "AdamW", "fsdp", stop_at=3, split_batches=True)


def test_a_checkpoint_saved_after_the_training_resumes_exactly(tmp_path: Path) -> None:
    optimizer, loss_fn = KINDS["AdamW"], nn.CrossEntropyLoss()
    loader = DataLoader(toy_dataset(), batch_size=2, shuffle=True)

    def fit(steps: int, folder: Path, **how: Any) -> nn.Module:
        model = toy_model()
        trainer = Trainer(max_steps=steps, output_dir=folder, callbacks=[])
        trainer.fit(model, loader, optimizer=optimizer, loss_fn=loss_fn, **how)
        trainer.evaluate(model, loader)
        trainer.save_checkpoint()
        return model

    fit(5, tmp_path / "cut")
    resumed = fit(8, tmp_path / "cut", resume="must", schedule="keep")
    assert equal(weights(resumed), weights(fit(8, tmp_path / "whole")))


def test_a_failed_training_leaves_the_weights_to_be_evaluated(tmp_path: Path) -> None:
    class Fails(Callback):
        def on_evaluation_batch_end(self, run: Run) -> None:
            if run.state.step == 4:
                raise KeyError("test")

    with pytest.raises(KeyError):
        Fitted(tmp_path / "one", callbacks=(fails := Fails(), ema := EMA(0.5)))
    assert ema._module is not None
    whole = Fitted(tmp_path / "two")
    assert equal(weights(ema._module), whole.journal.evaluated[4])
    assert fails is not None


def test_what_is_counted_in_the_groups_is_no_setting_that_was_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Fitted(tmp_path, stop_at=3)
    capsys.readouterr()
    Fitted(tmp_path, resume="must")
    assert "goes on with the checkpoint's" not in capsys.readouterr().out


class Slow(SGD):
    """An optimizer that notes when it is switched."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[str] = []

    def train(self) -> None:
        self.calls.append("train")

    def eval(self) -> None:
        self.calls.append("eval")


def test_an_optimizer_is_switched_around_evaluations_and_saves_alone(tmp_path: Path) -> None:
    made: list[Slow] = []

    def make(parameters: Any) -> Optimizer:
        made.append(Slow(parameters, lr=0.1))
        return made[0]

    trainer = Trainer(
        max_steps=4, output_dir=tmp_path, callbacks=[Evaluation(every_n_steps=3), Checkpoint()]
    )
    loaders = DataLoader(toy_dataset(), batch_size=4), DataLoader(toy_dataset(8), batch_size=4)
    trainer.fit(toy_model(), loaders, optimizer=make, loss_fn=nn.CrossEntropyLoss())
    pair = ["eval", "train"]
    # At the start; for two evaluations and the save of the last step; at the end.
    assert made[0].calls == ["train", *pair, *pair, *pair, "eval"]


def test_a_wrapper_that_is_no_optimizer_is_refused() -> None:
    def make(parameters: Any) -> Any:
        return schedulefree.ScheduleFreeWrapper(SGD(parameters, lr=0.1))

    trainer = Trainer(max_steps=4, callbacks=[])
    with pytest.raises(ConfigError, match=r"must return a `torch.optim.Optimizer`, but"):
        trainer.fit(
            toy_model(), DataLoader(toy_dataset()), optimizer=make, loss_fn=nn.CrossEntropyLoss()
        )


def _shards_a_switched_optimizer(rank: int) -> bool:
    model = toy_model()
    optimizer = KINDS["AdamW"](model.parameters())
    optimizer.train()  # leaves an empty state for each parameter
    trainer = Trainer(max_steps=2, strategy=FSDP(device="cpu"), callbacks=[])
    loader = DataLoader(toy_dataset(), batch_size=2)
    trainer.fit(model, loader, optimizer=optimizer, loss_fn=nn.CrossEntropyLoss())
    return all("z" in state for state in optimizer.state.values())


def test_an_optimizer_that_was_switched_before_it_is_sharded() -> None:
    assert run_ranks(2, _shards_a_switched_optimizer) == [True, True]


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_loop_of_ones_own_goes_on_from_either_mode(mode: str, tmp_path: Path) -> None:
    def go(save_at: int, load: bool) -> list[Tensor]:
        accelerator = Accelerator(cpu=True)
        model = toy_model()
        optimizer: Any = KINDS["AdamW"](model.parameters())
        model, optimizer = accelerator.prepare(model, optimizer)
        if load:
            accelerator.load_state(tmp_path)
        for step in range(save_at if load else 0, STEPS):
            if step == save_at and not load:
                getattr(optimizer, mode)()
                accelerator.save_state(tmp_path)
            optimizer.train()
            inputs = torch.full((2, 4), float(step))
            accelerator.backward(nn.functional.cross_entropy(model(inputs), torch.tensor([0, 1])))
            optimizer.step()
            optimizer.zero_grad()
        optimizer.eval()
        return weights(model)

    assert equal(go(4, False), go(4, True))
