"""`train()` and `eval()` are called as in a loop by hand; what a user freezes stays (rule 21)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.ranks import run_ranks
from tests.helpers.toys import FEATURES, fit, make_trainer, toy_loaders
from trainkit import Callback, Run
from trainkit.callbacks import Checkpoint, Evaluation, FreezeUntil


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.1))
            self.head = nn.Linear(8, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(torch.tanh(self.body(inputs)))
        return outputs


class StillNorms(Net):
    """Keeps batch norm as it is, in the manner of detectors."""

    thawed = False

    def train(self, mode: bool = True) -> "StillNorms":
        super().train(mode)
        if mode and not self.thawed:
            self.body[1].eval()
        return self


class Merging(nn.Linear):
    """An adapter that is part of the weight in evaluation, in the manner of loralib."""

    merged = False

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.weight.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, inputs))
        self.up = nn.Parameter(torch.randn(outputs, 2))

    def train(self, mode: bool = True) -> "Merging":
        super().train(mode)
        if self.merged is mode:
            sign = -1 if mode else 1
            self.weight.data += sign * (self.up @ self.down).detach()
            self.merged = not mode
        return self

    def forward(self, inputs: Tensor) -> Tensor:
        base = super().forward(inputs)
        return base if self.merged else base + inputs @ self.down.T @ self.up.T


def adapted() -> Net:
    model = Net()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model.head = Merging(8, 2)
    return model


class Hook(Callback):
    """Calls a function at a hook, and keeps which parts train in each step."""

    def __init__(self, hook: str = "", call: Callable[[Any], object] | None = None) -> None:
        self.modes: list[dict[str, bool]] = []
        if call is not None:
            setattr(self, hook, lambda run, *_: call(run.module))

    def on_microbatch_start(self, run: Run, batch: Any) -> None:
        self.modes.append({name: part.training for name, part in run.module.named_modules()})


def train(model: Net, hook: Hook | None = None, **settings: Any) -> list[dict[str, bool]]:
    hook = hook or Hook()
    every_step = Evaluation(every_n_steps=1)
    fit(make_trainer(callbacks=[hook, every_step], **settings), toy_loaders(16), model)
    return hook.modes


def by_hand(model: nn.Module) -> nn.Module:
    """The same without dropout, in plain torch, over the samples in their order."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, held_out = toy_loaders(16)
    inputs, targets = loader.dataset.tensors
    for rows in torch.arange(16).view(4, 4):
        model.train()
        loss = nn.functional.cross_entropy(model(inputs[rows]), targets[rows])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(held_out.dataset.tensors[0])
    return model


def same(one: nn.Module, other: nn.Module) -> bool:
    states = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in states)


def in_order(model: Net) -> tuple[Any, Any]:
    model.body[2] = nn.Identity()
    train_set, held_out = toy_loaders(16)
    return torch.utils.data.DataLoader(train_set.dataset, 4), held_out


def test_an_own_train_method_is_that_of_a_loop_by_hand() -> None:
    model, expected = StillNorms(), StillNorms()
    loaders = in_order(model), in_order(expected)
    trainer = make_trainer(callbacks=[Evaluation(every_n_steps=1)])
    fit(trainer, loaders[0], model)
    assert same(model, by_hand(expected))


def strategies(rank: int, strategy: str) -> list[bool]:
    models = StillNorms(), adapted()
    modes = [train(model, strategy=strategy) for model in models]
    still = [not any(step["body.1"] for step in modes[0])]
    return [*still, all(step["head"] for of_model in modes for step in of_model)]


@pytest.mark.e2e
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_it_is_called_under_every_strategy(strategy: str) -> None:
    assert run_ranks(2, strategies, strategy) == [[True, True]] * 2


def test_what_train_itself_thaws_trains_after_the_next_evaluation() -> None:
    def thaw(model: StillNorms) -> None:
        model.thawed = True

    modes = train(StillNorms(), Hook("on_step_end", thaw))
    assert [step["body.1"] for step in modes] == [False, True, True, True]


@pytest.mark.parametrize("hook", ["", "on_fit_start", "on_step_start", "on_evaluation_start"])
def test_what_a_user_puts_into_evaluation_mode_stays_there(hook: str) -> None:
    def freeze(model: Net) -> None:
        model.body.eval()
        model.body[2].train()  # but for its dropout

    model, own = Net(), Hook()
    if hook:
        own = Hook(hook, freeze)
    else:
        freeze(model)
    modes = train(model, own)
    last = {"": True, "body": False, "body.0": False, "body.1": False, "body.2": True, "head": True}
    assert modes[-1] == last
    assert {name: part.training for name, part in model.named_modules()} == last


