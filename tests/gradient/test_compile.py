"""`compile=` changes how a model runs, and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import with_few
from trainkit import ConfigError, Trainer
from trainkit.checkpoint import CheckpointStore
from trainkit.testing.task import Network, Save, fit, loaders, weights
from trainkit.training.setup.compile import compile_options

EAGER = {"backend": "eager"}
AOT = {"backend": "aot_eager"}


class Counting:
    """A backend that runs what it is given, and counts."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


def train(
    model: nn.Module, compile: Any, folder: Path | None = None, strategy: Any = "auto"
) -> dict[str, Any]:
    trainer = Trainer(
        max_epochs=2,
        strategy=strategy,
        callbacks=[] if folder is None else [Save(3)],
        compile=compile,
        gradient_accumulation_steps=2,
        max_grad_norm=0.5,
        output_dir=folder,
    )
    data = loaders(6 // trainer.processes.num_processes)
    result = fit(trainer, model, data)
    return {
        "weights": weights(model),
        "figures": result.metrics,
        "again": trainer.evaluate(model, data[1]),
        "predictions": trainer.predict(model, data[1]),
        "checkpoint": str(result.checkpoint),
    }


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, Tensor | float):
        return torch.allclose(torch.as_tensor(a), torch.as_tensor(b), rtol=1e-10, atol=1e-12)
    return bool(a == b)


def train_both(rank: int, strategy: str, options: dict[str, Any], folder: Path) -> bool:
    plain = train(Network(), False, folder / "plain", strategy)
    compiled = train(Network(), options, folder / "compiled", strategy)
    paths = [Path(outcome.pop("checkpoint")) for outcome in (plain, compiled)]
    for path in paths:
        assert "_orig_mod" not in "".join(f.read_text("latin-1") for f in path.iterdir())
    keys = [
        list(CheckpointStore(path.parent).open(path).read("model"))
        for path in paths
        if strategy != "fsdp"
    ]
    assert all(found == list(Network().state_dict()) for found in keys)
    return equal(plain, compiled)


WAYS = [("single", 1), ("ddp", 2), ("fsdp", 2)]


@pytest.mark.parametrize("options", with_few([EAGER], [EAGER, AOT]), ids=["eager", "aot_eager"])
@pytest.mark.parametrize(("strategy", "size"), with_few([WAYS[0]], WAYS))
def test_compiled_training_is_the_same(
    strategy: str, size: int, options: dict[str, Any], tmp_path: Path
) -> None:
    assert all(run_ranks(size, train_both, strategy, options, tmp_path))


def test_a_second_fit_compiles_nothing_again() -> None:
    backend, model = Counting(), Network()
    train(model, {"backend": backend})
    graphs = backend.graphs
    assert graphs > 0
    train(model, {"backend": backend})
    assert backend.graphs == graphs


def test_modules_of_torch_itself_are_compiled() -> None:
    backend = Counting()
    train(nn.Sequential(nn.Linear(6, 3)).double(), {"backend": backend})
    assert backend.graphs > 0


def test_the_module_is_left_as_it_was() -> None:
    model = Network()
    train(model, EAGER)
    assert model._compiled_call_impl is None
    assert type(model) is Network


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("inductor", "`compile` must be True, False or a mapping"),
        ({"backnd": "eager"}, "'backnd'.*Did you mean `backend`"),
    ],
)
def test_bad_options_are_refused_at_once(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(max_steps=1, compile=options)


@pytest.mark.parametrize(
    "options",
    [{"mode": "reduce-overhead"}, {"mode": "max-autotune"}, {"options": {"triton.cudagraphs": 1}}],
)
def test_replays_that_would_overwrite_gradients_are_refused(options: dict[str, Any]) -> None:
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    with pytest.raises(ConfigError, match="overwrite the gradients of earlier micro-batches"):
        compile_options(options, gpu, accumulates=True)
    assert compile_options(options, gpu, accumulates=False) == options
    assert compile_options(options, cpu, accumulates=True) == options
    assert compile_options(True, gpu, accumulates=True) == {}


@pytest.mark.parametrize("options", [{"backend": "nothing"}, {"mode": "fastest"}])
def test_options_that_torch_refuses_end_before_training(options: dict[str, Any]) -> None:
    trainer = Trainer(max_steps=1, callbacks=[], compile=options)
    with pytest.raises(ConfigError, match=r"`torch\.compile` refuses the options"):
        fit(trainer, Network(), loaders(6))


def test_a_model_wrapped_by_torch_compile_is_refused() -> None:
    """Its keys would have the wrapper's name in them."""
    part: Any = Network()
    part.last = torch.compile(part.last, backend="eager")
    for model, place in (
        (torch.compile(Network(), backend="eager"), "The model"),
        (part, "`last`"),
    ):
        with pytest.raises(ConfigError, match=f"{place}.* was wrapped by `torch.compile"):
            train(model, False)  # type: ignore[arg-type]


@pytest.mark.slow
def test_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config  # takes a second

    monkeypatch.setattr(torch._inductor.config, "compile_threads", 1)  # no pool that stays
    assert json.dumps(sorted(train(Network(), True))) == json.dumps(sorted(train(Network(), False)))
    assert equal(train(Network(), True), train(Network(), False))
