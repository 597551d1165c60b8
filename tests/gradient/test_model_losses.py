"""Losses that models compute themselves are exact on any split, or it is said that they are not."""

import contextlib
import io
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader

from tests.gradient.test_training_mode import Merging
from tests.helpers.needs import HAS_TRANSFORMERS, late, needs_transformers
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import with_few
from trainkit import Trainer

if HAS_TRANSFORMERS:
    transformers, losses = late("transformers"), late("benchmarks.model_losses.measure")
    losses_page = late("benchmarks.model_losses.__main__")

EXACT = (
    "BartForConditionalGeneration",
    "BertForMaskedLM",
    "BertForQuestionAnswering",  # answers outside of the text
    "CanaryForConditionalGeneration",  # gives its labels as `shift_labels`
    "ElectraForPreTraining",  # over `attention_mask`
    "FunnelForPreTraining",
    "LlamaForCausalLM",
    "ViTForMaskedImageModeling",  # over patches
    "Wav2Vec2ForSequenceClassification",
)


def found(name: str, **changes: Any) -> Any:
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    transformers.logging.set_verbosity_error()
    return losses.measure(getattr(transformers, name), **changes)


@needs_transformers
@pytest.mark.parametrize("name", with_few(["ElectraForPreTraining", "LlamaForCausalLM"], EXACT))
def test_the_weight_is_what_the_loss_is_a_mean_over(name: str) -> None:
    seen = found(name)
    assert seen.is_exact, seen
    assert seen.said == ""


@needs_transformers
def test_a_loss_of_several_means_is_told_once() -> None:
    seen = found("BertForPreTraining")
    assert not seen.is_exact
    assert "the loss of `BertForPreTraining` is not one mean" in seen.said
    assert "`seq_relationship_logits`" in seen.said
    assert seen.said.count("trainkit:") == 1
    assert "BertForPreTraining" in losses_page.PAGE.read_text("utf-8")


@needs_transformers
def test_a_loss_that_balances_experts_is_told_where_it_is_used() -> None:
    assert found("MixtralForCausalLM").said == ""
    assert "`aux_loss`" in found("MixtralForCausalLM", output_router_logits=True).said


class Own(nn.Module):
    """A model of nobody's library that computes its own loss."""

    def __init__(self, kind: str = "mean") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Sequential(nn.Linear(3, 40), nn.BatchNorm1d(40), nn.Dropout(0.5))
        if kind == "merges":
            self.layer[0] = Merging(3, 40)
        self.kind, self.forwards = kind, 0

    def forward(self, inputs: Tensor, targets: Tensor) -> Any:
        self.forwards += 1
        logits = self.layer(inputs)
        losses = (logits - targets).abs().mean(1)
        if self.kind == "draws":  # in the manner of variational autoencoders
            losses = (logits * torch.randn_like(logits) - targets).square().mean(1)
        if self.kind == "contrasts":
            losses = -torch.log_softmax(logits @ logits.T, 1).diagonal()
        return {"loss": losses.sum() if self.kind == "sum" else losses.mean(), "logits": logits}


def collate(rows: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    inputs, targets = zip(*rows, strict=True)
    return {"inputs": torch.stack(inputs), "targets": torch.stack(targets)}


def train(model: nn.Module, kind: type[Trainer] = Trainer, **settings: Any) -> tuple[str, Tensor]:
    drawn = torch.Generator().manual_seed(1)
    data = [(torch.randn(3, generator=drawn), torch.randn(40, generator=drawn)) for _ in range(12)]
    trainer = kind(max_epochs=2, gradient_accumulation_steps=2, callbacks=[], **settings)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        trainer.fit(
            model,
            DataLoader(data, batch_size=3, collate_fn=collate),  # type: ignore[arg-type]
            optimizer=partial(SGD, lr=0.1),
        )
    weights = torch.cat([value.double().flatten() for value in model.state_dict().values()])
    return said.getvalue(), weights


class Overridden(Trainer):
    def training_step(self, model: nn.Module, batch: Any) -> Any:
        return model(**batch)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kind", ["mean", "draws"])
def test_nothing_is_said_of_means_over_samples(kind: str, precision: str) -> None:
    assert train(Own(kind), precision=precision)[0] == ""


@pytest.mark.parametrize("kind", ["sum", "contrasts"])
def test_it_is_said_of_models_that_are_not_of_transformers_too(kind: str) -> None:
    assert "the loss of `Own` is not one mean" in train(Own(kind))[0]
    assert train(Own(kind), Overridden)[0] == ""


@pytest.mark.parametrize("kind", ["mean", "draws", "merges", "sum"])
def test_asking_leaves_nothing_behind(kind: str) -> None:
    asked, by_hand = Own(kind), Own(kind)
    weights = train(asked)[1]
    assert torch.equal(weights, train(by_hand, Overridden)[1])
    assert asked.forwards == by_hand.forwards
    assert all(part.training for part in asked.modules())


def say(rank: int) -> str:
    return train(Own("sum"))[0]


def test_of_several_processes_the_first_says_it_once() -> None:
    first, second = run_ranks(2, say)
    assert first.count("is not one mean") == 1
    assert second == ""


@needs_transformers
def test_an_evaluation_of_answers_outside_of_the_text_is_finite() -> None:
    config = transformers.BertConfig(
        vocab_size=30,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    model: Any = transformers.BertForQuestionAnswering(config)
    model.eval()
    words = torch.randint(1, 30, (6, 8))
    ends = torch.tensor([8, 8, 9, 3, 4, 8])  # the first batch has none inside
    rows = [
        {"input_ids": w, "start_positions": e, "end_positions": e}
        for w, e in zip(words, ends, strict=True)
    ]
    mean = Trainer(max_steps=1, callbacks=[]).evaluate(model, DataLoader(rows, batch_size=3))  # type: ignore[arg-type]
    whole = model(input_ids=words, start_positions=ends, end_positions=ends).loss
    assert mean["eval/loss"] == pytest.approx(whole.item(), rel=1e-5)


@needs_transformers
def test_the_page_has_the_table() -> None:
    text = Path(losses_page.PAGE).read_text("utf-8")
    assert re.search(r"transformers [\d.]+ has \d+ classes", text)
    assert "**Said before the first step:**" in text
