"""Cases that a careful reader found: weights, buffers, requests, and what a second fit inherits."""

from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset, random_split
from typing_extensions import override

from tests.helpers.ranks import RanksError, in_turn, run_ranks
from trainkit import (
    Callback,
    Combined,
    ConfigError,
    DataError,
    DistributedError,
    LRSchedule,
    Run,
    StepOutput,
    StepResult,
    Trainer,
)
from trainkit.callbacks import Evaluation, MainProcess, NaNGuard
from trainkit.distributed import AsyncFlags
from trainkit.precision import FP16


def make_loader(samples: int = 8, batch_size: int = 2) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(samples, 3, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs[:, :1]), batch_size=batch_size)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def fit(trainer: Trainer, model: nn.Module | None = None, **options: Any) -> Any:
    defaults: dict[str, Any] = {"optimizer": partial(SGD, lr=0.1)}
    defaults["loss_fn"] = nn.functional.mse_loss
    options = defaults | options
    loaders = options.pop("loaders", None) or make_loader()
    return trainer.fit(model or make_model(), loaders, **options)


class Weighted(Trainer):
    weights: Any = None
    persistent: Tensor | None = None

    def training_step(self, model: nn.Module, batch: Any) -> StepOutput:
        loss = nn.functional.mse_loss(model(batch[0]), batch[1])
        rank, run = self.processes.process_index, self.run
        assert run is not None
        return StepOutput(
            loss, self.weights(rank, run) if self.persistent is None else self.persistent
        )


def keep_a_weight(rank: int) -> float:
    trainer = Weighted(max_epochs=1, callbacks=[])
    trainer.persistent = torch.tensor(4.0, dtype=torch.float64)
    fit(trainer)
    return float(trainer.persistent)


def test_the_weight_of_the_user_is_left_alone() -> None:
    assert run_ranks(2, keep_a_weight) == [4.0, 4.0]


def weigh_on_one_rank(rank: int) -> None:
    trainer = Weighted(max_epochs=1, callbacks=[])
    trainer.weights = lambda rank, run: 2.0 if rank else None
    fit(trainer)


def test_a_weight_on_some_processes_only_is_refused_on_all() -> None:
    with pytest.raises(RanksError) as caught:
        run_ranks(2, weigh_on_one_rank)
    texts = caught.value.failures.values()
    assert all("process 0: one loss; process 1: one loss with a weight" in text for text in texts)
    assert len(caught.value.failures) == 2


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_window_of_weight_zero_changes_nothing(accumulation: int) -> None:
    model = nn.Linear(3, 1)
    before = model.weight.detach().clone()
    trainer = Weighted(max_epochs=1, callbacks=[], gradient_accumulation_steps=accumulation)
    trainer.weights = lambda rank, run: torch.tensor(0)
    fit(trainer, model)
    assert torch.equal(model.weight, before)


def share_statistics(rank: int) -> tuple[list[Tensor], float]:
    model = make_model()
    trainer = Trainer(max_epochs=2, callbacks=[])
    fit(trainer, model)
    metrics = trainer.evaluate(model, make_loader(9, 4))
    return [buffer.clone() for buffer in model.buffers()], metrics["eval/loss"]


def test_all_processes_end_with_one_model() -> None:
    (first, loss), (second, _) = run_ranks(2, share_statistics)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    model = make_model()
    # The figure is that of the model which process 0 would save.
    assert loss > 0
    assert len(list(model.buffers())) == len(first)


def test_a_second_fit_is_a_new_training() -> None:
    def weights(trainer: Trainer) -> list[Tensor]:
        model = make_model()
        fit(trainer, model)
        return [p.detach().clone() for p in model.parameters()]

    used = Trainer(max_steps=6, precision=FP16(init_scale=2.0**40), callbacks=[])
    first = weights(used)
    assert all(torch.equal(a, b) for a, b in zip(first, weights(used), strict=True))


def leave_a_parameter_out(rank: int) -> None:
    class Half(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 1)
            self.idle = nn.Parameter(torch.zeros(1))

    fit(Trainer(max_steps=1, callbacks=[]), Half())


def test_a_parameter_without_gradient_is_refused_under_ddp() -> None:
    run_ranks(1, leave_a_parameter_out)
    with pytest.raises(RanksError, match=r"`idle`.*find_unused_parameters=True"):
        run_ranks(2, leave_a_parameter_out)


class AsksOnMain(Callback):
    def on_step_end(self, run: Run, result: Any) -> None:
        run.request_stop("enough", agreed=True)


def test_an_agreed_request_of_one_process_is_refused() -> None:
    with pytest.raises(DistributedError, match="request_stop"):
        fit(Trainer(max_steps=3, callbacks=[MainProcess(AsksOnMain())]))


