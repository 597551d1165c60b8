"""Adapters of peft: trained, exported, merged; checkpoints that refer to the frozen base."""

import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.utils.data import DataLoader

from tests.helpers.callbacks import StopsAt
from tests.helpers.needs import late
from tests.helpers.ranks import run_ranks
from tests.helpers.toys import toy_model
from tests.strategies.toys import STRATEGIES, Texts, gpt2
from trainkit import CheckpointError, ConfigError, Trainer
from trainkit.callbacks import Checkpoint
from trainkit.checkpoint import CheckpointStore
from trainkit.cli.checkpoint_export import export_checkpoint
from trainkit.export import save_model
from trainkit.training.callback import Callback

peft = late("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:FSDP gains nothing"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor"),
    # Of peft: the base was made by the test, and has no place on the hub.
    pytest.mark.filterwarnings("ignore:Could not find a config file in"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated"),
]

STEPS = 6


def base(seed: int = 0) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return gpt2()


def adapted(kind: str = "lora", seed: int = 0) -> Any:
    """Return the base with an adapter that does not begin as nothing."""
    settings: dict[str, Any] = {"r": 2, "target_modules": ["c_attn", "c_fc"]}
    settings["fan_in_fan_out"] = True
    if kind == "dora":
        settings["use_dora"] = True
    if kind == "head":
        settings["modules_to_save"] = ["ln_f"]
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings)
    model = base(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return peft.get_peft_model(model, config)


def train(
    model: nn.Module, folder: Path | None = None, *callbacks: Callback, **settings: Any
) -> Trainer:
    resume, steps = settings.pop("resume", None), settings.pop("max_steps", STEPS)
    batch = settings.pop("batch", 4)
    trainer = Trainer(max_steps=steps, callbacks=callbacks, output_dir=folder, **settings)
    loader = DataLoader(Texts(torch.float32), batch, shuffle=True)
    trainer.fit(model, loader, optimizer=partial(AdamW, lr=1e-2), resume=resume)
    return trainer


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        inputs = torch.arange(8, device=next(model.parameters()).device)
        found: Tensor = model.eval()(input_ids=inputs[None]).logits
    return found.cpu()


class Spoken:
    """Stands for a tokenizer."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["lora", "dora", "head"])
def test_an_adapter_is_written_as_peft_reads_it(kind: str, tmp_path: Path) -> None:
    trainer = train(adapted(kind))
    assert trainer.run is not None
    model = trainer.run.module
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    wanted = logits(model)

    trainer.save_model(tmp_path / "adapter", tokenizer=Spoken())
    files = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert files == {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"}
    read = peft.PeftModel.from_pretrained(base(), tmp_path / "adapter")
    assert logits(read.to(trainer.processes.device)).equal(wanted)

    trainer.save_model(tmp_path / "merged", merge=True)
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", attn_implementation="eager")
    torch.testing.assert_close(logits(merged), wanted, rtol=1e-4, atol=1e-5)
    after = model.state_dict()
    assert all(after[name].equal(before[name]) for name in before)
    assert logits(model).equal(wanted)


@pytest.mark.e2e
def test_a_whole_model_takes_the_place_of_an_adapter_but_not_the_other_way(tmp_path: Path) -> None:
    model = adapted()
    save_model(model, tmp_path)
    save_model(model, tmp_path, merge=True)  # else readers would adapt it once more
    assert not list(tmp_path.glob("adapter_*"))
    save_model(model, tmp_path)  # what it adapts may be the model in this folder
    assert (tmp_path / "model.safetensors").exists()
    assert (tmp_path / "adapter_model.safetensors").exists()


@pytest.mark.e2e
def test_each_adapter_goes_where_peft_looks_for_it(tmp_path: Path) -> None:
    model = adapted()
    model.add_adapter("other", peft.LoraConfig(r=1, target_modules=["c_fc"], fan_in_fan_out=True))
    save_model(model, tmp_path)
    assert (tmp_path / "adapter_config.json").exists()
    assert json.loads((tmp_path / "other" / "adapter_config.json").read_text())["r"] == 1


@pytest.mark.e2e
def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="`merge=True` merges the adapter of a `PeftModel`"):
        save_model(toy_model(), tmp_path, merge=True)
    with pytest.raises(ConfigError, match="`tokenizer` must be"):
        save_model(toy_model(), tmp_path, tokenizer="gpt2")
    inside = base()
    inside.add_adapter(peft.LoraConfig(r=2, target_modules=["c_fc"], fan_in_fan_out=True))
    with pytest.raises(ConfigError, match="got its adapter by `add_adapter`"):
        save_model(inside, tmp_path)
    for settings in ({"modules_to_save": ["lm_head"]}, {"target_modules": ["c_fc", "wte"]}):
        config = peft.LoraConfig(
            **{"r": 2, "target_modules": ["c_fc"], "fan_in_fan_out": True, **settings}
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # peft says that they are tied
            tied = peft.get_peft_model(base(), config)
        with pytest.raises(ConfigError, match="cannot merge one of two tied embeddings"):
            save_model(tied, tmp_path, merge=True)


@pytest.mark.e2e
def test_the_labels_of_an_adapted_model_are_weighed_as_those_of_its_base() -> None:
    # One window of 12 samples, whole and in parts whose labels count differently.
    whole = train(adapted(), max_steps=1, batch=12)
    parts = train(adapted(), max_steps=1, batch=3, gradient_accumulation_steps=4)
    assert whole.run is not None
    assert parts.run is not None
    expected = dict(whole.run.module.named_parameters())
    for name, parameter in parts.run.module.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-4, atol=1e-5)
    (objective,) = parts.run.objectives.active
    assert float(objective.weighting.result()[1]) < 3 * 7 * 4  # without the first labels


@pytest.mark.e2e
def test_a_checkpoint_refers_to_the_base_and_a_resume_is_exact(tmp_path: Path) -> None:
    whole = train(adapted(), tmp_path / "whole", Checkpoint())
    train(adapted(), tmp_path / "parts", StopsAt(3), Checkpoint(frozen="reference"))
    resumed = train(adapted(), tmp_path / "parts", Checkpoint(frozen="reference"), resume="must")
    assert whole.run is not None
    assert resumed.run is not None
    expected = whole.run.module.state_dict()
    assert all(expected[name].equal(t) for name, t in resumed.run.module.state_dict().items())

    path = resumed.run.checkpoint
    assert path is not None
    small = CheckpointStore(path.parent).open(path)
    parameters = dict(resumed.run.module.named_parameters())
    saved = small.layout("model").keys() & parameters.keys()
    assert saved == {name for name, p in parameters.items() if p.requires_grad}
    with pytest.raises(CheckpointError, match="refers to its base"):
        export_checkpoint(path, tmp_path / "export")


@pytest.mark.e2e
def test_another_base_is_refused_before_anything_is_applied(tmp_path: Path) -> None:
    train(adapted(), tmp_path, StopsAt(3), Checkpoint(frozen="reference"))
    other = adapted(seed=5)
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    why = r"refers to its base.* of \d+ frozen parameters have other values now: `base_model"
    with pytest.raises(CheckpointError, match=why):
        train(other, tmp_path, Checkpoint(frozen="reference"), resume="auto")
    after = other.state_dict()
    assert all(after[name].cpu().equal(before[name]) for name in before)
    config = peft.LoraConfig(r=3, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    wider = peft.get_peft_model(base(), config)
    with pytest.raises(CheckpointError, match="of another shape"):
        train(wider, tmp_path, Checkpoint(), resume="auto")


def across(rank: int, strategy: str, folder: Path, steps: int, resume: str | None) -> Any:
    trainer = train(
        adapted("dora"),
        folder,
        StopsAt(steps),
        Checkpoint(frozen="reference"),
        strategy=STRATEGIES[strategy](),
        resume=resume,
        batch=2,
    )
    trainer.save_model(folder / "adapter")
    trainer.save_model(folder / "merged", merge=True)
    trainer.close()
    return rank


@pytest.mark.e2e
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_processes_write_one_adapter_and_refer_to_one_base(strategy: str, tmp_path: Path) -> None:
    run_ranks(2, across, strategy, tmp_path, 3, None)
    run_ranks(2, across, strategy, tmp_path / "again", STEPS, None)
    resumed = train(
        adapted("dora"), tmp_path, Checkpoint(frozen="reference"), resume="must", batch=4
    )
    read = peft.PeftModel.from_pretrained(base(), tmp_path / "again" / "adapter")
    assert resumed.run is not None
    # Sums over processes are rounded in another order.
    torch.testing.assert_close(logits(read), logits(resumed.run.module), rtol=1e-3, atol=1e-4)
    from transformers import AutoModelForCausalLM

    merged = AutoModelForCausalLM.from_pretrained(
        tmp_path / "again" / "merged", attn_implementation="eager"
    )
    torch.testing.assert_close(logits(merged), logits(read), rtol=1e-3, atol=1e-4)
