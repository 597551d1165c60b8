"""The hooks come in the documented order, and those that nobody overrides do not come."""

import gc
import re
import sys
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.toys import fit as fit_toys
from trainkit import Callback, ConfigError, Run, Trainer
from trainkit.training.callback import HOOKS
from trainkit.training.callback_list import CallbackList


class Recorder(Callback):
    """Records every hook, asks for an evaluation after each step, and skips one step."""

    def __init__(self, *, skip_attempt: int | None = None) -> None:
        self.calls: list[str] = []
        self.skip_attempt = skip_attempt


def _recording(hook: str) -> Any:
    def record(self: Recorder, run: Run, *args: Any) -> None:
        self.calls.append(hook)
        if hook == "on_step_end":
            run.request_evaluation()
        if hook == "on_gradients" and run.state.attempts == self.skip_attempt:
            run.request_skip("the test says so")

    return record


for _hook in HOOKS:
    setattr(Recorder, _hook, _recording(_hook))


def loader(samples: int = 8) -> DataLoader[Any]:
    data = TensorDataset(torch.randn(samples, 3), torch.randn(samples, 1))
    return DataLoader(data, batch_size=2)


def fit(callbacks: list[Callback], **options: Any) -> Any:
    options = {"max_epochs": 1, "gradient_accumulation_steps": 2, "log_every_n_steps": 1} | options
    trainer = Trainer(callbacks=callbacks, **options)
    return fit_toys(trainer, (loader(), loader(2)), nn.Linear(3, 1), loss_fn=nn.functional.mse_loss)


MICRO_BATCH = ["on_microbatch_start", "on_microbatch_end"]
WINDOW = ["on_step_start", *MICRO_BATCH, *MICRO_BATCH, "on_gradients"]
PHASES = ["on_log", "on_evaluation_start", "on_evaluation_batch_end", "on_evaluation_end"]


def test_hooks_run_in_order() -> None:
    recorder = Recorder()
    fit([recorder])
    assert recorder.calls == [
        "on_fit_start",
        "on_epoch_start",
        *[*WINDOW, "on_step_end", *PHASES],
        # The end of the epoch comes before the phases of its last step, which run once.
        *[*WINDOW, "on_step_end", "on_epoch_end", *PHASES],
        "on_fit_end",
    ]


def test_the_docstring_lists_the_hooks_in_the_order_in_which_they_come() -> None:
    documented = re.findall(r"\bon_\w+", (Callback.__doc__ or "").split("\n\n")[2])
    assert sorted(documented) == sorted(HOOKS)
    recorder = Recorder(skip_attempt=1)
    fit([recorder], max_epochs=2)
    seen = list(dict.fromkeys(recorder.calls))
    # The skip comes after the first epoch's end; nothing is saved here, and nothing fails.
    quiet = {"on_exception", "on_step_skipped", "on_late_log"}
    quiet |= {"on_checkpoint_loaded", "on_checkpoint_start", "on_checkpoint_saved"}
    assert [h for h in seen if h not in quiet] == [h for h in documented if h not in quiet]


def test_a_skipped_step_has_its_own_hook_and_no_end() -> None:
    recorder = Recorder(skip_attempt=0)
    result = fit([recorder])
    assert (result.step, result.skipped_steps) == (1, 1)
    first = recorder.calls.index("on_gradients")
    assert recorder.calls[first + 1] == "on_step_skipped"
    assert recorder.calls.count("on_step_end") == 1


def test_the_end_comes_after_an_exception() -> None:
    class Broken(Callback):
        def on_gradients(self, run: Run) -> None:
            raise RuntimeError("boom")

    recorder = Recorder()
    with pytest.raises(RuntimeError, match="boom") as caught:
        fit([recorder, Broken()])
    assert recorder.calls[-2:] == ["on_exception", "on_fit_end"]
    notes = "\n".join(caught.value.__notes__)
    assert "`on_gradients` of the callback `Broken`" in notes
    assert "process 0 of 1, epoch 0, after step 0" in notes


def test_an_error_while_ending_does_not_hide_the_first() -> None:
    class Broken(Callback):
        def on_step_start(self, run: Run) -> None:
            raise RuntimeError("first")

        def on_exception(self, run: Run, error: BaseException) -> None:
            raise RuntimeError("second")

        def on_fit_end(self, run: Run) -> None:
            raise RuntimeError("third")

    with pytest.raises(RuntimeError, match="first") as caught:
        fit([Broken()])
    notes = "\n".join(caught.value.__notes__)
    where = "After it the hook `{}` of the callback `Broken` raised RuntimeError('{}')."
    assert where.format("on_exception", "second") in notes
    assert where.format("on_fit_end", "third") in notes


def count_hook_calls(callbacks: list[Callback]) -> tuple[int, int]:
    """Return how many hooks of `Callback` itself ran, and how many Python calls in all."""
    own = {getattr(Callback, hook).__code__ for hook in HOOKS}
    counts = [0, 0]

    def profile(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            counts[1] += 1
            counts[0] += frame.f_code in own

    trainer = Trainer(max_epochs=3, callbacks=callbacks)
    model, data = nn.Linear(3, 1), loader()
    make = partial(SGD, lr=0.1)
    trainer.fit(model, data, optimizer=make, loss_fn=nn.functional.mse_loss)  # warms up
    gc.collect()
    gc.disable()  # what it calls belongs to others
    sys.setprofile(profile)
    try:
        trainer.fit(model, data, optimizer=make, loss_fn=nn.functional.mse_loss)
    finally:
        sys.setprofile(None)
        gc.enable()
    return counts[0], counts[1]


def test_a_hook_that_nobody_overrides_is_not_called() -> None:
    idle: list[Callback] = []
    for number in range(100):
        callback = Callback()
        callback.name = f"idle {number}"
        idle.append(callback)
    count_hook_calls([])  # fills the caches of Python and torch
    hooks, calls = count_hook_calls(idle)
    assert hooks == 0
    assert calls <= count_hook_calls([])[1] + len(idle)  # once a fit: whether it has a state


def test_only_overridden_hooks_are_kept() -> None:
    class Ends(Callback):
        def on_fit_end(self, run: Run) -> None: ...

    callbacks = CallbackList([Callback(), Ends()])
    assert callbacks.listens(Callback.on_fit_end)
    assert not callbacks.listens(Callback.on_step_end)


def test_a_stop_request_ends_the_fit_after_the_step() -> None:
    class Stops(Callback):
        def on_step_end(self, run: Run, result: Any) -> None:
            run.request_stop("enough")

    result = fit([Stops()], max_epochs=5)
    assert (result.step, result.stop_reason) == (1, "enough")


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        ([Recorder], r"holds the class `Recorder`. Write `Recorder\(\.\.\.\)`"),
        ([Recorder(), Recorder()], "Two callbacks are called 'Recorder'"),
        (["bar"], "must hold instances of `trainkit.Callback`, but holds 'str'"),
    ],
)
def test_bad_callbacks_are_refused(callbacks: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(max_epochs=1, callbacks=callbacks)