def evaluate_on_one_rank(rank: int) -> None:
    callbacks: list[Callback] = [Evaluation(["mse"])] if rank == 0 else []
    fit(Trainer(max_epochs=1, callbacks=callbacks), loaders=(make_loader(), make_loader()))


def test_a_collective_in_a_microbatch_hook_is_refused() -> None:
    class Gathers(Callback):
        def on_microbatch_end(self, run: Run, batch: Any) -> None:
            run.gather_for_metrics(batch[0])

    with pytest.raises(DistributedError, match="inside `on_microbatch_end`"):
        fit(Trainer(max_steps=1, callbacks=[Gathers()]))


def test_a_method_that_looks_like_a_hook_is_refused() -> None:
    class Misspelt(Callback):
        def on_step_ended(self, run: Run) -> None: ...

    with pytest.raises(ConfigError, match="Did you mean `on_step_end`"):
        Trainer(max_steps=1, callbacks=[Misspelt()])


def differ(rank: int, what: str) -> None:
    other = rank == 1
    model = nn.Linear(3, 1, bias=not (other and what == "model"))
    model.weight.requires_grad_(not (other and what == "frozen"))
    data = make_loader(
        16 if other and what == "length" else 8, 4 if other and what == "batch" else 2
    )
    loaders: Any = data
    if what == "split":
        first, _ = random_split(data.dataset, [6, 2], torch.Generator().manual_seed(rank))
        loaders = DataLoader(first, batch_size=2)
    if what == "evaluation":
        loaders = {"train": data, "eval": {f"dev{rank}": make_loader()}}
    more: dict[str, Any] = {}
    if what == "part":
        loaders = Combined({"a": data, "b": DataLoader(data.dataset, 2, shuffle=other)}, "min")
    folder = {"folder": f"runs/{rank}", "resume": "runs/both"}.get(what)
    if what == "resume":
        more = {"resume": "auto" if other else None}
    epochs = 2 + other * (what == "settings")
    trainer = Trainer(max_epochs=epochs, callbacks=[], output_dir=folder)
    fit(trainer, model, loaders=loaders, **more)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("model", "differ in the model: process 0: Linear with 2 tensors"),
        ("frozen", r"differ in `weight` of the model: .*\(1, 3\), trainable; .*\(1, 3\), frozen\."),
        ("part", "differ in the training loader `b`: .*SequentialSampler.*; .*seed what is random"),
        ("length", "differ in the training loader: process 0: TensorDataset, 8 samples"),
        ("batch", "batch size 2.*process 1: .*batch size 4"),
        ("split", "differ in the training loader.*indices with digest.*random_split"),
        ("evaluation", "differ in the names of the evaluation loaders"),
        ("settings", "differ in `max_epochs`: process 0: 2; process 1: 3"),
        ("resume", "differ in `resume`: process 0: not set; process 1: 'auto'"),
        ("folder", "differ in `output_dir`: process 0: .*runs/0; .*one folder that they share"),
    ],
)
def test_processes_that_differ_are_refused_on_all(what: str, message: str) -> None:
    with pytest.raises(RanksError, match=message) as caught:
        run_ranks(2, differ, what)
    assert len(caught.value.failures) == 2


def test_what_an_evaluation_cannot_compute_is_said_before_the_first_step() -> None:
    class Cuts(Trainer):
        def evaluation_step(self, model: nn.Module, batch: Any) -> dict[str, Any]:
            return {"predictions": model(batch[0])[:1], "references": batch[1]}

    trainer = Cuts(max_epochs=1, callbacks=[Evaluation(["mse"])])
    with pytest.raises(DataError, match="predictions"):
        fit(trainer, loaders=(make_loader(), make_loader()))
    assert trainer.run is not None
    assert trainer.run.state.step == 0


def test_a_metric_that_needs_more_data_than_one_batch_is_let_through() -> None:
    def picky(predictions: Tensor, references: Tensor) -> float:
        if len(references) < 5:
            raise ValueError("too few")
        return 1.0

    result = fit(
        Trainer(max_epochs=1, callbacks=[Evaluation([picky])]),
        loaders=(make_loader(), make_loader()),
    )
    assert result.metrics["eval/picky"] == 1.0


def test_evaluation_on_some_processes_only_is_refused() -> None:
    with pytest.raises(
        RanksError,
        match=r"act on all processes at once: process 0: \['Evaluation'\]; process 1: \[\]",
    ):
        run_ranks(2, evaluate_on_one_rank)


