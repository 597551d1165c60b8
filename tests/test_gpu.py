"""Training on one accelerator: precisions, resumes and sharded checkpoints, by every strategy.

bf16 keeps 8 bits of a number and fp16 11, so losses of a few steps stay within 5 % and 1 % of those
in fp32. With `deterministic=True` a resume is equal to the last bit.
"""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typing_extensions import override

from trainkit import Callback, Run, StepResult, Trainer
from trainkit.basics.device import default_kind
from trainkit.errors import ConfigError
from trainkit.precision import FP8, FP16
from trainkit.strategies import DDP, FSDP, SingleDevice, Strategy, single_process_group
from trainkit.testing.task import Network, Record, Save, fit, loaders, same, weights

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:FSDP gains nothing")]

DEVICE = torch.device(default_kind(), 0)
SECONDS = 600.0
STRATEGIES = ("single", "ddp", "fsdp", "offload")
SAVED_STEP, STEPS = 6, 8
TOLERANCES = {"bf16": 0.05, "fp16": 0.01}  # relative, of losses and norms

every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


@pytest.fixture(autouse=True)
def cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let cuBLAS be deterministic; it reads this when it starts, in the process of each test."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def make(strategy: str) -> Strategy:
    if strategy == "single":
        return SingleDevice(device=DEVICE)
    if strategy == "ddp":
        single_process_group.join(DEVICE)  # DDP alone needs neither group nor wrapper
        return DDP(device=DEVICE)
    return FSDP(device=DEVICE, cpu_offload=strategy == "offload")


def in_new_process(function: Callable[..., None], *args: Any) -> None:
    """Call a function where no device is in use yet: a fork of a process that uses one cannot."""
    way = "fork" if DEVICE.type == "fake" else "spawn"  # the pretended one does not mind
    context: Any = multiprocessing.get_context(way)
    process = context.Process(target=function, args=args)
    process.start()
    process.join(SECONDS)
    code = process.exitcode
    process.kill()
    process.join()
    assert code == 0, "see its traceback on stderr"


class Places(Callback):
    """Notes where parameters and losses are, and which steps were skipped."""

    def __init__(self) -> None:
        self.losses: set[str] = set()
        self.parameters: set[str] = set()
        self.skips = 0

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        self.losses.add(result.loss.device.type)
        self.parameters |= {p.device.type for p in run.module.parameters()}

    @override
    def on_step_skipped(self, run: Run, result: StepResult) -> None:
        self.skips += 1


def train(
    strategy: str,
    precision: Any = "fp32",
    folder: Path | None = None,
    resume: Path | None = None,
) -> dict[str, Any]:
    """Train on one process, and return what it came to."""
    record, places = Record(), Places()
    trainer = Trainer(
        max_epochs=2,
        strategy=make(strategy),
        precision=precision,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        deterministic=True,
        callbacks=[record, places, *([] if folder is None else [Save(SAVED_STEP)])],
        log_every_n_steps=1,
        output_dir=folder,
    )
    model = Network(torch.float32, seed=0 if resume is None else 1)
    data = loaders(6, torch.float32)
    result = fit(trainer, model, data, resume=resume)
    return {
        "losses": record.losses,
        "norms": record.norms,
        "figures": result.metrics,
        "again": trainer.evaluate(model, data[1]),
        "predictions": trainer.predict(model, data[1]).cpu(),
        "weights": weights(model),
        "step": result.step,
        "places": [sorted(places.losses), sorted(places.parameters), places.skips],
    }


