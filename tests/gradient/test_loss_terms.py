"""Several terms of a loss, each a mean over items of its own, are exact on any split (rule 6)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from tests.helpers.markdown import blocks
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import with_few
from trainkit import Callback, Run, StepOutput, Trainer
from trainkit.errors import ConfigError, DataError
from trainkit.strategies import DDP, FSDP, Strategy

SAMPLES, WIDTH, WINDOW = 26, 4, 12
LIMIT = 1e-12  # relative


class Detector(nn.Module):
    """Classifies, and says where."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.trunk = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)).double()
        self.classes = nn.Linear(WIDTH, 3).double()
        self.box = nn.Linear(WIDTH, 2).double()

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.trunk:
            inputs = torch.tanh(block(inputs))
        return self.classes(inputs), self.box(inputs)


def make_data() -> TensorDataset:
    """A class for most samples, a box for few of them, one micro-batch has none."""
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(SAMPLES, WIDTH, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, 3, (SAMPLES,), generator=generator)
    labels[torch.rand(SAMPLES, generator=generator) < 0.4] = -1
    has_box = torch.rand(SAMPLES, generator=generator) < 0.3
    has_box[:3] = False
    boxes = torch.randn(SAMPLES, 2, dtype=torch.float64, generator=generator)
    return TensorDataset(inputs, labels, has_box, boxes)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(make_data())


def terms(model: nn.Module, batch: Any) -> dict[str, StepOutput]:
    inputs, labels, has_box, boxes = batch
    classes, found = model(inputs)
    offsets = (found - boxes).abs().sum(1)[has_box]
    return {
        "classes": StepOutput(
            F.cross_entropy(classes, labels, ignore_index=-1), labels.ge(0).sum()
        ),
        "boxes": StepOutput(offsets.mean(), has_box.sum()),
        "small": StepOutput(0.1 * classes.square().mean()),
        "calm": StepOutput(0.2 * found.square().mean()),
    }


NAMES = ("classes", "boxes", "small", "calm")
CASES = (NAMES, ("classes", "boxes"), ("boxes",), ("small", "calm"), ("boxes", "calm"))


class Terms(Trainer):
    names: tuple[str, ...] = NAMES

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        found = terms(model, batch)
        return {name: found[name] for name in self.names}

    def evaluation_step(self, model: nn.Module, batch: Any) -> Any:
        return {"loss": self.training_step(model, batch)}


class Given(Terms):
    """Two optimizers, each with terms of its own."""

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        found = terms(model, batch)
        assert isinstance(self.run, Run)
        self.run.optimize("heads", {name: found[name] for name in self.names})
        self.run.optimize("trunk", found)


