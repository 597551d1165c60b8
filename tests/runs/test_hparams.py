"""Hyperparameters: what is taken, what is refused, and where they are recorded."""

import json
import math
import re
from argparse import Namespace
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers.ranks import run_ranks
from tests.helpers.toys import fit, make_trainer
from trainkit import ConfigError
from trainkit.basics.hparams import changed_hparams, flat, plain
from trainkit.callbacks import Checkpoint, JSONLLogger
from trainkit.checkpoint import CheckpointStore
from trainkit.inspect.report.records import read_run


class Kind(Enum):
    ADAM = "adam"
    OTHER = object()


class Pair(NamedTuple):
    x: int
    y: int


@dataclass
class Optimizer:
    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.999)


@dataclass
class Settings:
    optimizer: Optimizer = field(default_factory=Optimizer)
    layers: list[int] = field(default_factory=lambda: [8, 2])
    resume: str | None = None


def _endless() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["self"] = found
    return found


NESTED = {"optimizer": {"lr": 0.1, "betas": [0.9, 0.999]}, "layers": [8, 2], "resume": None}


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        (None, {}),
        (Settings(), NESTED),
        (Namespace(a=Namespace(b=1), c=Optimizer().lr), {"a": {"b": 1}, "c": 0.1}),
        (SimpleNamespace(a=True), {"a": True}),
        ({"kind": Kind.ADAM, "other": Kind.OTHER}, {"kind": "adam", "other": "OTHER"}),
        ({"p": Path("a/b"), "d": torch.float16}, {"p": "a/b", "d": "torch.float16"}),
        ({"on": torch.device("cpu"), "r": range(2)}, {"on": "cpu", "r": [0, 1]}),
        ({"n": np.float32(0.5), "t": torch.tensor(2.5)}, {"n": 0.5, "t": 2.5}),
        ({"pair": Pair(1, 2), "i": np.int64(3)}, {"pair": {"x": 1, "y": 2}, "i": 3}),
    ],
)
def test_what_is_taken_is_plain(given: Any, taken: Any) -> None:
    values = plain(given)
    assert values == taken
    assert json.loads(json.dumps(values)) == values


def test_omegaconf_is_taken_with_what_it_refers_to() -> None:
    omegaconf = pytest.importorskip("omegaconf")
    given = omegaconf.OmegaConf.create({"lr": 0.1, "decay": "${lr}", "sizes": [1, {"a": "${lr}"}]})
    assert plain(given) == {"lr": 0.1, "decay": 0.1, "sizes": [1, {"a": 0.1}]}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"loss": nn.functional.mse_loss}, "`hparams.loss` is of the type `function`, which"),
        ({"model": {"act": nn.ReLU}}, "`hparams.model.act` is of the type `type`, which"),
        ({"l": [1, {"m": nn.ReLU()}]}, "`hparams.l[1].m` is of the type `torch.nn.modules.act"),
        ({"w": torch.ones(3)}, "`hparams.w` is of the type `torch.Tensor`"),
        ({"w": np.ones(3)}, "`hparams.w` is of the type `numpy.ndarray`"),
        ({"s": {1, 2}}, "`hparams.s` is of the type `set`"),
        ({"layers": {0: 8}}, "`hparams.layers` has the key 0 of the type `int`"),
        ({"a.b": 1, "a": {"b": 2}}, "`hparams` says `a.b` twice"),
        ([1], "`hparams` must be a mapping, a dataclass or a namespace, but is [1]"),
        ("lr=1", "must be a mapping"),
        (_endless(), "`hparams` holds itself"),
        (Settings, "`hparams` is of the type `type`"),
    ],
)
def test_what_cannot_be_written_is_named_by_key_and_type(given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        make_trainer(hparams=given)


def test_secrets_are_not_recorded() -> None:
    secret = {"api_key": "x", "hub_token": "x", "aws": {"secret": "x", "password": "x"}}
    kept = {"max_tokens": 5, "tokenizer": "gpt2", "eos_token": "</s>", "key": "c"}
    values = flat(plain(secret | kept))
    assert {name for name, value in values.items() if value == "(hidden)"} == {
        *("api_key", "hub_token", "aws.secret", "aws.password")
    }


def test_what_has_no_nesting_gets_dotted_names_and_lists_as_text() -> None:
    values = {"a": {"b": {"c": 1}, "empty": {}}, "l": [1, {"x": math.nan}], "n": None}
    assert flat(values) == {"a.b.c": 1, "a.empty": "{}", "l": '[1, {"x": "NaN"}]', "n": None}
    assert changed_hparams({"a": {"b": 1}, "x": 1}, {"a": {"b": 2}, "y": 1}) == [
        "`a.b` was 1 and is 2",
        "`x` was 1 and is not set",
        "`y` was not set and is 1",
    ]


def _train(folder: Path, hparams: Any, **arguments: Any) -> None:
    callbacks = [JSONLLogger(), Checkpoint(keep_last=None)]
    epochs = {"max_epochs": 2, "log_every_n_steps": 4}
    fit(
        make_trainer(callbacks=callbacks, hparams=hparams, output_dir=folder, **epochs), **arguments
    )


def test_they_are_in_checkpoints_events_and_the_report(tmp_path: Path) -> None:
    _train(tmp_path, Settings())
    newest = CheckpointStore(tmp_path / "checkpoints").checkpoints()[-1]
    assert newest.manifest.metadata["hparams"] == NESTED
    start = json.loads((tmp_path / "metrics.events.jsonl").read_text().splitlines()[0])
    assert start["hparams"] == NESTED
    assert read_run(tmp_path).facts["hparams"] == NESTED


def test_a_resume_says_which_are_others_now(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _train(tmp_path, {"lr": 0.1, "a": {"b": math.inf}})
    capsys.readouterr()
    first = CheckpointStore(tmp_path / "checkpoints").checkpoints()[0].path
    _train(tmp_path, {"lr": 0.2, "a": {"b": math.inf}}, resume=first)
    told = capsys.readouterr().out
    assert "trainkit: other hyperparameters are recorded now: `lr` was 0.1 and is 0.2." in told
    assert read_run(tmp_path).facts["hparams"] == {"lr": 0.2, "a": {"b": "Infinity"}}


def _on_two(rank: int, folder: Path) -> None:
    trainer = make_trainer(
        callbacks=[JSONLLogger(), Checkpoint()], hparams={"rank": rank}, output_dir=folder
    )
    fit(trainer)
    trainer.close()


def test_those_of_the_main_process_are_recorded(tmp_path: Path) -> None:
    run_ranks(2, _on_two, tmp_path)
    assert read_run(tmp_path).facts["hparams"] == {"rank": 0}
    newest = CheckpointStore(tmp_path / "checkpoints").checkpoints()[-1]
    assert newest.manifest.metadata["hparams"] == {"rank": 0}
