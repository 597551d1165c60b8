"""`trainkit checkpoint export` and `import`."""

import os
import pickle
import random
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from tests.checkpoint.toys import save_alone
from tests.export.test_loading import Payload
from tests.export.toys import TOKENS, read_export, tied
from tests.helpers.toys import fit, make_trainer, toy_model
from trainkit.callbacks import EMA, Checkpoint
from trainkit.checkpoint import Checkpoint as Opened, CheckpointStore
from trainkit.cli.main import main
from trainkit.errors import CheckpointError, ConfigError
from trainkit.export import load_checkpoint_in_model, save_model

ROOT = Path(__file__).resolve().parents[2]


def command(*arguments: object) -> int:
    return main(["checkpoint", *(str(argument) for argument in arguments)])


def opened(path: Path) -> Opened:
    (folder,) = path.glob("step-*")
    return CheckpointStore(path).open(folder)


def test_an_exported_checkpoint_is_an_exported_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tied()
    save_alone(CheckpointStore(tmp_path / "checkpoints"), 3, {"model": model.state_dict()})
    save_model(model, tmp_path / "model", max_shard_size="700B")
    assert command("export", tmp_path, tmp_path / "out", "--max-shard-size", "700B") == 0
    assert "model.safetensors.index.json" in capsys.readouterr().out
    for path in (tmp_path / "model").iterdir():
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()
    other = tied(1)
    load_checkpoint_in_model(other, tmp_path / "out", strict=True)
    assert torch.equal(other(TOKENS), model(TOKENS))


def test_a_trained_model_exported_both_ways(tmp_path: Path) -> None:
    trainer = make_trainer(output_dir=tmp_path)
    with pytest.raises(ConfigError, match="there was none"):
        trainer.save_model(tmp_path / "none")
    model = toy_model()
    fit(trainer, model=model)
    trainer.save_checkpoint()
    trainer.save_model(tmp_path / "a", max_shard_size="1kB")
    assert command("export", tmp_path, tmp_path / "b", "--max-shard-size", "1kB") == 0
    one, two = read_export(tmp_path / "a"), read_export(tmp_path / "b")
    assert all(torch.equal(one[name], two[name]) for name in model.state_dict())


@pytest.mark.parametrize("weights_only", [False, True])
def test_the_best_of_a_run_is_exported_as_it_was_evaluated(
    tmp_path: Path, weights_only: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    best = Checkpoint(keep_best=("eval/loss", "min"), weights_only=weights_only)
    trainer = make_trainer(max_epochs=4, output_dir=tmp_path, callbacks=[best, EMA(0.9)])
    model = toy_model()
    result = fit(trainer, model=model, optimizer=partial(torch.optim.SGD, lr=4.0))
    assert result.best_step != result.step
    trainer.save_model(tmp_path / "a", checkpoint="best")
    assert command("export", tmp_path, tmp_path / "b", "--best") == 0
    one, two = read_export(tmp_path / "a"), read_export(tmp_path / "b")
    assert all(torch.equal(one[name], two[name]) for name in model.state_dict())

    assert command("export", tmp_path, tmp_path / "raw", "--part", "model") == 0
    last = read_export(tmp_path / "raw")  # not the average
    assert all(torch.equal(last[name], value) for name, value in model.state_dict().items())

    assert command("export", result.best_checkpoint, tmp_path / "c", "--best") == 1
    assert "is one checkpoint" in capsys.readouterr().err
    (tmp_path / "none").mkdir()
    assert command("export", tmp_path / "none", tmp_path / "c", "--best") == 1
    assert "calls the best" in capsys.readouterr().err


def test_what_cannot_be_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save_alone(CheckpointStore(tmp_path), 3)
    assert command("export", path, tmp_path / "out", "--part", "ghost") == 1
    assert "has no part 'ghost'" in capsys.readouterr().err
    assert command("export", path, tmp_path / "out", "--part", "counters") == 1
    assert "is no tensor" in capsys.readouterr().err
    assert command("export", path, tmp_path / "out", "--max-shard-size", "big") == 1
    assert "`max_shard_size` must be a size" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert command("export", path, path) == 1
    assert "is a checkpoint, which an export would break" in capsys.readouterr().err
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)
    assert command("export", path, tmp_path / "out") == 1
    assert "its content has changed" in capsys.readouterr().err


def test_help_needs_no_torch() -> None:
    code = (
        "import sys\nfrom trainkit.cli.main import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "assert not {'torch', 'numpy', 'safetensors'} & set(sys.modules)"
    )
    for name in ("export", "import"):
        arguments = [sys.executable, "-c", code, "checkpoint", name, "--help"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(arguments, env=environment, check=True, capture_output=True)


@pytest.fixture
def saved(tmp_path: Path) -> dict[str, Any]:
    """Let Accelerate train two steps and save; return what it trained, and where it is."""
    return accelerated(tmp_path / "accelerate")


def accelerated(folder: Path, safe: bool = True) -> dict[str, Any]:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    class Counter:
        def state_dict(self) -> dict[str, Any]:
            return {"count": 7, "rate": numpy.float64(0.5), "seen": numpy.arange(3)}

        def load_state_dict(self, state: Any) -> None:
            assert state

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True)
    model = tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    accelerator.register_for_checkpointing(Counter())
    for _ in range(2):
        accelerator.backward(nn.functional.cross_entropy(model(TOKENS).transpose(1, 2), TOKENS))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    accelerator.save_state(str(folder), safe_serialization=safe)
    return {"folder": folder, "model": model, "optimizer": optimizer, "scheduler": scheduler}


