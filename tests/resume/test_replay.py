"""A step made once more: bit-equal to the recorded run, and where a NaN in it came from."""

import json
import re
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.cli.launcher import run
from tests.helpers.ranks import run_ranks
from tests.helpers.toys import FEATURES, make_trainer, toy_dataset
from trainkit import ConfigError
from trainkit.callbacks import Checkpoint, Journal, NaNGuard
from trainkit.cli.main import _parser, main
from trainkit.cli.replay import _command as command_of
from trainkit.journal import JOURNAL, read
from trainkit.training import run_parts

OPTIONS: dict[str, Any] = {
    "optimizer": partial(torch.optim.AdamW, lr=0.01),
    "loss_fn": nn.CrossEntropyLoss(),
    "lr_scheduler": "cosine",
}


class Poisoned(nn.Module):
    """Makes a NaN of one sample, whose first feature is `at`."""

    def __init__(self, at: float) -> None:
        super().__init__()
        self.at = at
        self.scale = nn.Linear(8, 8)

    def forward(self, x: Tensor, marks: Tensor) -> Tensor:
        bad = (marks == self.at)[:, None]
        return torch.where(bad, torch.nan, self.scale(x))


class Model(nn.Module):
    """Has dropout, so that random streams count, and a layer that may be poisoned."""

    def __init__(self, at: float = -1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.drop = nn.Linear(FEATURES, 8), nn.Dropout(0.3)
        self.middle, self.last = Poisoned(at), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.middle(self.drop(torch.tanh(self.first(x))), x[:, 0]))
        return outputs


def loader(bad: int | None = None) -> Any:
    data = toy_dataset()
    if bad is not None:
        data.tensors[0][bad, 1] = torch.inf
    return DataLoader(data, batch_size=4, shuffle=True)


def trainer(folder: Path, *callbacks: Any, **settings: Any) -> Any:
    callbacks = callbacks or (Checkpoint(every_n_steps=5, keep_last=None),)
    return make_trainer(callbacks=callbacks, output_dir=folder, max_epochs=3, **settings)


def files(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file() and "replay" not in path.parts)
    return {str(path): path.read_bytes() for path in found}


def test_a_step_is_bit_equal_and_nothing_of_the_run_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(tmp_path).fit(Model(), loader(), **OPTIONS)
    before, record = files(tmp_path), read(tmp_path).record_of(14)
    assert record is not None
    result = trainer(tmp_path).replay(Model(), loader(), step=14, **OPTIONS)
    assert (result.step, result.is_equal, result.fault) == (14, True, None)
    assert result.checkpoint == str(tmp_path / "checkpoints" / "step-00000010")
    assert result.loss == record.loss
    assert files(tmp_path) == before
    about = json.loads((result.folder / "process-0.json").read_text())
    (batch,) = about["micro_batches"]
    assert (batch["first"], batch["last"]) == (record.first, record.stop - 1)
    inputs = load_file(result.folder / "process-0.safetensors")[batch["data"][0]]
    assert torch.equal(inputs, toy_dataset().tensors[0][batch["indices"]])
    modules = [row["module"] for row in about["modules"]]
    assert modules == ["first", "drop", "middle.scale", "middle", "last", "", ""]
    assert about["parameters"]["first.weight"]["gradient"]["std"] > 0
    assert "bit-equal to the recorded run" in capsys.readouterr().out


def test_a_step_before_the_oldest_checkpoint_is_made_from_the_start(tmp_path: Path) -> None:
    trainer(tmp_path, Checkpoint()).fit(Model(), loader(), **OPTIONS)
    result = trainer(tmp_path, Checkpoint()).replay(Model(), loader(), step=3, **OPTIONS)
    assert (result.checkpoint, result.is_equal) == (None, True)


def test_another_run_is_not_called_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(tmp_path).fit(Model(), loader(), **OPTIONS)
    other = loader()
    other.dataset.tensors[1].neg_().add_(1)  # other labels
    result = trainer(tmp_path).replay(Model(), other, step=14, **OPTIONS)
    assert (result.is_equal, result.differs_from) == (False, 11)
    assert "NOT the recorded run: the loss is another one from step 11" in capsys.readouterr().out


def marked(sample: int) -> float:
    return float(toy_dataset().tensors[0][sample, 0])