class Seen(Callback):
    """Keeps the gradient of every step, and what is logged."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, Tensor]] = []
        self.logs: list[dict[str, float]] = []

    def on_gradients(self, run: Run) -> None:
        found = {}
        for name, p in run.module.named_parameters():
            grad: Any = p.grad
            if grad is not None:
                found[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()
        self.gradients.append(found)

    def on_log(self, run: Run, values: Any) -> None:
        self.logs.append({k: v for k, v in values.items() if k.startswith("loss")})


def of_whole_windows(names: tuple[str, ...]) -> tuple[list[dict[str, Tensor]], list[Any]]:
    """The gradients and the terms of each window, by one backward over all of it."""
    gradients, logs, rows = [], [], make_data().tensors
    model = Detector()
    for first in range(0, SAMPLES, WINDOW):
        model.zero_grad()
        found = terms(model, [row[first : first + WINDOW] for row in rows])
        losses = {name: found[name].loss for name in names}
        torch.stack([*losses.values()]).sum().backward()  # type: ignore[no-untyped-call]
        parameters = model.named_parameters()
        gradients.append({n: p.grad.clone() for n, p in parameters if p.grad is not None})
        log = {f"loss/{name}": loss.item() for name, loss in losses.items()}
        logs.append({"loss": sum(log.values())} | log)
    return gradients, logs


def fit(
    names: tuple[str, ...], batch: int, accumulation: int, strategy: Strategy, **options: Any
) -> Seen:
    seen, model = Seen(), Detector()
    data = Stream() if options.pop("streamed", False) else make_data()
    trainer = options.pop("trainer", Terms)(
        max_epochs=1,
        gradient_accumulation_steps=accumulation,
        log_every_n_steps=1,
        callbacks=[seen],
        strategy=strategy,
        **options,
    )
    trainer.names = names
    optimizer: Any = lambda parameters: SGD(parameters, lr=0.0)  # noqa: E731
    if isinstance(trainer, Given):
        heads = [*model.classes.parameters(), *model.box.parameters()]
        optimizer = {"trunk": SGD(model.trunk.parameters(), 0.0), "heads": SGD(heads, 0.0)}
    trainer.fit(model, DataLoader(data, batch), optimizer=optimizer)
    return seen


def check(seen: Seen, names: tuple[str, ...], case: Any) -> None:
    gradients, logs = of_whole_windows(names)
    assert len(seen.gradients) == len(gradients)
    for ours, theirs in zip(seen.gradients, gradients, strict=True):
        for name, gradient in theirs.items():
            error = (ours[name].cpu() - gradient).norm() / gradient.norm().clamp(min=1e-3)
            assert error <= LIMIT, (case, name, float(error))
    for log, expected in zip(seen.logs, logs, strict=True):
        assert log == pytest.approx(expected, rel=LIMIT, abs=LIMIT, nan_ok=True), case


def fit_all(rank: int, size: int) -> dict[Any, Seen]:
    found = {}
    for names in CASES:
        for batch in (WINDOW // size, WINDOW // size // 3):
            for streamed in (False, True):
                # Where only the boxes count, the classes have no gradient.
                strategy = DDP(find_unused_parameters=len(names) < 4)
                accumulation = WINDOW // size // batch
                case = names, batch, streamed
                found[case] = fit(names, batch, accumulation, strategy, streamed=streamed)
    return found


@pytest.mark.parametrize("size", with_few([1], [1, 3]))
def test_each_term_has_the_gradient_of_the_whole_window(size: int) -> None:
    for seen_by_case in run_ranks(size, fit_all, size):
        for case, seen in seen_by_case.items():
            check(seen, case[0], case)


def evaluate(rank: int) -> dict[str, float]:
    trainer = Terms(callbacks=[], max_epochs=1)
    return trainer.evaluate(Detector(), DataLoader(make_data(), 3))


@pytest.mark.e2e
@pytest.mark.parametrize("size", [1, 2])
def test_the_loss_of_an_evaluation_is_the_sum_of_the_means_of_its_terms(size: int) -> None:
    found = {name: each.loss.item() for name, each in terms(Detector(), make_data()[:]).items()}
    expected = {"eval/loss": sum(found.values())} | {f"eval/loss/{n}": v for n, v in found.items()}
    for values in run_ranks(size, evaluate):
        assert values == pytest.approx(expected, rel=LIMIT)


def fit_sharded(rank: int, size: int) -> dict[str, Seen]:
    batch, accumulation = WINDOW // size // 2, 2
    return {
        "fsdp": fit(NAMES, batch, accumulation, FSDP()),
        "checkpointed": fit(NAMES, batch, accumulation, DDP(), gradient_checkpointing=True),
        "clipped": fit(NAMES, batch, accumulation, DDP(), max_grad_norm=1e9),
        # Autocast leaves float64 alone, so that what is scaled and unscaled stays exact.
        "scaled": fit(NAMES, batch, accumulation, DDP(), precision="fp16"),
        "several optimizers": fit(NAMES, batch, accumulation, DDP(), trainer=Given),
        "several, sharded": fit(NAMES, batch, accumulation, FSDP(), trainer=Given),
    }


@pytest.mark.parametrize("size", with_few([], [3]))
def test_terms_are_exact_under_each_strategy_and_for_each_optimizer(size: int) -> None:
    for found in run_ranks(size, fit_sharded, size):
        for case, seen in found.items():
            for log in seen.logs if "several" in case else ():
                assert log.pop("loss") == pytest.approx(log["loss/trunk"] + log["loss/heads"])
                for key in {*log}:
                    optimizer, _, name = key.removeprefix("loss/").partition("/")
                    if optimizer == "trunk" and name:
                        log[f"loss/{name}"] = log[key]
                    if optimizer in ("trunk", "heads"):
                        del log[key]
                log["loss"] = sum(log.values())
            check(seen, NAMES, case)


class Odd(Trainer):
    outputs: Any = None

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        assert isinstance(self.run, Run)
        return type(self).outputs(terms(model, batch), self.run.state.attempts)


@pytest.mark.parametrize(
    ("outputs", "error", "words"),
    [
        (lambda found, n: {"classes": found["classes"].loss.item()}, ConfigError, "'float'"),
        (lambda found, n: {"a": torch.ones(2)}, ConfigError, r"loss `a` must be a scalar.*\(2,\)"),
        (
            lambda found, n: {**found, "accuracy": torch.tensor(0.5)},
            ConfigError,
            "loss `accuracy` has no graph.*`run.log`",
        ),
        (
            lambda found, n: found["classes"] if n else found,
            DataError,
            "one loss with a weight, after .*`boxes` with a weight, `small`, .*the same always",
        ),
        (
            lambda found, n: {"boxes": found["boxes"].loss if n else found["boxes"]},
            DataError,
            "returned `boxes`, after it had returned `boxes` with a weight",
        ),
    ],
)
def test_what_cannot_be_terms_is_refused(outputs: Any, error: Any, words: str) -> None:
    class Wrong(Odd):
        pass

    Wrong.outputs = outputs
    with pytest.raises(error, match=words):
        Wrong(max_epochs=1, callbacks=[]).fit(
            Detector(), DataLoader(make_data(), 4), optimizer=lambda p: SGD(p, lr=0.1)
        )


def the_page() -> tuple[type[Trainer], nn.Module, TensorDataset]:
    page: dict[str, Any] = {"__name__": "page"}
    for block in blocks(Path(__file__).parents[2] / "docs/how-to/own-loss.md"):
        if block.language == "python":
            exec(block.code, page)
    inputs, targets = page["loader"].dataset.tensors
    torch.manual_seed(6)
    return page["TwoTerms"], nn.Linear(8, 2).double(), TensorDataset(inputs.double(), targets)


def fit_the_page(rank: int, size: int, split: int) -> tuple[list[Tensor], float]:
    kind, model, data = the_page()
    trainer = kind(max_epochs=2, gradient_accumulation_steps=split, callbacks=[])
    loader = DataLoader(data, 32 // size // split)
    trainer.fit(model, loader, optimizer=lambda p: SGD(p, lr=0.1))
    loss = trainer.evaluate(model, loader)["eval/loss"]
    return [p.detach().cpu() for p in model.parameters()], loss


@pytest.mark.e2e
@pytest.mark.parametrize(("size", "split"), [(1, 1), (1, 4), (2, 1), (2, 4)])
def test_the_example_of_the_page_is_exact_on_any_split(size: int, split: int) -> None:
    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        outputs = model(inputs)
        small: Tensor = 0.01 * outputs.square().mean()
        return F.cross_entropy(outputs, targets, ignore_index=-1) + small

    _, model, data = the_page()
    optimizer = SGD(model.parameters(), lr=0.1)
    for first in (0, 32, 0, 32):
        optimizer.zero_grad()
        loss_of(*data[first : first + 32]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for parameters, loss in run_ranks(size, fit_the_page, size, split):
        assert loss == pytest.approx(loss_of(*data[:]).item(), rel=LIMIT)
        for ours, theirs in zip(parameters, model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=LIMIT, atol=LIMIT)
