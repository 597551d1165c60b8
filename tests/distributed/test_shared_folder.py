"""Whether all machines see the folder that a run writes to."""

import os
from pathlib import Path

import pytest

from tests.helpers.ranks import run_ranks
from tests.helpers.toys import fit, make_trainer
from trainkit import Accelerator, ProjectConfiguration
from trainkit.distributed import shared_folder
from trainkit.errors import ConfigError


def _start(rank: int, folder: Path, shared: bool, kind: str) -> str:
    """Start on two machines of one process each; tell what is raised."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    shared_folder._SECONDS = 1.0
    place = folder / ("both" if shared else f"machine {rank}")
    place.mkdir(exist_ok=True)
    os.chdir(place)
    everywhere = Path("/proc/self/cwd/out")  # one path, which is a folder of its own on each
    try:
        if kind == "trainer":
            fit(make_trainer(output_dir=everywhere, max_steps=1))
        else:
            project = ProjectConfiguration(everywhere, automatic_checkpoint_naming=kind == "states")
            Accelerator(cpu=True, project_config=project)
    except ConfigError as error:
        return str(error)
    assert not list(folder.rglob(".trainkit-*"))
    return ""


@pytest.mark.parametrize("kind", ["trainer", "states"])
def test_a_folder_that_machines_do_not_share_is_refused(kind: str, tmp_path: Path) -> None:
    owner = "Trainer(output_dir" if kind == "trainer" else "Accelerator(project_dir"
    for told in run_ranks(2, _start, tmp_path, False, kind):
        assert told.startswith(f"`{owner}=...)` is `/proc/self/cwd/out`, but "), told
        assert "it must be on storage that all machines share" in told
    assert not list(tmp_path.rglob(".trainkit-*"))


@pytest.mark.parametrize(("kind", "shared"), [("trainer", True), ("states", True), ("logs", False)])
def test_a_folder_that_machines_share_is_taken(kind: str, shared: bool, tmp_path: Path) -> None:
    assert run_ranks(2, _start, tmp_path, shared, kind) == ["", ""]
