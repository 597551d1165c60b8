"""Settings that differ between processes are refused before the first step (rule 3)."""

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR, SequentialLR, StepLR
from torch.utils.data import ConcatDataset, DataLoader, Subset, default_collate, random_split

from tests.helpers.ranks import in_turn, run_ranks
from tests.helpers.tiers import with_few
from tests.helpers.toys import fit, make_trainer, toy_dataset, toy_model
from trainkit import Accelerator, ConfigError, GradScalerKwargs, LRSchedule, Run, Trainer
from trainkit.callbacks import Evaluation
from trainkit.precision import FP16
from trainkit.strategies import DDP
from trainkit.training.callback import Callback
from trainkit.training.setup import settings as facts


class Other(Trainer):
    """A step of its own, whose code differs by process."""

    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])


class Double(Other):
    def training_step(self, model: nn.Module, batch: Any) -> Tensor:
        return 2 * super().training_step(model, batch)


class Margin(nn.Module):
    """A loss as users write them."""

    def __init__(self, margin: float, rank: int) -> None:
        super().__init__()
        self.margin = margin
        self.rank = rank  # of a loss over the rows of all processes
        self.device = f"cuda:{rank}"
        self.cache = f"/scratch/{rank}"

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.multi_margin_loss(outputs, targets, margin=self.margin)


class Doubled(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return 2 * super().forward(inputs)


def warm(steps: int) -> Callable[[int], float]:
    return lambda step: min(1.0, (step + 1) / steps)


def sequence(rank: int, optimizer: torch.optim.Optimizer) -> SequentialLR:
    parts = [LambdaLR(optimizer, warm(3 + rank)), StepLR(optimizer, 5)]
    return SequentialLR(optimizer, parts, [4])


def differing(rank: int) -> dict[str, dict[str, Any]]:
    """Return arguments of `Trainer` and `fit` that differ, by what an error says of them."""
    groups = lambda params: SGD([{"params": params, "weight_decay": rank / 10}], lr=0.1)  # noqa: E731
    scores = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.0 + rank]))
    smooth = partial(nn.functional.cross_entropy, label_smoothing=rank / 10)
    twice = LRSchedule if rank == 0 else partial(LRSchedule, every="epoch")
    return {
        r"`optimizer.param_groups\[0\].lr`: process 0: 0.1; process 1: 0.2": {
            "optimizer": partial(SGD, lr=0.1 * (rank + 1))
        },
        r"`optimizer.param_groups\[0\].lr`: process 0: 0.5; process 1: 0.25": {
            "optimizer": lambda params: AdamW(params, lr=torch.tensor(0.5 / (rank + 1)))
        },
        r"`optimizer.param_groups\[0\].weight_decay`: .*process 1: 0.1": {"optimizer": groups},
        r"`optimizer.param_groups\[0\].fused`: process 0: not set; process 1: True": {
            "optimizer": partial(SGD, lr=0.1, fused=rank == 1 or None)
        },
        "`optimizer`: process 0: SGD; process 1: AdamW": {
            "optimizer": partial(AdamW if rank else SGD, lr=0.1)
        },
        "`lr_scheduler.scheduler.step_size`: process 0: 3; process 1: 4": {
            "lr_scheduler": partial(StepLR, step_size=3 + rank)
        },
        "`lr_scheduler.scheduler.*lr_lambdas.*steps`: process 0: 3; process 1: 4": {
            "lr_scheduler": partial(sequence, rank)
        },
        "`lr_scheduler.every`: process 0: 'step'; process 1: 'epoch'": {
            "lr_scheduler": lambda optimizer: twice(StepLR(optimizer, 3))
        },
        "`lr_scheduler`: process 0: LRSchedule; process 1: not set": {
            "lr_scheduler": None if rank else partial(StepLR, step_size=3)
        },
        "`loss_fn.label_smoothing`: process 0: 0.0; process 1: 0.1": {
            "loss_fn": nn.CrossEntropyLoss(label_smoothing=rank / 10)
        },
        "`loss_fn.label_smoothing`: .*process 1: 0.1 ?": {"loss_fn": smooth},
        "`loss_fn.buffers.weight`: process 0: digest": {"loss_fn": scores},
        "`loss_fn.ignore_index`": {"loss_fn": nn.CrossEntropyLoss(ignore_index=-100 + rank)},
        "`loss_fn`: process 0: CrossEntropyLoss; process 1: .*cross_entropy.*code": {
            "loss_fn": nn.functional.cross_entropy if rank else nn.CrossEntropyLoss()
        },
        "`loss_fn.margin`: process 0: 1.0; process 1: 1.5": {"loss_fn": Margin(1 + rank / 2, rank)},
        "`training_step`: process 0: .*Other.training_step.*Double.training_step": {
            "kind": (Other, Double)[rank]
        },
        "the model: .*code": {
            "model": nn.Sequential((nn.Linear, Doubled)[rank](4, 2)),
        },
        "`precision.options.init_scale`: process 0: 1024.0; process 1: 2048.0": {
            "precision": FP16(init_scale=1024.0 * (rank + 1))
        },
        "`precision`: process 0: FP32; process 1: BF16": {"precision": ("fp32", "bf16")[rank]},
        "`strategy.find_unused_parameters`: process 0: False; process 1: True": {
            "strategy": DDP(find_unused_parameters=rank == 1)
        },
        "`compile.mode`: process 0: 'default'; process 1: 'max-autotune'": {
            "compile": {"mode": ("default", "max-autotune")[rank]}
        },
        "the versions: process 0: trainkit 1, .*process 1: trainkit 2": {"version": str(rank + 1)},
        "the script: process 0: `a.py` .*process 1: `b.py`": {"script": ("a", "b")[rank]},
    }


