"""Small models of all kinds: rows of `FEATURES` numbers become scores of `CLASSES` classes."""

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from tests.right_programs.program import Program

__all__ = ["CLASSES", "FEATURES", "make_model"]

FEATURES, CLASSES = 12, 4


def make_model(program: Program) -> nn.Module:
    """Return the model of a program with its first weights."""
    torch.manual_seed(program.seed)
    model: nn.Module = _MAKE[program.model]()
    if program.loss == "the model's own":
        model = WithLoss(model)
    if program.loss == "learned":
        model = WithLearnedLoss(model)
    model = model.double() if program.double else model
    chance = random.Random(program.seed)
    for parameter in model.parameters():
        parameter.data = _laid_out(parameter.data, program.layout, chance)
    return model


def _laid_out(value: Tensor, layout: str, chance: random.Random) -> Tensor:
    """Return a tensor in another order in memory, where there is such an order."""
    if layout == "channels last" and value.ndim in (4, 5):
        kind: Any = torch.channels_last if value.ndim == 4 else torch.channels_last_3d
        return value.to(memory_format=kind)
    if layout == "turned" and value.ndim > 1:
        return value.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "permuted" and value.ndim > 1:
        order = chance.sample(range(value.ndim), value.ndim)
        back = [order.index(dim) for dim in range(value.ndim)]
        return value.permute(order).contiguous().permute(back)
    return value


def _dense(drops: float = 0.0) -> nn.Module:
    return nn.Sequential(
        nn.Linear(FEATURES, 6), nn.Tanh(), nn.Dropout(drops), nn.Linear(6, CLASSES)
    )


class Reshaped(nn.Module):
    """Layers that take another shape than rows."""

    def __init__(self, shape: tuple[int, ...], *layers: nn.Module) -> None:
        super().__init__()
        self.shape = shape
        self.layers = nn.Sequential(*layers)
        self.head = nn.LazyLinear(CLASSES)
        self(torch.zeros(2, FEATURES))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.layers(inputs.reshape(-1, *self.shape)).flatten(1))
        return outputs


class Attention(nn.Module):
    """Attention between the parts of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        parts = self.embed(inputs.reshape(-1, 3, 4))
        outputs: Tensor = self.head(self.attend(parts, parts, parts)[0].mean(1))
        return outputs


class Angles(nn.Module):
    """A loss with parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(CLASSES, CLASSES))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs @ self.centres, targets)


class WithLearnedLoss(nn.Module):
    """A model and its loss, which is called beside it."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.loss_fn = Angles()

    def forward(self, inputs: Tensor) -> Any:
        return self.body(inputs)


class Blocks(nn.Module):
    """Blocks of one class, one after the other."""

    def __init__(self, *norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, 6)
        self.blocks = nn.ModuleList([_block(*(make() for make in norm)) for _ in range(3)])
        self.head = nn.Linear(6, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.embed(inputs)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        outputs: Tensor = self.head(hidden)
        return outputs


def _block(*norm: nn.Module) -> nn.Module:
    rest = (nn.Linear(6, 6), nn.GELU(), nn.Dropout(0.2))
    return nn.Sequential(*(norm or (nn.LayerNorm(6),)), *rest)


def _of_batches() -> nn.Module:
    """Return batch norm that also works on a batch of one row."""
    return nn.Sequential(nn.Unflatten(1, (2, 3)), nn.BatchNorm1d(2), nn.Flatten(1))


class Embedded(nn.Module):
    """A mean over embeddings."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5, sparse=sparse)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = inputs.mul(2).long().abs().clamp(max=6)
        outputs: Tensor = self.head(self.embed(tokens).mean(1))
        return outputs


class Recurrent(nn.Module):
    """A recurrent layer over the parts of a row."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.layer = kind(3, 5, batch_first=True)
        self.head = nn.Linear(5, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.layer(inputs.reshape(-1, 4, 3))[0][:, -1])
        return outputs


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, CLASSES)
        self.second = nn.Linear(CLASSES, CLASSES)
        self.third = nn.Linear(CLASSES, CLASSES)
        self.third.weight = self.second.weight

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.third(self.second(self.first(inputs)).tanh())
        return outputs


class PartFrozen(nn.Module):
    """A first layer that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(FEATURES, 6).requires_grad_(False)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.base(inputs).tanh())
        return outputs


class UnusedHead(nn.Module):
    """A second head that no loss looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, 6)
        self.head = nn.Linear(6, CLASSES)
        self.unused = nn.Linear(6, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.body(inputs).tanh())
        return outputs


class SeveralOutputs(nn.Module):
    """Two heads; the loss uses both, or that of another name not."""

    def __init__(self, other: str = "other") -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, 6)
        self.heads = nn.ModuleDict({"main": nn.Linear(6, CLASSES), other: nn.Linear(6, CLASSES)})

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        hidden = self.body(inputs).tanh()
        return {name: head(hidden) for name, head in self.heads.items()}


class Counting(nn.Module):
    """Buffers that count calls and keep a mean, and a parameter without dimensions."""

    mean: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("mean", torch.zeros(FEATURES))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.mean = self.mean.lerp(inputs.detach().mean(0).to(self.mean.dtype), 0.1)
        outputs: Tensor = self.head((inputs - self.mean) * self.scale)
        return outputs


class WithLoss(nn.Module):
    """A model that computes its own loss, as those for mappings do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.model(inputs)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


_MAKE: dict[str, Callable[[], Any]] = {
    "dense": _dense,
    "dropout": lambda: _dense(0.3),
    "normalised": lambda: nn.Sequential(
        nn.Linear(FEATURES, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, CLASSES)
    ),
    "blocks": Blocks,
    "batch norm blocks": lambda: Blocks(_of_batches),
    "tied": Tied,
    "part frozen": PartFrozen,
    "reparametrised": lambda: nn.Sequential(
        weight_norm(nn.Linear(FEATURES, 6)), nn.Tanh(), nn.Linear(6, CLASSES)
    ),
    "convolution": lambda: Reshaped(
        (3, 4), nn.Conv1d(3, 4, 2), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 4, 2)
    ),
    "images": lambda: Reshaped(
        (1, 3, 4), nn.Conv2d(1, 4, 2), nn.BatchNorm2d(4, momentum=None), nn.ReLU()
    ),
    "volumes": lambda: Reshaped(
        (1, 3, 2, 2), nn.Conv3d(1, 4, (2, 1, 2)), nn.BatchNorm3d(4), nn.ReLU()
    ),
    "turned convolution": lambda: Reshaped(
        (3, 2, 2), nn.ConvTranspose2d(3, 4, 2), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 2, groups=2)
    ),
    "attention": Attention,
    "embedding": Embedded,
    "sparse embedding": lambda: Embedded(sparse=True),
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "unused head": UnusedHead,
    "several outputs": SeveralOutputs,
    "unused output": lambda: SeveralOutputs("unused"),
    "counting": Counting,
}
