"""What a forward changes in buffers, it changes once, also where activations are computed again."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import spectral_norm as older_spectral_norm
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.ranks import in_turn, run_ranks
from tests.helpers.tiers import with_few
from tests.strategies.toys import STRATEGIES
from trainkit import Trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP gains nothing"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor"),
    pytest.mark.filterwarnings("ignore:`torch.nn.utils.spectral_norm` is now deprecated"),
]


class Codebook(nn.Module):
    """Scales by the nearest of some vectors, which follow what comes: a moving average."""

    vectors: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("vectors", torch.randn(5, 6))
        self.register_buffer("mask", torch.ones(6), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        nearest = torch.cdist(inputs, self.vectors).argmin(1)
        chosen = self.vectors[nearest] * self.mask
        if self.training:
            with torch.no_grad():
                moved = self.vectors.index_copy(0, nearest, inputs)
                self.vectors = self.vectors.lerp(moved, 0.3)  # another tensor each time
        return inputs * chosen


class Scaled(nn.Module):
    """A block with a buffer of its own, which it changes in place."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.scale.mul_(0.9)
        return torch.tanh(self.layer(inputs) + self.scale)


def block(kind: str) -> nn.Module:
    layer = nn.Linear(6, 6)
    if kind == "scaled":
        return Scaled()
    middle: dict[str, Any] = {
        "batch": lambda: [layer, nn.BatchNorm1d(6)],
        "average": lambda: [layer, nn.BatchNorm1d(6, momentum=None)],
        "instance": lambda: [
            layer,
            nn.Unflatten(1, (2, 3)),
            nn.InstanceNorm1d(2, track_running_stats=True),
            nn.Flatten(),
        ],
        "spectral": lambda: [spectral_norm(layer)],
        "older spectral": lambda: [older_spectral_norm(layer)],
        "codebook": lambda: [layer, Codebook()],
    }
    return nn.Sequential(*middle[kind](), nn.Dropout(0.2), nn.Tanh())


KINDS = ["batch", "average", "instance", "spectral", "older spectral", "codebook", "scaled"]


class Blocks(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block(kind) for _ in range(3))
        self.layers.append(self.layers[0])  # one is called twice
        self.head = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs)
        result: Tensor = self.head(inputs)
        return result


def state_after(rank: int, strategy: str, kind: str, wanted: bool) -> Any:
    torch.manual_seed(0)
    model: Any = Blocks(kind)
    hooks = [len(part._forward_pre_hooks) for part in model.modules()]
    data = TensorDataset(torch.randn(48, 6), torch.randint(0, 3, (48,)))
    trainer = Trainer(
        max_steps=3,
        strategy=STRATEGIES[strategy](),
        gradient_checkpointing=wanted,
        gradient_accumulation_steps=2,
        callbacks=[],
    )
    trainer.fit(
        model, DataLoader(data, 4), optimizer=partial(SGD, lr=0.1), loss_fn=nn.CrossEntropyLoss()
    )
    values = {n: getattr(v, "full_tensor", lambda v=v: v)() for n, v in model.state_dict().items()}
    assert hooks == [len(part._forward_pre_hooks) for part in model.modules()] or strategy == "fsdp"
    trainer.close()
    return {name: value.detach().clone() for name, value in values.items()}


CASES = [("single", kind) for kind in KINDS] + [
    (strategy, kind) for strategy in ("ddp", "fsdp") for kind in ("batch", "spectral", "codebook")
]
FEW = [("single", kind) for kind in KINDS]


@pytest.mark.parametrize(("strategy", "kind"), with_few(FEW, CASES))
def test_weights_and_buffers_are_those_of_kept_activations(strategy: str, kind: str) -> None:
    if strategy == "single":
        kept, again = (state_after(0, strategy, kind, wanted) for wanted in (False, True))
    else:
        cases = [(strategy, kind, wanted) for wanted in (False, True)]
        kept, again = run_ranks(2, in_turn, state_after, cases)[0]
    assert [name for name in kept if not kept[name].equal(again[name])] == []


def test_models_that_do_it_by_their_own_method_count_once_too() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Wav2Vec2ConformerConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        conv_dim=[8],
        conv_kernel=[10],
        conv_stride=[5],
        num_feat_extract_layers=1,
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        classifier_proj_size=4,
        mask_time_prob=0.0,
        layerdrop=0.0,
    )
    torch.manual_seed(0)
    sounds = [{"input_values": torch.randn(200), "labels": torch.tensor(n % 2)} for n in range(8)]
    found = []
    for wanted in (False, True):
        torch.manual_seed(0)
        model = transformers.Wav2Vec2ConformerForSequenceClassification(config)
        trainer = Trainer(max_steps=2, gradient_checkpointing=wanted, callbacks=[])
        loader: Any = DataLoader(sounds, 4)  # type: ignore[arg-type]
        trainer.fit(model, loader, optimizer=partial(SGD, lr=0.1))
        found.append(model.state_dict())
    kept, again = found
    assert any("running_mean" in name for name in kept)
    assert [name for name in kept if not kept[name].equal(again[name])] == []
