"""The order in which tensors lie in memory is part of what a checkpoint keeps (rule 30)."""

import gc
import shutil
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW
from torch.utils.data import DataLoader, TensorDataset

from trainkit import Accelerator, CheckpointError, Run, Trainer
from trainkit.basics.device import memory_of
from trainkit.callbacks import EMA, Checkpoint
from trainkit.checkpoint import CheckpointStore
from trainkit.checkpoint.exact import load_optimizer
from trainkit.containers.tree import map_leaves

FUSED: dict[str, Any] = {
    "Adam": partial(Adam, lr=0.01, fused=True, amsgrad=True),
    "AdamW": partial(AdamW, lr=0.01, fused=True),
    "SGD": partial(SGD, lr=0.01, momentum=0.9, fused=True),
    "Adagrad": partial(Adagrad, lr=0.01, fused=True),
}
CHANNELS_LAST: Any = {"memory_format": torch.channels_last}


class Model(nn.Module):
    """A convolution in channels_last, a transposed weight, a buffer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3).to(**CHANNELS_LAST)
        self.weight = nn.Parameter(torch.randn(5, 64).t())
        self.register_buffer("turned", torch.randn(5, 3).t())
        self.register_buffer("count", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.conv(inputs)
        return hidden.relu().flatten(1) @ self.weight


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(16, 3, 6, 6, generator=generator), torch.arange(16) % 5
    return DataLoader(TensorDataset(inputs, targets), 2)


def fit(
    folder: Path, optimizer: Any, steps: int, *, background: bool = False, model: Any = Model
) -> tuple[Run, EMA]:
    ema = EMA()
    trainer = Trainer(
        max_epochs=1,
        precision="fp32",
        callbacks=[ema, Checkpoint(every_n_steps=2, background=background, keep_last=None)],
        output_dir=folder,
    )
    module = model()
    later = folder / "checkpoints"
    for path in later.glob("step-*"):
        if int(path.name.removeprefix("step-")) > steps:
            shutil.rmtree(path)
    trainer.fit(module, data(), optimizer=optimizer, resume="auto", loss_fn=nn.CrossEntropyLoss())
    assert trainer.run is not None
    return trainer.run, ema


def state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = dict(module.state_dict())
    for index, values in enumerate(optimizer.state.values()):
        found |= {f"{index}.{key}": v for key, v in values.items() if isinstance(v, Tensor)}
    return found


def assert_same_state(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype, name
        assert one[name].stride() == other[name].stride(), name
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize("name", FUSED)
def test_a_fused_optimizer_goes_on_with_the_same_numbers(
    name: str, background: bool, tmp_path: Path
) -> None:
    whole, average = fit(tmp_path, FUSED[name], 0, background=background)
    resumed, again = fit(tmp_path, FUSED[name], 4, background=background)
    assert resumed.checkpoints.resumed_from == 4
    assert_same_state(
        state(resumed.module, resumed.optimizer), state(whole.module, whole.optimizer)
    )
    for one, other in zip(average._average, again._average, strict=True):
        assert one.stride() == other.stride()
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", FUSED)
def test_a_loop_of_ones_own_goes_on_with_the_same_numbers(name: str, tmp_path: Path) -> None:
    """Saved inside a window, with the gradients of its first micro-batch."""

    def train(stop: int | None, resume: bool) -> dict[str, Tensor]:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = Model()
        optimizer, loader = FUSED[name](model.parameters()), data()
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        batches = loader
        if resume:
            accelerator.load_state(tmp_path / "state")
            batches = accelerator.skip_first_batches(loader, 5)
        for done, (inputs, targets) in enumerate(batches, 6 if resume else 1):
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if done == stop:
                accelerator.save_state(tmp_path / "state")
        return state(accelerator.unwrap_model(model), optimizer.optimizer)

    whole = train(5, False)
    assert_same_state(train(None, True), whole)


def test_a_model_that_lies_otherwise_is_refused_with_the_line_to_write(tmp_path: Path) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.conv = nn.Conv2d(3, 4, 3)
            self.single = nn.Conv2d(4, 4, 1)
            self.linear = nn.Linear(64, 5)

        def forward(self, inputs: Tensor) -> Tensor:
            hidden: Tensor = self.single(self.conv(inputs))
            return nn.functional.linear(hidden.flatten(1), self.linear.weight, self.linear.bias)

    def turned() -> nn.Module:
        model = Plain()
        model.linear.weight = nn.Parameter(model.linear.weight.detach().t().contiguous().t())
        return model

    optimizer = FUSED["AdamW"]
    fit(tmp_path / "cl", optimizer, 0, model=lambda: Plain().to(**CHANNELS_LAST))
    line = r"`conv.weight` with the strides \[27, 1, 9, 3\] in the checkpoint.*memory_format="
    with pytest.raises(CheckpointError, match=line):
        fit(tmp_path / "cl", optimizer, 4, model=Plain)
    fit(tmp_path / "cl", optimizer, 4, model=lambda: Plain().to(**CHANNELS_LAST))
    fit(tmp_path / "turned", optimizer, 0, model=turned)
    line = r'p = model\.get_parameter\("linear\.weight"\); p\.data = torch\.empty_strided\('
    with pytest.raises(CheckpointError, match=line + r"\(5, 64\), \(1, 5\)\)\.copy_\(p\)`"):
        fit(tmp_path / "turned", optimizer, 4, model=Plain)
    fit(tmp_path / "plain", optimizer, 0, model=Plain)
    with pytest.raises(CheckpointError, match=r"row by row in the checkpoint.*\.contiguous\(\)`"):
        fit(tmp_path / "plain", optimizer, 4, model=turned)


def as_older(path: Path, directory: Path) -> Path:
    """Return a checkpoint as it was written before strides were kept."""
    checkpoint = CheckpointStore(path.parent).open(path)
    parts = {name: map_leaves(checkpoint.read(name), _row_major) for name in checkpoint.names()}
    manifest = checkpoint.manifest
    facts = {k: v for k, v in manifest.metadata.get("fingerprint", {}).items() if k != "layouts"}
    metadata = {**manifest.metadata, "fingerprint": facts, "run_id": manifest.run_id}
    store = CheckpointStore(directory)
    found = store.save(checkpoint.step, parts, metadata=metadata)
    assert store.open(found).manifest.format_version == 1
    return found


def _row_major(leaf: Any) -> Any:
    return leaf.contiguous() if isinstance(leaf, Tensor) else leaf


@pytest.mark.parametrize("name", FUSED)
def test_an_older_checkpoint_goes_on_with_the_same_numbers(name: str, tmp_path: Path) -> None:
    whole, _ = fit(tmp_path / "run", FUSED[name], 0)
    older = tmp_path / "older" / "checkpoints"
    as_older(tmp_path / "run" / "checkpoints" / "step-00000004", older)
    resumed, _ = fit(tmp_path / "older", FUSED[name], 4)
    assert resumed.checkpoints.resumed_from == 4
    assert_same_state(
        state(resumed.module, resumed.optimizer), state(whole.module, whole.optimizer)
    )


class Mastered(torch.optim.Optimizer):
    """Keeps a copy of each parameter in fp32, a count in int64, a label and a history."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": torch.tensor(0.1)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            values = self.state[p]
            if not values:
                values |= {"master": p.float(), "count": torch.zeros((), dtype=torch.int64)}
                values |= {"label": "master", "history": [], "rows": torch.zeros(p.shape)}
            values["master"] -= self.param_groups[0]["lr"] * 0.01 * p.float()
            values["count"] += 1
            values["history"].append(values["master"].norm())
            p.copy_(values["master"])


