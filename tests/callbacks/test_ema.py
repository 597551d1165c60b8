"""Tests of the average of the weights."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.callbacks import Skips
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import with_few
from tests.helpers.toys import fit, make_trainer, toy_loaders, toy_model
from trainkit import Callback, CheckpointError, ConfigError, Run, Trainer
from trainkit.callbacks import EMA, Checkpoint, Evaluation
from trainkit.checkpoint.forms import Unfit
from trainkit.strategies import FSDP


class Trail(Callback):
    """Keeps the weights after each step, and what the model held during evaluations."""

    def __init__(self) -> None:
        self.steps: list[list[Tensor]] = []
        self.evaluated: list[list[Tensor]] = []

    def on_step_end(self, run: Run, result: Any) -> None:
        self.steps.append(values(run.module))

    def on_evaluation_batch_end(self, run: Run) -> None:
        self.evaluated.append(values(run.module))


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(map(torch.equal, first, second))


def average_of(ema: EMA) -> dict[str, Tensor]:
    average: dict[str, Tensor] = ema.state_dict()["average"]
    return average


def averaged(trail: Trail, start: list[Tensor], decay: float, *, warmup: bool) -> list[Tensor]:
    """Return the average, one weight after the other."""
    average = [tensor.clone().to(trail.steps[0][0].device) for tensor in start]
    for number, weights in enumerate(trail.steps):
        now = min(decay, (1 + number) / (10 + number)) if warmup else decay
        for held, weight in zip(average, weights, strict=True):
            held.lerp_(weight, 1 - now)
    return average


@pytest.mark.parametrize("warmup", [True, False])
def test_it_averages_the_weights_after_each_step(warmup: bool) -> None:
    ema, trail, model = EMA(0.8, warmup=warmup), Trail(), toy_model()
    start = values(model)
    fit(make_trainer(callbacks=[ema, trail]), model=model)
    assert len(trail.steps) == ema.updates == 8
    assert equal(list(average_of(ema).values()), averaged(trail, start, 0.8, warmup=warmup))


def test_it_may_take_every_other_step() -> None:
    ema, trail, model = EMA(0.8, warmup=False, every_n_steps=2), Trail(), toy_model()
    start = values(model)
    fit(make_trainer(callbacks=[ema, trail]), model=model)
    trail.steps = trail.steps[1::2]
    assert equal(list(average_of(ema).values()), averaged(trail, start, 0.8, warmup=False))


def test_a_skipped_step_leaves_it_as_it_is() -> None:
    ema = EMA(0.8)
    result = fit(make_trainer(callbacks=[ema, Skips(2, 5)]))
    assert (result.step, ema.updates) == (6, 6)


def test_evaluation_sees_the_average_and_training_does_not() -> None:
    ema, trail, model = EMA(0.9), Trail(), toy_model()
    result = fit(make_trainer(max_epochs=2, callbacks=[ema, trail]), model=model)
    assert equal(trail.evaluated[-1], list(average_of(ema).values()))
    assert equal(values(model), trail.steps[-1])
    plain, untouched = Trail(), toy_model()
    fit(make_trainer(max_epochs=2, callbacks=[plain]), model=untouched)
    assert all(map(equal, plain.steps, trail.steps))
    with ema.applied():
        figures = make_trainer().evaluate(model, toy_loaders()[1], loss_fn=nn.CrossEntropyLoss())
    assert figures == result.metrics
    assert equal(values(model), trail.steps[-1])


class FailsInEvaluation(Trainer):
    def evaluation_step(self, model: nn.Module, batch: Any) -> Any:
        if self.run is not None and self.run.state.step:
            raise ArithmeticError("in the evaluation")
        return super().evaluation_step(model, batch)


def test_the_weights_are_put_back_after_an_error() -> None:
    trail, model = Trail(), toy_model()
    trainer = FailsInEvaluation(max_epochs=1, callbacks=[EMA(0.5, keep_at_end=True), trail])
    with pytest.raises(ArithmeticError):
        fit(trainer, model=model)
    assert equal(values(model), trail.steps[-1])


def test_the_average_is_exported_and_may_stay_in_the_model(tmp_path: Path) -> None:
    ema, model = EMA(0.9), toy_model()
    fit(make_trainer(callbacks=[ema]), model=model)
    trained = values(model)
    ema.save_model(tmp_path / "export")
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert equal(list(average_of(ema).values()), [exported[name] for name in average_of(ema)])
    assert equal(values(model), trained)

    kept, other = EMA(0.9, keep_at_end=True), toy_model()
    trainer = make_trainer(callbacks=[kept], output_dir=tmp_path / "kept")
    fit(trainer, model=other)
    assert equal(values(other), list(average_of(ema).values()))
    with pytest.raises(CheckpointError, match="has left the average in the model"):
        trainer.save_checkpoint()


def test_the_best_checkpoint_gives_its_average_back(tmp_path: Path) -> None:
    ema, model = EMA(0.9), toy_model()
    save = Checkpoint(keep_best=("eval/loss", "min"))
    trainer = make_trainer(max_epochs=2, callbacks=[ema, save], output_dir=tmp_path)
    result = fit(trainer, model=model)
    fresh = toy_model(seed=1)
    EMA.load(fresh, result.checkpoint or "")
    assert equal(values(fresh), list(average_of(ema).values()))
    figures = trainer.evaluate(fresh, toy_loaders()[1], loss_fn=nn.CrossEntropyLoss())
    assert figures == result.metrics
    with pytest.raises(CheckpointError, match=r"no average of a callback `Ema`.*\['EMA'\]"):
        EMA.load(fresh, result.checkpoint or "", name="Ema")


class Normalised(nn.Module):
    """Has buffers, a half-precision parameter, and one that is never trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.scale = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
        self.fixed = nn.Parameter(torch.ones(8), requires_grad=False)
        self.last = nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.norm(self.first(inputs)) * self.scale.float() * self.fixed
        return self.last(hidden)  # type: ignore[no-any-return]