def test_what_a_user_puts_back_into_training_mode_trains() -> None:
    model = Net()
    model.body.eval()
    modes = train(model, Hook("on_step_end", lambda model: model.body.train()))
    assert [step["body"] for step in modes] == [False, True, True, True]


def test_a_model_in_evaluation_mode_trains_and_is_handed_back_in_it() -> None:
    model = Net().eval()
    assert all(all(step.values()) for step in train(model))
    assert not any(part.training for part in model.modules())


def test_a_frozen_layer_that_thaws_stays_in_the_mode_that_a_user_chose() -> None:
    model, hook = Net(), Hook()
    model.body[1].eval()
    freeze = FreezeUntil(step={"body": 2})
    fit(make_trainer(callbacks=[hook, freeze, Evaluation(every_n_steps=1)]), toy_loaders(16), model)
    assert not any(step["body.1"] for step in hook.modes)
    assert all(step["body.0"] for step in hook.modes)


class Fails(Exception):
    pass


def test_the_mode_comes_back_by_train_after_an_error_too() -> None:
    def fail(outputs: Tensor, targets: Tensor) -> Tensor:
        raise Fails

    model = adapted()
    model.body[1].eval()
    weight = model.head.weight.clone()
    for loss_fn in (nn.CrossEntropyLoss(), fail):
        try:
            make_trainer().evaluate(model, toy_loaders()[1], loss_fn=loss_fn)
        except Fails:
            assert loss_fn is fail
        assert not model.head.merged
        assert torch.equal(model.head.weight, weight)
        assert [part.training for part in model.body] == [True, False, True]


def test_an_evaluation_inside_an_evaluation_stays_in_evaluation_mode() -> None:
    model, seen = adapted(), list[bool]()

    class Inner(Callback):
        def on_evaluation_batch_end(self, run: Run) -> None:
            trainer.evaluate(run.module, toy_loaders()[1])
            seen.append(any(part.training for part in run.module.modules()))

    trainer = make_trainer(callbacks=[Inner()])
    fit(trainer, toy_loaders(16), model)
    assert seen
    assert not any(seen)
    assert not model.head.merged


def weights(model: Net) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_adapters_that_merge_for_evaluation_train_as_without_one() -> None:
    """To the last bit: merging rounds, and would change the weights with each evaluation."""
    found = []
    for loaders in (toy_loaders(16), toy_loaders(16)[0]):
        model = adapted()
        every_step = [Evaluation(every_n_steps=1)] if isinstance(loaders, tuple) else []
        fit(make_trainer(callbacks=every_step), loaders, model)
        found.append(weights(model))
    assert torch.equal(*found)


def test_adapters_of_a_model_in_evaluation_mode_are_loaded_and_saved_apart(tmp_path: Path) -> None:
    model, (loader, held_out) = adapted().eval(), toy_loaders(16)
    best = Checkpoint(keep_best=("eval/loss", "min"))
    trainer = make_trainer(callbacks=[best], output_dir=tmp_path)
    fit(trainer, (loader, held_out), model, restore_best=True)
    assert model.head.merged
    found = trainer.evaluate(model, held_out)["eval/loss"]
    with_best = trainer.evaluate(model, held_out, checkpoint="best")["eval/loss"]
    assert trainer.run is not None
    assert found == with_best == pytest.approx(trainer.run.metrics["eval/loss"])

    one_step = make_trainer(max_steps=1, output_dir=tmp_path / "late")
    fit(one_step, (loader, held_out), model)
    expected = one_step.evaluate(model, held_out)["eval/loss"]
    one_step.save_checkpoint()
    resumed = adapted()
    fit(one_step, (loader, held_out), resumed, resume="must")
    assert one_step.evaluate(resumed, held_out)["eval/loss"] == pytest.approx(expected)


def test_a_resume_of_adapters_that_merge_is_the_same_run(tmp_path: Path) -> None:
    found = []
    for steps in ([4], [2, 4]):
        model = adapted()
        for number, last in enumerate(steps):
            model = adapted()
            callbacks = [Evaluation(every_n_steps=1), Checkpoint(every_n_steps=1)]
            folder = tmp_path / str(len(steps))
            trainer = make_trainer(max_steps=last, callbacks=callbacks, output_dir=folder)
            again: dict[str, Any] = {"resume": "must", "schedule": "keep"} if number else {}
            fit(trainer, toy_loaders(16), model, **again)
        found.append(weights(model))
    assert torch.equal(*found)
