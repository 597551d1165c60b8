"""Tests of saying what the model is made of."""

import contextlib
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.helpers.ranks import run_ranks
from tests.helpers.toys import FEATURES, fit, make_trainer, toy_dataset, toy_model
from trainkit import ConfigError, Trainer
from trainkit.callbacks import ModelSummary
from trainkit.callbacks.model_summary import WIDTH, describe_output, model_table
from trainkit.strategies import FSDP
from trainkit.testing import task


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.norm(torch.tanh(self.linear(inputs)))
        return output


class Tied(nn.Module):
    """Two layers with one weight, three alike blocks, and a part that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))
        self.spare = nn.Linear(2, 2)
        self.last = nn.Linear(FEATURES, 8, bias=False)
        self.last.weight = self.first.weight
        self.first.bias.requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden @ self.last.weight


TABLE = """\
trainkit: model Tied
  module      type         output  parameters   trained
  (model)     Tied         [4, 4]         310   part
  first       Linear       [4, 8]          40   part
  blocks      ModuleList                  264   yes
    0-2       3 x Block    [4, 8]          88   yes
      linear  Linear       [4, 8]          72   yes
      norm    BatchNorm1d  [4, 8]          16   yes
  spare       Linear                        6   yes
  last        Linear                       32*  yes
  parameters  310, of which 302 trained and 8 not
  size        1.2 kB of float32; buffers 192 B of float32, 24 B of int64
  * held by a module above too (tied), and counted once in the total
"""


def _hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


def _loader(samples: int = 32) -> DataLoader[Any]:
    return DataLoader(toy_dataset(samples), batch_size=4)


@pytest.mark.parametrize("loaders", [_loader(), (_loader(), _loader(8))], ids=["train", "both"])
def test_the_table_tells_modules_outputs_and_sizes(
    loaders: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Tied()
    fit(make_trainer(callbacks=[ModelSummary()], max_steps=2), loaders, model)
    assert capsys.readouterr().out == TABLE
    assert _hooks(model) == 0


@pytest.mark.parametrize(("depth", "rows"), [(0, 1), (1, 5), (2, 6), (9, 8)])
def test_depth_is_how_far_down_it_looks(depth: int, rows: int) -> None:
    table = model_table(Tied(), depth, {})
    assert table.index("  parameters  310") > 0
    assert len(table.splitlines()) - 5 + (depth == 0) == rows


def test_long_names_are_cut_to_80_columns() -> None:
    class AClassWithARatherLongNameThatNobodyWouldWrite(nn.Linear):
        pass

    inner = nn.Module()
    inner.add_module("a_rather_long_name_that_somebody_did_write" * 2, nn.Linear(3, 50_000))
    inner.add_module("b", AClassWithARatherLongNameThatNobodyWouldWrite(3, 3))
    lines = model_table(nn.Sequential(nn.Sequential(inner)), 4, {}).splitlines()
    assert max(map(len, lines)) <= WIDTH
    assert any("a_rather_long_nam.." in line and "..  Linear" in line for line in lines)
    assert any("AClassWithARatherLon..  " in line for line in lines)


def test_a_module_in_two_places_is_shown_as_shared() -> None:
    model = nn.Module()
    model.one = model.two = nn.Sequential(nn.Linear(2, 2))
    # Once by its first name, as torch names it.
    assert "6*" not in model_table(model, 1, {})
    model.three = nn.Sequential(model.one[0], nn.Linear(2, 2))
    assert "12*" in model_table(model, 1, {})


def test_outputs_of_all_kinds_are_described() -> None:
    one, two = torch.ones(2, 3), torch.ones(4)
    outputs = [one, (one, (two,)), {"loss": two, "logits": one}, {"x": None, "y": [one]}, None]
    texts = [describe_output(output) for output in outputs]
    assert texts == ["[2, 3]"] * 4 + [""]


def test_a_step_that_calls_only_parts_is_shown_after_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class PartsTrainer(Trainer):
        def training_step(self, model: nn.Module, batch: Any) -> Tensor:
            run: Any = self.run
            loss: Tensor = run.module[0](batch[0]).square().mean()
            return loss

    model = toy_model()
    trainer = PartsTrainer(max_steps=2, callbacks=[ModelSummary()])
    fit(trainer, _loader(), model)
    out = capsys.readouterr().out
    assert out.count("trainkit: model") == 1
    (called,) = (line for line in out.splitlines() if "[4, 8]" in line)
    assert called.split()[:2] == ["0", "Linear"]
    assert _hooks(model) == 0


def test_a_failure_leaves_no_hook() -> None:
    class Raises(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            raise ArithmeticError("in the first forward")

    model = nn.Sequential(toy_model(), Raises())
    with pytest.raises(ArithmeticError):
        fit(make_trainer(callbacks=[ModelSummary()]), _loader(), model)
    assert _hooks(model) == 0


def test_a_compiled_model_is_shown_without_outputs(capsys: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(callbacks=[ModelSummary()], compile={"backend": "eager"}, max_steps=1)
    fit(trainer, _loader())
    out = capsys.readouterr().out
    assert "Linear" in out
    assert "[4" not in out


@pytest.mark.parametrize("depth", [-1, 1.0, None, True])
def test_bad_arguments_are_refused(depth: Any) -> None:
    with pytest.raises(ConfigError, match="`depth` must be a whole number from 0 on"):
        ModelSummary(depth)


def _sharded(rank: int, meta: bool) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        trainer = Trainer(max_steps=1, callbacks=[ModelSummary()], strategy=FSDP())
        with torch.device("meta" if meta else "cpu"):
            model = task.Network()
        task.fit(trainer, model, task.loaders(6))
        trainer.close()
    return out.getvalue()


@pytest.mark.e2e
@pytest.mark.parametrize("meta", [False, True], ids=["real", "meta"])
def test_a_sharded_model_is_shown_whole(meta: bool) -> None:
    first, second = run_ranks(2, _sharded, meta)
    assert second == ""
    assert "trainkit: model Network\n" in first
    assert "  0-1    2 x Linear" in first
    total = 6 * 16 + 16 + 2 * (16 * 16 + 16) + 16 * 3 + 3
    assert f"  parameters  {total}, of which {total} trained and 0 not\n" in first
    assert "  sharded     of the parameters" in first
