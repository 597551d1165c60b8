"""Losses that are no mean over samples are exact, or refused (rule 6)."""

from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.callbacks import Counts
from tests.helpers.ranks import in_turn, run_ranks
from tests.helpers.tiers import with_few
from trainkit import Callback, Run, StepOutput, Trainer
from trainkit.errors import ConfigError

SAMPLES, WIDTH, CLASSES = 13, 5, 4
LIMIT = 1e-12
WEIGHTS = torch.tensor([0.1, 3.0, 1.0, 7.0], dtype=torch.float64)


class Gradients(Callback):
    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_gradients(self, run: Run) -> None:
        grad = run.module.get_parameter("weight").grad
        assert grad is not None
        self.seen.append(grad.cpu().clone())


class Positions(nn.Linear):
    """Classifies each position; the classes are dimension 1, as CrossEntropyLoss has it."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs).movedim(-1, 1)


def logged(outputs: Tensor) -> Tensor:
    return F.log_softmax(outputs, 1)


class NLL(nn.NLLLoss):
    """A subclass whose mean is over samples: what it inherits says nothing of it."""

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = F.nll_loss(logged(outputs), targets, self.weight, reduction="none")
        return losses.mean()


def make(targets: str) -> tuple[nn.Module, TensorDataset]:
    generator = torch.Generator().manual_seed(5)
    shape = (SAMPLES, 3) if targets == "positions" else (SAMPLES,)
    inputs = torch.randn(*shape, WIDTH, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, CLASSES, shape, generator=generator)
    ignored = torch.rand(shape, generator=generator) < 0.4
    if targets != "labels":
        labels[ignored] = -1 if targets == "ignored" else -100
    if targets == "floats":
        labels = torch.rand(SAMPLES, CLASSES, dtype=torch.float64, generator=generator)
    torch.manual_seed(1)
    kind = Positions if targets == "positions" else nn.Linear
    return kind(WIDTH, CLASSES).double(), TensorDataset(inputs, labels)


LOSSES: dict[str, tuple[Any, str]] = {
    "mean": (nn.CrossEntropyLoss(), "labels"),
    "class weights": (nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1), "labels"),
    "ignored": (nn.CrossEntropyLoss(ignore_index=-1), "ignored"),
    "both": (nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=-1), "ignored"),
    "function": (partial(F.cross_entropy, weight=WEIGHTS, ignore_index=-1), "ignored"),
    "default index": (partial(F.cross_entropy, ignore_index=-100), "ignored by default"),
    "positions": (nn.CrossEntropyLoss(), "positions"),
    "bare function": (F.cross_entropy, "positions"),
    "own mean": (NLL(weight=WEIGHTS), "labels"),
    "floats": (nn.CrossEntropyLoss(weight=WEIGHTS), "floats"),
    "elements": (nn.MSELoss(), "floats"),
    "batchmean": (nn.KLDivLoss(reduction="batchmean"), "floats"),
}


def fit(name: str, accumulation: int) -> tuple[list[Tensor], float]:
    loss_fn, targets = LOSSES[name]
    model, data = make(targets)
    gradients = Gradients()
    trainer = Trainer(max_epochs=1, gradient_accumulation_steps=accumulation, callbacks=[gradients])
    loader = DataLoader(data, batch_size=2)
    trainer.fit(model, loader, optimizer=lambda p: SGD(p, lr=0.0), loss_fn=loss_fn)
    return gradients.seen, trainer.evaluate(model, loader)["eval/loss"]


def fit_all(rank: int) -> dict[Any, tuple[list[Tensor], float]]:
    return {(name, steps): fit(name, steps) for name in LOSSES for steps in (1, 3)}


@pytest.mark.parametrize("size", with_few([2], [1, 2]))
def test_a_mean_over_labels_is_exact(size: int) -> None:
    results = run_ranks(size, fit_all)
    for (name, accumulation), (seen, mean) in results[0].items():
        loss_fn, targets = LOSSES[name]
        model, data = make(targets)
        inputs, labels = data.tensors
        window = 2 * accumulation * size
        assert len(seen) == -(-SAMPLES // window)
        for number, ours in enumerate(seen):
            part = slice(number * window, (number + 1) * window)
            model.zero_grad()
            loss_fn(model(inputs[part]), labels[part]).backward()
            theirs = model.get_parameter("weight").grad
            assert theirs is not None
            if not theirs.any():
                assert not ours.any()  # no label counts in this window
                continue
            error = float((ours - theirs).norm() / theirs.norm())
            assert error <= LIMIT, (name, accumulation, error)
        assert mean == pytest.approx(loss_fn(model(inputs), labels).item(), rel=LIMIT), name


class Own(nn.Module):
    """A loss of a user's own that says its reduction as those of torch do."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction = reduction

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = (outputs.sum(1) - targets).pow(2)
        return losses if self.reduction == "none" else losses.sum()


