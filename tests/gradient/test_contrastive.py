"""Losses over the rows of all processes give the gradient of one process (rule 6), in fp64."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import DataLoader, Subset, TensorDataset

from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import with_few
from trainkit import Accelerator, Callback, Run, Trainer, gather
from trainkit.errors import DataError, DistributedError

# The losses here that take all rows need no labels of their own.
pytestmark = pytest.mark.filterwarnings("ignore:`gather` joins")

WIDTH, LIMIT = 5, 1e-12  # relative, as in test_gradient
Pairwise = Callable[["TwoTowers", Tensor, Tensor, Tensor], Tensor]


class TwoTowers(nn.Module):
    """Embeds pairs, and holds the temperature and bias that losses learn."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)
        self.scale = nn.Parameter(torch.tensor([1.3]))
        self.bias = nn.Parameter(torch.tensor([-0.4]))

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return (
            F.normalize(self.left(left), dim=1),
            F.normalize(self.right(right), dim=1),
            self.scale,
            self.bias,
        )


def info_nce(ours: Tensor, all_: Tensor, labels: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return F.cross_entropy(ours @ all_.T * scale.exp() + bias, labels)


def siglip(ours: Tensor, all_: Tensor, labels: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    logits = ours @ all_.T * scale.exp() + bias
    signs = 2 * F.one_hot(labels, len(all_)) - 1
    return -F.logsigmoid(signs * logits).sum(1).mean()


def triplet(ours: Tensor, all_: Tensor, labels: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """The mean over anchors of the sum over all negatives."""
    distances = torch.cdist(ours, all_).pow(2) * scale.exp()
    positive = distances.gather(1, labels[:, None])
    negative = 1 - F.one_hot(labels, len(all_))
    return (F.relu(positive - distances + 1.7 + bias) * negative).sum(1).mean()


LOSSES: dict[str, Any] = {"info_nce": info_nce, "siglip": siglip, "triplet": triplet}


class Contrastive(Trainer):
    """Computes the loss of its own rows, or that of all, against the rows of all processes."""

    kind, whole = "info_nce", False

    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        assert self.run is not None
        left, right, scale, bias = model(*batch)
        lefts, rights = self.run.gather((left, right), differentiable=True)
        rows = slice(None) if self.whole else self.run.own_rows(left)
        labels = torch.arange(len(lefts), device=lefts.device)[rows]
        ours, mirrored = lefts[rows], rights[rows]
        loss = LOSSES[self.kind]
        one, two = (
            loss(ours, rights, labels, scale, bias),
            loss(mirrored, lefts, labels, scale, bias),
        )
        mean: Tensor = (one + two) / 2
        return mean


class Gradients(Callback):
    """Keeps the whole gradient of every step."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_gradients(self, run: Run) -> None:
        self.seen.append(flat([p.grad for p in run.module.parameters()]))


def flat(gradients: list[Any]) -> Tensor:
    whole = [g.full_tensor() if hasattr(g, "full_tensor") else g for g in gradients]
    return torch.cat([g.flatten().cpu().clone() for g in whole])


def make_model() -> TwoTowers:
    torch.manual_seed(3)
    return TwoTowers().double()


def make_data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(samples)
    left = torch.randn(samples, WIDTH, dtype=torch.float64, generator=generator)
    noise = torch.randn(samples, WIDTH, dtype=torch.float64, generator=generator)
    return TensorDataset(left, left + noise)


def reference(kind: str, samples: int, batch: int, accumulation: int) -> list[Tensor]:
    """The gradient of each window on one process: the mean of its micro-batches by samples."""
    model, data = make_model(), make_data(samples)
    loss, result = LOSSES[kind], []
    for first in range(0, samples, batch * accumulation):
        model.zero_grad()
        stop = min(first + batch * accumulation, samples)
        for start in range(first, stop, batch):
            left, right, scale, bias = model(*data[start : min(start + batch, stop)])
            labels = torch.arange(len(left), device=left.device)
            total = loss(left, right, labels, scale, bias) + loss(right, left, labels, scale, bias)
            (total / 2 * len(left) / (stop - first)).backward()
        result.append(flat([p.grad for p in model.parameters()]))
    return result


Case = tuple[str, bool, str, int, int, int]


def fit(case: Case) -> list[Tensor]:
    kind, whole, strategy, samples, batch, accumulation = case
    gradients = Gradients()
    trainer = Contrastive(
        max_epochs=1,
        strategy=strategy,  # type: ignore[arg-type]
        gradient_accumulation_steps=accumulation,
        callbacks=[gradients],
    )
    trainer.kind, trainer.whole = kind, whole
    trainer.fit(
        make_model(),
        DataLoader(make_data(samples), batch_size=batch),
        optimizer=lambda parameters: SGD(parameters, lr=0.0),
    )
    return gradients.seen


def fit_many(rank: int, cases: list[Case]) -> list[list[Tensor]]:
    return [fit(case) for case in cases]


@pytest.mark.parametrize("size", with_few([2], [2, 3]))
def test_the_gradient_is_that_of_one_process(size: int) -> None:
    cases: list[Case] = []
    for kind in LOSSES:
        for strategy in ("ddp", "fsdp") if size > 1 else ("single",):
            # 3 * size samples in a micro-batch of all; the last one has rows on process 0 only,
            # then on all but the last, then on all, of unequal numbers.
            cases += [
                (kind, False, strategy, 6 * size + 2, 3, 1),
                (kind, True, strategy, 6 * size + 2, 3, 1),
                (kind, False, strategy, 12 * size - 1, 3, 3),
                (kind, True, strategy, 9 * size - 4, 3, 2),
            ]
    results = run_ranks(size, fit_many, cases, timeout=300)
    for number, (kind, _, _, samples, batch, accumulation) in enumerate(cases):
        expected = reference(kind, samples, batch * size, accumulation)
        for result in results:
            assert len(result[number]) == len(expected)
            for ours, theirs in zip(result[number], expected, strict=True):
                error = (ours - theirs).norm() / theirs.norm()
                assert error <= LIMIT, (cases[number], float(error))


def _own_loop(rank: int, samples: int, whole: bool, factor: bool) -> list[Tensor]:
    """The gradients of each window in a loop of the user's own, 2 micro-batches each."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, loader = accelerator.prepare(
        make_model(), DataLoader(make_data(samples), batch_sampler=uneven(samples))
    )
    seen = []
    for batch in loader:
        with accelerator.accumulate(model):
            left, right, scale, bias = model(*batch)
            lefts, rights = accelerator.gather((left, right), differentiable=True)
            rows = slice(None) if whole else accelerator.own_rows(left)
            loss = info_nce(lefts[rows], rights, torch.arange(len(lefts))[rows], scale, bias)
            if factor:
                loss = loss * len(left) * accelerator.num_processes / len(lefts)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                module = accelerator.unwrap_model(model)
                seen.append(flat([p.grad for p in module.parameters()]))
                module.zero_grad()
    return seen


def uneven(samples: int) -> list[list[int]]:
    """Batches of 2 and 4 in turns, so that two processes have unequal ones."""
    starts = range(0, samples, 6)
    return [list(part) for k in starts for part in (range(k, k + 2), range(k + 2, k + 6))]


@pytest.mark.e2e
def test_in_a_loop_of_ones_own_unequal_batches_need_a_factor() -> None:
    model, data, expected = make_model(), make_data(24), []
    for window in ((0, 6), (12, 18)):
        model.zero_grad()
        for first in window:
            left, right, scale, bias = model(*data[first : first + 6])
            (info_nce(left, right, torch.arange(6), scale, bias) / 2).backward()  # type: ignore[no-untyped-call]
        expected.append(flat([p.grad for p in model.parameters()]))
    for whole, factor, exact in ((True, False, True), (False, True, True), (False, False, False)):
        for result in run_ranks(2, _own_loop, 24, whole, factor):
            errors = [
                float((o - t).norm() / t.norm()) for o, t in zip(result, expected, strict=True)
            ]
            assert (max(errors) <= LIMIT) == exact, (whole, factor, errors)


def _repeating(rank: int) -> Any:
    """What `gather` gives in training and evaluation; process 1 repeats a batch at the end."""
    seen: dict[str, list[list[float]]] = {"train": [], "eval": [], "hook": []}

    class Watching(Contrastive):
        def training_step(self, model: nn.Module, batch: Any) -> Tensor:
            assert self.run is not None
            seen["train"].append(self.run.gather(batch[1])[:, 0].tolist())
            return super().training_step(model, batch)

        def evaluation_step(self, model: nn.Module, batch: Any) -> dict[str, Any]:
            seen["eval"].append(gather(batch[1])[:, 0].tolist())
            return {"mean": batch[1].mean()}

    class Hook(Callback):
        def on_step_end(self, run: Run, result: Any) -> None:
            seen["hook"].append(run.gather(torch.tensor(float(rank))).tolist())

    trainer = Watching(max_epochs=1, callbacks=[Hook()])
    loaders = [DataLoader(Subset(make_data(9), range(5)), batch_size=2) for _ in range(2)]
    trainer.fit(make_model(), tuple(loaders), optimizer=lambda p: SGD(p, lr=0.0))
    return seen


@pytest.mark.e2e
@pytest.mark.parametrize("size", [1, 2])
def test_a_repeated_batch_gives_no_rows(size: int) -> None:
    first = make_data(9)[:5][1][:, 0].tolist()
    rounds = [first[k : k + 2 * size] for k in range(0, 5, 2 * size)]
    ranks = [float(rank) for rank in range(size)]
    for seen in run_ranks(size, _repeating):
        assert seen["train"] == rounds
        assert seen["eval"] == [rounds[0], *rounds]  # the first is a rehearsal
        assert seen["hook"] == [ranks] * len(rounds)


def _forms(rank: int, size: int) -> None:
    accelerator = Accelerator(cpu=True)
    x = torch.full((2, 3), float(rank), requires_grad=True)
    assert not accelerator.gather(x).requires_grad
    assert not accelerator.gather({"x": [x]})["x"][0].requires_grad
    assert not accelerator.gather_for_metrics((x, [x, x]))[1][0].requires_grad
    ints = torch.arange(rank + 1)
    value = {"x": x, "rest": (torch.tensor(float(rank)), ints, torch.tensor([rank > 0]))}
    found = gather(value, differentiable=True)
    assert found["x"].shape == (2 * size, 3)
    assert found["x"].requires_grad
    assert found["rest"][0].tolist() == list(range(size))
    assert found["rest"][1].tolist() == [i for r in range(size) for i in range(r + 1)]
    assert found["rest"][2].tolist() == [r > 0 for r in range(size)]
    assert not any(one.requires_grad for one in found["rest"])
    assert accelerator.own_rows(ints) == slice(sum(range(rank + 1)), sum(range(rank + 2)))
    (found["x"].sum() * (rank + 1)).backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, sum(range(size + 1))))
    half = x.detach().bfloat16().requires_grad_()
    accelerator.gather(half, differentiable=True).sum().backward()
    with torch.no_grad():
        assert accelerator.gather(x, differentiable=True).grad_fn is None
    alone = accelerator.on_main_process(accelerator.gather)
    for differentiable in (False, True) if rank == 0 else ():
        with pytest.raises(DistributedError, match="on_main_process"):
            alone(x, differentiable)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_is_gathered(size: int) -> None:
    run_ranks(size, _forms, size)


