"""`trainkit checkpoint` shows what is there, and exits with 1 where something is wrong."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.toys import RUN, save_alone
from trainkit.basics.lock import RunLock
from trainkit.checkpoint import CheckpointStore
from trainkit.checkpoint.format.tensor_location import ShardRegion, StoredTensor
from trainkit.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
NO_TORCH = """
import sys
from trainkit.cli.main import main
code = main(sys.argv[1:])
assert not {"torch", "numpy", "safetensors"} & set(sys.modules)
sys.exit(code)
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the directory of a run with the steps 10, 20 and 30."""
    store = CheckpointStore(tmp_path / "checkpoints")
    for step in (10, 20, 30):
        model = {"weight": torch.full((2, 3), float(step)), "bias": torch.zeros(4)}
        parts = {"model": model, "counters": {"step": step, "epoch": 1}}
        save_alone(store, step, parts, metrics={"eval/accuracy": 1 / step})
    store.pin(20)
    return tmp_path


def damage(run: Path, step: int = 20) -> None:
    file = run / "checkpoints" / f"step-{step:08d}" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def command(*arguments: object) -> int:
    return main(["checkpoint", *(str(argument) for argument in arguments)])


def folders(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir() if path.is_dir())


def test_ls_lists_steps_and_pins(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for directory in (run, run / "checkpoints"):
        assert command("ls", directory) == 0
        lines = capsys.readouterr().out.splitlines()
        titles = ["STEP", "CREATED", "SIZE", "FILES", "PROCESSES", "eval/accuracy", "FOLDER"]
        assert lines[0].split() == titles
        assert [line.split()[6] for line in lines[1:]] == ["0.1", "0.05", "0.0333333"]
        assert [line.split()[8:] for line in lines[1:]] == [[], ["pinned"], ["last"]]
        assert [line.split()[0] for line in lines[1:]] == ["10", "20", "30"]
        assert [line.endswith("step-00000020  pinned") for line in lines[1:]] == [
            False,
            True,
            False,
        ]


def test_ls_says_where_nothing_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("ls", tmp_path) == 0
    assert capsys.readouterr().out == f"There is no checkpoint in `{tmp_path}`.\n"


def test_ls_names_what_is_broken(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "checkpoints" / "step-00000010" / "manifest.json").write_text("{")
    (run / "checkpoints" / "step-00000030" / "counters.json").unlink()
    assert command("ls", run) == 1
    output = capsys.readouterr().out
    assert "BROKEN step-00000010: " in output
    assert "`counters.json` is missing" in output


def test_verify_finds_a_bit(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("verify", run) == 0
    assert capsys.readouterr().out.splitlines() == [
        "ok step-00000010",
        "ok step-00000020",
        "ok step-00000030",
    ]
    damage(run)
    assert command("verify", run) == 1
    assert "BROKEN step-00000020: " in capsys.readouterr().out
    assert command("verify", run / "checkpoints" / "step-00000020") == 1
    assert "`model.safetensors`: its content has changed" in capsys.readouterr().out
    assert command("verify", run / "checkpoints" / "step-00000030") == 0


def test_show_names_tensors_and_values(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("show", run) == 0
    output = capsys.readouterr().out
    assert f"step 30, made 20" in output  # noqa: F541
    assert f"of the run {RUN!r}" in output
    rows = [line.split("  ") for line in output.splitlines()]
    cells = [[cell.strip() for cell in row if cell] for row in rows]
    assert ["model", "weight", "F32", "[2, 3]", "24 B"] in cells
    assert ["step", "30"] in cells
    assert any(row[0] == "metrics.eval/accuracy" for row in cells)


def test_what_a_terminal_would_obey_is_shown_and_not_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_alone(CheckpointStore(tmp_path), 1, {"x": {"\x1b[2Jname": torch.ones(1)}})
    assert command("show", tmp_path) == 0
    output = capsys.readouterr().out
    assert "\x1b" not in output
    assert r"\x1b[2Jname" in output


def test_diff_names_what_differs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, last = (run / "checkpoints" / f"step-000000{step}" for step in (10, 30))
    assert command("diff", first, first) == 0
    assert capsys.readouterr().out == "The checkpoints hold the same.\n"
    assert command("diff", first, last) == 1
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[:2] for row in rows[1:]] == [
        ["metadata", "metrics.eval/accuracy"],
        ["model", "weight"],
        ["counters", "step"],
    ]
    assert rows[-1] == ["counters", "step", "10", "30"]


def test_diff_compares_what_runs_hold_and_not_who_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts: dict[str, Any] = {"model": {"weight": torch.ones(2)}, "counters": {"step": 3}}
    for name in "abc":
        more = {"process-00001": {"random": 1}} if name == "c" else {}
        save_alone(CheckpointStore(tmp_path / name), 3, parts | more, run_id=name)
    assert command("diff", tmp_path / "a", tmp_path / "b") == 0
    capsys.readouterr()
    assert command("diff", tmp_path / "a", tmp_path / "c") == 1
    row = capsys.readouterr().out.splitlines()[1]
    assert row.split() == ["process-00001", "(all", "of", "it)", "-", "1", "values"]


def test_diff_and_show_refuse_what_is_broken(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(run)
    broken = run / "checkpoints" / "step-00000020"
    assert command("show", broken) == 1
    assert command("diff", broken, run) == 1
    assert capsys.readouterr().err.count("`model.safetensors`: its content has changed") == 2


def test_prune_removes_what_no_option_keeps(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("prune", run, "--keep-last", 1, "--dry-run") == 0
    assert capsys.readouterr().out == "would remove step-00000010\n"
    assert len(folders(run)) == 3
    assert command("prune", run, "--keep-last", 1, "--keep-best", "eval/accuracy:max:1") == 0
    assert capsys.readouterr().out == "Nothing to remove.\n"
    assert command("prune", run / "checkpoints", "--keep-last", 1) == 0
    assert folders(run) == ["step-00000020", "step-00000030"]


def test_prune_thins_out_weights_alone_too_and_keeps_what_the_run_kept(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    about = {"keep_best": ["eval/accuracy", "max", 2], "weights_only": True}
    weights = CheckpointStore(run / "weights")
    for step, value in ((11, 0.5), (12, 0.3), (13, 0.4), (14, 0.2)):
        model = {"model": {"x": torch.ones(1)}}
        save_alone(weights, step, model, metrics={"eval/accuracy": value}, **about)

    def kept() -> list[str]:
        return [f.name[-2:] for f in sorted(weights.directory.iterdir())]

    assert command("prune", run, "--keep-last", 1, "--dry-run") == 0
    told = "would remove step-00000010\nwould remove weights/step-00000012\n"
    assert capsys.readouterr().out == told
    assert kept() == ["11", "12", "13", "14"]
    assert command("prune", run, "--keep-last", 1) == 0
    assert kept() == ["11", "13", "14"]  # the best two of the run, and the newest
    assert command("prune", run, "--keep-last", 1, "--keep-best", "eval/accuracy:min:1") == 0
    assert (kept(), folders(run)) == (["14"], ["step-00000020", "step-00000030"])


def test_prune_does_not_touch_the_directory_of_a_run_under_way(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with RunLock(run):
        assert command("prune", run, "--keep-last", 1) == 1
    assert "is locked by process" in capsys.readouterr().err
    assert len(folders(run)) == 3


@pytest.mark.parametrize(
    "arguments",
    [
        ["ls"],
        ["burn", "."],
        ["prune", "."],
        ["prune", ".", "--keep-last", "many"],
        ["prune", ".", "--keep-last", "1", "--keep-best", "loss"],
        ["prune", ".", "--keep-last", "1", "--keep-best", "loss:low:1"],
    ],
)
def test_arguments_that_make_no_sense_exit_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command(*arguments)
    assert caught.value.code == 2


@pytest.mark.parametrize("arguments", [["ls"], ["verify"], ["show"], ["prune", "--keep-last", "1"]])
def test_a_directory_that_is_not_there_is_an_error(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *options = arguments
    assert command(name, tmp_path / "none", *options) == 1
    assert "is no folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["ls"], ["verify"], ["show"], ["prune", "--keep-last", "1", "--dry-run"]],
    ids=lambda arguments: arguments[0],
)
def test_no_command_imports_torch(run: Path, arguments: list[str]) -> None:
    name, *options = arguments
    command_line = [sys.executable, "-c", NO_TORCH, "checkpoint", name, str(run), *options]
    subprocess.run(command_line, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def test_a_reader_that_has_seen_enough_gets_no_traceback(run: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-m", "trainkit.cli", "checkpoint", "show", str(run)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""


def sharded(run: Path, whole: dict[str, torch.Tensor], shards: int) -> Path:
    """Save the state in row shards, as so many processes would."""
    parts: dict[str, Any] = {"model": {}}
    for name, tensor in whole.items():
        pieces, begin, places = tensor.chunk(shards), 0, []
        for rank, piece in enumerate(pieces):
            part = f"model-shard-{rank:05d}"
            parts.setdefault(part, {})[name] = piece
            offsets = (begin, *(0 for _ in piece.shape[1:]))
            places.append((part, ShardRegion(offsets, tuple(piece.shape))))
            begin += piece.shape[0]
        stored = StoredTensor(name, "F32", tuple(tensor.shape), tuple(places))
        parts["model"][name] = stored
    return save_alone(CheckpointStore(run / "checkpoints"), 40, parts)


def test_sharded_tensors_are_shown_and_compared_as_whole_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {"weight": torch.randn(5, 3), "bias": torch.arange(4.0)}
    whole = save_alone(CheckpointStore(tmp_path / "whole"), 40, {"model": model})
    three = sharded(tmp_path, model, 3)
    assert command("show", three) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    shown = [row for row in rows if row[:1] == ["model"]]
    assert [row[:5] for row in shown] == [
        ["model", "weight", "F32", "[5,", "3]"],
        ["model", "bias", "F32", "[4]", "16"],
    ]
    assert not [row for row in rows if row and row[0].startswith("model-shard")]
    assert command("diff", whole, three) == 0
    model["bias"][3] = 9.0
    assert command("diff", sharded(tmp_path / "other", model, 2), three) == 1
    assert capsys.readouterr().out.count("bias") == 1
    assert command("ls", tmp_path) == 0
    assert command("verify", tmp_path) == 0
    shard = three / "model-shard-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    assert command("verify", tmp_path) == 1
    assert "`model-shard-00001.safetensors`" in capsys.readouterr().out


def test_a_sharded_checkpoint_whose_shards_do_not_fit_cannot_be_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    region = ShardRegion((0,), (3,))
    model = {"w": StoredTensor("w", "F32", (4,), (("shard", region),))}
    parts = {"model": model, "shard": {"w": torch.zeros(3)}}
    path = save_alone(CheckpointStore(tmp_path), 1, parts)
    assert command("show", path) == 1
    assert "`model.json`: trainkit did not write it so: `w`: its shards leave a gap" in (
        capsys.readouterr().err
    )