def difference(found: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def precisions(strategy: str) -> None:
    expected = train("single")
    full = train(strategy)
    assert full["places"] == [[DEVICE.type], ["cpu" if strategy == "offload" else DEVICE.type], 0]
    assert full["step"] == STEPS
    for name in ("losses", "norms"):
        assert difference(full[name], expected[name]) < 1e-5
    for name, tolerance in TOLERANCES.items():
        found = train(strategy, FP16(init_scale=256.0) if name == "fp16" else name)
        assert found["places"][2] == 0  # skips
        for figures in ("losses", "norms"):
            assert difference(found[figures], expected[figures]) < tolerance
        assert found["figures"] == pytest.approx(expected["figures"], rel=tolerance)
        assert found["again"] == found["figures"]
        assert all(value.dtype == torch.float32 for value in found["weights"].values())


@every_strategy
def test_precisions_learn_as_fp32_on_one_device(strategy: str) -> None:
    in_new_process(precisions, strategy)


def float8(strategy: str, folder: Path) -> None:
    expected, found = train("single"), train(strategy, "fp8")
    emulated = train(strategy, FP8(emulate=True))
    for figures in ("losses", "norms"):
        assert difference(found[figures], expected[figures]) < 0.1
        assert difference(found[figures], emulated[figures]) < 0.05
    assert found["again"] == found["figures"]
    resumed(strategy, "fp8", folder)


@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_float8_multiplies_as_it_is_emulated(strategy: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao", reason="needs the extra `fp8`")
    if DEVICE.type != "cuda":
        pytest.skip("only of CUDA devices it is known which multiply in float8")
    if torch.cuda.get_device_capability() < (8, 9):
        with pytest.raises(ConfigError, match="cannot multiply so"):
            FP8().setup(DEVICE)
        return
    in_new_process(float8, strategy, tmp_path)


def resumed(strategy: str, precision: str, folder: Path) -> None:
    straight = train(strategy, precision, folder / "straight")
    path = folder / "straight" / "checkpoints" / f"step-{SAVED_STEP:08d}"
    again = train(strategy, precision, folder / "again", path)
    for name in ("losses", "norms"):
        assert again[name] == straight[name][SAVED_STEP - straight["step"] :]
    assert same([again["weights"], straight["weights"]])
    assert same([again["predictions"], straight["predictions"]])


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@every_strategy
def test_a_resume_is_equal_to_the_last_bit(strategy: str, precision: str, tmp_path: Path) -> None:
    in_new_process(resumed, strategy, precision, tmp_path)


def other_strategies(folder: Path) -> None:
    train("fsdp", folder=folder / "first")
    path = folder / "first" / "checkpoints" / f"step-{SAVED_STEP:08d}"
    assert [file.name for file in path.glob("*shard*")]
    found = [train(name, folder=folder / name, resume=path)["weights"] for name in STRATEGIES]
    for other in found[1:]:
        for name, value in found[0].items():
            assert torch.allclose(other[name], value, rtol=1e-5, atol=1e-6)


def test_a_sharded_checkpoint_is_loaded_by_every_strategy(tmp_path: Path) -> None:
    in_new_process(other_strategies, tmp_path)


class Spoils(Callback):
    """Makes a gradient of the second step overflow."""

    @override
    def on_microbatch_end(self, run: Run, batch: Any) -> None:
        if run.state.attempts == 1:
            run.strategy.local_gradients(run.parameters)[0].fill_(torch.inf)


def overflow(strategy: str) -> None:
    precision = FP16(init_scale=256.0)
    places = Places()
    trainer = Trainer(
        max_steps=3, strategy=make(strategy), precision=precision, callbacks=[Spoils(), places]
    )
    model = Network(torch.float32)
    result = fit(trainer, model, loaders(12, torch.float32)[0])
    assert [result.step, result.skipped_steps, places.skips] == [3, 1, 1]
    assert precision.scale == 128.0
    assert all(value.isfinite().all() for value in weights(model).values())


@every_strategy
def test_an_overflow_skips_one_step(strategy: str) -> None:
    in_new_process(overflow, strategy)


def filled() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    trainer = Trainer(max_steps=2, strategy=FSDP(device=DEVICE), callbacks=[])
    fit(trainer, model, loaders(6, torch.float32)[0])
    assert all(p.device == DEVICE and p.isfinite().all() for p in model.parameters())


def test_a_model_on_the_meta_device_is_filled() -> None:
    in_new_process(filled)


class Scaled(nn.Linear):
    """Times a number that is frozen, which no process can hold a part of."""

    def __init__(self) -> None:
        super().__init__(6, 3)
        self.scale = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    @override
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        scales = torch.stack([self.scale, self.bias[0] * 0 + 1])
        return super().forward(input) * scales.prod()


def scaled(strategy: str) -> None:
    model = nn.Sequential(Scaled())
    trainer = Trainer(max_steps=2, strategy=make(strategy), callbacks=[])
    fit(trainer, model, loaders(6, torch.float32)[0])
    assert model.get_parameter("0.scale").device == DEVICE


@every_strategy
def test_a_frozen_number_is_where_the_rest_is_computed(strategy: str) -> None:
    in_new_process(scaled, strategy)