@pytest.mark.parametrize("safe", [True, False])
def test_a_checkpoint_of_accelerate_is_taken_over(tmp_path: Path, safe: bool) -> None:
    saved = accelerated(tmp_path / "accelerate", safe)
    expected: Any = (random.getstate(), numpy.random.get_state(), torch.get_rng_state())
    assert command("import", saved["folder"], tmp_path / "checkpoints") == 0
    checkpoint = opened(tmp_path / "checkpoints")
    assert checkpoint.step == 2
    assert checkpoint.names() == [
        "custom_checkpoint_0",
        "model",
        "optimizer",
        "random_states_0",
        "scheduler",
    ]
    model = tied(1)
    load_checkpoint_in_model(model, checkpoint.path, strict=True)
    assert torch.equal(model(TOKENS), saved["model"](TOKENS))

    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    optimizer.load_state_dict(checkpoint.read("optimizer"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scheduler.load_state_dict(checkpoint.read("scheduler"))
    assert scheduler.last_epoch == saved["scheduler"].scheduler.last_epoch
    for net, stepper in ((model, optimizer), (saved["model"], saved["optimizer"])):
        loss: Any = nn.functional.cross_entropy(net(TOKENS).transpose(1, 2), TOKENS)
        loss.backward()
        stepper.step()
    assert torch.equal(model(TOKENS), saved["model"](TOKENS))  # it trains on as it would have

    states: Any = checkpoint.read("random_states_0")
    assert states["random_state"] == expected[0]
    assert numpy.array_equal(states["numpy_random_seed"][1], expected[1][1])
    assert torch.equal(states["torch_manual_seed"], expected[2])
    custom = checkpoint.read("custom_checkpoint_0")
    assert custom["count"] == 7
    assert custom["seen"].tolist() == [0, 1, 2]


def test_an_imported_checkpoint_is_no_run_to_resume(saved: Any, tmp_path: Path) -> None:
    assert command("import", saved["folder"], tmp_path / "out", "--step", 12) == 0
    path = tmp_path / "out" / "step-00000012"
    with pytest.raises(CheckpointError, match="has no part 'trainer'"):
        fit(make_trainer(), resume=path)


FILES = [
    "model.safetensors",
    "pytorch_model.bin",
    "optimizer.bin",
    "scheduler.bin",
    "sampler.bin",
    "scaler.pt",
    "random_states_0.pkl",
    "custom_checkpoint_0.pkl",
]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("way", ["zip", "legacy", "raw"])
def test_planted_pickles_never_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, way: str
) -> None:
    source, marker = tmp_path / "source", tmp_path / "ran"
    source.mkdir()
    save_model(nn.Linear(2, 2), source)
    state = {"state": {}, "payload": Payload(marker)}
    if way == "raw":
        (source / name).write_bytes(pickle.dumps(state))
    else:
        torch.save(state, source / name, _use_new_zipfile_serialization=way == "zip")
    assert command("import", source, tmp_path / "out") == 1
    told = capsys.readouterr().err
    assert name in told
    assert "weights_only" not in told
    assert not marker.exists()
    assert not (tmp_path / "out").exists()
    if name != "model.safetensors":
        assert command("import", source, tmp_path / "out", "--skip", name) == 0
        assert opened(tmp_path / "out").names() == ["model"]
        assert not marker.exists()


def test_objects_that_need_code_are_refused_by_name(
    saved: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from accelerate.data_loader import SeedableRandomSampler

    torch.save(SeedableRandomSampler([1, 2]), saved["folder"] / "sampler.bin")
    assert command("import", saved["folder"], tmp_path / "out") == 1
    told = capsys.readouterr().err
    assert "accelerate.data_loader.SeedableRandomSampler" in told
    assert "`--skip sampler.bin`" in told
    assert command("import", saved["folder"], tmp_path / "out", "--skip", "sampler.bin") == 0


def test_bad_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source"
    assert command("import", source, tmp_path / "out") == 1
    assert "There is no folder" in capsys.readouterr().err
    source.mkdir()
    torch.save({"state": {}}, source / "optimizer.bin")
    assert command("import", source, tmp_path / "out") == 1
    assert "holds no weights" in capsys.readouterr().err
    save_model(nn.Linear(2, 2), source)
    (source / "pytorch_model_fsdp_0").mkdir()
    assert command("import", source, tmp_path / "out") == 1
    assert "`--skip pytorch_model_fsdp_0`" in capsys.readouterr().err
    assert command("import", source, tmp_path / "out", "--skip", "ghost") == 1
    assert "`--skip` names ['ghost']" in capsys.readouterr().err
    torch.save({1: torch.ones(2).to_sparse()}, source / "scheduler.bin")
    assert command("import", source, tmp_path / "out", "--skip", "pytorch_model_fsdp_0") == 1
    assert "`scheduler[1]`" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
