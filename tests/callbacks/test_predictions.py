"""Tests of the files of predictions."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers.ranks import run_ranks
from tests.helpers.toys import fit, make_trainer, toy_dataset, toy_loaders, toy_model
from trainkit import ConfigError, DataError, Trainer
from trainkit.callbacks import Evaluation, Predictions


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def table(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def test_it_writes_each_sample_once_in_order(tmp_path: Path) -> None:
    model, path = toy_model(), tmp_path / "deep" / "out.jsonl"
    trainer = make_trainer(callbacks=[Predictions(path)])
    fit(trainer, model=model)
    features, targets = toy_dataset(16, seed=1).tensors
    assert lines(path) == [
        {"index": index, "prediction": guess, "reference": target}
        for index, (guess, target) in enumerate(
            zip(model.cpu()(features).argmax(1).tolist(), targets.tolist(), strict=True)
        )
    ]
    assert [entry.name for entry in path.parent.iterdir()] == ["out.jsonl"]
    predicted = trainer.predict(model, toy_loaders()[1], outputs="classes")
    Predictions.write(tmp_path / "own.csv", predicted, targets)
    rows = table(tmp_path / "own.csv")
    assert [int(row["prediction"]) for row in rows] == [e["prediction"] for e in lines(path)]


def predict_rank(rank: int, folder: Path) -> None:
    loaders = {
        "train": toy_loaders()[0],
        "eval": {
            "odd": DataLoader(toy_dataset(11, seed=1), 2),
            "small": DataLoader(toy_dataset(1, seed=2), 2),
        },
    }
    callback = Predictions(folder / "{loader}-{step}.csv", extra=lambda i, p, r: {"ok": p == r})
    trainer = make_trainer(
        max_steps=4, callbacks=[callback, Evaluation(every_n_steps=2)], split_batches=True
    )
    fit(trainer, loaders)
    trainer.close()


@pytest.mark.e2e
def test_files_are_the_same_on_several_processes(tmp_path: Path) -> None:
    for size in (1, 2):
        run_ranks(size, predict_rank, tmp_path / str(size))
    names = ["odd-2.csv", "odd-4.csv", "small-2.csv", "small-4.csv"]
    for size in (1, 2):
        assert sorted(path.name for path in (tmp_path / str(size)).iterdir()) == names
    for name in names:
        first, second = ((tmp_path / str(size) / name).read_text() for size in (1, 2))
        assert first == second
        assert first.splitlines()[0] == "index,prediction,reference,ok"
    assert len((tmp_path / "2" / "odd-4.csv").read_text().splitlines()) == 12


def test_it_writes_every_other_evaluation(tmp_path: Path) -> None:
    callback = Predictions(tmp_path / "{epoch}.jsonl", every=2)
    fit(make_trainer(max_epochs=5, callbacks=[callback]))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2.jsonl", "4.jsonl"]


class Structured(Trainer):
    def evaluation_step(self, model: nn.Module, batch: Any) -> Any:
        inputs, targets = batch
        logits = model(inputs)
        logits[0, 0] = torch.nan
        boxes = [{"name": f"b{int(target)}"} for target in targets]
        return {"predictions": {"logits": logits, "label": boxes}, "references": targets.bool()}


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_structures_and_what_is_no_number_are_written(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"out{suffix}"
    fit(Structured(max_epochs=1, callbacks=[Predictions(path)]))
    if suffix == ".jsonl":
        first = lines(path)[0]["prediction"]
    else:
        first = json.loads(table(path)[0]["prediction"])
    assert first["logits"][0] == "NaN"
    assert first["label"]["name"] in ("b0", "b1")


class FailsLate(Trainer):
    calls = 0

    def evaluation_step(self, model: nn.Module, batch: Any) -> Any:
        self.calls += 1
        if self.calls == 8:  # one in the rehearsal, four in the first evaluation
            raise ArithmeticError
        return super().evaluation_step(model, batch)


def test_what_is_not_complete_is_not_seen(tmp_path: Path) -> None:
    path = tmp_path / "out-{step}.jsonl"
    with pytest.raises(ArithmeticError):
        fit(FailsLate(max_epochs=3, callbacks=[Predictions(path)]))
    assert [entry.name for entry in tmp_path.iterdir()] == ["out-8.jsonl"]


def test_no_figure_changes(tmp_path: Path) -> None:
    result = fit(make_trainer(max_epochs=2, callbacks=[Predictions(tmp_path / "out.csv")]))
    assert result.metrics == fit(make_trainer(max_epochs=2)).metrics


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": "out.txt"}, "must end in one of"),
        ({"path": "{rank}.csv"}, r"may hold `\{epoch\}`, `\{loader\}`, `\{step\}`"),
        ({"path": "{step.csv"}, "braces do not match"),
        ({"every": 0}, "`every` must be a whole number"),
        ({"extra": "text"}, "`extra` must be a function"),
    ],
)
def test_bad_arguments_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Predictions(**arguments)


def test_what_cannot_be_written_is_said_before_the_first_step(tmp_path: Path) -> None:
    class NoReferences(Trainer):
        def evaluation_step(self, model: nn.Module, batch: Any) -> Any:
            return {"predictions": batch[0]}

    train, held_out = toy_loaders()
    several = {"train": train, "eval": {"a": held_out, "b": held_out}}
    cases: list[Any] = [
        (make_trainer, Predictions(), (train, held_out), ConfigError, "where to write"),
        (make_trainer, Predictions(tmp_path / "a.csv"), train, ConfigError, "no evaluation loader"),
        (make_trainer, Predictions(tmp_path / "a.csv"), several, ConfigError, "{loader}"),
        (NoReferences, Predictions(tmp_path / "a.csv"), (train, held_out), DataError, "references"),
    ]
    for make, callback, loaders, kind, message in cases:
        trainer = make(max_epochs=1, callbacks=[callback])
        with pytest.raises(kind, match=message):
            fit(trainer, loaders)
        assert trainer.run.state.step == 0
    assert not list(tmp_path.iterdir())


def test_columns_must_stay_in_a_table(tmp_path: Path) -> None:
    callback = Predictions(tmp_path / "a.csv", extra=lambda i, p, r: {f"c{i}": i})
    with pytest.raises(DataError, match="the same in each line"):
        fit(make_trainer(callbacks=[callback]))
    assert not list(tmp_path.iterdir())