class Sees(Callback):
    """Remembers that a first step began."""

    def __init__(self) -> None:
        self.steps = 0

    def on_step_start(self, run: Run) -> None:
        self.steps += 1


def refusals(rank: int, folder: Path) -> list[str]:
    """Return the error of each difference; there is one on every process, before any step."""
    for name in ("a", "b"):
        (folder / f"{name}.py").write_text(f"#!/usr/bin/python\n# {name}\n")
    texts = []
    for index in range(len(differing(0))):
        of_fit = list(differing(min(rank, 1)).values())[index]
        kind = of_fit.pop("kind", Other if "loss_fn" not in of_fit else Trainer)
        vars(facts)["__version__"] = of_fit.pop("version", "0")
        if "script" in of_fit:
            sys.modules["__main__"].__file__ = str(folder / f"{of_fit.pop('script')}.py")
        names = ("precision", "strategy", "compile")
        settings = {name: of_fit.pop(name) for name in names if name in of_fit}
        sees = Sees()
        with pytest.raises(ConfigError, match="The processes differ in") as caught:
            fit(kind(max_epochs=1, callbacks=[sees], **settings), **of_fit)
        assert sees.steps == 0
        texts.append(str(caught.value))
    return texts


@pytest.mark.parametrize("size", with_few([3], [2, 3]))
def test_each_difference_is_named_with_its_values_and_processes(size: int, tmp_path: Path) -> None:
    found = run_ranks(size, refusals, tmp_path, timeout=240)
    assert all(texts == found[0] for texts in found)
    for text, expected in zip(found[0], differing(0), strict=True):
        assert re.search(f"The processes differ in {expected}", text), text


def alike(rank: int, folder: Path) -> None:
    """Fit with what may well differ by process."""
    offset = rank * 4

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        assert offset == rank * 4
        return nn.functional.cross_entropy(outputs, targets)

    fit(make_trainer(), loss_fn=loss_fn)
    fit(make_trainer(), loss_fn=Margin(1.0, rank), lr_scheduler=partial(sequence, 0))
    fit(make_trainer(precision="fp16"), optimizer=partial(AdamW, lr=0.1, fused=True))
    # A script on one machine only, as where the others run a notebook's kernel.
    (folder / "a.py").write_text("# a\n")
    sys.modules["__main__"].__file__ = str(folder / "a.py") if rank == 0 else None
    fit(make_trainer())


@pytest.mark.e2e
def test_what_may_differ_is_let_through(tmp_path: Path) -> None:
    run_ranks(2, alike, tmp_path)


