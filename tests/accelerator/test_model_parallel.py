"""`Accelerator` trains models that come parallel as one process does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.helpers.ranks import run_ranks
from tests.strategies.test_model_parallel import data, net, plain, sharded, tensor
from tests.strategies.toys import full
from trainkit import Accelerator, ConfigError, load_checkpoint_in_model
from trainkit.strategies import DDP, FSDP, ModelParallel, Strategy

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
Make = Callable[[nn.Module, tuple[int, int]], nn.Module]
WIDE = torch.float64


class Loop:
    """A loop of a user's own, on a model that is cut over `sizes` processes."""

    def __init__(self, make: Make, sizes: tuple[int, int]) -> None:
        strategy = None if make is plain else ModelParallel()
        self.accelerator = Accelerator(cpu=True, strategy=strategy, gradient_accumulation_steps=2)
        self.module = make(net(WIDE), sizes)
        optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-2)
        self.loader = DataLoader(data(WIDE, 48), batch_size=8 // sizes[0])
        made = self.accelerator.prepare(self.module, optimizer, self.loader)
        self.model, self.optimizer, self.loader = made
        self.figures: list[float] = []

    def backward(self, inputs: Tensor, labels: Tensor) -> None:
        loss = nn.functional.cross_entropy(self.model(inputs), labels)
        self.accelerator.backward(loss)
        self.figures.append(float(self.accelerator.reduce(loss.detach(), "mean")))

    def clip(self) -> None:
        parameters = self.model.parameters()
        self.figures.append(float(self.accelerator.clip_grad_norm_(parameters, 0.5)))

    def train(self, epochs: int) -> None:
        for _ in range(epochs):
            for inputs, labels in self.loader:
                with self.accelerator.accumulate(self.model):
                    self.backward(inputs, labels)
                    if self.accelerator.sync_gradients:
                        self.clip()
                    self.optimizer.step()
                    self.optimizer.zero_grad()

    def train_by_count(self) -> None:
        """Count windows without `accumulate`, and clip what there is after each backward."""
        for number, (inputs, labels) in enumerate(self.loader):
            self.backward(inputs, labels)
            self.clip()
            if number % 2:
                self.optimizer.step()
                self.optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        return {name: full(p) for name, p in self.module.named_parameters()}


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - value).abs().max()) for name, value in other.items())


def trained(rank: int, folder: Path, *ways: tuple[Make, tuple[int, int]]) -> list[Any]:
    found = []
    for number, way in enumerate(ways):
        place = folder / str(number)
        loop = Loop(*way)
        loop.train(1)
        loop.accelerator.save_state(place)
        loop.accelerator.save_model(loop.model, place / "model")
        read = net(WIDE)
        load_checkpoint_in_model(read, place / "model")
        assert apart(dict(read.named_parameters()), loop.weights()) == 0
        before = len(loop.figures)
        loop.train(1)
        again = Loop(*way)
        again.accelerator.load_state(place)
        again.train(1)
        assert again.figures == loop.figures[before:]
        assert apart(again.weights(), loop.weights()) == 0
        loop.train_by_count()
        rows = []
        for inputs, _ in loop.accelerator.prepare(DataLoader(data(WIDE, 43), batch_size=5)):
            rows += loop.accelerator.gather_for_metrics(loop.model(inputs).detach()).tolist()
        assert len(rows) == 43
        found.append((loop.figures, rows, loop.weights()))
    return found


def compare(size: int, folder: Path, *ways: tuple[Make, tuple[int, int]]) -> None:
    ((losses, rows, weights),) = run_ranks(1, trained, folder / "one", (plain, (1, 1)))[0]
    for of_rank in run_ranks(size, trained, folder / "all", *ways):
        for way, found in zip(ways, of_rank, strict=True):
            pairs = [(losses, found[0]), (rows, found[1])]
            most = max(float((torch.tensor(a) - torch.tensor(b)).abs().max()) for a, b in pairs)
            print(way, most, apart(weights, found[2]))
            assert max(most, apart(weights, found[2])) < 1e-12


