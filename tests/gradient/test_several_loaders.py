"""Training on several loaders: exact on any split, the same after a resume (rule 17a)."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader, Dataset

from tests.helpers.callbacks import OfOneRun
from tests.helpers.ranks import RanksError, run_ranks
from tests.helpers.tiers import with_few
from tests.helpers.toys import toy_dataset, toy_loaders, toy_model
from trainkit import Callback, Combined, Run, StepOutput, Trainer
from trainkit.callbacks import BatchSizeFinder, Checkpoint, LRFinder
from trainkit.errors import CheckpointError, ConfigError
from trainkit.strategies import DDP, FSDP

POLICIES: dict[str, Any] = {
    "min": "min",
    "max_cycle": "max_cycle",
    "sequential": "sequential",
    "weights": {"a": 2, "b": 0.5},
}
SIZES, WINDOW = {"a": 13, "b": 29}, 6  # samples of the loaders, and of a window of each
LIMIT = 1e-12
SPLITS = {1: [(2, 3)], 2: [(3, 1), (1, 3)], 3: [(1, 2)]}  # batch size, accumulation


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Rows with a little noise, drawn from the global generator."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __len__(self) -> int:
        return SIZES[self.name]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * ord(self.name) + index)
        inputs = torch.randn(4, generator=generator, dtype=torch.float64)
        return inputs + 0.1 * torch.randn(4, dtype=torch.float64), inputs.sum()


class TwoHeads(nn.Module):
    """One trunk, and a head for each loader."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.trunk = nn.Linear(4, 5).double()
            self.heads = nn.ModuleDict({name: nn.Linear(5, 1) for name in SIZES}).double()

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {n: self.heads[n](torch.tanh(self.trunk(x))).sum(1) for n, x in inputs.items()}


FACTORS = {"a": 1.0, "b": 0.5}


def losses_of(model: nn.Module, batch: Mapping[str, Any]) -> dict[str, Tensor]:
    outputs = model({name: inputs for name, (inputs, _) in batch.items()})
    return {n: FACTORS[n] * F.mse_loss(outputs[n], target) for n, (_, target) in batch.items()}


class MultiTask(Trainer):
    def training_step(self, model: nn.Module, batch: Any) -> Any:
        return losses_of(model, batch)


class Summed(Trainer):
    """One loss for all loaders."""

    weight: float | None = None

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        loss = torch.stack([*losses_of(model, batch).values()]).sum()
        return StepOutput(loss, self.weight)


class Weighted(Summed):
    """One loss for all loaders, with a weight that knows nothing of repeated batches."""

    weight = 3.0


class Counted(Trainer):
    """The loss of one loader is over some of its rows only."""

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        outputs = model({name: inputs for name, (inputs, _) in batch.items()})
        found: dict[str, Any] = {}
        for name, (inputs, target) in batch.items():
            counted = inputs[:, 0] > (0.3 if name == "a" else -9)
            loss = F.mse_loss(outputs[name][counted], target[counted])
            found[name] = StepOutput(loss, counted.sum()) if name == "a" else loss
        return found


class Heads(Trainer):
    """Each head, and the trunk, has an optimizer of its own."""

    names: Mapping[str, Any] = {"a": "a", "b": "b"}  # of the loaders, that it gives

    def training_step(self, model: nn.Module, batch: Any) -> None:
        assert isinstance(self.run, Run)
        for name, loss in losses_of(model, batch).items():
            self.run.optimize("trunk", loss, loader=self.names[name])
            self.run.optimize(name, loss, loader=self.names[name])

    def configure_optimizers(self, model: Any, optimizers: Any) -> dict[str, Optimizer]:
        parts = {"trunk": model.trunk, **model.heads}
        return {name: AdamW(part.parameters(), lr=0.01) for name, part in parts.items()}


