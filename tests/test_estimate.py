"""`trainkit estimate` says what processes then hold."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.needs import needs_transformers
from tests.helpers.ranks import run_ranks
from trainkit import Trainer
from trainkit.cli.main import main


def network() -> nn.Module:
    """Return a model whose rows no number of processes divides."""
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 7)) for _ in range(2))
    model = nn.Sequential(*blocks, nn.Linear(7, 5))
    model.get_parameter("0.0.bias").requires_grad_(False)
    return model


def held(rank: int, strategy: str) -> dict[str, int]:
    """Train one step, and return the bytes of what the process holds after its gradients."""
    sizes = {}

    def local(value: Any) -> Tensor:
        part: Tensor = value.to_local() if hasattr(value, "to_local") else value
        return part

    def size(values: Any) -> int:
        return sum(v.numel() * v.element_size() for v in map(local, values))

    class Measured(Trainer):
        def training_step(self, model: nn.Module, batch: Any) -> Tensor:
            return nn.functional.mse_loss(model(batch[0]), batch[1])

    model = network()
    trainer = Measured(max_steps=1, strategy=strategy)  # type: ignore[arg-type]
    data = TensorDataset(torch.randn(4, 7), torch.randn(4, 5))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    trainer.fit(model, DataLoader(data, 2), optimizer=optimizer)
    run: Any = trainer.run
    states = [v for state in run.optimizer.state.values() for v in state.values()]
    sizes["parameters"] = size(model.parameters())
    sizes["gradients"] = size(p for p in model.parameters() if p.requires_grad)
    sizes["optimizer"] = size(states)
    return sizes


def printed(text: str) -> dict[str, int]:
    rows = [line.split() for line in text.splitlines() if line.endswith(" bytes")]
    return {row[0]: int(row[-2].replace(",", "")) for row in rows}


@pytest.mark.e2e
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_it_says_what_two_processes_hold(strategy: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["tests.test_estimate:network", "--strategy", strategy, "--processes", "2"]
    assert main(["estimate", *arguments]) == 0
    told = printed(capsys.readouterr().out)
    found = run_ranks(2, held, strategy)[0]
    assert {name: told[name] for name in found} == found


@needs_transformers
def test_a_model_of_transformers_is_estimated_without_its_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256,
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    assert main(["estimate", str(tmp_path), "--strategy", "fsdp", "--processes", "8"]) == 0
    text = capsys.readouterr().out
    assert "LlamaForCausalLM, 8,030,261,248 parameters" in text
    assert printed(text)["parameters"] == 8_030_261_248 * 4 // 8


def test_what_is_no_model_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    for given in ("nowhere", "nowhere:network", "math:pi", "builtins:dict"):
        assert main(["estimate", given]) == 1
    assert capsys.readouterr().err.count("trainkit: ") == 4


@pytest.mark.parametrize("made", [True, False])
def test_explain_tells_the_memory_of_its_own_run(
    made: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    model = network()
    given: Any = partial(torch.optim.AdamW, lr=1e-3)
    optimizer = given([p for p in model.parameters() if p.requires_grad]) if made else given
    trainer = Trainer(max_steps=1, callbacks=[])
    trainer.explain(model, optimizer=optimizer, memory=True)
    told = printed(capsys.readouterr().out)
    assert main(["estimate", "tests.test_estimate:network"]) == 0
    assert told.items() >= printed(capsys.readouterr().out).items()
    assert not (made and optimizer.state)
    trainer.explain(model, memory=True)
    assert "Pass `model` and one `optimizer`" in capsys.readouterr().out


def test_the_command_of_accelerate_has_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    model = "tests.test_estimate:network"
    assert main(["estimate-memory", model, "--dtypes", "float32", "int8"]) == 0
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert rows == ["dtype", "float32", "int8", "Activations"]
    assert main(["estimate-memory", model, "--library_name", "timm"]) == 1
    assert "`module:function`" in capsys.readouterr().err
