"""Whether all machines see the folder that a run writes to."""

import ctypes
import os
import sys
from pathlib import Path

import pytest

from tests.helpers.ranks import RanksError, run_ranks
from tests.helpers.toys import fit, make_trainer
from trainkit import Accelerator, ProjectConfiguration
from trainkit.distributed import shared_folder
from trainkit.errors import ConfigError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mounts folders as Linux does")

_MOUNTS, _USERS = 0x20000, 0x10000000  # CLONE_NEWNS, CLONE_NEWUSER
_RECURSIVE, _PRIVATE = 1 << 14, 1 << 18  # MS_REC, MS_PRIVATE


def _alone_in(folder: Path) -> None:
    """Give this process a folder of its own under a path that others have too."""
    libc = ctypes.CDLL(None, use_errno=True)
    for flags in (_MOUNTS, _MOUNTS | _USERS):
        if libc.unshare(flags) == 0:
            break
    else:
        raise PermissionError("not permitted")
    assert libc.mount(b"none", b"/", None, _RECURSIVE | _PRIVATE, None) == 0
    assert libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, None) == 0


def _start(rank: int, folder: Path, shared: bool, kind: str) -> str:
    """Start on two machines of one process each; tell what is raised."""
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    if rank == 1 and not shared:
        shared_folder._SECONDS = 1.0  # it never comes
        _alone_in(folder)
    try:
        if kind == "trainer":
            fit(make_trainer(output_dir=folder / "out", max_steps=1))
        else:
            states = kind == "states"
            project = ProjectConfiguration(folder / "out", automatic_checkpoint_naming=states)
            Accelerator(cpu=True, project_config=project)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.e2e
@pytest.mark.parametrize("kind", ["trainer", "states"])
def test_a_folder_that_machines_do_not_share_is_refused(kind: str, tmp_path: Path) -> None:
    try:
        found = run_ranks(2, _start, tmp_path, False, kind)
    except RanksError as error:
        if "not permitted" in str(error):
            pytest.skip("nobody may have a folder of its own here")
        raise
    owner = "Trainer(output_dir" if kind == "trainer" else "Accelerator(project_dir"
    for told in found:
        assert f"`{owner}=...)` is `{tmp_path}/out`, but " in told, told
        assert "it must be on storage that all machines share" in told
    assert not list(tmp_path.rglob(".trainkit-*"))


@pytest.mark.parametrize(("kind", "shared"), [("trainer", True), ("states", True), ("logs", False)])
def test_a_folder_that_machines_share_is_taken(kind: str, shared: bool, tmp_path: Path) -> None:
    assert run_ranks(2, _start, tmp_path, shared, kind) == ["", ""]
    assert not list(tmp_path.rglob(".trainkit-*"))