class Notes(OfOneRun):
    """Keeps what each step read here, and what was logged."""

    def __init__(self) -> None:
        self.steps: list[list[dict[str, tuple[Tensor, Tensor]]]] = []
        self.logs: list[dict[str, float]] = []

    def on_step_start(self, run: Run) -> None:
        self.steps.append([])

    def on_microbatch_start(self, run: Run, batch: Any) -> None:
        self.steps[-1].append({n: tuple(each.cpu() for each in rows) for n, rows in batch.items()})

    def on_log(self, run: Run, values: Any) -> None:
        self.logs.append({n: v for n, v in values.items() if n.startswith("loss")})


def make_loaders(batch: int, shuffle: bool = True, workers: int = 0) -> dict[str, Any]:
    return {n: DataLoader(Rows(n), batch, shuffle=shuffle, num_workers=workers) for n in SIZES}


def train(
    rank: int,
    policy: Any,
    batch: int = WINDOW,
    accumulation: int = 1,
    *,
    trainer: type[Trainer] = MultiTask,
    strategy: Callable[[], Any] = lambda: "auto",
    folder: Path | None = None,
    every: int = 1,
    resume: Any = None,
    more: tuple[Callback, ...] = (),
    loaders: Any = None,
    **options: Any,
) -> tuple[list[Tensor], Notes]:
    """Return the trained parameters, and the notes."""
    notes = Notes()
    saves = [] if folder is None else [Checkpoint(every_n_steps=every, keep_last=None)]
    options.setdefault("max_epochs", 2)
    one = trainer(
        strategy=strategy(),
        gradient_accumulation_steps=accumulation,
        log_every_n_steps=1,
        callbacks=[notes, *saves, *more],
        output_dir=folder,
        **options,
    )
    model = TwoHeads()
    train = loaders or make_loaders(batch)
    if policy is not None:
        train = Combined(train, POLICIES.get(policy, policy) if isinstance(policy, str) else policy)
    one.fit(
        model,
        train,
        optimizer=partial(AdamW, lr=0.01),
        resume=resume,
    )
    found = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    one.close()
    return [p.detach().cpu().clone() for p in found], notes


def unused() -> DDP:
    """A step of one loader leaves the head of the other alone."""
    return DDP(find_unused_parameters=True)