def own_loops(rank: int) -> list[str]:
    """Return the error of each difference in what `prepare` is given."""
    texts = []
    model = nn.Linear(2, 2)
    order = [*model.parameters()][:: 1 - 2 * rank]  # as that of a `set` may be
    Accelerator(cpu=True).prepare(model, SGD(order, lr=0.1))
    for what in ("lr", "apart", "schedule", "precision", "scaler", "accumulation", "model"):
        other = rank * 1.0
        formats = {"scaler": "fp16", "precision": ("no", "bf16")[rank]}
        accelerator = Accelerator(
            cpu=True,
            mixed_precision=formats.get(what, "no"),
            gradient_accumulation_steps=1 + rank * (what == "accumulation"),
            kwargs_handlers=[GradScalerKwargs(init_scale=8.0 + other * (what == "scaler"))],
        )
        kind = Doubled if rank and what == "model" else nn.Linear
        model = kind(2, 2)
        optimizer = SGD(model.parameters(), lr=0.1 + other * (what in ("lr", "apart")))
        schedule = StepLR(optimizer, 3 + rank * (what == "schedule"))
        if what == "apart":
            accelerator.prepare_model(model)
        given = (optimizer,) if what == "apart" else (model, optimizer, schedule)
        with pytest.raises(ConfigError, match="The processes differ in") as caught:
            accelerator.prepare(*given)
        texts.append(str(caught.value))
    return texts


@pytest.mark.e2e
def test_the_same_holds_for_what_an_own_loop_prepares() -> None:
    expected = [
        r"prepare\(...\)\[1\].param_groups\[0\].lr`: process 0: 0.1; process 1: 1.1",
        r"prepare\(...\)\[0\].param_groups\[0\].lr`: process 0: 0.1; process 1: 1.1",
        r"prepare\(...\)\[2\].step_size`: process 0: 3; process 1: 4",
        "`precision`: process 0: FP32; process 1: BF16",
        "`precision.options.init_scale`: process 0: 8.0; process 1: 9.0",
        "`gradient_accumulation.num_steps`: process 0: 1; process 1: 2",
        r"what `prepare` was given: .*process 1: \['Doubled', .*also in `prepare\(...\)\[0\]`",
    ]
    found = run_ranks(2, own_loops)
    assert found[0] == found[1]
    for text, pattern in zip(found[0], expected, strict=True):
        assert re.search(pattern, text), text


def traffic(rank: int) -> list[int]:
    """Return the bytes that each comparison of a fit sends where nothing differs."""
    trainer = make_trainer()
    sent: list[int] = []
    reduce = trainer.strategy.processes.all_reduce

    def counted(tensor: Tensor, op: Any = "sum") -> Tensor:
        if tensor.shape == (1, 2):
            sent.append(tensor.nbytes)
        return reduce(tensor, op)

    trainer.strategy.processes.all_reduce = counted  # type: ignore[method-assign]
    fit(trainer)
    return sent


@pytest.mark.e2e
def test_facts_that_are_alike_travel_as_one_number() -> None:
    # Settings before and after the optimizer is made, order, weights, lengths, names of the log,
    # and what the one evaluation evaluates.
    first, second = run_ranks(2, traffic)
    assert first == second
    assert set(first) == {16}
    assert len(first) <= 8


def test_a_script_is_told_by_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(content: bytes | None) -> str | None:
        path = tmp_path / "train.py"
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
        monkeypatch.setattr(sys.modules["__main__"], "__file__", str(path), raising=False)
        return dict(facts.program()).get(facts.SCRIPT)

    first = script(b"#!/a/python\nx = 1\n")
    assert first == script(b"#!/b/python\r\nx = 1\r\n")
    assert first != script(b"x = 2\n")
    assert script(None) is None


def parts(rank: int, kind: str) -> nn.Module:
    """Return a model of the same tensors, with something else in it on process 1."""
    middle: list[nn.Module] = [nn.ReLU(), nn.Tanh()]
    if kind == "order" and rank:
        middle.reverse()
    slope = nn.LeakyReLU(0.1 + 0.1 * rank * (kind == "slope"))
    norm = nn.BatchNorm1d(8, eps=1e-5 + rank * (kind == "eps"))
    drop = nn.Dropout(0.1 + 0.5 * rank * (kind == "dropout"))
    return nn.Sequential(nn.Linear(4, 8), middle[0], norm, slope, middle[1], drop, nn.Linear(8, 2))


def refuse_parts(rank: int, kind: str, place: str) -> None:
    message = f"differ in the module `{place}` of the model: process 0: "
    with pytest.raises(ConfigError, match=re.escape(message)):
        fit(make_trainer(), model=parts(rank, kind))
    accelerator, model = Accelerator(), parts(rank, kind)
    with pytest.raises(ConfigError, match=re.escape(f"differ in the module `{place}` of")):
        accelerator.prepare(model, SGD(model.parameters(), lr=0.1))


