"""Classes and probabilities are read from outputs as the loss takes them, or refused."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.needs import late
from tests.helpers.ranks import run_ranks
from trainkit import ConfigError, DataError, Trainer
from trainkit.callbacks import Evaluation
from trainkit.distributed import gather_samples
from trainkit.metrics import FunctionMetric, Metric, scores
from trainkit.metrics.model_outputs import Reading
from trainkit.training import evaluation

torchmetrics = late("torchmetrics")

torch.manual_seed(0)
OUTPUTS = torch.randn(6, 3)
IMAGES = torch.randn(2, 3, 3, 3)
WORDS = torch.randn(2, 5, 3)
ONE = torch.randn(6)
NEXT = torch.tensor([1, 2, 3, 0])


def own_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets) ** 2


class LastAxis(nn.CrossEntropyLoss):
    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().forward(outputs.transpose(1, 2), targets)


def whole(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


@pytest.mark.parametrize(
    ("loss_fn", "outputs", "references", "expected"),
    [
        (nn.CrossEntropyLoss(), OUTPUTS, whole(6), OUTPUTS.argmax(1)),
        (partial(functional.cross_entropy, label_smoothing=0.1), IMAGES, None, IMAGES.argmax(1)),
        (nn.NLLLoss(), IMAGES, whole(2, 3, 3), IMAGES.argmax(1)),
        (nn.BCEWithLogitsLoss(), ONE, ONE, (ONE > 0).long()),
        (functional.binary_cross_entropy, ONE, ONE, (ONE > 0.5).long()),
        (nn.MSELoss(), ONE, ONE.long(), ONE),
        (nn.MSELoss(), {"boxes": ONE}, ONE, {"boxes": ONE}),
        (None, OUTPUTS.argmax(1), whole(6), OUTPUTS.argmax(1)),
        (own_loss, OUTPUTS, whole(6), OUTPUTS.argmax(1)),
        (LastAxis(), WORDS, whole(2, 5), WORDS.argmax(-1)),
        (own_loss, WORDS, whole(2, 5), WORDS.argmax(-1)),
        (own_loss, IMAGES[..., :2], whole(2, 3, 2), IMAGES[..., :2].argmax(1)),
        (own_loss, OUTPUTS, OUTPUTS, OUTPUTS),
    ],
)
def test_predictions_follow_the_loss(
    loss_fn: Any, outputs: Any, references: Any, expected: Any
) -> None:
    found = Reading(nn.Identity(), loss_fn)("predictions", outputs, references)
    if isinstance(expected, Tensor):
        assert torch.equal(found, expected)
    else:
        assert found is outputs


@pytest.mark.parametrize(
    ("loss_fn", "outputs", "references", "message"),
    [
        (own_loss, IMAGES, whole(2, 3, 3), r"both `outputs.argmax\(1\)` and"),
        (own_loss, IMAGES, whole(2, 6, 6), "neither dimension 1 nor the last"),
        (own_loss, ONE, whole(6), r"`\(outputs > 0\).long\(\)`, or a probability"),
        (own_loss, ONE[:, None], whole(6), "may be a logit"),
        (None, ONE, whole(6).float(), "may be a logit"),
        (own_loss, OUTPUTS, None, "none of torch's"),
        (nn.CrossEntropyLoss(), IMAGES, whole(2, 6, 6), r"would have the shape \[2, 3, 3\]"),
        (nn.CrossEntropyLoss(), OUTPUTS, OUTPUTS.softmax(1), r"would have the shape \[6\]"),
        (nn.CrossEntropyLoss(), OUTPUTS, OUTPUTS.softmax(1), r"`references\.argmax\(1\)`"),
        (nn.CrossEntropyLoss(), IMAGES, IMAGES.softmax(1), r"`references\.argmax\(1\)`"),
    ],
)
def test_what_cannot_be_told_is_refused(
    loss_fn: Any, outputs: Any, references: Any, message: str
) -> None:
    with pytest.raises(DataError, match=f"(?s){message}.*`evaluation_step`.*metrics.scores"):
        Reading(nn.Identity(), loss_fn)("predictions", outputs, references)


def read_words(rank: int, lengths: list[int]) -> Tensor:
    """Return the classes of words of so many positions, of four classes each."""
    rows: Any = [(torch.eye(4).roll(1, 1)[:length], torch.arange(length)) for length in lengths]
    loader: DataLoader[Any] = DataLoader(rows, batch_size=1)
    trainer = Trainer(max_steps=1, callbacks=[])
    found = trainer.predict(nn.Identity(), loader, outputs="classes", loss_fn=LastAxis())
    assert isinstance(found, Tensor)
    return found


def test_as_many_words_as_classes_are_read_as_the_first_batch_was() -> None:
    assert torch.equal(read_words(0, [3, 4])[1], NEXT)
    with pytest.raises(DataError, match=r"both `outputs.argmax\(1\)` and"):
        read_words(0, [4, 3])  # before the first step, where it is a fit
    for found in run_ranks(2, read_words, [4, 3]):  # the first batch of process 1 tells
        assert torch.equal(found[0], NEXT)


@pytest.mark.parametrize(
    ("loss_fn", "is_refused"),
    [
        (nn.PoissonNLLLoss(), True),
        (partial(functional.poisson_nll_loss, full=True), True),
        (nn.PoissonNLLLoss(log_input=False), False),
        (partial(functional.poisson_nll_loss, log_input=False), False),
        (nn.MSELoss(), False),
    ],
)
def test_logarithms_of_rates_are_no_rates(loss_fn: Any, is_refused: bool) -> None:
    def error(predictions: Tensor, references: Tensor) -> float:
        return float((predictions - references).abs().mean())

    outputs, counts = ONE.abs(), torch.arange(6.0)
    loader = DataLoader(TensorDataset(outputs, counts), batch_size=2)
    by_hand = error(outputs, counts)
    trainer = Trainer(max_steps=1, callbacks=[])
    for metric in ("mae", torchmetrics.MeanAbsoluteError(), error, scores(error)):
        if is_refused and not isinstance(metric, FunctionMetric):
            with pytest.raises(DataError, match=r"logarithms of rates.*`outputs\.exp\(\)`"):
                trainer.evaluate(nn.Identity(), loader, metrics=[metric], loss_fn=loss_fn)
        else:
            found = trainer.evaluate(nn.Identity(), loader, metrics=[metric], loss_fn=loss_fn)
            assert by_hand in [pytest.approx(value) for value in found.values()]


def test_models_of_transformers_have_the_classes_last() -> None:
    class Config:
        problem_type: str | None = None

    model = nn.Identity()
    model.loss_function, model.config = own_loss, Config()  # type: ignore[assignment]
    reading = Reading(model, None)
    square = torch.randn(2, 4, 4)
    assert torch.equal(reading("predictions", square, whole(2, 4)), square.argmax(-1))
    assert torch.equal(reading("classes", IMAGES), IMAGES.argmax(1))
    assert torch.equal(reading("probabilities", OUTPUTS), OUTPUTS.softmax(-1))
    assert reading("predictions", ONE[:, None], ONE) is not None
    Config.problem_type = "multi_label_classification"
    assert torch.equal(reading("classes", OUTPUTS), (OUTPUTS > 0).long())


def test_references_of_a_causal_model_are_the_next_words() -> None:
    transformers = pytest.importorskip("transformers")
    text = pytest.importorskip("torchmetrics.text")
    config = transformers.GPT2Config(
        n_embd=8, n_head=2, n_layer=1, vocab_size=16, bos_token_id=0, eos_token_id=0
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    ids = torch.randint(1, 16, (5, 6))
    rows: Any = [{"input_ids": row, "labels": row} for row in ids]
    loader: Any = DataLoader(rows, batch_size=2)
    trainer = Trainer(max_steps=1, callbacks=[])
    metric = text.Perplexity(ignore_index=-100)
    figures = trainer.evaluate(model, loader, metrics=[metric, "perplexity"])
    with torch.no_grad():  # a graph of the model would keep it from moving back
        logits = model.cpu()(ids).logits
    by_hand = functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).exp()
    assert figures["eval/Perplexity"] == pytest.approx(by_hand.item(), rel=1e-4)
    assert figures["eval/perplexity"] == pytest.approx(by_hand.item(), rel=1e-4)
    assert trainer.predict(model, loader).shape == (5, 6, 16)
    unlabelled: Any = DataLoader([{"input_ids": row} for row in ids], batch_size=2)  # type: ignore[arg-type]
    for outputs in ("raw", "classes", "probabilities"):
        found = [trainer.predict(model, data, outputs=outputs) for data in (loader, unlabelled)]
        assert torch.equal(*found)


def predict_all(rank: int, loss_fn: Any) -> list[Tensor]:
    model = nn.Linear(4, 3)
    nn.init.eye_(model.weight)
    inputs = torch.randn(7, 4, generator=torch.Generator().manual_seed(1))
    targets = whole(7) if isinstance(loss_fn, nn.CrossEntropyLoss) else torch.zeros(7, 3)
    trainer = Trainer(max_steps=1, callbacks=[])
    return [
        trainer.predict(model, DataLoader(data, batch_size=2), outputs=outputs, loss_fn=loss_fn)
        for outputs in ("raw", "classes", "probabilities")
        for data in (TensorDataset(inputs, targets), TensorDataset(inputs))
    ]


@pytest.mark.parametrize("loss_fn", [nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss()])
def test_predict_returns_what_was_asked_for_with_and_without_labels(loss_fn: Any) -> None:
    binary = isinstance(loss_fn, nn.BCEWithLogitsLoss)
    for size in (1, 2):
        for raw, other_raw, *found in run_ranks(size, predict_all, loss_fn):
            classes = (raw > 0).long() if binary else raw.argmax(1)
            probabilities = raw.sigmoid() if binary else raw.softmax(1)
            expected = [classes, classes, probabilities, probabilities]
            assert raw.shape == (7, 3)
            assert torch.equal(raw, other_raw)
            assert all(torch.allclose(a, b) for a, b in zip(found, expected, strict=True))


def test_predict_refuses_what_it_cannot_tell() -> None:
    model, loader = nn.Linear(4, 3), DataLoader(TensorDataset(torch.zeros(4, 4)), batch_size=2)
    trainer = Trainer(max_steps=1, callbacks=[])
    with pytest.raises(ConfigError, match="`outputs` must be one of"):
        trainer.predict(model, loader, outputs="logits")
    with pytest.raises(DataError, match="Pass the loss of torch as `loss_fn`"):
        trainer.predict(model, loader, outputs="classes")
    with pytest.raises(DataError, match="they are values"):
        trainer.predict(model, loader, outputs="probabilities", loss_fn=nn.MSELoss())

    class Own(Trainer):
        def evaluation_step(self, model: nn.Module, batch: Any) -> dict[str, Any]:
            return {"predictions": model(batch[0])}

    own = Own(max_steps=1, callbacks=[])
    assert own.predict(model, loader).shape == (4, 3)
    with pytest.raises(DataError, match=r"`predictions` of torch\.float32, which"):
        own.predict(model, loader, outputs="classes")
    with pytest.raises(DataError, match="returned no `probabilities`"):
        own.predict(model, loader, outputs="probabilities")


class Seen(Metric):
    """Keeps what it gets."""

    def __init__(self, uses: Any) -> None:
        self.name = self.uses = uses

    def reset(self) -> None:
        self.got: list[Any] = []

    def update(self, predictions: Any, references: Any) -> None:
        self.got.append(predictions)

    def compute(self) -> dict[str, float]:
        return {}


def gathered_for(outputs: Tensor, targets: Tensor, loss_fn: Any) -> list[str]:
    """Return what is gathered where metrics use all there is, twice."""
    kinds = ["scores", "predictions", "probabilities"][: 2 if loss_fn is None else 3]
    metrics = [Seen(uses) for uses in (*kinds, *kinds)]
    loader = DataLoader(TensorDataset(outputs, targets), batch_size=2)
    seen: list[str] = []
    before = gather_samples

    def watched(processes: Any, batches: Any, *arguments: Any, **options: Any) -> Any:
        seen.extend(batches[0])
        return before(processes, batches, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluation, "gather_samples", watched)
        trainer = Trainer(max_steps=1, callbacks=[])
        trainer.evaluate(nn.Identity(), loader, metrics=metrics, loss_fn=loss_fn)
    assert all(
        torch.equal(*both) for both in zip(metrics[0].got, metrics[len(kinds)].got, strict=True)
    )
    return sorted(seen)


def test_each_is_gathered_once() -> None:
    everything = ["predictions", "probabilities", "references", "scores"]
    assert gathered_for(OUTPUTS, whole(6), nn.CrossEntropyLoss()) == everything
    assert gathered_for(ONE, ONE, None) == ["references", "scores"]


def test_what_cannot_be_told_is_said_before_the_first_step() -> None:
    def right(predictions: Tensor, references: Tensor) -> float:
        return float((predictions == references).double().mean())

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.binary_cross_entropy_with_logits(outputs[:, 0], targets.float())

    data = DataLoader(TensorDataset(torch.randn(8, 4), whole(8)), batch_size=4)
    for metric, is_refused in ((right, True), (scores(lambda s, r: s.mean().item()), False)):
        trainer = Trainer(max_epochs=1, callbacks=[Evaluation([metric])])
        arguments: Any = {"optimizer": partial(SGD, lr=0.1), "loss_fn": loss}
        if is_refused:
            with pytest.raises(DataError, match="`evaluation_step`"):
                trainer.fit(nn.Linear(4, 1), (data, data), **arguments)
            assert trainer.run is not None
            assert trainer.run.state.step == 0
        else:
            trainer.fit(nn.Linear(4, 1), (data, data), **arguments)