def by_hand(notes: Notes) -> list[Tensor]:
    """Train on the windows that one process read, one after the other."""
    model = TwoHeads()
    optimizer = AdamW(model.parameters(), lr=0.01)
    for ((batch),) in notes.steps:
        optimizer.zero_grad()
        loss: Any = torch.stack([*losses_of(model, batch).values()]).sum()
        loss.backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def difference(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


# Exact, on any split.


@pytest.mark.parametrize("policy", POLICIES)
def test_the_gradient_is_the_sum_of_the_means_of_each_loader(policy: str) -> None:
    parameters, notes = train(0, policy)
    assert difference(parameters, by_hand(notes)) < LIMIT
    sizes = [{name: len(rows) for name, (rows, _) in step.items()} for (step,) in notes.steps]
    assert any(step.get("a") == 1 for step in sizes)  # the end of its pass


def train_all(rank: int, splits: list[tuple[int, int]], sharded: bool) -> Any:
    found: dict[Any, Any] = {}
    for policy in POLICIES:
        for split in splits:
            parameters, notes = train(rank, policy, *split, strategy=unused)
            found[policy, split] = parameters, notes.logs
        if sharded and policy in ("max_cycle", "weights"):
            parameters, notes = train(rank, policy, *splits[0], strategy=FSDP)
            found[policy, "fsdp"] = parameters, notes.logs
    return found


@pytest.mark.parametrize("size", with_few([2], SPLITS))
def test_any_split_trains_the_same(size: int) -> None:
    expected = run_ranks(1, lambda rank: {policy: train(rank, policy) for policy in POLICIES})[0]
    for (policy, split), (parameters, logs) in run_ranks(size, train_all, SPLITS[size], size == 3)[
        0
    ].items():
        wanted, notes = expected[policy]
        assert difference(parameters, wanted) < LIMIT, (policy, split)
        assert len(logs) == len(notes.logs)
        for log, value in zip(logs, notes.logs, strict=True):
            assert log == pytest.approx(value, rel=1e-12), (policy, split)


def test_the_loss_of_each_loader_is_logged() -> None:
    _, notes = train(0, "max_cycle", 2, 3)
    for log in notes.logs:
        assert log["loss"] == pytest.approx(log["loss/a"] + log["loss/b"], rel=1e-12)


# One loss, and weights of one's own.


def test_one_loss_for_several_loaders_is_refused_where_it_cannot_be_exact() -> None:
    assert difference(train(0, "min", trainer=Summed)[0], train(0, "min")[0]) < LIMIT
    for run, each in (
        (partial(train, 0), Summed),
        (partial(train, 0), Weighted),
        (partial(run_ranks, 2, train), Summed),
    ):
        with pytest.raises((ConfigError, RanksError)) as caught:
            run("min", 2, 2, trainer=each)
        assert 'Return `{"a": loss_a, "b": loss_b}`' in str(caught.value)


def heads(rank: int, batch: int, accumulation: int) -> Any:
    split = batch, accumulation
    return {policy: train(rank, policy, *split, trainer=Heads) for policy in POLICIES}


@pytest.mark.parametrize("size", with_few([1], [1, 2]))
def test_several_optimizers_learn_from_the_loaders_that_they_name(size: int) -> None:
    split = {1: (2, 3), 2: (1, 3)}[size]
    found = heads(0, *split) if size == 1 else run_ranks(size, heads, *split)[0]
    for policy, (parameters, notes) in found.items():
        wanted, others = train(0, policy)
        assert difference(parameters, wanted) < LIMIT
        for log, value in zip(notes.logs, others.logs, strict=True):
            of_trunk = {name: log.get(f"loss/trunk/{name}", 0.0) for name in SIZES}
            expected = {name: value.get(f"loss/{name}", 0.0) for name in SIZES}
            assert of_trunk == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"a": "", "b": ""}, 'one loss for .*run.optimize."trunk", loss, loader="a"'),
        ({"a": None, "b": None}, 'one loss for .*run.optimize."trunk", loss, loader="a"'),
        ({"a": "a", "b": ""}, "a loss with a name, of a loader or of a term, and one without"),
        ({"a": "a", "b": "c"}, "the loader 'c', but the training loaders are `a`, `b`"),
    ],
)
def test_losses_whose_loader_is_not_known_are_refused(names: Any, words: str) -> None:
    class Odd(Heads):
        pass

    Odd.names = names
    with pytest.raises(ConfigError, match=words):
        train(0, "min", 2, 3, trainer=Odd)


def one_loss(rank: int) -> Any:
    alike = {"a": DataLoader(Rows("b"), 3), "b": DataLoader(Rows("b"), 3)}
    return [
        train(rank, "min", 3, trainer=each, drop_last_window=loaders is None, loaders=loaders)[0]
        for loaders in (None, alike)
        for each in (Summed, MultiTask)
    ]


@pytest.mark.e2e
def test_one_loss_for_several_loaders_is_exact_where_all_windows_are_full_or_alike() -> None:
    for summed, apart, summed_alike, apart_alike in (
        run_ranks(size, one_loss)[0] for size in (1, 2)
    ):
        assert difference(summed, apart) < LIMIT
        assert difference(summed_alike, apart_alike) < LIMIT


def counted(rank: int, batch: int, accumulation: int) -> Any:
    given: dict[str, Any] = {"trainer": Counted, "strategy": unused}
    return {policy: train(rank, policy, batch, accumulation, **given) for policy in POLICIES}