def test_state_of_another_dtype_or_layout_than_its_parameter_keeps_it() -> None:
    def made() -> tuple[nn.Parameter, Mastered]:
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(3, 4, dtype=torch.bfloat16).t())
        return weight, Mastered([weight])

    weight, optimizer = made()
    optimizer.step()
    saved, was = deepcopy(optimizer.state_dict()), weight.detach().clone()
    optimizer.step()
    other, again = made()
    with torch.no_grad():
        other.copy_(was)
    load_optimizer(again, saved, [was])
    again.step()
    assert torch.equal(other, weight)
    one, two = optimizer.state[weight], again.state[other]
    for key in ("master", "count", "rows"):
        assert (two[key].dtype, two[key].stride()) == (one[key].dtype, one[key].stride())
        assert torch.equal(two[key], one[key])
    assert (two["label"], two["history"]) == (one["label"], one["history"])


def test_state_follows_a_parameter_that_lies_otherwise_or_has_another_dtype() -> None:
    weight = nn.Parameter(torch.randn(3, 4).t())
    optimizer = FUSED["AdamW"]([weight])
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    other = nn.Parameter(weight.detach().double().contiguous())
    again = FUSED["AdamW"]([other])
    load_optimizer(again, optimizer.state_dict(), [weight.detach()])
    average = again.state[other]["exp_avg"]
    assert (average.dtype, average.stride()) == (torch.float64, other.stride())
    assert torch.equal(average.float(), optimizer.state[weight]["exp_avg"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 1, 5)])
def test_the_memory_of_a_tensor_outlives_it(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.rand(shape) * 9).to(dtype)
    expected = tensor.reshape(-1).view(torch.uint8).tolist()
    memory = memory_of(tensor)
    assert (memory.format, memory.ndim, len(memory)) == ("B", 1, tensor.nbytes)
    del tensor
    gc.collect()
    torch.full((64,), 7.0)  # would take its place
    assert memory.tolist() == expected


def test_the_memory_of_a_tensor_is_its_own() -> None:
    tensor = torch.zeros(4)
    memory_of(tensor)[:] = memory_of(torch.ones(4))
    assert tensor.tolist() == [1.0] * 4