def test_a_loop_on_two_processes_that_hold_a_model_together_trains_as_one(tmp_path: Path) -> None:
    compare(2, tmp_path, (tensor, (1, 2)))


@pytest.mark.e2e
def test_groups_of_such_processes_share_the_samples_of_a_loop(tmp_path: Path) -> None:
    compare(4, tmp_path, (tensor, (2, 2)), (sharded, (2, 2)))
    run_ranks(2, refused)


@pytest.mark.e2e
def test_gradients_that_a_loop_clears_inside_of_a_window_are_not_trained() -> None:
    run_ranks(2, dropped)


def kept(rank: int, strategy: Strategy | None, precision: str = "no") -> dict[str, Tensor]:
    """Train three micro-batches a window, of which the loop drops some; return the weights."""
    accelerator = Accelerator(
        cpu=True, strategy=strategy, gradient_accumulation_steps=3, mixed_precision=precision
    )
    module = net()
    if isinstance(strategy, ModelParallel):
        module = sharded(module, (2, 1))
    made = torch.optim.SGD(module.parameters(), lr=0.5)
    model, optimizer = accelerator.prepare(module, made)

    def backward(number: int) -> None:
        inputs, labels = data(torch.float32)[2 * number + 20 * rank : 2 * number + 20 * rank + 2]
        accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))

    for number in range(6):
        with accelerator.accumulate(model):
            backward(number)
            if number in (1, 3):
                model.zero_grad(set_to_none=number == 1)
            optimizer.step()
            optimizer.zero_grad()
    for number in range(6, 9):  # windows of the loop's own
        with accelerator.no_sync(model):
            backward(number)
        if number == 7:
            optimizer.zero_grad()
    backward(9)
    optimizer.step()
    return {name: full(p) for name, p in accelerator.unwrap_model(model).named_parameters()}


def dropped(rank: int) -> None:
    for precision, limit in (("no", 1e-6), ("bf16", 1e-3)):
        expected = kept(rank, None, precision)
        for strategy in (FSDP(), ModelParallel()):
            difference = apart(expected, kept(rank, strategy, precision))
            print(strategy.name, precision, difference)
            assert difference < limit, (strategy.name, precision, difference)


class OwnDDP(DDP):
    """A strategy of a user's own."""


def refused(rank: int) -> None:
    with pytest.raises(ConfigError, match="`OwnDDP` averages gradients where a window ends"):
        Accelerator(cpu=True, strategy=OwnDDP())
    with pytest.raises(ConfigError, match="are sharded already"):
        Accelerator(cpu=True).prepare(tensor(net(), (1, 2)))
    early = Accelerator(cpu=True, strategy=ModelParallel())
    early.prepare(DataLoader(data(WIDE), batch_size=4))
    with pytest.raises(ConfigError, match="Prepare it before the loaders"):
        early.prepare(tensor(net(), (1, 2)))
    with pytest.raises(ConfigError, match="no scale for parameters"):
        Accelerator(cpu=True, strategy=ModelParallel(), mixed_precision="fp16").prepare(
            tensor(net(), (1, 2))
        )
    loop = Loop(tensor, (1, 2))
    inputs, labels = data(WIDE)[:8]
    loop.backward(inputs, labels)
    with pytest.raises(ConfigError, match="drives one model in a loop of your own"):
        loop.accelerator.prepare(tensor(net(), (1, 2)))
    with pytest.raises(ConfigError, match='"model_parallel"` clips by the L2 norm'):
        loop.accelerator.clip_grad_norm_(loop.model.parameters(), 1.0, norm_type=1)
    with pytest.raises(ConfigError, match=r"step\(closure\)` uses gradients that are not"):
        loop.optimizer.step(lambda: 0.0)
    loop.accelerator.free_memory()
    loop.accelerator.prepare(tensor(net(), (1, 2)))