@pytest.mark.parametrize(("size", "split"), with_few([(1, (2, 3))], [(1, (2, 3)), (2, (1, 3))]))
def test_weights_of_ones_own_count_in_their_loader(size: int, split: tuple[int, int]) -> None:
    whole, cut = run_ranks(1, counted, WINDOW, 1)[0], run_ranks(size, counted, *split)[0]
    for policy, (parameters, notes) in whole.items():
        assert difference(parameters, cut[policy][0]) < LIMIT
        for log, value in zip(cut[policy][1].logs, notes.logs, strict=True):
            assert log == pytest.approx(value, rel=1e-12, nan_ok=True)  # a mean over nothing


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (lambda losses: {"a": losses["a"]}, "returned losses of `a`, but the batch is one of `a`"),
        (lambda losses: {**losses, "c": losses["a"]}, "of `a`, `b`, `c`, but"),
        (lambda losses: {"a": losses["a"], "b": 0.0}, "must return the loss as a tensor"),
        (lambda losses: {"a": losses["a"].detach(), "b": losses["b"]}, "has no graph"),
    ],
)
def test_what_is_no_loss_of_each_loader_is_refused(output: Any, words: str) -> None:
    class Wrong(Trainer):
        def training_step(self, model: nn.Module, batch: Any) -> Any:
            return output(losses_of(model, batch))

    with pytest.raises(ConfigError, match=words):
        train(0, "min", trainer=Wrong)


def differ(rank: int) -> None:
    class Wrong(Trainer):
        def training_step(self, model: nn.Module, batch: Any) -> Any:
            losses = losses_of(model, batch)
            return {n: StepOutput(loss, 3.0) for n, loss in losses.items()} if rank else losses

    train(rank, "min", 3, trainer=Wrong)


@pytest.mark.e2e
def test_processes_that_return_other_losses_are_told() -> None:
    told = "process 0: `a`, `b`; process 1: `a` with a weight, `b` with a weight"
    with pytest.raises(RanksError, match=told):
        run_ranks(2, differ)


# A resume.


@pytest.mark.parametrize("policy", with_few(["max_cycle"], POLICIES))
def test_a_run_resumes_at_any_step_to_the_last_bit(policy: str, tmp_path: Path) -> None:
    parameters, notes = train(0, policy, 2, 3, folder=tmp_path)
    for step in range(1, len(notes.steps), 4):
        place = tmp_path / "checkpoints" / f"step-{step:08d}"
        loaders = make_loaders(2, workers=step % 2)
        again, rest = train(0, policy, 2, 3, resume=place, loaders=loaders)
        assert rest.logs == notes.logs[step:]
        assert all(map(torch.equal, again, parameters)), (policy, step)


def elastic(rank: int, folder: Path, resumes: bool) -> Any:
    found = {}
    for policy in POLICIES:
        place = folder / policy
        given: dict[str, Any] = {"strategy": unused, "max_epochs": 1}
        if resumes:
            given["resume"] = place / "checkpoints" / "step-00000002"
        else:
            given |= {"folder": place, "every": 2}
        found[policy] = train(rank, policy, 2 if resumes else 3, **given)[0]
    return found


@pytest.mark.e2e
def test_a_run_goes_on_on_another_number_of_processes(tmp_path: Path) -> None:
    whole = run_ranks(2, elastic, tmp_path, False)[0]
    resumed = run_ranks(3, elastic, tmp_path, True)[0]
    for policy in POLICIES:
        assert difference(whole[policy], resumed[policy]) < LIMIT, policy


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"policy": "max_cycle"}, "training loaders: 'min of `a` of 13 samples, 6 in a window"),
        ({"batch": 3}, "training loaders: "),
        ({"loaders": make_loaders(WINDOW)["a"], "policy": None}, "training loaders: "),
        ({"loaders": make_loaders(WINDOW, shuffle=False)}, "b: sampler: RandomSampler"),
        ({"limit_train_batches": 1}, "training loaders: "),
    ],
)
def test_other_loaders_at_a_resume_are_refused(change: Any, words: str, tmp_path: Path) -> None:
    train(0, "min", folder=tmp_path, max_epochs=1)
    place = tmp_path / "checkpoints" / "step-00000002"
    trainer = Summed if "policy" in change and change["policy"] is None else MultiTask
    with pytest.raises(CheckpointError) as caught:
        train(0, **{"policy": "min", "max_epochs": 1, "resume": place, "trainer": trainer} | change)
    assert words in str(caught.value)