class Buffers(Callback):
    def __init__(self) -> None:
        self.seen: Tensor | None = None

    def on_evaluation_batch_end(self, run: Run) -> None:
        self.seen = run.module.get_buffer("norm.running_mean").clone()


@pytest.mark.parametrize("average_buffers", [False, True])
def test_buffers_are_the_models_own_unless_asked_for(average_buffers: bool) -> None:
    ema, buffers, model = EMA(0.9, average_buffers=average_buffers), Buffers(), Normalised()
    fit(make_trainer(callbacks=[ema, buffers]), model=model)
    average = average_of(ema)
    assert "fixed" not in average
    assert average["scale"].dtype == torch.float32  # bfloat16 would round small changes away
    assert model.scale.dtype == torch.bfloat16
    assert ("norm.running_mean" in average) == average_buffers
    assert buffers.seen is not None
    own = model.norm.running_mean
    expected = average["norm.running_mean"] if average_buffers else own
    assert torch.equal(buffers.seen, expected)  # type: ignore[arg-type]


def buffers_of_a_rank(rank: int) -> list[Any]:
    ema, buffers = EMA(0.9, average_buffers=True), Buffers()
    trainer = make_trainer(callbacks=[ema, buffers])
    fit(trainer, model=Normalised())
    trainer.close()
    return [buffers.seen, list(average_of(ema).values())]


@pytest.mark.e2e
def test_two_processes_evaluate_the_same_buffers() -> None:
    first, second = run_ranks(2, buffers_of_a_rank)
    assert torch.equal(first[0], second[0])


