"""Adapters on a base in 4 or 8 bits, as bitsandbytes holds it: trained, saved, gone on from."""

import shutil
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.helpers.needs import late
from tests.helpers.tiers import with_few
from tests.system.programs import quantized
from trainkit import Accelerator, CheckpointError, ConfigError, Trainer
from trainkit.basics.quantized import hold_quantized, made_by
from trainkit.callbacks import Checkpoint, Evaluation
from trainkit.checkpoint import CheckpointStore

peft, bitsandbytes = late("peft"), late("bitsandbytes")

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning:transformers",
    "ignore::FutureWarning:peft",
    "ignore:MatMul8bitLt:UserWarning",
)
BITS = pytest.mark.parametrize("bits", [4, 8])
BITS_BY_TIER = pytest.mark.parametrize("bits", with_few([4], [4, 8]))
FROZEN = pytest.mark.parametrize("frozen", ["save", "reference"])
Frozen = Literal["save", "reference"]


def rows() -> DataLoader[Any]:
    tokens = torch.randint(0, 64, (16, 8), generator=torch.Generator().manual_seed(3))
    data: Any = [{"input_ids": row, "labels": row} for row in tokens]
    return DataLoader(data, 4, shuffle=True)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def fit(model: nn.Module, folder: Path, *, frozen: Frozen = "reference") -> Trainer:
    """Train, with an evaluation after the first step and a checkpoint after each second one."""

    saves = Checkpoint(every_n_steps=2, keep_last=None, frozen=frozen)
    trainer = Trainer(
        max_steps=4, callbacks=[saves, Evaluation(every_n_steps=1)], output_dir=folder
    )
    trainer.fit(model, (rows(), rows()), optimizer=adam(model), resume="auto")
    return trainer


def newest(folder: Path) -> Path:
    return max((folder / "checkpoints").glob("step-*"))


def drop_newest(folder: Path) -> None:
    """Leave a run as one that was killed after its first checkpoint."""
    shutil.rmtree(newest(folder))


def adapters(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first.keys() | second.keys())


@BITS_BY_TIER
@FROZEN
def test_a_run_goes_on_as_if_it_had_never_stopped(
    bits: int, frozen: Frozen, tmp_path: Path
) -> None:
    whole = quantized(bits)
    begun = adapters(whole)
    base = {n: v.clone() for n, v in whole.state_dict().items() if n not in begun}
    fit(whole, tmp_path, frozen=frozen)
    assert not same(begun, adapters(whole))
    assert same(base, {n: v for n, v in whole.state_dict().items() if n not in begun})
    drop_newest(tmp_path)
    again = quantized(bits)
    fit(again, tmp_path, frozen=frozen)
    assert same(adapters(whole), adapters(again))
    assert same(base, {n: v for n, v in again.state_dict().items() if n not in begun})


@BITS
def test_what_refers_to_its_base_holds_nothing_of_it(bits: int, tmp_path: Path) -> None:
    model = quantized(bits)
    fit(model, tmp_path)
    path = newest(tmp_path)
    assert set(CheckpointStore(path.parent).open(path).layout("model")) == set(adapters(model))


@BITS
def test_an_evaluation_lets_the_base_and_its_gradients_be(bits: int) -> None:
    model, batch = quantized(bits), next(iter(rows()))
    trainer = Trainer(max_steps=1)
    trainer.evaluate(model, rows())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.evaluate(model, rows())
    assert same(before, dict(model.state_dict()))
    model(**batch).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_a_base_that_an_evaluation_has_packed_anew_is_refused() -> None:
    model, batch = quantized(4), next(iter(rows()))
    with torch.no_grad():
        model.eval()(**batch)
    if not any(getattr(p.quant_state, "packing_format_for_cpu", False) for p in in_4_bits(model)):
        pytest.skip("this CPU packs nothing anew")
    with pytest.raises(ConfigError, match=r"q_proj.* was packed anew by a forward outside"):
        Trainer(max_steps=1).fit(model, rows(), optimizer=adam(model))


def in_4_bits(model: nn.Module) -> list[Any]:
    return [p for p in model.parameters() if type(p).__name__ == "Params4bit"]


def pretended_source(model: Any, source: str) -> nn.Module:
    model.config._name_or_path = model.base_model.model.name_or_path = source
    return model  # type: ignore[no-any-return]


@BITS
def test_a_base_is_compared_by_its_source_and_settings_where_its_bits_differ(
    bits: int, tmp_path: Path
) -> None:
    def other_bits(model: nn.Module) -> nn.Module:
        for name, p in model.named_parameters():
            if name in made_by(model):
                p.data[0] += 1
        return model

    fit(pretended_source(quantized(bits), "a/base"), tmp_path)
    drop_newest(tmp_path)
    fit(pretended_source(other_bits(quantized(bits)), "a/base"), tmp_path)
    drop_newest(tmp_path)
    with pytest.raises(CheckpointError, match=r"refers to its base `a/base`"):
        fit(pretended_source(other_bits(quantized(bits)), "another/base"), tmp_path)
    with pytest.raises(CheckpointError, match="parameter of another shape"):
        fit(pretended_source(quantized(12 - bits), "a/base"), tmp_path)


@BITS
def test_a_loop_of_ones_own_saves_and_loads_it(bits: int, tmp_path: Path) -> None:
    model = quantized(bits)
    accelerator = Accelerator()
    prepared, optimizer, loader = accelerator.prepare(model, adam(model), rows())
    for batch in loader:
        accelerator.backward(prepared(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    accelerator.save_state(tmp_path / "state")
    other = quantized(bits)
    accelerator = Accelerator()
    accelerator.prepare(other, adam(other), rows())
    accelerator.load_state(tmp_path / "state")
    assert same(kept, dict(other.state_dict()))


def test_scales_are_loaded_with_the_weights_that_they_are_of() -> None:
    model, other = quantized(4), quantized(4)
    for each in (model, other):
        hold_quantized(each)
    for p in in_4_bits(other):
        p.data[0] += 1
        p.quant_state.offset = p.quant_state.offset * 2
    model.load_state_dict(other.state_dict())
    batch = next(iter(rows()))
    assert torch.equal(model(**batch).loss, other(**batch).loss)
