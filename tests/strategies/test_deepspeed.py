"""DeepSpeed's ZeRO trains as DDP does, and a checkpoint of it is one of any strategy."""

import os
import signal
from collections.abc import Iterable
from contextlib import redirect_stdout
from functools import partial
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from tests.helpers.ranks import RanksError, run_ranks
from trainkit import Callback, ConfigError, Run, StepResult, Trainer, load_checkpoint_in_model
from trainkit.callbacks import Checkpoint, GradientMonitor, NaNGuard
from trainkit.precision import FP16
from trainkit.strategies import DeepSpeed, Strategy, deepspeed_config

needs_deepspeed = pytest.mark.skipif(
    find_spec("deepspeed") is None, reason="needs the extra `deepspeed`"
)
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*all_gather_into_tensor.* is deprecated", "ignore:.*reduce_scatter_tensor.* is"
)


class Figures(Callback):
    """Keeps losses, norms and skipped steps."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, float]] = []
        self.skipped: list[int] = []
        self.logged: list[float] = []

    @override
    def on_log(self, run: Run, values: dict[str, float]) -> None:
        self.logged += [v for name, v in values.items() if name.startswith("grad_norm/")]

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        assert result.grad_norm is not None
        self.rows.append((float(result.loss), float(result.grad_norm)))

    @override
    def on_step_skipped(self, run: Run, result: StepResult) -> None:
        self.skipped.append(run.state.attempts)


class Moved(Callback):
    """Puts parameters elsewhere, as a program may that has never heard of ZeRO."""

    @override
    def on_step_start(self, run: Run) -> None:
        if run.state.step % 5 == 0:
            for p in run.module.parameters():
                p.data = p.data.clone()


class Killed(Callback):
    """Is shot on process 1."""

    @override
    def on_step_start(self, run: Run) -> None:
        if run.state.step == 8 and run.processes.process_index == 1:
            os.kill(os.getpid(), signal.SIGKILL)


def net(norm: Any = nn.BatchNorm1d) -> nn.Module:
    torch.manual_seed(3)
    layers = nn.Linear(6, 17), nn.GELU(), norm(17), nn.Linear(17, 13), nn.GELU()
    return nn.Sequential(*layers, nn.Linear(13, 3))


def data() -> TensorDataset:
    torch.manual_seed(0)
    inputs = torch.randn(83, 6)
    return TensorDataset(inputs, (inputs[:, 0] * 2).long() % 3)


def in_groups(given: Iterable[Any]) -> AdamW:
    parameters = [*given]
    groups: list[dict[str, Any]] = [
        {"params": parameters[:2], "lr": 2e-2},
        {"params": parameters[2:]},
    ]
    return AdamW(groups, lr=1e-2, weight_decay=0.1)


def fitted(strategy: Any, steps: int = 20, accumulation: int = 2, **options: Any) -> dict[str, Any]:
    """Train; return figures, metrics, weights and the state of the optimizer."""
    figures, model = Figures(), net(options.pop("norm", nn.BatchNorm1d))
    resume = options.pop("resume", None)
    callbacks = [figures, GradientMonitor(depth=1), *options.pop("callbacks", ())]
    callbacks += [] if options.get("precision", "fp32") != "fp32" else [NaNGuard()]
    trainer = Trainer(
        max_steps=steps,
        strategy=strategy,
        gradient_accumulation_steps=accumulation,
        max_grad_norm=0.3,
        log_every_n_steps=1,
        callbacks=callbacks,
        **options,
    )
    loader = DataLoader(data(), batch_size=4, shuffle=True)
    trainer.fit(
        model,
        loader,
        optimizer=in_groups,
        lr_scheduler="cosine",
        loss_fn=nn.CrossEntropyLoss(),
        resume=resume,
    )
    metrics = trainer.evaluate(model, DataLoader(data(), batch_size=5))
    kept: Strategy = trainer.strategy
    optimizer = trainer.run.optimizer if trainer.run else None
    assert optimizer is not None
    with kept.whole_state(optimizer):
        states = [optimizer.state.get(p, {}) for p in model.parameters()]
        state = {f"{n}.{key}": v for n, one in enumerate(states) for key, v in one.items()}
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    if folder := options.get("output_dir"):
        trainer.save_model(Path(folder) / "model")
    found: dict[str, Any] = {
        "rows": figures.rows,
        "logged": figures.logged,
        "skipped": figures.skipped,
        "metrics": metrics,
    }
    return found | {"weights": weights, "state": state}


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the largest difference of what two trainings came to."""
    pairs = [(torch.tensor(one[key]), torch.tensor(other[key])) for key in ("rows", "logged")]
    pairs += [
        (torch.tensor(v), torch.tensor(other["metrics"][k])) for k, v in one["metrics"].items()
    ]
    for part in ("weights", "state"):
        assert one[part].keys() == other[part].keys()
        pairs += [(value, other[part][key]) for key, value in one[part].items()]
    return max(float((a - b).abs().max()) for a, b in pairs)


