"""`trainkit diff` says where two runs part, and why."""

import json
import math
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from tests.helpers.ranks import run_ranks
from tests.helpers.s3 import S3
from trainkit import Callback, Combined, Run, StepResult, Trainer
from trainkit.callbacks import Checkpoint, Journal
from trainkit.callbacks._support import run_facts
from trainkit.cli.diff import _differences
from trainkit.cli.main import main

STEPS = 12


class FlipBit(Callback):
    """Flips a bit of a weight after a step, as memory that fails does."""

    def __init__(self, step: int, bit: int = 20) -> None:
        self.step, self.bit = step, bit

    @override
    def on_step_end(self, run: Run, result: StepResult) -> None:
        if run.state.step == self.step:
            with torch.no_grad():
                run.module.get_parameter("2.weight").view(torch.int32)[0, 3] ^= 1 << self.bit


def train(
    folder: Path,
    *more: Callback,
    dropout: float = 0.1,
    shuffle: bool = True,
    lr: float = 1e-2,
    every: int | None = 4,
    resume: str | None = None,
    **options: Any,
) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(dropout), nn.Linear(8, 1), nn.Flatten(0))
    inputs = torch.randn(30, 6, generator=torch.Generator().manual_seed(1))
    saves = [Journal()] if every is None else [Checkpoint(every_n_steps=every, keep_last=None)]
    trainer = Trainer(
        **{"max_steps": STEPS, **options}, output_dir=folder, callbacks=[*more, *saves]
    )
    trainer.fit(
        model,
        DataLoader(TensorDataset(inputs, inputs.sum(1)), batch_size=4, shuffle=shuffle),
        optimizer=partial(torch.optim.AdamW, lr=lr),
        loss_fn=nn.MSELoss(),
        resume=resume,
        schedule=None if resume is None else "keep",
    )
    return folder


