"""Tests of what is done about losses and gradients that are not finite."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.ranks import run_ranks
from tests.helpers.toys import fit, make_trainer, toy_dataset, toy_model
from trainkit import Callback, ConfigError, NonFiniteError, Run, StepOutput, Trainer
from trainkit.callbacks import Evaluation, NaNGuard

Poison = Callable[[Tensor], Tensor]


class _Evaluations(Callback):
    count = 0

    def on_evaluation_end(self, run: Run, metrics: dict[str, float]) -> None:
        self.count += 1


class _Losing(Trainer):
    """Weighs each batch by the number that its first feature is."""

    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        inputs, targets = batch
        weight = inputs[0, 0]
        loss = nn.functional.cross_entropy(model(inputs), targets)
        return StepOutput(torch.where(weight > 0, loss, math.nan), weight)


def _loader(bad_sample: int | None, samples: int = 32) -> Any:
    """Return samples in their order, batches of 4; one of them holds a NaN."""
    features, classes = toy_dataset(samples).tensors
    if bad_sample is not None:
        features[bad_sample, 0] = math.nan
    return DataLoader(TensorDataset(features, classes), batch_size=4)


def _error(guard: NaNGuard, loader: Any, model: Any = None, **settings: Any) -> NonFiniteError:
    with pytest.raises(NonFiniteError) as caught:
        fit(make_trainer(callbacks=[guard], **settings), loader, model=model)
    return caught.value


def test_the_error_names_step_process_samples_and_parameter() -> None:
    error = _error(NaNGuard(), _loader(bad_sample=13), log_every_n_steps=5)
    assert (error.step, error.process, error.parameter) == (3, 0, "0.weight")
    assert "After step 3, the loss of process 0 and the gradient of `0.weight`" in str(error)
    assert "samples 12 to 15 in the order of epoch 0" in str(error)


def test_the_parameter_is_named_where_others_have_no_gradient() -> None:
    class Idle(nn.Sequential):
        def forward(self, inputs: Tensor) -> Any:
            return self[1](inputs)

    error = _error(NaNGuard(), _loader(bad_sample=13), Idle(nn.Linear(4, 2), toy_model()))
    assert error.parameter == "1.0.weight"


def test_it_is_found_at_the_next_log_point() -> None:
    trainer = make_trainer(callbacks=[NaNGuard()], log_every_n_steps=6)
    with pytest.raises(NonFiniteError):
        fit(trainer, _loader(bad_sample=13))
    assert trainer.run is not None
    assert trainer.run.state.step == 6


@pytest.mark.parametrize("settings", [{"max_epochs": 2}, {"max_steps": 5}, {"max_steps": 8}])
def test_it_is_found_at_the_end_of_an_epoch_and_of_the_training(settings: Any) -> None:
    assert _error(NaNGuard(), _loader(bad_sample=19), **settings).step == 4


def test_a_bad_model_is_never_evaluated() -> None:
    seen = _Evaluations()
    trainer = make_trainer(callbacks=[Evaluation(every_n_steps=4), NaNGuard(), seen])
    with pytest.raises(NonFiniteError):
        fit(trainer, (_loader(bad_sample=19), _loader(None)))
    assert seen.count == 1  # after step 4; the bad one is the fifth


class _BadGradient(nn.Module):
    """Has finite losses, and one gradient that is NaN where the first an input is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.body = toy_model()
        self.root = nn.Parameter(torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        result = self.body(inputs)
        assert isinstance(result, Tensor)
        return result + (inputs[:1, :1].abs() * (1 + self.root)).sqrt()


def test_a_bad_gradient_of_a_finite_loss_is_found_in_its_own_step() -> None:
    loader = _loader(None)
    loader.dataset.tensors[0][8, 0] = 0.0
    error = _error(NaNGuard(), loader, _BadGradient(), log_every_n_steps=3)
    assert (error.step, error.parameter) == (2, "root")
    assert "`root` (not the loss)" in str(error)


def test_a_mean_over_no_items_is_no_bad_loss() -> None:
    loader = _loader(None)
    loader.dataset.tensors[0][:, 0] = 1.0
    loader.dataset.tensors[0][4:8, 0] = 0.0  # the second batch weighs nothing; its loss is NaN
    trainer = _Losing(max_epochs=1, callbacks=[NaNGuard()], gradient_accumulation_steps=2)
    assert fit(trainer, loader).step == 4


def test_a_large_finite_gradient_is_not_bad() -> None:
    loader = _loader(None)
    loader.dataset.tensors[0][0, 0] = 1e25  # its square is infinite
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-30)
    trainer = make_trainer(callbacks=[NaNGuard()], max_steps=1)
    assert fit(trainer, loader, model=model, optimizer=optimizer).step == 1


def test_what_another_callback_skips_is_not_reported() -> None:
    trainer = make_trainer(callbacks=[NaNGuard(), _named(NaNGuard("skip"))], max_steps=7)
    assert fit(trainer, _loader(bad_sample=13)).skipped_steps == 1


def test_overflows_of_fp16_are_not_its_business() -> None:
    trainer = make_trainer(callbacks=[NaNGuard()], precision="fp16", max_steps=7)
    result = fit(trainer, _loader(bad_sample=13))
    assert (result.step, result.skipped_steps) == (7, 1)


def test_skip_leaves_bad_windows_out() -> None:
    model, same = toy_model(), toy_model()
    result = fit(make_trainer(callbacks=[NaNGuard("skip")]), _loader(bad_sample=13), model=model)
    assert (result.step, result.skipped_steps, result.samples_seen) == (7, 1, 32)
    dataset = _loader(None).dataset
    kept = [i for i in range(32) if not 12 <= i < 16]
    loader = DataLoader(TensorDataset(*dataset[kept]), batch_size=4)
    fit(make_trainer(), loader, model=same)
    assert all(map(torch.equal, model.parameters(), same.parameters()))


def test_skip_gives_up_after_the_limit_and_says_why() -> None:
    model = toy_model()
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    trainer = make_trainer(callbacks=[NaNGuard("skip")], max_consecutive_skips=3)
    with pytest.raises(Exception, match=r"4 windows in a row .* the gradient norm is nan"):
        fit(trainer, _loader(None), model=model)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match='must be "raise" or "skip", but is \'warn\''):
        NaNGuard("warn")  # type: ignore[arg-type]


def _two(rank: int, policy: Any) -> tuple[int, int, str] | tuple[int, int]:
    trainer = make_trainer(callbacks=[NaNGuard(policy)], log_every_n_steps=3)
    try:
        # Sample 13 is in the second global batch, on process 1.
        result = fit(trainer, _loader(bad_sample=13))
    except NonFiniteError as error:
        return error.step, error.process, str(error)
    finally:
        trainer.close()
    return result.step, result.skipped_steps


def test_two_processes_raise_the_same_error_that_names_the_bad_one() -> None:
    first, second = run_ranks(2, _two, "raise")
    assert first == second
    assert first[:2] == (1, 1)
    assert "the loss of process 1 and the gradient of `0.weight`" in first[2]


def test_two_processes_skip_the_same_window() -> None:
    assert run_ranks(2, _two, "skip") == [(3, 1), (3, 1)]


def _named(callback: Callback) -> Callback:
    callback.name = "second"
    return callback