# What else sees the loaders.


@pytest.mark.parametrize("policy", ["sequential", "min"])
def test_the_default_step_takes_the_batch_of_each_loader(policy: str) -> None:
    models = [toy_model(), toy_model()]
    loaders = {"easy": toy_loaders(20)[0], "hard": DataLoader(toy_dataset(14, seed=3), 4)}
    given: dict[str, Any] = {"optimizer": partial(SGD, lr=0.1), "loss_fn": nn.CrossEntropyLoss()}

    class Own(Trainer):
        def training_step(self, model: nn.Module, batch: Any) -> Any:
            return {n: F.cross_entropy(model(x), y) for n, (x, y) in batch.items()}

    for kind, model in zip((Trainer, Own), models, strict=True):
        trainer = kind(max_epochs=2, callbacks=[])
        train = Combined(loaders, policy)
        result = trainer.fit(model, (train, toy_loaders()[1]), **given)
        assert result.samples_seen == 2 * {"sequential": 34, "min": 30}[policy]
        assert "eval/loss" in result.metrics
    assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))


class Gathers(MultiTask):
    loaders: Any
    found: list[dict[str, list[float]]]

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        assert self.run is not None
        gathered = {
            name: self.run.gather_for_metrics(rows[1], loader=self.loaders[name]).tolist()
            for name, rows in batch.items()
        }
        if not self.run.zero_weight:
            self.found.append(gathered)
        return super().training_step(model, batch)


def gathers(rank: int, batch: int) -> Any:
    Gathers.loaders, Gathers.found = make_loaders(batch), []
    train(rank, "max_cycle", trainer=Gathers, loaders=Gathers.loaders, max_epochs=1)
    return Gathers.found


@pytest.mark.e2e
def test_rows_of_a_step_are_gathered_by_loader() -> None:
    assert run_ranks(2, gathers, 3)[0] == gathers(0, WINDOW)


def test_learning_rates_are_tried_without_a_trace() -> None:
    finder = LRFinder(num_steps=12, stop=False)
    found, notes = train(0, "max_cycle", more=(finder,))
    expected, others = train(0, "max_cycle")
    assert all(map(torch.equal, found, expected))
    assert notes.logs == others.logs
    assert len(finder.rates) > 3


def test_explain_says_who_makes_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = MultiTask(max_epochs=2, gradient_accumulation_steps=2, callbacks=[])
    trainer.explain(TwoHeads(), Combined(make_loaders(3), "max_cycle"))
    text = " ".join(capsys.readouterr().out.split())
    assert "max_cycle of `a` 6 samples (3 x 1 process x 2 micro-batches), `b` 6 samples" in text
    assert "2 epochs, 10 steps; an epoch is 5 steps" in text


def test_what_cannot_work_with_several_loaders_says_so() -> None:
    with pytest.raises(ConfigError, match="`BatchSizeFinder` cuts the batches of one"):
        train(0, "min", more=(BatchSizeFinder(),))
    with pytest.raises(ConfigError, match="`a` has no full window"):
        train(0, "sequential", 6, 5, drop_last_window=True, limit_train_batches=4)
    for name in ("multiple_trainloader_mode", "policy"):
        old: Any = {name: "min"}
        with pytest.raises(ConfigError, match=rf"`{name}`: write `fit\(model, Combined\("):
            Trainer(max_epochs=1).fit(TwoHeads(), {"train": make_loaders(2)}, **old)
    with pytest.raises(ConfigError, match=r"2 training loaders .* nothing says how they make an"):
        Trainer(max_epochs=1, callbacks=[]).fit(TwoHeads(), {"train": make_loaders(2)})


def other_policies(rank: int) -> None:
    train(rank, ["min", "max_cycle"][rank], 3)


@pytest.mark.e2e
def test_processes_with_other_policies_are_told() -> None:
    with pytest.raises(RanksError, match="The processes differ in the training loader"):
        run_ranks(2, other_policies)
