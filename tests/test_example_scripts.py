"""The examples on data of packages: they run without the data, in seconds, and do what they say."""

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gan import GAN, OPTIMIZERS, GANTrainer
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from vision import Images, mirror, read_bytes, read_parts, shift

from tests.helpers.callbacks import StopsAt
from tests.helpers.needs import late
from tests.helpers.scripts import ROOT, TRANSFORMERS, run_forked, run_program
from trainkit import Alternating
from trainkit.callbacks import Checkpoint

causal_lm = late("causal_lm")
EXAMPLES = ROOT / "examples"

# What each prints in the end, and only process 0 does.
LAST_LINES = {
    "chat_sft.py": r"loss of held-out answers: \d\.\d{4} before, \d\.\d{4} after",
    "finetune.py": r"linear model: accuracy [01]\.\d{4}",
    "multi_task.py": r"accuracy on held-out digits: 0\.\d{4}",
    "gan.py": r"of 1000, \d+ are the one drawn least, \d+ the one most",
    "vision.py": r"test accuracy: 0\.\d{4}",
}


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("name", "processes"),
    [("chat_sft.py", 2), ("finetune.py", 1), ("gan.py", 1), ("multi_task.py", 2), ("vision.py", 2)],
)
def test_the_example_runs(name: str, processes: int, tmp_path: Path) -> None:
    arguments = ("--tiny", "--output-dir", str(tmp_path))
    lines = run_forked(EXAMPLES / name, *arguments, size=processes).output.splitlines()
    assert re.fullmatch(LAST_LINES[name], lines[-1]), lines
    assert lines.count(lines[-1]) == 1
    assert (tmp_path / "metrics.jsonl").stat().st_size


@pytest.mark.e2e
def test_the_table_gives_the_same_figure_on_any_number_of_processes() -> None:
    alone, together = (
        run_forked(EXAMPLES / "tabular.py", size=processes).output.splitlines()[-1]
        for processes in (1, 2)
    )
    assert alone == together
    assert float(alone.removeprefix("accuracy: ")) > 0.95


@pytest.mark.e2e
def test_two_processes_have_the_losses_of_one() -> None:
    arguments = ("--tiny", "--steps", "4", "--settings", "1x1", "2x1")
    script = str(EXAMPLES / "compare_processes.py")
    *_, last = run_program(script, *arguments, imports=TRANSFORMERS).splitlines()
    assert last.startswith("2 processes, 1 thread each")
    assert float(last.split()[5]) < 1e-5


@pytest.mark.e2e
@pytest.mark.parametrize(
    "read", [lambda path: causal_lm.read_records(path, column="text"), read_parts]
)
def test_missing_data_are_named_with_the_command_that_fetches_them(
    read: Callable[[Path], object], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit, match="`make data` fetches"):
        read(tmp_path / "none")


def test_texts_are_read_from_lines_and_from_both_kinds_of_json(tmp_path: Path) -> None:
    contents = {
        "lines.txt": "one\n\ntwo\n",
        "list.json": json.dumps([{"body": "one"}, {"body": "two"}]),
        "named.json": json.dumps({"first": "one", "second": "two"}),
        "lines.jsonl": '{"body": "one"}\n{"body": "two"}\n',
    }
    for name, text in contents.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert causal_lm.read_records(tmp_path / name, "body") == ["one", "two"]
    with pytest.raises(SystemExit, match="has no 'text'"):
        causal_lm.read_records(tmp_path / "list.json", "text")


def test_blocks_are_consecutive_and_whole() -> None:
    blocks = causal_lm.Blocks(torch.arange(10), 4)
    assert len(blocks) == 2
    batch = blocks.__getitems__([1, 0])
    assert batch["input_ids"].tolist() == [[4, 5, 6, 7], [0, 1, 2, 3]]
    with pytest.raises(SystemExit, match="less than one block of 11"):
        causal_lm.Blocks(torch.arange(10), 11)


@pytest.mark.parametrize("packed", [False, True])
def test_files_of_mnist_are_read_packed_or_not(packed: bool, tmp_path: Path) -> None:
    image = bytes(range(6))
    data = bytes([0, 0, 8, 3]) + b"".join(n.to_bytes(4, "big") for n in (1, 2, 3)) + image
    if packed:
        (tmp_path / "some-ubyte.gz").write_bytes(gzip.compress(data))
    else:
        (tmp_path / "some-ubyte").write_bytes(data)
    assert read_bytes(tmp_path, "some-ubyte").tolist() == [[[0, 1, 2], [3, 4, 5]]]


def test_images_are_shifted_and_mirrored_by_chance_but_stay_the_same_images() -> None:
    torch.manual_seed(0)
    images = torch.zeros(200, 28, 28, dtype=torch.uint8)
    images[:, 10, 5] = 255
    places = {tuple(image.nonzero()[0].tolist()) for image in shift(images, by=2)}
    assert places == {(row, column) for row in range(8, 13) for column in range(3, 8)}
    sides = [int(image.nonzero()[0][1]) for image in mirror(images)]
    assert set(sides) == {5, 22}
    assert 70 < sides.count(5) < 130
    plain, classes = Images(images, torch.arange(200)).__getitems__([3, 1])
    assert plain.shape == (2, 1, 28, 28)
    assert (float(plain.min()), float(plain.max())) == (-1.0, 1.0)
    assert classes.tolist() == [3, 1]


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("name", "last_line"),
    [
        ("actor_critic.py", r"the pole stands for \d+\.\d moments before, \d+\.\d after"),
        ("muon.py", r"accuracy: 0\.\d{4} with Muon, 0\.\d{4} with AdamW alone"),
    ],
)
def test_the_example_of_several_optimizers_runs(name: str, last_line: str) -> None:
    lines = run_forked(EXAMPLES / name, "--epochs", "1").output.splitlines()
    assert re.fullmatch(last_line, lines[-1]), lines


def _train_gan(folder: Path, stop: int, resume: str | None = None) -> dict[str, Tensor]:
    torch.manual_seed(0)
    gan = GAN(width=8)
    callbacks = [StopsAt(stop), Checkpoint()]
    trainer = GANTrainer(max_epochs=2, callbacks=callbacks, output_dir=folder)
    data = TensorDataset(torch.rand(50, 64, generator=torch.Generator().manual_seed(1)))
    trainer.fit(
        gan,
        DataLoader(data, batch_size=8, shuffle=True),
        optimizer=Alternating(OPTIMIZERS, {"discriminator": 1, "generator": 1}),
        resume=resume,
    )
    return gan.state_dict()


@pytest.mark.e2e
def test_a_resumed_gan_ends_like_one_that_was_never_stopped(tmp_path: Path) -> None:
    whole = _train_gan(tmp_path / "whole", stop=12)
    _train_gan(tmp_path / "parts", stop=5)
    resumed = _train_gan(tmp_path / "parts", stop=12, resume="must")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_network_that_waits_for_its_turn_stays_as_it_is(tmp_path: Path) -> None:
    first = _train_gan(tmp_path / "1", stop=1)
    torch.manual_seed(0)
    start = GAN(width=8).state_dict()
    moved = {
        name for name, _ in GAN(8).named_parameters() if not first[name].cpu().equal(start[name])
    }
    assert {name.split(".")[0] for name in moved} == {"discriminator"}
