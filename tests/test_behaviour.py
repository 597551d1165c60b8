"""trainkit is right in every row of the table of behaviours (`benchmarks/behaviour`)."""

import json
import subprocess
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.behaviour import __main__ as command, frameworks, rows, scored, table, toys
from benchmarks.behaviour.bench import Bench, Outcome
from benchmarks.behaviour.job import Variant
from benchmarks.behaviour.worker import NOT_OFFERED, OPTION, RIGHT, WRONG, Cell, fill, run

ROWS = rows.load()
SLOW = [pytest.param(key, marks=[] if row.quick else pytest.mark.slow) for key, row in ROWS.items()]


@pytest.mark.parametrize("key", SLOW)
def test_trainkit_is_right(key: str) -> None:
    cell = run(frameworks.load("trainkit"), ROWS[key])
    assert cell.mark == RIGHT, cell


def test_a_cell_ends_only_what_it_has_started() -> None:
    quick = next(key for key, row in ROWS.items() if row.quick)
    with subprocess.Popen(["sleep", "600"]) as other:
        try:
            run(frameworks.load("trainkit"), ROWS[quick])
            assert other.poll() is None
        finally:
            other.kill()


def test_probes_see_what_is_wrong() -> None:
    """Gradients that are summed over windows of the wrong size, a sample that comes twice."""
    from benchmarks.behaviour.rows.samples import _once

    assert not _once([{0: 0.5, 1: 0.25, 2: 0.25}], {0, 1, 2}).right
    assert not _once([{0: 0.5, 1: 0.5}, {2: 0.5, 0: 0.5}], {0, 1, 2}).right
    assert not _once([{0: 0.5, 1: 0.5}, {2: 0.5}], {0, 1, 2}).right
    assert not _once([{0: 0.5, 1: 0.5}], {0, 1, 2}).right
    assert _once([{0: 0.5, 1: 0.5}, {2: 1.0}], {0, 1, 2}).right


def test_a_switch_is_tried_where_the_default_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    trainkit = frameworks.load("trainkit")
    tried = Variant("batch=3", {"batch": 3})
    monkeypatch.setattr(type(trainkit), "variants", {"row": [tried]})

    def probe(bench: Bench) -> Outcome:
        return Outcome(bench.job().batch == 3, f"batch {bench.job().batch}")

    cell = fill(trainkit, rows.Row("row", "", "", probe, True))
    assert (cell.mark, cell.figure, cell.option) == (OPTION, "batch 2", "batch=3")
    monkeypatch.setattr(type(trainkit), "variants", {})
    assert fill(trainkit, rows.Row("row", "", "", probe, True)).mark == WRONG
    monkeypatch.setattr(type(trainkit), "left_to_users", {"row": "it is the user's"})
    assert fill(trainkit, rows.Row("row", "", "", probe, True)).mark == NOT_OFFERED


def test_the_tables_show_every_cell(tmp_path: Path) -> None:
    row = ROWS["evaluation"]
    cells = {
        ("evaluation", "trainkit"): Cell("evaluation", "trainkit", RIGHT, "4"),
        ("evaluation", "lightning"): Cell("evaluation", "lightning", WRONG, "3.6"),
    }
    names = {"trainkit": "trainkit", "lightning": "Lightning"}
    small = table.compact([row], names, cells)
    assert f"| {row.title} | yes | **no** |" in small
    versions = dict.fromkeys(names, "1.0")
    text = table.full([row], names, versions, cells, "python -m benchmarks.behaviour")
    assert small.splitlines()[2] in text
    assert "| Lightning | **no**: 3.6 |" in text
    assert row.how in text


def test_a_run_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "cells.json"
    results = command.Results(path, afresh=False)
    results.take("trainkit", {"version": "1"})
    results.take("trainkit", {"row": "nan", "framework": "trainkit", "mark": RIGHT})
    again = command.Results(path, afresh=False)
    assert again.versions == {"trainkit": "1"}
    assert set(again.cells) == {("nan", "trainkit")}
    assert not command.Results(path, afresh=True).cells
    assert json.loads(path.read_text())["cells"][0]["mark"] == RIGHT


def _warns(outputs: Tensor, targets: Tensor) -> Tensor:
    warnings.warn("`T_max` is small", stacklevel=1)
    return toys.mean(outputs, targets)


def _refuses(outputs: Tensor, targets: Tensor) -> Tensor:
    error = ValueError("this `reduction` is not known")
    error.add_note("a note, which stands last")
    raise error


def test_what_a_training_says_is_heard(tmp_path: Path) -> None:
    bench = Bench(frameworks.load("trainkit"), None, tmp_path)
    heard = bench.listen(bench.job(loss=_warns))
    assert (heard.updated, heard.errors, len(heard.tapes)) == (True, [], 1)
    assert heard.names("t_max")
    assert not heard.names("reduction")
    heard = bench.listen(bench.job(loss=_refuses))
    assert not heard.updated
    assert "`reduction` is not known" in str(heard.refusal("reduction"))
    with pytest.raises(RuntimeError, match="otherwise: ValueError"):
        heard.refusal("T_max")


def test_what_is_computed_by_hand_is_what_torchmetrics_computes() -> None:
    numbers = torch.arange(9.0)[:, None]
    for name, model, data, by_hand in (
        ("auroc", scored.Logits(9), scored.Classes(9), scored.area),
        ("iou", scored.PixelLogits(9), scored.Masks(9), scored.mean_iou),
    ):
        scores, labels = model(numbers).detach(), torch.stack([data[i][1] for i in range(9)])
        assert by_hand(scores, labels) == pytest.approx(scored.function(name)(scores, labels))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what they say of themselves while they are imported
@pytest.mark.parametrize("key", frameworks.installed())
def test_frameworks_speak_of_rows_that_exist(key: str) -> None:
    framework = frameworks.load(key)
    for named in (framework.variants, framework.not_offered, framework.left_to_users):
        assert set(named) <= set(ROWS)


def test_the_gradient_of_a_sample_is_its_weight() -> None:
    model = toys.Pick(3)
    x, y = toys.Numbers(3)[1]
    loss = toys.mean(model(x[None]), y[None])
    loss.backward()  # type: ignore[no-untyped-call]
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [0.0, 1.0, 0.0]
    toys.TAPE.__init__()  # type: ignore[misc]
