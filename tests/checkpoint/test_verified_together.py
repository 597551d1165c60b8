"""Processes that resume compare a checkpoint together; where one finds it broken, all go back."""

from pathlib import Path

import pytest

from tests.helpers.ranks import run_ranks
from tests.helpers.toys import fit, make_trainer
from trainkit.callbacks import Checkpoint
from trainkit.checkpoint import CheckpointStore
from trainkit.checkpoint.checkpoint import open_share
from trainkit.checkpoint.io.reading import HashedFile
from trainkit.distributed.world import World


def train(rank: int, folder: Path, resume: str | None) -> tuple[int, list[str]]:
    """Return the step after which the run was resumed, and the files whose digest was compared."""
    compared: list[str] = []
    check = HashedFile.check_digest

    def noting(file: HashedFile, expected: str) -> None:
        compared.append(file.name)
        check(file, expected)

    saving = Checkpoint(every_n_steps=2, keep_last=None)
    trainer = make_trainer(max_steps=4, output_dir=folder, callbacks=[saving])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HashedFile, "check_digest", noting)
        fit(trainer, resume=resume)
    entry = CheckpointStore(folder / "checkpoints").checkpoints()[-1]
    return entry.step, compared


@pytest.mark.e2e
def test_what_one_process_finds_broken_is_broken_for_all(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_ranks(2, train, tmp_path, None)
    for name in ("model.safetensors", "processes.bin"):
        newest = CheckpointStore(tmp_path / "checkpoints").checkpoints()[-1].path
        content = bytearray((newest / name).read_bytes())
        content[-1] ^= 1  # in a tensor: whoever does not compare it sees nothing
        (newest / name).write_bytes(content)
        capfd.readouterr()
        run_ranks(2, train, tmp_path, "must")
        assert "step-00000002` (step 2)" in capfd.readouterr().out


def test_each_file_is_compared_by_one_process_of_the_machine(tmp_path: Path) -> None:
    run_ranks(2, train, tmp_path, None)
    files = CheckpointStore(tmp_path / "checkpoints").checkpoints()[-1].manifest.files
    first, second = (compared for _, compared in run_ranks(2, train, tmp_path, "must"))
    tensors = {name for name in files if name.endswith(".safetensors")}
    assert tensors <= {*first, *second} >= files.keys()
    assert not tensors & set(first) & set(second)
    assert first.count("model.safetensors") + second.count("model.safetensors") == 1


@pytest.mark.e2e
@pytest.mark.parametrize(
    "places",
    [
        [(0, 2), (0, 2)],  # a starter that says LOCAL_RANK=0 everywhere
        [(0, 2), (1, 2), (0, 1)],  # machines of two processes and of one
        [(0, 8), (1, 8)],  # LOCAL_WORLD_SIZE of another job
        [(0, 2), (1, 2), (0, 2), (1, 2)],
    ],
)
def test_each_file_is_compared_whatever_a_starter_says(
    places: list[tuple[int, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_ranks(2, train, tmp_path, None)
    newest, compared = CheckpointStore(tmp_path / "checkpoints").checkpoints()[-1], set[str]()
    monkeypatch.setattr(HashedFile, "check_digest", lambda file, _: compared.add(file.name))
    for rank, (local_rank, local_size) in enumerate(places):
        world = World(rank=rank, local_rank=local_rank, size=len(places), local_size=local_size)
        open_share(newest.path, world).verify_rest()
    assert compared == newest.manifest.files.keys()
