"""A module may keep something else than tensors in its state: it is saved and comes back."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import PerChannelMinMaxObserver
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR, StepLR
from torch.utils.data import DataLoader

from tests.helpers.callbacks import StopsAt
from tests.helpers.needs import late
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import with_few
from tests.helpers.toys import FEATURES, toy_dataset
from trainkit import Accelerator, Callback, CheckpointError, Run, Trainer
from trainkit.callbacks import EMA, Checkpoint
from trainkit.cli.main import main
from trainkit.export import load_checkpoint_in_model
from trainkit.strategies import FSDP

torchmetrics = late("torchmetrics")


class Extra(nn.Module):
    """Counts its calls in a state that is no tensor; `kind` is the form of it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.calls = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += self.training
        return inputs

    def get_extra_state(self) -> Any:
        calls = self.calls
        forms: dict[str, Any] = {
            "dict": {"calls": calls, "tensor": torch.tensor(calls), ("a", 1): None},
            "number": calls,
            "none": None,
            "list": [torch.full((i,), calls) for i in range(calls % 3)],
            "tensor": torch.zeros(calls % 4),
        }
        return forms[self.kind]

    def set_extra_state(self, state: Any) -> None:
        if self.kind == "dict":
            assert state["tensor"] == state["calls"]
            assert ("a", 1) in state
        self.calls = state["calls"] if self.kind == "dict" else self.calls


KINDS = ("dict", "number", "none", "list", "tensor")