def test_the_module_and_the_sample_that_make_a_nan_are_named(tmp_path: Path) -> None:
    class Late(Model):
        """Is poisoned in the second epoch only."""

        def forward(self, x: Tensor) -> Tensor:
            self.middle.at = marked(17) if maker.run.state.epoch == 1 else -1.0
            return super().forward(x)

    maker = trainer(tmp_path)
    maker.fit(Late(), loader(), **OPTIONS)
    first = next(record for record in read(tmp_path).records if record.is_bad)
    maker = trainer(tmp_path)
    result = maker.replay(Late(), loader(), until_nonfinite=True, **OPTIONS)
    assert result.step == first.step
    assert result.fault is not None
    assert (result.fault.kind, result.fault.module) == ("forward", "middle")
    assert result.fault.indices == [17]


def test_a_bad_sample_is_named(tmp_path: Path) -> None:
    trainer(tmp_path).fit(Model(), loader(bad=9), **OPTIONS)
    result = trainer(tmp_path).replay(Model(), loader(bad=9), until_nonfinite=True, **OPTIONS)
    assert result.fault is not None
    assert (result.fault.kind, result.fault.indices) == ("batch", [9])


def test_where_all_is_finite_it_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer(tmp_path).fit(Model(), loader(), **OPTIONS)
    result = trainer(tmp_path).replay(Model(), loader(), step=11, until_nonfinite=True, **OPTIONS)
    assert (result.fault, result.step, result.is_equal) == (None, 24, True)
    assert "all was finite until the end, step 24" in capsys.readouterr().out


def test_an_error_that_ended_the_run_is_explained(tmp_path: Path) -> None:
    def spoiled() -> Any:
        data = loader()
        data.dataset.tensors[1][20] = 7  # no such class
        return data

    with pytest.raises(IndexError):
        trainer(tmp_path, Checkpoint(every_n_steps=1), NaNGuard()).fit(
            Model(), spoiled(), **OPTIONS
        )
    result = trainer(tmp_path, Checkpoint(every_n_steps=1), NaNGuard()).replay(
        Model(), spoiled(), until_nonfinite=True, **OPTIONS
    )
    assert result.fault is not None
    assert (result.fault.kind, result.fault.module) == ("error", "training_step")
    assert result.fault.indices == [20]
    assert result.step == read(tmp_path).records[-1].step + 1


def test_what_cannot_be_replayed_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = trainer(tmp_path / "plain", Journal())
    plain.fit(Model(), loader(), **OPTIONS)
    with pytest.raises(ConfigError, match="holds no checkpoint of this run"):
        plain.replay(Model(), loader(), step=3, **OPTIONS)
    made = trainer(tmp_path / "made")
    made.fit(Model(), loader(), **OPTIONS)
    for step in (0, 26):
        words = rf"`step` is {step}, but the journal .* counts from 1 and ends with step 24"
        with pytest.raises(ConfigError, match=words if step else "from 1 on, but is 0"):
            made.replay(Model(), loader(), step=step, **OPTIONS)
        assert main(["replay", str(tmp_path / "made"), "--step", str(step)]) == 1
        told = capsys.readouterr()
        assert re.search(words, told.err)
        assert "starting" not in told.out
    with pytest.raises(ConfigError, match="`process` is 1, but the run has 1 process"):
        made.replay(Model(), loader(), step=3, process=1, **OPTIONS)
    with pytest.raises(ConfigError, match="A replay needs `step`"):
        made.replay(Model(), loader(), **OPTIONS)
    with pytest.raises(ConfigError, match="the trainer has none"):
        make_trainer().replay(Model(), loader(), step=3, **OPTIONS)
    (tmp_path / "made" / JOURNAL).unlink()
    with pytest.raises(ConfigError, match="holds no journal"):
        made.replay(Model(), loader(), step=3, **OPTIONS)


def on_rank(rank: int, folder: Path) -> list[Any]:
    def make() -> Any:
        return trainer(folder)

    def train(call: str, **options: Any) -> Any:
        made = make()
        return getattr(made, call)(Model(marked(17)), loader(), **OPTIONS, **options)

    train("fit")
    result = train("replay", until_nonfinite=True)
    fault = result.fault
    return [result.step, result.is_equal, fault.kind, fault.process, fault.module, fault.indices]