class Wrapped(Trainer):
    def training_step(self, model: nn.Module, batch: Any) -> Any:
        return super().training_step(model, (batch[0], batch[1].clone()))


def refuse(rank: int, accumulation: int) -> list[str]:
    said = []
    for reduction in ("sum", "none"):
        for loss_fn in (
            nn.CrossEntropyLoss(reduction=reduction),
            partial(F.cross_entropy, reduction=reduction),
            Own(reduction),
        ):
            steps = Counts()
            model, data = make("labels")
            trainer = Wrapped(
                max_epochs=1, gradient_accumulation_steps=accumulation, callbacks=[steps]
            )
            with pytest.raises(ConfigError) as error:
                trainer.fit(
                    model,
                    DataLoader(data, batch_size=2),
                    optimizer=lambda p: SGD(p, lr=0.0),
                    loss_fn=loss_fn,
                )
            assert steps.steps == 0
            with pytest.raises(ConfigError, match="evaluation_step"):
                trainer.evaluate(model, DataLoader(data, batch_size=2), loss_fn=loss_fn)
            said.append(str(error.value))
    return said


@pytest.mark.parametrize("size", [1, 2])
def test_sums_and_vectors_are_refused_before_the_first_step(size: int) -> None:
    for said in chain(*run_ranks(size, in_turn, refuse, [(1,), (3,)])):
        for number, message in enumerate(said):
            assert f'`reduction="{"sum" if number < 3 else "none"}"`' in message
            assert '`reduction="mean"`' in message


class Weighed(Trainer):
    """Puts the losses of single samples together itself, which is what `none` is for."""

    def training_step(self, model: nn.Module, batch: Any) -> Any:
        assert self.loss_fn is not None
        losses, counts = self.loss_fn(model(batch[0]), batch[1]), batch[1] + 1
        return StepOutput((losses * counts).sum() / counts.sum(), counts.sum())


class Vectors(Trainer):
    def training_step(self, model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def own_steps(rank: int) -> Tensor:
    model, data = make("labels")
    gradients = Gradients()
    loader = DataLoader(data, batch_size=2)
    sgd = partial(SGD, lr=0.0)
    loss_fn = nn.CrossEntropyLoss(reduction="none")
    trainer = Weighed(max_epochs=1, gradient_accumulation_steps=7, callbacks=[gradients])
    trainer.fit(model, loader, optimizer=sgd, loss_fn=loss_fn)
    for accumulation in (1, 3):
        vectors = Vectors(
            max_epochs=1, gradient_accumulation_steps=accumulation, callbacks=[Counts()]
        )
        with pytest.raises(ConfigError, match=r"must be a scalar.*shape \(2,\)"):
            vectors.fit(model, loader, optimizer=sgd)
    return gradients.seen[0]


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_of_ones_own_may_use_single_losses_but_returns_one(size: int) -> None:
    model, data = make("labels")
    inputs, labels = data.tensors
    losses = F.cross_entropy(model(inputs), labels, reduction="none")
    ((losses * (labels + 1)).sum() / (labels + 1).sum()).backward()  # type: ignore[no-untyped-call]
    expected = model.get_parameter("weight").grad
    for gradient in run_ranks(size, own_steps):
        torch.testing.assert_close(gradient, expected, rtol=LIMIT, atol=LIMIT)


def test_the_loss_of_speech_models_is_a_mean_over_samples_or_refused() -> None:
    transformers = pytest.importorskip("transformers")
    from trainkit.training.default_steps import training_step

    config = transformers.Wav2Vec2Config(
        vocab_size=8,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        conv_dim=(8,),
        conv_stride=(4,),
        conv_kernel=(4,),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=1,
        num_feat_extract_layers=1,
    )
    model = transformers.Wav2Vec2ForCTC(config)
    labels = torch.tensor([[1, 2, 3], [4, -100, -100]])
    batch = {"input_values": torch.randn(2, 400), "labels": labels}
    with pytest.raises(ConfigError, match='`ctc_loss` has `reduction="sum"`'):
        training_step(model, model, batch, None)
    config.ctc_loss_reduction = "mean"
    assert training_step(model, model, batch, None).weight is None