def made(precision: str) -> Any:
    return FP16(init_scale=2.0**40) if precision == "fp16" else precision


def in_all_ways(rank: int) -> dict[str, tuple[float, Any]]:
    """Return how far each stage and precision is from DDP."""
    found = {}
    for stage, precision in ((1, "fp32"), (2, "fp32"), (2, "bf16"), (1, "fp16"), (2, "fp16")):
        config = {"zero_optimization": {"reduce_bucket_size": 150}}
        same = fitted("ddp", precision=made(precision))
        moved = [Moved()] if precision == "fp32" else []
        strategy = DeepSpeed(stage=stage, config=config)
        own = fitted(strategy, precision=made(precision), callbacks=moved)
        assert own["skipped"] == same["skipped"], precision
        if rank == 0:
            found[f"{stage} {precision}"] = apart(own, same), own["skipped"]
    return found


@needs_deepspeed
@pytest.mark.e2e
def test_zero_trains_as_ddp_does() -> None:
    found = run_ranks(2, in_all_ways)[0]
    print(found)
    assert all(difference < 1e-6 for difference, _ in found.values())
    assert found["2 fp16"][1], "no step was skipped"


def going_on(rank: int, folder: Path, strategy: str, **options: Any) -> dict[str, Any]:
    made: Any = DeepSpeed(stage=int(strategy)) if strategy in "12" else strategy
    callbacks = [Checkpoint(every_n_steps=3), *options.pop("callbacks", ())]
    options |= {"callbacks": callbacks, "norm": nn.LayerNorm, "output_dir": folder}
    with redirect_stdout(StringIO()) as printed:
        found = fitted(made, steps=12, **options)
    assert "training_step" not in printed.getvalue()  # what hooks of DeepSpeed's hold is saved
    return found


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("stage", ["1", "2"])
def test_a_run_that_was_killed_goes_on_bit_for_bit_and_anywhere(tmp_path: Path, stage: str) -> None:
    whole = run_ranks(2, going_on, tmp_path / "whole", stage)[0]
    read = net(nn.LayerNorm)
    load_checkpoint_in_model(read, tmp_path / "whole" / "model")
    assert all(torch.equal(v, whole["weights"][k]) for k, v in read.state_dict().items())
    for place in ("same", "ddp"):
        with pytest.raises(RanksError):
            run_ranks(2, going_on, tmp_path / place, stage, callbacks=[Killed()])
    same = run_ranks(2, going_on, tmp_path / "same", stage, resume="must")[0]
    assert same["rows"] == whole["rows"][-len(same["rows"]) :]
    for part in ("weights", "state"):
        assert all(torch.equal(v, whole[part][k]) for k, v in same[part].items())
    options: Any = {"resume": "must", "accumulation": 4}
    alone = run_ranks(1, going_on, tmp_path / "ddp", "ddp", **options)[0]
    assert len(alone["rows"]) == len(same["rows"])
    for one in (alone, same):
        one["rows"] = [norm for _, norm in one["rows"]]  # losses are those of a process
    assert apart(alone, same) < 1e-6


