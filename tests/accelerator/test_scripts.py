"""Scripts written for Accelerate do the same under trainkit, to the last bit of their weights."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.accelerator.behaviours import SIDES, forget, start_apart
from tests.helpers.needs import late
from tests.helpers.ranks import run_ranks

theirs = late("accelerate.utils")
pytest.importorskip("trainkit.accelerate_compat")
SCRIPTS = Path(__file__).resolve().parent.parent / "accelerate_scripts"
NAMES = sorted(path.stem for path in SCRIPTS.glob("[a-z]*.py"))


def swapped(source: str) -> str:
    """Return a script with its import changed, as the documents say."""
    source = re.sub(
        r"^import accelerate$",
        "import trainkit.accelerate_compat as accelerate",
        source,
        flags=re.M,
    )
    return re.sub(
        r"^(\s*)from accelerate\b", r"\1from trainkit.accelerate_compat", source, flags=re.M
    )


def _run(rank: int, side: str, names: list[str], folder: Path) -> dict[str, Any]:
    """Return what each script does on this process; an error counts by its text."""
    warnings.simplefilter("ignore")
    start_apart(rank)
    # `end_training` of Accelerate ends the group too; the next script needs it.
    torch.distributed.destroy_process_group = lambda *groups: None
    results = {}
    for name in names:
        forget(side)
        path = SCRIPTS / f"{name}.py"
        source = path.read_text()
        code = compile(swapped(source) if side == "trainkit" else source, str(path), "exec")
        place = folder / side / name
        place.mkdir(parents=True, exist_ok=True)
        namespace: dict[str, Any] = {"__name__": f"script_{name}"}
        try:
            exec(code, namespace)
            results[name] = namespace["main"](str(place))
        except Exception as error:
            results[name] = f"raises {type(error).__name__}: {error}"
    return results


@pytest.mark.e2e
@pytest.mark.parametrize("size", [1, 2])
def test_scripts_stay_as_they_are(size: int, tmp_path: Path) -> None:
    """All in one test: each other worker of pytest would start the processes again."""
    theirs, ours = (run_ranks(size, _run, side, NAMES, tmp_path) for side in SIDES)
    assert "raises" not in str(theirs)
    for name in NAMES:
        assert [rank[name] for rank in ours] == [rank[name] for rank in theirs], name