def _unfit(rank: int) -> list[str]:
    accelerator, said = Accelerator(cpu=True), []
    x = torch.ones(2, 3)
    for value in (
        x.requires_grad_(rank == 0),
        torch.ones(2, 3 + rank),
        torch.ones(2, dtype=torch.float64 if rank else torch.float32),
        {"a": x, "b": x} if rank else {"b": x, "a": x},
        "text" if rank else x,
    ):
        with pytest.raises(DataError) as error:
            accelerator.gather(value, differentiable=True)
        said.append(str(error.value))
    return said


def test_what_does_not_fit_together_is_refused_on_all_processes() -> None:
    ours, theirs = run_ranks(2, _unfit)
    # Where it happened no process is named.
    assert [text.removeprefix("On process 1: ") for text in ours] == theirs
    assert "torch.float32, with a gradient, but process 1" in ours[0]
    for error, words in ((1, ("shape [3]", "shape [4]")), (2, ("torch.float32", "torch.float64"))):
        assert all(word in ours[error] for word in words)
    assert "process 0 `tensor['b']` of rows" in ours[3]
    assert ours[4].startswith("On process 1: `tensor` is a str")


def _labels_by_rank(rank: int, asks: str) -> list[str]:
    accelerator = Accelerator(cpu=True)
    x = torch.ones(3 - rank, 2, requires_grad=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            if asks == "first":
                accelerator.own_rows(x)
            negatives = accelerator.gather(x, differentiable=True)
            positives = accelerator.gather(x, differentiable=True)
            if asks == "last":
                accelerator.own_rows(x)
            (negatives * positives).sum().backward()
    return [str(warning.message) for warning in caught]


@pytest.mark.e2e
def test_labels_that_count_from_the_rank_are_warned_of_where_rows_are_uneven() -> None:
    assert run_ranks(2, _labels_by_rank, "first") == [[], []]
    assert run_ranks(2, _labels_by_rank, "last") == [[], []]
    (words,), others = run_ranks(2, _labels_by_rank, "never")
    assert "joins 3, 2 rows" in words
    assert "own_rows(x).start" in words
    assert others == []