@pytest.fixture
def diff(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command; return its exit code and what it printed."""

    def run(*arguments: object) -> tuple[int, str]:
        capsys.readouterr()
        code = main(["diff", *map(str, arguments)])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


def test_equal_runs_are_bit_equal(tmp_path: Path, diff: Any) -> None:
    a, b = train(tmp_path / "a"), train(tmp_path / "b", log_every_n_steps=5)
    code, text = diff(a, b)
    assert code == 0
    assert "Bit-equal over 12 windows." in text
    assert "The checkpoints of step 12 are equal: parameters, optimizer, random streams." in text
    assert "What changed nothing: settings: log_every_n_steps: 50 in A, 5 in B." in text


def test_a_resumed_run_is_equal_to_one_that_was_never_stopped(tmp_path: Path, diff: Any) -> None:
    a = train(tmp_path / "a")
    train(tmp_path / "b", max_steps=8)
    b = train(tmp_path / "b", resume="must")
    assert diff(a, b)[0] == 0


def found(a: Path, b: Path, diff: Any, code: int = 1) -> dict[str, Any]:
    ended, text = diff(a, b, "--json")
    assert ended == code, text
    result: dict[str, Any] = json.loads(text)
    return result


def test_a_changed_seed_is_named_and_what_follows_from_it(tmp_path: Path, diff: Any) -> None:
    a, b = train(tmp_path / "a"), train(tmp_path / "b", seed=1)
    result = found(a, b, diff)
    assert result["equal"] == 0
    assert result["first"][0]["step"] == 1
    assert result["causes"] == [
        {"kind": "settings", "text": "seed: 0 in A, 1 in B."},
        {"kind": "data", "text": "the samples come in another order up to step 4."},
    ]
    assert "Likely cause: settings: seed: 0 in A, 1 in B." in diff(a, b)[1]


def test_a_changed_dropout_is_named(tmp_path: Path, diff: Any) -> None:
    a, b = train(tmp_path / "a"), train(tmp_path / "b", dropout=0.2)
    (cause,) = found(a, b, diff)["causes"]
    assert cause["kind"] == "model"
    assert "Dropout(p=0.1, inplace=False): 1 in A, 0 in B" in cause["text"]
    assert "Dropout(p=0.2, inplace=False): 0 in A, 1 in B" in cause["text"]


def test_a_changed_order_is_named(tmp_path: Path, diff: Any) -> None:
    a, b = train(tmp_path / "a"), train(tmp_path / "b", shuffle=False)
    (cause,) = found(a, b, diff)["causes"]
    assert cause["kind"] == "data"
    assert "sampler: RandomSampler in A, SequentialSampler in B" in cause["text"]


def test_files_of_code_that_differ_are_named_without_their_digests(
    tmp_path: Path, diff: Any
) -> None:
    a, b = train(tmp_path / "a", every=None), train(tmp_path / "b", every=None)
    journal = b / "journal.txt"
    header, *windows = journal.read_text().splitlines(keepends=True)
    known = json.loads(header)
    known["files"] = dict.fromkeys(["/x/new.py", *known["files"], "/x/newer.py"], "0")
    journal.write_text("".join([json.dumps(known) + "\n", *windows]))
    assert re.search(r"What changed nothing: code: (`\w+.py`, )+`\w+.py`.* differ\.", diff(a, b)[1])


class Quickens(Callback):
    @override
    def on_step_start(self, run: Run) -> None:
        run.optimizer.param_groups[0]["lr"] = 2e-2 if run.state.step >= 5 else 1e-2


def several(folder: Path, lr: float = 1e-2, policy: str = "min", count: int = 4) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1), nn.Flatten(0))
    inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1)), batch_size=4)
    Trainer(max_steps=6, output_dir=folder, callbacks=[Journal()]).fit(
        model,
        Combined({"a": loader, "b": DataLoader(loader.dataset, batch_size=count)}, policy),
        optimizer={n: torch.optim.SGD(model[i].parameters(), lr=lr) for i, n in enumerate("xy")},
        loss_fn=nn.MSELoss(),
    )
    return folder


def test_what_differs_in_several_optimizers_and_loaders_is_named_alone(
    tmp_path: Path, diff: Any
) -> None:
    a, b = several(tmp_path / "a"), several(tmp_path / "b", lr=2e-2)
    (cause,) = found(a, b, diff)["causes"]
    assert cause == {
        "kind": "settings",
        "text": "optimizer.x.lr: 0.01 in A, 0.02 in B; optimizer.y.lr: 0.01 in A, 0.02 in B.",
    }
    cause, *_ = found(a, several(tmp_path / "c", policy="sequential"), diff)["causes"]
    assert cause["kind"] == "data"
    assert "training loaders: min of `a` of 16 samples, 4 in a window; " in cause["text"]
    assert "in A, sequential of `a`" in cause["text"]


def test_a_rate_that_is_another_one_later_is_named(tmp_path: Path, diff: Any) -> None:
    a, b = train(tmp_path / "a"), train(tmp_path / "b", Quickens())
    result = found(a, b, diff)
    assert result["first"][0]["step"] == 7
    assert {
        "kind": "optimizer",
        "text": "groups[0].lr: 0.01 in A, 0.02 in B, in the checkpoints of step 8.",
    } in result["causes"]


def test_a_changed_library_is_named_before_what_it_did(
    tmp_path: Path, diff: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = train(tmp_path / "a")
    versions = {**run_facts._versions(), "numpy": "9.9"}
    monkeypatch.setattr(run_facts, "_versions", lambda: versions)
    b = train(tmp_path / "b", FlipBit(4, bit=3))  # as another kernel would
    environment, parameters = found(a, b, diff)["causes"]
    assert environment["kind"] == "environment"
    assert environment["text"].endswith(" in A, 9.9 in B.")
    assert parameters["kind"] == "parameters"


def test_a_flipped_bit_is_found_in_its_tensor(tmp_path: Path, diff: Any) -> None:
    a, b = train(tmp_path / "a"), train(tmp_path / "b", FlipBit(8))
    result = found(a, b, diff)
    assert result["equal"] == 8
    (cause,) = result["causes"]
    assert cause["kind"] == "parameters"
    assert "`2.weight` differs in 1 of 8 elements, by at most 0." in cause["text"]
    assert "in the checkpoints of step 8." in cause["text"]


def test_a_flip_between_two_checkpoints_is_narrowed_down(tmp_path: Path, diff: Any) -> None:
    code, text = diff(train(tmp_path / "a"), train(tmp_path / "b", FlipBit(6)))
    assert code == 1
    assert "Bit-equal over 6 windows. In window 7, step 7:" in text
    assert "  loss: " in text
    assert "Likely cause: unknown: nothing that is recorded differs before it." in text
    assert "The checkpoints of step 4 are equal" in text


@pytest.mark.e2e
def test_other_processes_are_no_surprise(tmp_path: Path, diff: Any) -> None:
    b = tmp_path / "b"
    run_ranks(2, lambda rank: str(train(b, split_batches=True, strategy="ddp")))
    code, text = diff(train(tmp_path / "a", split_batches=True), b, "--replay")
    assert code == 1
    assert "Likely cause: environment: strategy: single in A, ddp in B; processes: 1 in A" in text
    assert "On another number of processes a run is equal to rounding only" in text
    assert "Replayed: Runs on as many processes can be compared" in text


def test_a_flip_after_the_last_step_is_found(tmp_path: Path, diff: Any) -> None:
    code, text = diff(train(tmp_path / "a"), train(tmp_path / "b", FlipBit(STEPS)))
    assert code == 1
    assert "Bit-equal over 12 windows, but not in what was saved." in text
    assert "Likely cause: parameters: `2.weight` differs in 1 of 8 elements" in text


def test_a_longer_run_is_equal_as_far_as_both_go(tmp_path: Path, diff: Any) -> None:
    a, b = train(tmp_path / "a", max_steps=8), train(tmp_path / "b", every=None)
    code, text = diff(a, b)
    assert code == 0
    assert "Bit-equal over 8 windows." in text
    assert "B goes on for 4 windows." in text
    assert "The checkpoints" not in text


def test_what_cannot_be_compared_is_said(tmp_path: Path, diff: Any) -> None:
    a = train(tmp_path / "a", every=None)
    assert "holds no journal" in diff(a, tmp_path / "none")[1]
    assert "are one run. Pass two." in diff(a, tmp_path / "b" / ".." / "a")[1]
    train(tmp_path / "many", every=None, new_run=True)
    train(tmp_path / "many", every=None, new_run=True)
    code, text = diff(a, tmp_path / "many")
    assert code == 1
    assert f"`{tmp_path / 'many'}` holds several runs" in text
    late = tmp_path / "late"
    late.mkdir()
    header, *windows = (a / "journal.txt").read_text().splitlines(keepends=True)
    (late / "journal.txt").write_text(header.replace('"after": 0', '"after": 6') + windows[6])
    (a / "journal.txt").write_text("".join([header, *windows[:6]]))
    text = diff(a, late)[1]
    assert "no window in common" in text
    assert "has 7 to 7" in text
    (late / "journal.txt").write_text(header)
    assert "has no window yet" in diff(a, late)[1]


def test_a_broken_checkpoint_does_not_hide_where_runs_part(tmp_path: Path, diff: Any) -> None:
    a, b = train(tmp_path / "a"), train(tmp_path / "b", FlipBit(8))
    weights = b / "checkpoints" / "step-00000008" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    code, text = diff(a, b)
    assert code == 1
    assert "Bit-equal over 8 windows." in text
    assert "The checkpoints cannot be compared. " in text


SCRIPT = """
import sys
from functools import partial
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from trainkit import Trainer
from trainkit.callbacks import Checkpoint

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(float(sys.argv[2])), nn.Linear(8, 1))
inputs = torch.randn(24, 6)
inputs[17] += float(sys.argv[3])
trainer = Trainer(max_steps=6, output_dir=sys.argv[1], callbacks=[Checkpoint(every_n_steps=2)])
trainer.fit(
    model,
    DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4, shuffle=True),
    optimizer=partial(torch.optim.AdamW, lr=1e-2),
    loss_fn=nn.MSELoss(),
)
"""


@pytest.mark.e2e
@pytest.mark.usefixtures("warm_programs")
def test_a_replay_names_the_first_module_and_the_rows_that_differ(
    tmp_path: Path, diff: Any, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    runs = {"a": ("0.1", "0"), "dropout": ("0.4", "0"), "row": ("0.1", "1")}
    folders = {name: str(tmp_path / name) for name in runs} | {"row": "s3://bucket/row"}
    programs = [
        subprocess.Popen([sys.executable, script, folders[name], *arguments])
        for name, arguments in runs.items()
    ]
    assert [program.wait() for program in programs] == [0, 0, 0]

    code, text = diff(tmp_path / "a", tmp_path / "dropout", "--replay")
    assert code == 1
    assert "Bit-equal over 0 windows. In window 1, step 1:" in text
    assert "Likely cause: model: Dropout(p=0.1, inplace=False): 1 in A, 0 in B" in text
    assert "Also: command: `0.1`: 1 in A, 0 in B; `0.4`: 0 in A, 1 in B." in text
    named = "The batches are equal, the first module whose output differs is `1` (Dropout)"
    assert f"Replayed: {named} in micro-batch 0, on process 0." in text

    monkeypatch.setenv("TRAINKIT_STORAGE_DIR", str(tmp_path / "another"))  # which lacks the run
    _, text = diff(tmp_path / "a", "s3://bucket/row", "--replay")
    found = (
        r"The batches themselves differ: rows \[\d\] \(samples \[17\]\) in micro-batch 0 have other"
    )
    assert re.search(found, text), text


def _replayed(indices: list[int], values: list[list[float]], place: Path) -> dict[str, Any]:
    save_file({"batch.0": torch.tensor(values)}, place)
    batch = {"count": len(indices), "indices": indices, "data": ["batch.0"]}
    return {"micro_batches": [batch], "parameters": {}, "modules": []}


def test_rows_of_other_samples_are_named(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    one = _replayed([4, 7, 9], [[1.0], [math.nan], [3.0]], a)
    two = _replayed([4, 8, 9], [[1.0], [math.nan], [3.0]], b)
    said = [*_differences(one, two, a, b)]
    assert said == [
        "The batches themselves differ: in micro-batch 0 are the samples [4, 7, 9] in A, "
        "[4, 8, 9] in B"
    ]
    two = _replayed([4, 7, 9], [[1.0], [math.nan], [4.0]], b)
    (last,) = _differences(one, two, a, b)
    assert last.endswith("rows [2] (samples [9]) in micro-batch 0 have other values in `batch.0`")