def short_fit(
    rank: int, folder: Path, resume: Any, strategy: str, max_steps: int = 7
) -> dict[str, Tensor]:
    ema = EMA(0.9)
    trainer = make_trainer(
        max_steps=7,
        callbacks=[ema, Evaluation(every_n_steps=3), Checkpoint(every_n_steps=max_steps)],
        output_dir=folder,
        strategy=FSDP(wrap_policy=[nn.Linear]) if strategy == "fsdp" else strategy,
        split_batches=True,
    )
    if resume is None and max_steps < 7:
        trainer.callbacks.callbacks[0].on_checkpoint_saved = stop  # type: ignore[method-assign]
        trainer.callbacks = type(trainer.callbacks)(trainer.callbacks.callbacks)
    try:
        fit(trainer, resume=resume, optimizer=partial(AdamW, lr=0.01))
    except KeyboardInterrupt:
        return {}
    with ema.applied():
        assert trainer.run is not None
        average = trainer.run.module.state_dict()
        whole = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in average.items()}
        result = {name: tensor.detach().clone() for name, tensor in whole.items()}
        result["metrics"] = torch.tensor([*trainer.run.metrics.values()])
    trainer.close()
    return result


def stop(run: Run, path: Path) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("strategies", "sizes", "exact"),
    with_few(
        [(("fsdp", "single"), (2, 1), False)],
        [
            (("fsdp", "fsdp"), (2, 2), True),
            (("ddp", "ddp"), (2, 2), True),
            (("single", "fsdp"), (1, 2), False),
            (("fsdp", "single"), (2, 1), False),
        ],
    ),
)
def test_it_is_resumed_from_shards_and_into_shards(
    strategies: tuple[str, str], sizes: tuple[int, int], exact: bool, tmp_path: Path
) -> None:
    (first, second), (before, after) = strategies, sizes
    whole = run_ranks(after, short_fit, tmp_path / "whole", None, second)[0]
    run_ranks(before, short_fit, tmp_path / "cut", None, first, 4)
    resumed = run_ranks(after, short_fit, tmp_path / "cut", "must", second)[0]
    assert resumed.keys() == whole.keys()
    for name, tensor in whole.items():
        if exact:
            assert torch.equal(resumed[name], tensor), name
        else:  # other processes sum in another order
            torch.testing.assert_close(resumed[name], tensor)


@pytest.mark.e2e
def test_shards_are_evaluated_with_the_average_too(tmp_path: Path) -> None:
    alone = run_ranks(1, short_fit, tmp_path / "1", None, "single")[0]
    for result in run_ranks(2, short_fit, tmp_path / "2", None, "fsdp"):
        for name, tensor in alone.items():
            torch.testing.assert_close(result[name], tensor)


def test_a_resume_with_other_buffers_is_refused(tmp_path: Path) -> None:
    data = (DataLoader(TensorDataset(torch.randn(8, 4), torch.zeros(8).long()), 4), None)
    for average_buffers, resume in ((True, None), (False, "must")):
        callbacks = [EMA(0.9, average_buffers=average_buffers), Checkpoint()]
        trainer = make_trainer(max_steps=2, callbacks=callbacks, output_dir=tmp_path)
        if resume is None:
            fit(trainer, data, model=Normalised())
            continue
        with pytest.raises(CheckpointError, match="other tensors than are averaged now"):
            fit(trainer, data, model=Normalised(), resume=resume)


@pytest.mark.parametrize(
    "arguments",
    [{"decay": -0.1}, {"decay": 1.0}, {"decay": "0.9"}, {"decay": True}, {"every_n_steps": 0}],
)
def test_bad_arguments_are_refused(arguments: Any) -> None:
    with pytest.raises(ConfigError, match=f"`{next(iter(arguments))}` must be"):
        EMA(**arguments)


def test_without_a_fit_there_is_nothing_to_apply(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has averaged nothing"):
        EMA().save_model(tmp_path)


def test_a_state_with_other_keys_is_refused() -> None:
    run: Any = None
    with pytest.raises(Unfit, match="lacks the key 'updates'"):
        EMA().check_state_dict(run, {"average": {}})