class Model(nn.Module):
    """A linear layer, extra states of all kinds, and a metric that keeps all it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.ModuleList([Extra(kind) for kind in KINDS])
        self.seen = torchmetrics.CatMetric()
        self.seen.persistent(True)
        self.linear = nn.Linear(FEATURES, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        for extra in self.extra:
            inputs = extra(inputs)
        outputs: Tensor = self.linear(inputs)
        if self.training:
            self.seen.update(outputs.detach().sum())
        return outputs

    @property
    def kept(self) -> list[float]:
        """What the metric has seen."""
        return [float(value) for value in self.seen.value]


def make_model() -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Model()


def train(
    folder: Path,
    strategy: str = "single",
    *,
    stop_at: int | None = None,
    background: bool = False,
    resume: str | None = None,
) -> tuple[Trainer, Model]:
    strategies: dict[str, Any] = {"fsdp": lambda: FSDP(device="cpu")}
    model = make_model()
    trainer = Trainer(
        max_steps=6,
        strategy=strategies.get(strategy, lambda: strategy)(),
        output_dir=folder,
        callbacks=[
            EMA(0.5),
            Checkpoint(every_n_steps=2, keep_last=None, background=background),
            StopsAt(stop_at),
        ],
    )
    loader = DataLoader(toy_dataset(), batch_size=4)
    trainer.fit(
        model,
        loader,
        optimizer=partial(SGD, lr=0.1, momentum=0.9),
        loss_fn=nn.CrossEntropyLoss(),
        resume=resume,
    )
    return trainer, model


def facts(model: Model) -> tuple[Any, ...]:
    weight: Any = model.linear.weight.detach()
    local = weight.to_local() if hasattr(weight, "to_local") else weight
    return local.tolist(), model.kept, model.extra[0].calls


def is_the_same_run(rank: int, folder: Path, strategy: str, background: bool) -> bool:
    trainer, model = train(folder / "whole", strategy)
    options: dict[str, Any] = {"background": background}
    trainer.close()
    trainer, _ = train(folder / "cut", strategy, stop_at=3, **options)
    trainer.close()
    trainer, resumed = train(folder / "cut", strategy, resume="must", **options)
    trainer.close()
    (weights, kept, calls), expected = facts(resumed), facts(model)
    assert len(expected[1]) == 6
    # What differs by process is saved from process 0.
    return bool(weights == expected[0]) and (rank > 0 or (kept, calls) == expected[1:])


@pytest.mark.parametrize("background", [False, True])
def test_what_is_no_tensor_in_a_module_comes_back(background: bool, tmp_path: Path) -> None:
    assert is_the_same_run(0, tmp_path, "single", background)


@pytest.mark.parametrize("strategy", with_few(["fsdp"], ["ddp", "fsdp"]))
def test_it_comes_back_on_two_processes(strategy: str, tmp_path: Path) -> None:
    assert run_ranks(2, is_the_same_run, tmp_path, strategy, False) == [True, True]


def test_a_parameter_of_another_shape_is_still_refused(tmp_path: Path) -> None:
    train(tmp_path)
    model = make_model()
    model.linear = nn.Linear(FEATURES, 3)
    trainer = Trainer(max_steps=6, output_dir=tmp_path, callbacks=[Checkpoint(), EMA(0.5)])
    with pytest.raises(CheckpointError, match=r"linear.weight` \[2, 4\] in the checkpoint"):
        trainer.fit(
            model,
            DataLoader(toy_dataset(), batch_size=4),
            optimizer=partial(SGD, lr=0.1, momentum=0.9),
            loss_fn=nn.CrossEntropyLoss(),
            resume="must",
        )


def own_loop(rank: int, folder: Path, sharded: bool) -> bool:
    strategy = FSDP(device="cpu") if sharded else None
    accelerator = Accelerator(strategy=strategy, cpu=strategy is None)
    model = make_model()
    optimizer: Any = SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    module: Any = accelerator.unwrap_model(model)

    def step() -> None:
        model(torch.ones(2, FEATURES)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    accelerator.save_state(folder / "state")
    before = facts(module)
    step()
    step()
    accelerator.load_state(folder / "state")
    assert facts(module) == before
    fresh: Any = make_model()
    if not sharded:
        with pytest.warns(UserWarning, match="_extra_state") as told:
            load_checkpoint_in_model(fresh, next((folder / "state").glob("step-*")))
        assert len(told) == 2
        assert facts(fresh)[0] == before[0]
    return True


def test_a_loop_of_ones_own_saves_it_too(tmp_path: Path) -> None:
    assert own_loop(0, tmp_path, False)


@pytest.mark.e2e
@pytest.mark.parametrize("sharded", [False, True])
def test_a_loop_on_two_processes_saves_it_too(sharded: bool, tmp_path: Path) -> None:
    assert run_ranks(2, own_loop, tmp_path, sharded) == [True, True]


def test_exports_leave_it_out_and_say_so(tmp_path: Path) -> None:
    trainer, model = train(tmp_path / "run")
    with pytest.warns(UserWarning, match=r"`extra.0._extra_state`.*no tensors.*not written"):
        trainer.save_model(tmp_path / "export")
    fresh = make_model()
    with pytest.warns(UserWarning, match=r"no place for:\n  - `extra.4._extra_state`"):
        load_checkpoint_in_model(fresh, tmp_path / "export")
    assert torch.equal(fresh.linear.weight, model.linear.weight)


def test_the_command_shows_compares_and_exports_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer, model = train(tmp_path)
    assert trainer.run is not None
    new = str(trainer.run.checkpoint)
    old = str(sorted(Path(new).parent.glob("step-*"))[0])
    assert main(["checkpoint", "ls", str(tmp_path)]) == 0
    assert main(["checkpoint", "show", new]) == 0
    assert "extra.1._extra_state" in capsys.readouterr().out
    assert main(["checkpoint", "diff", old, new]) == 1
    assert "extra.1._extra_state" in capsys.readouterr().out
    with pytest.warns(UserWarning, match=r"`extra.0._extra_state`.*not written"):
        assert main(["checkpoint", "export", new, str(tmp_path / "export"), "--part", "model"]) == 0
    fresh = make_model()
    with pytest.warns(UserWarning, match=r"no place for:\n  - `extra.4._extra_state`"):
        load_checkpoint_in_model(fresh, tmp_path / "export")
    assert torch.equal(fresh.linear.weight, model.linear.weight)


class Late(nn.Linear):
    """Makes a buffer in its first forward, gives others their size, and is trainable later."""

    scale: Tensor | None

    def __init__(self) -> None:
        super().__init__(FEATURES, 2)
        self.register_buffer("scale", None)
        self.observer = PerChannelMinMaxObserver(ch_axis=1)  # as quantization-aware training has
        self.late = nn.Parameter(torch.zeros(2), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        self.observer(inputs)
        if self.scale is None:
            self.scale = inputs.detach().abs().mean()
        return super().forward(inputs / self.scale) + self.late


class Unfreeze(Callback):
    """Lets the optimizer train what it did not have, as gradual unfreezing does."""

    def on_step_end(self, run: Run, result: Any) -> None:
        if run.state.step == 2:
            late: Any = run.module.late.requires_grad_(True)
            run.optimizer.add_param_group({"params": [late], "lr": 0.5})


def fit_late(rank: int, folder: Path, steps: int, resume: str | None, schedule: Any = None) -> Any:
    torch.manual_seed(1)
    model = Late()
    trainer = Trainer(
        max_steps=steps, callbacks=[Unfreeze(), Checkpoint()], output_dir=folder, strategy="single"
    )
    trainer.fit(
        model,
        (DataLoader(toy_dataset(), 4), DataLoader(toy_dataset(), 4)),
        optimizer=lambda _: SGD([model.weight, model.bias], lr=0.1, momentum=0.9),
        lr_scheduler=schedule,
        loss_fn=nn.CrossEntropyLoss(),
        resume=resume,
        schedule="keep" if resume else None,
    )
    return [tensor.tolist() for tensor in model.state_dict().values()]


def test_what_a_run_adds_to_the_model_and_the_optimizer_comes_back(tmp_path: Path) -> None:
    whole = fit_late(0, tmp_path / "whole", 6, None)
    fit_late(0, tmp_path / "run", 4, None)
    assert fit_late(0, tmp_path / "run", 6, "must") == whole
    assert [0.0, 0.0] not in whole


@pytest.mark.parametrize("stop", [2, 4])
@pytest.mark.parametrize(
    "schedule", [partial(ExponentialLR, gamma=0.9), partial(StepLR, step_size=2)]
)
def test_a_group_that_a_run_adds_comes_back_beside_a_schedule(
    schedule: Any, stop: int, tmp_path: Path
) -> None:
    whole = fit_late(0, tmp_path / "whole", 6, None, schedule)
    fit_late(0, tmp_path / "run", stop, None, schedule)
    assert fit_late(0, tmp_path / "run", 6, "must", schedule) == whole


def test_a_buffer_that_was_made_in_a_loop_of_ones_own_comes_back(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Late())
    model(torch.full((1, FEATURES), 3.0))
    accelerator.save_state(tmp_path)
    again = Accelerator(cpu=True)
    fresh = again.prepare(Late())
    again.load_state(tmp_path)
    assert accelerator.unwrap_model(fresh).scale == 3.0
    observer: Any = accelerator.unwrap_model(fresh).observer
    assert observer.max_val.tolist() == [3.0] * FEATURES