def test_modules_that_are_set_otherwise_are_refused() -> None:
    cases = [("order", "1"), ("eps", "2"), ("slope", "3"), ("dropout", "5")]
    run_ranks(2, in_turn, refuse_parts, cases)


class Views(Subset[Any]):
    """A part of a data set, as users write them, with a function that reads it."""

    def __init__(self, data: Any, indices: Any, read: Any = None) -> None:
        super().__init__(data, indices)
        self.read = read


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        return self.transform(torch.ones(4) * index), index % 2


def halves(batch: list[Any]) -> Any:
    features, targets = default_collate(batch)
    return features / 2, targets


def data_of(rank: int, kind: str) -> DataLoader[Any]:
    """Return a loader of 32 samples that is another one on process 1."""
    data, generator = toy_dataset(64), torch.Generator().manual_seed(rank)
    half = random_split(data, [0.5, 0.5], generator=generator)[0]
    whole = {
        "split": half,
        "nested": Subset(random_split(data, [0.75, 0.25], generator=generator)[0], range(32)),
        "joined": ConcatDataset([Subset(half, range(16))] * 2),
        "views": Views(data, range(rank, 32 + rank)),
        "collate": toy_dataset(32),
        "transform": Rows(steps[rank]),
    }
    collate = halves if kind == "collate" and rank else default_collate
    return DataLoader(whole[kind], 4, shuffle=True, collate_fn=collate)


steps = (lambda value: value / 32, lambda value: value / 16)


def refuse_data(rank: int, kind: str) -> None:
    remedy = r".*Every process must build the same"
    with pytest.raises(ConfigError, match=f"differ in the training loader: {remedy}"):
        fit(make_trainer(), (data_of(rank, kind), None))
    with pytest.raises(ConfigError, match=f"differ in the evaluation loader: {remedy}"):
        fit(make_trainer(), (data_of(0, kind), data_of(rank, kind)))
    model = toy_model()
    given = model, SGD(model.parameters(), lr=0.1), data_of(rank, kind)
    with pytest.raises(ConfigError, match=f"differ in the loader at position 2 of .*{remedy}"):
        Accelerator(cpu=True).prepare(*given)
    with pytest.raises(ConfigError, match=f"differ in the loader at position 0 of .*{remedy}"):
        Accelerator(cpu=True).prepare_data_loader(data_of(rank, kind))


def same_data(rank: int, kind: str) -> None:
    fit(make_trainer(), (data_of(0, kind), data_of(0, kind)))
    model = toy_model()
    Accelerator(cpu=True).prepare(model, SGD(model.parameters(), lr=0.1), data_of(1, kind))


@pytest.mark.parametrize("function", [refuse_data, same_data])
def test_other_samples_or_code_that_reads_them_are_refused(function: Any) -> None:
    kinds = ("split", "nested", "joined", "views", "collate", "transform")
    run_ranks(2, in_turn, function, [(kind,) for kind in kinds])


def threshold(limit: float, rank: int) -> Callable[[Any, Any], float]:
    def share(predictions: Any, references: Any) -> float:
        return float((predictions > limit).float().mean()) + 0 * rank

    return share


def _measure(rank: int) -> str:
    other = lambda predictions, references: float(rank or len(references))  # noqa: E731
    first = lambda predictions, references: 0.0  # noqa: E731
    told = []
    for metrics in ([other if rank else first], [threshold(0.1 * rank, 0)], [threshold(0.1, rank)]):
        loader = DataLoader(toy_dataset(), batch_size=4)
        trainer = make_trainer(callbacks=[Evaluation(metrics)], strategy="ddp")
        try:
            fit(trainer, (loader, loader))
            told.append("")
        except ConfigError as error:
            told.append(str(error))
    return "\n".join(told)


@pytest.mark.e2e
def test_a_metric_that_is_another_function_on_one_process_is_refused() -> None:
    """Its figures would differ, and what watches them would end one process alone."""
    for told in run_ranks(2, _measure):
        code, limit, own_rank = told.split("\n")
        assert "The processes differ in `metrics.lambda`" in code
        assert "process 0: 0.0; process 1: 0.1" in limit
        assert own_rank == ""