def test_the_process_is_named(tmp_path: Path) -> None:
    one, other = run_ranks(2, on_rank, tmp_path)
    assert one == other
    step = next(record.step for record in read(tmp_path).records if record.is_bad)
    assert one[0] <= step
    assert one[2] == "forward"
    assert one[4:] == ["middle", [17]]
    assert {path.name for path in (tmp_path / "replay").rglob("process-*")} == {
        f"process-{rank}.{kind}" for rank in range(2) for kind in ("json", "safetensors")
    }


def test_a_program_is_left_after_the_replay_it_was_started_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer(tmp_path / "run").fit(Model(), loader(), **OPTIONS)
    asked = {"run": str(tmp_path / "run"), "step": 7, "leaves": str(tmp_path / "answer")}
    monkeypatch.setenv("TRAINKIT_REPLAY", json.dumps(asked))
    number = read(tmp_path / "run").header["start"]["fit"]
    monkeypatch.setattr(run_parts, "_fits", count(number + 1))
    with pytest.raises(ConfigError, match=f"`fit` number {number} of its program, and this is"):
        trainer(tmp_path / "run").fit(Model(), loader(), **OPTIONS)
    monkeypatch.setattr(run_parts, "_fits", count(number - 1))
    with pytest.raises(ConfigError, match=r"and a replay of `.*/run` was asked for"):
        trainer(tmp_path / "other").fit(Model(), loader(), **OPTIONS)
    with pytest.raises(SystemExit) as end:
        trainer(tmp_path / "run").fit(Model(), loader(), **OPTIONS)
    assert end.value.code == 0
    assert json.loads((tmp_path / "answer").read_text()) == {"is_equal": True}


def started(*command: str, processes: int = 1, **start: Any) -> list[str]:
    run = {"processes": processes, "device": "cpu", "strategy": "ddp", "precision": "fp32"}
    begin = {"command": [*command], "launched": processes > 1, "threads": 1, "folder": "/", **start}
    return command_of({"run": run, "start": begin}, [])


def test_the_command_is_that_of_the_run() -> None:
    assert started("python", "-u", "a.py", "-x") == ["python", "-u", "a.py", "-x"]
    launched = started("python", "-X", "dev", "-u", "a.py", "-x", processes=2)
    assert launched[:4] == ["python", "-m", "trainkit.cli", "launch"]
    assert launched[-2:] == ["a.py", "-x"]
    assert launched[launched.index("--num_processes") + 1] == "2"
    assert started("python", "-m", "a", processes=2)[-2:] == ["-m", "a"]
    with pytest.raises(ConfigError, match="does not hold the secrets of the command"):
        started("python", "a.py", "--token=(hidden)")
    with pytest.raises(ConfigError, match="has no script"):
        started("python", "-c", "code", processes=2)
    with pytest.raises(ConfigError, match="in a notebook or at a prompt"):
        command_of({"start": {}}, [])


SCRIPT = """
import sys
from functools import partial
from itertools import count
import torch
from trainkit import Trainer
from trainkit.callbacks import Checkpoint

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 2))
data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.arange(32) % 2)
trainer = Trainer(max_epochs=2, output_dir=sys.argv[1], callbacks=[Checkpoint()])
trainer.fit(
    model,
    torch.utils.data.DataLoader(data, batch_size=4, shuffle=True),
    optimizer=partial(torch.optim.AdamW, lr=0.01),
    loss_fn=torch.nn.CrossEntropyLoss(),
)
trainer.close()
print("the end of the program")
"""


@pytest.mark.e2e
def test_the_command_starts_the_processes_again(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    said = run("launch", "--num_processes", 2, "--cpu", "train.py", "run", folder=tmp_path)
    assert said.count("the end of the program") == 2
    said = run("replay", "run", "--step", 6, folder=tmp_path, inside=2)
    assert "bit-equal to the recorded run" in said
    assert said.count("the end of the program") == 2  # of before
    found = {path.name for path in (tmp_path / "run" / "replay" / "step-00000006").iterdir()}
    assert {"replay.json", "process-0.json", "process-1.json"} <= found
    assert not [*tmp_path.rglob(".trainkit-replay-*")]


def test_a_command_behind_two_dashes_is_taken_as_it_is() -> None:
    words = ["replay", "runs/a", "--step", "3", "--", "python", "train.py", "--lr", "1", "--", "x"]
    options = _parser("replay").parse_args(words)
    assert (options.folder, options.step) == (Path("runs/a"), 3)
    assert options.command == ["python", "train.py", "--lr", "1", "--", "x"]
