"""Small models, their data, and one run of them that returns what it came to."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.utils.data import DataLoader, Dataset, TensorDataset
from typing_extensions import override

from tests.helpers.needs import HAS_TRANSFORMERS
from trainkit import Callback, Run, StepOutput, Trainer
from trainkit.strategies import DDP, FSDP, SingleDevice, Strategy

STRATEGIES: dict[str, Callable[..., Strategy]] = {"single": SingleDevice, "ddp": DDP, "fsdp": FSDP}
WORDS, LENGTH, SAMPLES = 37, 8, 48


class Figures(Callback):
    """Keeps the figures of each log."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []

    @override
    def on_log(self, run: Run, values: dict[str, float]) -> None:
        if "loss" in values:
            self.losses.append(values["loss"])
        if "grad_norm" in values:
            self.norms.append(values["grad_norm"])


class Texts(Dataset[dict[str, Tensor]]):
    """Rows of words with labels, some of which count for nothing."""

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(7)
        self.words = torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=generator)
        ignored = torch.rand(SAMPLES, LENGTH, generator=generator) < 0.4
        self.labels = self.words.masked_fill(ignored, -100)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.words[index], "labels": self.labels[index]}


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 12), nn.GELU(), nn.Linear(12, 3)
    )


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return _eager(GPT2LMHeadModel(config))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=20,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return _eager(BertForMaskedLM(config))


def _eager(model: Any) -> nn.Module:
    model.set_attn_implementation("eager")
    return model  # type: ignore[no-any-return]


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": mlp}
if HAS_TRANSFORMERS:
    MODELS |= {"gpt2": gpt2, "bert": bert}


def data_of(name: str, dtype: torch.dtype) -> Dataset[Any]:
    """Return the data set of a model."""
    if name != "mlp":
        return Texts(dtype)
    generator = torch.Generator().manual_seed(7)
    features = torch.randn(SAMPLES, 6, generator=generator).to(dtype)
    return TensorDataset(features, torch.randint(0, 3, (SAMPLES,), generator=generator))


class LanguageTrainer(Trainer):
    """Computes the loss of causal models in their own dtype: transformers does so in fp32."""

    @override
    def training_step(self, model: nn.Module, batch: Any) -> Any:
        if not isinstance(batch, dict) or "GPT2" not in type(self.strategy.unwrap(model)).__name__:
            return super().training_step(model, batch)
        logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return StepOutput(loss, (labels != -100).sum())

    @override
    def evaluation_step(self, model: nn.Module, batch: Any) -> Any:
        if not isinstance(batch, dict) or "GPT2" not in type(self.strategy.unwrap(model)).__name__:
            return super().evaluation_step(model, batch)
        output = self.training_step(model, batch)
        return {"loss": output.loss, "weight": output.weight}


@dataclass
class Case:
    """One training.

    Attributes:
        batch: Samples of a window, all processes together.
    """

    strategy: str
    model: str = "mlp"
    dtype: torch.dtype = torch.float64
    steps: int = 12
    batch: int = 12
    accumulation: int = 1
    precision: Any = "fp32"
    max_grad_norm: float | None = 0.5
    options: dict[str, Any] = field(default_factory=dict)
    fused: bool = False


@dataclass
class Outcome:
    losses: list[float]
    norms: list[float]
    figures: dict[str, float]
    weights: dict[str, Tensor]


def full(tensor: Tensor) -> Tensor:
    """Return the whole of a tensor, sharded or not, as a copy."""
    if isinstance(tensor, DTensor):  # an offloaded shard is not where its group is
        moved: Any = tensor.to(tensor.device_mesh.device_type)
        tensor = moved.full_tensor()
    return tensor.detach().clone()


def train(rank: int, size: int, cases: list[Case]) -> list[Outcome]:
    """Run cases one after the other on this process."""
    return [_train(size, case) for case in cases]


def _train(size: int, case: Case) -> Outcome:
    torch.manual_seed(3)
    model = MODELS[case.model]().to(case.dtype)
    figures = Figures()
    trainer = LanguageTrainer(
        max_steps=case.steps,
        strategy=STRATEGIES[case.strategy](**case.options),
        precision=case.precision,
        gradient_accumulation_steps=case.accumulation,
        max_grad_norm=case.max_grad_norm,
        callbacks=[figures],
        log_every_n_steps=1,
    )
    data = data_of(case.model, case.dtype)
    micro_batch = case.batch // size // case.accumulation
    trainer.fit(
        model,
        DataLoader(data, batch_size=micro_batch, shuffle=True),
        optimizer=partial(AdamW, lr=1e-2, fused=case.fused),
        loss_fn=nn.functional.cross_entropy if case.model == "mlp" else None,
    )
    metrics = ["accuracy"] if case.model == "mlp" else None
    evaluated = trainer.evaluate(model, DataLoader(data, batch_size=5), metrics=metrics)
    weights = {name: full(p) for name, p in model.named_parameters()}
    return Outcome(figures.losses, figures.norms, evaluated, weights)