class Asks(Callback):
    """Asks once, on the last process, in a hook that the test names."""

    def __init__(self, hook: str, request: str, step: int) -> None:
        self.evaluated: list[int] = []
        self.steps = 0
        self.asked = False

        def ask(run: Run, *args: Any) -> None:
            if run.state.step >= step and not self.asked and run.processes.is_last_process:
                self.asked = True
                getattr(run, f"request_{request}")(*(["enough"] if request == "stop" else []))

        setattr(self, hook, ask)

    def on_evaluation_end(self, run: Run, metrics: Any) -> None:
        self.evaluated.append(run.state.step)


class Tempo(Callback):
    """Lets the processes believe that a window takes so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.now = seconds, 0.0

    @override
    def on_fit_start(self, run: Run) -> None:
        if run.internals.flags is not None:
            run.internals.flags = AsyncFlags(run.strategy.processes, size=4, clock=lambda: self.now)

    @override
    def on_step_start(self, run: Run) -> None:
        self.now += self.seconds


SLOW = 1.0  # so that the processes tell each other at the end of each window


def ask(
    rank: int, hook: str, request: str, step: int, seconds: float = SLOW
) -> tuple[int, list[int], str]:
    callback = Asks(hook, request, step)
    callback.schedules_evaluation = True
    trainer = Trainer(max_steps=8, callbacks=[callback, Tempo(seconds)], log_every_n_steps=1)
    result = fit(trainer, loaders=(make_loader(64), make_loader()))
    return result.step, callback.evaluated, result.stop_reason


def test_a_stop_that_one_process_asks_for_comes_one_window_later_on_all() -> None:
    start = 3
    cases = [(hook, "stop", start) for hook in ("on_step_end", "on_log", "on_gradients")]
    (alone,) = run_ranks(1, in_turn, ask, cases)
    assert [step for step, _, _ in alone] == [start, start, start + 1]
    first, second = run_ranks(2, in_turn, ask, cases)
    assert first == second
    assert [step for step, _, _ in first] == [step + 1 for step, _, _ in alone]
    assert {reason for _, _, reason in first} == {"enough"}


def test_where_windows_are_short_what_one_process_asks_for_waits_for_the_next_exchange() -> None:
    # Of 0.1 s each: exchanged after windows 1, 3, 5 and so on,
    # and read a window later.
    cases = {
        **{
            ("on_step_end", "stop", step, 0.1): (stop, [], "enough")
            for step, stop in ((2, 4), (3, 4), (4, 6))
        },
        # What was not yet exchanged is served at the end, on the last step.
        ("on_step_end", "evaluation", 8, 0.1): (8, [8], "max_steps"),
        ("on_step_end", "evaluation", 2, 0.0): (8, [8], "max_steps"),
    }
    assert run_ranks(2, in_turn, ask, [*cases]) == [[*cases.values()]] * 2


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(9, 1, sparse=True)
        self.head: nn.Module = nn.Identity()

    def forward(self, inputs: Tensor) -> Tensor:
        words: Tensor = self.head(self.embedding(inputs[:, 0].abs().long()))
        return words


def train_sparsely(rank: int) -> Tensor:
    model = Words()
    fit(Trainer(max_epochs=1, callbacks=[], split_batches=True), model, loaders=make_loader(24, 6))
    return model.embedding.weight.detach()


@pytest.mark.e2e
def test_sparse_gradients_train_on_several_processes() -> None:
    (alone,) = run_ranks(1, train_sparsely)
    for size in (2, 3):
        assert torch.allclose(run_ranks(size, train_sparsely)[1], alone)


class Norms(Callback):
    def __init__(self) -> None:
        self.found: list[Tensor] = []

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        self.found += [] if result.grad_norm is None else [result.grad_norm]


CLIPS: list[dict[str, Any]] = [{"max_grad_norm": 0.05}, {"max_grad_value": 0.05}]


def clip_sparsely(rank: int, clip: dict[str, Any], several: bool, sparse: bool) -> list[Tensor]:
    """Return the weights and norms of a training whose words come several times in a batch."""
    model = Words()
    model.embedding.sparse = sparse
    model.head = nn.Linear(1, 1)
    optimizer: Any = partial(SGD, lr=0.1)
    optimizer = {"embedding": optimizer, "head": optimizer} if several else optimizer
    norms = Norms()
    trainer = Trainer(max_epochs=1, callbacks=[norms, NaNGuard("skip")], split_batches=True, **clip)
    fit(trainer, model, loaders=make_loader(24, 6), optimizer=optimizer)
    return [*(p.detach() for p in model.parameters()), *norms.found]


def test_sparse_gradients_are_clipped_as_dense_ones() -> None:
    dense = [(clip, False, False) for clip in CLIPS]
    (alone,) = run_ranks(1, in_turn, clip_sparsely, dense)
    for size in (1, 2):
        for several in (False, True):
            cases = [(clip, several, True) for clip in CLIPS]
            found = run_ranks(size, in_turn, clip_sparsely, cases)[-1]
            torch.testing.assert_close(found, alone)


def count_reductions(rank: int, seconds: float) -> tuple[int, int]:
    reduce, calls = torch.distributed.all_reduce, []

    def counting(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(tensor)
        return reduce(tensor, *args, **kwargs)

    class Begins(Callback):
        def on_step_start(self, run: Run) -> None:
            if run.state.attempts == 0:
                calls.clear()

    torch.distributed.all_reduce = counting  # in this forked process
    callbacks = [Begins(), Tempo(seconds)]
    step = fit(Trainer(max_steps=8, callbacks=callbacks), loaders=make_loader(64)).step
    return step, len(calls)


@pytest.mark.e2e
def test_flags_are_reduced_by_time() -> None:
    # And twice at the end of fit, where they compare the model; in the first step two compare
    # whether all weigh their losses, and which gradients there are. These are reduced by torch's
    # own reducer.
    found = run_ranks(2, in_turn, count_reductions, [(SLOW,), (0.1,), (0.0,)])
    assert found == [[(8, exchanges + 4) for exchanges in (8, 5, 2)]] * 2


def test_an_evaluation_that_one_process_asks_for_comes_once() -> None:
    steps, hooks = (2, 8), ("on_step_end", "on_log")
    cases = [(hook, "evaluation", step) for step in steps for hook in hooks]
    for size in (1, 2):
        results = run_ranks(size, in_turn, ask, cases)
        assert all(result == results[0] for result in results)
        expected = [min(8, step + (size > 1)) for step in steps for _ in hooks]
        assert [evaluations for _, [evaluations], _ in results[0]] == expected


def test_a_stop_before_the_first_step_trains_nothing() -> None:
    class Stops(Callback):
        def on_fit_start(self, run: Run) -> None:
            run.request_stop("not today")

    assert fit(Trainer(max_epochs=1, callbacks=[Stops()])).step == 0


def test_what_is_logged_in_the_last_evaluation_is_not_lost() -> None:
    class Logs(Callback):
        def __init__(self) -> None:
            self.seen: dict[str, float] = {}

        def on_evaluation_end(self, run: Run, metrics: Any) -> None:
            run.log({"late": 1.0})

        def on_late_log(self, run: Run, values: Any) -> None:
            self.seen |= values

    callback = Logs()
    fit(Trainer(max_epochs=1, callbacks=[callback]), loaders=(make_loader(), make_loader()))
    assert callback.seen["late"] == 1.0


def test_figures_for_each_sample_count_each_sample_once() -> None:
    class Hits(Trainer):
        def evaluation_step(self, model: nn.Module, batch: Any) -> dict[str, Any]:
            loss = torch.zeros(())
            return {"loss": loss, "weight": torch.tensor(100), "hit": batch[0][:, 0]}

    values = [
        Hits(max_steps=1, callbacks=[]).evaluate(make_model(), make_loader(5, size))["eval/hit"]
        for size in (5, 4, 2)
    ]
    assert values == pytest.approx([values[0]] * 3)


def gather_while_training(rank: int) -> list[int]:
    class Gathers(Trainer):
        sizes: ClassVar[list[int]] = []

        def training_step(self, model: nn.Module, batch: Any) -> Any:
            self.sizes.append(len(self.processes.gather_for_metrics(batch[0])))
            return super().training_step(model, batch)

    fit(
        Gathers(max_epochs=2, callbacks=[]),
        nn.Linear(3, 1),
        loaders=(make_loader(9, 2), make_loader(7, 3)),
    )
    return Gathers.sizes


def test_gather_for_metrics_knows_the_training_batch_after_an_evaluation() -> None:
    for size in (1, 2):
        for result in run_ranks(size, gather_while_training):
            assert result == 2 * ([2 * size] * (8 // (2 * size)) + [9 % (2 * size)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_fn": nn.MSELoss}, "with the brackets"),
        ({"loaders": (make_loader(), make_loader(0))}, "The evaluation loader is empty"),
        ({"loaders": [make_loader(), make_loader()]}, "is a list of 2 loaders"),
        (
            {"lr_scheduler": lambda o: LRSchedule(ReduceLROnPlateau(o), metric="eval/loss")},
            "no evaluation loader",
        ),
    ],
)
def test_more_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(Trainer(max_steps=1, callbacks=[]), **options)


def test_a_loss_of_one_element_is_a_scalar_for_callbacks() -> None:
    class Looks(Callback):
        def on_step_end(self, run: Run, result: Any) -> None:
            assert result.loss.shape == ()

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(outputs, targets).reshape(1)

    fit(Trainer(max_steps=2, callbacks=[Looks()]), loss_fn=loss_fn)