def refused(rank: int) -> dict[str, str]:
    """Return what is said of what cannot be."""
    found = {}

    def attempt(name: str, **options: Any) -> None:
        strategy = DeepSpeed(stage=2, config=options.pop("config", {}))
        model: Any = options.pop("model", None) or net()
        given: dict[str, Any] = {"optimizer": in_groups, "loss_fn": nn.CrossEntropyLoss()}
        given |= {key: options.pop(key) for key in [*options] if key in given}
        trainer = Trainer(max_steps=2, strategy=strategy, callbacks=options.pop("callbacks", ()))
        with pytest.raises(ConfigError) as caught:
            trainer.fit(model, DataLoader(data(), batch_size=4), **given)
        found[name] = str(caught.value)

    class Unused(nn.Sequential):
        @override
        def forward(self, inputs: Tensor) -> Tensor:
            return self[5](self[3](self[2](self[0](inputs.detach()))).detach())  # type: ignore[no-any-return]

    class Thawed(Callback):
        @override
        def on_step_end(self, run: Run, result: StepResult) -> None:
            run.module.requires_grad_(True)

    names = {"0": "a", "3": "b", "5": "c"}
    several = {v: partial(SGD, lr=0.1) for v in names.values()}
    named = nn.Sequential()
    for key, name in names.items():
        named.add_module(name, net().get_submodule(key))
    attempt("batch", config={"train_micro_batch_size_per_gpu": 8})
    attempt("precision", config={"bf16": {"enabled": True}})
    attempt("rates", config={"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}})
    attempt("several", optimizer=several, model=named)
    attempt("shapes", optimizer=partial(Adafactor, lr=0.1))
    attempt("dtype", model=net().bfloat16())
    frozen = net()
    frozen.get_submodule("5").requires_grad_(False)
    attempt(
        "thawed",
        callbacks=[Thawed()],
        model=frozen,
        optimizer=lambda _: SGD(frozen.parameters(), lr=0.1),
    )
    attempt("unused", model=Unused(*net().children()))
    return found


@needs_deepspeed
@pytest.mark.e2e
def test_what_zero_cannot_do_is_refused_in_a_sentence() -> None:
    found = run_ranks(2, refused)[0]
    print(*found.values(), sep="\n")
    assert "is 8, but the batch size of the loader is 4" in found["batch"]
    assert "`bf16.enabled`" in found["precision"]
    assert "`optimizer.params.lr` of the DeepSpeed configuration is 0.001" in found["rates"]
    assert "one model with one optimizer" in found["several"]
    assert "whether `Adafactor` changes each element" in found["shapes"]
    assert "not in fp32" in found["dtype"]
    assert "got no gradient in this window" in found["unused"]
    assert "or froze or thawed" in found["thawed"]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"zero_optimization": {"stage": 3}}, "must be 1 or 2, but is 3"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "cpu_offload=True"),
        ({"flops_profiler": {"enabled": True}}, "would have no effect"),
        ("none.json", "must be a mapping, or a JSON file"),
        ([1], "must be a mapping, or"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(config: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DeepSpeed(config=config)


def test_stages_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"is 2, but `stage` is 1"):
        DeepSpeed(stage=1, config={"zero_optimization": {"stage": 2}})


@pytest.mark.skipif(find_spec("deepspeed") is not None, reason="DeepSpeed is installed")
def test_deepspeed_that_is_not_installed_is_named() -> None:
    with pytest.raises(ConfigError, match="needs the package `deepspeed`, which is not installed"):
        DeepSpeed(stage=2)


KNOWN = {
    "batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.3,
    "optimizer": AdamW([nn.Parameter(torch.zeros(2))], lr=1e-2, betas=(0.9, 0.99)),
    "scheduler": None,
}


def test_what_the_training_does_may_be_said_again() -> None:
    same: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "train_batch_size": 16}
    same |= {"gradient_accumulation_steps": 2, "gradient_clipping": 0.3}
    params = {"lr": 1e-2, "betas": [0.9, 0.99], "eps": "auto"}
    said = {**same, "optimizer": {"type": "AdamW", "params": params}, "steps_per_print": 10}
    said |= {"bf16": {"enabled": "auto"}, "fp16": {"enabled": False, "loss_scale": 128}}
    config = deepspeed_config.read_config(said)
    deepspeed_config.check_settings(config, KNOWN, 2)
    deepspeed_config.check_precision(config, "bf16")
    autos = {**dict.fromkeys(same, "auto"), "scheduler": {"params": {"warmup_num_steps": "auto"}}}
    deepspeed_config.check_settings(deepspeed_config.read_config(autos), KNOWN, 2)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"train_batch_size": 32}, "is 32, but batch size x"),
        ({"gradient_accumulation_steps": 1}, "is 1, but `gradient_accumulation_steps` is 2"),
        ({"gradient_clipping": 1.0}, "is 1.0, but `max_grad_norm` is 0.3"),
        ({"optimizer": {"type": "Lamb"}}, "is 'Lamb', but the optimizer is AdamW"),
        ({"scheduler": {"type": "WarmupLR"}}, "is 'WarmupLR', but the schedule is"),
    ],
)
def test_what_contradicts_the_training_is_refused(said: Any, words: str) -> None:
    config = deepspeed_config.read_config(said)
    with pytest.raises(ConfigError, match=words):
        deepspeed_config.check_settings(config, KNOWN, 2)
