"""Activations are computed again in backward under every strategy, with the same gradients."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from typing_extensions import override

from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import with_few
from tests.helpers.toys import fit
from tests.strategies.toys import MODELS, STRATEGIES, data_of
from trainkit import ConfigError, StepOutput, Trainer
from trainkit.strategies.activation_checkpointing import checkpoint_activations
from trainkit.watch.hints import hint_for

pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP gains nothing"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor"),
]


class Blocks(nn.Module):
    """Blocks with dropout, which counts how often they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.Tanh()) for _ in range(3)
        )
        self.head = nn.Linear(6, 3)
        self.calls = 0
        self.layers[1].register_forward_pre_hook(self._count)
        next(self.layers[1].children()).register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.calls += 1

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        result: Tensor = self.head(inputs)
        return result


WAYS = (False, True, "selective", "offload")


def after_each(rank: int, strategy: str, model: str) -> dict[Any, Any]:
    return {wanted: weights_after(rank, strategy, model, wanted) for wanted in WAYS}


def weights_after(rank: int, strategy: str, model: str, wanted: Any) -> tuple[Any, int, bool]:
    torch.manual_seed(0)
    module: Any = Blocks() if model == "blocks" else MODELS[model]()
    data = data_of("mlp" if model == "blocks" else model, torch.float32)
    trainer = Trainer(
        max_steps=3,
        strategy=STRATEGIES[strategy](),
        gradient_checkpointing=wanted,
        gradient_accumulation_steps=2,
        callbacks=[],
    )
    fit(
        trainer,
        DataLoader(data, 4),
        module,
        loss_fn=nn.CrossEntropyLoss() if model == "blocks" else None,
    )
    whole = {n: getattr(p, "full_tensor", lambda p=p: p)() for n, p in module.named_parameters()}
    left = any("forward" in vars(part) for part in module.modules())
    left |= getattr(module, "is_activation_checkpointing", False)
    calls = getattr(module, "calls", 0)
    trainer.close()
    return {name: tensor.detach() for name, tensor in whole.items()}, calls, left


CASES = [
    (strategy, model) for strategy in ("single", "ddp", "fsdp") for model in ("blocks", "gpt2")
]


@pytest.mark.parametrize(("strategy", "model"), with_few([("single", "blocks")], CASES))
def test_the_weights_are_those_of_kept_activations(strategy: str, model: str) -> None:
    if strategy == "single":
        found = after_each(0, strategy, model)
    else:
        found = run_ranks(2, after_each, strategy, model)[0]
    kept, plain_calls, _ = found.pop(False)
    for again, calls, left in found.values():
        if model == "blocks":
            assert all(kept[name].equal(again[name]) for name in kept)
            assert calls > plain_calls  # or nothing would have been computed again
        for name in kept:  # gradients of the tied embedding are added up in another order
            torch.testing.assert_close(again[name], kept[name], rtol=1e-5, atol=1e-7)
        assert not left  # the model is handed back as it was


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts products of matrices with a bias, which no backward makes."""

    number = 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


def test_what_is_dear_is_computed_again_only_where_that_was_asked_for() -> None:
    def products(wanted: Any) -> int:
        counted = Products()  # type: ignore[no-untyped-call]
        with counted:
            weights_after(0, "single", "blocks", wanted)
        return counted.number

    kept, again, selective, offload = map(products, WAYS)
    assert kept == selective < again == offload


class Terms(Trainer):
    """Has two terms, each with a weight, which in a longer window takes two backwards."""

    @override
    def training_step(self, model: nn.Module, batch: Any) -> Any:
        outputs = model(batch[0])
        one, two = torch.tensor(1.0), torch.tensor(2.0)
        return {"a": StepOutput(outputs.sum(), one), "b": StepOutput(outputs.mean(), two)}


def test_what_cannot_work_is_refused() -> None:
    def fit(model: nn.Module, wanted: Any) -> None:
        loader = DataLoader(data_of("mlp", torch.float32), 4)
        trainer = Trainer(max_steps=1, gradient_checkpointing=wanted, callbacks=[])
        optimizer = partial(SGD, lr=0.1)
        trainer.fit(model, loader, optimizer=optimizer, loss_fn=nn.CrossEntropyLoss())

    with pytest.raises(ConfigError, match="it has no blocks"):
        fit(nn.Linear(6, 3), True)
    with pytest.raises(ConfigError, match='`gradient_checkpointing` must be True, False, "sel'):
        fit(Blocks(), "layers.0")
    with pytest.raises(ConfigError, match="given was 'some'"):
        checkpoint_activations(Blocks(), [nn.Linear(2, 2)], "some")
    trainer = Terms(
        max_steps=1,
        gradient_checkpointing="selective",
        gradient_accumulation_steps=2,
        callbacks=[],
    )
    loader = DataLoader(data_of("mlp", torch.float32), 4)
    with pytest.raises(RuntimeError) as caught:
        trainer.fit(Blocks(), loader, optimizer=partial(SGD, lr=0.1))
    assert "gradient_checkpointing=True" in hint_for("RuntimeError", str(caught.value))
